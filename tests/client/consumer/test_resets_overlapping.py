"""Resets that overlap, and resets of queues that are being given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orbitmq.client.consumer import handover
from orbitmq.client.consumer.resets import ResetUnsettled
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consuming import until
from tests.support.rebalancing import TOPIC, Consumer, Group
from tests.support.slow_progress import (
    FIRST,
    PATIENT,
    SECOND,
    Busy,
    Slow,
    busy_with_the_sixth,
    consumed_five,
    repeated,
)


@pytest.fixture
async def cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        yield cluster


# ---- the newest counts


async def test_of_two_resets_of_a_queue_the_newer_one_counts(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        (turn,) = progress.turns[:] = [asyncio.Event()]
        older = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        await member.rebalancer.reset({FIRST: 4})
        turn.set()
        await older

        await until(lambda: repeated(group) == [4] and progress.read(FIRST) == 5)
    assert progress.kept[FIRST] == 5
    assert repeated(group) == [4]


async def test_of_two_resets_of_a_queue_that_is_being_gained_the_newer_one_counts(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.answers = asyncio.Event()
        member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
        await until(lambda: progress.has_read)
        (turn,) = progress.turns[:] = [asyncio.Event()]
        older = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        await member.rebalancer.reset({FIRST: 4})
        turn.set()
        await older

        assert progress.kept[FIRST] == 4
        progress.answers.set()
        await until(lambda: repeated(group) == [4] and progress.read(FIRST) == 5)
    assert repeated(group) == [4]


async def test_a_reset_that_comes_when_an_earlier_one_has_let_the_queue_go_is_followed(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        with monkeypatch.context() as patched:
            # The round that finds it missing has not been yet.
            patched.setattr(member.rebalancer._acquisition, "claim", lambda *_: None)
            await member.rebalancer.reset({FIRST: 2})
            await until(lambda: FIRST not in member.owned)

            await member.rebalancer.reset({FIRST: 4})

            assert progress.kept[FIRST] == 4
            assert progress.read(FIRST) is None
        member.rebalancer.wake()
        await until(lambda: repeated(group) == [4] and progress.read(FIRST) == 5)
    assert repeated(group) == [4]


# ---- queues that are being given up


async def test_a_reset_during_a_release_is_told_at_once_and_not_again(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a release that took long: the store is asked before anything is reported.
    monkeypatch.setattr(handover, "_LONG", -1.0)
    progress, handler = Slow(), Busy()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await busy_with_the_sixth(cluster, group, progress, handler)
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: member.rebalancer.owned[FIRST].is_draining)

        await member.rebalancer.reset({FIRST: 2})
        assert progress.kept[FIRST] == 2
        assert not handler.may_end.is_set()

        # An owner that does not wait, as Apache's, has gone on from there.
        progress.kept[FIRST] = 9
        await member.progress.fetch(FIRST)
        await member.rebalancer.reporting._report_all()
        assert progress.kept[FIRST] == 9
        handler.may_end.set()
        await until(lambda: FIRST not in member.owned)
        assert progress.kept[FIRST] == 9


async def test_a_reset_while_a_release_asks_how_far_others_are_is_what_remains(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_LONG", -1.0)
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.answers = asyncio.Event()
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: progress.has_read)

        await member.rebalancer.reset({FIRST: 2})
        progress.answers.set()
        await until(lambda: FIRST not in member.owned)

        assert progress.kept[FIRST] == 2


async def test_a_stop_waits_for_a_reset_that_is_on_its_way(cluster: AsyncEmbeddedCluster) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        (turn,) = progress.turns[:] = [asyncio.Event()]
        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        stop = asyncio.create_task(member.stop())
        await until(lambda: SECOND not in member.owned)
        turn.set()
        await asyncio.gather(reset, stop)

        assert progress.kept[FIRST] == 2


async def test_a_reset_goes_on_when_nobody_waits_for_it(cluster: AsyncEmbeddedCluster) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        (turn,) = progress.turns[:] = [asyncio.Event()]
        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        reset.cancel()
        turn.set()

        await until(lambda: repeated(group) == [2, 3, 4])


async def test_every_member_that_is_broadcast_to_follows_a_reset(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress, handler = Slow(), Busy()
    settings = replace(PATIENT, handover=0.1)
    async with Group(
        cluster.name_server, settings=settings, progress=progress, is_broadcasting=True
    ) as group:
        member = await busy_with_the_sixth(cluster, group, progress, handler)

        await member.rebalancer.reset({FIRST: 2})

        assert progress.kept[FIRST] == 2
        await until(lambda: repeated(group) == [2, 3, 4])
        handler.may_end.set()
        await until(lambda: progress.read(FIRST) == 6)


# ---- locks on their way back


@contextmanager
def locks_on_their_way_back(
    member: Consumer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Have the locks that are given back wait: what says that one does, and what lets it go on."""
    assert member.locks is not None
    usual = member.locks.release
    waits, may_go_on = asyncio.Event(), asyncio.Event()

    async def release(queues: Iterable[Queue]) -> None:
        waits.set()
        await may_go_on.wait()
        await usual(queues)

    with monkeypatch.context() as patched:
        patched.setattr(member.locks, "release", release)
        yield waits, may_go_on


async def test_a_reset_that_comes_while_the_lock_is_given_back_counts_if_the_queue_comes_back(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Slow()
    async with Group(
        cluster.name_server, settings=PATIENT, progress=progress, is_orderly=True
    ) as group:
        member = await consumed_five(cluster, group, progress)
        with locks_on_their_way_back(member, monkeypatch) as (waits, may_go_on):
            await member.rebalancer.reset({FIRST: 2})
            await waits.wait()
            (turn,) = progress.turns[:] = [asyncio.Event()]
            newer = asyncio.create_task(member.rebalancer.reset({FIRST: 4}))
            await until(lambda: progress.waiting == 1)
            may_go_on.set()
            await until(lambda: FIRST not in member.owned or not is_dropped(member))
            turn.set()
            await newer

        await until(lambda: 4 in repeated(group) and progress.read(FIRST) == 5)
        await progress.persist([FIRST])
        assert progress.kept[FIRST] == 5


async def test_a_reset_of_a_queue_that_goes_to_somebody_else_with_its_lock_is_an_error(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Slow()
    async with Group(
        cluster.name_server, settings=PATIENT, progress=progress, is_orderly=True
    ) as group:
        member = await consumed_five(cluster, group, progress)
        with locks_on_their_way_back(member, monkeypatch) as (waits, may_go_on):
            member.subscriptions.remove(TOPIC)
            member.rebalancer.wake()
            await until(lambda: is_dropped(member))
            await waits.wait()

            with pytest.raises(ResetUnsettled, match="reset it again"):
                await member.rebalancer.reset({FIRST: 2})
            may_go_on.set()
            await until(lambda: not member.owned)

        assert progress.kept[FIRST] == 5


def is_dropped(member: Consumer) -> bool:
    return member.rebalancer.owned[FIRST].is_dropped
