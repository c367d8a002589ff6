"""What the kernel knows about a process: its CPU time and its memory."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads that are alive, to the nanosecond where the kernel counts them."""
    tasks = _PROC / str(pid) / "task"
    try:
        counts = [int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()]
    except (OSError, ValueError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK
    return sum(counts) / 1e9


def own_bytes(pid: int) -> int:
    """Memory that the process occupies for itself. Files that it has mapped are the kernel's."""
    return _status(pid, "RssAnon")


def resident_bytes(pid: int) -> int:
    """All that is in memory of what the process can see, files that it has mapped included."""
    return _status(pid, "VmRSS")


def _status(pid: int, name: str) -> int:
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not tell a process's {name}")
