"""One page of the paper's serving experiments: what ``bench_paper.py`` measured beside what the paper states.

    python benchmark/serving/report_paper.py results/h100_paper.json results/h200_paper.json
    python benchmark/serving/report_paper.py RESULT.json --out benchmark/results/paper.md

A result is a run: one GPU, one model, some caches and experiments. Ratios are taken within a run. Experiments that no
run has are left out. Plots go into ``figures`` beside the page and need matplotlib: ``pip install
'sglang-oscar[plots]'``. The same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import paper_plots
import typer
from paper_figures import FIGURE4_BATCH, FIGURE4_CONTEXT, FIGURE5_REQUESTS, GPU
from paper_loads import EXPERIMENTS, STEPS
from paper_results import BF16, FP8, Result, read
from paper_tables import step_table, table, throughput_table

OUT = Path(__file__).resolve().parents[1] / "results" / "paper.md"

INTRODUCTION = f"""# The paper's serving experiments

The experiments of section 5.4 of the OSCAR paper ([arXiv 2605.17757](https://arxiv.org/abs/2605.17757)), measured with
this project, and the figures that the paper states for them. Made by `python benchmark/serving/report_paper.py` from
the results below.

* **U** is tokens per second of a user, the inverse of the median time between tokens of a request; **G** is tokens per
  second of a GPU, all generated tokens over the time from the first request to the last answer.
* **/ BF16** and **/ FP8** say how many times faster a cache is than the faster one of that run's BF16 caches, and of
  its FP8 caches: stock SGLang with FlashInfer, and with FlashAttention-3, as far as they were measured. A dash is what
  was not.
* **At once** is how many requests of those sent were decoded together; the others waited for room.
* **Cached** is the share of prompt tokens that came from the prefix cache. Prompts of a load whose prefix cache is
  *hit* were sent once before; those that do not fit together push each other out, and are computed again.
* Rows of **the paper** are of one {GPU}. They stand beside loads that are exactly the paper's, and where a run
  leaves out layers, only their ratios do."""

TITLES = {
    STEPS: "Table 8: where a step of decoding goes",
    "table9": "Table 9: 32 requests of 8,192 tokens",
    "figure4": "Figure 4: decoding behind long prompts that were sent before",
    "figure5": "Figure 5: more and more requests of 100,000 tokens",
    "figure6": "Figure 6: throughput by prefix cache",
}


def stated(ratios: dict[int, float]) -> str:
    """Ratios by what they are at, in words."""
    return ", ".join(f"{ratio} at {at:,}" for at, ratio in ratios.items())


REMARKS = {
    STEPS: """Milliseconds by kind of kernel, from SGLang's profiler; "log" is a step of the same requests by SGLang's
log, without the profiler. Prompts were computed before. The paper does not state the context; 8,192 tokens are our
reading: 32 requests of that length fit a card of 80 GB in BF16 and 64 do not, as in its table, and 17.0 ms read 32 of
them at 2.3 TB/s. "Store" writes keys and values, in INT2 rotated and quantized: the paper's "Quant" for OSCAR; for BF16
it has no such column. The paper's parts add up to its total, so it states no time in which no kernel runs; our total
has it in. Parts count only what they add where kernels overlap. A load that does not fit the cache at once is not
measured.""",
    "table9": "Answers of 1,024 tokens; the prefix cache is empty before. Naive INT2, QuaRot-INT2 and Saw-INT4 are\n"
    "the paper's alone.",
    "figure4": "The paper states OSCAR's speed of decoding over BF16's of one request by tokens of context\n("
    + "; ".join(f"{shape}: {stated(ratios)}" for shape, ratios in FIGURE4_CONTEXT.items())
    + "), and of throughput behind 100,000 tokens by requests\n("
    + "; ".join(f"{shape} with FP8 weights on eight GPUs: {stated(ratios)}" for shape, ratios in FIGURE4_BATCH.items())
    + "). Its other bars are a picture.",
    "figure5": f"The prefix cache is empty before. The paper states no numbers: with OSCAR throughput goes on growing\n"
    f"up to {FIGURE5_REQUESTS} requests on one GPU.",
    "figure6": "Without prefix cache (off), with one that is empty before (cold), and with prompts that were sent\n"
    "before (hit). The paper's figure is a picture without numbers in the text.",
}


def page(results: list[Result], figures: dict[tuple[str, str], str]) -> Iterator[str]:
    """The page, line by line.

    Args:
        results: the runs, with names that differ.
        figures: plots by run and experiment, relative to the page.
    """
    yield from (INTRODUCTION, "", "## Runs", "")
    yield from runs(results)
    yield from ("", "## What differs from the paper", "")
    yield from differences(results)
    for experiment, title in TITLES.items():
        having = [result for result in results if result.modes(experiment)]
        if having:
            yield from ("", f"## {title}", "", REMARKS[experiment])
        for result in having:
            yield from ("", f"### {title.partition(':')[0]}, {result.name}: {described(result)}", "")
            if (result.name, experiment) in figures:
                yield from (f"![{title}]({figures[result.name, experiment]})", "")
            yield from step_table(result) if experiment == STEPS else throughput_table(result, experiment)


def described(result: Result) -> str:
    """Model and GPU of a run."""
    return f"{result.facts['shape']} on {result.gpu}"


def runs(results: list[Result]) -> Iterator[str]:
    """What each run is, and its command."""
    head = ["run", "GPU", "model", "layers", "weights", "SGLang", "PyTorch", "Triton", "Python"]
    body = []
    for result in results:
        versions = [str(result.facts[key]) for key in ("sglang", "torch", "triton", "python")]
        weights = "random" if result.random_weights else "the model's"
        body.append([f"`{result.name}`", result.gpu, result.model, result.depth, weights, *versions])
    yield from table(head, body)
    for result in results:
        remark = f" ({result.facts['remark']})" if "remark" in result.facts else ""
        yield from ("", f"`{result.name}`{remark}:", "", "```bash", result.facts["command"], "```")


def differences(results: list[Result]) -> Iterator[str]:
    """Bullets: how these runs, which the table above tells apart, are not what the paper did."""
    gpus = sorted({result.gpu for result in results})
    own = [gpu for gpu in gpus if "H100" in gpu and "80GB" in gpu]
    others = [gpu for gpu in gpus if gpu not in own]
    yield f"* **GPU.** The paper's is one {GPU}, eight for GLM-4.7-FP8."
    if others:
        yield f"  Times and tokens per second of {', '.join(others)} are not comparable with it; ratios are, with care."
    if own:
        yield f"  {', '.join(own)} is the paper's kind; clocks and power limit are not stated there."
    yield "* **Software.** The paper has an SGLang of its own, of a release that it does not name. Here: stock SGLang"
    yield "  of the release above; INT2 comes from this plugin."
    if any(result.random_weights for result in results):
        yield "* **Weights** that are random have the model's shape; they do not change what a step costs. Accuracy is"
        yield "  no part of this page."
    if any(result.rows.keys() - {*BF16, *FP8, "exact"} for result in results):
        yield "* **Rotations** of INT2 are Hadamard matrices in place of fitted ones; rows, bytes and attention are the"
        yield "  same."
    yield "* **Prompts** are random token ids, from SGLang's load generator; the paper does not say what it sends."
    if not all(result.whole for result in results):
        yield "* **Layers.** Embedding, logits and the host's work per step do not shrink with the layers, so ratios of"
        yield "  runs with some of them are not quite those of the whole model."
    if found := ", ".join(f"`{result.name}`" for result in results if shortened(result)):
        yield f"* **Loads** of {found} are not all the paper's: see tokens of prompts and answers in the tables."


def shortened(result: Result) -> bool:
    """Whether a run has loads that are not the paper's, as a smoke test has."""
    return any(load not in loads for name, loads in EXPERIMENTS.items() for load in result.loads(name))


def write_page(paths: list[Path], out: Path) -> None:
    """Read results, draw their plots and write the page.

    Args:
        paths: results of ``bench_paper.py``, in the order of the page.
        out: the page; plots go into ``figures`` beside it.

    Raises:
        ValueError: a file is no result, or two have one name.
        SystemExit: matplotlib is not installed.
    """
    results = [read(path) for path in paths]
    names = [result.name for result in results]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several results are named {', '.join(twice)}: names tell runs and plots apart")
    figures = {}
    for result in results:
        for experiment in EXPERIMENTS:
            drawn = paper_plots.draw(result, experiment, out.parent / "figures") if result.modes(experiment) else None
            if drawn:
                figures[result.name, experiment] = drawn.relative_to(out.parent).as_posix()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(page(results, figures)) + "\n", encoding="utf-8")


def main(
    results: Annotated[list[Path], typer.Argument(help="of bench_paper.py", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="the page; plots go into figures beside it")] = OUT,
) -> None:
    """Write the page."""
    try:
        write_page(results, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
