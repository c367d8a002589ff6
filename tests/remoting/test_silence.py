"""A peer of which nothing is heard is given up, and reached anew; one that is only slow is not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from orbitmq.remoting.channels import Channels
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler
from orbitmq.remoting.settings import Address, ChannelSettings, RequestTimedOut
from orbitmq.wire.command import Command
from tests.support.remoting import DEADLINE, serving, until

ANSWERED = 10
HELD = 11

QUICK = ChannelSettings(silence=0.2, settled=0.0)


def _fine(_: Connection, request: Command) -> Command:
    return request.answer(0)


HANDLERS: dict[int, Handler] = {ANSWERED: _fine, HELD: lambda _, __: LATER}


@contextlib.asynccontextmanager
async def silent_peer() -> AsyncIterator[tuple[Address, list[asyncio.StreamWriter]]]:
    """Takes connections and everything that is sent, and says nothing."""
    taken: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield Address(*server.sockets[0].getsockname()[:2]), taken
    finally:
        server.close()
        for writer in taken:
            writer.transport.abort()


@pytest.fixture
async def channels():
    made = Channels(QUICK)
    yield made
    await made.close()


async def test_a_connection_without_any_answer_is_made_anew(channels):
    async with silent_peer() as (address, taken):
        first = await channels.get(address)

        with pytest.raises(RequestTimedOut):
            await channels.request(address, ANSWERED, timeout=0.3)

        await until(lambda: not first.is_open, "the end of the connection")
        assert "nothing was heard" in first.reason
        assert await channels.get(address) is not first
        await until(lambda: len(taken) == 2, "a second connection")


async def test_a_peer_that_is_busy_is_not_given_up_and_its_answers_still_come(channels):
    held: list[tuple[Connection, Command]] = []

    def hold(connection, request):
        held.append((connection, request))
        return LATER

    async with serving({HELD: hold}) as server:
        connection = await channels.get(server.address)
        patient = [
            asyncio.create_task(connection.request(HELD, timeout=DEADLINE)) for _ in range(3)
        ]

        for _ in range(3):
            with pytest.raises(RequestTimedOut):
                await connection.request(HELD, timeout=0.3)
        await asyncio.sleep(2 * QUICK.silence)  # long enough for the peer to be given up
        for there, request in held:
            there.reply(request, request.answer(0))

        async with asyncio.timeout(DEADLINE):
            assert [answer.code for answer in await asyncio.gather(*patient)] == [0, 0, 0]
        assert connection.is_open


async def test_a_peer_that_answers_others_is_kept(channels):
    async with serving(HANDLERS) as server:
        connection = await channels.get(server.address)
        held = asyncio.create_task(connection.request(HELD, timeout=0.5))

        async with asyncio.timeout(DEADLINE):
            while not held.done():
                await connection.request(ANSWERED, timeout=DEADLINE)
                await asyncio.sleep(0.01)
            with pytest.raises(RequestTimedOut):
                await held

        assert connection.is_open


async def test_a_peer_that_is_silent_to_threads_is_given_up_as_well(channels):
    async with silent_peer() as (address, _):
        connection = await channels.get(address)
        await until(lambda: connection.last_active < time.monotonic() - 0.3)

        await asyncio.to_thread(connection.was_late_from_thread, 0.3)

        await until(lambda: not connection.is_open, "the end of the connection")
