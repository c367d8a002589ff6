"""Requests that wait for an answer, as objects."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref

import pytest

from orbitmq.remoting.blocking import Waiter
from orbitmq.remoting.connection import PendingRequests
from orbitmq.remoting.settings import Address, ConnectionLost, RemotingError
from orbitmq.wire.command import Command
from tests.support.collecting import wherever_garbage_is_collected


class _Asker:
    """Is called with the answer, and keeps what it asked by: a cycle."""

    def __init__(self, pending: PendingRequests) -> None:
        self.pending = pending

    def answered(self, _: Command | RemotingError) -> None: ...


async def test_requests_that_are_forgotten_with_their_connection_are_collected() -> None:
    pending = PendingRequests(asyncio.get_running_loop(), Address("127.0.0.1", 1), 10)
    asker = _Asker(pending)
    pending.add(1, 11, 60.0, asker.answered)
    assert pending._timer is not None
    pending._timer.cancel()  # the loop knows it until then
    pending._timer = None
    gone = weakref.ref(asker)

    del pending, asker
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_thread_that_asks_in_the_moment_of_the_end_is_told_of_it(is_first: bool) -> None:
    pending = PendingRequests(asyncio.get_running_loop(), Address("127.0.0.1", 1), 10)

    class Ending(dict[int, Waiter]):
        """The connection ends just before, or just after, a request is entered here."""

        def __setitem__(self, opaque: int, waiter: Waiter) -> None:
            if is_first:
                pending.fail_all("over")
            super().__setitem__(opaque, waiter)
            if not is_first:
                pending.fail_all("over")

    pending._threads = Ending()
    waiter = Waiter()

    with pytest.raises(ConnectionLost, match="over"):
        pending.add_thread(1, waiter)
    assert len(pending) == 0
    assert is_first or isinstance(waiter.outcome, ConnectionLost)


@pytest.mark.parametrize("call", ["last_thread", "fail_all"])
async def test_threads_may_come_at_any_point_of_a_look_at_all_of_them(call: str) -> None:
    pending = PendingRequests(asyncio.get_running_loop(), Address("127.0.0.1", 1), 1000)
    opaques = itertools.count()

    def come() -> None:
        pending._threads[next(opaques)] = Waiter()

    def look() -> None:
        if call == "fail_all":
            pending.fail_all("over")
        else:
            pending.last_thread()

    assert wherever_garbage_is_collected(look, come, pending) > 0
