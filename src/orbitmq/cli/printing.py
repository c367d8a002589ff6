"""Where results go: to people as text and tables, to programs as JSON, never mixed.

Standard output has results and nothing else; what is said about them goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from orbitmq.cli.jsonoutput import line_of
from orbitmq.cli.tables import Columns, facts
from orbitmq.cli.wording import harmless, moment
from orbitmq.clock import Clock, SystemClock

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints in the way that was asked for."""

    is_json: bool = False
    is_exact: bool = False
    clock: Clock = field(default_factory=SystemClock)

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    # For programs.

    def record(self, record: Any) -> None:
        """One object; seen at once, also in a pipe."""
        self.raw(line_of(record))

    def records(self, records: Iterable[Any]) -> None:
        for record in records:
            self.record(record)

    # For people.

    def line(self, text: str = "") -> None:
        """One line."""
        self.raw(harmless(text))

    def text(self, text: str) -> None:
        """A text of others, which may have several lines; as it is when it goes into a pipe."""
        self.raw(harmless(text, keep_lines=True) if self.is_terminal else text)

    def raw(self, text: str) -> None:
        """A text as it is."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def coloured(self, text: str, colour: Literal["green", "red"]) -> str:
        """A word of ours that is green or red where there are colours."""
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
        """A time as people like it, or exactly if that was asked for."""
        return moment(at, self.clock.now(), exact=self.is_exact)

    # Beside the results.

    def note(self, text: str) -> None:
        """Something about the results."""
        sys.stderr.write(harmless(text) + "\n")
        sys.stderr.flush()
