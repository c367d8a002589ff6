"""The recording proxy changes nothing on the way and keeps whole frames."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recording_proxy import FrameCutter, RecordingProxy

DEADLINE = 10.0


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@given(payloads=st.lists(st.binary(max_size=40), max_size=8), data=st.data())
def test_frames_come_out_whole_however_the_bytes_are_cut(payloads, data):
    stream = b"".join(frame(payload) for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))

    cutter = FrameCutter()
    frames = [
        each
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for each in cutter.feed(stream[start:end])
    ]

    assert frames == [frame(payload) for payload in payloads]


def test_a_frame_that_is_not_complete_is_not_kept():
    assert FrameCutter().feed(frame(b"whole") + frame(b"torn")[:-1]) == [frame(b"whole")]


def test_both_directions_are_relayed_and_kept_apart():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=answer_once, args=(server, frame(b"answer")))
        answering.start()
        with (
            RecordingProxy.running(("127.0.0.1", 0), server.getsockname()) as proxy,
            socket.create_connection(proxy.listen, timeout=DEADLINE) as client,
        ):
            client.sendall(frame(b"question"))

            received = client.recv(100)
            kept = proxy.recording.take()
        answering.join(DEADLINE)

    assert received == frame(b"answer")
    assert kept == ([frame(b"question")], [frame(b"answer")])


def test_taking_a_recording_empties_it():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        RecordingProxy.running(("127.0.0.1", 0), server.getsockname()) as proxy,
    ):
        proxy.recording.add([b"frame"], to_server=True)

        assert proxy.recording.take() == ([b"frame"], [])
        assert proxy.recording.take() == ([], [])


def test_an_address_that_is_taken_is_an_error_at_the_start():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="address already in use"),
        RecordingProxy.running(taken.getsockname(), ("127.0.0.1", 1)),
    ):
        pass


def answer_once(server: socket.socket, answer: bytes) -> None:
    server.settimeout(DEADLINE)
    connection, _ = server.accept()
    with connection:
        connection.recv(100)
        connection.sendall(answer)
