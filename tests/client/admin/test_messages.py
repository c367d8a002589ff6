"""Messages: found by id, key, place and time, walked through, followed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.messages import (
    ALL,
    BodyForm,
    Cursor,
    Fate,
    Pulled,
    QueueReader,
    Walk,
    Wanted,
    shown_body,
    whole_topic,
)
from orbitmq.client.errors import BadRequest
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import MessageModel
from tests.support.broker import until
from tests.support.client_admin import GROUP

A0 = Queue("orders", "broker-a", 0)
A1 = Queue("orders", "broker-a", 1)
B0 = Queue("orders", "broker-b", 0)
B1 = Queue("orders", "broker-b", 1)


def bodies(messages: Sequence[ReceivedMessage]) -> list[bytes]:
    return [message.body for message in messages]


# By id.


@pytest.mark.feature("L4")
async def test_a_message_is_found_by_either_id(world):
    sent = await world.send(B1, b"wanted", UNIQ_KEY="7F0000010001000000000000000000AB")

    by_place = await world.admin.messages.get(sent.msg_id)
    by_unique = await world.admin.messages.get("7F0000010001000000000000000000AB", topic="orders")
    either = await world.admin.messages.get(sent.msg_id, topic="orders")

    assert by_place == by_unique == either
    assert by_place.body == b"wanted"
    assert (by_place.queue, by_place.queue_offset) == (B1, 0)


@pytest.mark.feature("L4")
async def test_a_message_is_found_by_its_place(world):
    await world.fill(A1, 3)

    message = await world.admin.messages.at(A1, 2)

    assert (message.body, message.queue_offset) == (b"m2", 2)


# By key.


@pytest.mark.feature("L4")
async def test_all_messages_with_a_key_are_found_beyond_what_a_broker_gives_at_once(world):
    for number in range(150):
        await world.send((A0, B0)[number % 3 == 0], b"%d" % number, KEYS="wanted other")
        if number % 10 == 0:
            world.cluster.advance(1.0)
    await world.send(A0, b"not this", KEYS="want")

    found = [message async for message in world.admin.messages.by_key("orders", "wanted")]

    assert sorted(int(body) for body in bodies(found)) == list(range(150))
    times = [message.stored_at for message in found]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("begins_at", [0.0, 0.35, 0.8])
async def test_many_messages_around_the_turn_of_a_second_are_all_found(
    world, monkeypatch, begins_at
):
    # Apache's index keeps whole seconds: a question for a time brings those of the second after.
    for broker in world.cluster.brokers:
        exact = broker.parts.store.looking_up

        def coarse(topic, key, begin, end, exact=exact):
            return exact(topic, key, begin, min(end + 999, 2**63 - 1))

        monkeypatch.setattr(broker.parts.store, "looking_up", coarse)
    now = [int(world.cluster.clock.now()) + 10 + begins_at]
    monkeypatch.setattr(world.cluster.clock, "now", lambda: now[0])
    await world.send(A0, b"-1", KEYS="wanted")
    for number in range(220):
        now[0] += 0.0075
        await world.send((A0, B0)[number % 5 == 0], b"%d" % number, KEYS="wanted")

    async with asyncio.timeout(30.0):
        found = [message async for message in world.admin.messages.by_key("orders", "wanted")]

    assert sorted(int(body) for body in bodies(found)) == list(range(-1, 220))
    times = [message.stored.store_ms for message in found]
    assert times == sorted(times, reverse=True)


async def test_keys_are_limited_to_a_time(world):
    records = []
    for number in range(6):
        await world.send(A0, b"%d" % number, KEYS="wanted")
        records.append(world.cluster.messages("orders")[-1])
        world.cluster.advance(5.0)

    found = [
        message
        async for message in world.admin.messages.by_key(
            "orders", "wanted", since=records[1].stored_at, until=records[4].stored_at
        )
    ]

    assert bodies(found) == [b"3", b"2", b"1"]


# Walking through.


@pytest.mark.feature("L4")
@pytest.mark.parametrize("newest_first", [False, True])
async def test_pages_neither_overlap_nor_miss_anything_while_messages_arrive(world, newest_first):
    for number in range(100):
        await world.send((A0, B1)[number % 2], b"%d" % number)
    messages = world.admin.messages

    seen: list[ReceivedMessage] = []
    cursor: str | None = None
    pages = 0
    while True:
        page = await messages.page("orders", cursor=cursor, size=7, newest_first=newest_first)
        seen += page.messages
        pages += 1
        await world.send(A1, b"999")
        if page.cursor is None:
            break
        cursor = page.cursor

    numbers = [int(body) for body in bodies(seen)]
    assert sorted(numbers) == list(range(100))
    assert pages == 15
    times = [message.stored_at for message in seen]
    assert times == sorted(times, reverse=newest_first)


@pytest.mark.feature("L4")
async def test_there_is_no_ceiling(world):
    client = await world.client("broker-a")
    for _ in range(2500):
        await client.stored("orders", b"x")

    count = 0
    async for _ in world.admin.messages.browse("orders"):
        count += 1

    assert count == 2500


async def test_the_tail_shows_what_arrives_and_nothing_else(world):
    await world.fill(A0, 3, name="old")
    tail = world.admin.messages.tail("orders", every=0.01)
    waiting = asyncio.ensure_future(anext(tail))
    before = world.admin.requests
    await until(lambda: world.admin.requests >= before + 5, 10.0)

    for number in range(40):
        await world.send((A0, B1)[number % 2], b"%d" % number)
    found = [await asyncio.wait_for(waiting, 10.0)]
    while len(found) < 40:
        found.append(await asyncio.wait_for(anext(tail), 10.0))
    await tail.aclose()

    assert sorted(int(body) for body in bodies(found)) == list(range(40))


async def test_a_walk_is_limited_to_times_and_queues(world):
    records = await world.fill(A0, 8)
    await world.fill(B0, 2)
    since, until_ = records[2].store_ms / 1000, records[5].store_ms / 1000

    found = [
        message
        async for message in world.admin.messages.browse("orders", since=since, until=until_)
    ]
    only = [message async for message in world.admin.messages.browse("orders", queues=[B0])]

    assert bodies(found) == [b"m2", b"m3", b"m4"]
    assert bodies(only) == [b"m0", b"m1"]


async def test_a_walk_is_filtered_by_the_broker(world):
    # `Aa` and `BB` have the same hash: the broker lets both through.
    for number, tag in enumerate(["Aa", "BB", "C", "Aa"]):
        await world.send(A0, b"%d" % number, TAGS=tag)

    tagged = [m async for m in world.admin.messages.browse("orders", expression="Aa || D")]

    assert bodies(tagged) == [b"0", b"3"]


async def test_a_filter_can_be_sql(world):
    for broker in world.cluster.brokers:
        name = broker.parts.settings.name
        await world.admin.config.update_broker(name, {"enablePropertyFilter": "true"})
    for number in range(4):
        await world.send(A0, b"%d" % number, amount=str(number * 10))

    found = [
        message
        async for message in world.admin.messages.browse(
            "orders", expression="amount > 15", expression_type="SQL92"
        )
    ]

    assert bodies(found) == [b"2", b"3"]
    with pytest.raises(BadRequest, match="amount >"):
        await anext(
            world.admin.messages.browse("orders", expression="amount >", expression_type="SQL92")
        )


async def test_messages_that_expire_during_a_walk_end_it_without_an_error(world):
    await world.fill(A0, 40)
    page = await world.admin.messages.page("orders", size=5)
    await world.admin.topics.delete("orders")
    await world.cluster.create_topic("orders", queues=2)

    after = await world.admin.messages.page("orders", cursor=page.cursor)

    assert after.cursor is None


# What became of a message.


async def test_a_message_is_followed_through_its_groups(world):
    for group in ("done", "behind", "unknown"):
        await world.admin.groups.create(group)
    sent = await world.send(A0, b"x", UNIQ_KEY="7F0000010001000000000000000000AA", TAGS="paid")
    await world.report(A0, 1, group="done")
    await world.report(A0, 0, group="behind")
    await world.report(B0, 0, group="unknown")
    await world.consumer("c1", group="picky", subscriptions={"orders": "refunded"})
    await world.report(A0, 1, group="picky")
    await world.consumer("c2", group="all-of-it", model=MessageModel.BROADCASTING)

    message = await world.admin.messages.get(sent.msg_id)
    tracks = {track.group: track for track in await world.admin.messages.track(message)}

    assert {group: track.fate for group, track in tracks.items()} == {
        "done": Fate.CONSUMED,
        "behind": Fate.WAITING,
        "unknown": Fate.NO_PROGRESS,
        "picky": Fate.FILTERED,
        "all-of-it": Fate.BROADCAST,
    }
    assert [group for group, track in tracks.items() if track.is_online] == ["all-of-it", "picky"]


async def test_a_failed_message_is_followed_to_where_it_is_now(world):
    await world.consumer("c1")
    sent = await world.send(A0, b"x", UNIQ_KEY="7F0000010001000000000000000000BB")
    await world.report(A0, 1)
    message = await world.admin.messages.get(sent.msg_id)

    await world.fail(A0, sent.msg_id)
    (parked,) = await world.admin.messages.track(message)
    world.cluster.advance(11.0)
    await until(lambda: world.cluster.messages(f"%RETRY%{GROUP}"), 20.0)
    (retrying,) = await world.admin.messages.track(message)
    copy = retrying.copy
    assert copy is not None
    await world.report(copy.queue, 1)
    (consumed,) = await world.admin.messages.track(message)
    await world.fail(copy.queue, copy.offset_id, level=-1)
    (dead,) = await world.admin.messages.track(message)

    assert [each.fate for each in (parked, retrying, consumed, dead)] == [
        Fate.PARKED,
        Fate.RETRYING,
        Fate.CONSUMED,
        Fate.DEAD,
    ]
    assert [each.failures for each in (parked, retrying, dead)] == [1, 1, 2]
    assert dead.copy is not None
    # Asked about the copy, it is the same story.
    assert await world.admin.messages.track(dead.copy) == (dead,)


# Bodies.


@pytest.mark.feature("L4")
def test_bodies_are_shown_as_what_they_are():
    assert shown_body(b'{"a":1}') == '{\n  "a": 1\n}'
    assert shown_body("käse".encode()) == "käse"
    assert shown_body(b"5") == "5"
    assert shown_body(b"{broken") == "{broken"
    assert shown_body(b"\xff\x00A").startswith("00000000  ff 00 41 ")
    assert shown_body(b"\xff\x00A").endswith("|..A|")
    assert shown_body(b"5", BodyForm.JSON) == "5"
    assert shown_body(b'{"a":1}', "text") == '{"a":1}'
    for body, form in ((b"\xff", "text"), (b"{", "json"), (b"x", "xml")):
        with pytest.raises(BadRequest, match=r"shown|not"):
            shown_body(body, form)


HERE = Address("127.0.0.1", 1)


class MemoryReading(QueueReader):
    """Queues of messages, some of which a filter leaves out, and pulls that bring a few."""

    def __init__(self, queues: Mapping[Queue, Sequence[StoredMessage]], most: int) -> None:
        self._queues = queues
        self._most = most

    async def pull(
        self, where: Address, queue: Queue, offset: int, wanted: Wanted = ALL, most: int = 32
    ) -> Pulled:
        records = self._queues[queue]
        seen = records[offset : offset + min(most, self._most)]
        found = tuple(ReceivedMessage(each, queue) for each in seen if each.tags != "hidden")
        return Pulled(found, offset + len(seen))


@st.composite
def topics(draw: st.DrawFn) -> dict[Queue, list[StoredMessage]]:
    """Up to four queues whose messages were stored one after the other."""
    made: dict[Queue, list[StoredMessage]] = {}
    for number in range(draw(st.integers(1, 4))):
        queue = Queue("orders", f"broker-{number % 2}", number)
        steps = draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
        now = 0
        made[queue] = []
        for offset, (step, is_hidden) in enumerate(steps):
            now += step
            made[queue].append(
                StoredMessage.build(
                    topic="orders",
                    stored_body=b"%d" % offset,
                    properties={"TAGS": "hidden"} if is_hidden else {},
                    queue_id=queue.id,
                    queue_offset=offset,
                    physical_offset=number * 1000 + offset,
                    store_ms=now,
                )
            )
    return made


@given(topics(), st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1), st.booleans())
def test_pages_of_any_size_are_the_whole_walk(queues, most, sizes, is_backwards):
    reading = MemoryReading(queues, most)
    addresses = {queue.broker: HERE for queue in queues}
    bounds = {queue: (0, len(records)) for queue, records in queues.items()}
    cursor = whole_topic("orders", bounds, ALL, backwards=is_backwards)

    async def paged():
        found: list[ReceivedMessage] = []
        place: str | None = cursor.text
        turn = 0
        while place is not None:
            size = sizes[turn % len(sizes)]
            page = await Walk(reading, addresses, Cursor.of(place)).page(size)
            assert len(page.messages) == size or page.cursor is None
            found += page.messages
            place = page.cursor
            turn += 1
        return found

    async def whole():
        return [message async for message in Walk(reading, addresses, cursor).messages()]

    found = asyncio.run(paged())

    assert found == asyncio.run(whole())
    times = [message.stored.store_ms for message in found]
    assert times == sorted(times, reverse=is_backwards)
    for queue, records in queues.items():
        wanted = [each.queue_offset for each in records if each.tags != "hidden"]
        offsets = [message.queue_offset for message in found if message.queue == queue]
        assert offsets == (wanted[::-1] if is_backwards else wanted)
