"""Topics: listed, made, changed, deleted and looked into.

A change is done when it can be seen: brokers are read back, and the name servers' routes are
waited for, because producers and consumers look there.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from orbitmq.client.admin.config import ORDER_NAMESPACE, AsyncConfig
from orbitmq.client.admin.requests import (
    Asking,
    BrokerNode,
    Directory,
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

# Configurations of topics as single brokers have them.
#
# Brokers of 4.9 cannot be asked for one topic: there the whole table is read.


_ANSWERS = frozenset(
    {
        int(ResponseCode.SUCCESS),
        int(ResponseCode.TOPIC_NOT_EXIST),
        int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
    }
)


class TopicConfigs:
    """Reads them."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def all(self, node: BrokerNode) -> tuple[tuple[TopicConfig, ...], frozenset[str]]:
        """The topics of a broker, and the names that it calls its own."""
        return await self._table(node), await self._own(node)

    async def one(self, node: BrokerNode, topic: str) -> TopicConfig | None:
        """One topic of a broker; None when it has no such topic."""
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
        table = await self._asking.told(
            TopicConfigTable, node.address, RequestCode.GET_ALL_TOPIC_CONFIG
        )
        return tuple(table.topic_config_table.values())

    async def _own(self, node: BrokerNode) -> frozenset[str]:
        names = await self._asking.told(
            TopicList, node.address, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        )
        return frozenset(names.topic_list)


# What is in topics and how fast it changes, with a fixed number of requests per broker.


_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})
#: Brokers know no rate of what nobody has sent or pulled yet.
_RATE_OR_NONE = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.SYSTEM_ERROR)})


def queue_of(queue: MessageQueue) -> Queue:
    """A queue as the wire names it."""
    return Queue(queue.topic, queue.broker_name, queue.queue_id)


class TopicInsight:
    """Looks into topics."""

    def __init__(self, asking: Asking, directory: Directory) -> None:
        self._asking = asking
        self._directory = directory

    async def status(self, topic: str) -> TopicStatus:
        """What is in each queue."""

        async def ask(node: BrokerNode) -> tuple[TopicStats, ConsumeTimeSpans] | None:
            stats = await self.stats(node, topic)
            return None if stats is None else (stats, await self._spans(node, topic))

        outcomes = await self._directory.of_readers(ask)
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
        """The bounds of a topic's queues on one broker; None when it does not have the topic."""
        answer = await self._asking.ask(
            node.address,
            RequestCode.GET_TOPIC_STATS_INFO,
            TopicRequest(topic=topic),
            accept=_FOUND_OR_NOT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        return decode_body(TopicStats, answer.body or b"{}")

    async def bounds(self, topology: Topology, topic: str) -> dict[Queue, tuple[int, int]]:
        """The first and the next offset of every queue. Raises `TopicNotFound`."""
        outcomes = await self._asking.each(topology.readers(), lambda node: self.stats(node, topic))
        found = {
            queue_of(key): (bounds.min_offset, max(bounds.min_offset, bounds.max_offset))
            for stats in outcomes.check(f"looking into topic {topic!r}").values()
            if stats is not None
            for key, bounds in stats.offset_table.items()
        }
        if not found:
            raise await not_found(self._asking, topic)
        return dict(sorted(found.items()))

    async def _spans(self, node: BrokerNode, topic: str) -> ConsumeTimeSpans:
        # Meant for a group; the times of the queue's own messages are in it whoever is named.
        header = QueryConsumeTimeSpanRequest(topic=topic, group=TOOLS_GROUP)
        code = RequestCode.QUERY_CONSUME_TIME_SPAN
        return await self._asking.told(ConsumeTimeSpans, node.address, code, header)

    async def rates(self, topic: str, groups: Sequence[str]) -> TopicRates:
        """How fast it is written, and read by these groups."""

        async def ask(node: BrokerNode) -> tuple[Rate, dict[str, Rate]]:
            incoming = await self._rate(node, "TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE", topic)
            outgoing = await self._asking.all(
                self._rate(node, "GROUP_GET_NUMS", "GROUP_GET_SIZE", f"{topic}@{group}")
                for group in groups
            )
            return incoming, dict(zip(groups, outgoing, strict=True))

        outcomes = await self._directory.of_readers(ask)
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
        answer = await self._asking.ask(
            node.address,
            RequestCode.VIEW_BROKER_STATS_DATA,
            ViewBrokerStatsRequest(stats_name=name, stats_key=key),
            accept=_RATE_OR_NONE,
        )
        if answer.code != ResponseCode.SUCCESS:
            return BrokerStatsData()
        return decode_body(BrokerStatsData, answer.body or b"{}")


# Topics as administration shows them.


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
        """A permission as people write it: `rw`, `r`, `w`, `-`, or its number."""
        if isinstance(value, str) and not value.isdecimal():
            letters = value.lower()
            if letters == "-" or (letters and set(letters) <= _LETTERS.keys()):
                return cls(sum(_LETTERS[each] for each in set(letters) if each in _LETTERS))
        elif not isinstance(value, bool) and 0 <= int(value) <= 7:
            return cls(int(value))
        raise BadRequest(f"a permission must be rw, r, w, - or a number from 0 to 7, got {value!r}")


class TopicKind(enum.StrEnum):
    """What a topic is for."""

    NORMAL = "normal"
    FIFO = "fifo"
    DELAY = "delay"
    TRANSACTION = "transaction"
    MIXED = "mixed"
    RETRY = "retry"
    DEAD_LETTER = "dlq"
    SYSTEM = "system"


#: Topics that nobody made by hand; lists for people leave them out unless asked for.
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
#: The attribute that says which messages a topic is meant for.
MESSAGE_TYPE = "message.type"


def kind_of(topic: str, attributes: Mapping[str, str], system: frozenset[str]) -> TopicKind:
    """What a topic is for; `system` has the names that brokers call their own."""
    if topic.startswith(RETRY_PREFIX):
        return TopicKind.RETRY
    if topic.startswith(DEAD_LETTER_PREFIX):
        return TopicKind.DEAD_LETTER
    if topic in system or is_system_topic(topic):
        return TopicKind.SYSTEM
    return _BY_MESSAGE_TYPE.get(attributes.get(MESSAGE_TYPE, ""), TopicKind.NORMAL)


@dataclass(frozen=True, slots=True)
class TopicOnBroker:
    """How a topic is configured on one broker."""

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
        """On all brokers together."""
        return sum(each.write_queues for each in self.brokers)

    @property
    def read_queues(self) -> int:
        return sum(each.read_queues for each in self.brokers)

    @property
    def permission(self) -> Permission:
        """What may be done with it on at least one broker."""
        together = Permission.NONE
        for each in self.brokers:
            together |= each.permission
        return together

    @property
    def is_ordered(self) -> bool:
        return any(each.is_ordered for each in self.brokers)

    @property
    def is_uniform(self) -> bool:
        """Whether all brokers have it configured alike."""
        configs = {
            (each.write_queues, each.read_queues, each.permission, each.is_ordered)
            for each in self.brokers
        }
        return len(configs) <= 1


@dataclass(frozen=True, slots=True)
class QueueStatus(OfQueue):
    """What is in a queue. Times are epoch seconds; None when there is no message."""

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
    """What is in a topic."""

    topic: str
    queues: tuple[QueueStatus, ...]
    #: Messages per second that come in.
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
    """A broker in a route: where it and its slaves are, and what producers and consumers get."""

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
    """Messages and bytes per second over the last minute, and how many there were today."""

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
    """How fast a topic is written, and read by whom."""

    topic: str
    incoming: Rate
    outgoing: Mapping[str, Rate] = field(hash=False)
    unreachable: tuple[Unreachable, ...] = ()


#: Queues that a topic gets on each broker, unless told otherwise.
DEFAULT_QUEUES = 8
#: And the most that a broker gives one.
MOST_QUEUES = 65_536


class AsyncTopics:
    """Administration of topics."""

    def __init__(self, asking: Asking, directory: Directory, config: AsyncConfig) -> None:
        self._asking = asking
        self._directory = directory
        self._config = config
        self._configs = TopicConfigs(asking)
        self._routes = TopicRoutes(asking)
        self._insight = TopicInsight(asking, directory)

    # Listing.

    async def list(self, *, kinds: Collection[TopicKind] | None = None) -> Listing[Topic]:
        """All topics by name, or those of some kinds. Two requests per broker, however many."""
        outcomes = await self._directory.of_readers(self._configs.all)
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
        nodes = (await self._directory.look()).readers()
        found = await self._found(nodes, topic)
        if not found:
            raise await not_found(self._asking, topic)
        return _topic(topic, found, frozenset())

    async def route(self, topic: str) -> Route:
        """Where clients find a topic. Raises `TopicNotFound`."""
        data = await self._routes.look(topic)
        if data is None:
            raise await not_found(self._asking, topic)
        return route_of(topic, data)

    async def groups(self, topic: str) -> tuple[str, ...]:
        """The groups that consume a topic now, and those that have progress in it."""
        await self.get(topic)

        async def ask(node: BrokerNode) -> GroupList:
            code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
            return await self._asking.told(GroupList, node.address, code, TopicRequest(topic=topic))

        outcomes = await self._directory.of_readers(ask)
        done = outcomes.check(f"asking who consumes {topic!r}")
        return tuple(sorted({group for answer in done.values() for group in answer.group_list}))

    async def status(self, topic: str) -> TopicStatus:
        """What is in each queue of a topic. Raises `TopicNotFound`."""
        return await self._insight.status(topic)

    async def rates(self, topic: str) -> TopicRates:
        """How fast a topic is written and read, over the last minute. Raises `TopicNotFound`."""
        return await self._insight.rates(topic, await self.groups(topic))

    # Making and changing.

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
        """Make a topic on all masters, those named or those of a cluster; returns when it is seen.

        `queues` is the number on each broker. Raises `TopicExists` when one of these brokers has
        it; with `exist_ok` only when it is not what is asked for there. Then brokers that do not
        have it get it, so that a call that was done on some of them can be repeated.
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
        masters = (await self._directory.look()).masters(brokers, cluster=cluster)
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
        """Change what is given and leave the rest, on all brokers that have the topic or some.

        Consumers see nothing of a queue beyond `read_queues`: lowering that hides what was not
        consumed there, and no group's lag counts it any more. To take queues away without losing
        what is in them: fewer `write_queues` first, and fewer `read_queues` when `groups.progress`
        shows that they have been consumed. Raises `TopicNotFound`.
        """
        _check_name(topic)
        masters = (await self._directory.look()).masters(brokers)
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
            # First: brokers take the order back from whoever still tells of it.
            await self._give_up_order(topic, wanted)
        return await self._apply(topic, wanted)

    async def _apply(self, topic: str, wanted: Mapping[BrokerNode, TopicConfig]) -> Topic:
        async def tell(node: BrokerNode) -> None:
            await self._asking.ask(
                node.address, RequestCode.UPDATE_AND_CREATE_TOPIC, _create_header(wanted[node])
            )

        (await self._asking.each(wanted, tell)).check(f"configuring topic {topic!r}")
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
        parts = [_on_broker(node.broker, config) for node, config in after.items()]
        return _topic(topic, parts, frozenset())

    async def _keep_order(self, topic: str, wanted: Mapping[BrokerNode, TopicConfig]) -> None:
        """Tell name servers which queues an ordered topic has, also while a broker is away."""
        queues = await self._ordered_queues(topic)
        for node, config in wanted.items():
            queues[node.broker] = str(config.write_queue_nums)
        await self._put_order(topic, queues)

    async def _give_up_order(self, topic: str, brokers: Iterable[BrokerNode]) -> None:
        """Let name servers forget that the queues of these brokers are ordered."""
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
                    return f"clients are not told that {node.broker} has it"
                # A broker that may not be written shows none of its topics as writable.
                permission = config.perm & limits.get(node, int(Permission.READ_WRITE))
                expected = (config.write_queue_nums, config.read_queue_nums, permission)
                if (found.write_queue_nums, found.read_queue_nums, found.perm & 6) != expected:
                    return (
                        f"clients are told that {node.broker} has {found.write_queue_nums} queues "
                        f"to write and {found.read_queue_nums} to read, permission "
                        f"{Permission(found.perm & 6).letters}"
                    )
            return None

        await self._routes.until_seen(f"configuring topic {topic!r}", topic, problem)

    async def _broker_permission(self, node: BrokerNode) -> int:
        config = await self._config.broker(str(node.address))
        text = config.get("brokerPermission", "")
        return int(text) & 6 if text.isdecimal() else int(Permission.READ_WRITE)

    # Deleting.

    async def delete(self, topic: str, *, cluster: str | None = None) -> None:
        """Delete a topic from its brokers and the name servers; returns when it is seen no more.

        The progress of groups in it goes with it. Raises `TopicNotFound`.
        """
        _check_name(topic)
        topology = await self._directory.look()
        masters = topology.masters(cluster=cluster)
        present = await self._on_brokers(masters, topic)
        if not present and await self._routes.look(topic) is None:
            raise await not_found(self._asking, topic)

        async def forget(node: BrokerNode) -> None:
            code = RequestCode.DELETE_TOPIC_IN_BROKER
            await self._asking.ask(node.address, code, TopicRequest(topic=topic))

        (await self._asking.each(masters, forget)).check(f"deleting topic {topic!r}")
        await self._forget_route(topic, cluster)
        left = await self._on_brokers(masters, topic)
        if left:
            names = ", ".join(map(str, left))
            raise NotEffective(f"deleting topic {topic!r}", [f"{names} has it again"])
        gone = {node.broker for node in masters}

        def problem(data: TopicRouteData | None) -> str | None:
            still = () if data is None else (q.broker_name for q in data.queue_datas)
            shown = sorted(gone.intersection(still))
            return f"clients are still told that {', '.join(shown)} has it" if shown else None

        await self._routes.until_seen(f"deleting topic {topic!r}", topic, problem)

    async def _forget_route(self, topic: str, cluster: str | None) -> None:
        header = DeleteTopicInNamesrvRequest(topic=topic, cluster_name=cluster)

        async def forget(address: Address) -> None:
            await self._asking.ask(address, RequestCode.DELETE_TOPIC_IN_NAMESRV, header)

        outcomes = await self._asking.each(self._asking.name_servers, forget)
        outcomes.check(f"deleting the route of {topic!r}")
        if cluster is None and await self._config.value(ORDER_NAMESPACE, topic) is not None:
            await self._config.delete_value(ORDER_NAMESPACE, topic)

    # What the steps share.

    async def _found(self, nodes: Sequence[BrokerNode], topic: str) -> Sequence[TopicOnBroker]:
        present = await self._on_brokers(nodes, topic)
        return [_on_broker(node.broker, config) for node, config in present.items()]

    async def _on_brokers(
        self, nodes: Sequence[BrokerNode], topic: str
    ) -> dict[BrokerNode, TopicConfig]:
        async def ask(node: BrokerNode) -> TopicConfig | None:
            return await self._configs.one(node, topic)

        done = (await self._asking.each(nodes, ask)).check(f"looking topic {topic!r} up")
        return {node: config for node, config in done.items() if config is not None}


def _check_name(topic: str) -> None:
    check_topic(topic)
    if is_system_topic(topic):
        raise BadRequest(f"{topic!r} belongs to the system and is left alone")


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
        # Ignored by brokers, and required by their header.
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
    """What of a configuration is compared after a change."""
    if config is None:
        return "no such topic"
    return (
        f"{config.write_queue_nums} queues to write, {config.read_queue_nums} to read, "
        f"permission {Permission(config.perm).letters}"
    )


def _is_like(found: TopicConfig, wanted: TopicConfig) -> bool:
    """Whether a topic that is there is the one that is asked for."""
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


# Routes of topics: what name servers tell clients.


#: How long name servers may take to show a change.
VISIBLE_WITHIN = 10.0
_LOOK_AGAIN = 0.05


class TopicRoutes:
    """Looks routes up."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def look(self, topic: str, address: Address | None = None) -> TopicRouteData | None:
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        if address is None:
            answer = await self._asking.ask_name_server(code, header, accept=_FOUND_OR_NOT)
        else:
            answer = await self._asking.ask(address, code, header, accept=_FOUND_OR_NOT)
        if answer.code != ResponseCode.SUCCESS:
            return None
        return decode_body(TopicRouteData, answer.body or b"{}")

    async def until_seen(
        self,
        what: str,
        topic: str,
        problem: Callable[[TopicRouteData | None], str | None],
    ) -> None:
        """Wait until every name server that answers gives a route without a problem."""
        deadline = self._asking.clock.monotonic() + VISIBLE_WITHIN
        for address in self._asking.name_servers:
            while True:
                try:
                    found = problem(await self.look(topic, address))
                except Failed:
                    # One that is away gives routes to nobody.
                    break
                if found is None:
                    break
                if self._asking.clock.monotonic() >= deadline:
                    raise NotEffective(what, [f"name server {address}: {found}"])
                await asyncio.sleep(_LOOK_AGAIN)


def route_of(topic: str, data: TopicRouteData) -> Route:
    """What people see of a route."""
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


# A topic that no broker has, told with the one that was probably meant.


async def not_found(asking: Asking, topic: str) -> TopicNotFound:
    """The error to raise."""
    return TopicNotFound(topic, similar=await similar_topic(asking, topic))
