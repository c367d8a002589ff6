"""Jars from Maven Central, fetched once into a folder below `build/`, whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

#: Is told how many files have been downloaded.
Tell: TypeAlias = Callable[[int], None]

PROBE_DEADLINE = 60.0  #: for the first answer of Maven Central, when nothing is cached
FETCH_DEADLINE = 300.0
#: How often it is told how far a fetch is.
_TOLD_EVERY = 10.0

#: In what Maven says when it does not get through.
_NO_WAY = (
    "No plugin found for prefix",  # nothing has ever been downloaded
    "Connect to",
    "Connection refused",
    "Connection reset",
    "Network is unreachable",
    "No route to host",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Unknown host",
    "timed out",
)

_WITHOUT_OTHERS = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


class Unavailable(Exception):
    """Artifacts, or the programs to run them, cannot be had here, for the reason given."""


class Unreachable(Unavailable):
    """Nothing can be had from Maven Central here."""


def fetch_jars(
    folder: Path, artifacts: Sequence[str], *, alone: bool = False, tell: Tell | None = None
) -> None:
    """Puts artifacts (`group:name:version`) and all that they need to run into `folder`.

    `alone`: only these. Raises `Unavailable`.
    """
    if shutil.which("mvn") is None:
        raise Unreachable("mvn is not installed")
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
    had = 0

    def tell_all(files: int) -> None:
        if tell is not None:
            tell(had + files)

    probe = f"-Dartifact={artifacts[0]}:pom"
    had = _maven(pom, PROBE_DEADLINE, tell_all, "dependency:get", probe, "-Dtransitive=false")
    target = f"-DoutputDirectory={folder}"
    _maven(
        pom,
        FETCH_DEADLINE,
        tell_all,
        "dependency:copy-dependencies",
        target,
        "-DincludeScope=runtime",
    )


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


def _maven(pom: Path, deadline: float, tell: Tell, *arguments: str) -> int:
    """Runs it to its end; how many files it has downloaded."""
    line = [tool("mvn"), "-B", "-f", str(pom), *arguments]
    until = time.monotonic() + deadline
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        output: bytes | None = None
        try:
            while output is None:
                left = until - time.monotonic()
                if left <= 0:
                    raise Unreachable(f"no answer within {deadline:g} s")
                try:
                    output, _ = running.communicate(timeout=min(left, _TOLD_EVERY))
                except subprocess.TimeoutExpired as still:
                    tell(_files(still.output))
        finally:
            running.kill()
    if running.returncode:
        raise _failure(arguments[0], output.decode(errors="replace"))
    return _files(output)


def _files(output: bytes | None) -> int:
    return (output or b"").count(b"] Downloaded from ")


def _failure(goal: str, output: str) -> Unavailable:
    errors = [each for each in output.splitlines() if each.startswith("[ERROR] ")]
    why = errors[0].removeprefix("[ERROR] ").partition(" -> ")[0] if errors else "no reason given"
    if any(sign in why for sign in _NO_WAY):
        return Unreachable("no connection")
    return Unavailable(f"mvn {goal} failed: {why}")
