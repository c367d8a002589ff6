"""Servers that do the least anybody has to do: `python -m benchmarks.load.floors KIND [SIZE]`.

    constant  cuts the stream into frames and answers each with the same bytes
    echo      sends back what it gets, without looking
    relay     passes on what the first connection of two sends to the second

Prints its port, and ends when its standard input does. The event loop is the one that a broker
chooses: uvloop where it is installed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import cast

from orbitmq.wire.command import Command, encode_command

_READ = 64 * 1024
#: Answers from here on are written one by one, because joining them costs more.
_JOIN_BELOW = 16 * 1024


class _Constant(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = _roomy(transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at = frames = 0
        end = len(data)
        while end - at >= 4:
            size = 4 + int.from_bytes(data[at : at + 4], "big")
            if at + size > end:
                break
            at += size
            frames += 1
        self._rest = data[at:]
        if len(self._answer) < _JOIN_BELOW:
            self._transport.write(self._answer * frames)
            return
        for _ in range(frames):
            self._transport.write(self._answer)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = _roomy(transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _Relay(asyncio.Protocol):
    """The first connection of a pair; what it sends before there is a second one waits."""

    def __init__(self, alone: list[_Relay]) -> None:
        self._alone = alone
        self._other: asyncio.Transport | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._alone:
            self._alone.pop().pair(_roomy(transport))
        else:
            self._alone.append(self)

    def pair(self, other: asyncio.Transport) -> None:
        self._other = other
        other.write(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        else:
            self._other.write(data)


def _roomy(transport: asyncio.BaseTransport) -> asyncio.Transport:
    """With reads as large as the broker's."""
    if hasattr(transport, "max_size"):
        transport.max_size = _READ
    # uvloop's transports are of no class of asyncio's.
    return cast("asyncio.Transport", transport)


async def _serve(make: Callable[[], asyncio.Protocol]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, "127.0.0.1", 0)
    ended = asyncio.Event()
    # Nothing is ever said on it.
    loop.add_reader(0, ended.set)
    print(server.sockets[0].getsockname()[1], flush=True)
    await ended.wait()


def main(kind: str, size: int = 0) -> None:
    # As long as the answer that it stands for.
    answer = encode_command(Command(0, 1, 1, body=bytes(size), remark="x" * 150))
    alone: list[_Relay] = []
    makers: dict[str, Callable[[], asyncio.Protocol]] = {
        "constant": lambda: _Constant(answer),
        "echo": _Echo,
        "relay": lambda: _Relay(alone),
    }
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(makers[kind]))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415  # an extra
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
