"""What is sent arrives, whole and in order, with few writes and without copies of large bodies."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.remoting.connection import JOIN_BELOW, Outgoing, gathered

sizes = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([JOIN_BELOW - 1, JOIN_BELOW, 3 * JOIN_BELOW])),
    max_size=12,
)


def _pieces(lengths: list[int]) -> list[bytes]:
    return [bytes([number % 251]) * length for number, length in enumerate(lengths)]


@settings(deadline=None)
@given(lengths=sizes)
def test_gathering_changes_no_byte_and_no_large_piece(lengths):
    pieces = _pieces(lengths)

    result = gathered(pieces)

    assert b"".join(result) == b"".join(pieces)
    large = [piece for piece in pieces if len(piece) >= JOIN_BELOW]
    assert all(any(each is piece for each in result) for piece in large)
    # No two small ones stand side by side.
    small = [len(each) < JOIN_BELOW for each in result]
    assert not any(left and right for left, right in itertools.pairwise(small))


@pytest.mark.parametrize("receive_buffer", [4096, 1 << 20])
async def test_large_bodies_arrive_whole_whatever_the_socket_takes_at_once(receive_buffer):
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, receive_buffer)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    lengths = [10, 300_000, 20, 30, 70_000, 5, 1_000_000, 1]
    pieces = _pieces(lengths)
    out = Outgoing(transport)

    for _ in range(3):
        out.add([memoryview(piece) for piece in pieces])
        out.flush()
    async with asyncio.timeout(20):
        arrived = await reader.readexactly(3 * sum(lengths))

    assert arrived == 3 * b"".join(pieces)
    transport.abort()
    writer.close()
    await writer.wait_closed()
