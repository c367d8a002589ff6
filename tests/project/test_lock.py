"""The locked dependencies: whoever sets the project up gets what was tested, and can install it."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
DEVELOPING = ROOT / "requirements" / "dev.txt"
LOCKS = sorted(DEVELOPING.parent.glob("*.txt"))

_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
_EXACT = re.compile(r"==[\w.!+-]+")


def entries(lock: Path) -> list[list[str]]:
    """Every requirement with its options: lines that a backslash makes one, in words."""
    text = lock.read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def locked(lock: Path) -> list[Requirement]:
    """The requirements themselves; a condition (`; python_version < ...`) may belong to one."""
    return [
        Requirement(" ".join(word for word in words if not word.startswith("--hash=")))
        for words in entries(lock)
    ]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_line_names_one_version_and_its_hashes_and_no_address(lock):
    found = entries(lock)

    assert found
    for words in found:
        hashes = [word for word in words if word.startswith("--")]
        assert hashes, f"{words[0]} has no hash"
        assert all(_HASH.fullmatch(word) for word in hashes), words[0]
    for requirement in locked(lock):
        assert _EXACT.fullmatch(str(requirement.specifier)), str(requirement)
        assert requirement.url is None, str(requirement)
    assert "://" not in lock.read_text()


def test_the_oldest_python_that_the_project_admits_can_be_set_up():
    """Debian 12 has 3.11.2: what wants 3.11.5 may be installed here, and cannot be there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # 3.11 means 3.11.0: what admits that admits whatever comes after it.
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    assert re.fullmatch(r"\d+\.\d+\.0", oldest)

    refusing = {
        requirement.name: wanted
        for requirement in locked(DEVELOPING)
        if requirement.marker is None or requirement.marker.evaluate()
        if not SpecifierSet(wanted := wanted_python(requirement)).contains(oldest)
    }

    assert refusing == {}


def wanted_python(requirement: Requirement) -> str:
    """What a distribution says about Python, in the version that is locked."""
    try:
        installed = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        pytest.fail(f"{requirement} is locked and not installed: run make setup")
    assert requirement.specifier.contains(installed.version, prereleases=True), (
        f"{installed.name} {installed.version} is installed and {requirement} locked: make setup"
    )
    return str(installed.metadata.json.get("requires_python", ""))
