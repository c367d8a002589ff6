"""Has a process end with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl


def die_with_parent() -> None:
    """A harness that is killed cannot end what it has started: the kernel does it."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended in this instant
        os.kill(os.getpid(), signal.SIGKILL)
