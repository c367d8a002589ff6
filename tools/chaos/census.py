"""What a process holds, as the kernel counts it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

#: What Linux calls CPUCLOCK_SCHED: the time of a process as the scheduler counts it.
_SCHEDULED = 2


@dataclass(frozen=True, slots=True)
class Census:
    """Of one process at one time."""

    memory: int  #: bytes of its own; what it maps of files is the kernel's to drop
    descriptors: int
    cpu: float  #: seconds, since its start


def census(pid: int) -> Census:
    """Raises `OSError` when there is no such process."""
    folder = Path("/proc") / str(pid)
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Census(
        memory=int(status["RssAnon"].split()[0]) * 1024,
        descriptors=sum(1 for _ in (folder / "fd").iterdir()),
        cpu=(int(fields[11]) + int(fields[12])) / ticks,
    )


def processor_time(pid: int) -> float:
    """Seconds of processor that a process has had in all its threads, to the nanosecond.

    The kernel has a clock for it, whose number follows from the process's (clock_getcpuclockid(3)).
    """
    return time.clock_gettime(~pid << 3 | _SCHEDULED)
