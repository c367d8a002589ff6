"""Who is told that a client is there, when, and what happens when brokers come and go."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.errors import SettingError
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import RequestTimedOut
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.client import (
    MemberStub,
    ScriptedBroker,
    ScriptedNameServer,
    consumer_data,
    running_engine,
    topic_route,
)
from tests.support.remoting import until

BROKER_COUNT = 2

HEART_BEAT = int(RequestCode.HEART_BEAT)
PULL = int(RequestCode.PULL_MESSAGE)

PRODUCER = MemberStub(producer_group="shop")
CONSUMER = MemberStub(consumer=consumer_data("billing", "orders"))


def _answer(_: Connection, request: Command) -> Command:
    return request.answer(ResponseCode.SUCCESS)


async def test_brokers_know_all_members_of_a_client(cluster):
    async with running_engine(cluster.name_server) as engine:
        await engine.routes.get("orders")
        engine.join(PRODUCER)
        engine.join(CONSUMER)

        assert await engine.heartbeat() == {}

        for broker in cluster.brokers:
            (member,) = broker.parts.consumers.members("billing")
            assert member.client.id == engine.client_id
            assert broker.parts.producers.is_online("shop")
            assert engine.broker_versions[broker.address] > 400


async def test_leaving_is_told_at_once_and_only_for_the_groups_that_nobody_has_any_more(cluster):
    broker = cluster.brokers[0]
    async with running_engine(cluster.name_server) as engine:
        await engine.routes.get("orders")
        second = MemberStub(producer_group="shop")
        for member in (PRODUCER, second, CONSUMER):
            engine.join(member)
        await engine.heartbeat()

        await engine.leave(CONSUMER)
        await engine.leave(CONSUMER)
        await engine.leave(second)

        assert not broker.parts.consumers.is_online("billing")
        assert broker.parts.producers.is_online("shop")
        engine.join(CONSUMER)
        await engine.heartbeat()
        assert broker.parts.consumers.is_online("billing")

    assert not broker.parts.consumers.is_online("billing")
    assert not broker.parts.producers.is_online("shop")


async def test_a_consumer_group_can_be_in_a_client_only_once():
    async with running_engine("127.0.0.1:1") as engine:
        engine.join(CONSUMER)

        with pytest.raises(SettingError, match="'billing' is used by this client already"):
            engine.join(MemberStub(consumer=consumer_data("billing", "other")))


async def test_slaves_hear_of_clients_that_read():
    master, slave = ScriptedBroker(), ScriptedBroker()
    async with (
        master.serving(),
        slave.serving(),
        ScriptedNameServer().serving() as names,
        running_engine(names.address) as engine,
    ):
        names.routes["orders"] = topic_route({"broker-a": {0: master.address, 1: slave.address}})
        await engine.routes.get("orders")
        engine.join(PRODUCER)
        await engine.heartbeat()
        assert (len(master.heartbeats), len(slave.heartbeats)) == (1, 0)
        engine.join(CONSUMER)
        await engine.heartbeat()

        (heard,) = slave.heartbeats
        assert [each.group_name for each in heard.producer_data_set] == ["shop"]
        assert heard.consumer_data_set == (CONSUMER.consumer,)
        assert heard.client_id == engine.client_id


async def test_a_heartbeat_is_the_first_thing_on_a_new_connection():
    broker = ScriptedBroker(handlers={PULL: _answer})
    async with (
        broker.serving(),
        ScriptedNameServer().serving() as names,
        running_engine(names.address) as engine,
    ):
        names.routes["orders"] = topic_route({"broker-a": {0: broker.address}})
        await engine.routes.get("orders")
        engine.join(CONSUMER)

        await asyncio.gather(*(engine.ask(broker.address, PULL) for _ in range(3)))
        first = engine.open_connection(broker.address)
        for connection in broker.connections:
            connection.abort()
        await until(lambda: engine.open_connection(broker.address) is not first)
        await engine.ask(broker.address, PULL)

        assert broker.arrivals == [[HEART_BEAT, PULL, PULL, PULL], [HEART_BEAT, PULL]]


async def test_a_lost_broker_is_greeted_again_though_nobody_has_a_request_for_it(cluster):
    async with running_engine(cluster.name_server) as engine:
        await engine.routes.get("orders")
        engine.join(CONSUMER)
        await engine.heartbeat()
        again: list[object] = []
        end = engine.on_connected(again.append)

        await cluster.restart_broker(1)

        restarted = cluster.brokers[1]
        await until(lambda: restarted.parts.consumers.is_online("billing"))
        assert again == [restarted.address]
        end()


async def test_a_broker_that_is_broken_does_not_delay_the_others():
    mute, good = ScriptedBroker(is_mute=True), ScriptedBroker()
    async with (
        mute.serving(),
        good.serving(),
        ScriptedNameServer().serving() as names,
        running_engine(names.address, request_timeout=1.5, heartbeat=0.02) as engine,
    ):
        names.routes["orders"] = topic_route(
            {"broker-a": {0: mute.address}, "broker-b": {0: good.address}}
        )
        await engine.routes.get("orders")
        engine.join(PRODUCER)
        beating = asyncio.create_task(engine.heartbeat())

        await until(lambda: len(good.heartbeats) == 1)
        assert not beating.done()
        failed = await beating

        assert list(failed) == [mute.address]
        assert isinstance(failed[mute.address], RequestTimedOut)
        mute.is_mute = False
        assert await engine.heartbeat() == {}


async def test_brokers_that_no_route_names_any_more_are_dropped():
    old, new = ScriptedBroker(), ScriptedBroker()
    async with (
        old.serving(),
        new.serving(),
        ScriptedNameServer().serving() as names,
        running_engine(names.address, route_refresh=0.02, heartbeat=0.02) as engine,
    ):
        names.routes["orders"] = topic_route({"broker-a": {0: old.address}})
        engine.routes.track("orders")
        await engine.routes.get("orders")
        engine.join(CONSUMER)
        await engine.heartbeat()
        names.routes["orders"] = topic_route({"broker-a": {0: new.address}})

        await until(lambda: not old.connections and bool(new.heartbeats))

        assert engine.open_connection(old.address) is None
        assert old.address not in engine.broker_versions
        heard = len(old.arrivals)
        beats = len(new.heartbeats)
        await until(lambda: len(new.heartbeats) > beats + 3)
        assert len(old.arrivals) == heard


async def test_a_stop_does_not_wait_for_brokers_that_say_nothing():
    def ignore(_, __):
        return None

    broker = ScriptedBroker(handlers={int(RequestCode.UNREGISTER_CLIENT): ignore})
    async with broker.serving(), ScriptedNameServer().serving() as names:
        names.routes["orders"] = topic_route({"broker-a": {0: broker.address}})
        async with running_engine(names.address, stop_timeout=0.05) as engine:
            await engine.routes.get("orders")
            engine.join(CONSUMER)
            await engine.heartbeat()

            async with asyncio.timeout(30):
                await engine.stop()

        await until(lambda: not broker.connections)
