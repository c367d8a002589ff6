"""The shares as a table for people."""

from __future__ import annotations

from itertools import zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.profiling.paths import HotPath
from benchmarks.profiling.shares import PathProfile
from benchmarks.profiling.speedscope import Frame
from benchmarks.profiling.tracing import RATE

#: Functions of each process that are shown.
_ROWS = 10
#: A role that was hardly ever at work says nothing.
_LEAST_SHARE = 0.01

_MOVING = " What is called often and ends soon has too small a share: nothing stood still."
_CAPTION = (
    "own: in the function itself and in what it calls that is not Python; total: with all that it "
    "calls. Shares are of the time in which a thread of the process was at work or wanted to be."
)


def print_profile(path: HotPath, profile: PathProfile, seconds: int, console: Console) -> None:
    table = Table(
        title=f"{path.name}: {path.about}",
        caption=_CAPTION + ("" if path.stands_still else _MOVING),
    )
    table.add_column("process")
    for share, functions in (
        ("own", "largest by themselves"),
        ("total", "largest with what they call"),
    ):
        table.add_column(share, justify="right")
        table.add_column(functions, overflow="fold", ratio=1)
    for role in profile.roles:
        if role.samples < _LEAST_SHARE * profile.samples:
            continue
        rows = zip_longest(role.largest_own(_ROWS), role.largest_total(_ROWS))
        heading = f"{role.role}, {role.samples / (RATE * seconds):.0%} busy"
        for own, total in rows:
            table.add_row(heading, *_cells(own), *_cells(total))
            heading = ""
        table.add_section()
    console.print(table)


def _cells(entry: tuple[Frame, float] | None) -> tuple[str, Text]:
    if entry is None:
        return "", Text("")
    frame, share = entry
    where = frame.file if frame.line is None else f"{frame.file}:{frame.line}"
    return f"{share:.1%}", Text.assemble(frame.name, " ", (str(where), "dim"))
