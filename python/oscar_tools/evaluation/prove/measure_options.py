"""Options of ``oscar prove`` that say what is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from oscar_cpu.server import has_gpu
from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.measures import MEASURES, Material, Measure
from oscar_tools.evaluation.prove.measures.recall import Recall
from oscar_tools.evaluation.prove.measures.retrieval import Retrieval
from oscar_tools.evaluation.prove.measures.tail_kl import TailKl
from oscar_tools.evaluation.prove.measures.tasks import Tasks
from oscar_tools.evaluation.prove.names import known
from oscar_tools.evaluation.prove.questions import QuestionFile, read_questions
from oscar_tools.evaluation.prove.sizes import ANSWER, RECALL, ROOM, SHORTEST, SIZES
from oscar_tools.evaluation.prove.texts import Texts


def _lengths(text: str, option: str) -> tuple[int, ...]:
    """The user's lengths, ascending; none to choose by the model."""
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not numbers with commas", param_hint=option) from None
    if lengths and lengths[0] < SHORTEST:
        raise typer.BadParameter(f"{lengths[0]} is below {SHORTEST}", param_hint=option)
    return lengths


@dataclass(frozen=True)
class MeasureOptions:
    """What is asked.

    Raises:
        typer.BadParameter: an unknown measure or size, or lengths that are no numbers or too short.
    """

    measure: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MEASURES)}; repeatable.")] = None
    size: Annotated[str | None, typer.Option(help="full or reduced; default: full with a GPU.")] = None
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, with commas; default: 1/4, 1/2 and all of the model's.")
    ] = ""
    documents: Annotated[
        int | None, typer.Option(min=1, help="Texts per length of tail-kl; default: 32, or 3 of the reduced size.")
    ] = None
    text: Annotated[
        Path | None, typer.Option(help=".jsonl (text or messages) or .txt to calibrate and measure on.")
    ] = None
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of questions to bury (.jsonl, .jsonl.gz), in the form of HumanEval or GSM8K; repeatable."
        ),
    ] = None
    task_count: Annotated[int | None, typer.Option(min=1, help="Questions of each file of --tasks; default: all.")] = (
        None
    )
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run code that the model writes, to score questions of --tasks. Limits keep accidents small; they are "
            "no sandbox.",
        ),
    ] = False
    recall_lengths: Annotated[
        str, typer.Option(help=f"Tokens of modules whose functions are recalled, with commas; default: {RECALL}.")
    ] = ""
    functions: Annotated[
        int | None, typer.Option(min=1, help="Functions per length of recall; default: 120, or 6 of the reduced size.")
    ] = None
    seeds: Annotated[int, typer.Option(min=1, help="How often the questions of retrieval are drawn.")] = 1
    out: Annotated[Path, typer.Option(help="Folder for answers, logs and the page.")] = Path("prove")
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Keep earlier answers and fits, or not.")] = True

    def __post_init__(self) -> None:
        known(self.measure, tuple(MEASURES), "--measure")
        if self.size is not None and self.size not in SIZES:
            raise typer.BadParameter(f"{self.size!r} is not one of {', '.join(SIZES)}", param_hint="--size")
        _lengths(self.lengths, "--lengths")
        _lengths(self.recall_lengths, "--recall-lengths")
        chosen = self.measure or [Tasks.name, Recall.name]
        if Tasks.name in chosen and self.measure and not self.tasks:
            raise typer.BadParameter(
                f"{Tasks.name} needs questions: name their file with --tasks", param_hint="--measure"
            )
        for option, given, needs in (
            ("--tasks", self.tasks, (Tasks.name in chosen, "--measure tasks")),
            ("--recall-lengths", self.recall_lengths, (Recall.name in chosen, "--measure recall")),
            ("--functions", self.functions, (not self.measure or Recall.name in self.measure, "--measure recall")),
            ("--task-count", self.task_count, (self.tasks, "--tasks")),
            ("--run-code", self.run_code, (self.tasks, "--tasks")),
            ("--documents", self.documents, (not self.measure or TailKl.name in self.measure, "--measure tail-kl")),
            ("--seeds", self.seeds > 1, (not self.measure or Retrieval.name in self.measure, "--measure retrieval")),
        ):
            there, name = needs
            if given and not there:
                raise typer.BadParameter(f"has no meaning without {name}", param_hint=option)

    def measures(self, material: Material) -> list[Measure]:
        """The measures; buried tasks where there are some."""
        names = known(self.measure, tuple(MEASURES), "--measure")
        return [MEASURES[name](material) for name in names if name != Tasks.name or material.tasks]

    def questions(self) -> tuple[QuestionFile, ...]:
        """Questions of ``--tasks``.

        Raises:
            DataError: a file cannot be read, two have one name, or code would have to be run and may not.
        """
        files = tuple(read_questions(path) for path in self.tasks or ())
        for i, file in enumerate(files):
            if any(other.name == file.name for other in files[:i]):
                raise DataError(f"two files of --tasks are named {file.name}: rename one")
            if not self.run_code and any(question.runs_code for question in file.questions.values()):
                raise DataError(
                    f"{file.name}: scoring these questions runs code that the model writes, on this machine; "
                    "allow it with --run-code"
                )
        return files

    def material(self, texts: Texts, context: int) -> Material:
        """What measures are made of, for a model of ``context`` tokens.

        Raises:
            DataError: the model's context is too short, or see :meth:`questions`.
        """
        size = SIZES[self.size or ("full" if has_gpu() else "reduced")]
        size = replace(size, documents=self.documents or size.documents, functions=self.functions or size.functions)
        lengths = _lengths(self.lengths, "--lengths") or size.lengths(context)
        if not lengths or lengths[-1] > context - ROOM:
            wanted = lengths[-1] if lengths else SHORTEST
            raise DataError(f"a context of {wanted} tokens does not fit: the model takes {context}, less {ROOM}")
        recall = _lengths(self.recall_lengths, "--recall-lengths") or size.recall_lengths(context)
        if recall and recall[-1] > context - ANSWER:
            raise DataError(f"modules of {recall[-1]} tokens do not fit: the model takes {context}, less {ANSWER}")
        return Material(texts, size, lengths, context, self.questions(), self.task_count, recall, self.seeds)
