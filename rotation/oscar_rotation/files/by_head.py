"""Numbers of a rotation file that say how codes are made: one per layer, or one per kv head of a layer.

A server stores neighbouring heads that are alike together, and those of a layer that are not as if they were of layers
of their own (:class:`oscar_kernels.format.CutFormat`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from oscar_kernels.layout import AFFINE, BITS, WIDTHS
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import shown

T = TypeVar("T")

ByHead: TypeAlias = T | tuple[T, ...]
"""Of all kv heads of a layer, or of each."""

NAMES = ("bits", "codings", "clip_ratios", "gains")
"""Fields of a RotationSet that may have a tuple for a layer, by kv head. Keys only."""

LEAST_GAIN = 0.5
"""Smallest gain that is accepted. Least squares would be about 0.88; what is below loses more than it saves."""


class Run(NamedTuple):
    """Neighbouring kv heads of a layer whose codes are made alike; ``heads`` of all is slice(None). Clip ratio and gain
    are None where the file does not say."""

    heads: slice
    bits: int
    coding: str
    clip: float | None
    gain: float | None


def heads_of(loaded: Any, layer: int) -> int | None:
    """How many kv heads of a layer have numbers of their own; None of a layer whose heads are alike."""
    found = (getattr(loaded, name) for name in NAMES)
    return next((len(of[layer]) for of in found if of is not None and isinstance(of[layer], tuple)), None)


def runs(loaded: Any, layer: int) -> list[Run]:
    """The heads of a layer, in their order.

    Args:
        loaded: a RotationSet.
        layer: number of the layer in it.
    """
    unstated: tuple[Any, ...] = (2, AFFINE, None, None)
    stated = [
        x if (of := getattr(loaded, name)) is None else of[layer] for x, name in zip(unstated, NAMES, strict=True)
    ]
    heads = heads_of(loaded, layer)
    if heads is None:
        return [Run(slice(None), *stated)]
    each = list(zip(*(x if isinstance(x, tuple) else (x,) * heads for x in stated), strict=True))
    starts = [n for n in range(heads) if n == 0 or each[n] != each[n - 1]]
    return [Run(slice(a, b), *each[a]) for a, b in zip(starts, [*starts[1:], heads], strict=True)]


def alike(values: Iterable[T]) -> ByHead[T]:
    """Values by kv head as a file states them: one where all are the same.

    >>> alike([2, 2]), alike([2, 3])
    (2, (2, 3))
    """
    found = tuple(values)
    return found[0] if len(set(found)) == 1 else found


def flat(values: Iterable[Any]) -> list[Any]:
    """All values of all layers.

    >>> flat((2, (2, 3)))
    [2, 2, 3]
    """
    return [x for of in values for x in (of if isinstance(of, tuple) else (of,))]


def check_numbers(loaded: Any, source: str) -> None:
    """Refuse layer ids, widths, gains and clip ratios that no server could use.

    Args:
        loaded: the RotationSet that was read; its rotations and centers are checked.
        source: the file's path, for the message.

    Raises:
        RotationFileError: of other layers or heads, or out of bounds.
    """
    layers, ids = loaded.num_layers, loaded.layer_ids
    if ids is not None and (len(ids) != layers or ids[0] < 0 or list(ids) != sorted(set(ids))):
        raise RotationFileError(f"{source}: {len(ids)} layer ids for {layers} layers are not ascending; fit it again")
    for name, said in zip(NAMES, ("bits of", "codings of", "", ""), strict=True):
        values = getattr(loaded, name)
        if values is not None and len(values) != layers:
            what = f"{said} {len(values)} layers" if said else f"{len(values)} {name.replace('_', ' ')}"
            raise RotationFileError(f"{source}: {what} for {layers} layers")
    odd = [width for width in flat(loaded.bits or ()) if width not in WIDTHS]
    if odd:
        raise RotationFileError(
            f"{source}: codes of {shown(odd[0])} bits, this release knows {', '.join(map(str, WIDTHS))}; "
            "update sglang-oscar"
        )
    wrong = [gain for gain in flat(loaded.gains or ()) if not (math.isfinite(gain) and LEAST_GAIN <= gain <= 1)]
    if wrong:
        raise RotationFileError(f"{source}: gain {wrong[0]} is outside [{LEAST_GAIN}, 1]")
    wrong = [ratio for ratio in flat(loaded.clip_ratios or ()) if not (math.isfinite(ratio) and 0 < ratio <= 1)]
    if wrong:
        raise RotationFileError(f"{source}: clip ratio {wrong[0]} is outside (0, 1]")
    _check_heads(loaded, source)


def _check_heads(loaded: Any, source: str) -> None:
    sizes = {len(of) for name in NAMES for of in getattr(loaded, name) or () if isinstance(of, tuple)}
    if not sizes:
        return
    heads = min(sizes)
    own = {x.shape[1] for x in (loaded.rotations if loaded.per_head else None, loaded.centers) if x is not None}
    reasons = (
        (loaded.metadata.side == "v", "states codes of values by kv head, only keys have them"),
        (loaded.layer_ids is not None, "states codes by kv head of some of a model's layers only"),
        (
            len(sizes | own) > 1 or heads < 2,
            f"states codes of {heads} kv heads that are not those of the layers",
        ),
        (
            any(isinstance(of, tuple) and set(of) - set(BITS) for of in loaded.bits or ()),
            f"states bits by kv head that are none of {', '.join(map(str, BITS))}",
        ),
    )
    if (reason := next((said for holds, said in reasons if holds), None)) is not None:
        raise RotationFileError(f"{source}: {reason}; fit it again")
