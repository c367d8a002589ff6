"""The second port of a broker, two below the first."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import Address, ServerSettings
from orbitmq.wire.bodies import SubscriptionData
from orbitmq.wire.codes import RequestCode
from tests.support.broker import GROUP, RawClient, bodies_in, send_header, until


@pytest.fixture
def port():
    """A port that is free, and whose neighbour two below is free."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            found = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", found - 2))
            except OSError:
                continue
        yield found
        return
    pytest.fail("no two free ports")


SUBSCRIPTION = SubscriptionData(topic="orders", sub_string="*")


def ids(broker: Broker) -> set[str]:
    return {member.client.id for member in broker.parts.consumers.members(GROUP)}


async def second_client(address: Address | None) -> RawClient:
    assert address is not None
    return RawClient(await connect(address), [])


async def test_what_is_sent_through_one_port_is_had_through_the_other(start_broker, port):
    broker = await start_broker(server=ServerSettings(port=port), vip=True)
    first, second = await RawClient.open(broker), await second_client(broker.vip_address)

    place = await second.stored("orders", b"through the second")
    waiting = asyncio.ensure_future(first.pull("orders", offset=1, hold=15.0))
    await until(lambda: len(broker.parts.held) == 1)
    await second.stored("orders", b"and again")
    found = [bodies_in(await first.pull("orders")), bodies_in(await waiting)]
    await first.close()
    await second.close()

    assert (broker.address.port, broker.vip_address) == (port, Address("127.0.0.1", port - 2))
    assert found == [[b"through the second", b"and again"], [b"and again"]]
    # Who sends back goes where everybody is told to go.
    assert int(place.msg_id[8:16], 16) == port


async def test_members_of_a_group_are_counted_across_both_ports(start_broker, port):
    broker = await start_broker(server=ServerSettings(port=port), vip=True)
    first, second = await RawClient.open(broker), await second_client(broker.vip_address)

    await first.heartbeat("one", SUBSCRIPTION)
    await second.heartbeat("two", SUBSCRIPTION)
    together = ids(broker)
    await second.close()
    await until(lambda: ids(broker) == {"one"})
    await first.close()

    assert together == {"one", "two"}


async def test_both_ports_share_one_limit_of_connections(start_broker, port):
    broker = await start_broker(server=ServerSettings(port=port, connections=2), vip=True)
    first, second = await RawClient.open(broker), await second_client(broker.vip_address)
    for each in (first, second):
        assert (await each.heartbeat("any", producers=("p",))).code == 0

    refused = []
    for address in (broker.address, broker.vip_address):
        third = await second_client(address)
        async with asyncio.timeout(30):
            await third.connection.wait_closed()
        refused.append(address)
    await first.close()
    await second.close()

    assert len(refused) == 2


async def test_a_stop_closes_both_ports_and_answers_what_was_asked(start_broker, port):
    broker = await start_broker(server=ServerSettings(port=port), vip=True)
    second = await second_client(broker.vip_address)
    sending = asyncio.ensure_future(
        second.connection.request(
            RequestCode.SEND_MESSAGE_V2, send_header("orders"), body=b"x", timeout=10
        )
    )
    await until(lambda: broker.parts.store.max_offset("orders", 0) == 1)

    await broker.stop()

    assert (await sending).code == 0
    for each in (port, port - 2):
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", each))
    await second.close()


async def test_a_second_port_that_is_taken_is_done_without(start_broker, port, caplog):
    with socket.create_server(("127.0.0.1", port - 2)), caplog.at_level(logging.WARNING):
        broker = await start_broker(server=ServerSettings(port=port), vip=True)
        client = await RawClient.open(broker)
        await client.stored("orders")
        await client.close()

    assert broker.vip_address is None
    assert f"127.0.0.1:{port - 2}" in caplog.text


@pytest.mark.parametrize("vip", [True, False])
async def test_there_is_no_second_port_beside_any_free_one_or_when_it_is_switched_off(
    start_broker, port, vip
):
    broker = await start_broker(server=ServerSettings(port=0 if vip else port), vip=vip)

    assert broker.vip_address is None
