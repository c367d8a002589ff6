"""Which dead letters were sent again: looked up in turn, and no more often than needed."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.deadletters import LetterTrace
from orbitmq.client.admin.requests import BrokerNode
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.console import resends
from orbitmq.console.collect import BrokerTables
from orbitmq.console.resends import Resent, ResentLetters
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.client_admin import World

QUEUE = Queue("orders", "broker-a", 0)
OTHER = Queue("orders", "broker-b", 1)
#: Looks after which everything that fits has had its turn, whatever the test.
MANY = 30


@dataclass
class Office:
    """A cluster with dead letters, and somebody who counts them."""

    admin: AsyncAdmin
    world: World
    tables: BrokerTables
    nodes: list[BrokerNode]
    #: Requests of clients so far.
    asked: list[int] = field(default_factory=lambda: [0])
    _ids: Any = field(default_factory=itertools.count)

    @property
    def now(self) -> float:
        return self.world.cluster.clock.now()

    async def die(self, *queues: Queue, group: str = "billing") -> None:
        for queue in queues:
            unique_id = f"7F0000010000000000000000{next(self._ids):08X}"
            await self.world.die(queue, b"x", "why", group=group, UNIQ_KEY=unique_id)
            self.world.cluster.advance(1.0)

    async def bounds(self, group: str = "billing") -> dict[Queue, tuple[int, int]]:
        topic = f"%DLQ%{group}"
        found = {node: await self.tables.content(node.address, topic) for node in self.nodes}
        return {
            Queue(topic, node.broker, number): at
            for node, content in found.items()
            if content is not None
            for number, at in content.queues.items()
        }

    async def look(self, letters: ResentLetters, since: float = 0.0) -> tuple[Resent, int]:
        """One look at the group, and the requests that it took."""
        bounds = await self.bounds()
        before = self.asked[0]
        found = await letters.look({"billing": bounds}, self.nodes, since)
        return found["billing"], self.asked[0] - before


@pytest.fixture
async def office(monkeypatch):
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(AsyncEmbeddedCluster(brokers=2))
        await cluster.create_topic("orders", queues=2)
        settings = quick_settings(cluster.name_server)
        engine = await stack.enter_async_context(Engine(settings, clock=cluster.clock))
        admin = AsyncAdmin.on(engine)
        world = World(cluster, admin)
        stack.push_async_callback(world.close)
        for group in ("billing", "shipping"):
            await world.consumer(f"of-{group}", group=group)
        nodes = [each.node for each in (await admin.cluster()).brokers]
        office = Office(admin, world, BrokerTables(engine), nodes)
        usual = Engine.ask

        async def counted(self, *words, **options):
            office.asked[0] += 1
            return await usual(self, *words, **options)

        monkeypatch.setattr(Engine, "ask", counted)
        yield office


async def test_letters_have_their_turn_in_several_looks_and_are_not_called_open_before(office):
    await office.die(*[QUEUE, OTHER] * 6)
    await office.admin.dead_letters.resend("billing")
    letters = ResentLetters(office.admin, office.tables, most=6)

    counts = [await office.look(letters) for _ in range(4)]
    quiet, asked = await office.look(letters)

    # Of six questions two are for the sizes of topics.
    assert [(each.looked, each.count) for each, _ in counts] == [(4, 4), (8, 8), (12, 12), (12, 12)]
    assert all(each.open == each.open_last_hour == 0 for each, _ in counts)
    assert (quiet, asked) == (Resent(12, 12, 0, 12), 0)


async def test_open_letters_are_looked_up_again_when_a_topic_has_grown_that_could_have_a_copy(
    office,
):
    await office.die(*[QUEUE] * 4)
    letters = ResentLetters(office.admin, office.tables, most=20)

    fresh, asked_first = await office.look(letters)
    still, asked_later = await office.look(letters)
    await office.admin.dead_letters.resend("billing", limit=1)
    resent, asked_retry = await office.look(letters)
    await office.world.send(QUEUE)
    grown, asked_origin = await office.look(letters)
    await office.admin.dead_letters.resend("billing", limit=1, to="origin")
    origin, _ = await office.look(letters)

    assert fresh == still == Resent(4, 0, 4)
    # The sizes of two topics on two brokers, and nothing about letters.
    assert asked_later == 4
    assert asked_first > 4 + 4 * 2 * 2
    # Only the topic that has grown is looked into.
    assert asked_retry == 4 + 4 * 2
    assert asked_origin == 4 + 3 * 2
    assert resent == grown == Resent(4, 1, 3, 1)
    assert origin == Resent(4, 2, 2, 2)


async def test_a_look_takes_no_more_than_its_budget_however_many_are_open_and_topics_grow(office):
    await office.die(*[QUEUE] * 20)
    letters = ResentLetters(office.admin, office.tables, most=8)
    asked = []

    for _ in range(6):
        await office.world.send(QUEUE)
        found, requests = await office.look(letters)
        asked.append(requests)

    assert found == Resent(20, 0, 20)
    # Sizes of two topics, six letters in two topics on two brokers, and a page of letters.
    assert max(asked) <= 4 + 6 * 2 * 2 + 4


async def test_letters_that_died_since_are_read_and_older_ones_after_them(office):
    await office.die(*[QUEUE] * 6)
    letters = ResentLetters(office.admin, office.tables, most=4)

    first, _ = await office.look(letters)
    since = office.now - 0.5  # stored times are whole milliseconds
    await office.die(QUEUE, OTHER)
    recent, _ = await office.look(letters, since)
    looks = [(await office.look(letters, since))[0] for _ in range(MANY)]

    assert first.looked == 2
    assert recent.open_last_hour == 2
    assert looks[-1] == Resent(8, 0, 2)


async def test_no_group_keeps_the_others_from_their_turn(office):
    await office.die(*[QUEUE] * 12)
    await office.die(QUEUE, group="shipping")
    letters = ResentLetters(office.admin, office.tables, most=8)
    groups = {"billing": await office.bounds(), "shipping": await office.bounds("shipping")}

    found = await letters.look(groups, office.nodes, 0.0)

    assert found["shipping"] == Resent(1, 0, 1)
    assert 0 < found["billing"].looked < 8


async def test_what_brokers_have_deleted_is_forgotten(office):
    await office.die(*[QUEUE] * 4)
    await office.admin.dead_letters.resend("billing", limit=2)
    letters = ResentLetters(office.admin, office.tables, most=20)
    before, _ = await office.look(letters)
    bounds = await office.bounds()

    cut = {queue: (min(low + 3, high), high) for queue, (low, high) in bounds.items()}
    after = await letters.look({"billing": cut}, office.nodes, 0.0)
    await office.admin.topics.delete("%DLQ%billing")
    await office.die(QUEUE)
    anew, _ = await office.look(letters)

    assert before == Resent(4, 2, 2, 2)
    assert after["billing"] == Resent(1, 0, 1)
    assert anew == Resent(1, 0, 1)


async def test_only_so_many_letters_are_remembered_and_those_are_the_newest(office, monkeypatch):
    monkeypatch.setattr(resends, "_KEPT", 3)
    await office.die(*[QUEUE, OTHER] * 3)
    letters = ResentLetters(office.admin, office.tables, most=20)

    first, _ = await office.look(letters)
    # Two of those that are remembered, and then one more.
    since = office.now - 0.5  # stored times are whole milliseconds
    await office.die(QUEUE, OTHER)
    later = [(await office.look(letters, since))[0] for _ in range(3)]
    await office.admin.dead_letters.resend("billing")
    last, _ = await office.look(letters, since)

    assert first == Resent(3, 0, 3)
    assert later[-1] == Resent(3, 0, 2)
    assert last == Resent(3, 3, 0, 2)


async def test_letters_that_died_earlier_are_left_out_where_only_the_last_hour_counts(office):
    await office.die(*[QUEUE] * 5)
    office.world.cluster.advance(7200.0)
    since = office.now - 3600.0
    await office.die(QUEUE, OTHER)
    letters = ResentLetters(office.admin, office.tables, most=20, older=False)

    found, _ = await office.look(letters, since)

    assert found == Resent(2, 0, 2)


async def test_a_letter_that_cannot_be_looked_up_stays_unknown_and_is_tried_again(
    office, monkeypatch
):
    await office.die(QUEUE, QUEUE)
    letters = ResentLetters(office.admin, office.tables, most=20)

    async def fail(*_, **__):
        raise BrokerUnavailable("broker-a", "it is away")

    with monkeypatch.context() as away:
        away.setattr(office.admin.messages, "readable_copies", fail)
        blind, _ = await office.look(letters)
    found, _ = await office.look(letters)

    assert blind == Resent()
    assert found == Resent(2, 0, 2)


async def test_letters_that_cannot_be_looked_up_keep_newer_ones_from_nothing(office, monkeypatch):
    await office.die(*[QUEUE] * 8)
    letters = ResentLetters(office.admin, office.tables, most=6)
    usual, since = LetterTrace.copy, office.now - 0.5  # stored times are whole milliseconds

    async def fail_for_old_ones(self, *words, **options):
        if self.died_at < since:
            raise BrokerUnavailable("broker-a", "it is away")
        return await usual(self, *words, **options)

    monkeypatch.setattr(LetterTrace, "copy", fail_for_old_ones)
    blind = [(await office.look(letters, since))[0] for _ in range(4)]
    await office.die(OTHER, OTHER)
    found = [(await office.look(letters, since))[0] for _ in range(4)]

    assert blind == [Resent()] * 4
    assert found[-1] == Resent(2, 0, 2)


async def test_a_topic_whose_size_nobody_tells_keeps_letters_of_others_from_nothing(
    office, monkeypatch
):
    await office.world.cluster.create_topic("sealed", queues=1)
    await office.die(QUEUE, *[Queue("sealed", "broker-a", 0)] * 3)
    letters = ResentLetters(office.admin, office.tables, most=20)
    usual = BrokerTables.content

    async def refuse(self, broker, topic):
        if topic == "sealed":
            raise BrokerUnavailable("broker-a", "it does not tell")
        return await usual(self, broker, topic)

    monkeypatch.setattr(BrokerTables, "content", refuse)
    found, _ = await office.look(letters)

    assert found == Resent(1, 0, 1)


async def test_what_is_known_of_a_broker_outlives_a_look_that_it_does_not_answer(office):
    await office.die(*[QUEUE, OTHER] * 3)
    await office.admin.dead_letters.resend("billing")
    letters = ResentLetters(office.admin, office.tables, most=40)
    before, _ = await office.look(letters)
    everybody, bounds = office.nodes, await office.bounds()

    first = [node for node in everybody if node.broker == "broker-a"]
    left = {queue: at for queue, at in bounds.items() if queue.broker == "broker-a"}
    away = await letters.look({"billing": left}, first, 0.0)
    asked = office.asked[0]
    back = await letters.look({"billing": bounds}, everybody, 0.0)

    assert before == back["billing"] == Resent(6, 6, 0, 6)
    assert away["billing"] == Resent(3, 3, 0, 3)
    # Nothing had to be looked up again.
    assert office.asked[0] == asked


async def test_a_group_without_letters_has_none(office):
    letters = ResentLetters(office.admin, office.tables, most=3)

    assert await letters.look({"nobody": {}}, office.nodes, 0.0) == {"nobody": Resent()}
    assert await letters.look({}, office.nodes, 0.0) == {}
