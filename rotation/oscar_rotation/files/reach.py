"""For which positions the keys of a rotation file were fitted, and what to say to a server that takes others."""

from __future__ import annotations

from oscar_rotation.files.rotation_set import RotationMetadata
from oscar_rotation.math.rope import Rope, in_words, same_rope


def reach(metadata: RotationMetadata) -> str:
    """What a file states of its positions, in words; empty where it states nothing."""
    context, rope = _stated(metadata)
    if context is None:
        return ""
    turned = f" ({in_words(rope)})" if rope else " of its dump alone" if rope is not None else ""
    return f"{context:,} positions{turned}"


def reach_warning(source: str, metadata: RotationMetadata, context: int, rope: Rope | None) -> str | None:
    """What to warn of where a server takes positions that the keys of a file were not fitted for.

    Args:
        source: the file of the keys, for the message.
        metadata: of the file; one that does not state its positions, such as those of the recipe paper, passes.
        context: tokens of the longest request that the server takes.
        rope: how its model turns keys, None where that is not known.

    Returns:
        one line, or None.
    """
    fitted, stated = _stated(metadata)
    other = bool(stated) and not same_rope(stated or {}, rope)
    if fitted is None or (context <= fitted and not other):
        return None
    if stated == {}:
        remedy = "fit without --context 0, or a dump of requests as long as those that are served"
    elif other:
        remedy = (
            "dump with the same --json-model-override-args as the server, or as it without any, and fit that with "
            f"`oscar fit --context {context}`"
        )
    else:
        remedy = f"fit with `oscar fit --context {context}`, or serve with --context-length {fitted}"
    turned = f", whose embedding is {in_words(rope)}" if other else ""
    return (
        f"{source} is fitted for {reach(metadata)}, this server takes requests of {context:,} tokens{turned}; what was "
        f"not fitted is read worse; {remedy}"
    )


def _stated(metadata: RotationMetadata) -> tuple[int | None, Rope | None]:
    context, rope = (metadata.calibration.get(name) for name in ("context", "rope"))
    # Files of releases before state 0 for "positions of the dump", and no embedding.
    known = isinstance(context, int) and 0 < context < 1 << 40
    return context if known else None, rope if isinstance(rope, dict) else None
