"""What is built and uploaded is whole: every file of the packages, one version, and metadata that an index takes."""

from __future__ import annotations

import email.message
import email.parser
import shutil
import zipfile

import pytest

import sglang_oscar
from oscar_tools.evaluation.prove.machine import machine
from support.built import PACKAGES, ROOT, build, copy_sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source distribution, as pip does where there is no wheel."""
    work = tmp_path_factory.mktemp("packages")
    shutil.unpack_archive(build("sdist", copy_sources(work / "source"), work / "sdist"), work / "unpacked")
    (unpacked,) = (work / "unpacked").iterdir()
    return zipfile.ZipFile(build("wheel", unpacked, work / "wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_every_file_of_the_packages_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    wanted = {
        str(path.relative_to(folder))
        for package, folder in PACKAGES.items()
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    built = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert built == wanted
    assert {name for name in wanted if name.endswith((".cu", "models.json"))}


def test_one_version(metadata: email.message.Message) -> None:
    """Also where an editable install is older than the code."""
    assert metadata["Version"] == sglang_oscar.__version__
    assert machine()["plugin"].startswith(f"{sglang_oscar.__version__} (")


def test_what_an_index_shows(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert metadata["License-Expression"] == "MIT"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    assert "<" in metadata["Requires-Python"]


def test_the_bound_of_sglang_is_what_was_tested(metadata: email.message.Message) -> None:
    first, last = sglang_oscar.SGLANG_VERSIONS[0], sglang_oscar.SGLANG_VERSIONS[-1]
    (needed,) = [line for line in metadata.get_all("Requires-Dist") if line.startswith("sglang") and ";" not in line]
    assert sorted(needed.removeprefix("sglang").split(",")) == sorted([f">={first}", f"<={last}"])


def test_commands_and_plugin(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    lines = wheel.read(name).decode()
    assert "oscar = oscar_tools.cli:app" in lines
    assert "oscar = sglang_oscar.plugin:register" in lines
