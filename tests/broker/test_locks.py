"""Order locks: one owner at a time, however long anybody is paused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.broker import Broker
from orbitmq.broker.groups import LONGEST_ID
from orbitmq.broker.locks import CLIENT_LOCK_LIFE, OrderLocks
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue, SubscriptionData, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import GROUP, RawClient
from tests.support.store import HandClock

QUEUES = tuple(MessageQueue(broker_name="b", queue_id=number, topic="T") for number in range(3))


@dataclass
class OrderlyClient:
    """What a client knows: requests on their way, and until when it believes in each lock."""

    name: str
    sent: list[tuple[str, int, float]] = field(default_factory=list)
    answers: list[tuple[int, float, int]] = field(default_factory=list)
    believes_until: dict[int, float] = field(default_factory=dict)
    #: How often each queue was given back; an answer to something asked before that is stale.
    given_back: dict[int, int] = field(default_factory=dict)

    def consumes(self, queue: int, now: float) -> bool:
        return now <= self.believes_until.get(queue, -1.0)


clients = st.integers(0, 1)
#: Few of each, so that random steps meet.
MODEL_QUEUES = QUEUES[:2]
queues = st.integers(0, len(MODEL_QUEUES) - 1)


class PausedClients(RuleBasedStateMachine):
    """Clients that are paused anywhere: before the broker sees a request, or before its answer.

    Time passes between any two steps, so that every step may be late by any amount. A client's
    requests arrive in the order in which it sent them, as they do on one connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.locks = OrderLocks(most=len(MODEL_QUEUES))
        self.clients = [OrderlyClient(name) for name in ("one", "two")]

    @rule(
        seconds=st.sampled_from((0.1, 1.0, 10.0, 19.0, 29.9, 30.0, 30.1, 59.9, 60.0, 60.1, 300.0))
    )
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(client=clients, queue=queues)
    def asks(self, client: int, queue: int) -> None:
        self.clients[client].sent.append(("lock", queue, self.now))

    @rule(client=clients, queue=queues)
    def asks_and_is_answered_at_once(self, client: int, queue: int) -> None:
        self.asks(client, queue)
        while self.clients[client].sent:
            self.request_arrives(client)
        while self.clients[client].answers:
            self.answer_arrives(client)

    @rule(client=clients, queue=queues)
    def gives_back(self, client: int, queue: int) -> None:
        one = self.clients[client]
        one.believes_until.pop(queue, None)
        one.given_back[queue] = one.given_back.get(queue, 0) + 1
        one.sent.append(("unlock", queue, self.now))

    @rule(client=clients)
    def request_arrives(self, client: int) -> None:
        one = self.clients[client]
        if not one.sent:
            return
        what, number, sent_at = one.sent.pop(0)
        queue = QUEUES[number]
        if what == "unlock":
            self.locks.unlock("g", one.name, [queue])
        elif self.locks.lock("g", one.name, [queue], self.now):
            pending = sum(1 for kind, other, _ in one.sent if (kind, other) == ("unlock", number))
            one.answers.append((number, sent_at, one.given_back.get(number, 0) - pending))

    @rule(client=clients)
    def answer_arrives(self, client: int) -> None:
        one = self.clients[client]
        if not one.answers:
            return
        number, sent_at, given_back = one.answers.pop(0)
        if given_back == one.given_back.get(number, 0):
            one.believes_until[number] = sent_at + CLIENT_LOCK_LIFE

    @rule()
    def memory_is_tidied(self) -> None:
        self.locks.forget_expired(self.now)

    @invariant()
    def nobody_overlaps(self) -> None:
        for number, queue in enumerate(MODEL_QUEUES):
            owners = [one.name for one in self.clients if one.consumes(number, self.now)]
            assert len(owners) <= 1
            if owners:
                assert self.locks.owner("g", queue, self.now) == owners[0]


PausedClients.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPausedClients = PausedClients.TestCase


ORDERS = SubscriptionData(topic="orders", sub_string="*", sub_version=1)


def has_queues(broker: Broker, topic: str, count: int) -> None:
    config = TopicConfig(topic_name=topic, read_queue_nums=count, write_queue_nums=count)
    broker.parts.topics.update(config, now=broker.parts.clock.now())


def at(topic: str, *numbers: int, broker: str = "broker-a") -> tuple[MessageQueue, ...]:
    return tuple(
        MessageQueue(broker_name=broker, queue_id=number, topic=topic) for number in numbers
    )


def batch(queues: Sequence[MessageQueue], group: str = GROUP, client_id: str = "me") -> bytes:
    return encode_body(LockBatch(client_id=client_id, consumer_group=group, mq_set=tuple(queues)))


async def ask(
    client: RawClient, queues: Sequence[MessageQueue], group: str = GROUP, client_id: str = "me"
) -> Command:
    return await client.connection.request(
        RequestCode.LOCK_BATCH_MQ, body=batch(queues, group, client_id), timeout=30
    )


async def lock(
    client: RawClient, *queues: MessageQueue, group: str = GROUP, client_id: str = "me"
) -> tuple[MessageQueue, ...]:
    answer = await ask(client, queues, group, client_id)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_body(LockedQueues, answer.body).lock_ok_mq_set


async def test_order_locks_are_granted_after_the_pause_of_a_start(start_broker, open_client):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock}, lock_pause=30)
    has_queues(broker, "orders", 4)
    client = await open_client(broker)
    queue = at("orders", 0)

    too_early = await lock(client, *queue)
    clock.advance(30)
    granted = [await lock(client, *queue, client_id=who) for who in ("me", "you")]
    clock.advance(61)

    assert (too_early, granted) == ((), [queue, ()])
    assert await lock(client, *queue, client_id="you") == queue


async def test_only_queues_of_this_broker_are_locked(broker, client):
    has_queues(broker, "orders", 4)
    there = at("orders", 0, 3)

    granted = await lock(
        client,
        *at("orders", -1, 4, 2**31 - 1),
        *at("nothing", 0),
        *at("orders", 0, broker="broker-b"),
        *at("%RETRY%somebody", 0),
        *there,
    )

    assert granted == there
    assert len(broker.parts.locks) == 2


async def test_locks_are_renewed_after_a_restart_before_the_first_heartbeat(
    start_broker, open_client
):
    first = await start_broker()
    client = await open_client(first)
    await client.heartbeat("me", ORDERS)
    await client.stored("orders")
    queues = (*at("orders", 0), *at("%RETRY%" + GROUP, 0))
    before = await lock(client, *queues)
    await client.close()
    await first.stop()

    client = await open_client(await start_broker(auto_create_group=False))

    assert before == queues
    assert await lock(client, *queues) == queues


async def test_a_group_that_is_not_there_and_may_not_be_made_locks_nothing(
    start_broker, open_client
):
    broker = await start_broker(auto_create_group=False)
    has_queues(broker, "orders", 4)
    client = await open_client(broker)

    absent = await ask(client, at("orders", 0))
    impossible = await ask(client, at("orders", 0), "no such\n" * 1000)

    assert absent.code == impossible.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert f"orbitmq group create {GROUP}" in (absent.remark or "")
    assert len(broker.parts.locks) == 0
    assert len(impossible.remark or "") < 2_000


async def test_too_many_locks_are_logged(start_broker, open_client, caplog):
    caplog.set_level(logging.WARNING)
    broker = await start_broker(max_order_locks=2)
    has_queues(broker, "orders", 4)
    client = await open_client(broker)

    first = await lock(client, *at("orders", 0, 1, 2))
    other = await lock(client, *at("orders", 0), group="others")
    renewed = await lock(client, *at("orders", 1))

    assert (first, other, renewed) == (at("orders", 0, 1), (), at("orders", 1))
    assert [text for text in caplog.messages if "max_order_locks" in text] == [
        "2 queues are locked, and more are not granted (max_order_locks, time 1)"
    ]


async def test_a_request_for_locks_has_limits(broker, client):
    has_queues(broker, "orders", 4)
    longest, longer = "x" * LONGEST_ID, "x" * (LONGEST_ID + 1)

    granted = await lock(client, *at("orders", 0), client_id=longest)
    queues = at("orders", *range(16_385))
    many = await ask(client, queues)
    given_back = await client.connection.request(
        RequestCode.UNLOCK_BATCH_MQ, body=batch(queues, client_id="them"), timeout=30
    )
    refused = [
        await ask(client, at("orders", 1), client_id=longer),
        await client.connection.request(
            RequestCode.UNLOCK_BATCH_MQ, body=batch(at("orders", 0), client_id=longer), timeout=30
        ),
    ]

    assert granted == at("orders", 0)
    assert "16384 are allowed" in (many.remark or "")
    assert given_back.code == ResponseCode.SUCCESS, given_back.remark
    assert {answer.code for answer in refused} == {ResponseCode.INVALID_PARAMETER}
    assert len(broker.parts.locks) == 1
