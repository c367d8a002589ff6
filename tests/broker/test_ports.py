"""The ports beside a broker's own: where they are, who hears of them, and what is in their way."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from orbitmq.broker.settings import ReplicationSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import Address, ListenFailed, ServerSettings
from orbitmq.wire.codes import RequestCode
from tests.support.broker import RawClient, bodies_in, send_header, until

SERVING = ReplicationSettings(serve=True)


@pytest.fixture
def port():
    """A port that is free, as are those from two below to one above it."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            found = int(first.getsockname()[1])
            if all(_is_free(found + beside) for beside in (-2, -1, 1)):
                return found
    pytest.fail("no four free ports side by side")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def test_both_are_counted_from_the_port_that_is_listened_on(start_broker, name_server, port):
    broker = await start_broker(
        server=ServerSettings(port=port),
        vip=True,
        replication=SERVING,
        advertised="127.0.0.2:12345",
        name_servers=(str(name_server.address),),
    )
    await until(lambda: broker.parts.registration.is_registered)

    assert broker.address == Address("127.0.0.2", 12345)
    assert broker.vip_address == Address("127.0.0.1", port - 2)
    # Slaves hear of it under the host that others are given.
    assert broker.ha_address == Address("127.0.0.2", port + 1)
    assert broker.parts.registration.ha_port == port + 1
    for each in (port - 2, port + 1):
        with socket.create_connection(("127.0.0.1", each), timeout=10):
            pass


async def test_a_broker_whose_port_is_the_second_one_of_another_says_what_to_change(
    start_broker, port
):
    first = await start_broker(server=ServerSettings(port=port), vip=True)
    assert first.vip_address is not None

    with pytest.raises(ListenFailed) as refused:
        await start_broker(root="other", server=ServerSettings(port=port - 2))

    text = str(refused.value)
    assert f"cannot listen on 127.0.0.1:{port - 2}" in text
    assert f"a broker on port {port}" in text
    assert "broker.vip = false" in text
    assert "another broker.port" in text


async def test_a_port_for_slaves_that_is_taken_is_named_with_its_setting(start_broker, port):
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(ListenFailed, match=r"broker\.replication\.port") as refused,
    ):
        await start_broker(server=ServerSettings(port=port), replication=SERVING)

    assert refused.value.address == Address("127.0.0.1", port + 1)


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
