"""Training data: Python sources of this machine, a byte-level BPE for them, and batches of text and retrieval."""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from reference_model.retrieval import DIGITS, HELD_OUT, WORDS

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = 0

PACKAGES = (
    "torch", "transformers", "numpy", "scipy", "sympy", "sklearn", "pandas", "networkx", "jax", "flax", "optax",
    "statsmodels", "matplotlib", "seaborn", "skimage", "torchvision", "onnx", "numba", "requests", "rich", "httpx",
    "pip", "setuptools", "pygments", "fsspec", "huggingface_hub", "aiohttp", "fastapi", "pydantic", "hypothesis",
)  # fmt: skip
"""Installed packages that are read where present: BSD, MIT, Apache-2.0 or PSF-style licences only."""

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen's pre-tokenizer: every digit alone, and no token continues behind a line break."""

FACT_DIGIT_WEIGHT, ANSWER_WEIGHT = 0.0, 3.0
"""Loss weights: the digits of a stated fact cannot be predicted, those of an answer are what is to be learned."""


def source_files(seed: int) -> list[Path]:
    """Python files of the standard library (without the held-out ones) and of PACKAGES, shuffled by ``seed``."""
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    held_out = {stdlib / name for name in HELD_OUT}
    files = [p for p in stdlib.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)]
    for root in dict.fromkeys((paths["purelib"], paths["platlib"])):
        for package in PACKAGES:
            files += (Path(root) / package).rglob("*.py")
    chosen = sorted({p for p in files if p not in held_out and 200 < p.stat().st_size < 200_000})
    random.Random(seed).shuffle(chosen)
    return chosen


def read_texts(files: list[Path], max_bytes: int) -> list[str]:
    """Contents in order until ``max_bytes`` are read; what is not UTF-8, or has been read before, is left out."""
    texts: dict[str, None] = {}
    total = 0
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text not in texts:
            texts[text] = None
            total += len(text)
            if total >= max_bytes:
                break
    return list(texts)


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE on ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts, each followed by the end-of-text token: uint16 [tokens]."""
    parts = []
    for begin in range(0, len(texts), 2000):
        for encoding in tokenizer.encode_batch_fast(texts[begin : begin + 2000]):
            parts.append(np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(parts)


def training_words(texts: list[str], count: int = 6000) -> list[str]:
    """Frequent lower-case words of the text, without those that the evaluation uses."""
    counts: Counter[str] = Counter()
    for text in texts[:4000]:
        counts.update(re.findall(r"\b[a-z]{3,9}\b", text))
    return [word for word, _ in counts.most_common(count + len(WORDS)) if word not in WORDS][:count]


class Samples(IterableDataset):
    """Endless rows of ``length`` + 1 tokens with loss weights: text, and text with facts and questions.

    Args:
        tokens_path: .npy of uint16 tokens.
        tokenizer: the tokenizer.
        words: names for facts.
        length: inputs per row.
        seed: of the whole stream; every loader worker derives its own.
        retrieval: share of rows with retrieval.
    """

    def __init__(
        self, tokens_path: Path, tokenizer: Tokenizer, words: list[str], length: int, seed: int, retrieval: float
    ) -> None:
        self.tokens_path, self.length, self.seed, self.retrieval = tokens_path, length, seed, retrieval
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self.words = [encode(" " + word).ids for word in words]
        self.digits = [encode(str(d)).ids[0] for d in range(10)]
        pieces = {
            "fact": "# The magic number for",
            "is": " is ",
            "end": ".\n",
            "ask": "# What is the magic number for",
            "answer": "? The magic number for",
            "chat_begin": "<|im_start|>user\n",
            "chat_ask": "What is the magic number for",
            "chat_answer": "?<|im_end|>\n<|im_start|>assistant\nThe magic number for",
            "chat_end": ".<|im_end|>\n",
        }
        self.pieces = {name: encode(text).ids for name, text in pieces.items()}
        ids = range(tokenizer.get_vocab_size())
        self.ends_line = np.array([tokenizer.decode([i], skip_special_tokens=False).endswith("\n") for i in ids])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows: ids int64 [length + 1], loss weights float32 [length + 1] (of predicting that token)."""
        info = get_worker_info()
        rng = np.random.default_rng((self.seed, self.length, info.id if info else 0))
        tokens = np.load(self.tokens_path, mmap_mode="r")
        while True:
            build = self.retrieval_row if rng.random() < self.retrieval else self.text_row
            ids, weights = build(tokens, rng)
            yield torch.from_numpy(ids), torch.from_numpy(weights)

    def text_row(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A window of plain text."""
        begin = rng.integers(len(tokens) - self.length - 1)
        ids = tokens[begin : begin + self.length + 1].astype(np.int64)
        return ids, np.ones(len(ids), dtype=np.float32)

    def retrieval_row(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A window of text with facts at random line ends and questions about them behind it, half of them as chat."""
        p = self.pieces
        count = int(rng.integers(3, max(4, min(32, self.length // 90))))
        words = [self.words[i] for i in rng.choice(len(self.words), count, replace=False)]
        numbers = [[self.digits[d] for d in rng.integers(0, 10, DIGITS)] for _ in range(count)]
        facts = [[*p["fact"], *w, *p["is"], *n, *p["end"]] for w, n in zip(words, numbers, strict=True)]
        chat = rng.random() < 0.5
        opening = p["chat_begin"] if chat else []
        tail: list[int] = []
        tail_weights: list[float] = []
        for turn, i in enumerate(rng.permutation(count)):
            ask = [*(p["chat_begin"] if turn else []), *p["chat_ask"]] if chat else p["ask"]
            lead = [*ask, *words[i], *p["chat_answer" if chat else "answer"], *words[i], *p["is"]]
            end = p["chat_end" if chat else "end"]
            tail += [*lead, *numbers[i], *end]
            tail_weights += [1.0] * len(lead) + [ANSWER_WEIGHT] * DIGITS + [1.0] * len(end)
        size = self.length + 1 - len(opening) - len(tail) - sum(map(len, facts))
        begin = int(rng.integers(len(tokens) - 2 * size))
        # Start behind a line break and cut the last line short by one, so that the questions begin a new line.
        starts = np.flatnonzero(self.ends_line[tokens[begin : begin + size]])
        begin += int(starts[0]) + 1 if len(starts) else 0
        text = tokens[begin : begin + size].astype(np.int64)
        text[text == END_OF_TEXT] = p["end"][-1]
        text[-1] = p["end"][-1]
        breaks = np.flatnonzero(self.ends_line[text]) + 1
        depths = np.sort(rng.choice(breaks, count))
        ids, weights = [np.array(opening, dtype=np.int64)], [np.ones(len(opening), dtype=np.float32)]
        for part, fact in zip(np.split(text, depths), [*facts, None], strict=True):
            ids.append(part)
            weights.append(np.ones(len(part), dtype=np.float32))
            if fact is not None:
                ids.append(np.array(fact, dtype=np.int64))
                fact_weights = np.ones(len(fact), dtype=np.float32)
                fact_weights[-DIGITS - len(p["end"]) : -len(p["end"])] = FACT_DIGIT_WEIGHT
                weights.append(fact_weights)
        ids.append(np.array(tail, dtype=np.int64))
        weights.append(np.array(tail_weights, dtype=np.float32))
        return np.concatenate(ids), np.concatenate(weights)


def batches(samples: Samples, rows: int, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches: ids int64 [rows, length + 1], weights float32 [rows, length + 1]."""
    return iter(DataLoader(samples, batch_size=rows, num_workers=workers, prefetch_factor=8 if workers else None))


def held_out_tokens(tokenizer: Tokenizer, limit: int = 200_000) -> np.ndarray:
    """Tokens of the held-out modules: int64 [<= limit]."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [(stdlib / name).read_text(encoding="utf-8") for name in HELD_OUT if (stdlib / name).is_file()]
    return np.array(list(islice((i for i in encode_texts(tokenizer, texts)), limit)), dtype=np.int64)
