"""Methods x benchmarks x seeds on one model: servers are started only for what is not done yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_rotation.model_table import ModelSettings
from sglang_oscar.calibration.dump_driver import server_environment
from sglang_oscar.calibration.model_files import load_tokenizer
from sglang_oscar.evaluation.benchmarks import BENCHMARKS, Benchmark
from sglang_oscar.evaluation.harness import RESULT, RunRequest, check_harness, run
from sglang_oscar.evaluation.methods import Method
from sglang_oscar.evaluation.ruler import write_niah
from sglang_oscar.local_server import LocalServer, serve

NIAH_ROWS = 100


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate.

    Attributes:
        settings: of the model.
        folder: results go to ``<folder>/_eval_<benchmark>_<method>/seed<n>``.
        benchmarks: names.
        methods: servers to compare.
        seeds: of the sampling; one run each.
        local: benchmark -> local copy of its data set.
        limit: questions per benchmark at most.
        server_args: further flags for every server.
        url: a server that runs already, instead of starting any; then there must be one method.
    """

    settings: ModelSettings
    folder: Path
    benchmarks: tuple[str, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    local: dict[str, Path] = field(default_factory=dict)
    limit: int | None = None
    server_args: tuple[str, ...] = ()
    url: str | None = None

    def run_folder(self, benchmark: str, method: str, seed: int) -> Path:
        """Folder of one run."""
        return self.folder / f"_eval_{benchmark}_{method}" / f"seed{seed}"

    def pending(self, method: Method) -> list[tuple[str, int]]:
        """(benchmark, seed) of the runs that have no result yet."""
        return [
            (benchmark, seed)
            for benchmark in self.benchmarks
            for seed in self.seeds
            if not (self.run_folder(benchmark, method.name, seed) / RESULT).exists()
        ]


def evaluate(plan: EvaluationPlan, say: Callable[[str], None] = print) -> None:
    """Run what is missing; every finished run is kept, an interrupted one continues where it stopped.

    Raises:
        DataError: a data set cannot be had.
        HarnessError: the harness is missing or failed.
        ServerFailedError: a server did not start or ended.
        ValueError: several methods for one running server.
    """
    if plan.url and len(plan.methods) != 1:
        raise ValueError("a running server is one method; name it")
    for method in plan.methods:
        pending = plan.pending(method)
        say(f"{method.title}: {len(plan.benchmarks) * len(plan.seeds) - len(pending)} runs done, {len(pending)} to do")
        if not pending:
            continue
        check_harness()
        sources = {name: data_source(plan, BENCHMARKS[name]) for name in dict(pending)}
        with ExitStack() as stack:
            url = plan.url or stack.enter_context(method_server(plan, method)).url
            for name, seed in pending:
                folder = plan.run_folder(name, method.name, seed)
                request = RunRequest(BENCHMARKS[name], plan.settings, url, seed, folder, sources[name], plan.limit)
                result = run(request)
                say(f"{method.title}: {BENCHMARKS[name].title} seed {seed}: {result['score']:.2f}")


def data_source(plan: EvaluationPlan, benchmark: Benchmark) -> Path | None:
    """The local file a benchmark is read from: the given one, or a generated one for RULER-NIAH; None for the hub."""
    if benchmark.name in plan.local or benchmark.context is None:
        return plan.local.get(benchmark.name)
    tokenizer = load_tokenizer(plan.settings)
    rows = plan.limit or NIAH_ROWS
    path = plan.folder / f"{benchmark.name}_{rows}.jsonl"
    return write_niah(path, benchmark.context, rows, lambda text: len(tokenizer.encode(text)))


def method_server(plan: EvaluationPlan, method: Method) -> AbstractContextManager[LocalServer]:
    """A server of the plan's model with a method, its log in the plan's folder."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    log = plan.folder / f"server_{method.name}.log"
    args = method.server_args(plan.settings, plan.server_args)
    return serve(plan.settings.model, log, args, server_environment(plan.settings, method.env))


def scores_of(
    folder: Path, benchmarks: Iterable[str], method: str, seeds: Sequence[int] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Finished runs of a method: benchmark -> results, by seed; all seeds by default."""

    found: dict[str, list[dict[str, Any]]] = {}
    for benchmark in benchmarks:
        results = []
        for path in sorted((folder / f"_eval_{benchmark}_{method}").glob(f"seed*/{RESULT}")):
            result = json.loads(path.read_text(encoding="utf-8"))
            if seeds is None or result["seed"] in seeds:
                results.append(result)
        if results:
            found[benchmark] = sorted(results, key=lambda result: result["seed"])
    return found
