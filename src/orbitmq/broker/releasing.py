"""Parked messages go where they belong: all of a batch, or again from the first that failed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from orbitmq.broker.drafts import Draft
from orbitmq.broker.outcomes import PutResult, PutStatus
from orbitmq.broker.turns import Done, Turns

log = logging.getLogger(__name__)

#: Pauses after the first and after many failures in a row.
FIRST_PAUSE_MS = 100
LONGEST_PAUSE_MS = 5000


class Release:
    """A batch on its way into the store."""

    __slots__ = ("_done", "_failed", "_is_closed", "_left_out", "_waiting", "end", "next_due")

    def __init__(self, done: Callable[[int | None], None]) -> None:
        """`done` is told the first offset that the store did not take, None when there is none."""
        self._done = done
        self._failed: int | None = None
        self._waiting = 0
        self._is_closed = False
        self._left_out: list[int] = []
        #: Behind the last message of the batch.
        self.end = 0
        #: When the message behind the batch is due; None when that is not known.
        self.next_due: int | None = None

    def put(self, turns: Turns, draft: Draft, offset: int, then: Done | None = None) -> None:
        """Put one message, which was parked at `offset`; `then` is told when it is stored."""
        self._waiting += 1

        def told(result: PutResult) -> None:
            self._waiting -= 1
            try:
                if not result.status.is_stored:
                    self._refused(draft, offset, result)
                elif then is not None:
                    then(result)
            finally:
                self._settle()

        turns.put(draft, told, transform=False)

    def leave_out(self, offset: int) -> None:
        """The message that was parked at `offset` goes nowhere."""
        self._left_out.append(offset)

    def left_out(self, failed: int | None) -> int:
        """How many were left out of what is done; the rest of the batch will come again."""
        if failed is None:
            return len(self._left_out)
        return sum(1 for offset in self._left_out if offset < failed)

    def close(self) -> None:
        """The batch is complete."""
        self._is_closed = True
        self._settle()

    def _refused(self, draft: Draft, offset: int, result: PutResult) -> None:
        if result.status is PutStatus.MESSAGE_ILLEGAL:
            # It will never be taken, and must not hold up what is behind it.
            log.error(
                "a parked message cannot be stored where it belongs: %s",
                result.error,
                extra={"topic": draft.topic, "queue": draft.queue_id, "offset": offset},
            )
        elif self._failed is None or offset < self._failed:
            self._failed = offset

    def _settle(self) -> None:
        if self._is_closed and not self._waiting:
            self._is_closed = False
            self._done(self._failed)


class Retrying:
    """When to try again after the store refused: soon at first, then at longer intervals."""

    __slots__ = ("_pause_ms", "not_before")

    def __init__(self) -> None:
        self._pause_ms = FIRST_PAUSE_MS
        #: Milliseconds of the day's clock; 0: at once.
        self.not_before = 0

    def failed(self, now_ms: int) -> None:
        self.not_before = now_ms + self._pause_ms
        self._pause_ms = min(self._pause_ms * 2, LONGEST_PAUSE_MS)

    def succeeded(self) -> None:
        self.not_before = 0
        self._pause_ms = FIRST_PAUSE_MS
