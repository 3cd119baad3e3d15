"""What the keys of storage are salted with: everything that must be alike for rows to be interchangeable.

SGLang's own keys are made of tokens, the model's name and ranks, so that a cache of another dtype, or of rows written
with another rotation, would be read as if it were one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oscar_kernels.format import AnyFormat, any_cut, fingerprint
from sglang_oscar.attach import releases
from sglang_oscar.features.tiers.finite import Column
from sglang_oscar.features.tiers.pages import PAGE_VERSION, PageLayout, number_columns
from sglang_oscar.formats.drafts import draft_facts
from sglang_oscar.formats.geometry import own_heads
from sglang_oscar.formats.model_identity import configuration, digest
from sglang_oscar.formats.origin import loaded_weights, of_model
from sglang_oscar.formats.rotations import model_formats
from sglang_oscar.worker import of_this_process


def storage_salt(rows: str, model: dict[str, Any], heads: slice, ranks: int, page: PageLayout) -> str:
    """SHA-256, in hex, of what the bytes of a page mean.

    Args:
        rows: fingerprint of the formats of the whole model.
        model: what makes the model the same one (:func:`model_facts`).
        heads: kv heads of this tensor-parallel rank.
        ranks: how many there are: with fewer kv heads than ranks, heads alone do not say.
        page: what is where in a page.
    """
    meaning = {
        "page version": PAGE_VERSION,
        "page size": page.page_size,
        "row bytes": page.row_bytes,
        "rows": rows,
        "heads": [heads.start, heads.stop],
        "ranks": ranks,
        "model": model,
    }
    return digest(meaning)


def model_facts(server_args: Any, model: Any) -> dict[str, Any]:
    """What decides which keys and values a text has: weights, how they are read, dtype, quantization and configuration;
    and the same of a draft model, whose rows go with them.

    Args:
        server_args: as the worker has them.
        model: SGLang's ModelConfig.

    Raises:
        Int2Error: files of weights have changed since they were loaded.
    """
    args, drafts = releases.resolved(server_args), draft_facts(server_args)
    return ({} if drafts is None else {"drafts": drafts}) | {
        "weights": loaded_weights(server_args, of_model(server_args)),
        "load format": args.load_format,  # "dummy" reads none of them
        "dtype": str(model.dtype),
        "quantization": args.quantization,
        # Of images, rows depend on how they are seen as well.
        "configuration": configuration(model.hf_config if model.is_multimodal else model.hf_text_config),
    }


def formats_of_this_process() -> Mapping[int, AnyFormat]:
    """Formats of the model that a worker serves, with all its kv heads, by global layer id."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return model_formats(args, of_this_process(), releases.model_config(args))


def ranks_have_other_parts() -> bool:
    """Whether rows of a layer may have another size on another rank."""
    from sglang.srt.runtime_context import get_parallel

    return any_cut(formats_of_this_process().values()) and get_parallel().attn_tp_size > 1


def columns_of_this_process(page: PageLayout) -> list[Column]:
    """Where a worker's pages have their numbers."""
    from sglang.srt.runtime_context import get_server_args

    heads = own_heads(releases.model_config(get_server_args()))
    return number_columns(page, [of.of_heads(heads) for of in formats_of_this_process().values()])


def salt_of_this_process(page: PageLayout) -> str:
    """The salt of a worker's pages."""
    from sglang.srt.runtime_context import get_parallel, get_server_args

    args = get_server_args()
    model = releases.model_config(args)
    rows = fingerprint(formats_of_this_process())
    ranks = get_parallel().attn_tp_size
    return storage_salt(rows, model_facts(args, model), own_heads(model), ranks, page)
