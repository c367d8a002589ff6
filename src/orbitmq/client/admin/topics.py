"""Administration of topics: lists, creates, changes and deletes them, shows queues and rates.

A change returns when clients can see it: brokers are read back, and the name servers' routes are
awaited.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from orbitmq.arguments import explained
from orbitmq.client.admin.config import ORDER_NAMESPACE, AsyncConfig
from orbitmq.client.admin.requests import (
    AdminRequests,
    BrokerNode,
    Failed,
    Listing,
    OfQueue,
    Topology,
    Unreachable,
    unreachable,
)
from orbitmq.client.errors import BadRequest, NotEffective, TopicExists, TopicNotFound
from orbitmq.client.routes import Queue, similar_topic
from orbitmq.names import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
    TOOLS_GROUP,
    check_topic,
    is_system_topic,
)
from orbitmq.parsing import whole
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import (
    BrokerStatsData,
    ConsumeTimeSpans,
    GroupList,
    MessageQueue,
    TopicConfig,
    TopicConfigDetail,
    TopicConfigTable,
    TopicFilterType,
    TopicList,
    TopicRouteData,
    TopicStats,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    CreateTopicRequest,
    DeleteTopicInNamesrvRequest,
    GetRouteInfoRequest,
    QueryConsumeTimeSpanRequest,
    TopicRequest,
    ViewBrokerStatsRequest,
)
from orbitmq.wire.javajson import decode_body

_ANSWERS = frozenset(
    {
        int(ResponseCode.SUCCESS),
        int(ResponseCode.TOPIC_NOT_EXIST),
        int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
    }
)


_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})


def queue_of(queue: MessageQueue) -> Queue:
    """The queue of a wire record."""
    return Queue(queue.topic, queue.broker_name, queue.queue_id)


class TopicQueries:
    """Reads bounds and rates of topics, in a fixed number of requests per broker."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking

    async def status(self, topic: str) -> TopicStatus:
        """The bounds and times of each queue."""

        async def ask(node: BrokerNode) -> tuple[TopicStats, ConsumeTimeSpans] | None:
            stats = await self.stats(node, topic)
            return None if stats is None else (stats, await self._spans(node, topic))

        outcomes = await self._asking.of_readers(ask)
        queues: list[QueueStatus] = []
        rate = 0.0
        for found in outcomes.done.values():
            if found is None:
                continue
            stats, spans = found
            first = {
                queue_of(span.message_queue): span.min_time_stamp / 1000
                for span in spans.consume_time_span_set
                if span.message_queue is not None and span.min_time_stamp > 0
            }
            rate += stats.topic_put_tps
            for key, bounds in stats.offset_table.items():
                queue = queue_of(key)
                is_empty = bounds.max_offset <= bounds.min_offset
                last = bounds.last_update_timestamp
                queues.append(
                    QueueStatus(
                        queue,
                        bounds.min_offset,
                        max(bounds.min_offset, bounds.max_offset),
                        None if is_empty else first.get(queue),
                        last / 1000 if last > 0 and not is_empty else None,
                    )
                )
        if not queues and not outcomes.failed:
            raise await not_found(self._asking, topic)
        queues.sort(key=lambda each: each.queue)
        return TopicStatus(topic, tuple(queues), rate, unreachable(outcomes))

    async def stats(self, node: BrokerNode, topic: str) -> TopicStats | None:
        """The bounds of a topic's queues on one broker; None without the topic."""
        return await self._asking.find_body(
            TopicStats,
            node.address,
            RequestCode.GET_TOPIC_STATS_INFO,
            TopicRequest(topic=topic),
            absent=ResponseCode.TOPIC_NOT_EXIST,
        )

    async def bounds(self, topology: Topology, topic: str) -> dict[Queue, tuple[int, int]]:
        """The first and the next offset of every queue. Raises `TopicNotFound`."""
        outcomes = await self._asking.each(topology.readers(), lambda node: self.stats(node, topic))
        found = {
            queue_of(key): (bounds.min_offset, max(bounds.min_offset, bounds.max_offset))
            for stats in outcomes.check(f"reading the bounds of topic {topic!r}").values()
            if stats is not None
            for key, bounds in stats.offset_table.items()
        }
        if not found:
            raise await not_found(self._asking, topic)
        return dict(sorted(found.items()))

    async def groups(self, topology: Topology, topic: str) -> tuple[str, ...]:
        """The groups with members online or with progress in a topic."""
        code, header = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequest(topic=topic)
        outcomes = await self._asking.each(
            topology.readers(),
            lambda node: self._asking.ask_body(GroupList, node.address, code, header),
        )
        done = outcomes.check(f"asking for the groups of topic {topic!r}")
        return tuple(sorted({group for answer in done.values() for group in answer.group_list}))

    async def _spans(self, node: BrokerNode, topic: str) -> ConsumeTimeSpans:
        # A query for a group; the times of the queue's messages are the same for all.
        header = QueryConsumeTimeSpanRequest(topic=topic, group=TOOLS_GROUP)
        code = RequestCode.QUERY_CONSUME_TIME_SPAN
        return await self._asking.ask_body(ConsumeTimeSpans, node.address, code, header)

    async def rates(self, topic: str, groups: Sequence[str]) -> TopicRates:
        """The rates of sending, and of pulling by these groups."""

        async def ask(node: BrokerNode) -> tuple[Rate, dict[str, Rate]]:
            incoming = await self._rate(node, "TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE", topic)
            outgoing = await self._asking.all(
                self._rate(node, "GROUP_GET_NUMS", "GROUP_GET_SIZE", f"{topic}@{group}")
                for group in groups
            )
            return incoming, dict(zip(groups, outgoing, strict=True))

        outcomes = await self._asking.of_readers(ask)
        incoming = Rate()
        outgoing = dict.fromkeys(groups, Rate())
        for came, went in outcomes.done.values():
            incoming += came
            for group, rate in went.items():
                outgoing[group] += rate
        return TopicRates(topic, incoming, outgoing, unreachable(outcomes))

    async def _rate(self, node: BrokerNode, numbers: str, sizes: str, key: str) -> Rate:
        counts, amounts = await self._asking.all(
            (self._statistic(node, numbers, key), self._statistic(node, sizes, key))
        )
        return Rate(counts.stats_minute.tps, amounts.stats_minute.tps, counts.stats_day.sum)

    async def _statistic(self, node: BrokerNode, name: str, key: str) -> BrokerStatsData:
        header = ViewBrokerStatsRequest(stats_name=name, stats_key=key)
        code = RequestCode.VIEW_BROKER_STATS_DATA
        # Brokers have no rate without a message.
        absent = ResponseCode.SYSTEM_ERROR
        found = await self._asking.find_body(
            BrokerStatsData, node.address, code, header, absent=absent
        )
        return found or BrokerStatsData()


_LETTERS = {"r": 4, "w": 2}


class Permission(enum.IntFlag):
    """What may be done with a topic's queues."""

    NONE = 0
    INHERIT = 1
    WRITE = 2
    READ = 4
    READ_WRITE = 6

    @property
    def letters(self) -> str:
        """`rw`, `r`, `w`, or `-` for neither."""
        text = "".join(letter for letter, bit in _LETTERS.items() if self & bit)
        return text or "-"

    @classmethod
    def of(cls, value: Permission | int | str) -> Permission:
        """The permission of `rw`, `r`, `w`, `-` or its number."""
        if isinstance(value, str) and not value.isdecimal():
            letters = value.lower()
            if letters == "-" or (letters and set(letters) <= _LETTERS.keys()):
                return cls(sum(_LETTERS[each] for each in set(letters) if each in _LETTERS))
        elif not isinstance(value, bool) and 0 <= int(value) <= 7:
            return cls(int(value))
        raise BadRequest(f"a permission must be rw, r, w, - or a number from 0 to 7, got {value!r}")


class TopicKind(enum.StrEnum):
    """The purpose of a topic."""

    NORMAL = "normal"
    FIFO = "fifo"
    DELAY = "delay"
    TRANSACTION = "transaction"
    MIXED = "mixed"
    RETRY = "retry"
    DEAD_LETTER = "dlq"
    SYSTEM = "system"


#: Kinds that are created automatically; lists omit them by default.
NOT_LISTED = frozenset({TopicKind.SYSTEM, TopicKind.RETRY, TopicKind.DEAD_LETTER})

_BY_MESSAGE_TYPE: Mapping[str, TopicKind] = {
    kind.value.upper(): kind
    for kind in (
        TopicKind.NORMAL,
        TopicKind.FIFO,
        TopicKind.DELAY,
        TopicKind.TRANSACTION,
        TopicKind.MIXED,
    )
}
MESSAGE_TYPES = tuple(_BY_MESSAGE_TYPE)
#: The attribute for the message type of a topic.
MESSAGE_TYPE = "message.type"


def kind_of(topic: str, attributes: Mapping[str, str], system: frozenset[str]) -> TopicKind:
    """The kind of a topic; `system` has the system topics of brokers."""
    if topic.startswith(RETRY_PREFIX):
        return TopicKind.RETRY
    if topic.startswith(DEAD_LETTER_PREFIX):
        return TopicKind.DEAD_LETTER
    if topic in system or is_system_topic(topic):
        return TopicKind.SYSTEM
    return _BY_MESSAGE_TYPE.get(attributes.get(MESSAGE_TYPE, ""), TopicKind.NORMAL)


@dataclass(frozen=True, slots=True)
class TopicOnBroker:
    """The settings of a topic on one broker."""

    broker: str
    write_queues: int
    read_queues: int
    permission: Permission
    is_ordered: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic on all brokers that have it."""

    name: str
    kind: TopicKind
    brokers: tuple[TopicOnBroker, ...]

    @property
    def write_queues(self) -> int:
        """On all brokers."""
        return sum(each.write_queues for each in self.brokers)

    @property
    def read_queues(self) -> int:
        return sum(each.read_queues for each in self.brokers)

    @property
    def permission(self) -> Permission:
        """What at least one broker permits."""
        together = Permission.NONE
        for each in self.brokers:
            together |= each.permission
        return together

    @property
    def is_ordered(self) -> bool:
        return any(each.is_ordered for each in self.brokers)

    @property
    def is_uniform(self) -> bool:
        """Whether all brokers have the same settings."""
        configs = {
            (each.write_queues, each.read_queues, each.permission, each.is_ordered)
            for each in self.brokers
        }
        return len(configs) <= 1


@dataclass(frozen=True, slots=True)
class QueueStatus(OfQueue):
    """The bounds and times of a queue; None when it is empty."""

    queue: Queue
    min_offset: int
    max_offset: int
    first_stored_at: float | None
    last_stored_at: float | None

    @property
    def messages(self) -> int:
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """The bounds and times of all queues, and the rate."""

    topic: str
    queues: tuple[QueueStatus, ...]
    #: Stored messages per second.
    in_rate: float
    unreachable: tuple[Unreachable, ...] = ()

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.queues)

    @property
    def first_stored_at(self) -> float | None:
        return min(filter(None, (each.first_stored_at for each in self.queues)), default=None)

    @property
    def last_stored_at(self) -> float | None:
        return max(filter(None, (each.last_stored_at for each in self.queues)), default=None)


@dataclass(frozen=True, slots=True)
class RouteBroker:
    """A broker in a route: its addresses, queues and permission."""

    broker: str
    cluster: str
    #: Addresses by broker id; 0 is the master.
    addresses: Mapping[int, str] = field(hash=False)
    write_queues: int
    read_queues: int
    permission: Permission


@dataclass(frozen=True, slots=True)
class Route:
    """Where clients find a topic."""

    topic: str
    brokers: tuple[RouteBroker, ...]
    #: `broker-a:4;broker-b:4` for an ordered topic.
    order_config: str | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """Messages and bytes per second over the last minute, and messages today."""

    messages: float = 0.0
    bytes: float = 0.0
    messages_today: int = 0

    def __add__(self, other: Rate) -> Rate:
        return Rate(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.messages_today + other.messages_today,
        )


@dataclass(frozen=True, slots=True)
class TopicRates:
    """The rates of sending to a topic, and of pulling by group."""

    topic: str
    incoming: Rate
    outgoing: Mapping[str, Rate] = field(hash=False)
    unreachable: tuple[Unreachable, ...] = ()


#: The default number of queues on each broker.
DEFAULT_QUEUES = 8
#: The maximum number of queues on a broker.
MOST_QUEUES = 65_536


#: The time limit for name servers to show a change.
VISIBLE_WITHIN = 10.0
_LOOK_AGAIN = 0.05


@explained()
class AsyncTopics:
    """Administration of topics."""

    def __init__(self, asking: AdminRequests, config: AsyncConfig) -> None:
        self._asking = asking
        self._config = config
        self._insight = TopicQueries(asking)

    async def list(self, *, kinds: Collection[TopicKind] | None = None) -> Listing[Topic]:
        """All topics by name, or those of some kinds, in two requests per broker."""
        outcomes = await self._asking.of_readers(self._all)
        found: dict[str, list[TopicOnBroker]] = {}
        system: set[str] = set()
        for node, (configs, own) in outcomes.done.items():
            system |= own
            for config in configs:
                found.setdefault(config.topic_name, []).append(_on_broker(node.broker, config))
        topics = (_topic(name, parts, frozenset(system)) for name, parts in sorted(found.items()))
        return Listing(
            tuple(topic for topic in topics if kinds is None or topic.kind in kinds),
            unreachable(outcomes),
        )

    async def get(self, topic: str) -> Topic:
        """One topic. Raises `TopicNotFound`."""
        nodes = (await self._asking.topology()).readers()
        present = await self._on_brokers(nodes, topic)
        if not present:
            raise await not_found(self._asking, topic)
        return _on_all_brokers(topic, present)

    async def route(self, topic: str) -> Route:
        """Where clients find a topic. Raises `TopicNotFound`."""
        data = await self._route(topic)
        if data is None:
            raise await not_found(self._asking, topic)
        return route_of(topic, data)

    async def groups(self, topic: str) -> tuple[str, ...]:
        """The groups with members online or with progress in a topic."""
        await self.get(topic)
        return await self._insight.groups(await self._asking.topology(), topic)

    async def status(self, topic: str) -> TopicStatus:
        """The bounds and times of a topic's queues. Raises `TopicNotFound`."""
        return await self._insight.status(topic)

    async def rates(self, topic: str) -> TopicRates:
        """The rates of sending and pulling over the last minute. Raises `TopicNotFound`."""
        return await self._insight.rates(topic, await self.groups(topic))

    async def create(
        self,
        topic: str,
        *,
        queues: int = DEFAULT_QUEUES,
        write_queues: int | None = None,
        read_queues: int | None = None,
        permission: Permission | int | str = Permission.READ_WRITE,
        ordered: bool = False,
        message_type: str | None = None,
        brokers: Collection[str] | None = None,
        cluster: str | None = None,
        exist_ok: bool = False,
    ) -> Topic:
        """Create a topic on all masters, the named ones or those of a cluster.

        Returns when clients can see it. `queues` is the number on each broker. Raises `TopicExists`
        when one of these brokers has the topic; with `exist_ok` only if its settings differ. Then
        the others get it, so that a call that succeeded partly can be repeated.
        """
        _check_name(topic)
        config = TopicConfig(
            topic_name=topic,
            write_queue_nums=_count(
                "write_queues", queues if write_queues is None else write_queues
            ),
            read_queue_nums=_count("read_queues", queues if read_queues is None else read_queues),
            perm=int(Permission.of(permission)),
            order=ordered,
            attributes=_type_change(message_type),
        )
        masters = (await self._asking.topology()).masters(brokers, cluster=cluster)
        found = await self._on_brokers(masters, topic)
        if found and not (exist_ok and all(_is_like(each, config) for each in found.values())):
            shown = "; ".join(f"{node.broker}: {_shown(each)}" for node, each in found.items())
            raise TopicExists(topic, shown)
        return await self._apply(topic, dict.fromkeys(masters, config))

    async def update(
        self,
        topic: str,
        *,
        queues: int | None = None,
        write_queues: int | None = None,
        read_queues: int | None = None,
        permission: Permission | int | str | None = None,
        ordered: bool | None = None,
        brokers: Collection[str] | None = None,
    ) -> Topic:
        """Change the given settings on all or some brokers that have the topic.

        Reducing `read_queues` hides unconsumed messages from consumers and from the lag. To remove
        queues without losing messages, reduce `write_queues` first, and `read_queues` when
        `groups.progress` shows that they have been consumed. Raises `TopicNotFound`.
        """
        _check_name(topic)
        masters = (await self._asking.topology()).masters(brokers)
        present = await self._on_brokers(masters, topic)
        if not present:
            raise await not_found(self._asking, topic)
        write_queues = queues if write_queues is None else write_queues
        read_queues = queues if read_queues is None else read_queues
        wanted = {
            node: TopicConfig(
                topic_name=topic,
                write_queue_nums=_count("write_queues", write_queues, before.write_queue_nums),
                read_queue_nums=_count("read_queues", read_queues, before.read_queue_nums),
                perm=before.perm if permission is None else int(Permission.of(permission)),
                order=before.order if ordered is None else ordered,
                topic_sys_flag=before.topic_sys_flag,
                topic_filter_type=before.topic_filter_type,
            )
            for node, before in present.items()
        }
        if ordered is False:
            # First, because brokers restore the order from name servers that still have it.
            await self._give_up_order(topic, wanted)
        return await self._apply(topic, wanted)

    async def _apply(self, topic: str, wanted: Mapping[BrokerNode, TopicConfig]) -> Topic:
        async def configure(node: BrokerNode) -> None:
            await self._asking.ask(
                node.address, RequestCode.UPDATE_AND_CREATE_TOPIC, _create_header(wanted[node])
            )

        (await self._asking.each(wanted, configure)).check(f"configuring topic {topic!r}")
        if any(config.order for config in wanted.values()):
            await self._keep_order(topic, wanted)
        after = await self._on_brokers(tuple(wanted), topic)
        problems = [
            f"{node} shows {_shown(after.get(node))} and not {_shown(config)}"
            for node, config in wanted.items()
            if _shown(after.get(node)) != _shown(config)
        ]
        if problems:
            raise NotEffective(f"configuring topic {topic!r}", problems)
        await self._until_routed(topic, wanted)
        return _on_all_brokers(topic, after)

    async def _keep_order(self, topic: str, wanted: Mapping[BrokerNode, TopicConfig]) -> None:
        """Store an ordered topic's queues at the name servers, in case a broker is down."""
        queues = await self._ordered_queues(topic)
        for node, config in wanted.items():
            queues[node.broker] = str(config.write_queue_nums)
        await self._put_order(topic, queues)

    async def _give_up_order(self, topic: str, brokers: Iterable[BrokerNode]) -> None:
        """Remove the queues of these brokers from the order at the name servers."""
        queues = await self._ordered_queues(topic)
        if not queues:
            return
        gone = {node.broker for node in brokers}
        left = {broker: count for broker, count in queues.items() if broker not in gone}
        if left:
            await self._put_order(topic, left)
        else:
            await self._config.delete_value(ORDER_NAMESPACE, topic)

    async def _ordered_queues(self, topic: str) -> dict[str, str]:
        text = await self._config.value(ORDER_NAMESPACE, topic) or ""
        return dict(part.split(":", 1) for part in text.split(";") if part.count(":") == 1)

    async def _put_order(self, topic: str, queues: Mapping[str, str]) -> None:
        text = ";".join(f"{broker}:{count}" for broker, count in sorted(queues.items()))
        await self._config.put_value(ORDER_NAMESPACE, topic, text)

    async def _until_routed(self, topic: str, wanted: Mapping[BrokerNode, TopicConfig]) -> None:
        limits = (await self._asking.each(wanted, self._broker_permission)).done

        def problem(data: TopicRouteData | None) -> str | None:
            shown = {} if data is None else {each.broker_name: each for each in data.queue_datas}
            for node, config in wanted.items():
                found = shown.get(node.broker)
                if found is None:
                    return f"the route does not have {node.broker}"
                # A read-only broker shows none of its topics as writable.
                permission = config.perm & limits.get(node, int(Permission.READ_WRITE))
                expected = (config.write_queue_nums, config.read_queue_nums, permission)
                if (found.write_queue_nums, found.read_queue_nums, found.perm & 6) != expected:
                    return (
                        f"the route says that {node.broker} has {found.write_queue_nums} queues "
                        f"to write and {found.read_queue_nums} to read, permission "
                        f"{Permission(found.perm & 6).letters}"
                    )
            return None

        await self._until_seen(f"configuring topic {topic!r}", topic, problem)

    async def _broker_permission(self, node: BrokerNode) -> int:
        config = await self._config.broker(str(node.address))
        text = config.get("brokerPermission", "")
        return int(text) & 6 if text.isdecimal() else int(Permission.READ_WRITE)

    async def delete(self, topic: str, *, cluster: str | None = None) -> None:
        """Delete a topic and the progress in it from brokers and name servers.

        Returns when clients no longer see it. Raises `TopicNotFound`.
        """
        _check_name(topic)
        topology = await self._asking.topology()
        masters = topology.masters(cluster=cluster)
        present = await self._on_brokers(masters, topic)
        if not present and await self._route(topic) is None:
            raise await not_found(self._asking, topic)

        code = RequestCode.DELETE_TOPIC_IN_BROKER
        await self._asking.change(
            f"deleting topic {topic!r}", masters, code, TopicRequest(topic=topic)
        )
        await self._forget_route(topic, cluster)
        left = await self._on_brokers(masters, topic)
        if left:
            names = ", ".join(map(str, left))
            raise NotEffective(f"deleting topic {topic!r}", [f"{names} has it again"])
        gone = {node.broker for node in masters}

        def problem(data: TopicRouteData | None) -> str | None:
            still = () if data is None else (q.broker_name for q in data.queue_datas)
            shown = sorted(gone.intersection(still))
            return f"the route still has {', '.join(shown)}" if shown else None

        await self._until_seen(f"deleting topic {topic!r}", topic, problem)

    async def _forget_route(self, topic: str, cluster: str | None) -> None:
        header = DeleteTopicInNamesrvRequest(topic=topic, cluster_name=cluster)

        code = RequestCode.DELETE_TOPIC_IN_NAMESRV
        servers = self._asking.name_servers
        await self._asking.change(f"deleting the route of {topic!r}", servers, code, header)
        if cluster is None and await self._config.value(ORDER_NAMESPACE, topic) is not None:
            await self._config.delete_value(ORDER_NAMESPACE, topic)

    async def _on_brokers(
        self, nodes: Sequence[BrokerNode], topic: str
    ) -> dict[BrokerNode, TopicConfig]:
        outcomes = await self._asking.each(nodes, lambda node: self._one(node, topic))
        done = outcomes.check(f"looking up topic {topic!r}")
        return {node: config for node, config in done.items() if config is not None}

    async def _all(self, node: BrokerNode) -> tuple[tuple[TopicConfig, ...], frozenset[str]]:
        """The topics of a broker, and its system topics."""
        code = RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        system = await self._asking.ask_body(TopicList, node.address, code)
        return await self._table(node), frozenset(system.topic_list)

    async def _one(self, node: BrokerNode, topic: str) -> TopicConfig | None:
        """One topic of a broker, or None."""
        answer = await self._asking.ask(
            node.address, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic=topic), accept=_ANSWERS
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            configs = await self._table(node)
            return next((each for each in configs if each.topic_name == topic), None)
        fields = msgspec.structs.asdict(decode_body(TopicConfigDetail, answer.body))
        fields.pop("topic_queue_mapping_detail")
        return TopicConfig(**fields)

    async def _table(self, node: BrokerNode) -> tuple[TopicConfig, ...]:
        table = await self._asking.ask_body(
            TopicConfigTable, node.address, RequestCode.GET_ALL_TOPIC_CONFIG
        )
        return tuple(table.topic_config_table.values())

    async def _route(self, topic: str, address: Address | None = None) -> TopicRouteData | None:
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        if address is None:
            answer = await self._asking.ask_name_server(code, header, accept=_FOUND_OR_NOT)
        else:
            answer = await self._asking.ask(address, code, header, accept=_FOUND_OR_NOT)
        if answer.code != ResponseCode.SUCCESS:
            return None
        return decode_body(TopicRouteData, answer.body or b"{}")

    async def _until_seen(
        self,
        what: str,
        topic: str,
        problem: Callable[[TopicRouteData | None], str | None],
    ) -> None:
        """Wait until every reachable name server returns a route without a problem."""
        deadline = self._asking.clock.monotonic() + VISIBLE_WITHIN
        for address in self._asking.name_servers:
            while True:
                try:
                    found = problem(await self._route(topic, address))
                except Failed:
                    # Unreachable: no client gets its route.
                    break
                if found is None:
                    break
                if self._asking.clock.monotonic() >= deadline:
                    raise NotEffective(what, [f"name server {address}: {found}"])
                await asyncio.sleep(_LOOK_AGAIN)


def _check_name(topic: str) -> None:
    check_topic(topic)
    if is_system_topic(topic):
        raise BadRequest(f"{topic!r} is a system topic and cannot be changed")


def _count(name: str, value: int | None, before: int = 0) -> int:
    if value is None:
        return before
    return whole(value, name, most=MOST_QUEUES)


def _type_change(message_type: str | None) -> dict[str, str]:
    if message_type is None:
        return {}
    if message_type.upper() not in MESSAGE_TYPES:
        raise BadRequest(f"message_type must be one of {', '.join(MESSAGE_TYPES)}")
    return {MESSAGE_TYPE: message_type.upper()}


def _create_header(config: TopicConfig) -> CreateTopicRequest:
    changes = ",".join(f"+{name}={value}" for name, value in config.attributes.items())
    return CreateTopicRequest(
        topic=config.topic_name,
        # Required by the header, ignored by brokers.
        default_topic="TBW102",
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=TopicFilterType(config.topic_filter_type).value,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
        attributes=changes or None,
    )


def _shown(config: TopicConfig | None) -> str:
    """The fields that are compared after a change."""
    if config is None:
        return "no such topic"
    return (
        f"{config.write_queue_nums} queues to write, {config.read_queue_nums} to read, "
        f"permission {Permission(config.perm).letters}"
    )


def _is_like(found: TopicConfig, wanted: TopicConfig) -> bool:
    """Whether an existing topic has the wanted settings."""
    return (
        _shown(found) == _shown(wanted)
        and found.order == wanted.order
        and wanted.attributes.items() <= found.attributes.items()
    )


def _on_broker(broker: str, config: TopicConfig) -> TopicOnBroker:
    return TopicOnBroker(
        broker,
        config.write_queue_nums,
        config.read_queue_nums,
        Permission(config.perm & 7),
        config.order,
        dict(config.attributes),
    )


def _topic(name: str, parts: Sequence[TopicOnBroker], system: frozenset[str]) -> Topic:
    attributes = {key: value for part in parts for key, value in part.attributes.items()}
    brokers = tuple(sorted(parts, key=lambda part: part.broker))
    return Topic(name, kind_of(name, attributes, system), brokers)


def _on_all_brokers(topic: str, present: Mapping[BrokerNode, TopicConfig]) -> Topic:
    parts = [_on_broker(node.broker, config) for node, config in present.items()]
    return _topic(topic, parts, frozenset())


def route_of(topic: str, data: TopicRouteData) -> Route:
    """The public form of a route."""
    brokers = {each.broker_name: each for each in data.broker_datas}
    return Route(
        topic,
        tuple(
            RouteBroker(
                queues.broker_name,
                brokers[queues.broker_name].cluster or "",
                dict(brokers[queues.broker_name].broker_addrs),
                queues.write_queue_nums,
                queues.read_queue_nums,
                Permission(queues.perm & 7),
            )
            for queues in sorted(data.queue_datas, key=lambda each: each.broker_name)
            if queues.broker_name in brokers
        ),
        data.order_topic_conf,
    )


async def not_found(asking: AdminRequests, topic: str) -> TopicNotFound:
    """The error for a missing topic, with the most similar name."""
    return TopicNotFound(topic, similar=await similar_topic(asking, topic))
