"""The ports beside a broker's own: where they are, who hears of them, and what is in their way."""

from __future__ import annotations

import logging
import socket

import pytest

from orbitmq.broker.settings import ReplicationSettings
from orbitmq.remoting.settings import Address, ListenFailed, ServerSettings
from tests.support.broker import RawClient, until

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


async def test_a_second_port_that_is_taken_is_done_without(start_broker, port, caplog):
    with socket.create_server(("127.0.0.1", port - 2)), caplog.at_level(logging.WARNING):
        broker = await start_broker(server=ServerSettings(port=port), vip=True)
        client = await RawClient.open(broker)
        await client.stored("orders")
        await client.close()

    assert broker.vip_address is None
    assert f"127.0.0.1:{port - 2}" in caplog.text
