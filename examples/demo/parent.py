"""Ends a process of the demo when the demo itself is gone, however that came about."""

from __future__ import annotations

import os
import signal
import threading


def end_with_parent() -> None:
    """From now on the end of the standard input, whose other side the demo holds, is a SIGTERM."""
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
