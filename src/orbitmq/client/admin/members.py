"""Connected clients: members of groups, producers, and the state of single consumers."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orbitmq.arguments import explained
from orbitmq.client.admin.requests import (
    AdminRequests,
    BrokerNode,
    Listing,
    OfQueue,
    Topology,
    Unreachable,
    unreachable,
)
from orbitmq.client.admin.topics import queue_of
from orbitmq.client.consumer.statistics import CallTimes, property_of
from orbitmq.client.errors import BadRequest, ConsumerNotOnline, MessageNotFound
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, NotSupported
from orbitmq.message.ids import decode_offset_id
from orbitmq.message.record import MessageIdInvalid
from orbitmq.message.stored import decode_message
from orbitmq.remoting.settings import Address, RemotingError
from orbitmq.wire.bodies import (
    Connection,
    ConsumeDirectlyResult,
    ConsumerConnection,
    ConsumerRunningInfo,
    ProducerConnection,
    ProducerTable,
    SubscriptionData,
)
from orbitmq.wire.codes import RequestCode, ResponseCode, release_of
from orbitmq.wire.headers import (
    ConsumeDirectlyRequest,
    GetConsumerConnectionRequest,
    GetConsumerRunningInfoRequest,
    GetProducerConnectionRequest,
    ViewMessageRequest,
)
from orbitmq.wire.javajson import decode_body

#: A broker waits 10 s for a consumer's answer.
RELAY_TIMEOUT = 12.0

_CONSUME_TYPES = {
    "CONSUME_ACTIVELY": "pull",
    "CONSUME_PASSIVELY": "push",
    "CONSUME_POP": "pop",
}


@explained()
class AsyncConsumers:
    """Reads the state of clients."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking

    async def members(self, group: str) -> Members:
        """The members of a group. Raises `ConsumerNotOnline`."""
        found, _ = await self.look(group)
        if found is None:
            raise ConsumerNotOnline(group)
        return found

    async def look(
        self, group: str, topology: Topology | None = None
    ) -> tuple[Members | None, tuple[str, ...]]:
        """The members (None when none is online), and the findings of brokers."""
        nodes = (topology or await self._asking.topology()).readers()

        async def ask(node: BrokerNode) -> tuple[ConsumerConnection, str] | None:
            return await self._connections(node, group)

        outcomes = await self._asking.each(nodes, ask)
        answers = [found for found in outcomes.done.values() if found is not None]
        if not answers:
            if outcomes.failed:
                outcomes.check(f"asking for the members of {group!r}")
            return None, ()
        members = _members(group, [body for body, _ in answers], unreachable(outcomes))
        return members, tuple(text for _, text in answers if text)

    async def _connections(
        self, node: BrokerNode, group: str
    ) -> tuple[ConsumerConnection, str] | None:
        answer = await self._asking.find(
            node.address,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GetConsumerConnectionRequest(consumer_group=group),
            absent=ResponseCode.CONSUMER_NOT_ONLINE,
        )
        if answer is None:
            return None
        body = decode_body(ConsumerConnection, answer.body or b"{}")
        return body, answer.ext_fields.get("findings", "")

    async def producers(self, group: str | None = None) -> Listing[tuple[str, ClientConnection]]:
        """Connected producers by group: of all groups, or of one.

        Brokers before 5.0 support one group only: `NotSupported`.
        """

        async def ask(node: BrokerNode) -> Iterable[tuple[str, ClientConnection]]:
            if group is None:
                return await self._all_producers(node)
            return await self._producers(node, group)

        outcomes = await self._asking.of_readers(ask)
        found = {each for part in outcomes.done.values() for each in part}
        missing = [e for e in outcomes.failed.values() if isinstance(e, NotSupported)]
        if missing:
            raise missing[0]
        return Listing(tuple(sorted(found)), unreachable(outcomes))

    async def _all_producers(self, node: BrokerNode) -> Iterable[tuple[str, ClientConnection]]:
        code = RequestCode.GET_ALL_PRODUCER_INFO
        try:
            table = await self._asking.ask_body(ProducerTable, node.address, code)
        except BrokerRefused as refused:
            if refused.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            raise NotSupported(
                f"{node} cannot list all producers; name a producer group"
            ) from refused
        return {
            (group, _client(each.client_id, each.remote_ip, each.language, each.version))
            for group, producers in table.data.items()
            for each in producers
        }

    async def _producers(
        self, node: BrokerNode, group: str
    ) -> Iterable[tuple[str, ClientConnection]]:
        body = await self._asking.find_body(
            ProducerConnection,
            node.address,
            RequestCode.GET_PRODUCER_CONNECTION_LIST,
            GetProducerConnectionRequest(producer_group=group),
            absent=ResponseCode.SYSTEM_ERROR,
        )
        return {(group, _connection(each)) for each in body.connection_set} if body else ()

    async def running_info(self, group: str, client_id: str, *, stack: bool = False) -> RunningInfo:
        """The state of a consumer; with `stack` also the stacks of its threads.

        Raises `ConsumerNotOnline` when it is not connected or does not answer.
        """
        nodes = (await self._asking.topology()).readers()
        return await self.running_info_of(nodes, group, client_id, stack=stack)

    async def running_info_of(
        self, nodes: Iterable[BrokerNode], group: str, client_id: str, *, stack: bool = False
    ) -> RunningInfo:
        """The state of a consumer, through the first of these brokers that can reach it."""
        header = GetConsumerRunningInfoRequest(
            consumer_group=group, client_id=client_id, jstack_enable=stack
        )
        reason = "no broker knows it"
        for node in nodes:
            try:
                body = await self._asking.ask_body(
                    ConsumerRunningInfo,
                    node.address,
                    RequestCode.GET_CONSUMER_RUNNING_INFO,
                    header,
                    timeout=RELAY_TIMEOUT,
                )
            except BrokerRefused as refused:
                reason = refused.remark or refused.name
                if refused.code == ResponseCode.CONSUME_MSG_TIMEOUT:
                    break
                continue
            except RemotingError as error:
                # Another broker may have a connection to it.
                reason = str(error)
                continue
            return _running_info(group, client_id, body)
        raise ConsumerNotOnline(group, client_id, reason)

    async def consume_directly(self, group: str, client_id: str, offset_id: str) -> DirectResult:
        """Make a consumer handle one stored message now, without effect on progress.

        `offset_id` is `message.offset_id`.
        """
        topology = await self._asking.topology()
        message, node = await stored_at(self._asking, topology, offset_id)
        header = ConsumeDirectlyRequest(
            consumer_group=group,
            client_id=client_id,
            msg_id=offset_id,
            message_broker=node.broker,
            # Required by Apache's broker.
            topic=message.queue.topic,
        )
        try:
            body = await self._asking.ask_body(
                ConsumeDirectlyResult,
                node.address,
                RequestCode.CONSUME_MESSAGE_DIRECTLY,
                header,
                timeout=RELAY_TIMEOUT,
            )
        except BrokerRefused as refused:
            raise ConsumerNotOnline(group, client_id, refused.remark) from refused
        result = "" if body.consume_result is None else body.consume_result.value
        return DirectResult(
            result.removeprefix("CR_").lower(),
            body.remark,
            body.spent_time_mills / 1000,
            body.order,
        )


async def stored_at(
    asking: AdminRequests, topology: Topology, offset_id: str
) -> tuple[ReceivedMessage, BrokerNode]:
    """The message at an offset id, and its broker. Raises `MessageNotFound` or `BadRequest`."""
    try:
        place = decode_offset_id(offset_id)
    except MessageIdInvalid as error:
        raise BadRequest(str(error)) from error
    # Connect only to brokers of the cluster: an id is untrusted text.
    node = topology.at(Address(place.address, place.port))
    if node is None:
        raise MessageNotFound(
            offset_id,
            f"it would lie at {place.address}:{place.port}, where no broker of this cluster is; a "
            "unique id, such as SendResult.msg_id, is found with its topic only: "
            "get(id, topic=...)",
        )
    header = ViewMessageRequest(offset=place.offset)
    try:
        answer = await asking.ask(node.address, RequestCode.VIEW_MESSAGE_BY_ID, header)
    except BrokerRefused as refused:
        raise MessageNotFound(offset_id, refused.remark) from refused
    stored = decode_message(answer.body)
    return ReceivedMessage(stored, Queue(stored.topic, node.broker, stored.queue_id)), node


def _members(
    group: str, answers: list[ConsumerConnection], missing: tuple[Unreachable, ...]
) -> Members:
    """Merge the answers of several brokers."""
    clients: dict[tuple[str, str], ClientConnection] = {}
    subscriptions: dict[str, GroupSubscription] = {}
    for answer in answers:
        here = [_connection(each) for each in answer.connection_set]
        for client in here:
            # Each broker sees a client with another port; two at one broker are two clients.
            same = sum(other.client_id == client.client_id for other in here)
            key = (client.client_id, client.address if same > 1 else "")
            clients.setdefault(key, client)
        for data in answer.subscription_table.values():
            subscriptions.setdefault(data.topic, _subscription(data))
    first = answers[0]
    return Members(
        group,
        tuple(sorted(clients.values())),
        _CONSUME_TYPES.get(first.consume_type or "", ""),
        (first.message_model or "").lower(),
        (first.consume_from_where or "").removeprefix("CONSUME_FROM_").lower(),
        tuple(sorted(subscriptions.values(), key=lambda each: each.topic)),
        missing,
    )


def _connection(connection: Connection) -> ClientConnection:
    return _client(
        connection.client_id, connection.client_addr, connection.language, connection.version
    )


def _client(
    client_id: str | None, address: str | None, language: str | None, version: int
) -> ClientConnection:
    release = release_of(version)
    return ClientConnection(
        client_id or "",
        (address or "").removeprefix("/"),
        str(language or "").lower(),
        str(version) if release is None else str(release),
    )


def _subscription(data: SubscriptionData) -> GroupSubscription:
    return GroupSubscription(data.topic, data.sub_string or "*", data.expression_type or "TAG")


def _running_info(group: str, client_id: str, body: ConsumerRunningInfo) -> RunningInfo:
    queues = (
        OwnedQueueInfo(
            queue=queue_of(key),
            commit_offset=info.commit_offset,
            cached_messages=info.cached_msg_count,
            cached_mib=info.cached_msg_size_in_mib,
            cached_min_offset=info.cached_msg_min_offset,
            cached_max_offset=info.cached_msg_max_offset,
            is_locked=info.locked,
            is_dropped=info.is_dropped,
            last_pull_at=_time(info.last_pull_timestamp),
            last_consume_at=_time(info.last_consume_timestamp),
            last_lock_at=_time(info.last_lock_timestamp),
        )
        for key, info in body.mq_table.items()
    )
    return RunningInfo(
        group,
        client_id,
        tuple(sorted(queues, key=lambda each: each.queue)),
        tuple(map(_subscription, body.subscription_set)),
        _consumption(body),
        dict(body.properties),
        body.jstack,
    )


def _consumption(body: ConsumerRunningInfo) -> Mapping[str, TopicConsumption]:
    return {
        topic: TopicConsumption(
            pull_rate=status.pull_tps,
            pull_time=status.pull_rt / 1000,
            ok_rate=status.consume_ok_tps,
            failed_rate=status.consume_failed_tps,
            consume_time=status.consume_rt / 1000,
            failed_last_hour=status.consume_failed_msgs,
            consume_times=CallTimes.from_text(body.user_consumer_info.get(property_of(topic), "")),
        )
        for topic, status in body.status_table.items()
    }


def _time(millis: int) -> float | None:
    return millis / 1000 if millis > 0 else None


@dataclass(frozen=True, slots=True, order=True)
class ClientConnection:
    """A connected client."""

    client_id: str
    #: As seen by the broker.
    address: str
    language: str
    version: str


@dataclass(frozen=True, slots=True)
class GroupSubscription:
    """A subscription of a group."""

    topic: str
    expression: str
    #: `TAG` or `SQL92`.
    expression_type: str


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a group and their subscriptions."""

    group: str
    #: Each member once, however many brokers it is connected to.
    clients: tuple[ClientConnection, ...]
    #: `push`, `pull` or `pop`; empty when unknown.
    consume_type: str
    #: `clustering` or `broadcasting`.
    model: str
    consume_from: str
    subscriptions: tuple[GroupSubscription, ...]
    unreachable: tuple[Unreachable, ...] = ()

    @property
    def client_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.client_id for each in self.clients))


class FindingKind(enum.StrEnum):
    """The kinds of problems inside a group."""

    DIFFERENT_SUBSCRIPTIONS = "different subscriptions"
    DUPLICATE_CLIENT = "duplicate client"
    UNOWNED_QUEUE = "unowned queue"
    STALLED_QUEUE = "stalled queue"


@dataclass(frozen=True, slots=True)
class Variant:
    """The subscription of some members; without an expression they do not subscribe."""

    clients: tuple[str, ...]
    expression: str | None = None
    expression_type: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem inside a group."""

    kind: FindingKind
    group: str
    #: The problem and the remedy.
    text: str
    topic: str | None = None
    variants: tuple[Variant, ...] = ()
    client_id: str | None = None
    addresses: tuple[str, ...] = ()
    queue: Queue | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedQueueInfo(OfQueue):
    """A queue that a consumer owns. Times are epoch seconds, None for never."""

    queue: Queue
    commit_offset: int
    cached_messages: int
    cached_mib: int
    cached_min_offset: int
    cached_max_offset: int
    is_locked: bool
    is_dropped: bool
    last_pull_at: float | None
    last_consume_at: float | None
    last_lock_at: float | None


@dataclass(frozen=True, slots=True)
class TopicConsumption:
    """How fast a consumer consumes a topic; rates per second, mean durations in seconds."""

    pull_rate: float
    pull_time: float
    ok_rate: float
    failed_rate: float
    consume_time: float
    failed_last_hour: int
    #: Handler durations of the last minute. None: no calls, or not reported, as by other clients.
    consume_times: CallTimes | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """The state of a consumer, as it reports it."""

    group: str
    client_id: str
    queues: tuple[OwnedQueueInfo, ...]
    subscriptions: tuple[GroupSubscription, ...]
    topics: Mapping[str, TopicConsumption] = field(hash=False)
    #: Its settings, as it names them.
    properties: Mapping[str, str] = field(hash=False)
    #: The stacks of its threads, if requested.
    stack: str | None = None

    @property
    def cached_messages(self) -> int:
        return sum(each.cached_messages for each in self.queues)

    @property
    def is_orderly(self) -> bool:
        return self.properties.get("PROP_CONSUMEORDERLY", "").lower() == "true"


@dataclass(frozen=True, slots=True)
class DirectResult:
    """The result of `consume_directly`."""

    #: `success`, `later`, `rollback`, `commit`, `throw_exception` or `return_null`.
    result: str
    remark: str | None
    seconds: float
    is_orderly: bool

    @property
    def is_success(self) -> bool:
        return self.result in ("success", "commit")
