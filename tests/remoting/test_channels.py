"""One connection per peer: shared, made again after a loss, and not too eagerly."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.remoting.channels import Channels, pause_after
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler
from orbitmq.remoting.settings import (
    Address,
    ChannelSettings,
    ConnectFailed,
    ConnectionLost,
    ServerSettings,
)
from orbitmq.wire.command import Command
from tests.support.remoting import DEADLINE, serving, until

CODE = 10
HOLD = 11
QUICK = ChannelSettings(first_pause=0.02, longest_pause=0.1, settled=0.0)


def _fine(_: Connection, request: Command) -> Command:
    return request.answer(0, body=request.body)


HANDLERS: dict[int, Handler] = {CODE: _fine, HOLD: lambda _, __: LATER}


def _free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


async def test_callers_share_one_connection_and_one_attempt():
    channels = Channels()
    async with serving(HANDLERS) as server:
        answers = await asyncio.gather(
            *(channels.request(server.address, CODE, body=b"%d" % n) for n in range(50))
        )
        again = await channels.get(server.address)

        assert [bytes(answer.body) for answer in answers] == [b"%d" % n for n in range(50)]
        assert len(server.connections) == 1
        assert again is await channels.get(server.address)
        await channels.close()


async def test_a_restarted_peer_is_tried_again_within_three_seconds_and_reached():
    channels = Channels(chance=random.Random(1))
    async with serving(HANDLERS) as server:
        address = server.address
        await channels.request(address, CODE)
        lost = asyncio.create_task(channels.request(address, HOLD, timeout=DEADLINE))
        await until(lambda: any(each.open_requests for each in server.connections))
        await server.stop(grace=0.0)
        with pytest.raises(ConnectionLost):
            await lost
    for _ in range(5):
        with pytest.raises(ConnectFailed):
            await channels.request(address, CODE, timeout=0.5)

    async with serving(HANDLERS, ServerSettings(port=address.port)):
        assert channels.retry_in(address) < 3.0
        answer = await channels.request(address, CODE, body=b"back", timeout=DEADLINE)

        assert bytes(answer.body) == b"back"
        await channels.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refusal_is_told_in_the_words_of_the_system(host):
    address = Address(host, _free_address().port)
    channels = Channels()

    with pytest.raises(ConnectFailed) as refused:
        await channels.get(address)

    assert str(refused.value) == f"cannot connect to {address}: Connection refused"
    await channels.close()


async def test_attempts_after_failures_wait_and_say_for_how_long():
    channels = Channels(ChannelSettings(first_pause=500.0, longest_pause=2000.0, jitter=0.0))
    address = _free_address()
    with pytest.raises(ConnectFailed) as first:
        await channels.get(address)

    # The pause is longer than the caller would wait: it is told at once.
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(ConnectFailed) as second:
            await channels.get(address, timeout=1.0)

    assert 400.0 < first.value.retry_in <= 500.0
    assert 400.0 < second.value.retry_in <= channels.retry_in(address) + 50.0
    # Whoever reads the text may have ended by then.
    assert "attempt" not in f"{first.value} {second.value}"
    await channels.close()


async def test_a_peer_that_accepts_and_hangs_up_counts_as_failing():
    settings = ChannelSettings(first_pause=500.0, longest_pause=500.0, settled=100.0)
    channels = Channels(settings)
    async with serving(HANDLERS, ServerSettings(connections=1)) as server:
        keeper = await Channels().get(server.address)
        await keeper.request(CODE)
        with pytest.raises(ConnectionLost):
            await channels.request(server.address, CODE, timeout=DEADLINE)

        assert channels.retry_in(server.address) > 100.0
        with pytest.raises(ConnectFailed):
            await channels.request(server.address, CODE, timeout=0.5)
        keeper.close()
        await channels.close()


async def test_closing_fails_what_waits_and_refuses_what_comes():
    channels = Channels()
    async with serving(HANDLERS) as server:
        waiting = asyncio.create_task(channels.request(server.address, HOLD, timeout=DEADLINE))
        await until(lambda: any(each.open_requests for each in server.connections))
        await channels.close()

        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectFailed, match="closed"):
            await channels.get(server.address)


@settings(deadline=None)
@given(failures=st.integers(1, 10_000), seed=st.integers(0, 1000), jitter=st.floats(0, 0.99))
def test_pauses_grow_up_to_the_longest_and_chance_only_shortens_them(failures, seed, jitter):
    shaken = ChannelSettings(first_pause=0.1, longest_pause=2.0, jitter=jitter)
    steady = ChannelSettings(first_pause=0.1, longest_pause=2.0, jitter=0.0)

    pause = pause_after(failures, shaken, random.Random(seed))
    full = pause_after(failures, steady, random.Random(seed))

    assert full == min(2.0, 0.1 * 2 ** min(failures - 1, 20))
    assert full * (1 - jitter) <= pause <= full


async def test_a_retired_connection_still_answers_while_a_new_one_takes_over():
    release = asyncio.Event()

    async def held(_, request):
        await release.wait()
        return request.answer(0, body=b"late")

    channels = Channels(QUICK)
    async with serving({CODE: _fine, HOLD: held}) as server:
        first = await channels.get(server.address)
        waiting = asyncio.create_task(first.request(HOLD, timeout=DEADLINE))
        await until(lambda: any(each.open_requests for each in server.connections))

        channels.retire(server.address, first)
        second = await channels.get(server.address)
        channels.retire(server.address, first)

        assert second is not first
        assert second is await channels.get(server.address)
        release.set()
        assert bytes((await waiting).body) == b"late"
        await channels.close()
        assert not first.is_open
