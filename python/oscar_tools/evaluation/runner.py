"""Methods x benchmarks x seeds on one model: servers are started only for what is not done yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from oscar_rotation.model_table import ModelSettings
from oscar_tools.calibration.dump_driver import server_environment
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.model_files import load_tokenizer
from oscar_tools.calibration.weight_files import file_digest, model_files
from oscar_tools.evaluation.answers import Answers
from oscar_tools.evaluation.benchmarks import BENCHMARKS, Benchmark
from oscar_tools.evaluation.harness import BenchmarkRun, check_harness, finished, run, task_config
from oscar_tools.evaluation.methods import Method, contents
from oscar_tools.evaluation.ruler import write_niah
from oscar_tools.evaluation.same_task import RESULT, check_same_task
from oscar_tools.evaluation.server_facts import ServerFacts, ask
from oscar_tools.local_server import LocalServer, serve

NIAH_ROWS = 100


@dataclass(frozen=True)
class RunningServer:
    """A server that runs: its base address and what it says of itself."""

    url: str
    facts: ServerFacts


@dataclass(frozen=True)
class Evaluation:
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
        running: a server that runs already, instead of starting any; then there is one method
            (:func:`oscar_tools.evaluation.methods.running_method`).
    """

    settings: ModelSettings
    folder: Path
    benchmarks: tuple[str, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    local: dict[str, Path] = field(default_factory=dict)
    limit: int | None = None
    server_args: tuple[str, ...] = ()
    running: RunningServer | None = None

    @cached_property
    def model(self) -> dict[str, Any]:
        """What tells the model from others of its name.

        Raises:
            OSError: a file of it cannot be read.
        """
        return model_files(self.settings.model)

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

    def run_of(
        self,
        benchmark: str,
        method: Method,
        seed: int,
        server: RunningServer | None = None,
        local: Path | None = None,
    ) -> BenchmarkRun:
        """One run.

        Args:
            benchmark, method, seed: which.
            server: that is asked.
            local: where its data set is read from, as :func:`data_source` says.

        Raises:
            DataError: a local data set is not there.
            OSError: a rotation file, or a file of the model, cannot be read.
        """
        given = self.local.get(benchmark)
        if given is not None and not given.is_file():
            raise DataError(f"{given}: no such file")
        made: dict[str, Any] = {
            "args": method.server_args(self.settings, self.server_args),
            "env": contents(method.env),
        }
        # Nobody here knows how a running server was made; it says what answers depend on.
        depends = made if self.running is None else {"facts": self.running.facts.to_json()}
        depends |= {"model": self.model, "data": None if given is None else file_digest(given)}
        url, facts = ("", {}) if server is None else (server.url, server.facts.to_json())
        folder = self.run_folder(benchmark, method.name, seed)
        return BenchmarkRun(BENCHMARKS[benchmark], self.settings, url, seed, folder, local, self.limit, depends, facts)


def check_earlier_runs(evaluation: Evaluation) -> None:
    """Refuse an evaluation whose folder holds runs of its methods and benchmarks with other settings.

    Interrupted runs would be continued, and finished ones counted: also those of seeds that are not asked for, since
    tables show them.

    Raises:
        DataError: a local data set is not there.
        HarnessError: naming the folder and the first setting that differs.
        OSError: a rotation file, or a file of the model, cannot be read.
    """
    for method in evaluation.methods:
        for name in evaluation.benchmarks:
            folder = evaluation.run_folder(name, method.name, 0).parent
            for run_folder in sorted(folder.glob("seed*")):
                number = run_folder.name.removeprefix("seed")
                if not number.isdigit():
                    continue
                # That there is a local file is all that counts here: of which content, the run says.
                local = run_folder if name in evaluation.local or BENCHMARKS[name].context is not None else None
                check_same_task(run_folder, task_config(evaluation.run_of(name, method, int(number), local=local)))


def evaluate(evaluation: Evaluation, say: Callable[[str], None] = print) -> None:
    """Run what is missing; every finished run is kept, an interrupted one continues where it stopped.

    Raises:
        DataError: a data set cannot be had.
        HarnessError: the harness is missing or failed, or an earlier run in the same folder is of other settings.
        OSError: a rotation file, or a file of the model, cannot be read.
        ServerFailedError: a server did not start or ended.
    """
    check_earlier_runs(evaluation)
    for method in evaluation.methods:
        pending = evaluation.pending(method)
        runs = len(evaluation.benchmarks) * len(evaluation.seeds)
        say(f"{method.title}: {runs - len(pending)} runs done, {len(pending)} to do")
        if not pending:
            continue
        check_harness()
        sources = {name: data_source(evaluation, BENCHMARKS[name]) for name in dict(pending)}
        with ExitStack() as stack:
            server = evaluation.running or started(stack.enter_context(method_server(evaluation, method)).url, method)
            for name, seed in pending:
                result = run(evaluation.run_of(name, method, seed, server, sources[name]))
                answers = Answers(**result["answers"])
                score = f"{result['score']:.2f}" if answers.answered else "no answer"
                say(f"{method.title}: {BENCHMARKS[name].title} seed {seed}: {score} ({answers})")


def started(url: str, method: Method) -> RunningServer:
    """A server that was started for a method, asked what it is.

    Raises:
        HarnessError: its cache is not what the method is named for.
    """
    server = RunningServer(url, ask(url))
    server.facts.check(method.group_size is not None, method.title)
    return server


def data_source(evaluation: Evaluation, benchmark: Benchmark) -> Path | None:
    """The local file a benchmark is read from: the given one, or a generated one for RULER-NIAH; None for the hub."""
    if benchmark.name in evaluation.local or benchmark.context is None:
        return evaluation.local.get(benchmark.name)
    tokenizer = load_tokenizer(evaluation.settings)
    rows = evaluation.limit or NIAH_ROWS
    path = evaluation.folder / f"{benchmark.name}_{rows}.jsonl"
    return write_niah(path, benchmark.context, rows, lambda text: len(tokenizer.encode(text)))


def method_server(evaluation: Evaluation, method: Method) -> AbstractContextManager[LocalServer]:
    """A server of the evaluation's model with a method, its log in the evaluation's folder."""
    evaluation.folder.mkdir(parents=True, exist_ok=True)
    log = evaluation.folder / f"server_{method.name}.log"
    args = method.server_args(evaluation.settings, evaluation.server_args)
    return serve(evaluation.settings.model, log, args, server_environment(evaluation.settings, method.env))


def scores_of(
    folder: Path, benchmarks: Iterable[str], method: str, seeds: Sequence[int] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Finished runs of a method: benchmark -> results, by seed; all seeds by default.

    Raises:
        HarnessError: one was left by a release that did not count answers.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for benchmark in benchmarks:
        results = []
        for path in sorted((folder / f"_eval_{benchmark}_{method}").glob(f"seed*/{RESULT}")):
            result = finished(path)
            if seeds is None or result["seed"] in seeds:
                results.append(result)
        if results:
            found[benchmark] = sorted(results, key=lambda result: result["seed"])
    return found
