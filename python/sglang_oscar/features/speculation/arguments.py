"""What int2 mode serves of speculative decoding, by server arguments.

SGLang names an algorithm by a string. Those that a plugin registers count as what they say they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from oscar_kernels.visible import MOST_TOKENS
from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import algorithm, drafts_with_model
from sglang_oscar.attach.feature import Refusal
from sglang_oscar.attention import flash_attention3
from sglang_oscar.formats.drafts import FP8, NAMED, OF_MODEL
from sglang_oscar.names import BACKEND, is_int2

CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
"""Drafts of a step unless the operator says how many: SGLang's own defaults are trees for some models."""
DRAFT_BACKENDS = {"cpu": ("torch_native",), "cuda": ("flashinfer", "fa3", "triton")}
"""Attention backends of a draft model by device. By default the first that is installed, and FlashAttention-3 where
prompts take it: FlashInfer plans its kernels on the host, which waits for lengths in every step."""
DRAFT_HEAD_DIM = 128
"""What draft models have; others of :attr:`flash_attention3.FlashAttention3.head_dims` do as well."""


def drafts_without_model(args: Any) -> bool:
    """Whether drafts come from the host, as those of NGRAM do, and are verified as a tree."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    name = algorithm(args)
    if name is None:
        return False
    try:
        return bool(SpeculativeAlgorithm.from_string(name).is_ngram())
    except ValueError:  # an alias, or a name that SGLang does not know
        return False


def configure(args: Any, model: Any) -> None:
    """Set what a draft model is run with where the operator leaves it open: chains, and an attention backend.

    Args:
        args: server arguments as the operator gave them; they are written.
        model: SGLang's ModelConfig; None where it cannot be read.
    """
    if not drafts_with_model(args):
        return
    if all(getattr(args, name) is None for name in CHAIN):
        for name, value in CHAIN.items():
            setattr(args, name, value)
    if args.speculative_eagle_topk is None:
        args.speculative_eagle_topk = CHAIN["speculative_eagle_topk"]
    if args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = _draft_backend(args.device)


def _draft_backend(device: str | None) -> str:
    """The attention backend of a draft model; SGLang picks the device where the operator does not."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and flash_attention3.measured(DRAFT_HEAD_DIM):
        return "fa3"
    first, *others = DRAFT_BACKENDS.get(device, DRAFT_BACKENDS["cuda"])
    return others[-1] if others and importlib.util.find_spec(first) is None else first


def unknown_draft_backend(args: Any) -> bool:
    """Whether a draft model is to run with an attention backend that is not known to work beside this cache."""
    backends = DRAFT_BACKENDS.get(args.device or "", sum(DRAFT_BACKENDS.values(), ()))
    return drafts_with_model(args) and args.speculative_draft_attention_backend not in (None, *backends)


def stores_drafts_otherwise(args: Any) -> bool:
    """Whether the cache of a draft model is to have another type than the draft model's own, BF16 and FP8."""
    named = releases.argument(args, "speculative_draft_kv_cache_dtype", None)
    return drafts_with_model(args) and named not in (*OF_MODEL, *NAMED)


def too_many_tokens(args: Any) -> bool:
    """Whether more tokens are verified at once than a word of the mask has bits. False while SGLang has not decided."""
    return algorithm(args) is not None and (args.speculative_num_draft_tokens or 0) > MOST_TOKENS


def plan_stream(args: Any) -> bool:
    """Whether SGLang prepares a step on a stream of its own, which would overwrite tables that are still read."""
    return algorithm(args) is not None and releases.switched_on("SGLANG_ENABLE_OVERLAP_PLAN_STREAM")


def adapts(args: Any) -> bool:
    """Whether the number of tokens changes while the server runs."""
    return algorithm(args) is not None and bool(releases.argument(args, "speculative_adaptive", False))


def around_handle_ngram(original: Callable[[Any], None], server_args: Any) -> None:
    """Let drafts be trees: SGLang knows one attention backend by name that reads pages and obeys a mask of the tree."""
    if not is_int2(server_args) or server_args.attention_backend != BACKEND:
        return original(server_args)
    releases.write(server_args, "attention_backend", "flashinfer")
    try:
        original(server_args)
    finally:
        releases.write(server_args, "attention_backend", BACKEND)


def _named(*names: str) -> Callable[[Any], bool]:
    return lambda args: algorithm(args) in names


REFUSED: list[Refusal] = [
    (
        _named("STANDALONE"),
        "a whole model's drafts (STANDALONE), whose 16-bit cache would take what 2 bits save; drop "
        "--speculative-algorithm, or set it to NGRAM",
    ),
    (
        _named("FROZEN_KV_MTP"),
        "drafts that read the cache of the model (FROZEN_KV_MTP); drop --speculative-algorithm, or set it to NGRAM",
    ),
    (
        lambda args: algorithm(args) is not None and not (drafts_with_model(args) or drafts_without_model(args)),
        "other drafts than those of NGRAM, EAGLE, EAGLE3 and NEXTN; drop --speculative-algorithm, or set it to NGRAM",
    ),
    (
        # A step of verification is no call of the operator that compiled steps are made around.
        lambda args: algorithm(args) is not None and args.enable_torch_compile,
        "speculative decoding inside torch.compile; drop --enable-torch-compile, or --speculative-algorithm",
    ),
    (
        too_many_tokens,
        f"more than {MOST_TOKENS} tokens in a step of verification; set --speculative-num-draft-tokens {MOST_TOKENS}",
    ),
    (
        lambda args: drafts_with_model(args) and (args.speculative_eagle_topk or 1) > 1,
        "a draft model's drafts that branch; set --speculative-eagle-topk 1",
    ),
    (
        lambda args: drafts_with_model(args) and args.enable_multi_layer_eagle,
        "several draft layers with a cache each; drop --enable-multi-layer-eagle",
    ),
    (
        stores_drafts_otherwise,
        f"a draft model's cache in another type than its own, bf16 and {FP8}; set --speculative-draft-kv-cache-dtype "
        f"{FP8}, or drop it",
    ),
    (
        unknown_draft_backend,
        "another attention backend for a draft model; set --speculative-draft-attention-backend "
        + " or ".join(f"{'/'.join(backends)} ({device})" for device, backends in DRAFT_BACKENDS.items()),
    ),
    (adapts, "a changing number of draft tokens; drop --speculative-adaptive"),
    (plan_stream, "steps that are prepared on a stream of their own; unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
]
"""What is refused, in the order in which it is asked; see :mod:`sglang_oscar.attach.refusals`."""
