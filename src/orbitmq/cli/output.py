"""The output of commands: text and tables, or JSON with `--json`.

Results go to standard output, notes about them to standard error.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TypeVar

import msgspec

from orbitmq.cli.main import for_this_cluster
from orbitmq.clock import Clock, SystemClock
from orbitmq.console.words import NOTHING, duration

if TYPE_CHECKING:
    from rich.console import RenderableType


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints results as text or as JSON."""

    is_json: bool = False
    is_exact: bool = False
    clock: Clock = field(default_factory=SystemClock)

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    def record(self, record: Any) -> None:
        """Print one JSON object and flush."""
        self.raw(line_of(record))

    def records(self, records: Iterable[Any]) -> None:
        for record in records:
            self.record(record)

    def line(self, text: str = "") -> None:
        """One line."""
        self.raw(harmless(text))

    def text(self, text: str) -> None:
        """A text from outside, with several lines; unchanged in a pipe."""
        self.raw(harmless(text, keep_lines=True) if self.is_terminal else text)

    def raw(self, text: str) -> None:
        """A text, unchanged."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def coloured(self, text: str, colour: Literal["green", "red"]) -> str:
        """A word in a colour, where the terminal has colours."""
        if not self.is_terminal or os.environ.get("NO_COLOR"):
            return text
        return f"\x1b[{32 if colour == 'green' else 31}m{text}\x1b[0m"

    def facts(self, *pairs: tuple[str, str]) -> None:
        """Names and values."""
        self.raw(facts(pairs))

    def table(
        self, columns: Columns[R], rows: Sequence[R], *, title: str = "", empty: str = ""
    ) -> None:
        """Rows under a title, after a blank line if it has one; `empty` when there are none."""
        if title:
            self.raw("")
            self.line(title)
        if rows:
            self.raw(columns.drawn(rows, is_terminal=self.is_terminal))
        elif empty:
            self.line(empty)

    def moment(self, at: float | None) -> str:
        """A time relative to now, or a date with `--exact`."""
        return moment(at, self.clock.now(), exact=self.is_exact)

    def note(self, text: str) -> None:
        """A note about the results, on standard error."""
        sys.stderr.write(harmless(for_this_cluster(text, sys.argv)) + "\n")
        sys.stderr.flush()


_GAP = "  "
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"
#: The width in a pipe, where lines must stay whole.
_ENDLESS = 100_000


class Columns(Generic[R]):
    """The columns of a table. Numbers are right-aligned, nothing is cut off.

    A table that fits is formatted here, in microseconds a row. One that is wider than the terminal
    goes to rich, which folds cells and takes a millisecond a row.
    """

    def __init__(self) -> None:
        self._columns: list[_Column[R]] = []

    def text(
        self, title: str, show: Callable[[R], str], *, bad: Callable[[R], bool] | None = None
    ) -> Self:
        """A column of text; `bad` cells are red where the terminal has colours."""
        self._columns.append(_Column(title, show, False, bad))
        return self

    def id(self, title: str, show: Callable[[R], str]) -> Self:
        """A column of ids to copy, which are never wrapped."""
        self._columns.append(_Column(title, show, False, None, is_whole=True))
        return self

    def number(
        self, title: str, show: Callable[[R], str], *, bad: Callable[[R], bool] | None = None
    ) -> Self:
        """A column of right-aligned numbers."""
        self._columns.append(_Column(title, show, True, bad))
        return self

    def drawn(self, rows: Sequence[R], *, is_terminal: bool, width: int | None = None) -> str:
        """The table as text, with a header line."""
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
        """A line of cells; with its row, bad cells are red."""
        parts = []
        for column, cell, width in zip(self._columns, cells, widths, strict=True):
            blank = " " * (width - _width(cell))
            shown = f"{_RED}{cell}{_PLAIN}" if row is not None and column.is_bad(row) else cell
            parts.append(blank + shown if column.is_number else shown + blank)
        return _GAP.join(parts).rstrip()

    def grid(self, rows: Iterable[R]) -> RenderableType:
        """The table as a rich renderable."""
        # Late: most commands do not need it.
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
    """The width of a text on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def drawing(drawn: RenderableType, *, is_terminal: bool, width: int | None = None) -> str:
    """A rich renderable as text, without trailing blanks."""
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


_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def count(number: int | None) -> str:
    """`1,234,567`."""
    return NOTHING if number is None else f"{number:,}"


def rate(per_second: float | None) -> str:
    """`1,234.5`: per second."""
    return NOTHING if per_second is None else f"{per_second:,.1f}"


def fine(seconds: float | None) -> str:
    """`80 µs`, `4 ms`, `1.2 s`: a mostly short duration."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 0.001:
        return f"{max(1, round(seconds * 1e6))} µs"
    return f"{seconds * 1000:.1f} ms" if 0 < seconds < 0.01 else duration(seconds)


def size(number: float | None) -> str:
    """`1.5 MiB`."""
    if number is None:
        return NOTHING
    power = 0
    while number >= 1024 and power < len(_SIZES) - 1:
        number /= 1024
        power += 1
    return f"{number:.0f} B" if power == 0 else f"{number:.1f} {_SIZES[power]}"


def moment(at: float | None, now: float, *, exact: bool = False) -> str:
    """`3 min ago`, `in 20 s`; or with `exact` the local time: `2026-01-31 23:59:59.123`."""
    if at is None:
        return NOTHING
    if exact:
        when = datetime.fromtimestamp(at).astimezone()
        return when.isoformat(" ", "milliseconds")
    if at > now + 1:
        return f"in {duration(at - now)}"
    return f"{duration(max(0.0, now - at))} ago"


def harmless(text: str, *, keep_lines: bool = False) -> str:
    """A text from outside for a terminal: control characters are escaped."""
    if text.isprintable():
        return text
    kept = "\n\t" if keep_lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


# What `--json` prints: one object per line, with the fields of a documented class.
#
# Times (`..._at`) are seconds since 1970, durations (`..._seconds`) seconds, sizes bytes. A field
# without a value is `null`, not missing. Fields are added in later versions, not renamed or
# removed. A body that is UTF-8 is in `body`, any other in `body_base64`.


#: Metadata of a field with a misleading old name, kept for compatibility and not documented.
OLD_NAME: Final[Mapping[str, bool]] = MappingProxyType({"is_old": True})


def line_of(record: Any) -> str:
    """A record as a line of JSON."""
    return msgspec.json.encode(record).decode()


def body_fields(body: bytes) -> tuple[str | None, str | None]:
    """The fields `body` and `body_base64`."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(body).decode()
