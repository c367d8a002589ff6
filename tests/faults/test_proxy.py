"""The bad network does what it is told: without that, scenarios about it would prove nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from tools.chaos.programs import wait_until
from tools.chaos.proxy import FaultyProxy, Weather

DEADLINE = 20.0


class Echo:
    """A server that sends back what it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.taken.append(connection)
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        try:
            while data := connection.recv(65536):
                connection.sendall(data)
        except OSError:
            return
        finally:
            connection.close()

    def close(self) -> None:
        # Also wakes the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)
        for connection in self.taken:
            connection.close()


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo):
    made = FaultyProxy(echo.port).start()
    yield made
    made.close()


def _connect(proxy: FaultyProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=DEADLINE)


def _ask(client: socket.socket, data: bytes = b"hello") -> bytes:
    client.sendall(data)
    return client.recv(65536)


def test_what_a_partition_held_back_comes_when_it_is_over(proxy):
    with _connect(proxy) as client:
        assert _ask(client) == b"hello"
        proxy.set_weather(Weather(is_blocked=True), os.getpid())
        client.sendall(b"later")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(65536)

        proxy.clear()

        client.settimeout(DEADLINE)
        assert client.recv(65536) == b"later"


def test_a_partition_is_for_new_connections_as_well(proxy, echo):
    proxy.set_weather(Weather(is_blocked=True))
    with _connect(proxy) as client:
        client.sendall(b"hello")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(65536)
        assert not echo.taken

        proxy.clear()

        client.settimeout(DEADLINE)
        assert client.recv(65536) == b"hello"


def test_a_cut_is_noticed_by_both_sides(proxy):
    with _connect(proxy) as client:
        assert _ask(client) == b"hello"

        assert proxy.cut() == 1

        with contextlib.suppress(ConnectionError):
            assert client.recv(65536) == b""
        wait_until(lambda: proxy.connections() == 0, "the link is gone", DEADLINE)


def test_of_a_half_open_connection_the_client_hears_nothing(proxy):
    with _connect(proxy) as client:
        assert _ask(client) == b"hello"

        assert proxy.half_open() == 1

        client.sendall(b"is anybody there?")
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(65536)
        with _connect(proxy) as other:
            assert _ask(other) == b"hello"


def test_a_delay_is_kept_and_nothing_overtakes(proxy):
    proxy.set_weather(Weather(delay=0.1))
    sent = b"".join(b"%04d" % number for number in range(50))
    with _connect(proxy) as client:
        for place in range(0, len(sent), 4):
            client.sendall(sent[place : place + 4])
        got = b""
        while len(got) < len(sent):
            got += client.recv(65536)

    assert got == sent
