"""Our consumers with Apache's broker: in all modes, with retries and filters, and watched."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.admin.deadletters import DeadLetterFilter, ResendResult
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.verdict import DeadLetter, Retry
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.bodies import ConsumerOffsets, TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetRouteInfoRequest
from orbitmq.wire.javajson import decode_body
from tests.interop.beside import SHORT_HOLDS, Taken, eventually, number_in, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitmq.client.message import ReceivedMessage

#: The row is a list of what works; it is shown when every test of these files has passed.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300), pytest.mark.feature("J4")]


class Fails:
    """Work that fails the first deliveries of each message."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self._times = times
        self._error = error or RuntimeError("told to")
        self._seen: Counter[str] = Counter()

    def __call__(self, message: ReceivedMessage) -> None:
        self._seen[message.msg_id] += 1
        if self._seen[message.msg_id] <= self._times:
            raise self._error


def test_programs_without_a_loop_consume_and_go_on_where_they_stopped(beside):
    asyncio.run(beside.create_topic("OurDaemon"))
    taken: list[tuple[str, str]] = []
    arrived = threading.Condition()

    def consume_until(count):
        consumer = Consumer("our-daemons", client=beside.settings(), consume_from="first")

        @consumer.on("OurDaemon")
        def take(message: ReceivedMessage) -> None:
            with arrived:
                taken.append((message.text(), threading.current_thread().name))
                arrived.notify_all()

        with consumer, arrived:
            assert arrived.wait_for(lambda: len(taken) >= count, 60)

    beside.session.run("send", {"topic": "OurDaemon", "count": 20})
    consume_until(20)
    # Nobody is there for these; they wait, and nothing comes again.
    beside.session.run("send", {"topic": "OurDaemon", "count": 20, "prefix": "more-"})
    consume_until(40)

    wanted = [f"{prefix}-{number}" for prefix in ("body", "more") for number in range(20)]
    assert Counter(text for text, _ in taken) == Counter(wanted)
    assert threading.current_thread().name not in {thread for _, thread in taken}
    asyncio.run(beside.until_all_consumed("our-daemons", "OurDaemon"))


async def test_a_consumer_with_nothing_to_do_asks_for_each_queue_once_a_hold(beside, monkeypatch):
    await beside.create_topic("OurIdle", queues=2)
    now = asyncio.get_running_loop().time
    #: How long the broker kept each pull that found nothing.
    kept: list[float] = []
    pulls: list[float] = []
    submit = Connection.submit_encoded

    def watched(self, code, encode, outcome, *, timeout=None):
        asked = now()

        def answered(answer):
            if isinstance(answer, Command) and answer.code == ResponseCode.PULL_NOT_FOUND:
                kept.append(now() - asked)
            outcome(answer)

        if code == RequestCode.PULL_MESSAGE:
            pulls.append(asked)
        return submit(self, code, encode, answered, timeout=timeout)

    monkeypatch.setattr(Connection, "submit_encoded", watched)
    async with beside.consumer("OurIdle", "our-idle", Taken()):
        # Two queues of the topic, and one for retries: two holds of each.
        await until(lambda: len(kept) >= 6)

    assert min(kept) >= SHORT_HOLDS.hold * 0.9
    assert len(pulls) <= len(kept) + 3


async def test_new_groups_at_new_topics_get_what_is_sent_while_they_start(beside):
    async def start_and_send(topic):
        await beside.create_topic(topic, queues=2)
        taken = Taken()
        consumer = beside.consumer(topic, f"at-{topic}", taken, consume_from="last")
        sent: list[str] = []
        async with beside.producer(f"makers-of-{topic}") as producer, asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.start())
            while not taken.messages or len(sent) < 10:
                sent.append(f"body-{len(sent)}")
                await producer.send(topic, sent[-1])
        await taken.until_texts(sent)
        await consumer.stop()

    for wave in range(10):
        await asyncio.gather(*(start_and_send(f"OurFresh-{wave}-{n}") for n in range(5)))


async def test_a_batch_handler_takes_what_java_sent_and_acknowledges_part_of_it(beside):
    await beside.create_topic("OurBatches", queues=1)
    calls: list[list[str]] = []

    async def take(messages: list[ReceivedMessage]) -> int | None:
        calls.append([message.text() for message in messages])
        return 0 if messages[0].reconsume_times == 0 else None

    await beside.java_send("OurBatches", 12, batch=12)
    settings = ConsumeSettings(batch_size=6, workers=1)
    async with beside.consumer("OurBatches", "our-batches", take, consume=settings):
        # The first of each call is done; the others come again after the broker's first delay.
        await until(lambda: sum(map(len, calls)) >= 22)
        await beside.until_all_consumed("our-batches", "OurBatches")

    assert [len(call) for call in calls[:2]] == [6, 6]
    done = {calls[0][0], calls[1][0]}
    times = Counter(text for call in calls for text in call)
    assert times == {f"body-{n}": 1 if f"body-{n}" in done else 2 for n in range(12)}


async def test_messages_of_one_key_are_consumed_in_order_even_when_some_fail(beside):
    await beside.create_topic("OurOrdered")
    sent = await beside.java_send("OurOrdered", 40, ordered=8)
    taken = Taken(Fails(1))

    settings = ConsumeSettings(suspend=0.05)
    async with beside.consumer(
        "OurOrdered", "ours-in-order", taken, ordered=True, consume=settings
    ):
        await taken.until_count(80)

    by_queue: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for message in taken.messages:
        by_queue[message.queue.id].append((message.queue_offset, message.reconsume_times))
    counts = Counter(line["queueId"] for line in sent)
    # Each comes twice, because it fails once, and nothing overtakes it meanwhile.
    assert by_queue == {
        queue_id: [(offset, times) for offset in range(count) for times in range(2)]
        for queue_id, count in counts.items()
    }
    for order in range(8):
        own = [each for each in taken.messages if each.get("order") == f"order-{order}"]
        numbers = [number_in(message.text()) for message in own]
        assert numbers == sorted(numbers)
        assert len({message.queue for message in own}) == 1
    await beside.until_all_consumed("ours-in-order", "OurOrdered")


async def test_two_that_consume_in_order_never_hold_a_queue_together(beside):
    """A queue changes hands with its lock; its messages stay in order through it."""
    await beside.create_topic("OurLocked")
    first, second = Taken(), Taken()
    order: dict[Queue, list[int]] = defaultdict(list)

    def take(message):
        order[message.queue].append(message.queue_offset)

    first.work = second.work = take

    async def send(prefix):
        await beside.java_send("OurLocked", 20, prefix=prefix)
        return {f"{prefix}{number}" for number in range(20)}

    async with beside.consumer("OurLocked", "our-locks", first, ordered=True):
        sent = await send("one-")
        await first.until_texts(sent)
        async with beside.consumer("OurLocked", "our-locks", second, ordered=True) as other:
            await until(lambda: len(_queues_of(other.assignment(), "OurLocked")) == 2)
            sent |= await send("two-")
            await until(lambda: sent <= {*first.texts, *second.texts})
        sent |= await send("three-")
        await until(lambda: sent <= {*first.texts, *second.texts})

    assert Counter(first.texts + second.texts) == Counter(sent)
    assert len(second.messages) >= 5
    for offsets in order.values():
        assert offsets == list(range(len(offsets)))


def _queues_of(queues: Iterable[Queue], topic: str) -> set[Queue]:
    return {queue for queue in queues if queue.topic == topic}


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "orderly"])
async def test_what_fails_comes_again_and_then_goes_to_the_dead_letters(beside, ordered):
    group = f"ours-failing-{'orderly' if ordered else 'concurrent'}"
    topic = f"Hard-{group}"
    await beside.create_topic(topic, queues=2)
    sent = await beside.java_send(topic, 4, tag="red", keys="hard-", property="colour:blau")
    taken = Taken(Fails(99))

    async with beside.admin() as admin:
        consumer = beside.consumer(
            topic,
            group,
            taken,
            ordered=ordered,
            consume=ConsumeSettings(max_retries=1, suspend=0.05),
        )

        async def are_dead():
            return (await admin.groups.describe(group)).dead_letters == 4

        async with consumer:
            await eventually(are_dead)
            await beside.until_all_consumed(group, topic)
        summary = await admin.dead_letters.summary(group)
        letters = await admin.dead_letters.sample(group, count=10)
        resent = await admin.dead_letters.resend(
            group, DeadLetterFilter(keys=["hard-2"]), to="origin"
        )

    deliveries: dict[int, list[int]] = defaultdict(list)
    for message in taken.messages:
        deliveries[number_in(message.text())].append(message.reconsume_times)
        assert message.topic == topic
        assert message.get("colour") == "blau"
        assert message.tags == "red"
    assert deliveries == {number: [0, 1] for number in range(4)}
    assert {message.msg_id for message in taken.messages} == {line["msgId"] for line in sent}
    assert (summary.count, summary.by_topic[0].name) == (4, topic)
    assert {letter.message.text() for letter in letters} == {f"body-{n}" for n in range(4)}
    assert {letter.topic for letter in letters} == {topic}
    assert resent.counts == {ResendResult.SENT: 1}, resent.failed
    again = Taken()
    async with beside.consumer(topic, group, again, ordered=ordered):
        await again.until_texts(["body-2"])


async def test_a_handler_says_when_a_message_comes_again(beside):
    await beside.create_topic("OurLater", queues=1)
    due = {
        "body-0": Retry("soon", level=1),
        "body-1": Retry("later", level=4),
        "body-2": Retry("in a while", delay=4.0),
    }
    came: dict[str, list[float]] = defaultdict(list)

    def fail_once(message):
        came[message.text()].append(message.stored_at)
        if message.reconsume_times == 0 and message.text() in due:
            raise due[message.text()]
        if message.text() == "body-3":
            raise DeadLetter("cannot be read")

    taken = Taken(fail_once)
    await beside.java_send("OurLater", 4)
    async with beside.admin() as admin, beside.consumer("OurLater", "our-later", taken):
        await taken.until_count(7)
        await beside.until_all_consumed("our-later", "%RETRY%our-later")
        letters = await admin.dead_letters.sample("our-later")

    assert Counter(taken.texts) == {"body-0": 2, "body-1": 2, "body-2": 2, "body-3": 1}
    waited = {text: times[1] - times[0] for text, times in came.items() if len(times) > 1}
    # This broker's level n is n seconds, and it knows nothing but levels: a delay of 4 s is the
    # level that usually is the next longer one, the second.
    for text, delay in (("body-0", 1.0), ("body-1", 4.0), ("body-2", 2.0)):
        assert delay - 0.1 <= waited[text] < delay + 10, waited
    assert [letter.message.text() for letter in letters] == ["body-3"]


async def test_every_broadcast_consumer_gets_everything(beside, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    await beside.create_topic("OurNews", queues=3)
    await beside.java_send("OurNews", 6)
    taken = {name: Taken() for name in ("one", "two")}

    def consumer(name):
        client = beside.settings(instance=name)
        return beside.consumer(
            "OurNews", "our-listeners", taken[name], model="broadcasting", client=client
        )

    async with consumer("one"), consumer("two"):
        for handler in taken.values():
            await handler.until_count(6)
        await beside.java_send("OurNews", 6, prefix="more-")
        for handler in taken.values():
            await handler.until_count(12)
    # Each keeps its progress itself, also for the next time.
    await beside.java_send("OurNews", 6, prefix="last-")
    async with consumer("one"):
        await taken["one"].until_count(18)

    wanted = [f"{prefix}-{n}" for prefix in ("body", "more", "last") for n in range(6)]
    assert Counter(taken["one"].texts) == Counter(wanted)
    assert Counter(taken["two"].texts) == Counter(wanted[:12])


@pytest.mark.feature("J2")
async def test_routes_and_offsets_are_read_as_each_line_writes_them(beside):
    await beside.create_topic("OurTables", queues=3)
    taken = Taken()
    async with beside.consumer("OurTables", "our-tables", taken), beside.producer() as producer:
        for queue in await producer.queues("OurTables"):
            await producer.send("OurTables", f"body-{queue.id}", queue=queue)
        await taken.until_count(3)
    await beside.until_all_consumed("our-tables", "OurTables")

    async with Engine(beside.settings()) as engine:
        asked = GetRouteInfoRequest(topic="OurTables")
        answer = await engine.ask_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked)
        old_route, old_text = decode_body(TopicRouteData, answer.body), bytes(answer.body)
        asked = GetRouteInfoRequest(topic="OurTables", accept_standard_json_only=True)
        answer = await engine.ask_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked)
        route, text = decode_body(TopicRouteData, answer.body), bytes(answer.body)
        (broker,) = route.broker_datas
        where = parse_address(broker.broker_addrs[0])
        answer = await engine.ask(where, RequestCode.GET_ALL_CONSUMER_OFFSET)
        offsets = decode_body(ConsumerOffsets, answer.body)

    # Integers as keys are quoted where standard JSON can be asked for, and bare elsewhere.
    assert b'{"0":' in text
    assert b"{0:" in bytes(answer.body)
    assert old_route == route, old_text
    assert offsets.offset_table["OurTables@our-tables"] == {0: 1, 1: 1, 2: 1}


async def test_only_messages_with_a_wanted_tag_come(beside):
    await beside.create_topic("OurTagged", queues=3)
    # The last two have the same hash, which is all that the broker looks at.
    await beside.java_send("OurTagged", 40, tag="red,green,Aa,BB")
    taken = Taken()

    async with beside.consumer("OurTagged", "our-painters", taken, tags="red || Aa"):
        await taken.until_count(20)
        # What is sent now passes whatever did not match.
        await beside.java_send("OurTagged", 1, tag="red", prefix="last-")
        await taken.until_texts(["last-0"])
        await beside.until_all_consumed("our-painters", "OurTagged")

    counted = Counter(number_in(text) for text in taken.texts if text != "last-0")
    assert counted == Counter(number for number in range(40) if number % 4 in (0, 2))


async def test_only_messages_that_match_an_sql_expression_come(beside):
    await beside.create_topic("OurPriced", queues=3)
    await beside.java_send("OurPriced", 30, tag="red,green", property="colour:blau")
    taken = Taken()

    sql = "TAGS = 'red' AND number BETWEEN 10 AND 20 AND colour IN ('blau', 'rot')"
    async with beside.consumer("OurPriced", "our-buyers", taken, sql=sql):
        await taken.until_count(6)
        await beside.java_send("OurPriced", 15, tag="red", prefix="last-", property="colour:rot")
        await taken.until_texts(f"last-{number}" for number in range(10, 15))
        await beside.until_all_consumed("our-buyers", "OurPriced")

    wanted = [f"body-{number}" for number in range(10, 21, 2)]
    wanted += [f"last-{number}" for number in range(10, 15)]
    assert Counter(taken.texts) == Counter(wanted)


@pytest.mark.parametrize("by", ["mqadmin", "our admin"])
async def test_a_group_is_moved_back_while_its_consumer_is_online(beside, by):
    topic = f"OurAgain-{by.split(' ', maxsplit=1)[0]}"
    group = f"our-repeaters-{by.split(' ', maxsplit=1)[0]}"
    await beside.create_topic(topic, queues=2)
    await beside.java_send(topic, 10)
    taken = Taken()

    async with beside.consumer(topic, group, taken), beside.admin() as admin:
        await taken.until_count(10)
        await beside.until_all_consumed(group, topic)
        if by == "mqadmin":
            first = min(message.stored.store_ms for message in taken.messages)
            moved = await beside.java("reset", topic=topic, group=group, time=first)
            assert {line["queueId"]: line["offset"] for line in moved} == {0: 0, 1: 0}
        else:
            report = await admin.progress.reset(group, topic, ResetTo.begin())
            assert report.is_effective
        await taken.until_count(20)
        await beside.until_all_consumed(group, topic)

    assert Counter(taken.texts) == {f"body-{number}": 2 for number in range(10)}


async def test_an_operator_looks_into_our_consumer_and_has_it_consume(beside):
    await beside.create_topic("OurWatched", queues=2)
    sent = await beside.java_send("OurWatched", 6)
    taken: list[str] = []
    go_on = threading.Event()

    def hang_at_the_last(message):
        taken.append(message.text())
        if message.text() == "last-0":
            go_on.wait(60)

    async with (
        beside.admin() as admin,
        beside.consumer("OurWatched", "our-watched", hang_at_the_last) as consumer,
    ):
        await until(lambda: len(taken) == 6)
        await until(lambda: Queue("%RETRY%our-watched", "broker-a", 0) in consumer.assignment())
        await beside.until_all_consumed("our-watched", "OurWatched")
        await beside.java_send("OurWatched", 1, prefix="last-")
        await until(lambda: "last-0" in taken)
        (line,) = await beside.java(
            "inspect",
            topic="OurWatched",
            group="our-watched",
            client=consumer.client_id,
            id=sent[3]["offsetMsgId"],
        )
        info = await admin.consumers.running_info("our-watched", consumer.client_id, stack=True)
        details = await admin.groups.describe("our-watched")
        client_id = consumer.client_id
        go_on.set()

    ends = Counter(each["queueId"] for each in sent)
    owned = dict(text.rsplit(":", 1) for text in line["owned"].split(","))
    assert owned.pop("%RETRY%our-watched:0") in {"-1", "0"}
    assert owned == {f"OurWatched:{queue_id}": str(ends[queue_id]) for queue_id in range(2)}
    positions = {f"{client_id}:{id_}:{end}" for id_, end in ends.items()}
    assert positions <= set(line["positions"].split(","))
    assert line["subscriptions"] == "2"
    assert line["properties"]["PROP_CONSUMEORDERLY"] == "false"
    assert "OurWatched" in line["text"]
    assert info.stack is not None
    for stack in (line["stack"], info.stack):
        assert "hang_at_the_last" in stack
    assert line["direct"] == "CR_SUCCESS"
    assert Counter(taken) == {f"body-{n}": 1 + (n == 3) for n in range(6)} | {"last-0": 1}
    assert {each.queue.topic for each in info.queues} == {"OurWatched", "%RETRY%our-watched"}
    assert info.cached_messages == 1
    assert details.members is not None
    assert [each.language for each in details.members.clients] == ["python"]
    assert details.findings == ()
