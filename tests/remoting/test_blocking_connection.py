"""A blocking connection: answers of any size, however their bytes come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from orbitmq.remoting.blocking import BlockingConnection
from orbitmq.remoting.settings import Address, ConnectionLost
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, encode_command

DEADLINE = 30.0
BUFFER = 64 * 1024
#: Around the size up to which answers are cut out of the buffer.
SIZES = (0, 1, 100, BUFFER - 200, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, 7, 1_000_000, 0, 5)


def answer(opaque: int, size: int) -> bytes:
    body = (b"%d," % opaque * size)[:size]
    request = Command.request(RequestCode.PULL_MESSAGE, opaque=opaque)
    return encode_command(request.answer(0, body=body))


@contextmanager
def sending(pieces: Sequence[bytes]) -> Iterator[BlockingConnection]:
    """A connection to somebody who sends these bytes, in these pieces, and then ends."""

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(DEADLINE)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                peer.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        server = threading.Thread(target=serve)
        server.start()
        connection = BlockingConnection(Address(*listener.getsockname()), timeout=DEADLINE)
        connection.connect(None, DEADLINE)
        try:
            yield connection
        finally:
            connection.close()
            server.join(DEADLINE)


@pytest.mark.parametrize("step", [None, 997, BUFFER, BUFFER + 3])
def test_answers_of_any_size_come_whole_and_in_order(step):
    answers = [answer(number, size) for number, size in enumerate(SIZES, 1)]
    stream = b"".join(answers)
    pieces = (
        answers if step is None else [stream[at : at + step] for at in range(0, len(stream), step)]
    )

    with sending(pieces) as connection:
        came = [connection.receive() for _ in SIZES]

    assert [each.opaque for each in came] == list(range(1, len(SIZES) + 1))
    assert [bytes(each.body) for each in came] == [
        (b"%d," % number * size)[:size] for number, size in enumerate(SIZES, 1)
    ]


def test_somebody_who_speaks_http_is_told_apart():
    with (
        sending([b"HTTP/1.1 400 Bad Request\r\n\r\n"]) as connection,
        pytest.raises(ConnectionLost, match="this speaks HTTP"),
    ):
        connection.receive()


@pytest.mark.parametrize("size", [10, 2 * BUFFER])
def test_an_answer_that_ends_early_is_a_lost_connection(size):
    with sending([answer(1, size)[:-1]]) as connection:
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            connection.receive()

        assert not connection.is_open


def test_bodies_are_received_where_the_caller_wants_them():
    answers = [answer(number, size) for number, size in enumerate(SIZES, 1)]
    block = memoryview(bytearray(sum(SIZES)))
    at = 0

    def room(size):
        nonlocal at
        at += size
        return block[at - size : at]

    with sending([b"".join(answers)]) as connection:
        connection.unanswered = len(answers)
        found = [connection.receive(room) for _ in answers]

    assert [len(each.body) for each in found] == list(SIZES)
    assert bytes(block) == b"".join(
        bytes(each)[len(each) - size :] for each, size in zip(answers, SIZES, strict=True)
    )
