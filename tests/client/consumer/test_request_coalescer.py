"""One question for several who have it: whose answer is shared, and with whom."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from orbitmq.client.consumer.members import _MOST, RequestCoalescer
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.errors import NotRunning


class Asked:
    """Questions of a test: which were sent, and when they are answered."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answered = asyncio.Event()
        self.error: BrokerUnavailable | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.shared = RequestCoalescer(self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.append(task)
        return task

    async def _ask(self) -> int:
        self.sent.append(len(self.sent) + 1)
        number = self.sent[-1]
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        return number

    def asking(self, after: int, subject: object = "members") -> asyncio.Task[int]:
        return asyncio.ensure_future(self.shared.answer(subject, after, self._ask))


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_who_asks_while_a_question_is_out_shares_it_unless_it_was_sent_too_early() -> None:
    asked = Asked()
    first = [asked.asking(after=0), asked.asking(after=0)]
    await turn()
    late = asked.asking(after=asked.shared.sent)
    other = asked.asking(after=0, subject="holdings")
    await turn()
    asked.answered.set()

    assert await asyncio.gather(*first, late, other) == [1, 1, 2, 3]
    assert await asked.asking(after=1) == 2
    assert await asked.asking(after=2) == 4


async def test_an_error_is_everybodys_and_the_next_question_is_a_new_one() -> None:
    asked = Asked()
    asked.error = BrokerUnavailable("broker-a", "the test says so")
    asked.answered.set()
    for waiting in (asked.asking(after=0), asked.asking(after=0)):
        with pytest.raises(BrokerUnavailable, match="the test says so"):
            await waiting
    asked.error = None

    assert await asked.asking(after=1) == 2


async def test_who_is_cancelled_leaves_the_question_to_the_others() -> None:
    asked = Asked()
    gone, stays = asked.asking(after=0), asked.asking(after=0)
    await turn()
    gone.cancel()
    await turn()
    asked.answered.set()

    assert gone.cancelled()
    assert await stays == 1


async def test_when_the_client_ends_whoever_waits_is_told_so_and_not_cancelled() -> None:
    asked = Asked()
    waiting = asked.asking(after=0)
    await turn()
    (task,) = asked.tasks
    task.cancel()

    with pytest.raises(NotRunning):
        await waiting


async def test_a_client_that_is_being_stopped_begins_no_question() -> None:
    """A coroutine that was made for it would never be awaited."""
    made: list[Coroutine[Any, Any, None]] = []

    def refuse(work: Coroutine[Any, Any, Any], _: str) -> asyncio.Task[Any]:
        work.close()
        raise NotRunning("this client", was_stopped=True)

    def ask() -> Coroutine[Any, Any, None]:
        made.append(asyncio.sleep(0))
        return made[-1]

    with pytest.raises(NotRunning):
        await RequestCoalescer(refuse).answer("members", 0, ask)

    assert made == []


async def test_only_so_many_answers_are_kept() -> None:
    asked = Asked()
    asked.answered.set()
    for number in range(_MOST + 10):
        await asked.asking(after=0, subject=number)

    assert len(asked.shared._asked) == _MOST
