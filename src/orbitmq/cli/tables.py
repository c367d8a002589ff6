"""Tables for people: numbers to the right, nothing cut off, plain when they go into a pipe.

A table that fits is put together here, which takes microseconds for a row; one that is wider than
the terminal is left to rich, which folds cells and takes a millisecond.
"""

from __future__ import annotations

import io
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from orbitmq.cli.wording import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

R = TypeVar("R")

_GAP = "  "
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"
#: In a pipe there is no edge to fit into, and lines must stay whole.
_ENDLESS = 100_000


class Columns(Generic[R]):
    """What a table shows of its rows, column by column."""

    def __init__(self) -> None:
        self._columns: list[_Column[R]] = []

    def text(
        self, title: str, show: Callable[[R], str], *, bad: Callable[[R], bool] | None = None
    ) -> Self:
        """A column of words; one that is `bad` is red where there are colours."""
        self._columns.append(_Column(title, show, False, bad))
        return self

    def id(self, title: str, show: Callable[[R], str]) -> Self:
        """A column of texts that people copy: one is never broken, however narrow it gets."""
        self._columns.append(_Column(title, show, False, None, is_whole=True))
        return self

    def number(
        self, title: str, show: Callable[[R], str], *, bad: Callable[[R], bool] | None = None
    ) -> Self:
        """A column of numbers, which stand to the right."""
        self._columns.append(_Column(title, show, True, bad))
        return self

    def drawn(self, rows: Sequence[R], *, is_terminal: bool, width: int | None = None) -> str:
        """The table as text, with a line that names the columns."""
        cells = [[harmless(column.show(row)) for column in self._columns] for row in rows]
        widths = [
            max(_width(column.title), max((_width(line[place]) for line in cells), default=0))
            for place, column in enumerate(self._columns)
        ]
        if width is None:
            width = shutil.get_terminal_size().columns if is_terminal else _ENDLESS
        if sum(widths) + len(_GAP) * (len(widths) - 1) > width:
            return drawing(self.grid(rows), is_terminal=is_terminal, width=width)
        has_colours = is_terminal and not os.environ.get("NO_COLOR")
        titles = self._line([column.title for column in self._columns], widths, None)
        lines = [f"{_BOLD}{titles}{_PLAIN}" if has_colours else titles]
        for row, line in zip(rows, cells, strict=True):
            lines.append(self._line(line, widths, row if has_colours else None))
        return "\n".join(lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int], row: R | None) -> str:
        """A line of cells; with its row, those that are bad are red."""
        parts = []
        for column, cell, width in zip(self._columns, cells, widths, strict=True):
            blank = " " * (width - _width(cell))
            shown = f"{_RED}{cell}{_PLAIN}" if row is not None and column.is_bad(row) else cell
            parts.append(blank + shown if column.is_number else shown + blank)
        return _GAP.join(parts).rstrip()

    def grid(self, rows: Iterable[R]) -> RenderableType:
        """The table as something that rich can show among other things."""
        # Late: most commands do without.
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
        for column in self._columns:
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                overflow="fold",
                no_wrap=column.is_whole,
            )
        for row in rows:
            table.add_row(
                *(
                    Text(harmless(column.show(row)), style="red" if column.is_bad(row) else "")
                    for column in self._columns
                )
            )
        return table


@dataclass(frozen=True, slots=True)
class _Column(Generic[R]):
    title: str
    show: Callable[[R], str]
    is_number: bool
    bad: Callable[[R], bool] | None
    is_whole: bool = False

    def is_bad(self, row: R) -> bool:
        return self.bad is not None and self.bad(row)


def _width(text: str) -> int:
    """How many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def drawing(drawn: RenderableType, *, is_terminal: bool, width: int | None = None) -> str:
    """Something of rich as text, without blanks at the ends of lines."""
    from rich.console import Console  # noqa: PLC0415

    if width is None:
        width = shutil.get_terminal_size().columns if is_terminal else _ENDLESS
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=is_terminal, highlight=False).print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair per line."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}{_GAP}{harmless(value)}".rstrip() for name, value in pairs)
