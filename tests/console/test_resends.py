"""Which dead letters were sent again, and which messages wait for a later attempt."""

from __future__ import annotations

import pytest

from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.console import resends
from orbitmq.console.collect import BrokerTables, DeadLetters, readers
from orbitmq.console.resends import LaterAttempts, Resent, ResentLetters, later_attempts
from orbitmq.wire.codes import RequestCode
from tests.console.conftest import OTHER, QUEUE, die
from tests.support.client_admin import forget_code

BROKERS = ("broker-a", "broker-b")


class Letters:
    """The letters of `billing`, looked up with a count of the lookups."""

    def __init__(self, watch, monkeypatch, **options):
        self._watch = watch
        self._resent = ResentLetters(watch.admin, **options)
        self._tables = BrokerTables(watch.engine)
        self.lookups = 0
        usual = watch.admin.messages.readable_copies

        async def counted(*words, **more):
            self.lookups += 1
            return await usual(*words, **more)

        monkeypatch.setattr(watch.admin.messages, "readable_copies", counted)

    async def look(
        self, since=0.0, groups=("billing",), known="billing", deleted=0, brokers=BROKERS
    ):
        """One look, and what is known of a group then."""
        nodes = [each.node for each in (await self._watch.admin.cluster()).brokers]
        bounds = {group: await self._bounds(nodes, group, deleted) for group in groups}
        self._resent.keep(
            {
                group: DeadLetters(0, 0, each, frozenset(BROKERS), since)
                for group, each in bounds.items()
            }
        )
        topics = ("orders", *(f"%RETRY%{group}" for group in groups))
        totals = {topic: await self._total(nodes, topic) for topic in topics}
        there = [node for node in nodes if node.broker in brokers]
        await self._resent.look(bounds, there, totals, since)
        return self._resent.known(known, since, BROKERS)

    async def _bounds(self, nodes, group, deleted):
        topic = f"%DLQ%{group}"
        found = {node: await self._tables.content(node.address, topic) for node in nodes}
        return {
            Queue(topic, node.broker, number): (low + deleted, high)
            for node, content in found.items()
            if content is not None
            for number, (low, high) in content.queues.items()
        }

    async def _total(self, nodes, topic):
        parts = [await self._tables.content(node.address, topic) for node in nodes]
        return sum(part.total for part in parts if part is not None)


@pytest.fixture
async def dying(watch):
    for group in ("billing", "shipping"):
        await watch.world.consumer(f"of-{group}", group=group)
    return watch


async def test_letters_have_their_turn_in_several_looks_and_are_not_called_open_before(
    dying, monkeypatch
):
    await die(dying.world, 12)
    await dying.admin.dead_letters.resend("billing")
    letters = Letters(dying, monkeypatch, most=5)

    found = [await letters.look() for _ in range(4)]

    assert found == [Resent(5, 5, 0, 5), Resent(10, 10, 0, 10), *[Resent(12, 12, 0, 12)] * 2]
    # Each letter is looked for in two topics, and once.
    assert letters.lookups == 2 * 12


async def test_open_letters_are_looked_up_again_when_a_topic_that_may_have_a_copy_has_grown(
    dying, monkeypatch
):
    await die(dying.world, 4)
    letters = Letters(dying, monkeypatch, most=20)

    fresh, still = await letters.look(), await letters.look()
    before_growth = letters.lookups
    await dying.admin.dead_letters.resend("billing", limit=1)
    retried = await letters.look()
    await dying.admin.dead_letters.resend("billing", limit=1, to="origin")
    returned = await letters.look()

    assert fresh == still == Resent(4, 0, 4)
    assert before_growth == 2 * 4
    assert (retried, returned) == (Resent(4, 1, 3, 1), Resent(4, 2, 2, 2))


async def test_newer_letters_are_read_in_later_looks_and_deleted_ones_forgotten(dying, monkeypatch):
    await die(dying.world, 3)
    letters = Letters(dying, monkeypatch, most=20)
    first = await letters.look()
    await die(dying.world, 2, start=3)
    more = await letters.look()

    fewer = await letters.look(deleted=4)

    assert [each.looked for each in (first, more, fewer)] == [3, 5, 1]


async def test_the_newest_letters_are_known_and_no_more_than_a_bound(dying, monkeypatch):
    monkeypatch.setattr(resends, "NEWEST", 3)
    await die(dying.world, 4)
    dying.cluster.advance(7200.0)
    since = dying.cluster.clock.now() - 3600.0
    await die(dying.world, 2, start=4)

    found = await Letters(dying, monkeypatch, most=20).look(since)
    recent = await Letters(dying, monkeypatch, most=20, only_last_hour=True).look(since)

    assert found == Resent(3, 0, 2)
    assert recent == Resent(2, 0, 2)


async def test_no_group_keeps_the_others_from_their_turn(dying, monkeypatch):
    await die(dying.world, 12)
    await die(dying.world, 1, group="shipping")
    letters = Letters(dying, monkeypatch, most=8)

    found = await letters.look(groups=("billing", "shipping"), known="shipping")

    assert found == Resent(1, 0, 1)
    assert letters.lookups == 2 * 5


async def test_a_letter_that_cannot_be_looked_up_stays_unknown_and_is_tried_again(
    dying, monkeypatch
):
    await die(dying.world, 2)
    letters = Letters(dying, monkeypatch, most=20)

    async def fail(*_, **__):
        raise BrokerUnavailable("broker-a", "it is away")

    with monkeypatch.context() as away:
        away.setattr(dying.admin.messages, "readable_copies", fail)
        blind = await letters.look()
    found = await letters.look()

    assert (blind, found) == (Resent(), Resent(2, 0, 2))


async def test_letters_are_looked_up_again_at_a_broker_that_did_not_answer(dying, monkeypatch):
    await die(dying.world, 2)
    await dying.admin.dead_letters.resend("billing", limit=1)
    letters = Letters(dying, monkeypatch, most=20)
    (letter,) = await dying.admin.dead_letters.sample("billing")
    named = {"DLQ_RESENT_FROM": letter.id, "UNIQ_KEY": letter.message.unique_id}
    await dying.world.send(Queue("%RETRY%billing", "broker-b", 0), **named)

    blind = await letters.look(brokers=("broker-a",))
    found = await letters.look()

    assert (blind, found) == (Resent(2, 1, 1, 1), Resent(2, 2, 0, 2))


async def fail_some(world):
    """Three messages of `billing` failed, one of `shipping`; another is delayed by its sender."""
    ten_seconds, one_minute = 3, 5
    for group in ("billing", "shipping"):
        await world.admin.groups.create(group)
    for queue, group, level in (
        (QUEUE, "billing", ten_seconds),
        (OTHER, "billing", one_minute),
        (OTHER, "billing", ten_seconds),
        (QUEUE, "shipping", ten_seconds),
    ):
        sent = await world.send(queue)
        await world.fail(queue, sent.msg_id, group, level)
        await world.report(queue, sent.queue_offset + 1, group)
    await world.send(QUEUE, DELAY=str(one_minute))


async def test_the_page_of_a_group_counts_later_attempts_until_they_are_delivered(desk):
    await fail_some(desk.world)

    waiting = await desk.browser.until("/groups/billing", lambda found: found["later"] is not None)
    desk.cluster.advance(11.0)
    delivered = await desk.browser.until(
        "/groups/billing", lambda found: found["later"]["count"] < 3
    )

    assert (waiting["later"], waiting["retry_lag"]) == ({"count": 3, "is_all": True}, 0)
    assert waiting["later_text"] == "3 messages wait for a later attempt"
    assert delivered["later"] == {"count": 1, "is_all": True}
    assert delivered["later_text"] == "1 message waits for a later attempt"


async def test_later_attempts_are_those_of_one_group_up_to_a_bound_if_all_brokers_answer(
    watch, monkeypatch
):
    await fail_some(watch.world)
    nodes = readers(await watch.admin.cluster())

    async def counted(group, most=100):
        return await later_attempts(
            watch.engine, BrokerTables(watch.engine), nodes, group, most=most
        )

    assert await counted("shipping") == LaterAttempts(1)
    assert await counted("nobody") == LaterAttempts(0)
    # One message of each broker.
    some = await counted("billing", most=1)
    assert some == LaterAttempts(2, is_all=False)
    assert str(some) == "at least 2 messages wait for a later attempt"
    assert str(LaterAttempts(0, is_all=False)).startswith("not known")
    forget_code(monkeypatch, watch.cluster.brokers[1], RequestCode.GET_ALL_DELAY_OFFSET)
    assert await counted("billing") is None
