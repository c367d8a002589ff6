"""Requests about clients: heartbeats, unregistering, members, connections, server-side assignment.

It also has the table of all handlers (`handlers_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from orbitmq import names
from orbitmq.broker.errors import BrokerError, Refused
from orbitmq.broker.groups import (
    FIELD,
    LONGEST_ID,
    LONGEST_NAME,
    Client,
    GroupChange,
    findings,
    findings_text,
    findings_words,
)
from orbitmq.broker.handlers.admin import (
    ConfigHandler,
    GroupHandler,
    StatisticsHandler,
    TopicHandler,
)
from orbitmq.broker.handlers.messages import MessageHandler, RelayHandler, ReplyHandler
from orbitmq.broker.handlers.offsets import OffsetHandler, ResetHandler
from orbitmq.broker.handlers.pull import PullHandler
from orbitmq.broker.handlers.send import SendBackHandler, SendHandler
from orbitmq.broker.locks import LockHandler
from orbitmq.broker.replication.slave import ReplicationHandler
from orbitmq.broker.scheduler import Steps, chunked_answer
from orbitmq.broker.timers import RecallHandler
from orbitmq.broker.topics import may_read
from orbitmq.broker.transactions import TransactionHandler
from orbitmq.javahash import java_order
from orbitmq.logonce import LogAtIntervals
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler, Result
from orbitmq.wire.bodies import (
    Assignments,
    CheckClientRequest,
    ConsumerData,
    GroupList,
    HeartbeatData,
    LanguageName,
    MessageModel,
    MessageQueue,
    ProducerData,
    ProducerInfo,
    ProducerTable,
    QueryAssignment,
    QuerySubscription,
    QueueAssignment,
    QueueData,
    TopicList,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    GetConsumerConnectionRequest,
    GetConsumerListRequest,
    GetProducerConnectionRequest,
    GroupRequest,
    HeartbeatResponse,
    NotifyConsumerIdsChangedRequest,
    QuerySubscriptionRequest,
    TopicRequest,
    UnregisterClientRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body, quoted

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)

#: Characters of a peer's name that are logged and kept.
_SHOWN = 128

#: What is wrong with a heartbeat, in the log.
_NO_GROUP = "of a group that does not exist and may not be made"
_TOO_LONG = "with a subscription that is too long"
_TOO_MUCH = "with too much about consumer groups"
_TOO_MANY = "with too many producer groups"


class MembershipHandler:
    """Keeps the tables of clients, and notifies the members of groups."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        #: What heartbeats say that is not accepted; clients repeat it.
        self._noted = LogAtIntervals()
        parts.on_connection_closed(self.connection_closed)
        parts.scheduler.every(parts.settings.scan_interval, self.scan)

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_config,
        }

    # Heartbeats.

    def heartbeat(self, connection: Connection, request: Command) -> Command:
        """Note all groups of a client."""
        data = decode_body(HeartbeatData, request.body)
        if len(data.client_id) > LONGEST_ID:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"a client id of {len(data.client_id)} characters: {LONGEST_ID} are allowed",
            )
        client = Client(
            data.client_id,
            LanguageName[request.language.name],
            request.version,
            str(connection.remote),
        )
        wants_subscriptions = False
        refusal: Refused | None = None
        for consumer in data.consumer_data_set:
            taken, refused = self._accepted(connection, client, consumer)
            refusal = refusal or refused
            if taken is not None:
                wants_subscriptions |= self._consumer(connection, client, data, taken)
        too_many = self._producers(connection, client, data.producer_data_set)
        if (refusal := refusal or too_many) is not None:
            # What is within bounds is noted; clients log the answer about the rest.
            raise refusal
        # A full heartbeat is answered that subscriptions changed, as Apache does: clients that send
        # full ones ignore it, and clients that begin with short ones need it.
        is_short = data.heartbeat_fingerprint != 0
        return request.answer(
            ResponseCode.SUCCESS,
            HeartbeatResponse(
                supports_v2=True,
                is_sub_change=wants_subscriptions if is_short else True,
                dedup_window=self._parts.dedup.capability,
            ),
        )

    def _warn(self, what: str, source: Hashable, refusal: object, client: Client) -> None:
        if count := self._noted.note((what, source), self._parts.clock.monotonic()):
            log.warning(
                "heartbeat %s: %s (time %d)",
                what,
                refusal,
                count,
                extra={"client": client.id[:_SHOWN]},
            )

    def _accepted(
        self, connection: Connection, client: Client, consumer: ConsumerData
    ) -> tuple[ConsumerData | None, Refused | None]:
        """The accepted part of a group's subscriptions, and why the rest is not accepted.

        None are longer than allowed, and together they fit into the room of the connection.
        """
        name, wanted = consumer.group_name, consumer.subscription_data_set
        too_long = {each.topic: self._parts.filters.too_long(each) for each in wanted}
        refusal = next(filter(None, too_long.values()), None)
        if refusal is not None:
            self._warn(_TOO_LONG, name[:_SHOWN], refusal, client)
            short = tuple(each for each in wanted if too_long[each.topic] is None)
            consumer = msgspec.structs.replace(consumer, subscription_data_set=short)
        consumers = self._parts.consumers
        taken = consumers.within_room(connection, consumer)
        if taken is consumer:
            return consumer, refusal
        left_out = len(wanted) - (0 if taken is None else len(taken.subscription_data_set))
        refusal = Refused(
            ResponseCode.INVALID_PARAMETER,
            f"{left_out} of {len(wanted)} subscriptions of group {names.shown(name, _SHOWN)!r} are "
            "left out: what one connection says about its consumer groups may take "
            f"{consumers.connection_room} bytes (max_consumer_bytes)",
        )
        self._warn(_TOO_MUCH, connection, refusal, client)
        return taken, refusal

    def _producers(
        self, connection: Connection, client: Client, producers: Sequence[ProducerData]
    ) -> Refused | None:
        """Note the producer groups of a client, as many as one connection has room for."""
        table = self._parts.producers
        now = self._parts.clock.monotonic()
        noted = 0
        for producer in producers[: table.most]:
            if table.has_room(producer.group_name, connection):
                table.heartbeat(producer.group_name, connection, client, now)
                noted += 1
        if noted == len(producers):
            return None
        refusal = Refused(
            ResponseCode.INVALID_PARAMETER,
            f"{len(producers) - noted} of {len(producers)} producer groups are left out: a "
            f"connection may be in {table.most} (max_producer_groups), with names of up to "
            f"{LONGEST_NAME} characters",
        )
        self._warn(_TOO_MANY, connection, refusal, client)
        return refusal

    def _consumer(
        self, connection: Connection, client: Client, data: HeartbeatData, consumer: ConsumerData
    ) -> bool:
        """Note one group; whether the client has to send a full heartbeat next."""
        parts = self._parts
        now = parts.clock.now()
        group = parts.groups.find(consumer.group_name, now=now)
        name = consumer.group_name[:_SHOWN]
        if group is None:
            self._warn(_NO_GROUP, name, parts.groups.missing(consumer.group_name), client)
            return False
        self._noted.end((_NO_GROUP, name))
        parts.topics.ensure_retry(
            consumer.group_name,
            group.retry_queue_nums,
            is_order=self._is_order(consumer),
            unit_mode=consumer.unit_mode,
            now=now,
        )
        result = parts.consumers.heartbeat(
            connection,
            client,
            consumer,
            now=parts.clock.monotonic(),
            notifies=group.notify_consumer_ids_changed_enable,
            fingerprint=data.heartbeat_fingerprint,
            without_subscriptions=data.without_sub,
        )
        if result.change is not None:
            self._notify(result.change)
        return result.wants_subscriptions

    def _is_order(self, consumer: ConsumerData) -> bool:
        return any(
            self._parts.topics.is_order(each.topic) for each in consumer.subscription_data_set
        )

    # Leaving.

    def unregister(self, connection: Connection, request: Command) -> Command:
        """A client unregisters from a group, or from one of each kind."""
        asked = request.header(UnregisterClientRequest)
        if asked.producer_group:
            self._parts.producers.leave(asked.producer_group, connection)
        if asked.consumer_group:
            change = self._parts.consumers.leave(asked.consumer_group, connection)
            if change is not None:
                self._notify(change)
        return request.answer(ResponseCode.SUCCESS)

    def connection_closed(self, connection: Connection) -> None:
        """Remove the clients of a closed connection."""
        for what in (_TOO_MUCH, _TOO_MANY):
            self._noted.end((what, connection))
        self._parts.producers.close(connection)
        for change in self._parts.consumers.close(connection):
            self._notify(change)

    def scan(self) -> None:
        """Remove silent clients, and report findings about groups."""
        parts = self._parts
        now = parts.clock.monotonic()
        silent, changes = parts.consumers.expire(now)
        for change in changes:
            self._notify(change)
        for channel in dict.fromkeys((*silent, *parts.producers.expire(now))):
            if isinstance(channel, Connection):
                channel.close("no heartbeat came in time")
        parts.locks.forget_expired(now)
        began, ended = parts.disagreements.check()
        for finding in began:
            log.warning("%s", finding.text)
        for finding in ended:
            log.info("resolved: %s", finding.text)

    def _notify(self, change: GroupChange) -> None:
        """Make the members of a group rebalance, and apply its present subscriptions."""
        if not change.is_gone:
            # Held pulls would go on skipping messages that the group did not want before.
            for topic in change.topics_added + change.topics_replaced + change.topics_removed:
                self._parts.held.wake(topic, group=change.group)
        for client in change.joined:
            log.info("consumer joined", extra={"group": change.group, "client": client.id})
        for client in change.left:
            log.info("consumer left", extra={"group": change.group, "client": client.id})
        if not self._parts.settings.notify_consumers:
            return
        header = NotifyConsumerIdsChangedRequest(consumer_group=change.group)
        may_consume = self._parts.access.may_consume
        for channel in change.notify:
            if not may_consume(channel, change.group):
                continue
            self._parts.notify(channel, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)

    # Queries.

    def consumer_list(self, _: Connection, request: Command) -> Command:
        asked = request.header(GetConsumerListRequest)
        found = self._parts.consumers.consumer_list(asked.consumer_group)
        if found is None:
            # Apache's brokers refuse a group without members. But the client has just sent a
            # heartbeat, whose answer has no reason either, and would ask without end.
            name = asked.consumer_group
            raise self._parts.groups.missing(name) or Refused(
                ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}"
            )
        # As of the last scan: all members ask periodically, and a comparison takes time.
        wrong = self._parts.disagreements.open_findings(asked.consumer_group)
        return request.answer(
            ResponseCode.SUCCESS,
            extra={FIELD: findings_words(wrong)} if wrong else None,
            body=encode_body(found),
        )

    def check_config(self, connection: Connection, request: Command) -> Result:
        """Whether a subscription can be served; consumers ask before they start."""
        subscription = decode_body(CheckClientRequest, request.body).subscription_data
        if subscription is not None:
            self._parts.filters.check(
                subscription.sub_string, subscription.expression_type, connection.remote
            )
        return request.answer(ResponseCode.SUCCESS)


# Connections, groups and topics (203, 204, 300, 305, 328, 343, 345).


#: The longest list of producers in bytes; clients accept frames of 16 MiB.
LARGEST_ANSWER = 15 * 1024 * 1024
#: Bytes of an entry of it, beside its texts.
_ENTRY = 128


class ConnectionHandler:
    """Answers from the tables of clients and of progress."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.all_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system_topics,
        }

    def consumers(self, _: Connection, request: Command) -> Command:
        """The members of a group, its subscriptions, and its findings."""
        group = request.header(GetConsumerConnectionRequest).consumer_group
        consumers = self._parts.consumers
        body = consumers.connections(group)
        if body is None:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online"
            )
        found = findings(group, consumers.members(group))
        return request.answer(
            ResponseCode.SUCCESS,
            extra={FIELD: findings_text(found)} if found else None,
            body=encode_body(body),
        )

    def producers(self, _: Connection, request: Command) -> Command:
        group = request.header(GetProducerConnectionRequest).producer_group
        body = self._parts.producers.connections(group)
        if body is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the producer group[{group}] not exist")
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    async def all_producers(self, _: Connection, request: Command) -> Command:
        """All producers, by group; as many groups as an answer has room for."""
        clock = self._parts.clock
        now, wall = clock.monotonic(), clock.now()
        producers = self._parts.producers
        data: dict[str, tuple[ProducerInfo, ...]] = {}
        remark = None
        entries = size = 0
        steps = Steps()
        groups = producers.groups()
        for group in groups:
            if not (infos := producers.infos(group, now=now, wall=wall)):
                continue  # it left meanwhile
            size += _size(group, infos)
            if size > LARGEST_ANSWER:
                remark = f"{len(data)} of {len(groups)} groups are shown, more are too long"
                break
            data[group] = infos
            entries += len(infos)
            await steps.did(len(infos))
        return await chunked_answer(
            request, ProducerTable(data=data), entries=entries, remark=remark
        )

    def groups_of_topic(self, _: Connection, request: Command) -> Command:
        """The groups that subscribe to a topic now, and those that have progress in it."""
        topic = request.header(TopicRequest).topic
        groups = self._parts.consumers.groups_of(topic) | self._parts.progress.groups_of(topic)
        body = GroupList(group_list=tuple(sorted(groups)))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def topics_of_group(self, _: Connection, request: Command) -> Command:
        """The topics that a group has progress in."""
        topics = self._parts.progress.topics_of(request.header(GroupRequest).group)
        body = TopicList(broker_addr=str(self._parts.address), topic_list=tuple(sorted(topics)))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def subscription(self, _: Connection, request: Command) -> Command:
        """A group's subscription to a topic; empty when there is none."""
        asked = request.header(QuerySubscriptionRequest)
        body = QuerySubscription(
            group=asked.group,
            topic=asked.topic,
            subscription_data=self._parts.consumers.subscription(asked.group, asked.topic or ""),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def system_topics(self, _: Connection, request: Command) -> Command:
        body = TopicList(topic_list=tuple(sorted(self._parts.topics.system_topics())))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))


def _size(group: str, infos: tuple[ProducerInfo, ...]) -> int:
    """The largest size of a group in the list of all producers."""
    return len(quoted(group)) + sum(
        _ENTRY + len(quoted(info.client_id or "")) + len(quoted(info.remote_ip or ""))
        for info in infos
    )


# Families of handlers.


class Family(Protocol):
    """Handlers of requests that belong together.

    Created once, with complete parts; may add transformations and jobs.
    """

    def handlers(self) -> Mapping[int, Handler]:
        """The method for each request code."""


#: A family's class.
MakeFamily: TypeAlias = "Callable[[Parts], Family]"


# Server-side assignment (400): with `setClientRebalance(false)` Java clients from 5.0 on ask a
# broker of the topic at every rebalance. The answer follows from the same data as the members' own
# allocation: the readable queues of the topic, the client ids of the group, and the strategy. So
# members of both kinds can share a group. Queues are pulled; POP is not served. If the assignment
# is not known the request is refused, and the client keeps its queues. (Apache's broker then
# answers an empty success.)

#: The share of the member at an index, of a number of members.
_Strategy = Callable[[Sequence[MessageQueue], int, int], Sequence[MessageQueue]]


class AssignmentHandler:
    """Assigns queues to members of groups."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._refused = LogAtIntervals()

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.QUERY_ASSIGNMENT: self.query}

    async def query(self, _: Connection, request: Command) -> Command:
        """The queues of one member."""
        asked = decode_body(QueryAssignment, request.body)
        is_shared = asked.message_model is not MessageModel.BROADCASTING
        strategy = self._strategy(asked) if is_shared else None
        queues: Sequence[MessageQueue] = await self._queues(asked.topic)
        if strategy is not None:
            queues = self._share(asked, strategy, queues)
        assignments = tuple(QueueAssignment(message_queue=queue) for queue in queues)
        return request.answer(
            ResponseCode.SUCCESS,
            body=encode_body(Assignments(message_queue_assignments=assignments)),
        )

    def _strategy(self, asked: QueryAssignment) -> _Strategy:
        """The strategy by its name; an unknown one is logged: the group will get no message."""
        name = asked.strategy_name or ""
        if (found := _STRATEGIES.get(name)) is not None:
            return found
        refused = Refused(
            ResponseCode.INVALID_PARAMETER,
            f"allocation strategy {names.shown(name, _SHOWN)!r} is not known to the broker, which "
            f"knows {' and '.join(_STRATEGIES)}; choose one of these, or have the client work its "
            "share out (setClientRebalance(true))",
        )
        group = names.shown(asked.consumer_group, _SHOWN)
        if count := self._refused.note(group, self._parts.clock.monotonic()):
            log.warning(
                "a consumer is assigned no queues: %s (time %d)",
                refused,
                count,
                extra={"group": group, "client": names.shown(asked.client_id, _SHOWN)},
            )
        raise refused

    def _share(
        self, asked: QueryAssignment, strategy: _Strategy, queues: Sequence[MessageQueue]
    ) -> tuple[MessageQueue, ...]:
        members = self._parts.consumers.members(asked.consumer_group)
        ids = sorted((member.client.id for member in members), key=java_order)
        if asked.client_id not in ids:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"{names.shown(asked.client_id)} is not a member of group "
                f"{names.shown(asked.consumer_group)!r} here; send a heartbeat first",
            )
        ordered = sorted(queues, key=lambda each: (java_order(each.broker_name), each.queue_id))
        return tuple(strategy(ordered, ids.index(asked.client_id), len(ids)))

    async def _queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic at all brokers. Raises `Refused`."""
        parts = self._parts
        route = await parts.registration.route(topic)
        if route is not None:
            return [queue for data in route.queue_datas for queue in _readable(topic, data)]
        # Without a name server there is no other broker.
        config = parts.topics.get(topic)
        if config is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{names.shown(topic)}] not exist")
        own = QueueData(
            broker_name=parts.settings.name,
            perm=config.perm & parts.settings.permission,
            read_queue_nums=config.read_queue_nums,
        )
        return _readable(topic, own)


def _readable(topic: str, data: QueueData) -> list[MessageQueue]:
    if not may_read(data.perm):
        return []
    return [
        MessageQueue(topic=topic, broker_name=data.broker_name, queue_id=number)
        for number in range(data.read_queue_nums)
    ]


# The same rules as in `client.consumer.strategies`: members of both kinds have to agree.


def _in_pages(queues: Sequence[MessageQueue], place: int, members: int) -> Sequence[MessageQueue]:
    size, left = divmod(len(queues), members)
    start = place * size + min(place, left)
    return queues[start : start + size + (place < left)]


def _in_turn(queues: Sequence[MessageQueue], place: int, members: int) -> Sequence[MessageQueue]:
    return queues[place::members]


_STRATEGIES: Mapping[str, _Strategy] = {"AVG": _in_pages, "AVG_BY_CIRCLE": _in_turn}


# The families of a broker.


#: In the order in which they are created.
FAMILIES: tuple[MakeFamily, ...] = (
    SendHandler,
    PullHandler,
    OffsetHandler,
    MembershipHandler,
    AssignmentHandler,
    LockHandler,
    SendBackHandler,
    TransactionHandler,
    ReplyHandler,
    RecallHandler,
    MessageHandler,
    TopicHandler,
    GroupHandler,
    ResetHandler,
    RelayHandler,
    ConnectionHandler,
    StatisticsHandler,
    ConfigHandler,
    ReplicationHandler,
)


#: These measure their own latency.
_TIMED = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
    }
)


def handlers_of(parts: Parts, families: tuple[MakeFamily, ...] = FAMILIES) -> dict[int, Handler]:
    """Create all families, and merge their handlers."""
    table: dict[int, Handler] = {}
    for make in families:
        for code, handler in make(parts).handlers().items():
            if code in table:
                raise BrokerError(f"two families answer request code {int(code)}")
            is_timed = code in _TIMED
            table[int(code)] = handler if is_timed else parts.latencies.timed(int(code), handler)
    return table
