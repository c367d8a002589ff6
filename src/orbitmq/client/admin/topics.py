"""Topics: listed, made, changed, deleted and looked into.

A change is done when it can be seen: brokers are read back, and the name servers' routes are
waited for, because producers and consumers look there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from orbitmq.client.admin.arguments import whole_number
from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.configuration import ORDER_NAMESPACE, AsyncConfig
from orbitmq.client.admin.errors import BadRequest, NotEffective, TopicExists
from orbitmq.client.admin.listing import Listing
from orbitmq.client.admin.missingtopics import not_found
from orbitmq.client.admin.routing import TopicRoutes, route_of
from orbitmq.client.admin.topicconfigs import TopicConfigs
from orbitmq.client.admin.topicstatus import TopicInsight
from orbitmq.client.admin.topicvalues import (
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    Permission,
    Route,
    Topic,
    TopicKind,
    TopicOnBroker,
    TopicRates,
    TopicStatus,
    kind_of,
)
from orbitmq.client.admin.topology import BrokerNode, Directory, unreachable
from orbitmq.client.names import check_topic, is_system_topic
from orbitmq.remoting.address import Address
from orbitmq.wire.bodies.route import GroupList, TopicRouteData
from orbitmq.wire.bodies.topics import TopicConfig, TopicFilterType
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.namesrv import DeleteTopicInNamesrvRequest
from orbitmq.wire.headers.topics import CreateTopicRequest, TopicRequest

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
    return whole_number(name, value, 1, MOST_QUEUES)


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
