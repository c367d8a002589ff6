"""Who changed what: a line for every action, in the log, in the history and on the page."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from orbitmq.clock import Clock
from orbitmq.console.events import Events
from orbitmq.console.historyfile import HistoryFile

log = logging.getLogger(__name__)

#: Lines that the page shows.
KEPT = 500


class AuditLine(msgspec.Struct, frozen=True):
    """One action."""

    at: float
    who: str
    #: The command that does the same.
    command: str
    outcome: str
    is_done: bool


class Audit:
    """Remembers actions."""

    def __init__(self, clock: Clock, file: HistoryFile, events: Events) -> None:
        self._clock = clock
        self._file = file
        self._events = events
        self._lines: deque[AuditLine] = deque(maxlen=KEPT)

    async def load(self) -> None:
        """Take up what earlier runs did."""
        for text in await self._file.notes(KEPT):
            self._lines.append(msgspec.json.decode(text, type=AuditLine))

    def now(self) -> float:
        return self._clock.now()

    async def note(self, who: str, command: str, outcome: str, *, is_done: bool = True) -> None:
        line = AuditLine(self._clock.now(), who, command, outcome, is_done)
        self._lines.append(line)
        log.info(
            "console action" if is_done else "console action failed",
            extra={"who": who, "command": command, "outcome": outcome},
        )
        self._events.publish("audit", line)
        await self._file.note(line.at, msgspec.json.encode(line).decode())

    @property
    def lines(self) -> list[AuditLine]:
        """The newest first."""
        return list(reversed(self._lines))
