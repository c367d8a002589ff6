"""Long polling: what wakes a held pull, what else ends its waiting, and the limits of holding."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.broker.broker import Broker
from orbitmq.broker.groups import Peer
from orbitmq.broker.longpoll import HeldPull, HeldPulls, Kept, WaitingTable
from orbitmq.broker.scheduler import Pacing
from orbitmq.broker.settings import PullSettings
from orbitmq.broker.writes import Draft
from orbitmq.filter.tags import parse_tags
from orbitmq.javahash import java_hash
from orbitmq.message.properties import encode_properties
from orbitmq.message.stored import encode_batch
from orbitmq.remoting.settings import Address
from orbitmq.store.settings import FlushPolicy, ReadFailed
from orbitmq.wire.bodies import MessageModel, SubscriptionData, SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CloneGroupOffsetRequest,
    CreateTopicRequest,
    DeleteGroupRequest,
    PullFlag,
    ResetOffsetRequest,
    SendMessageResponse,
    TopicRequest,
    UpdateGroupForbiddenRequest,
)
from orbitmq.wire.javajson import encode_body
from tests.support.broker import (
    GROUP,
    SMALL_STORE,
    RawClient,
    bodies_in,
    messages_in,
    pull_header,
    until,
)

#: Far longer than any of these tests takes.
LONG = 60.0
#: Far below that time, and far above what a busy machine needs.
SOON = 30.0
#: A pull that is judged by the heartbeats of its group.
BY_HEARTBEAT = int(PullFlag.SUSPEND)


def ensure(broker: Broker, *topics: str) -> None:
    for topic in topics:
        config = TopicConfig(topic_name=topic, read_queue_nums=4, write_queue_nums=4)
        broker.parts.topics.ensure(config, now=0.0)


@pytest.fixture
def orders(broker):
    """A topic with four empty queues."""
    ensure(broker, "orders", "payments")
    return "orders"


@pytest.fixture
async def admin(broker, open_client):
    return await open_client(broker)


def begin(client: RawClient, topic: str, *args: Any, **fields: Any) -> asyncio.Task[Command]:
    """Begin a pull that the broker may hold."""
    return asyncio.ensure_future(client.pull(topic, *args, **({"hold": LONG} | fields)))


async def held(broker: Broker, count: int = 1) -> None:
    await until(lambda: len(broker.parts.held) == count)


async def answer_of(waiting: asyncio.Task[Command]) -> Command:
    return await asyncio.wait_for(waiting, SOON)


def write(broker: Broker, *messages: tuple[bytes, str]) -> None:
    """Store messages with their tags, in one step of the loop and with one write."""
    for body, tag in messages:
        properties = encode_properties({"TAGS": tag} if tag else {})
        draft = Draft("orders", 0, body, properties, 0, broker.parts.store_host)
        broker.parts.writes.append(draft)
    broker.parts.writes.finish()


async def ask(client: RawClient, code: RequestCode, header: Any = None, **fields: Any) -> None:
    answer = await client.connection.request(code, header, timeout=SOON, **fields)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


def submit(client: RawClient, answers: list[Command], count: int, **fields: Any) -> None:
    """Begin pulls whose answers go to the list."""

    def answered(outcome: object) -> None:
        if isinstance(outcome, Command):
            answers.append(outcome)

    for _ in range(count):
        header = pull_header("orders", **({"hold": LONG} | fields))
        client.connection.submit(RequestCode.PULL_MESSAGE, header, answered, timeout=LONG)


# Woken by a message.


@pytest.mark.parametrize(("tag", "bodies"), [("*", [b"0", b"1"]), ("last", [b"99"])])
async def test_a_large_batch_wakes_a_pull_with_the_messages_that_it_wants(
    broker, client, orders, tag, bodies
):
    waiting = begin(client, orders, subscription=tag)
    await held(broker)
    batch = encode_batch(
        (b"%d" % n, 0, encode_properties({"TAGS": "last" if n == 99 else "other"}))
        for n in range(100)
    )

    answer = await client.send(orders, batch, batch=True)
    found = messages_in(await answer_of(waiting))

    assert [bytes(message.body) for message in found[:2]] == bodies
    ids = answer.header(SendMessageResponse).msg_id.split(",")
    assert len(ids) == 100
    assert [ids[message.queue_offset] for message in found] == [each.offset_id for each in found]


@pytest.mark.parametrize("policy", FlushPolicy)
async def test_a_held_pull_gets_the_next_message_of_its_queue(start_broker, open_client, policy):
    flush = replace(SMALL_STORE.flush, policy=policy)
    broker = await start_broker(store=replace(SMALL_STORE, flush=flush))
    ensure(broker, "orders")
    client, producer = await open_client(broker), await open_client(broker)
    waiting = [begin(client, "orders", queue) for queue in (0, 1, 2, 2)]
    await held(broker, 4)

    await producer.stored("orders", b"first", queue_id=2)
    answers = [await answer_of(each) for each in waiting[2:]]

    for answer in answers:
        assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, "FOUND")
        assert bodies_in(answer) == [b"first"]
        assert answer.ext_fields["nextBeginOffset"] == "1"
    assert [each.done() for each in waiting] == [False, False, True, True]
    assert len(broker.parts.held) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"subscription": "mine || ours"},
        {"subscription": "TAGS = 'mine'", "expression_type": "SQL92"},
        {"subscription": "price > 5 AND TAGS IS NOT NULL", "expression_type": "SQL92"},
        {"sys_flag": BY_HEARTBEAT},
    ],
    ids=["tags", "sql on tags", "sql", "of the heartbeat"],
)
async def test_a_held_pull_is_not_woken_by_what_its_filter_rejects(broker, client, orders, fields):
    await client.heartbeat("c1", SubscriptionData(topic=orders, sub_string="mine"))
    waiting = begin(client, orders, **fields)
    await held(broker)

    for _ in range(10):
        await client.stored(orders, b"other", properties={"TAGS": "other", "price": "1"})
    was_held = len(broker.parts.held)
    await client.stored(orders, b"mine", properties={"TAGS": "mine", "price": "10"})

    answer = await answer_of(waiting)
    assert was_held == 1
    assert bodies_in(answer) == [b"mine"]
    assert answer.ext_fields["nextBeginOffset"] == "11"


async def test_a_pull_that_times_out_goes_on_behind_what_its_filter_rejected(
    broker, client, orders
):
    waiting = begin(client, orders, subscription="mine", hold=0.3)
    await held(broker)

    # In one step of the loop, so that its time is not up before.
    write(broker, *[(b"x", "other")] * 10)

    answer = await answer_of(waiting)
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert answer.ext_fields["nextBeginOffset"] == answer.ext_fields["maxOffset"] == "10"


@pytest.mark.parametrize("is_busy", [False, True], ids=["at once", "in its turn"])
async def test_a_woken_pull_gets_all_that_has_arrived(broker, client, orders, is_busy):
    waiting = begin(client, orders, subscription="paid")
    await held(broker)
    if is_busy:
        broker.parts.pacing.spent = broker.parts.pacing.limit

    write(broker, (b"1", "paid"), (b"2", "open"), (b"3", "paid"))
    answer = await answer_of(waiting)

    assert bodies_in(answer) == [b"1", b"3"]
    assert answer.ext_fields["nextBeginOffset"] == "3"


# Time.


@pytest.mark.feature("B6")
async def test_a_pull_whose_time_is_up_is_answered_empty_without_a_log_entry(
    broker, client, orders, caplog
):
    await client.stored(orders)
    caplog.set_level(logging.INFO)
    loop = asyncio.get_running_loop()
    began = loop.time()

    first = await client.pull(orders, 0, 1, hold=0.2)
    took = loop.time() - began
    then = await client.pull(orders, 0, 0, hold=LONG)

    assert (first.code, first.remark) == (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE")
    assert first.ext_fields["nextBeginOffset"] == "1"
    assert took >= 0.2
    assert bodies_in(then) == [b"hello"]
    spoke = [each.name for each in caplog.records if each.levelno > logging.DEBUG]
    assert not [name for name in spoke if not name.startswith("orbitmq.store")]


@pytest.mark.parametrize(
    ("settings", "hold"),
    [
        ({}, 0.0),
        ({}, -1.0),
        ({"long_polling": False, "short_hold": 0.05}, LONG),
        ({"longest_hold": 0.05}, LONG),
    ],
    ids=["no time", "less than no time", "no long polling", "limited"],
)
async def test_the_client_and_the_settings_limit_how_long_a_pull_is_held(
    start_broker, open_client, settings, hold
):
    broker = await start_broker(pull=PullSettings(**settings))
    ensure(broker, "orders")
    client = await open_client(broker)
    flag = int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)

    answer = await answer_of(begin(client, "orders", hold=hold, sys_flag=flag))

    assert answer.code == ResponseCode.PULL_NOT_FOUND


# Once.


async def test_the_offset_that_a_held_pull_carries_is_committed_once(broker, client, orders):
    flag = int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND | PullFlag.COMMIT_OFFSET)
    write(broker, *[(b"x", "")] * 5)
    waiting = begin(client, orders, 0, 5, sys_flag=flag, commit_offset=2)
    await held(broker)
    at_first = broker.parts.progress.stored(orders, GROUP, 0)
    await client.report(orders, 4)

    await client.stored(orders)
    await answer_of(waiting)

    assert at_first == 2
    assert broker.parts.progress.stored(orders, GROUP, 0) == 4


async def test_a_pull_that_fails_when_it_is_woken_is_refused_and_its_sender_is_answered(
    broker, client, orders, monkeypatch
):
    waiting = begin(client, orders)
    await held(broker)

    def fail(*_, **__):
        raise ReadFailed("the disk does not give it out")

    monkeypatch.setattr(broker.parts.progress, "pending_reset", fail)
    place = await client.stored(orders)
    answer = await answer_of(waiting)

    assert place.queue_offset == 0
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "the disk does not give it out" in (answer.remark or "")


# Administration.


def changed_topic(**changes: Any) -> CreateTopicRequest:
    given: dict[str, Any] = {
        "topic": "orders",
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    return CreateTopicRequest(**(given | changes))


def changed_group(**changes: Any) -> dict[str, bytes]:
    return {"body": encode_body(SubscriptionGroupConfig(group_name=GROUP, **changes))}


TOPIC, CONFIG = RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_BROKER_CONFIG
CONSUMERS = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
#: A request of administration, and the answer of a pull of queue 3 that it wakes.
CHANGES: dict[str, tuple[RequestCode, dict[str, Any], ResponseCode | None]] = {
    "topic deleted": (
        RequestCode.DELETE_TOPIC_IN_BROKER,
        {"header": TopicRequest(topic="orders")},
        ResponseCode.TOPIC_NOT_EXIST,
    ),
    "fewer queues": (
        TOPIC,
        {"header": changed_topic(read_queue_nums=2)},
        ResponseCode.INVALID_PARAMETER,
    ),
    "topic not readable": (TOPIC, {"header": changed_topic(perm=2)}, ResponseCode.NO_PERMISSION),
    "for writers only": (TOPIC, {"header": changed_topic(write_queue_nums=2)}, None),
    "group off": (CONSUMERS, changed_group(consume_enable=False), ResponseCode.NO_PERMISSION),
    "no broadcasting": (
        CONSUMERS,
        changed_group(consume_broadcast_enable=False),
        ResponseCode.NO_PERMISSION,
    ),
    "topic forbidden": (
        RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
        {"header": UpdateGroupForbiddenRequest(group=GROUP, topic="orders", readable=False)},
        ResponseCode.NO_PERMISSION,
    ),
    "reset": (
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        {
            "header": ResetOffsetRequest(
                topic="orders", group=GROUP, queue_id=3, offset=0, timestamp=-1, is_force=True
            )
        },
        ResponseCode.PULL_OFFSET_MOVED,
    ),
    "offsets of another group": (
        RequestCode.CLONE_GROUP_OFFSET,
        {
            "header": CloneGroupOffsetRequest(
                src_group="source", dest_group=GROUP, topic="orders", offline=True
            )
        },
        ResponseCode.PULL_OFFSET_MOVED,
    ),
    # A pull must not create the group again.
    "group deleted": (
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        {"header": DeleteGroupRequest(group_name=GROUP)},
        None,
    ),
    "another setting": (CONFIG, {"body": b"maxMessageSize=1000000"}, None),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_wakes_the_pulls_that_it_concerns_and_no_others(
    broker, client, admin, orders, name
):
    code, request, expected = CHANGES[name]
    subscription = SubscriptionData(topic=orders, sub_string="*")
    await client.heartbeat("c", subscription, message_model=MessageModel.BROADCASTING)
    await client.stored(orders, queue_id=3)
    broker.parts.groups.find("source", now=0.0)
    await client.report(orders, 0, queue_id=3, consumer_group="source")
    mine = begin(client, orders, 3, 1, sys_flag=BY_HEARTBEAT)
    other = begin(client, "payments", consumer_group="others")
    await held(broker, 2)

    await ask(admin, code, request.get("header"), body=request.get("body", b""))
    await client.max_offset(orders)

    if expected is None:
        assert not mine.done()
        assert len(broker.parts.held) == 2
    else:
        assert (await answer_of(mine)).code == expected
    assert not other.done()
    assert (GROUP in broker.parts.groups) is (name != "group deleted")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"brokerPermission=2", ResponseCode.NO_PERMISSION),
        (b"brokerPermission=4", ResponseCode.PULL_NOT_FOUND),
        (b"litePullMessageEnable=false", ResponseCode.NO_PERMISSION),
        (b"rejectPullConsumerEnable=true", ResponseCode.SUBSCRIPTION_NOT_EXIST),
        (b"longPollingEnable=false", ResponseCode.PULL_NOT_FOUND),
    ],
)
async def test_a_setting_of_the_broker_wakes_all_pulls(broker, client, admin, orders, text, code):
    lite = RequestCode.LITE_PULL_MESSAGE
    waiting = [begin(client, topic, code=lite) for topic in (orders, "payments")]
    await held(broker, 2)

    await ask(admin, CONFIG, body=text)

    assert [(await answer_of(each)).code for each in waiting] == [code, code]


@pytest.mark.parametrize(
    ("tag", "code", "bodies"),
    [("none", ResponseCode.PULL_RETRY_IMMEDIATELY, []), ("new", ResponseCode.SUCCESS, [b"early"])],
)
async def test_a_new_subscription_judges_again_what_arrived_before(
    broker, client, orders, tag, code, bodies
):
    await client.heartbeat("c", SubscriptionData(topic=orders, sub_string="old", sub_version=1))
    waiting = begin(client, orders, sys_flag=BY_HEARTBEAT, sub_version=1)
    await held(broker)
    await client.stored(orders, b"early", properties={"TAGS": tag})

    await client.heartbeat("c", SubscriptionData(topic=orders, sub_string="new", sub_version=2))
    woken = await answer_of(waiting)

    assert (woken.code, woken.ext_fields["nextBeginOffset"]) == (code, "1")
    assert bodies_in(woken) == bodies


# Limits.


async def test_a_connection_with_few_pulls_displaces_those_of_connections_with_many(
    start_broker, open_client
):
    broker = await start_broker(pull=PullSettings(held_requests=400, short_hold=0.05))
    ensure(broker, "orders")
    early: list[Command] = []
    for each in [await open_client(broker) for _ in range(4)]:
        submit(each, early, 300, consumer_group="greedy")
    await until(lambda: len(early) == 800)
    honest = await open_client(broker)

    waiting = [begin(honest, "orders", queue) for queue in range(4)]
    await until(lambda: len(early) == 804)
    count = len(broker.parts.held)
    await honest.stored("orders", b"for all", queue_id=3)
    answer = await answer_of(waiting[3])

    assert count == 400
    assert {each.code for each in early} == {ResponseCode.PULL_NOT_FOUND}
    assert bodies_in(answer) == [b"for all"]
    assert [each.done() for each in waiting] == [False, False, False, True]
    for pull in waiting[:3]:
        pull.cancel()


async def test_pulls_beyond_all_limits_are_answered_busy_and_logged_once(
    start_broker, open_client, caplog
):
    broker = await start_broker(
        pull=PullSettings(held_per_connection=5, put_off_per_connection=40, short_hold=LONG)
    )
    ensure(broker, "orders")
    greedy, other = await open_client(broker), await open_client(broker)
    answers: list[Command] = []
    of_other: list[Command] = []

    submit(greedy, answers, 5 + 40 + 3)
    await until(lambda: len(answers) == 3)
    submit(other, of_other, 7)
    await until(lambda: broker.parts.held.deferred == 40 + 2)
    refused = broker.parts.held.refused
    greedy.connection.abort()
    await until(lambda: broker.parts.held.deferred == 2)

    # Java's clients wait for seconds after this code.
    assert {each.code for each in answers} == {ResponseCode.SYSTEM_BUSY}
    assert of_other == []
    assert refused == 3
    assert caplog.text.count("a client has more pulls waiting than there is room for") == 1


async def test_a_long_request_counts_as_several_pulls(start_broker, open_client):
    broker = await start_broker(pull=PullSettings(held_per_connection=18, short_hold=0.05))
    ensure(broker, "orders")
    answers: list[Command] = []

    # Each has 20 KiB, which count for six, and a filter that counts for three.
    long = " || ".join(f"tag{n:06}" for n in range(1600))
    submit(await open_client(broker), answers, 3, subscription=long)
    await until(lambda: len(answers) == 1)

    assert len(broker.parts.held) == 2


async def test_a_stop_answers_held_and_deferred_pulls(start_broker, open_client):
    broker = await start_broker(
        pull=PullSettings(held_per_connection=1500, short_hold=LONG), stop_grace=SOON
    )
    ensure(broker, "orders")
    answers: list[Command] = []
    submit(await open_client(broker), answers, 2000)
    await until(lambda: len(broker.parts.held) + broker.parts.held.deferred == 2000)

    await broker.stop()

    await until(lambda: len(answers) == 2000)
    assert {each.code for each in answers} == {ResponseCode.PULL_NOT_FOUND}


# Without sockets.


class HandLoop:
    """A loop whose time moves when it is told to, and by `a_look` with every look at the clock."""

    def __init__(self, a_look: float = 0.0) -> None:
        self.now = 0.0
        self._a_look = a_look
        self._timers: list[tuple[float, int, Any]] = []
        self._count = itertools.count()

    def time(self) -> float:
        self.now += self._a_look
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        timer = SimpleNamespace(is_cancelled=False, call=call)
        timer.when = lambda: when
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_at(self.now, call)

    def step(self) -> bool:
        """Make the next call that is due; whether there was one."""
        if not self._timers or self._timers[0][0] > self.now:
            return False
        _, _, timer = heapq.heappop(self._timers)
        if not timer.is_cancelled:
            timer.call()
        return True

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now = max(self.now, self._timers[0][0])
            self.step()
        self.now = until


class End:
    """As much of a connection as holding needs."""

    is_slow = False

    def __init__(self, number: int = 1) -> None:
        self.context = Peer(f"c{number}", b"")
        self.remote = Address("127.0.0.1", number)

    def flush(self) -> None:
        pass


def pull_of(
    queue_id: int = 0,
    tags: str = "*",
    *,
    topic: str = "T",
    group: str = "g",
    offset: int = 0,
    connection: Any = None,
) -> HeldPull:
    request = Command.request(RequestCode.PULL_MESSAGE, opaque=1)
    header = pull_header(topic, queue_id, offset, consumer_group=group)
    return HeldPull(cast(Any, connection or End()), request, header, parse_tags(tags))


def arrivals_of(*messages: tuple[int, int, str]) -> Any:
    """Arrivals by queue, offset and tag."""
    return [
        (SimpleNamespace(topic="T", queue_id=queue), number, java_hash(tag), 0, 1)
        for queue, number, tag in messages
    ]


class Table:
    """Held pulls on a loop that makes steps by hand."""

    def __init__(self) -> None:
        self.loop = HandLoop(0.001)
        loop = cast(Any, self.loop)
        room = PullSettings(held_per_connection=100_000)
        self.holding = HeldPulls(cast(Any, None), Pacing(loop, 256 * 1024), loop, room)
        self.woken: list[HeldPull] = []
        self.holding.again = self.woken.append

    def hold(self, count: int, tags: str = "*", queue: int = 0) -> list[HeldPull]:
        connection = End()
        pulls = [pull_of(queue, tags, connection=connection) for _ in range(count)]
        assert {self.holding.hold(pull, LONG) for pull in pulls} == {Kept.HELD}
        return pulls

    def finish(self) -> None:
        while self.loop.step():
            pass


@pytest.mark.parametrize("others", [1, 400])
def test_messages_that_arrive_during_the_judging_are_judged_in_order(others):
    """Beyond a number of them the store is read instead."""
    table = Table()
    rejecting, accepting = table.hold(500, tags="other"), table.hold(500, tags="b")

    table.holding.arrived(arrivals_of((0, 0, "a")))
    table.loop.step()
    table.holding.arrived(arrivals_of((0, 1, "b")))
    for number in range(others):
        table.holding.arrived(arrivals_of((0, number + 2, "a")))
    table.finish()

    assert set(accepting) <= set(table.woken)
    assert {pull.offset for pull in accepting} == {1}
    assert others == 400 or {pull.offset for pull in rejecting} == {3}
    assert (set(rejecting) <= set(table.woken)) is (others == 400)


QUEUES = (0, 1)
TAGS = ("a", "b", "c")
CONNECTIONS = 3
LIMIT = 8
LIMIT_OF_ONE = 6
DEFERRED = 3
DEFERRED_OF_ONE = 2
SHORT_HOLD = 1.0


class HoldingMachine(RuleBasedStateMachine):
    """Random pulls, messages, moments and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = HandLoop()
        loop = cast(Any, self.loop)
        self.holding = HeldPulls(
            cast(Any, None),
            Pacing(loop, 1 << 60),
            loop,
            PullSettings(
                held_requests=LIMIT,
                held_per_connection=LIMIT_OF_ONE,
                short_hold=SHORT_HOLD,
                put_off_requests=DEFERRED,
                put_off_per_connection=DEFERRED_OF_ONE,
            ),
            at_once=2,
        )
        self.holding.again = self._answered
        self.connections: list[Any] = [End(number) for number in range(CONNECTIONS)]
        self.ends = dict.fromkeys(QUEUES, 0)
        #: What the model says is held: the tags it wants and when its time is up.
        self.held: dict[HeldPull, tuple[frozenset[str], float]] = {}
        #: What it says is deferred, and until when.
        self.deferred: dict[HeldPull, float] = {}
        self.answers: list[HeldPull] = []

    def _answered(self, pull: HeldPull) -> None:
        self.answers.append(pull)

    def _take_answers(self) -> set[HeldPull]:
        answers, self.answers = self.answers, []
        assert len(answers) == len(set(answers)), "answered twice"
        return set(answers)

    @rule(
        who=st.integers(0, CONNECTIONS - 1),
        queue=st.sampled_from(QUEUES),
        tags=st.sets(st.sampled_from(TAGS), max_size=2),
        seconds=st.sampled_from((0.5, 1.0, 1.5, 5.0)),
    )
    def hold(self, who: int, queue: int, tags: set[str], seconds: float) -> None:
        connection = self.connections[who]
        # No tags stand for all messages.
        wanted = "||".join(sorted(tags))
        pull = pull_of(queue, wanted, offset=self.ends[queue], connection=connection)
        of_each = Counter(each.connection for each in self.held)
        mine = of_each[connection]
        share = LIMIT // len({connection, *of_each})
        is_full = len(self.held) == LIMIT
        has_room = mine < LIMIT_OF_ONE and (not is_full or mine < share)
        otherwise = Kept.DEFERRED if self._can_be_deferred(connection) else Kept.NOT

        kept = self.holding.hold(pull, seconds)
        self.loop.advance(0)

        assert kept is (Kept.HELD if has_room else otherwise)
        displaced = [each for each in self.held if not each.is_held]
        assert len(displaced) == (is_full and has_room)
        answered = self._take_answers()
        for other in displaced:
            # The oldest pull of a connection with more than a share.
            assert of_each[other.connection] > share
            assert other is next(each for each in self.held if each.connection is other.connection)
            _, deadline = self.held.pop(other)
            if self._can_be_deferred(other.connection):
                self.deferred[other] = min(deadline, self.loop.now + SHORT_HOLD)
            else:
                answered.remove(other)
        assert not answered
        if kept is Kept.HELD:
            self.held[pull] = (frozenset(tags) or frozenset(TAGS), self.loop.now + seconds)
        elif kept is Kept.DEFERRED:
            self.deferred[pull] = self.loop.now + min(seconds, SHORT_HOLD)

    def _can_be_deferred(self, connection: Any) -> bool:
        mine = [each for each in self.deferred if each.connection is connection]
        return len(self.deferred) < DEFERRED and len(mine) < DEFERRED_OF_ONE

    @rule(
        messages=st.lists(
            st.tuples(st.sampled_from(QUEUES), st.sampled_from(TAGS)), min_size=1, max_size=4
        )
    )
    def arrive(self, messages: list[tuple[int, str]]) -> None:
        arrived: list[tuple[int, int, str]] = []
        expected: dict[HeldPull, int] = {}
        for queue, tag in messages:
            number = self.ends[queue]
            self.ends[queue] = number + 1
            arrived.append((queue, number, tag))
            for pull, (tags, _) in self.held.items():
                if pull.key == ("T", queue) and tag in tags:
                    expected.setdefault(pull, number)

        self.holding.arrived(arrivals_of(*arrived))
        self.loop.advance(0)

        assert self._take_answers() == set(expected)
        for pull, first_wanted in expected.items():
            # It reads on from the first message that it wants.
            assert pull.offset == first_wanted
            del self.held[pull]

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 4.0)))
    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

        late = {pull for pull, (_, deadline) in self.held.items() if deadline <= self.loop.now}
        soon = {pull for pull, until in self.deferred.items() if until <= self.loop.now}
        assert self._take_answers() == late | soon
        for pull in late:
            del self.held[pull]
        for pull in soon:
            del self.deferred[pull]

    @rule(who=st.integers(0, CONNECTIONS - 1))
    def close(self, who: int) -> None:
        self.holding.forget(self.connections[who])

        assert not self._take_answers()
        for table in (self.held, self.deferred):
            for pull in [each for each in table if each.connection is self.connections[who]]:
                del cast(Any, table)[pull]

    @precondition(lambda self: self.held)
    @rule(queue=st.sampled_from(QUEUES))
    def wake(self, queue: int) -> None:
        self.holding.wake("T", queue)
        self.loop.advance(0)

        woken = {pull for pull in self.held if pull.key == ("T", queue)}
        assert self._take_answers() == woken
        for pull in woken:
            del self.held[pull]

    @invariant()
    def the_same_pulls_are_held_and_have_judged_every_message(self) -> None:
        assert len(self.holding) == len(self.held)
        assert self.holding.deferred == len(self.deferred)
        for connection in self.connections:
            mine = {pull for pull in self.held if pull.connection is connection}
            assert set(connection.context.held) == mine
            assert connection.context.held_weight == len(mine)
        assert all(pull.offset == self.ends[pull.key[1]] for pull in self.held)

    def teardown(self) -> None:
        self.holding.stop()
        self.loop.advance(0)
        assert self._take_answers() == {*self.held, *self.deferred}
        assert len(self.holding) == self.holding.deferred == 0


TestHolding = HoldingMachine.TestCase
TestHolding.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TOPICS = ("T", "U")
GROUPS = ("g", "h")
pulls = st.builds(
    pull_of, st.sampled_from(QUEUES), topic=st.sampled_from(TOPICS), group=st.sampled_from(GROUPS)
)


@given(st.lists(pulls, max_size=20), st.sets(st.integers(0, 19)))
def test_held_pulls_are_found_by_queue_topic_and_group_in_their_order(added, leaving):
    table = WaitingTable()
    for pull in added:
        table.add(pull)
    for number in leaving:
        if number < len(added):
            table.remove(added[number])
    there = [pull for number, pull in enumerate(added) if number not in leaving]

    for topic, queue_id, group in itertools.product(
        (None, *TOPICS), (None, *QUEUES), (None, *GROUPS)
    ):
        wanted: Mapping[str, object] = {"topic": topic, "queue_id": queue_id, "group": group}
        expected = [
            pull
            for pull in there
            if all(value in (None, getattr(pull, name)) for name, value in wanted.items())
        ]
        found = list(table.find(topic, queue_id, group))
        assert len(found) == len(expected)
        assert set(found) == set(expected)
        if group is None and topic is not None and queue_id is not None:
            assert list(table.of_queue(topic, queue_id)) == expected
    for pull in table.find(None, None, None):
        table.remove(pull)
    assert not table
