"""What the figures were measured on, without saying where."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

_PACKAGES = ("orbitmq", "msgspec", "numpy", "pyarrow", "lark", "isal")
_ROOT = Path(__file__).parent.parent


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that figures depend on."""

    python: str
    optimised_build: bool  #: profile-guided; others run interpreter-bound code 1.4 times slower
    cpu: str
    cores: int
    system: str
    packages: dict[str, str]
    commit: str


def this_machine() -> Machine:
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        optimised_build="--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        commit=_commit(),
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


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    told = subprocess.run(
        [git, "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() if told.returncode == 0 else "unknown"
