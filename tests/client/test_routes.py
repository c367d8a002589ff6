"""Routes: where topics live, as name servers say and as a client remembers it."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.client.errors import BrokerUnavailable, NoNameServer, NotANameServer
from orbitmq.client.routes import Queue, TopicRoute, provisional_route, route_of
from orbitmq.errors import BrokerRefused, NoRoute
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import BrokerData, QueueData, TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from tests.support.client import ScriptedNameServer, running_engine, topic_route
from tests.support.remoting import until

A = Address("127.0.0.1", 10911)
A_SLAVE = Address("127.0.0.1", 10921)
B = Address("127.0.0.1", 10931)
C = Address("127.0.0.1", 10941)


@pytest.fixture
async def names():
    async with ScriptedNameServer().serving() as found:
        yield found


# ---- what a route says


def _queues(topic: str, *counts: tuple[str, int]) -> tuple[Queue, ...]:
    return tuple(Queue(topic, broker, place) for broker, count in counts for place in range(count))


def test_queues_stand_in_the_order_of_their_brokers():
    route = route_of("orders", topic_route({"broker-b": {0: B}, "broker-a": {0: A}}, queues=2))

    assert route.publish_queues == _queues("orders", ("broker-a", 2), ("broker-b", 2))
    assert route.subscribe_queues == route.publish_queues


def test_without_its_master_a_broker_is_read_but_not_written():
    route = route_of("orders", topic_route({"broker-a": {1: A_SLAVE}, "broker-b": {0: B}}))

    assert route.publish_queues == _queues("orders", ("broker-b", 4))
    assert route.subscribe_queues == _queues("orders", ("broker-a", 4), ("broker-b", 4))


@pytest.mark.parametrize(("perm", "writes", "reads"), [(6, 4, 4), (4, 0, 4), (2, 4, 0), (0, 0, 0)])
def test_permissions_are_followed(perm, writes, reads):
    route = route_of("orders", topic_route({"broker-a": {0: A}}, perm=perm))

    assert len(route.publish_queues) == writes
    assert len(route.subscribe_queues) == reads


def test_reading_and_writing_may_have_different_numbers_of_queues():
    data = TopicRouteData(
        broker_datas=(BrokerData(broker_name="broker-a", broker_addrs={0: str(A)}),),
        queue_datas=(
            QueueData(broker_name="broker-a", perm=6, read_queue_nums=8, write_queue_nums=2),
        ),
    )

    route = route_of("orders", data)

    assert (len(route.publish_queues), len(route.subscribe_queues)) == (2, 8)


def test_an_order_configuration_names_the_queues_to_write_even_of_brokers_that_are_away():
    data = topic_route({"broker-a": {0: A}}, order="broker-b:1;broker-a:2; bad ;worse:x;")

    route = route_of("orders", data)

    assert route.publish_queues == _queues("orders", ("broker-b", 1), ("broker-a", 2))
    assert route.is_ordered


def test_an_address_that_is_none_does_not_spoil_the_others():
    data = TopicRouteData(
        broker_datas=(BrokerData(broker_name="broker-a", broker_addrs={0: "?", 1: str(A_SLAVE)}),)
    )

    assert route_of("orders", data).brokers == {"broker-a": {1: A_SLAVE}}


def test_a_topic_to_be_made_gets_at_most_the_templates_queues():
    template = topic_route({"broker-a": {0: A}, "broker-b": {1: B}}, queues=8)

    route = provisional_route("new", template, 4)

    assert route.publish_queues == _queues("new", ("broker-a", 4))
    assert route.is_provisional
    assert len(provisional_route("new", template, 16).publish_queues) == 8


# ---- which broker is asked


async def test_reading_goes_to_the_wanted_broker_or_the_next_slave_or_any(names):
    names.routes["orders"] = topic_route(
        {"broker-a": {0: A, 2: A_SLAVE}, "broker-b": {1: B}, "broker-c": {}}
    )
    async with running_engine(names.address) as engine:
        routes = engine.routes
        await routes.get("orders")

        assert routes.address("broker-a") == (A, 0)
        assert routes.address("broker-a", wanted=2, only=True) == (A_SLAVE, 2)
        assert routes.address("broker-a", wanted=1, only=True) == (A_SLAVE, 2)
        assert routes.address("broker-a", wanted=7) == (A, 0)
        assert routes.address("broker-b") == (B, 1)
        with pytest.raises(BrokerUnavailable, match="no broker id 7"):
            routes.address("broker-a", wanted=7, only=True)
        with pytest.raises(BrokerUnavailable, match="no master"):
            routes.address("broker-b", only=True)
        with pytest.raises(BrokerUnavailable, match="broker-c"):
            routes.address("broker-c")


async def test_writing_goes_to_masters_only(names):
    names.routes["orders"] = topic_route({"broker-a": {0: A, 1: A_SLAVE}, "broker-b": {1: B}})
    async with running_engine(names.address) as engine:
        await engine.routes.get("orders")

        assert engine.routes.master("broker-a") == A
        with pytest.raises(BrokerUnavailable, match="no master now"):
            engine.routes.master("broker-b")
        with pytest.raises(BrokerUnavailable, match="no route names it"):
            engine.routes.master("broker-z")


async def test_any_broker_of_a_topic_is_a_master_if_it_has_one(names):
    names.routes["orders"] = topic_route({"broker-a": {0: A, 1: A_SLAVE}, "broker-b": {0: B}})
    names.routes["old"] = topic_route({"broker-c": {1: C}})
    names.routes["nowhere"] = TopicRouteData()
    async with running_engine(names.address) as engine:
        chosen = {await engine.routes.broker_of("orders") for _ in range(50)}

        assert chosen == {A, B}
        assert await engine.routes.broker_of("old") == C
        with pytest.raises(BrokerUnavailable, match="nowhere"):
            await engine.routes.broker_of("nowhere")


# ---- asking


async def test_an_unknown_topic_is_told_apart_from_silent_name_servers(names):
    async with running_engine(names.address) as engine:
        with pytest.raises(NoRoute) as unknown:
            await engine.routes.get("orders")
        await names.server.stop(grace=0)
        with pytest.raises(NoNameServer) as silent:
            await engine.routes.get("orders")

    assert (unknown.value.topic, unknown.value.name_servers) == ("orders", (names.address,))
    assert [str(tried) for tried, _ in silent.value.tried] == [names.address]


async def test_lookups_of_one_topic_at_the_same_time_share_one_request(names):
    names.routes["orders"] = topic_route({"broker-a": {0: A}})
    async with running_engine(names.address) as engine:
        found = await asyncio.gather(*(engine.routes.get("orders") for _ in range(50)))
        failed = await asyncio.gather(
            *(engine.routes.get("absent") for _ in range(50)), return_exceptions=True
        )

        assert {route.topic for route in found} == {"orders"}
        assert names.asked("orders") == 1
        assert names.asked("absent") == 1
        assert all(isinstance(error, NoRoute) for error in failed)


# ---- topics that are made by sending


async def test_a_producer_is_led_to_the_template_of_new_topics_until_they_exist(names):
    names.routes["TBW102"] = topic_route({"broker-a": {0: A}}, queues=8)
    async with running_engine(names.address) as engine:
        heard: list[str] = []
        engine.routes.on_change(lambda topic, _: heard.append(topic))
        queues = (await engine.routes.publish_route("new")).publish_queues
        again = (await engine.routes.publish_route("new")).publish_queues

        assert queues == again == _queues("new", ("broker-a", 4))
        assert names.asked("new") == 1
        assert engine.routes.master("broker-a") == A
        with pytest.raises(NoRoute, match="'new'"):
            await engine.routes.subscribe_queues("new")

        assert heard == []
        names.routes["new"] = topic_route({"broker-a": {0: A}}, queues=6)
        await engine.routes.get("new")
        assert len((await engine.routes.publish_route("new")).publish_queues) == 6
        assert heard == ["new"]


async def test_where_topics_are_not_made_by_sending_there_is_no_route(names):
    async with running_engine(names.address) as engine:
        with pytest.raises(NoRoute, match="'new'"):
            await engine.routes.publish_route("new")
        with pytest.raises(NoRoute, match="'TBW102'"):
            await engine.routes.publish_route("TBW102")


# ---- keeping fresh


def _fail(_topic: str, _route: TopicRoute) -> None:
    raise ZeroDivisionError


async def test_changes_of_tracked_routes_are_noticed_and_told(names):
    names.routes["orders"] = topic_route({"broker-a": {0: A}})
    async with running_engine(names.address, route_refresh=0.02) as engine:
        heard: list[tuple[str, TopicRoute]] = []
        end = engine.routes.on_change(lambda topic, route: heard.append((topic, route)))
        engine.routes.on_change(_fail)
        engine.routes.track("orders")
        await engine.routes.get("orders")
        names.routes["orders"] = topic_route({"broker-a": {0: A}, "broker-b": {0: B}})
        await until(lambda: len(heard) == 2)
        asked = names.asked("orders")
        await until(lambda: names.asked("orders") > asked + 2)

        assert [len(route.publish_queues) for _, route in heard] == [4, 8]
        assert engine.routes.addresses() == {A, B}
        end()
        names.routes["orders"] = topic_route({"broker-b": {0: B}})
        await until(lambda: engine.routes.addresses() == {B})
        assert len(heard) == 2


async def test_a_name_server_that_lost_its_memory_takes_no_route_away(names):
    names.routes["orders"] = topic_route({"broker-a": {0: A}})
    async with running_engine(names.address, route_refresh=0.02) as engine:
        engine.routes.track("orders")
        await engine.routes.get("orders")
        names.routes.clear()
        asked = names.asked("orders")
        await until(lambda: names.asked("orders") > asked + 2)

        assert (await engine.routes.get("orders")).brokers == {"broker-a": {0: A}}
        assert engine.routes.master("broker-a") == A


async def test_routes_that_nobody_tracks_are_forgotten(names):
    names.routes["orders"] = topic_route({"broker-a": {0: A}})
    names.routes["once"] = topic_route({"broker-b": {0: B}})
    async with running_engine(names.address, route_refresh=0.02) as engine:
        engine.routes.track("orders")
        engine.routes.track("orders")
        await engine.routes.get("orders")
        await engine.routes.get("once")

        await until(lambda: engine.routes.addresses() == {A})
        assert engine.routes.known("once") is None
        engine.routes.untrack("orders")
        asked = names.asked("orders")
        await until(lambda: names.asked("orders") > asked + 2)
        engine.routes.untrack("orders")
        await until(lambda: engine.routes.addresses() == frozenset())


# ---- brokers that vanish and return


def _both() -> TopicRouteData:
    return topic_route({"broker-a": {0: A}, "broker-b": {0: B}})


async def test_a_broker_that_was_restarted_is_found_long_before_the_next_refresh(names):
    for topic in ("orders", "bills", "mails"):
        names.routes[topic] = _both()
    async with running_engine(names.address, route_refresh=3600.0) as engine:
        for topic in names.routes:
            engine.routes.track(topic)
        await engine.routes.refresh()
        for topic in names.routes:
            names.routes[topic] = topic_route({"broker-b": {0: B}})
        await engine.routes.refresh()
        asked = len(names.requests)
        # One question at a time, however many topics lost it.
        await until(lambda: len(names.requests) > asked)
        assert len(names.requests) == asked + 1

        for topic in names.routes:
            names.routes[topic] = _both()

        await until(
            lambda: all(
                route is not None and len(route.brokers) == 2
                for route in map(engine.routes.known, names.routes)
            ),
            "the return of the broker",
        )


# ---- several name servers, of which not all answer


async def test_a_dead_name_server_is_passed_over_whatever_the_order(cluster, dead):
    for _ in range(6):
        async with running_engine([dead, cluster.name_server]) as engine:
            assert (await engine.routes.get("orders")).topic == "orders"
            assert str(engine.name_servers[0]) == cluster.name_server
            # From now on the living one is asked at once.
            assert (await engine.routes.get("orders", refresh=True)).topic == "orders"


async def test_when_the_one_in_use_dies_the_next_is_asked():
    first = ScriptedNameServer(routes={"orders": topic_route({"broker-a": {0: A}})})
    second = ScriptedNameServer(routes={"orders": topic_route({"broker-b": {0: A}})})
    async with (
        first.serving(),
        second.serving(),
        running_engine([first.address, second.address]) as engine,
    ):
        await engine.routes.get("orders")
        used, other = (first, second) if first.requests else (second, first)
        assert used.server is not None
        await used.server.stop(grace=0)

        await engine.routes.get("orders", refresh=True)

        assert (used.asked("orders"), other.asked("orders")) == (1, 1)


async def test_a_broker_given_as_name_server_is_recognised(cluster):
    broker = str(cluster.brokers[0].address)
    async with running_engine([broker]) as engine:
        with pytest.raises(NotANameServer, match=r"probably a broker.*9876") as wrong:
            await engine.routes.get("orders")
        with pytest.raises(NotANameServer):
            await engine.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)

    assert wrong.value.address == broker
    assert wrong.value.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def test_one_that_is_not_ready_is_passed_over_and_its_refusal_is_the_last_word():
    starting = ScriptedNameServer(refusal=ResponseCode.SYSTEM_ERROR)
    ready = ScriptedNameServer(routes={"orders": topic_route({"broker-a": {0: A}})})
    async with starting.serving(), ready.serving():
        for _ in range(6):
            async with running_engine([starting.address, ready.address]) as engine:
                assert (await engine.routes.get("orders")).topic == "orders"
        async with running_engine(starting.address) as engine:
            with pytest.raises(BrokerRefused, match=r"not now \(SYSTEM_ERROR"):
                await engine.routes.get("orders")


# ---- queues and names


def test_the_java_text_is_that_of_a_message_queue():
    text = Queue("orders", "broker-a", 3).java_text

    assert text == "MessageQueue [topic=orders, brokerName=broker-a, queueId=3]"
