"""The weights that read attention outputs, from a dump or a checkpoint: what value errors can be measured with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oscar_rotation.errors import DumpError
from oscar_rotation.fit.rotary import rotary_positions
from oscar_rotation.math.positions import Positions

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.o_proj\.weight$")
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_SCALES = ("_scale_inv", "_scale")
"""Ends of the names of an FP8 weight's scales; all of them are factors."""
INDEX = "model.safetensors.index.json"


class OutputWeights:
    """Output projections of a model.

    Args:
        model: folder with safetensors weights, or an id of the Hub, whose weights are fetched if they are not cached.
        layer_ids: which layers of the model are asked for, by number; None where they are all of its layers.
        overrides: of its configuration, as SGLang's ``--json-model-override-args``.
        recorded: layer of the dump -> what the recorded server said of it, in place of weights
            (:meth:`oscar_rotation.dump.reader.DumpReader.output_reader`).

    Raises:
        DumpError: no such model; or nothing is recorded, and no safetensors files, or layers without an output
            projection.
    """

    def __init__(
        self,
        model: str | Path,
        layer_ids: Sequence[int] | None = None,
        overrides: Mapping[str, Any] | None = None,
        recorded: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.folder, self._layer_ids, self.overrides = _folder(model), layer_ids, overrides or {}
        self._recorded = recorded
        self._files: dict[int, tuple[Path, str]] = {}
        self._places: dict[str, Path] = {}
        if recorded is not None:
            return
        for path, name in _tensors(self.folder):
            self._places[name] = path
            # Layers that predict further tokens (mtp) count from 0 again.
            if (match := _NAME.search(name)) and not name.startswith("mtp"):
                self._files[int(match[1])] = (path, name)
        if not self._files:
            raise DumpError(f"{self.folder}: no weights named layers.<n>.self_attn.o_proj.weight in safetensors files")

    def positions(self, head_dim: int, context: int | None) -> Positions | None:
        """Where keys of this model may stand, see :func:`oscar_rotation.fit.rotary.rotary_positions`.

        Args:
            head_dim: channels per head of the keys.
            context: positions; None for the model's own context, 0 for no such thing.
        """
        return None if context == 0 else rotary_positions(self.folder, head_dim, context, self.overrides)

    def reader(self, layer: int, kv_heads: int, head_dim: int) -> torch.Tensor:
        """W_o W_o^T of one layer by kv head, summed over the query heads of its group.

        Args:
            layer, kv_heads, head_dim: which layer of the dump, and the geometry of its values.

        Returns:
            float32 [kv_heads, head_dim, head_dim]: e @ reader @ e.T is the energy of a value error e behind o_proj.

        Raises:
            DumpError: the layer is missing, unreadable, quantized, or of another geometry.
        """
        if self._recorded is not None:
            return self._recorded(layer)
        own = layer if self._layer_ids is None else self._layer_ids[layer]
        if own not in self._files:
            raise DumpError(f"{self.folder}: no output projection of layer {own}")
        path, name = self._files[own]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                weight = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DumpError(f"{path}: cannot be read ({error})") from error
        if weight.dtype == torch.float8_e4m3fn and weight.ndim == 2:
            weight = self._restored(name, weight)
        if weight.dtype not in _PLAIN:
            raise DumpError(
                f"{path}: {name} is {weight.dtype}, which is quantized; name other weights with --model, or "
                "fit with --recipe paper, which reads none"
            )
        if weight.ndim != 2 or weight.shape[1] % (kv_heads * head_dim):
            raise DumpError(
                f"{path}: {name} is {list(weight.shape)}, which does not fit {kv_heads} kv heads of {head_dim}"
            )
        return reader_of(weight, kv_heads, head_dim)

    def _restored(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """An FP8 weight times its scales: one of all, of each row, or of each block. As it is where it has none.

        Raises:
            DumpError: the scales cannot be read, or do not fit.
        """
        found = next((name + end for end in _SCALES if name + end in self._places), None)
        if found is None:
            return weight
        path = self._places[found]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                scale = file.get_tensor(found).float()
        except (SafetensorError, OSError) as error:
            raise DumpError(f"{path}: cannot be read ({error})") from error
        scale = scale.reshape(1, 1) if scale.numel() == 1 else scale[:, None] if scale.ndim == 1 else scale
        for axis, size in enumerate(weight.shape):
            blocks = scale.shape[axis]
            # Blocks have one size, of which the last may be cut; it is a power of two.
            block = 1 << (-(-size // blocks) - 1).bit_length() if blocks > 1 else size
            if -(-size // block) != blocks:
                raise DumpError(f"{path}: {found} is {list(scale.shape)}, which does not fit {list(weight.shape)}")
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
        return weight.float() * scale


def reader_of(weight: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """W_o W_o^T by kv head of an output projection [hidden, q_heads * head_dim]: float32 [kv_heads, d, d]."""
    heads = weight.detach().float().view(weight.shape[0], kv_heads, -1, head_dim)
    return torch.einsum("ohgd,ohge->hde", heads, heads)


def _folder(model: str | Path) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).splitlines()[0]
        raise DumpError(f"{model}: is no folder here, and not to be had from the Hub ({first})") from error


def _tensors(folder: Path) -> list[tuple[Path, str]]:
    """Every tensor's file and name, from the index where there is one."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            return [(folder / file, name) for name, file in names.items()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DumpError(f"{index}: not a readable index of weights ({type(error).__name__}: {error})") from error
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found += [(path, name) for name in file.keys()]  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise DumpError(f"{path}: not a readable safetensors file ({error})") from error
    return found
