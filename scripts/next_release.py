"""Test a release of SGLang that is not supported yet, and print what moved; next_release.sh makes its environment.

    python scripts/next_release.py VERSION or WHEEL.whl

Its sources go beside those of the supported releases (scripts/releases.py). Tests of releases then run for it alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import releases

TESTS = ("test/contract", "test/server/test_served_releases.py")


def wheel_of(what: str, scratch: Path) -> Path:
    """The wheel that is named, downloaded where it is a version.

    Raises:
        SystemExit: there is no such file, or pip cannot get that version.
    """
    if what.endswith(".whl"):
        if not Path(what).is_file():
            sys.exit(f"error: {what}: no such file")
        return Path(what)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "off", "--no-deps"]
    options = ["--only-binary=:all:", *releases.WHEELS, "--dest", str(scratch), f"sglang=={what}"]
    if subprocess.run([*pip, *options], check=False).returncode:
        sys.exit(f"error: pip cannot download sglang=={what}")
    return next(scratch.glob("*.whl"))


def unpack(wheel: Path) -> str:
    """Put the sources of a wheel where :func:`releases.tree` finds them, and return its version.

    Raises:
        SystemExit: it is no wheel of SGLang.
    """
    name, version, *_ = wheel.name.split("-")
    if name != "sglang":
        sys.exit(f"error: {wheel.name} is no wheel of sglang")
    place = releases.folder() / version
    if version in releases.pins() and (place / releases.COMPLETE).exists():
        return version
    shutil.rmtree(place, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place, [entry for entry in archive.namelist() if releases.wanted(entry)])
    (place / releases.COMPLETE).touch()
    return version


def run(version: str, report: Path) -> None:
    """Run the tests of releases for one, and write what became of them as JUnit's XML."""
    env = os.environ | {"OSCAR_TEST_NEXT": version, "OSCAR_TEST_WARM": "0"}
    # Tests without the version in their name compare supported releases.
    options = ["-n0", "-q", "--tb=no", "--no-summary", "-k", version, f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *TESTS], check=False, cwd=releases.ROOT, env=env)


def moved(report: Path) -> tuple[int, list[str]]:
    """How many tests ran, and a line for each that failed.

    Args:
        report: JUnit's XML.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    lines = []
    for case in ran:
        for fault in (*case.findall("failure"), *case.findall("error")):
            message = fault.get("message", "").partition("\n")[0].removeprefix("AssertionError: ")
            lines.append(f"{case.get('name', '').partition('[')[0].removeprefix('test_').replace('_', ' ')}: {message}")
    return len(ran), lines


def main() -> None:
    """Fetch, test, and say what moved; exit status 1 where something did."""
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/next_release.py VERSION or WHEEL.whl")
    with tempfile.TemporaryDirectory() as scratch:
        version = unpack(wheel_of(sys.argv[1], Path(scratch)))
        report = Path(scratch) / "report.xml"
        run(version, report)
        if not report.exists():
            sys.exit("error: the tests did not run")
        ran, lines = moved(report)
    print(f"\nsglang {version}: {ran - len(lines)} of {ran} tests passed")
    for line in lines:
        print(f"* {line}")
    if lines or not ran:
        sys.exit(1)
    print("Nothing moved. docs/releases.md, `Adding a release`, says how the bound is raised.")


if __name__ == "__main__":
    main()
