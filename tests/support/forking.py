"""Something done in a fork of the process that tests run in, and what came of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass

DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Forked:
    """What was said by a fork that is over."""

    pid: int
    said: str


def in_a_fork(action: Callable[[], str]) -> Forked:
    """Fork, and return what `action` returns there, or an error as text.

    The fork ends there whatever happens, and is killed when it takes too long: it has the locks of
    this process as they were at that moment, and may wait for one for ever.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover  # measured in the parent only
        text = "it did not end by itself"
        try:
            text = action()
        except BaseException as error:  # noqa: BLE001  # told to the parent
            text = f"raised {error!r}"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], DEADLINE)
        said = os.read(reading, 65536).decode() if ready else f"nothing in {DEADLINE:g} s"
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Forked(child, said)
