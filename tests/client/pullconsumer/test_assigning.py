"""Assignments that overlap or are broken off: what is assigned in the end is what is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import pytest

from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.broker import RawClient, until
from tests.support.polling import DEADLINE, TOPIC, consumer, poll_count, progress, queue, send


@pytest.fixture
async def cluster():
    """Two queues with three messages each."""
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        client = await RawClient.open(cluster.brokers[0])
        await send(client, 6, queues=2)
        await client.close()
        yield cluster


class Gate:
    """Holds reports of progress up, as a broker does that is silent."""

    def __init__(self, reader: AsyncPullConsumer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = asyncio.Event()
        self.waiting = 0
        self._persist = reader._core.progress.persist
        monkeypatch.setattr(reader._core.progress, "persist", self._when_opened)

    async def _when_opened(self, queues: Iterable[Queue]) -> None:
        self.waiting += 1
        await self.opened.wait()
        await self._persist(queues)


async def test_a_queue_whose_giving_up_was_cancelled_can_be_assigned_again(cluster, monkeypatch):
    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        await poll_count(reader, 3)
        gate = Gate(reader, monkeypatch)
        broken_off = asyncio.create_task(reader.assign([queue(1)]))
        await until(lambda: gate.waiting, DEADLINE)
        broken_off.cancel()
        with suppress(asyncio.CancelledError):
            await broken_off
        gate.opened.set()

        await reader.assign([queue(0)])
        await reader.seek_to_begin()

        assert reader.assignment() == (queue(0),)
        assert {each.queue for each in await poll_count(reader, 3)} == {queue(0)}


async def test_of_two_assignments_at_once_the_later_one_counts(cluster, monkeypatch):
    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        await poll_count(reader, 3)
        gate = Gate(reader, monkeypatch)
        earlier = asyncio.create_task(reader.assign([queue(1)]))
        await until(lambda: gate.waiting, DEADLINE)
        later = asyncio.create_task(reader.assign([queue(0)]))
        await until(lambda: reader._core._planned == (queue(0),), DEADLINE)
        gate.opened.set()
        await asyncio.gather(earlier, later)
        await reader.seek_to_begin()

        assert reader.assignment() == (queue(0),)
        assert {each.queue for each in await poll_count(reader, 3)} == {queue(0)}
    assert progress(cluster)[0] == 3


async def test_a_stop_during_an_assignment_begins_nothing_more(cluster, monkeypatch):
    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        gate = Gate(reader, monkeypatch)
        earlier = asyncio.create_task(reader.assign([queue(1)]))
        await until(lambda: gate.waiting, DEADLINE)
        later = asyncio.create_task(reader.assign([queue(0), queue(1)]))
        await until(lambda: len(reader._core._planned) == 2, DEADLINE)
        stopping = asyncio.create_task(reader.stop())
        await until(lambda: not reader._core.is_running, DEADLINE)
        gate.opened.set()
        await asyncio.gather(earlier, later, stopping)

        assert not reader._core.owned
        assert not reader._core.puller.queues


async def test_an_assignment_that_is_cancelled_says_so(cluster, monkeypatch):
    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        asked: list[Queue] = []

        async def never(queue):
            asked.append(queue)
            await asyncio.Event().wait()
            raise AssertionError

        with monkeypatch.context() as patched:
            patched.setattr(reader._core._assigning, "_start", never)
            assigning = asyncio.create_task(reader.assign([queue(0), queue(1)]))
            await until(lambda: asked == [queue(1)], DEADLINE)
            assigning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await assigning

        await reader.assign([queue(0), queue(1)])
        assert reader.assignment() == (queue(0), queue(1))


def test_former_names_of_options_still_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match="use strategy="):
        AsyncPullConsumer("billing", name_server="a:1", allocation="AVG_BY_CIRCLE")
    with pytest.warns(DeprecationWarning, match="use rebalance="):
        AsyncPullConsumer("billing", name_server="a:1", rebalancing=None)
    with (
        pytest.raises(SettingError, match="strategy"),
        pytest.warns(DeprecationWarning, match="use strategy="),
    ):
        AsyncPullConsumer("billing", name_server="a:1", allocation="nope")
    with pytest.raises(TypeError, match="no option colour"):
        AsyncPullConsumer("billing", name_server="a:1", colour="red")  # type: ignore[call-arg]
