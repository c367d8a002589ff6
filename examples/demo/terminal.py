"""A key at a terminal."""

from __future__ import annotations

import select
import sys

from examples.demo.interrupts import Interrupts

_BEAT = 0.1


def wait_for_key(interrupts: Interrupts) -> None:
    """Return when a key is pressed, or a signal comes, or the terminal is gone."""
    try:
        import termios  # noqa: PLC0415  # not on Windows
        import tty  # noqa: PLC0415
    except ImportError:
        sys.stdin.readline()
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        while not interrupts.came:
            if select.select([file], [], [], _BEAT)[0]:
                return
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
