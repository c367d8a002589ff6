"""The kombu transport: queues, exchanges, acknowledgements, counts; with a real broker."""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack, suppress
from typing import Any

import kombu
import pytest

import orbitmq.integrations.kombu  # makes the scheme known
from orbitmq import Admin
from orbitmq.integrations.kombu import exchange_topic, topic_name, topic_pattern

pytestmark = pytest.mark.feature("W1")

PATIENCE = 30.0


@pytest.fixture
def url(orbit_shared_cluster):
    """A virtual host of its own: queues of other tests are not seen."""
    return f"orbitmq://{orbit_shared_cluster.name_server}/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def connect(url):
    """Makes connections, each with clients of its own, as another process would have."""
    with ExitStack() as open_ones:

        def connection(**options) -> kombu.Connection:
            made = kombu.Connection(url, transport_options=options)
            return open_ones.enter_context(made)

        yield connection


class Receiver:
    """A consumer that keeps what it gets."""

    def __init__(self, connection: kombu.Connection, *queues: kombu.Queue, **options) -> None:
        self.bodies: list[Any] = []
        self.messages: list[kombu.Message] = []
        self._connection = connection
        self._acks = options.pop("acks", True)
        self.consumer = kombu.Consumer(
            connection.channel(), queues, callbacks=[self._received], **options
        )
        self.consumer.consume()

    def _received(self, body, message) -> None:
        self.bodies.append(body)
        self.messages.append(message)
        if self._acks:
            message.ack()

    def until(self, count: int) -> list[Any]:
        deadline = time.monotonic() + PATIENCE
        while len(self.bodies) < count and time.monotonic() < deadline:
            self.drain(0.2)
        return self.bodies

    def drain(self, timeout: float) -> None:
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=timeout)


def publish(connection, body, *, queue: kombu.Queue | None = None, **options) -> None:
    producer = kombu.Producer(connection.channel())
    declare = [] if queue is None else [queue]
    if queue is not None and not options:
        options = {"exchange": "", "routing_key": queue.name}
    producer.publish(body, declare=declare, **options)


def test_a_queue_is_a_topic_whose_messages_go_to_one_of_its_consumers(connect):
    queue = kombu.Queue("work", durable=True)
    sender, receiver = connect(), Receiver(connect(), queue)

    for number in range(50):
        publish(sender, {"number": number}, queue=queue)

    assert sorted(body["number"] for body in receiver.until(50)) == list(range(50))


@pytest.mark.parametrize(
    ("kind", "bound", "sent", "arrives"),
    [
        ("direct", "paid", "paid", True),
        ("direct", "paid", "refunded", False),
        ("topic", "order.*", "order.paid", True),
        ("topic", "order.*", "order.paid.late", False),
        ("topic", "order.#", "order.paid.late", True),
        ("fanout", "", "anything", True),
    ],
)
def test_bindings_hold_for_messages_of_other_processes(connect, kind, bound, sent, arrives):
    exchange = kombu.Exchange(f"ex-{kind}", type=kind)
    receiver = Receiver(connect(), kombu.Queue("mine", exchange=exchange, routing_key=bound))

    # The sender declares the exchange alone, and knows no queue.
    producer = kombu.Producer(connect().channel(), exchange=exchange)
    producer.publish("hello", routing_key=sent)
    last = "order.end" if kind == "topic" else bound
    producer.publish("the last", routing_key=last)

    expected = {"hello", "the last"} if arrives else {"the last"}
    receiver.until(len(expected))
    receiver.drain(0.3)
    assert set(receiver.bodies) == expected


def test_a_fanout_reaches_the_queues_of_all_processes(connect):
    exchange = kombu.Exchange("news", type="fanout")
    receivers = [Receiver(connect(), kombu.Queue(f"q{n}", exchange=exchange)) for n in range(3)]

    kombu.Producer(connect().channel(), exchange=exchange).publish("hello")

    assert [receiver.until(1) for receiver in receivers] == [["hello"]] * 3


def test_a_bound_queue_keeps_what_comes_before_its_first_consumer(connect):
    exchange = kombu.Exchange("orders", type="topic")
    queue = kombu.Queue("billing", exchange=exchange, routing_key="order.#", durable=True)
    sender = connect()
    publish(sender, "before the queue", exchange=exchange, routing_key="order.paid")
    publish(sender, "kept", queue=queue, exchange=exchange, routing_key="order.paid")

    assert Receiver(connect(), queue).until(1) == ["kept"]


def test_what_a_closed_connection_did_not_acknowledge_comes_again(connect):
    queue = kombu.Queue("work")
    first = connect()
    receiver = Receiver(first, queue, acks=False)
    for number in range(3):
        publish(first, number, queue=queue)
    receiver.until(3)
    next(message for message in receiver.messages if message.payload == 1).ack()

    first.close()

    other = Receiver(connect(), queue)
    assert sorted(other.until(2)) == [0, 2]
    assert all(message.delivery_info["redelivered"] for message in other.messages)


def test_a_cancelled_consumer_leaves_the_rest_to_others_once_it_holds_nothing(connect):
    queue = kombu.Queue("work")
    first = connect()
    receiver = Receiver(first, queue, acks=False, prefetch_count=1)
    for number in range(40):
        publish(first, number, queue=queue)
    (held,) = receiver.until(1)
    receiver.consumer.cancel()
    receiver.messages[0].ack()

    other = Receiver(connect(), queue)

    assert sorted([held, *other.until(39)]) == list(range(40))


def test_an_unacknowledged_message_becomes_visible_again(connect):
    queue = kombu.Queue("work")
    receiver = Receiver(connect(visibility_timeout=1), queue, acks=False)
    publish(connect(), "slow", queue=queue)
    assert receiver.until(1) == ["slow"]

    assert receiver.until(2) == ["slow", "slow"]
    receiver.messages[0].ack()  # too late, and harmless
    receiver.messages[1].ack()


def test_a_rejected_message_comes_again_or_is_a_dead_letter(connect, url, orbit_shared_cluster):
    queue = kombu.Queue("work")
    receiver = Receiver(connect(), queue, acks=False)
    publish(connect(), "bad", queue=queue)
    receiver.until(1)

    receiver.messages[0].reject(requeue=True)
    receiver.until(2)
    receiver.messages[1].reject()

    group = topic_name("work", vhost=url.rpartition("/")[2])
    deadline = time.monotonic() + PATIENCE
    while not (dead := orbit_shared_cluster.messages(f"%DLQ%{group}")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(dead) == 1


def test_prefetch_limits_what_a_consumer_holds(connect):
    queue = kombu.Queue("work")
    connection = connect()
    receiver = Receiver(connection, queue, acks=False, prefetch_count=2)
    for number in range(5):
        publish(connection, number, queue=queue)

    receiver.until(2)
    receiver.drain(0.3)
    assert len(receiver.bodies) == 2

    receiver.messages[0].ack()
    assert len(receiver.until(3)) == 3


def test_many_messages_may_be_unacknowledged_without_a_prefetch_count(connect):
    queue = kombu.Queue("work")
    connection = connect()
    receiver = Receiver(connection, queue, acks=False)
    for number in range(100):
        publish(connection, number, queue=queue)

    assert sorted(receiver.until(100)) == list(range(100))


def test_the_size_of_a_queue_counts_what_nobody_has(connect):
    queue, connection = kombu.Queue("work"), connect()
    for number in range(5):
        publish(connection, number, queue=queue)
    bound = queue(connection.channel())
    assert bound.queue_declare(passive=True).message_count == 5

    messages = [bound.get() for _ in range(2)]
    assert bound.queue_declare(passive=True).message_count == 3
    messages[0].ack()

    assert bound.purge() == 3
    assert bound.get() is None
    assert bound.queue_declare(passive=True).message_count == 0


def test_an_expired_message_is_not_delivered(connect):
    queue = kombu.Queue("work")
    sender = connect()
    publish(sender, "late", queue=queue, routing_key="work", exchange="", expiration=0.05)
    time.sleep(0.1)
    publish(sender, "in time", queue=queue, routing_key="work", exchange="", expiration=60)

    receiver = Receiver(connect(), queue)
    receiver.until(1)
    receiver.drain(0.3)
    assert receiver.bodies == ["in time"]


def test_a_temporary_queue_ends_with_its_channel(connect, url, orbit_shared_cluster):
    connection = connect()
    queue = kombu.Queue("mine", auto_delete=True)
    Receiver(connection, queue)
    name = topic_name("mine", vhost=url.rpartition("/")[2])
    with Admin(name_server=orbit_shared_cluster.name_server) as admin:
        assert name in [each.name for each in admin.topics.list()]

        connection.close()

        assert name not in [each.name for each in admin.topics.list()]
        assert name not in [each.group for each in admin.groups.list()]


@pytest.mark.parametrize("body", [b"\xff\x00", "text", {"a": [1, None]}, "ä\u2028"])
def test_bodies_arrive_as_they_were(connect, body):
    queue = kombu.Queue("work")
    receiver = Receiver(connect(), queue)

    publish(connect(), body, queue=queue)

    assert receiver.until(1) == [body]


def test_a_restart_of_the_broker_is_survived(orbit_cluster):
    queue = kombu.Queue("work")
    url = f"orbitmq://{orbit_cluster.name_server}/"
    with kombu.Connection(url) as sender, kombu.Connection(url) as connection:
        receiver = Receiver(connection, queue)
        publish(sender, "before", queue=queue)
        receiver.until(1)

        orbit_cluster.restart_broker()
        kombu.Producer(sender).publish("after", routing_key="work", retry=True)

        receiver.until(2)
    assert set(receiver.bodies) == {"before", "after"}


def test_a_cluster_that_is_away_is_a_connection_error():
    connection = kombu.Connection("orbitmq://127.0.0.1:1", transport_options={"timeout": 0.5})

    with pytest.raises(connection.connection_errors):
        connection.connect()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queues": 0}, "transport_options.queues"),
        ({"visibility_timeout": "soon"}, "transport_options.visibility_timeout"),
        ({"visibility_timout": 8}, "do you mean 'visibility_timeout'"),
    ],
)
def test_a_wrong_option_is_named(options, says):
    connection = kombu.Connection("orbitmq://127.0.0.1:1", transport_options=options)

    with pytest.raises(orbitmq.errors.SettingError, match=says):
        connection.connect()


@pytest.mark.parametrize(
    ("name", "vhost", "topic"),
    [
        ("celery", "/", "celery"),
        ("celery", "shop", "shop-celery"),
        ("celery@host.pidbox", "/", "celery_host_pidbox-d6b3c6e1"),
        ("x" * 150, "/", "x" * 100 + "-d9d0f3d6"),
    ],
)
def test_names_that_rocketmq_does_not_have_are_replaced(name, vhost, topic):
    found = topic_name(name, vhost=vhost)

    assert found.rpartition("-")[0] == topic.rpartition("-")[0]
    assert len(exchange_topic(name, vhost=vhost)) <= 120


@pytest.mark.parametrize(
    ("binding", "key", "matches"),
    [
        ("#", "", True),
        ("#", "a.b", True),
        ("a.#", "a", True),
        ("a.#", "ab", False),
        ("#.b", "b", True),
        ("a.*.c", "a.b.c", True),
        ("a.*", "a", False),
        ("a+", "aa", False),
    ],
)
def test_keys_of_topic_exchanges_match_as_in_amqp(binding, key, matches):
    assert bool(topic_pattern(binding).fullmatch(key)) is matches
