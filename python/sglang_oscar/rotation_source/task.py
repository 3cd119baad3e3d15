"""A calibration as plain facts: whoever begins with it needs no SGLang, whose import takes ten seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_oscar.rotation_source import places
from sglang_oscar.rotation_source.cache import Calibration


@dataclass(frozen=True)
class Task:
    """What to calibrate.

    Attributes:
        model: folder or hub id.
        tokenizer: folder or hub id.
        checkpoint: folder with the weights, or the one file of them.
        trust_remote_code: whether code from the model's repository may run.
        gpu: number of the GPU that fits.
        attention_sinks: whether the model's softmax has a logit beside the tokens'.
        token_bytes: that are recorded of a token.
        flags: of the server that records, see :mod:`sglang_oscar.rotation_source.flags`.
        wanted: what for.
    """

    model: str
    tokenizer: str
    checkpoint: str
    trust_remote_code: bool
    gpu: int
    attention_sinks: bool
    token_bytes: int
    flags: list[str]
    wanted: Calibration

    @classmethod
    def of(cls, args: Any, model: Any, wanted: Calibration, flags: Sequence[str]) -> Task:
        """Args:
        args: server arguments.
        model: SGLang's ModelConfig.
        wanted: what for.
        flags: of the server that records.
        """
        checkpoint = str(places.checkpoint(args))
        own_tokenizer = args.tokenizer_path not in (None, args.model_path)
        heads = model.num_attention_heads + 2 * model.get_total_num_kv_heads()
        return cls(
            model=args.model_path,
            tokenizer=args.tokenizer_path if own_tokenizer else checkpoint,
            checkpoint=checkpoint,
            trust_remote_code=args.trust_remote_code,
            gpu=args.base_gpu_id,
            attention_sinks=bool(model.has_attention_sinks),
            token_bytes=model.num_hidden_layers * heads * model.head_dim * 2,
            flags=list(flags),
            wanted=wanted,
        )

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, text: bytes) -> Task:
        """What :meth:`encode` gave.

        Raises:
            msgspec.ValidationError: it is something else.
        """
        return msgspec.json.decode(text, type=cls)
