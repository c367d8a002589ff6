"""Mistakes that somebody might make, put into the real code: a simulation has to find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from orbitmq.broker.errors import PutStatus
from orbitmq.broker.locks import OrderLocks
from orbitmq.broker.progress import ProgressTable
from orbitmq.broker.writes import Writes
from orbitmq.client.consumer.locks import QueueLock
from orbitmq.client.consumer.sendback import SendBack
from orbitmq.client.consumer.window import Window
from tests.support.powerloss import ForgetfulFiles

Plant = Callable[[], AbstractContextManager[Any]]


def _answers_before_the_flush() -> AbstractContextManager[Any]:
    when_flushed = Writes._answer_when_flushed

    def answer(self: Writes, turn: Any, end: int) -> None:
        if turn.putters:
            when_flushed(self, turn, end)
        else:
            self._answer(turn, PutStatus.PUT_OK)

    return mock.patch.object(Writes, "_answer_when_flushed", answer)


def _forgets_to_flush() -> AbstractContextManager[Any]:
    return mock.patch.object(ForgetfulFiles, "sync", return_value=None)


def _everybody_gets_the_lock() -> AbstractContextManager[Any]:
    def lock(
        self: OrderLocks, group: str, client_id: str, queues: Iterable[Any], now: float
    ) -> tuple[Any, ...]:
        return tuple(queues)

    return mock.patch.object(OrderLocks, "lock", lock)


def _reports_what_is_being_consumed() -> AbstractContextManager[Any]:
    """Progress is where the next pull begins, not the first that is unfinished."""
    return mock.patch.object(Window, "commit_offset", property(lambda self: self._end))


def _believes_in_locks_for_ever() -> AbstractContextManager[Any]:
    """A member goes on with its messages when the broker may have given its lock to others."""

    def is_held(self: QueueLock, now: float) -> bool:
        return self._until != float("-inf")

    return mock.patch.object(QueueLock, "is_held", is_held)


def _forgets_progress() -> AbstractContextManager[Any]:
    """A broker does not read at its start how far groups had come."""

    def load(self: ProgressTable, *_: Any, **__: Any) -> bool:
        return False

    return mock.patch.object(ProgressTable, "load", load)


def _drops_what_failed() -> AbstractContextManager[Any]:
    async def send_back(self: SendBack, message: Any, failure: Any) -> bool:
        await asyncio.sleep(0)
        return True

    return mock.patch.object(SendBack, "send_back", send_back)


#: By name; with what the history has to say about it.
PLANTS: dict[str, tuple[Plant, frozenset[str]]] = {
    "answers-before-the-flush": (_answers_before_the_flush, frozenset({"lost"})),
    "forgets-to-flush": (_forgets_to_flush, frozenset({"lost", "inconsistent", "broken"})),
    "everybody-gets-the-lock": (_everybody_gets_the_lock, frozenset({"overlapping", "reordered"})),
    "reports-what-is-being-consumed": (_reports_what_is_being_consumed, frozenset({"skipped"})),
    "believes-in-locks-for-ever": (_believes_in_locks_for_ever, frozenset({"overlapping"})),
    "forgets-progress": (_forgets_progress, frozenset({"forgotten"})),
    "drops-what-failed": (_drops_what_failed, frozenset({"unseen"})),
}
