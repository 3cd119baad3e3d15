"""Small files that state large things: each is refused in one line, before any memory is taken for what it states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import MAX_HEAD_DIM, MAX_LAYERS, first_line, numbers, parsed, shown
from oscar_rotation.files.rotation_file import read_rotation_file

EYE = torch.eye(64)
MEGABYTES = 256
"""Memory that refusing may take, over what the same process had after reading a good file."""


def content(layers: Any, **changes: Any) -> dict[str, Any]:
    """A file of the public schema around ``layers``."""
    return {"format_version": 1, "objective": "qqt", "source_grouping": "layer", "layers": layers} | changes


def per_head(layers: Any, **changes: Any) -> dict[str, Any]:
    """A file of the public schema's version 2."""
    return content(layers, format_version=2, source_grouping="kv_head") | changes


def layer(rotation: Any = EYE, **changes: Any) -> dict[str, Any]:
    return {"rotation": rotation} | changes


def spread(d: int) -> torch.Tensor:
    """A matrix of d x d entries that all lie in one place: a few bytes on disk."""
    return torch.zeros(1, 1).expand(d, d)


HOSTILE: dict[str, tuple[Any, str]] = {
    "sparse ids": (content({0: layer(), 10**9: layer()}), "is past any model's layers"),
    "sparse but possible ids": (content({0: layer(), MAX_LAYERS - 1: layer()}), "layer 1 is missing"),
    "id of 600 digits": (content({10**600: layer()}), "a number of 1994 bits is past"),
    "id of 5,000 digits as text": (content({"9" * 5000: layer()}), "is not a layer number"),
    "negative id of 600 digits": (content({-(10**600): layer()}), "is not a layer number"),
    "layer_id of 600 digits": (content({0: layer(layer_id=10**600)}), "layer key 0 holds layer_id a number of"),
    "layer_id is a tensor": (content({0: layer(layer_id=EYE)}), "holds layer_id a Tensor"),
    "tensor as a key": (content({0.5: layer()}), "layer key 0.5 is not a layer number"),
    "version of 600 digits": (content({0: layer()}, format_version=10**600), "format_version is a number of"),
    "version is a tensor": (content({0: layer()}, format_version=EYE), "format_version is a Tensor"),
    "version is true": (content({0: layer()}, format_version=True), "format_version is True"),
    "grouping is a tensor": (content({0: layer()}, source_grouping=EYE), "source_grouping is a Tensor"),
    "grouping is a book": (content({0: layer()}, source_grouping="line\n" * 10**5), "source_grouping is 'line"),
    "objective is a book": (content({0: layer()}, objective="line\n" * 10**5), "objective is not a line"),
    "one number, 30,000 x 30,000": (content({0: layer(spread(30_000))}), "has shape [30000, 30000]"),
    "one number in a thousand layers": (
        content({n: layer(spread(MAX_HEAD_DIM)) for n in range(MAX_LAYERS)}),
        "is smaller than the 4294967296 bytes",
    ),
    "one number, many eigenvalues": (
        content({0: layer(eigenvalues=torch.zeros(1).expand(10**10))}),
        "'eigenvalues' of layer 0 has shape",
    ),
    "many dimensions": (content({0: layer(torch.zeros((1,) * 60))}), "has shape a list"),
    "sparse tensor": (
        content({0: layer(EYE.to_sparse())}),
        "is not a plain tensor",
    ),
    "tensor without numbers": (content({0: layer(torch.empty(64, 64, device="meta"))}), "is not a plain tensor"),
    "deep metadata": (content({0: layer()}, metadata={"clip_ratios": "[" * 10**5}), "nested too deeply"),
    "deep calibration": (content({0: layer()}, metadata={"calibration": "[" * 10**5}), "nested too deeply"),
    "clip of 1,000 digits": (content({0: layer()}, metadata={"clip_ratios": f"[{10**1000}]"}), "out of range"),
    "clip of 5,000 digits": (content({0: layer()}, metadata={"clip_ratios": f"[{'9' * 5000}]"}), "cannot be read"),
    "clip of truths": (content({0: layer()}, metadata={"clip_ratios": "[true]"}), "expected a list of numbers"),
    "clips by name": (content({0: layer()}, metadata={"clip_ratios": '{"1": 2}'}), "expected a list of numbers"),
    "many clips": (content({0: layer()}, metadata={"clip_ratios": str([1] * 5000)}), "5000 numbers"),
    "heads of one number each": (
        per_head({n: layer(torch.zeros(1).expand(256, 128, 128)) for n in range(64)}),
        "is smaller than the 1073741824 bytes",
    ),
    "a million heads": (per_head({0: layer(torch.zeros(1).expand(10**6, 64, 64))}), "has shape [1000000, 64, 64]"),
    "no heads": (per_head({0: layer(torch.zeros(0, 64, 64))}), "has shape [0, 64, 64]"),
    "heads of no channels": (per_head({0: layer(torch.zeros(4, 0, 0))}), "has shape [4, 0, 0]"),
    "heads that are not square": (per_head({0: layer(torch.zeros(4, 64, 32))}), "expected [kv_heads, head_dim"),
    "one matrix for all heads": (per_head({0: layer()}), "has shape [64, 64], expected [kv_heads, head_dim, head_dim]"),
    "heads in version 1": (content({0: layer(EYE[None])}), "expected [head_dim, head_dim]"),
    "one head too few": (per_head({0: layer(EYE.repeat(4, 1, 1)), 1: layer(EYE.repeat(3, 1, 1))}), "layer 0 [4, 64,"),
    "a thousand spectra of one number": (
        per_head({n: layer(EYE[None], eigenvalues=torch.zeros(1).expand(1024, 1024)) for n in range(256)}),
        "'eigenvalues' of layer 0 have shape [1024, 1024], its rotation [1, 64, 64]",
    ),
    "spectra of layers": (
        per_head({0: layer(EYE[None], eigenvalues=torch.zeros(64))}),
        "has shape [64], expected [kv_heads, head_dim]",
    ),
    "version 2 by layer": (content({0: layer()}, format_version=2), "files of format_version 2 have 'kv_head'"),
    "version 1 by head": (
        content({0: layer(EYE[None])}, source_grouping="kv_head"),
        "of format_version 1 have 'layer'",
    ),
    "version 3": (content({0: layer()}, format_version=3), "format_version is 3, this release reads 1 and 2"),
}


def refusal(path: Path) -> str:
    with pytest.raises(RotationFileError) as caught:
        read_rotation_file(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))
    assert message.startswith(f"{path}: ")
    return message


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_zoo_files_are_refused(tmp_path: Path, kind: str) -> None:
    made, fault = HOSTILE[kind]
    path = tmp_path / "k.pt"
    torch.save(made, path)
    assert path.stat().st_size < 2 << 20
    assert fault in refusal(path)


def test_a_file_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    """torch reads compressed records although it writes none: a megabyte of them may hold gigabytes."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "k.pt"
    torch.save(content({n: layer(torch.zeros(512, 512)) for n in range(8)}), plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    assert packed.stat().st_size < plain.stat().st_size // 50
    assert "would unpack to" in refusal(packed)


def test_layers_may_share_one_matrix(tmp_path: Path) -> None:
    """A file of one Hadamard matrix for all layers is small and good, whatever its strides."""
    torch.save(content({n: layer(EYE.T) for n in range(200)}), tmp_path / "k.pt")
    assert read_rotation_file(tmp_path / "k.pt").num_layers == 200


HEADER = {"format": "oscar-rotation", "format_version": "1"}
TENSORS = {"rotations": EYE[None]}
SAFETENSORS: dict[str, tuple[dict[str, torch.Tensor], dict[str, str], str]] = {
    "many layers": ({"rotations": torch.zeros(MAX_LAYERS + 1, 1, 1)}, {}, "at most 1024 layers"),
    "large heads": ({"rotations": torch.zeros(1, MAX_HEAD_DIM + 1, 1)}, {}, "head_dim 1024"),
    "many dimensions": ({"rotations": torch.zeros((1,) * 6)}, {}, "rotations have shape"),
    "many tensors": ({f"x{n}": EYE for n in range(200)}, {}, "holds tensors 200"),
    "a book as a name": ({"x\n" * 10**4: EYE}, {}, "holds tensors 1"),
    "a book as a format": (TENSORS, {"format": "x\n" * 10**4}, "header 'format' is 'x"),
    "a book as a version": (TENSORS, {"format_version": "x\n" * 10**4}, "format_version is 'x"),
    "a book as a model": (TENSORS, {"model_id": "x\n" * 10**4}, "model_id is not a line"),
    "deep calibration": (TENSORS, {"calibration": "[" * 10**5}, "nested too deeply"),
    "gain out of range": (TENSORS, {"gains": f"[{10**1000}]"}, "out of range"),
    "gains by name": (TENSORS, {"gains": '{"1": 2}'}, "expected a list of numbers"),
}


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_hostile_safetensors_are_refused(tmp_path: Path, kind: str) -> None:
    tensors, header, fault = SAFETENSORS[kind]
    path = tmp_path / "k.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata=HEADER | header)
    assert fault in refusal(path)


def test_refusing_takes_no_memory(tmp_path: Path) -> None:
    """In a process of its own, which counts the most memory it ever had."""
    torch.save(content({0: layer()}), tmp_path / "good.pt")
    for number, (made, _) in enumerate(HOSTILE.values()):
        torch.save(made, tmp_path / f"{number}.pt")
    script = """
import resource, sys
from pathlib import Path
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import read_rotation_file

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

folder = Path(sys.argv[1])
read_rotation_file(folder / "good.pt")
before = peak()
for path in sorted(folder.glob("[0-9]*.pt")):
    try:
        read_rotation_file(path)
    except RotationFileError:
        continue
    sys.exit(f"{path} was read")
print(peak() - before)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MEGABYTES


odd = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**18, 10**20), st.floats(), st.text(max_size=9),
    st.sampled_from([EYE, EYE[None], EYE.double(), EYE[0], spread(64), spread(10**6), 10**600, [], {}]),
)  # fmt: skip
entries = st.one_of(
    odd, st.dictionaries(st.sampled_from(["rotation", "eigenvalues", "layer_id", "other"]), odd, max_size=4)
)
keys = st.one_of(st.integers(-1, 3), st.sampled_from(["0", "1", "2", "x", 10**9, 10**600, "9" * 5000, 0.5, True, None]))
files = st.one_of(
    odd,
    st.fixed_dictionaries(
        {
            "format_version": st.one_of(st.just(1), st.just(2), odd),
            "objective": st.one_of(st.just("qqt"), odd),
            "source_grouping": st.one_of(st.just("layer"), st.just("kv_head"), odd),
            "layers": st.one_of(odd, st.dictionaries(keys, entries, max_size=4)),
        },
        optional={"metadata": st.one_of(odd, st.dictionaries(st.text(max_size=4), odd, max_size=3))},
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files)
def test_any_file_is_read_or_refused_in_one_line(tmp_path: Path, made: Any) -> None:
    path = tmp_path / "k.pt"
    torch.save(made, path)
    try:
        said = type(read_rotation_file(path)).__name__
    except RotationFileError as error:
        said = str(error)
    assert "\n" not in said


@given(st.recursive(st.one_of(st.none(), st.integers(), st.floats(), st.text()), st.lists))
def test_every_value_is_shown_on_one_short_line(value: Any) -> None:
    text = shown(value)
    assert "\n" not in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("read", "text"),
    [(parsed, "[" * 10**6), (parsed, "{"), (numbers, "1"), (numbers, "[null]"), (numbers, "[1e999, ]")],
)
def test_bad_json_is_a_value_error(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the kind is the point)
        read(text)
    assert len(first_line(caught.value)) <= 120


def test_numbers() -> None:
    assert numbers(json.dumps([1, 0.5])) == (1.0, 0.5)
