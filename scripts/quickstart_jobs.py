"""What the quickstart is done on: the shipped model, asked for completions, or a real one, asked in chat."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from openai import OpenAI
from real_models import DEFAULT, MODELS

from oscar_cpu.server import has_gpu
from oscar_rotation import defaults
from oscar_rotation.recipes import PUBLISHED
from oscar_tools.evaluation.methods import BARE, K_PATH, V_PATH, files_of
from oscar_tools.local_server import LocalServer
from reference_model.retrieval import DIGITS, Document, chat_question, question

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fit:
    """Matrices to fit.

    Attributes:
        recipe, bits: as ``oscar fit`` takes them; bits are None for a recipe that takes none.
    """

    recipe: str
    bits: str | None = None

    @property
    def folder(self) -> str:
        """Of its files; other recipes and bits have others, so that none is taken for another."""
        return self.recipe if self.bits is None else f"{self.recipe}-{self.bits}"

    @property
    def row(self) -> str:
        """Its name in the table."""
        return "OSCAR INT2" if self.recipe == PUBLISHED else f"INT2 ({self.recipe}, {self.bits})"

    @property
    def args(self) -> list[str]:
        """Flags of ``oscar fit``."""
        return ["--recipe", self.recipe, *([] if self.bits is None else ["--bits", self.bits])]


DEFAULT_FIT = Fit(defaults.RECIPE, defaults.BITS)
"""What a user gets who sets nothing."""
CHEAP_FIT = Fit("plus", "k2v2")
"""The fewest bits, for those who would rather have room than every answer."""
PUBLISHED_FIT = Fit(PUBLISHED)
FITS = (DEFAULT_FIT, CHEAP_FIT, PUBLISHED_FIT)
DEFAULT_ROW = DEFAULT_FIT.row


@dataclass(frozen=True)
class Method:
    """One row of the table: how its server is started."""

    name: str
    group: int | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def args(self) -> list[str]:
        """Server flags of the method."""
        if self.group is None:
            return [] if has_gpu() else ["--attention-backend", "torch_native"]
        return ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", str(self.group)]


def fitted_rows(rotations: Path, group: int) -> list[Method]:
    """A row for each of :data:`FITS`.

    Args:
        rotations: folder that has a folder of files for each.
        group: channels that share a scale.
    """
    return [Method(fit.row, group, files_of(rotations / fit.folder)) for fit in FITS]


@dataclass(frozen=True)
class ShippedJob:
    """Completions of the shipped model, which continues a question with seven digits.

    Attributes:
        name: in the title of the table.
        out: default folder of dump, rotations, logs and results.
        model: folder of the model.
        lengths, documents, facts: contexts in tokens, documents of each, and questions about each document.
        answer_tokens: of an answer at most.
        calibration_tokens, calibration_length: in all, and of a prompt at most.
        cpu_memory: share of the machine's memory for weights and cache where there is no GPU.
    """

    name: str = "shipped model"
    out: Path = ROOT / "results" / "quickstart"
    model: Path = ROOT / "models" / "reference"
    lengths: str = "1024,2048"
    documents: int = 6
    facts: int = 5
    answer_tokens: int = DIGITS
    calibration_tokens: int = 16000
    calibration_length: int = 1900
    cpu_memory: float = 0.2

    def methods(self, rotations: Path) -> list[Method]:
        """Rows of the table: BF16, what a user gets who sets nothing, the same with two bits, and others to compare
        with. Naive INT2 has neither windows nor clipping; QuaRot-INT2 has both, like OSCAR, the published recipe."""
        *ours, paper = fitted_rows(rotations, defaults.GROUP_SIZE)
        naive, quarot = (dict.fromkeys((K_PATH, V_PATH), name) for name in ("identity", "hadamard"))
        rows = [Method("BF16"), *ours]
        for group in (64, 128):
            rows += [
                Method("naive INT2", group, naive | BARE),
                Method("QuaRot-INT2", group, quarot),
                replace(paper, group=group),
            ]
        return rows

    def say(self, server: LocalServer, document: Document, word: str | None, tokens: int) -> str:
        """What follows a document, and the question for a word where one is given, greedily, through the OpenAI API."""
        prompt = document.text + (question(word) if word else "")
        reply = client(server).completions.create(
            model=str(self.model), prompt=prompt, max_tokens=tokens, temperature=0
        )
        return reply.choices[0].text

    def right(self, answer: str, number: str) -> bool:
        """Whether the answer is the number and nothing else."""
        return answer == number


@dataclass(frozen=True)
class RealJob(ShippedJob):
    """Chat with a model that ``scripts/real_model.py`` makes; by default SmolLM2-135M-Instruct, with sizes for two CPU
    cores.

    Documents and questions are one message of the user, behind the model's own chat template, and the model answers in
    a sentence.

    Attributes:
        group: channels that share a scale; as many as a head has.
    """

    name: str = "SmolLM2-135M-Instruct, in chat"
    out: Path = ROOT / "results" / "quickstart_real"
    model: Path = MODELS[DEFAULT].folder
    group: int = 64
    lengths: str = "640"
    documents: int = 3
    facts: int = 4
    answer_tokens: int = 24
    calibration_tokens: int = 6000
    calibration_length: int = 1000

    def methods(self, rotations: Path) -> list[Method]:
        """BF16, and everything that is fitted."""
        return [Method("BF16"), *fitted_rows(rotations, self.group)]

    def say(self, server: LocalServer, document: Document, word: str | None, tokens: int) -> str:
        """As :meth:`ShippedJob.say`, through the chat endpoint."""
        message = document.text + (chat_question(word) if word else "")
        reply = client(server).chat.completions.create(
            model=str(self.model),
            messages=[{"role": "user", "content": message}],
            max_tokens=tokens,
            temperature=0,
        )
        return reply.choices[0].message.content or ""

    def right(self, answer: str, number: str) -> bool:
        """Whether the sentence has the number."""
        return number in answer


GPU_MODEL = "qwen2.5-coder-1.5b"
"""What a machine with a GPU is asked to serve."""
REAL_JOBS = {
    DEFAULT: RealJob(),
    GPU_MODEL: RealJob(
        name="Qwen2.5-Coder-1.5B-Instruct, in chat",
        out=ROOT / "results" / f"quickstart_{GPU_MODEL}",
        model=MODELS[GPU_MODEL].folder,
        group=128,
        lengths="4096",
        documents=10,
        answer_tokens=40,
        calibration_tokens=32000,
        calibration_length=4000,
        cpu_memory=0.4,  # the weights alone take 3.1 GB
    ),
}
"""By their names in :mod:`real_models`."""


def client(server: LocalServer) -> OpenAI:
    """The OpenAI client of a server."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
