"""A route as a particular reader should see it."""

from __future__ import annotations

from msgspec.structs import replace

from orbitmq.namesrv.registration import MASTER
from orbitmq.wire.bodies.route import TopicRouteData

#: Bits of a queue's permission.
PERM_WRITE = 2
PERM_READ = 4


def only_zone(route: TopicRouteData, zone: str) -> TopicRouteData:
    """The part of a route in one zone, and broker groups without a master, wherever they are."""
    near = tuple(
        broker
        for broker in route.broker_datas
        if MASTER not in broker.broker_addrs
        or (broker.zone_name or "").casefold() == zone.casefold()
    )
    far = [broker for broker in route.broker_datas if broker not in near]
    names = {broker.broker_name for broker in far}
    addresses = {address for broker in far for address in broker.broker_addrs.values()}
    return replace(
        route,
        broker_datas=near,
        queue_datas=tuple(each for each in route.queue_datas if each.broker_name not in names),
        filter_server_table={
            address: servers
            for address, servers in route.filter_server_table.items()
            if address not in addresses
        },
    )


def with_acting_masters(route: TopicRouteData) -> TopicRouteData:
    """Shows the first slave as master in groups that have none and can only be read."""
    readable_only = {
        queues.broker_name for queues in route.queue_datas if not queues.perm & PERM_WRITE
    }
    brokers = []
    for broker in route.broker_datas:
        addresses = dict(broker.broker_addrs)
        if (
            broker.enable_acting_master
            and MASTER not in addresses
            and broker.broker_name in readable_only
        ):
            addresses = {MASTER: addresses.pop(min(addresses)), **addresses}
        brokers.append(replace(broker, broker_addrs=addresses))
    return replace(route, broker_datas=tuple(brokers))
