"""The rules by which registrations become routes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbitmq.namesrv.routes import Registration, RouteTable
from orbitmq.wire.bodies import DataVersion, QueueMappingInfo, TopicRouteData
from tests.support.namesrv import topic

V1 = DataVersion(counter=1, timestamp=100)
V2 = DataVersion(counter=2, timestamp=200)
MASTER = Registration(
    cluster="C",
    name="a",
    id=0,
    address="10.0.0.1:10911",
    ha_address="10.0.0.1:10912",
    version=V1,
    topics=(topic("orders"), topic("payments", queues=8)),
)
SLAVE = replace(MASTER, id=1, address="10.0.0.2:10911", ha_address="10.0.0.2:10912")


def _route(table: RouteTable, name: str) -> TopicRouteData:
    route = table.route(name)
    assert route is not None
    return route


def _perms(table: RouteTable, name: str) -> dict[str, int]:
    return {queues.broker_name: queues.perm for queues in _route(table, name).queue_datas}


def test_of_two_brokers_with_one_id_the_later_is_listed_and_the_other_is_named():
    other = replace(MASTER, address="10.0.0.9:10911")
    table = RouteTable()
    answers = [
        table.register(MASTER, 0.0, "one"),
        table.register(other, 1.0, "two"),
        table.register(MASTER, 2.0, "one"),
        table.register(MASTER, 3.0, "one"),
    ]
    later = replace(other, version=DataVersion(counter=1, timestamp=100, state_version=1))
    answers += [table.register(later, 4.0, "two"), table.register(MASTER, 5.0, "one")]

    assert [answer.rival for answer in answers] == [
        None,
        MASTER.address,
        other.address,
        None,
        MASTER.address,
        other.address,  # whose state is later, so that it stays
    ]
    assert _route(table, "orders").broker_datas[0].broker_addrs == {0: other.address}


def test_the_lowest_slave_of_a_5_x_group_brings_queues_and_an_acting_one_readable_only():
    plain, acting = RouteTable(), RouteTable()

    plain.register(replace(SLAVE, acting_master=False), 0.0)
    acting.register(replace(SLAVE, acting_master=True), 0.0)
    acting.register(
        replace(
            SLAVE,
            id=2,
            address="10.0.0.3:10911",
            acting_master=True,
            topics=(topic("x"), topic("y")),
        ),
        0.0,
    )

    assert _perms(plain, "orders") == {"a": 6}
    assert _perms(acting, "orders") == {"a": 4}
    assert acting.route("x") is None


@pytest.mark.parametrize(
    ("version", "queues"),
    [
        (V1, 4),
        (DataVersion(counter=2, timestamp=100), 16),
        (DataVersion(counter=1, timestamp=101), 16),
        (DataVersion(counter=1, timestamp=100, state_version=1), 16),
    ],
)
def test_queues_change_with_any_number_of_the_version_and_new_topics_always_come(version, queues):
    table = RouteTable()
    table.register(MASTER, 0.0)
    topics = (topic("orders", queues=16), topic("refunds"))

    table.register(replace(MASTER, topics=topics, version=version), 1.0)

    assert _route(table, "orders").queue_datas[0].read_queue_nums == queues
    assert _perms(table, "refunds") == {"a": 6}


@pytest.mark.parametrize(
    ("is_deleting", "left"), [(False, ("new", "orders", "payments")), (True, ("new", "payments"))]
)
def test_topics_that_are_not_registered_again_stay_unless_asked_otherwise(is_deleting, left):
    table = RouteTable(delete_unregistered_topics=is_deleting)
    table.register(MASTER, 0.0)

    table.register(replace(MASTER, topics=(topic("payments"), topic("new")), version=V2), 1.0)

    assert table.topics().topic_list == left


def test_an_address_with_a_new_id_gives_up_the_old_one():
    table = RouteTable()
    table.register(MASTER, 0.0)
    table.register(SLAVE, 0.0)

    table.unregister("C", MASTER.address, "a")
    table.register(replace(SLAVE, id=0), 1.0)

    assert table.members("C", "a").broker_addrs == {0: "10.0.0.2:10911"}


@pytest.mark.parametrize("ends", ["closed", "silent"])
def test_an_address_leaves_under_every_name_that_it_had(ends):
    table = RouteTable()
    table.register(MASTER, 0.0, "connection")
    table.register(replace(MASTER, name="b"), 1.0, "connection")
    assert set(table.clusters().broker_addr_table) == {"a", "b"}

    if ends == "closed":
        table.connection_closed("connection")
    else:
        table.expire(1000.0)

    assert table.clusters().broker_addr_table == {}
    assert table.topics().topic_list == ()


def test_a_group_with_an_acting_master_cannot_be_written_without_its_master():
    table = RouteTable(support_acting_master=True)
    table.register(replace(MASTER, acting_master=True), 0.0)
    table.register(replace(SLAVE, acting_master=True), 0.0)

    table.unregister("C", MASTER.address, "a")
    route = _route(table, "orders")

    assert _perms(table, "orders") == {"a": 4}
    # Clients are shown the slave in the master's place.
    assert route.broker_datas[0].broker_addrs == {0: "10.0.0.2:10911"}
    assert table.members("C", "a").broker_addrs == {1: "10.0.0.2:10911"}


def test_filter_servers_and_queue_mappings_are_part_of_a_route():
    table = RouteTable()
    mapping = QueueMappingInfo(bname="a", topic="orders", total_queues=4)
    table.register(
        replace(MASTER, filter_servers=("10.0.0.1:3000",), mappings={"orders": mapping}), 0.0
    )
    full = _route(table, "orders")
    table.register(replace(MASTER, filter_servers=()), 0.0)

    assert full.filter_server_table == {"10.0.0.1:10911": ("10.0.0.1:3000",)}
    assert full.topic_queue_mapping_by_broker == {"a": mapping}
    assert _route(table, "payments").topic_queue_mapping_by_broker is None
    assert _route(table, "orders").filter_server_table == {}
