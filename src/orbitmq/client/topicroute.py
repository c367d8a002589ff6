"""Where a topic lives: its brokers, and the queues that can be written and read.

Publish queues need a master, because only masters take messages; subscribe queues do not, because
slaves serve readers while their master is away. A topic with an order configuration
(`broker-a:4;broker-b:4`) has exactly the queues that it names, whether or not their brokers are
there: a message whose order matters must not go to another queue for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orbitmq.client.queue import Queue
from orbitmq.remoting.address import Address, parse_address
from orbitmq.remoting.errors import AddressError
from orbitmq.wire.bodies.route import BrokerData, QueueData, TopicRouteData

log = logging.getLogger(__name__)

#: The id of a master among the addresses of a broker; slaves have others.
MASTER = 0
#: Bits of the permission of a topic.
WRITE = 2
READ = 4


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The route of one topic at one time. Equal to another when nothing has changed."""

    topic: str
    #: Addresses by broker name and broker id, 0 being the master.
    brokers: Mapping[str, Mapping[int, Address]] = field(hash=False)
    publish_queues: tuple[Queue, ...]
    subscribe_queues: tuple[Queue, ...]
    #: Whether an order configuration names the queues.
    is_ordered: bool = False
    #: Whether the topic does not exist yet and this is the template's route.
    is_provisional: bool = False
    #: The cluster of each broker.
    clusters: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def addresses(self) -> frozenset[Address]:
        """Of all its brokers, masters and slaves."""
        return frozenset(
            address for addresses in self.brokers.values() for address in addresses.values()
        )

    @property
    def summary(self) -> str:
        """For a log line."""
        return (
            f"{len(self.publish_queues)} queues to write, {len(self.subscribe_queues)} to read, "
            f"on {', '.join(sorted(self.brokers)) or 'no broker'}"
        )


def route_of(topic: str, data: TopicRouteData) -> TopicRoute:
    """A route out of the answer of a name server."""
    brokers = {each.broker_name: _addresses(each) for each in data.broker_datas}
    # Java sorts by broker, and all members of a group must see the same order.
    queue_datas = sorted(data.queue_datas, key=lambda each: each.broker_name)
    order = data.order_topic_conf
    return TopicRoute(
        topic,
        MappingProxyType(brokers),
        _ordered_queues(topic, order) if order else _publish_queues(topic, queue_datas, brokers),
        _subscribe_queues(topic, queue_datas),
        is_ordered=bool(order),
        clusters=MappingProxyType(
            {each.broker_name: each.cluster for each in data.broker_datas if each.cluster}
        ),
    )


def provisional_route(topic: str, template: TopicRouteData, most_queues: int) -> TopicRoute:
    """The route of a topic that does not exist yet: the first send makes it like the template."""
    brokers = {each.broker_name: _addresses(each) for each in template.broker_datas}
    queue_datas = sorted(template.queue_datas, key=lambda each: each.broker_name)
    queues = tuple(
        Queue(topic, data.broker_name, place)
        for data in queue_datas
        if data.perm & WRITE and MASTER in brokers.get(data.broker_name, ())
        for place in range(min(most_queues, data.read_queue_nums))
    )
    return TopicRoute(topic, MappingProxyType(brokers), queues, (), is_provisional=True)


def _addresses(broker: BrokerData) -> Mapping[int, Address]:
    found = {}
    for number, text in sorted(broker.broker_addrs.items()):
        try:
            found[number] = parse_address(text)
        except AddressError as error:
            log.warning("broker %s has no usable address: %s", broker.broker_name, error)
    return MappingProxyType(found)


def _publish_queues(
    topic: str, datas: list[QueueData], brokers: Mapping[str, Mapping[int, Address]]
) -> tuple[Queue, ...]:
    return tuple(
        Queue(topic, data.broker_name, place)
        for data in datas
        if data.perm & WRITE and MASTER in brokers.get(data.broker_name, ())
        for place in range(data.write_queue_nums)
    )


def _subscribe_queues(topic: str, datas: list[QueueData]) -> tuple[Queue, ...]:
    return tuple(
        Queue(topic, data.broker_name, place)
        for data in datas
        if data.perm & READ
        for place in range(data.read_queue_nums)
    )


def _ordered_queues(topic: str, order: str) -> tuple[Queue, ...]:
    queues: list[Queue] = []
    for part in order.split(";"):
        broker, colon, count = part.strip().partition(":")
        if not broker:
            continue
        if not colon or not count.strip().isdecimal():
            log.warning("order configuration of %s: %r is not broker:count", topic, part)
            continue
        queues += [Queue(topic, broker, place) for place in range(int(count))]
    return tuple(queues)
