"""Whatever a peer sends: at worst its own connection is closed, and others are served."""

from __future__ import annotations

import logging

import pytest

from orbitmq.remoting.connection import Connection
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, encode_command
from tests.support.remoting import RawPeer, serving
from tests.support.wire import EXCHANGES


def _header_of(_: Connection, request: Command) -> Command:
    """Looks at everything that a request has, as handlers do."""
    exchange = EXCHANGES.get(request.code)
    if exchange is not None:
        request.header(exchange.request)
    return request.answer(0, remark=str(len(request.ext_fields)), body=request.body[:100])


HANDLERS = {int(code): _header_of for code in RequestCode}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no frame"),
        (b"\x00\x00\x00\x00\x00\x00\x00\x00", "no frame"),
        (b"\xff\xff\xff\xff\x00\x00\x00\x00", "no frame"),
        (b"\x00\x00\x00\x10\x00\x00\x0c\x00aaaaaaaaaaaa", "no frame"),
        (b"\x00\x00\x00\x08\x07\x00\x00\x04{  }", "no frame"),
        (b"\x00\x00\x00\x08\x00\x00\x00\x04null", "no command"),
        (b"\x00\x00\x00\x08\x01\x00\x00\x04abcd", "no command"),
    ],
)
async def test_bytes_that_are_no_command_close_the_connection_and_are_logged_once(
    data, problem, caplog
):
    async with serving(HANDLERS) as server:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                async with RawPeer.connected(server.address) as peer:
                    await peer.send(data)

                    assert await peer.is_closed_by_the_other_side()

    lines = [record for record in caplog.records if problem in record.getMessage()]
    assert len(lines) == 1
    assert getattr(lines[0], "client", "").startswith("127.0.0.1:")


async def test_a_grpc_client_is_told_apart_in_the_log_and_let_go(caplog):
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x12\x04" + bytes(23)
    async with serving(HANDLERS) as server:
        with caplog.at_level(logging.WARNING):
            # Something else went wrong with this host before, and was logged.
            for data in (b"\xff" * 8, preface[:7], preface, preface):
                async with RawPeer.connected(server.address) as peer:
                    await peer.send(data)
                    if len(data) == 7:
                        await peer.send(preface[7:])

                    assert await peer.is_closed_by_the_other_side()

    lines = [each for each in caplog.records if "gRPC" in each.getMessage()]
    assert len(lines) == 1
    assert "use a client of the remoting protocol: orbitmq" in lines[0].getMessage()
    assert getattr(lines[0], "client", "").startswith("127.0.0.1:")


async def test_what_was_asked_before_the_bad_bytes_is_still_answered():
    good = encode_command(Command.request(28, opaque=1, body=b"first"))
    async with serving(HANDLERS) as server, RawPeer.connected(server.address) as peer:
        await peer.send(good + good + b"\xff" * 20)

        assert bytes((await peer.receive()).body) == b"first"
        assert bytes((await peer.receive()).body) == b"first"
        with pytest.raises((EOFError, ConnectionError)):
            await peer.receive()


async def test_secrets_in_a_bad_header_are_not_logged(caplog):
    header = b'{"code":10,"extFields":{"SecretKey":"hunter2",,'
    frame = (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header
    async with serving(HANDLERS) as server, RawPeer.connected(server.address) as peer:
        with caplog.at_level(logging.DEBUG):
            await peer.send(frame)
            assert await peer.is_closed_by_the_other_side()

    assert "no command" in caplog.text
    assert "hunter2" not in caplog.text
