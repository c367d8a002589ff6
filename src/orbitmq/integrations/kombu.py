"""A kombu transport, and so a broker for Celery: `broker_url = "orbitmq://127.0.0.1:9876//"`.

`import orbitmq.integrations.kombu` makes the URL scheme known. What AMQP calls a queue is a topic
and a consumer group of the same name; an exchange is a topic of its own, which the groups of the
queues bound to it subscribe to. So bindings hold across processes, and every bound queue gets its
copy. A message is finished at the broker when the application acknowledges it: what a process
that dies has not acknowledged, another process gets.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import functools
import heapq
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any, Final

from orbitmq import __version__
from orbitmq.client.admin.admin import Admin
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.settings import ConsumeSettings, RebalanceSettings
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.middleware import Delivery as Arriving
from orbitmq.client.producer.producer import Producer
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import (
    AlreadyExists,
    MessageRefused,
    MissingExtra,
    NotFound,
    OrbitError,
    SendFailed,
    SettingError,
    TimedOut,
    Unavailable,
)
from orbitmq.parsing import Fields
from orbitmq.remoting.tls import ClientTls
from orbitmq.wire.command import Credentials

try:
    from kombu.exceptions import ChannelError
    from kombu.transport import TRANSPORT_ALIASES, virtual
except ModuleNotFoundError as missing:
    raise MissingExtra("the Celery transport", "kombu", "celery") from missing

log = logging.getLogger(__name__)

#: The URL schemes; an entry of kombu's table is the only way to add one.
SCHEMES: Final = ("orbitmq", "rocketmq")
TRANSPORT_ALIASES.update(dict.fromkeys(SCHEMES, f"{__name__}:Transport"))

DEFAULT_PORT: Final = 9876
#: Messages that a member holds at first, and at most (the consumer's limit).
_FIRST_ROOM: Final = 16
_MOST_ROOM: Final = 1000
#: Seconds between two checks of an empty queue.
_LOOK: Final = 0.02
#: Seconds that a task must be ahead of its time for the broker to keep it until then.
_SOON: Final = 1.0
#: Messages that are delivered in one turn of the event loop.
_AT_ONCE: Final = 50
#: Characters of a name beside its number; a group may have 120.
_LONGEST_NAME: Final = 100


# ---- options


class Options:
    """`transport_options` (Celery: `broker_transport_options`), checked."""

    __slots__ = ("eta_at_broker", "longest_delay", "queues", "timeout", "visibility_timeout")

    def __init__(self, given: Mapping[str, Any]) -> None:
        for name in given.keys() - set(self.__slots__):
            # kombu and Celery have options of their own here; only misspelled names are refused.
            if meant := difflib.get_close_matches(name, self.__slots__, 1, 0.8):
                raise SettingError(
                    f"transport_options has no {name!r}; do you mean {meant[0]!r}? There are: "
                    + ", ".join(self.__slots__)
                )
        #: The queues of a new topic on each broker: as many processes may share its messages.
        self.queues: int = given.get("queues", 16)
        #: Seconds after which an unacknowledged message is delivered again.
        self.visibility_timeout: float = given.get("visibility_timeout", 3600.0)
        #: Seconds for a request to the cluster.
        self.timeout: float = given.get("timeout", 5.0)
        #: Whether the broker keeps a task with `eta` or `countdown` until it is due.
        self.eta_at_broker: bool = given.get("eta_at_broker", True)
        #: Seconds that the broker keeps a task at most: its `delays.timer_max_delay`.
        self.longest_delay: float = given.get("longest_delay", 3 * 86_400.0)
        fields = Fields(self, "transport_options")
        fields.whole("queues", most=1024)
        fields.durations("visibility_timeout", "timeout", "longest_delay")
        fields.switches("eta_at_broker")


def topic_name(name: str, *, vhost: str = "/") -> str:
    """The topic and group of a queue, which may have characters that RocketMQ's names cannot."""
    if vhost not in ("", "/"):
        name = f"{vhost}-{name}"
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:_LONGEST_NAME]
    return name if plain == name else f"{plain}-{zlib.crc32(name.encode()):08x}"


def exchange_topic(exchange: str, *, vhost: str = "/") -> str:
    """The topic of an exchange."""
    return f"exchange-{topic_name(exchange, vhost=vhost)}"[:120]


# ---- one queue in one process


class Delivery:
    """A fetched message that is neither acknowledged nor rejected."""

    __slots__ = ("_is_settled", "_loop", "_outcome", "message", "payload")

    def __init__(self, message: ReceivedMessage, payload: dict[str, Any]) -> None:
        self.message = message
        self.payload = payload
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._is_settled = False

    async def settled(self) -> None:
        """Returns when the message is acknowledged; raises the error for a rejected one."""
        error = await self._outcome
        if error is not None:
            raise error

    def settle(self, error: BaseException | None = None) -> None:
        """From any thread. Nothing happens when the message was settled or given up before."""
        self._is_settled = True
        with contextlib.suppress(RuntimeError):  # the loop has ended with its consumer
            self._loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: BaseException | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(error)

    @property
    def is_over(self) -> bool:
        """Settled, or given up by the consumer, which delivers the message again."""
        return self._is_settled or self._outcome.cancelled()


class Arrivals:
    """Counts new messages for a waiting `drain_events` or an event loop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self.count = 0

    def notify(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()
            if self._sockets is not None:
                with contextlib.suppress(BlockingIOError):  # full: the loop is notified already
                    self._sockets[1].send(b"+")

    def wait_beyond(self, count: int, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count != count, timeout)

    def readable(self) -> socket.socket:
        """A socket that has something to read after `notify`."""
        with self._changed:
            if self._sockets is None:
                self._sockets = socket.socketpair()
                for each in self._sockets:
                    each.setblocking(False)
            return self._sockets[0]

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.readable().recv(4096):
                pass

    def close(self) -> None:
        with self._changed:
            sockets, self._sockets = self._sockets, None
        for each in sockets or ():
            each.close()


class Member:
    """This process as a member of the group of a queue."""

    def __init__(
        self,
        group: str,
        client: ClientSettings,
        options: Options,
        arrivals: Arrivals,
        is_wanted: Callable[[ReceivedMessage, dict[str, Any]], bool],
    ) -> None:
        self.group = group
        #: Whether it is to leave when the application holds none of its messages.
        self.is_cancelled = False
        self._arrivals = arrivals
        self._is_wanted = is_wanted
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, int, Delivery]] = []  # a heap, urgent ones first
        self._in_hand: set[Delivery] = set()
        self._room = _FIRST_ROOM
        self._lock = threading.Lock()
        self._topics: dict[str, str | None] = {}
        #: The offset after the last message that came, by queue.
        self._arrived: dict[Queue, int] = {}
        self._is_started = False
        self._is_leaving = False
        self._consumer = Consumer(
            group,
            client=client,
            consume_from="earliest",
            workers=self._room,
            consume=ConsumeSettings(timeout=options.visibility_timeout),
            # A queue changes its owner when its messages are acknowledged, not before.
            rebalance=RebalanceSettings(handover=options.visibility_timeout, persist=1.0),
            middleware=[self._until_leaving],
        )

    @contextlib.contextmanager
    def _until_leaving(self, arriving: Arriving) -> Iterator[None]:
        """Leave to the next owner what arrives after the end."""
        if self._is_leaving:
            arriving.hold(arriving.message, 60)
        yield

    def move(
        self, arrivals: Arrivals, is_wanted: Callable[[ReceivedMessage, dict[str, Any]], bool]
    ) -> None:
        """Notify another connection of this process instead, also of waiting messages."""
        self._arrivals, self._is_wanted = arrivals, is_wanted
        arrivals.notify()

    def subscribe(self, topics: Mapping[str, str | None]) -> None:
        """Subscribe to these topics and tags; the first call begins to consume."""
        for topic, tags in topics.items():
            if topic in self._topics and self._topics[topic] == tags:
                continue
            self._topics[topic] = tags
            self._consumer.subscribe(topic, self._handle, tags=tags)
        for topic in self._topics.keys() - topics.keys():
            del self._topics[topic]
            self._consumer.unsubscribe(topic)
        if not self._is_started:
            self._is_started = True
            self._consumer.start()

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._topics)

    async def _handle(self, message: ReceivedMessage) -> None:
        try:
            payload = json.loads(message.body)
            urgency = -int(payload["properties"].get("priority") or 0)
            is_wanted = self._is_wanted(message, payload)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeadLetter(f"not a message of kombu: {error!r}") from error
        if not is_wanted:
            return
        delivery = Delivery(message, payload)
        stored_ms = round(message.stored_at * 1000)
        with self._lock:
            after = message.queue_offset + 1
            self._arrived[message.queue] = max(after, self._arrived.get(message.queue, 0))
            self._in_hand.add(delivery)
            heapq.heappush(self._waiting, (urgency, stored_ms, next(self._numbers), delivery))
        self._arrivals.notify()
        try:
            await delivery.settled()
        finally:
            with self._lock:
                self._in_hand.discard(delivery)
            self._arrivals.notify()

    def take(self) -> Delivery:
        """The waiting message with the highest priority. Raises `Empty`."""
        with self._lock:
            while self._waiting:
                delivery = heapq.heappop(self._waiting)[-1]
                if not delivery.is_over:
                    return delivery
            # The application holds as many messages as fit, and asks for more.
            is_full = len(self._in_hand) >= self._room
        if is_full and self._room < _MOST_ROOM:
            self._room = min(2 * self._room, _MOST_ROOM)
            self._consumer.resize(self._room)
        raise Empty

    def drop_waiting(self) -> int:
        """Finish all waiting messages; returns their number."""
        with self._lock:
            dropped = [entry[-1] for entry in self._waiting]
            self._waiting.clear()
        for delivery in dropped:
            delivery.settle()
        return len(dropped)

    @property
    def taken(self) -> int:
        """The number of messages that the application holds."""
        with self._lock:
            waiting = {entry[-1] for entry in self._waiting}
            return sum(not each.is_over for each in self._in_hand - waiting)

    @property
    def waiting(self) -> int:
        """The number of fetched messages that were not taken yet."""
        with self._lock:
            return sum(not entry[-1].is_over for entry in self._waiting)

    def positions(self) -> Mapping[Queue, int]:
        """The offset behind the last fetched or finished message of each of its queues."""
        with self._lock:
            arrived = dict(self._arrived)
        done = self._consumer.positions()
        return {queue: max(at, arrived.get(queue, 0)) for queue, at in done.items()}

    def leave(self, put_back: Callable[[Delivery], None]) -> None:
        """Put back unacknowledged messages and leave the group."""
        self._is_leaving = True
        with self._lock:
            unfinished = [each for each in self._in_hand if not each.is_over]
            self._waiting.clear()
        for delivery in unfinished:
            put_back(delivery)
        self._consumer.stop()


# ---- what kombu sees

#: The connections of this process, by their ids.
_connections: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


class QoS(virtual.QoS):  # type: ignore[misc]  # kombu has no types
    """Acknowledges at the broker."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self.channel.settle(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        # What kombu would put back into the exchange goes to its own queue alone.
        super().reject(delivery_tag, requeue=False)
        if requeue:
            self.channel.put_back(delivery_tag)
        else:
            self.channel.settle(delivery_tag, DeadLetter("rejected by the application"))


class Channel(virtual.Channel):  # type: ignore[misc]  # kombu has no types
    """A channel: queues, exchanges and bindings in terms of topics and groups."""

    QoS = QoS
    supports_fanout = True
    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        #: What the application has to acknowledge, by delivery tag.
        self._unsettled: dict[str, tuple[str, Delivery]] = {}
        self._of_this_channel: set[str] = set()

    # ---- declarations

    def _new_queue(self, queue: str, **options: Any) -> None:
        self.connection.declare_queue(queue, options)
        if options.get("auto_delete") or options.get("exclusive"):
            self._of_this_channel.add(queue)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return self.connection.has_queue(queue)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        exchange = exchange or "amq.direct"
        if exchange not in self.state.exchanges:
            self.exchange_declare(exchange)
        is_new = not any(each.exchange == exchange for each in self.state.queue_bindings(queue))
        super().queue_bind(queue, exchange, routing_key, arguments, **kwargs)
        self.connection.bound(queue, exchange, is_new=is_new)

    def _queue_bind(self, *_: Any) -> None:
        """kombu's hook for shared tables of bindings; here the brokers' groups are that table."""

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().queue_unbind(queue, exchange or "amq.direct", routing_key, arguments, **kwargs)
        self.connection.refresh(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any
    ) -> None:
        if if_empty and self._size(queue):
            return
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            super().queue_unbind(queue, exchange, routing_key, arguments)
        self.state.queue_bindings_delete(queue)
        self._of_this_channel.discard(queue)
        self.connection.delete_queue(queue)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        if exchange in self.state.exchanges:
            for routing_key, _, queue in list(self.get_table(exchange)):
                self.queue_unbind(queue, exchange, routing_key)
            del self.state.exchanges[exchange]
        self.connection.delete_exchange(exchange)

    # ---- sending

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **_: Any
    ) -> None:
        self._inplace_augment_message(message, exchange, routing_key)
        if exchange:
            self.connection.publish(exchange, routing_key, message)
        else:
            self._put(routing_key or self.deadletter_queue, message)

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        self.connection.put(queue, message)

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        # Text stays readable, in the console for example.
        return (body, "utf-8") if isinstance(body, str) else super().encode_body(body, encoding)

    # ---- receiving

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        self.connection.member(queue, consumes=True)
        given = callback

        def deliver(message: Any) -> Any:
            if no_ack:
                self.settle(message.delivery_tag)
            return given(message)

        super().basic_consume(queue, no_ack, deliver, consumer_tag, **kwargs)

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues:
            self.connection.cancelled(queue)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        self.connection.member(queue)
        deadline = time.monotonic() + self.connection.options.timeout
        while (message := super().basic_get(queue, no_ack, **kwargs)) is None:
            # A member of a group gets its messages a moment after it has joined.
            if not self._size(queue) or time.monotonic() > deadline:
                return None
            time.sleep(_LOOK)
        if no_ack:
            self.settle(message.delivery_tag)
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        delivery = self.connection.member(queue).take()
        payload = delivery.payload
        # A message that comes twice has a tag of its own each time.
        tag = payload["properties"]["delivery_tag"] = self._next_delivery_tag()
        if delivery.message.attempt > 1:
            payload["properties"]["delivery_info"]["redelivered"] = True
        self._unsettled[tag] = queue, delivery
        return payload

    def settle(self, delivery_tag: str, error: BaseException | None = None) -> None:
        """Finish a message that was taken, or have it handled as `error` says."""
        if (found := self._unsettled.pop(delivery_tag, None)) is not None:
            queue, delivery = found
            delivery.settle(error)
            self.connection.arrivals.notify()  # there may be room for another one
            self.connection.leave_if_done(queue)

    def put_back(self, delivery_tag: str) -> None:
        """Put a message that was taken at the end of its queue."""
        if (found := self._unsettled.pop(delivery_tag, None)) is not None:
            self.connection.put_back(*found)
            self.connection.leave_if_done(found[0])

    def _restore(self, message: Any) -> None:
        self.put_back(message.delivery_tag)

    # ---- counting and clearing

    def _size(self, queue: str) -> int:
        return self.connection.size(queue)

    def _purge(self, queue: str) -> int:
        return self.connection.purge(queue)

    def close(self) -> None:
        if self.closed:
            return
        connection, mine = self.connection, set(self._of_this_channel)
        super().close()
        # What kombu did not restore, because the channel was told not to.
        for tag in list(self._unsettled):
            found = self._unsettled.pop(tag)
            connection.put_back(*found)
        for queue in mine:
            if connection.is_consumed_elsewhere(queue):
                continue  # it ends with its last consumer
            with contextlib.suppress(OrbitError):
                connection.delete_queue(queue)


class Transport(virtual.Transport):  # type: ignore[misc]  # kombu has no types
    """The connection. Clients are made at their first use, in the process that uses them."""

    Channel = Channel
    default_port = DEFAULT_PORT
    driver_type = "rocketmq"
    driver_name = "orbitmq"
    polling_interval = None

    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    connection_errors = (*virtual.Transport.connection_errors, Unavailable, TimedOut, SendFailed)
    channel_errors = (*virtual.Transport.channel_errors, ChannelError, NotFound, MessageRefused)

    options: Options
    arrivals: Arrivals

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.polling_interval = None
        self.options = Options(client.transport_options)
        self.arrivals = Arrivals()
        self._vhost = client.virtual_host or "/"
        self._pid = os.getpid()
        self._cluster = (client.hostname, client.port, client.userid, self._vhost)
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        #: What queues were declared with.
        self._declared: dict[str, dict[str, Any]] = {}
        self._exchange_topics: set[str] = set()
        self._producer_: Producer | None = None
        self._admin_: Admin | None = None
        #: kombu's event loop, in which Celery's worker runs.
        self._loop: Any = None
        _connections[id(self)] = self

    def driver_version(self) -> str:
        return __version__

    # ---- clients

    @property
    def _settings(self) -> ClientSettings:
        client = self.client
        credentials = None
        if client.userid:
            credentials = Credentials(access_key=client.userid, secret_key=client.password or "")
        return ClientSettings(
            name_servers=(f"{client.hostname or '127.0.0.1'}:{client.port or DEFAULT_PORT}",),
            credentials=credentials,
            tls=None if not client.ssl else tls_of(client.ssl).context(),
            request_timeout=self.options.timeout,
        )

    @property
    def _producer(self) -> Producer:
        with self._lock:
            if self._producer_ is None:
                producer = Producer("kombu", client=self._settings)
                producer.start()
                self._producer_ = producer
                self._close_at_exit()
            return self._producer_

    @property
    def _admin(self) -> Admin:
        with self._lock:
            if self._admin_ is None:
                admin = Admin(client=self._settings)
                admin.start()
                self._admin_ = admin
            return self._admin_

    def establish_connection(self) -> Transport:
        try:
            status = self._admin.cluster()
        except BaseException:
            self._stop_clients()
            raise
        if not any(each.is_up for each in status.brokers):
            self._stop_clients()
            where = f"{self.client.hostname}:{self.client.port or DEFAULT_PORT}"
            raise Unavailable(f"no broker of the name server at {where} answers")
        super().establish_connection()
        return self

    def close_connection(self, connection: Transport) -> None:
        if self._pid != os.getpid():
            return  # everything belongs to the process that this one was forked from
        super().close_connection(connection)
        _connections.pop(id(self), None)
        atexit.unregister(self._end)
        with self._lock:
            members, self._members = self._members, {}
        for queue, member in members.items():
            member.leave(lambda delivery, queue=queue: self.put_back(queue, delivery))  # type: ignore[misc]
        self._stop_clients()
        if self._loop is not None:
            self._loop.remove_reader(self.arrivals.readable())
            self._loop = None
        self.arrivals.close()

    def _stop_clients(self) -> None:
        with self._lock:
            producer, self._producer_ = self._producer_, None
            admin, self._admin_ = self._admin_, None
        if producer is not None:
            producer.stop()
        if admin is not None:
            admin.stop()

    # ---- declarations

    def _topic(self, queue: str) -> str:
        return topic_name(queue, vhost=self._vhost)

    def _exchange_topic(self, exchange: str) -> str:
        return exchange_topic(exchange, vhost=self._vhost)

    def declare_queue(self, queue: str, options: Mapping[str, Any]) -> None:
        if queue in self._declared:
            return
        self._create(self._topic(queue), 1 if is_temporary(options) else self.options.queues)
        self._declared[queue] = dict(options)

    def _create(self, topic: str, queues: int) -> None:
        try:
            self._admin.topics.get(topic)
        except NotFound:
            with contextlib.suppress(AlreadyExists):  # another process was quicker
                self._admin.topics.create(topic, queues=queues)

    def has_queue(self, queue: str) -> bool:
        try:
            self._admin.topics.get(self._topic(queue))
        except NotFound:
            return False
        return True

    def bound(self, queue: str, exchange: str, *, is_new: bool) -> None:
        """Bind a queue: it gets what is sent to the exchange from now on."""
        if is_new:
            topic = self._exchange_topic(exchange)
            if topic not in self._exchange_topics:
                self._create(topic, self.options.queues)
                self._exchange_topics.add(topic)
            self._begin_at_end(queue, topic)
        self.refresh(queue)

    def _begin_at_end(self, queue: str, topic: str) -> None:
        group, progress = self._topic(queue), self._admin.progress
        try:
            plan = progress.plan_reset(group, topic, "latest")
        except NotFound:
            self._admin.groups.create(group)
            plan = progress.plan_reset(group, topic, "latest")
        has_progress = any(move.from_offset is not None for move in plan.moves)
        # A temporary queue begins anew; another one may have been bound by other processes.
        if plan.moves and (not has_progress or is_temporary(self._declared.get(queue, {}))):
            progress.apply(plan)

    def refresh(self, queue: str) -> None:
        """A running member learns of changed bindings."""
        if (member := self._members.get(queue)) is not None:
            member.subscribe(self._subscriptions(queue))

    def delete_queue(self, queue: str) -> None:
        member = self._members.pop(queue, None)
        if member is not None:
            member.leave(lambda delivery: delivery.settle())
        self._declared.pop(queue, None)
        name = self._topic(queue)
        with contextlib.suppress(NotFound):
            self._admin.topics.delete(name)
        with contextlib.suppress(NotFound):
            self._admin.groups.delete(name, delete_topics=True)

    def delete_exchange(self, exchange: str) -> None:
        topic = self._exchange_topic(exchange)
        self._exchange_topics.discard(topic)
        with contextlib.suppress(NotFound):
            self._admin.topics.delete(topic)

    # ---- members

    def member(self, queue: str, *, consumes: bool = False) -> Member:
        """This process as a member of the queue's group.

        A temporary queue has one member in a process, since another would take its messages away:
        Celery polls a reply queue on one connection and consumes it on another.
        """
        with self._lock:
            member = self._members.get(queue)
            if member is None:
                member = self._of_another_connection(queue, consumes=consumes)
            if member is None:
                self.declare_queue(queue, {})
                member = Member(
                    self._topic(queue),
                    self._settings,
                    self.options,
                    self.arrivals,
                    functools.partial(self._is_wanted, queue),
                )
                member.subscribe(self._subscriptions(queue))
                self._members[queue] = member
                self._close_at_exit()
            member.is_cancelled = False  # it may be consumed again
            return member

    def _close_at_exit(self) -> None:
        """Many programs close nothing. After a client has started, and so before its own end."""
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _end(self) -> None:
        with contextlib.suppress(OrbitError):
            self.close_connection(self)

    def _of_another_connection(self, queue: str, *, consumes: bool) -> Member | None:
        """The member that another connection has: a loan, or its own if nobody consumes there."""
        if not is_temporary(self._declared.get(queue, {})):
            return None
        for other in self._others():
            if other._is_consumed(queue):
                if not consumes and (member := other._members.get(queue)) is not None:
                    return member
            elif (member := other._members.pop(queue, None)) is not None:
                self._members[queue] = member
                member.move(self.arrivals, functools.partial(self._is_wanted, queue))
                return member
        return None

    def _others(self) -> list[Transport]:
        """The other connections of this process to the same queues."""
        found = [each for reference in _connections.valuerefs() if (each := reference())]
        mine = (self._pid, self._cluster)
        return [each for each in found if each is not self and (each._pid, each._cluster) == mine]

    def is_consumed_elsewhere(self, queue: str) -> bool:
        return any(other._is_consumed(queue) for other in self._others())

    def _is_consumed(self, queue: str) -> bool:
        return any(queue in channel._active_queues for channel in self.channels)

    def cancelled(self, queue: str) -> None:
        """Other members get the messages: now, or when the application holds none any more."""
        if self._is_consumed(queue):
            return
        if (member := self._members.get(queue)) is not None:
            member.is_cancelled = True
            self.leave_if_done(queue)

    def leave_if_done(self, queue: str) -> None:
        """Leave a cancelled queue, of which the application holds nothing."""
        member = self._members.get(queue)
        if member is not None and member.is_cancelled and not member.taken:
            del self._members[queue]
            member.leave(lambda delivery: self.put_back(queue, delivery))

    def _subscriptions(self, queue: str) -> dict[str, str | None]:
        """The topics of a queue, with the tags that its bindings need."""
        found: dict[str, str | None] = {self._topic(queue): None}
        direct: dict[str, list[str]] = {}
        for exchange, routing_key, _ in self.state.queue_bindings(queue):
            topic = self._exchange_topic(exchange)
            found[topic] = None
            if self._type(exchange) == "direct":
                direct.setdefault(topic, []).append(tag_of(routing_key))
        return found | {topic: " || ".join(sorted(tags)) for topic, tags in direct.items()}

    def _type(self, exchange: str) -> str:
        return str(self.state.exchanges.get(exchange, {}).get("type", "direct"))

    def _is_wanted(self, queue: str, message: ReceivedMessage, payload: dict[str, Any]) -> bool:
        properties = payload["properties"]
        ttl_ms = properties.get("expiration")
        declared = self._declared.get(queue, {}).get("arguments") or {}
        limits = [float(each) for each in (ttl_ms, declared.get("x-message-ttl")) if each]
        if limits and time.time() > message.born_at + min(limits) / 1000:
            return False
        if message.topic == self._topic(queue):
            return True
        exchange, key = (properties["delivery_info"][name] for name in ("exchange", "routing_key"))
        bindings = [each for each in self.state.queue_bindings(queue) if each.exchange == exchange]
        match self._type(exchange):
            case "fanout":
                return bool(bindings)
            case "topic":
                patterns = (topic_pattern(each.routing_key) for each in bindings)
                return any(pattern.fullmatch(key) for pattern in patterns)
            case _:
                return any(each.routing_key == key for each in bindings)

    # ---- messages

    def put(self, queue: str, payload: dict[str, Any]) -> None:
        self._send(self._topic(queue), payload)

    def publish(self, exchange: str, routing_key: str, payload: dict[str, Any]) -> None:
        self._send(self._exchange_topic(exchange), payload, tags=tag_of(routing_key))

    def _send(self, topic: str, payload: dict[str, Any], *, tags: str | None = None) -> None:
        keys = str(payload["properties"].get("correlation_id") or "").split()
        body = json.dumps(payload, default=str)
        message = Message(topic, body, tags=tags, keys=keys)
        due = self._due(payload)
        if due is not None:
            try:
                self._producer.send(Message(topic, body, tags=tags, keys=keys, deliver_at=due))
            except MessageRefused as error:
                # A broker of RocketMQ 4 keeps no message until a time; the worker does.
                if error.field != "deliver_at":
                    raise
            else:
                return
        self._producer.send(message)

    def _due(self, payload: dict[str, Any]) -> float | None:
        """When a task of Celery is due, if the broker is to keep it until then."""
        eta = (payload.get("headers") or {}).get("eta")
        if not eta or not self.options.eta_at_broker:
            return None
        with contextlib.suppress(ValueError, TypeError):
            at = datetime.fromisoformat(eta)
            due = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
            ahead = due - time.time()
            if ahead > _SOON:
                # What is due later than the broker can keep it comes early; the worker waits.
                return due if ahead < self.options.longest_delay else None
        return None

    def put_back(self, queue: str, delivery: Delivery) -> None:
        """Put a message at the end of its queue and finish this copy of it."""
        payload = delivery.payload
        payload["properties"]["delivery_info"]["redelivered"] = True
        try:
            self._send(self._topic(queue), payload)
        except OrbitError as error:
            log.warning("%s: a message could not be put back: %s", queue, error)
            delivery.settle(error)  # delivered again by the broker, later
        else:
            delivery.settle()

    def drain_events(self, connection: Transport, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = self.arrivals.count
            try:
                self.cycle.get(self._deliver, timeout=0)
            except Empty:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self.arrivals.wait_beyond(seen, left):
                    raise TimeoutError("timed out") from None
            else:
                return

    def register_with_event_loop(self, connection: Transport, loop: Any) -> None:
        self._loop = loop
        loop.add_reader(self.arrivals.readable(), self._on_arrivals)
        self.arrivals.notify()  # of what is here already

    def _on_arrivals(self) -> None:
        self.arrivals.clear()
        try:
            for _ in range(_AT_ONCE):
                self.cycle.get(self._deliver, timeout=0)
        except Empty:
            return
        self.arrivals.notify()  # the rest, after what else the loop has to do

    def size(self, queue: str) -> int:
        """Messages that no process has fetched."""
        member = self._members.get(queue) or self._of_another_connection(queue, consumes=False)
        topics = set(self._subscriptions(queue))
        try:
            progress = self._admin.groups.progress(self._topic(queue), owners=False)
        except NotFound:
            # Nobody has consumed yet.
            try:
                status = self._admin.topics.status(self._topic(queue))
            except NotFound:
                return 0
            return sum(each.messages for each in status.queues)
        own = {} if member is None else member.positions()
        total = 0
        for each in progress.queues:
            if each.queue.topic in topics:
                done = max(each.consumer_offset, own.get(each.queue, 0))
                total += max(0, each.broker_offset - done)
        return total + (0 if member is None else member.waiting)

    def purge(self, queue: str) -> int:
        """Skip all messages that were not taken; returns their number."""
        count = self.size(queue)
        member = self._members.get(queue)
        for topic in self._subscriptions(queue):
            with contextlib.suppress(NotFound):
                self._admin.progress.reset(self._topic(queue), topic, "latest")
        if member is not None:
            member.drop_waiting()
        return count


def is_temporary(declared: Mapping[str, Any]) -> bool:
    """Whether a queue ends with its owner."""
    arguments = declared.get("arguments") or {}
    return bool(
        declared.get("auto_delete") or declared.get("exclusive") or "x-expires" in arguments
    )


def tag_of(routing_key: str) -> str:
    """The tag of messages that are sent to an exchange with this key."""
    return topic_name(routing_key) if routing_key else "-"


def topic_pattern(binding_key: str) -> re.Pattern[str]:
    """What a key of a topic exchange must look like: `*` is a word, `#` any number of words."""
    words = []
    for word in binding_key.split("."):
        words.append({"*": r"[^.]+", "#": r".*"}.get(word, re.escape(word)))
    pattern = r"\.".join(words)
    # No words at all need no dot.
    return re.compile(pattern.replace(r"\..*", r"(?:\..*)?").replace(r".*\.", r"(?:.*\.)?"))


def tls_of(ssl: Any) -> ClientTls:
    """`broker_use_ssl`: True, or the words of py-amqp and redis (`ca_certs`, `certfile` ...)."""
    if not isinstance(ssl, Mapping):
        return ClientTls()
    words = {name.removeprefix("ssl_"): value for name, value in ssl.items()}
    return ClientTls(
        authority=Path(words["ca_certs"]) if words.get("ca_certs") else None,
        certificate=Path(words["certfile"]) if words.get("certfile") else None,
        key=Path(words["keyfile"]) if words.get("keyfile") else None,
        verify_host=bool(words.get("check_hostname", True)),
    )
