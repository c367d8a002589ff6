"""Resets that meet a stop: they are told in time, or it is said that they were not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from orbitmq.client.consumer import handover
from orbitmq.client.consumer.resets import ResetUnsettled
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consuming import DEADLINE, until
from tests.support.rebalancing import TOPIC, Consumer, Group
from tests.support.slow_progress import (
    FIRST,
    PATIENT,
    SECOND,
    Busy,
    Slow,
    busy_with_the_sixth,
    consumed_five,
)


@pytest.fixture
async def cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        yield cluster


# ---- of queues that are owned


async def test_a_stop_does_not_wait_for_ever_for_a_reset_that_began_before(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_LAST_REPORT", 0.2)
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.turns[:] = [asyncio.Event()]
        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        async with asyncio.timeout(DEADLINE):
            await member.rebalancer.stop()

        with pytest.raises(BrokerUnavailable, match=r"not taken within 0\.2 s"):
            await reset


async def test_nor_if_a_handler_is_at_work_on_its_queue(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_LAST_REPORT", 0.4)
    # So that the release is cut short before the reset is.
    monkeypatch.setattr(handover, "_STOP", 0.1)
    progress, handler = Slow(), Busy()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await busy_with_the_sixth(cluster, group, progress, handler)
        progress.turns[:] = [asyncio.Event()]
        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        async with asyncio.timeout(DEADLINE):
            await member.rebalancer.stop(within=0.1)

        with pytest.raises(BrokerUnavailable):
            await reset
        handler.may_end.set()


async def test_a_reset_that_a_stop_which_is_cut_short_does_not_wait_for_is_not_said_to_be_done(
    cluster: AsyncEmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        (turn,) = progress.turns[:] = [asyncio.Event()]
        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        stop = asyncio.create_task(member.rebalancer.stop())
        await until(lambda: SECOND not in member.owned)
        stop.cancel()
        with suppress(asyncio.CancelledError):
            await stop
        await until(lambda: FIRST not in member.owned)
        turn.set()

        with pytest.raises(ResetUnsettled):
            await reset
        assert progress.kept[FIRST] == 5
    assert f"in {FIRST} could not be reset to 2" in caplog.text


# ---- of queues that are claimed


async def test_a_stop_waits_for_a_reset_of_a_queue_that_is_claimed(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        reset, turn = await begun_reset_of_a_claim(member, progress)

        stop = asyncio.create_task(member.stop())
        await until(lambda: not member.owned)
        turn.set()
        await asyncio.gather(reset, stop)

        assert progress.kept[FIRST] == 2


async def test_but_not_for_ever(
    cluster: AsyncEmbeddedCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(handover, "_LAST_REPORT", 0.2)
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        reset, _ = await begun_reset_of_a_claim(member, progress)

        async with asyncio.timeout(DEADLINE):
            await member.stop()

        with pytest.raises(BrokerUnavailable, match=r"not taken within 0\.2 s"):
            await reset
    assert f"in {FIRST} could not be reset to 2" in caplog.text


async def test_a_reset_that_ends_with_the_client_is_said_not_to_be_done(
    cluster: AsyncEmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        reset, _ = await begun_reset_of_a_claim(member, progress)

        await member.kill()

        with pytest.raises(asyncio.CancelledError):
            await reset
    assert f"in {FIRST} could not be reset to 2" in caplog.text


async def begun_reset_of_a_claim(
    member: Consumer, progress: Slow
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A reset of the first queue, which is being gained, and what it waits for."""
    progress.answers = asyncio.Event()
    member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
    await until(lambda: progress.has_read)
    (turn,) = progress.turns[:] = [asyncio.Event()]
    reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
    await until(lambda: progress.waiting == 1)
    return reset, turn
