"""What the figures were measured on, without saying where."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

_PACKAGES = ("orbitmq", "msgspec", "numpy", "pyarrow", "lark", "isal", "uvloop", "pyspark")
_ROOT = Path(__file__).parent.parent


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that figures depend on."""

    python: str
    optimised_build: bool  #: profile-guided; others are 1.1 to 1.3 times slower
    cpu: str
    cores: int
    system: str
    packages: dict[str, str]
    commit: str
    memory: int = 0  #: bytes
    java: str = ""  #: what runs Apache's broker, the Java client and Spark, where there is one
    has_changes: bool = False  #: files under version control that differ from the commit
    day: str = ""  #: of the measurement
    linked_build: bool = False  #: optimised when it was linked
    load: float = 0.0  #: processes that wanted to run in the five minutes before


def this_machine() -> Machine:
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    flags = sysconfig.get_config_var("PY_CFLAGS") or ""
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        optimised_build="--enable-optimizations" in options or "-fprofile-use" in flags,
        linked_build="--with-lto" in options or "-flto" in flags,
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        commit=_git("rev-parse", "--short=12", "HEAD") or "unknown",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        java=_java(),
        has_changes=bool(_git("status", "--porcelain", "--untracked-files=no")),
        day=datetime.now(UTC).date().isoformat(),
        load=os.getloadavg()[1],
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _java() -> str:
    """As it says itself: `openjdk version "17.0.9" 2023-10-17`."""
    java = shutil.which("java", path=_java_path())
    return _told(java, "-version").partition("\n")[0] if java else ""


def _java_path() -> str:
    home = os.environ.get("JAVA_HOME")
    return os.pathsep.join(
        ([str(Path(home) / "bin")] if home else []) + [os.environ.get("PATH", "")]
    )


def _git(*words: str) -> str:
    git = shutil.which("git")
    return _told(git, "-C", str(_ROOT), *words) if git else ""


def _told(*words: str) -> str:
    """What a command says, wherever it says it; nothing when it fails."""
    told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return (told.stdout or told.stderr).strip() if told.returncode == 0 else ""
