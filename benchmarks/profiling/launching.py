"""Starts a program, and when that is ready becomes the profiler that watches it.

    python -m benchmarks.profiling.launching PROFILER [WORD ...] -- PROGRAM [WORD ...]

On most systems a process may be traced by those who started it and, without privileges, by nobody
else. So the profiler has to be an ancestor of what it watches; but one that started the program
itself would also count how that sets itself up. This process therefore starts the program, waits
until it says that it is ready, and is then replaced by the profiler, which has its children.

The program's input ends when the profiler does: that is how it knows that it is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

#: What a program says when it is set up and warm.
READY = b"ready\n"


def main(words: Sequence[str]) -> NoReturn:
    border = words.index("--")
    profiler, program = words[:border], words[border + 1 :]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdout.readline() != READY:
        child.stdin.close()
        child.wait()
        sys.exit(1)
    # The profiler holds it open without knowing of it.
    os.set_inheritable(child.stdin.fileno(), True)
    os.execv(profiler[0], [*profiler, "--pid", str(child.pid)])  # noqa: S606  # no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
