"""What every process of a scenario owes to whoever started it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

#: Has a process write the stacks of its threads into its log.
TELL_WHERE = signal.SIGUSR1
_SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl


def die_with_parent() -> None:
    """A harness that is killed cannot end what it has started: the kernel does it."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended in this instant
        os.kill(os.getpid(), signal.SIGKILL)


def tell_where_when_asked() -> None:
    """A process that hangs says where when it gets `TELL_WHERE`."""
    faulthandler.register(TELL_WHERE, all_threads=True)
