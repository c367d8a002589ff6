"""Jars from Maven Central, fetched once into a folder below `build/`, whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

PROBE_DEADLINE = 60.0  #: for the first answer of Maven Central, when nothing is cached
FETCH_DEADLINE = 300.0

_WITHOUT_OTHERS = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


class Unavailable(Exception):
    """Artifacts, or the programs to run them, cannot be had here, for the reason given."""


def fetch_jars(folder: Path, artifacts: Sequence[str], *, alone: bool = False) -> None:
    """Puts artifacts (`group:name:version`) and all that they need to run into `folder`.

    `alone`: only these. Raises `Unavailable`.
    """
    without = _WITHOUT_OTHERS if alone else ""
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version>{without}</dependency>"
        for group, name, version in (each.split(":") for each in artifacts)
    )
    pom = folder.parent / "pom.xml"
    pom.write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>orbitmq</groupId>"
        "<artifactId>fetched</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    probe = f"-Dartifact={artifacts[0]}:pom"
    _maven(pom, PROBE_DEADLINE, "dependency:get", probe, "-Dtransitive=false")
    target = f"-DoutputDirectory={folder}"
    _maven(pom, FETCH_DEADLINE, "dependency:copy-dependencies", target, "-DincludeScope=runtime")


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder appear complete or not at all, whoever else makes it at the same time.

    Several runs share the cache, and a running client must not have its classes replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        fill(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def tool(name: str) -> str:
    """The path of a program. Raises `Unavailable`."""
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not installed")
    return found


def _maven(pom: Path, deadline: float, *arguments: str) -> None:
    line = [tool("mvn"), "-B", "-q", "-f", str(pom), *arguments]
    try:
        subprocess.run(line, check=True, capture_output=True, text=True, timeout=deadline)
    except subprocess.TimeoutExpired as late:
        raise Unavailable(f"Maven Central did not answer within {deadline} s") from late
    except subprocess.CalledProcessError as failed:
        why = next((each for each in failed.stdout.splitlines() if each.strip()), "no reason given")
        raise Unavailable(f"mvn {arguments[0]} failed: {why}") from failed
