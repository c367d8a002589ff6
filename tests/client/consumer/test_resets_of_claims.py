"""Resets of queues that we do not have yet, and then are not to have: they count all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from orbitmq.client.consumer.resets import ResetUnsettled
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consuming import until
from tests.support.rebalancing import TOPIC, Consumer, Group
from tests.support.slow_progress import FIRST, PATIENT, Slow, consumed_five, repeated


@pytest.fixture
async def cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        yield cluster


async def claims_the_first(cluster: AsyncEmbeddedCluster, group: Group, progress: Slow) -> Consumer:
    """A member that has read where the first queue is, and has not begun it yet.

    The queue goes to a member with the name "a" when there is one.
    """
    member = await consumed_five(cluster, group, progress, client={"instance": "b"})
    progress.answers = asyncio.Event()
    member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
    await until(lambda: progress.has_read and FIRST in member.rebalancer.claimed)
    return member


async def lets_the_first_go(
    cluster: AsyncEmbeddedCluster, group: Group, progress: Slow, monkeypatch: pytest.MonkeyPatch
) -> Consumer:
    """The same, before the round that finds the queue missing: and that does not claim it."""
    member = await consumed_five(cluster, group, progress, client={"instance": "b"})
    monkeypatch.setattr(member.rebalancer._acquisition, "claim", lambda *_: None)
    member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
    await until(lambda: FIRST not in member.owned)
    return member


async def begun_reset(
    member: Consumer, progress: Slow, offset: int
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A reset of the first queue, and what it waits for."""
    (turn,) = progress.turns[:] = [asyncio.Event()]
    reset = asyncio.create_task(member.rebalancer.reset({FIRST: offset}))
    await until(lambda: progress.waiting == 1)
    return reset, turn


async def newcomer(group: Group, progress: Slow) -> Consumer:
    """A member that is to have the first queue."""
    shared = Slow()
    shared.kept = progress.kept
    return await group.join(progress=shared, client={"instance": "a"})


async def has_asked(member: Consumer) -> None:
    """Wait until a member has asked the others for what they hold, and once more."""
    members = member.rebalancer._members
    assert members is not None
    before = members.asked
    await until(lambda: members.asked >= before + 4)


# ---- queues that go to another member meanwhile


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "not claimed yet"])
async def test_a_queue_that_goes_to_another_member_before_its_reset_is_told_waits_for_that(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch, is_claimed: bool
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = (
            await claims_the_first(cluster, group, progress)
            if is_claimed
            else await lets_the_first_go(cluster, group, progress, monkeypatch)
        )
        reset, turn = await begun_reset(member, progress, 2)

        other = await newcomer(group, progress)
        await until(lambda: FIRST in other.rebalancer.claimed | other.owned)
        await until(lambda: FIRST not in member.rebalancer.claimed)
        await has_asked(other)
        assert FIRST not in other.owned
        turn.set()
        await reset

        await until(lambda: other.owned == {FIRST})
        await until(lambda: repeated(group) == [2, 3, 4])
        assert progress.read(FIRST) is None
        if progress.answers is not None:
            progress.answers.set()


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "not claimed yet"])
async def test_in_order_it_does_not_wait_and_the_reset_is_not_said_to_be_done(
    cluster: AsyncEmbeddedCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_claimed: bool,
) -> None:
    progress = Slow()
    async with Group(
        cluster.name_server, settings=PATIENT, progress=progress, is_orderly=True
    ) as group:
        member = (
            await claims_the_first(cluster, group, progress)
            if is_claimed
            else await lets_the_first_go(cluster, group, progress, monkeypatch)
        )
        reset, turn = await begun_reset(member, progress, 2)

        other = await newcomer(group, progress)
        await until(lambda: other.owned == {FIRST} and not member.rebalancer._is_own(FIRST))
        turn.set()

        with pytest.raises(ResetUnsettled, match="reset it again"):
            await reset
        assert progress.read(FIRST) is None
        if progress.answers is not None:
            progress.answers.set()
    assert f"in {FIRST} could not be reset to 2" in caplog.text


# ---- and are reset again


@pytest.mark.parametrize("is_orderly", [False, True], ids=["concurrent", "in order"])
async def test_an_older_reset_does_not_land_after_a_newer_one_that_another_member_follows(
    cluster: AsyncEmbeddedCluster, is_orderly: bool
) -> None:
    progress = Slow()
    async with Group(
        cluster.name_server, settings=PATIENT, progress=progress, is_orderly=is_orderly
    ) as group:
        member = await claims_the_first(cluster, group, progress)
        older, turn = await begun_reset(member, progress, 4)
        other = await newcomer(group, progress)
        await until(lambda: FIRST in (other.owned if is_orderly else other.rebalancer.claimed))
        await until(lambda: FIRST not in member.rebalancer.claimed)

        await asyncio.gather(*(each.rebalancer.reset({FIRST: 2}) for each in (member, other)))
        assert progress.kept[FIRST] == 2
        turn.set()
        await older

        assert progress.kept[FIRST] == 2
        assert progress.read(FIRST) is None
        await until(lambda: repeated(group) == [2, 3, 4])
        assert progress.answers is not None
        progress.answers.set()


async def test_as_long_as_others_wait_for_an_older_reset_a_newer_one_is_told_as_well(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await claims_the_first(cluster, group, progress)
        older, turn = await begun_reset(member, progress, 4)
        # Nobody else is there who could follow.
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: FIRST not in member.rebalancer.claimed)

        await member.rebalancer.reset({FIRST: 2})
        assert progress.kept[FIRST] == 2
        turn.set()
        await older

        assert progress.kept[FIRST] == 2
        assert progress.read(FIRST) is None
        assert progress.answers is not None
        progress.answers.set()


# ---- what is left behind


async def test_a_claim_that_is_dropped_after_its_queue_was_reset_leaves_no_position_behind(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        with monkeypatch.context() as patched:
            member = await lets_the_first_go(cluster, group, progress, patched)
            reset, turn = await begun_reset(member, progress, 2)
        # Claimed meanwhile, and not free.
        monkeypatch.setattr(member.rebalancer._acquisition, "_free", nothing_is_free)
        member.rebalancer.wake()
        await until(lambda: FIRST in member.rebalancer.claimed)
        turn.set()
        await reset
        assert progress.kept[FIRST] == 2

        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: FIRST not in member.rebalancer.claimed)

        assert progress.read(FIRST) is None


async def test_nor_does_one_that_is_dropped_while_its_progress_is_read(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await claims_the_first(cluster, group, progress)
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: FIRST not in member.rebalancer.claimed)
        gain = member.rebalancer._acquisition._gains[TOPIC].task

        assert progress.answers is not None
        assert gain is not None
        progress.answers.set()
        await gain

        assert progress.read(FIRST) is None


async def nothing_is_free(*_: object) -> list[object]:
    return []


async def test_a_reset_that_is_given_up_leaves_no_position_behind(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await lets_the_first_go(cluster, group, progress, monkeypatch)
        usual = progress.persist

        async def forgotten_before(queues: Iterable[Queue]) -> None:
            progress.forget(FIRST)
            await usual(queues)

        monkeypatch.setattr(progress, "persist", forgotten_before)
        with pytest.raises(ResetUnsettled):
            await member.rebalancer.reset({FIRST: 2})

        assert progress.read(FIRST) is None


async def test_a_claimed_queue_begins_where_it_was_reset_to_even_if_that_could_not_be_told(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await claims_the_first(cluster, group, progress)
        progress.refuses.add(FIRST)
        with pytest.raises(BrokerUnavailable):
            await member.rebalancer.reset({FIRST: 2})
        progress.refuses.clear()

        assert progress.answers is not None
        progress.answers.set()

        await until(lambda: repeated(group) == [2, 3, 4])
