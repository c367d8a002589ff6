"""Whatever a peer sends: at worst its own connection is closed, and others are served."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest

from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, ConnectionSettings, ServerSettings
from orbitmq.wire.codes import RequestCode, Serialization, WireLimits
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.headers import GetRouteInfoRequest, RegisterBrokerRequest
from tests.support.remoting import DEADLINE, RawPeer, serving, until
from tests.support.wire import EXCHANGES

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "recordings"

#: Mutated frames in all, and how many of them share a connection.
FRAMES = 10_000
PER_CONNECTION = 2


def _header_of(_: Connection, request: Command) -> Command:
    """Looks at everything that a request has, as handlers do."""
    exchange = EXCHANGES.get(request.code)
    if exchange is not None:
        request.header(exchange.request)
    return request.answer(0, remark=str(len(request.ext_fields)), body=request.body[:100])


HANDLERS = {int(code): _header_of for code in RequestCode}


def _honest_frames() -> list[bytes]:
    route = GetRouteInfoRequest(topic="orders")
    broker = RegisterBrokerRequest(
        broker_name="broker-a",
        broker_addr="127.0.0.1:10911",
        cluster_name="DefaultCluster",
        ha_server_addr="127.0.0.1:10912",
        broker_id=0,
    )
    made = [
        encode_command(
            Command.request(code, header, opaque=7, body=body, serialization=serialization)
        )
        for code, header in ((105, route), (103, broker), (28, None))
        for body in (b"", b"{}", b"x" * 2000)
        for serialization in Serialization
    ]
    recorded: list[bytes] = []
    for path in sorted(RECORDINGS.glob("*-to-server.frames")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = 4 + int.from_bytes(data[at : at + 4], "big")
            recorded.append(data[at : at + size])
            at += size
    small = [frame for frame in recorded if len(frame) < 4000]
    return made + small[:: max(1, len(small) // 100)]


def _mutated(frame: bytes, chance: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(chance.choice([1, 1, 1, 2, 5, 20])):
        at = chance.randrange(min(8, len(data) - 1), len(data))
        match chance.randrange(8):
            case 0 | 6 | 7:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.choice(b'\x00\xff{}[]":,\\0-\x16')
            case 2:
                del data[at : at + chance.randrange(1, 9)]
            case 3:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 4:
                # The length words, where most harm can be done.
                data[chance.randrange(min(8, len(data)))] = chance.randrange(256)
            case _:
                data[at : at + 4] = chance.choice(
                    [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"9999"]
                )
        if not data:
            return b"\x00"
    if len(data) >= 8 and chance.random() < 0.7:
        # The rest of the harm needs an outer length that is right.
        data[:4] = (len(data) - 4).to_bytes(4, "big")
    return bytes(data)


async def test_ten_thousand_mutated_frames_close_only_their_own_connections():
    chance = random.Random(20_24)
    honest = _honest_frames()
    settings = ServerSettings(connection=ConnectionSettings(limits=WireLimits(frame=1 << 20)))
    caught: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
    looked_at = 0

    def count(connection, request):
        nonlocal looked_at
        looked_at += 1
        return _header_of(connection, request)

    async with serving(dict.fromkeys(HANDLERS, count), settings) as server:
        witness = await connect(server.address)
        for number in range(FRAMES // PER_CONNECTION):
            frames = [_mutated(chance.choice(honest), chance) for _ in range(PER_CONNECTION)]
            await _throw(server.address, b"".join(frames))
            if number % 50 == 0:
                answer = await witness.request(
                    105, GetRouteInfoRequest(topic="t"), timeout=DEADLINE
                )
                assert answer.code == 0

        assert (await witness.request(28, body=b"alive", timeout=DEADLINE)).body == b"alive"
        await until(lambda: len(server.connections) == 1, "the end of all other connections")
        witness.close()
    assert caught == []
    # Not all of it was refused at the door.
    assert looked_at > FRAMES / 5


async def _throw(address: Address, data: bytes) -> None:
    """Send bytes, say that these were all, and read to the end of the stream."""
    async with RawPeer.connected(address) as peer, asyncio.timeout(DEADLINE):
        try:
            await peer.send(data)
            peer.writer.write_eof()
            while await peer.reader.read(65536):
                pass
        except ConnectionError:
            return


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
