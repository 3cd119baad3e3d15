"""A model with scales of an FP8 cache, in the one form that stock SGLang both writes and reads by.

A file by ``--quantization-param-path`` has one number for keys and values, and backends divide by it when they write
and do not multiply when they read, or end. Tensors ``k_scale`` and ``v_scale`` of a checkpoint are used on both ways,
where its configuration names a method that brings them to layers of attention: ``fp8`` does, also where no weight is in
FP8. So the folder made here has links to the model's files, the scales, and a configuration that leaves all layers out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oscar_rotation.atomic import write_atomically, write_text_atomically
from oscar_rotation.dump import DumpReader
from oscar_tools.calibration.errors import DataError

SCALES = "kv_scales.safetensors"
LAYERS = {"qwen2": "self_attn.attn", "llama": "self_attn", "mistral": "self_attn"}
"""Model type -> where SGLang's loader looks for the scales of a layer. Others of its models hand no method to their
layers of attention, or were not looked at."""
LARGEST = 448.0
"""Of e4m3."""
ROOM = 2.0
"""What is measured may hold larger keys than the calibration text, and those beyond the range become NaN. Numbers of
FP8 are as precise in the lower half of their range."""


def scaled_model(model: Path, dump: Callable[[], Path], folder: Path) -> Path:
    """Make the folder, unless it is there.

    Args:
        model: folder of the model.
        dump: gives the folder of a dump of its activations.
        folder: what to make.

    Returns:
        the folder.

    Raises:
        DataError: SGLang takes no scales for this model, as far as is known here, or its weights are no safetensors.
        DumpError: a broken dump.
        OSError: a file cannot be read or written.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in LAYERS:
        raise DataError(f"FP8 with scales: not known how SGLang takes them for {kind} ({', '.join(LAYERS)} are)")
    if config.get("quantization_config") or not list(model.glob("*.safetensors")):
        raise DataError(f"FP8 with scales: {model} is quantized, or its weights are no safetensors")
    if (folder / "config.json").is_file():
        return folder  # Written last.
    scales = {f"model.layers.{layer}.{LAYERS[kind]}.{name}": x for (layer, name), x in layer_scales(dump()).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        link = folder / path.name
        if path.is_file() and path.name != "config.json":
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    write_atomically(folder / SCALES, lambda temporary: save_file(scales, temporary))
    _name_in_index(folder, scales)
    # Nothing but layers of attention is left to the method: weights stay as they are.
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["model.layers", "lm_head"]}
    write_text_atomically(folder / "config.json", json.dumps(config | {"quantization_config": method}, indent=1) + "\n")
    return folder


def layer_scales(dump: Path) -> dict[tuple[int, str], torch.Tensor]:
    """Scales of every layer: (layer of the model, ``k_scale`` or ``v_scale``) -> float32 scalar.

    Raises:
        DumpError: a broken dump.
    """
    reader = DumpReader(dump)
    ids = (reader.manifest.layer_ids if reader.manifest else None) or range(reader.num_layers)
    found = {}
    for layer, of_model in enumerate(ids):
        chunks = [reader.load(layer, chunk) for chunk in reader.fit_chunks()]
        for name, parts in (("k_scale", [x.k for x in chunks]), ("v_scale", [x.v for x in chunks])):
            largest = max(float(x.abs().max()) for x in parts)
            found[of_model, name] = torch.tensor(max(largest, 1e-6) * ROOM / LARGEST)
    return found


def _name_in_index(folder: Path, scales: dict[str, Any]) -> None:
    """Where a model has an index, files that it does not name are not read."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(scales, SCALES)
    path.unlink()  # The link, not what it names.
    write_text_atomically(path, json.dumps(index, indent=1) + "\n")
