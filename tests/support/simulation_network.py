"""A network inside a simulation: connections with delays, cuts, silence and torn writes.

What TCP promises holds: the bytes of a connection arrive once and in order, or the connection
ends. Everything that it does not promise is left to chance: how long bytes are under way, how they
are cut into pieces, how much of what was written arrives before a connection ends, whether the
other side ever hears of the end, and in which order things on two connections happen. So a request
can be carried out though its sender was told that the connection is lost, and be sent again: that
is how frames are lost, doubled and overtaken in real networks.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from orbitmq.remoting.settings import Address, ListenFailed
from tests.support.simulation_loop import Machine, VirtualLoop, current_machine

#: How long a connection is waited for where nobody answers.
SILENCE = 60.0
_INSTANT = 1e-8


@dataclass(slots=True)
class Weather:
    """How the network is."""

    least_delay: float = 0.0002
    most_delay: float = 0.003
    #: The share of writes that take much longer, up to `slow_delay`.
    slow_share: float = 0.02
    slow_delay: float = 0.3
    #: The share of writes that arrive in several pieces.
    torn_share: float = 0.1
    #: The share of writes that end the connection.
    cut_share: float = 0.0


class Network:
    """All machines, who listens where, and who cannot hear whom."""

    def __init__(self, loop: VirtualLoop, dice: random.Random, note: Callable[..., None]) -> None:
        self.loop = loop
        self.dice = dice
        self.note = note
        self.weather = Weather()
        self._listeners: dict[Address, SimulatedListener] = {}
        self._ends: dict[_End, None] = {}
        self._ports = iter(range(40_000, 10_000_000))
        self._numbers = iter(range(1, 10_000_000))
        self._apart: set[frozenset[str]] = set()
        self._machines: dict[str, list[Machine]] = {}
        self._nowhere = contextvars.copy_context()
        loop.network = self

    # ---- faults

    def separate(self, one: str, other: str) -> None:
        """From now on these hosts do not hear each other; what is under way waits."""
        self._apart.add(frozenset((one, other)))

    def join(self, one: str, other: str) -> None:
        """They hear each other again: what waited arrives."""
        self._apart.discard(frozenset((one, other)))
        for end in tuple(self._ends):
            end.deliver_held()

    def are_apart(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._apart

    def connections(self) -> list[_End]:
        """One end of each connection."""
        return [end for end in self._ends if end.is_first]

    def silence(self, machine: Machine, *, abruptly: bool) -> None:
        """A machine is gone. Its peers are told by the system, or (`abruptly`) by nobody."""
        for end in tuple(self._ends):
            if end.machine is machine:
                end.vanish(tells=not abruptly)
        for address, listener in tuple(self._listeners.items()):
            if listener.machine is machine:
                del self._listeners[address]

    # ---- what the loop does

    async def connect(self, protocol: asyncio.Protocol, host: str, port: int) -> asyncio.Transport:
        machine = current_machine()
        assert machine is not None, "only machines have a network"
        await asyncio.sleep(self.delay())
        if self.are_apart(machine.host, host):
            await asyncio.sleep(SILENCE)
            raise OSError(errno.ETIMEDOUT, "nobody answers")
        listener = self._listeners.get(Address(host, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        number = next(self._numbers)
        here = Address(machine.host, next(self._ports))
        near = _End(self, machine, here, listener.address, number, is_first=True)
        far = _End(self, listener.machine, listener.address, here, number, is_first=False)
        near.peer, far.peer = far, near
        self._ends[near] = self._ends[far] = None
        near.open(protocol)
        self.at(self.loop.time() + self.delay(), listener.arrive, far)
        self.note("connect", machine.name, listener.machine.name, number)
        return near

    def listen(self, listener: SimulatedListener, address: Address) -> Address:
        if not address.port:
            address = Address(address.host, next(self._ports))
        if address in self._listeners:
            raise ListenFailed(address, "Address already in use")
        self._listeners[address] = listener
        return address

    def listen_no_more(self, listener: SimulatedListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Have something happen on the way: also when whoever caused it is gone by then."""
        self.loop.call_at(when, call, *args, context=self._nowhere.copy())

    def is_up(self, host: str) -> bool:
        """Whether a machine lives there."""
        return any(machine.is_alive for machine in self._machines.get(host, ()))

    def add(self, machine: Machine) -> None:
        self._machines.setdefault(machine.host, []).append(machine)

    def forget(self, end: _End) -> None:
        self._ends.pop(end, None)

    def delay(self) -> float:
        weather = self.weather
        if self.dice.random() < weather.slow_share:
            return self.dice.uniform(weather.most_delay, weather.slow_delay)
        return self.dice.uniform(weather.least_delay, weather.most_delay)


class SimulatedListener:
    """Stands in the place of `remoting.arrivals.Listener`."""

    def __init__(self, arrived: Callable[[Any], None], *, pause: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert loop.network is not None
        machine = current_machine()
        assert machine is not None
        self._network = loop.network
        self._arrived = arrived
        self.machine = machine
        self.address = Address("", 0)

    async def listen(self, address: Address, backlog: int) -> Address:
        self.address = self._network.listen(self, address)
        return self.address

    def close(self) -> None:
        self._network.listen_no_more(self)

    def arrive(self, end: _End) -> None:
        if self.machine.is_alive:
            self.machine.context.run(self._arrived, end)


class _End(asyncio.Transport):
    """One end of a connection: what a socket and its transport are elsewhere."""

    def __init__(
        self,
        network: Network,
        machine: Machine,
        local: Address,
        remote: Address,
        number: int,
        *,
        is_first: bool,
    ) -> None:
        super().__init__()
        self.machine = machine
        self.number = number
        self.is_first = is_first
        self.peer: _End
        self._network = network
        self._loop = network.loop
        self._local = local
        self._remote = remote
        self._protocol: asyncio.Protocol | None = None
        self._is_closing = False
        self.is_lost = False
        self._is_paused = False
        #: What has arrived and was not read yet: data, or b"" for the end.
        self._arrived: deque[bytes | None] = deque()
        #: What was sent while the other side was out of hearing.
        self._held: deque[bytes | None] = deque()
        self.latest = 0.0

    # ---- as an accepted socket

    def open(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        self._protocol = protocol
        protocol.connection_made(self)
        self._read()
        return self

    def setsockopt(self, *_: Any) -> None:
        pass

    def setblocking(self, flag: bool) -> None:
        pass

    def getpeername(self) -> tuple[str, int]:
        return self._remote.host, self._remote.port

    # ---- as a transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": tuple(self._remote), "sockname": tuple(self._local)}.get(name, default)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._soon(self._read)

    def is_reading(self) -> bool:
        return not self._is_paused

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        network, dice = self._network, self._network.dice
        data = bytes(data)
        weather = network.weather
        if weather.cut_share and dice.random() < weather.cut_share:
            self._send(data[: dice.randrange(len(data) + 1)])
            network.note("cut", self.machine.name, self.peer.machine.name, self.number)
            self.cut()
        elif dice.random() < weather.torn_share:
            at = dice.randrange(len(data) + 1)
            self._send(data[:at])
            self._send(data[at:])
        else:
            self._send(data)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self._lose(None)

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._lose(None)
            self.peer.hear_of_end(self._network.delay())

    # ---- what happens to it

    def cut(self) -> None:
        """The connection ends; each side hears of it at another time."""
        for end in (self, self.peer):
            end.hear_of_end(self._network.delay())

    def vanish(self, *, tells: bool) -> None:
        """This side is gone."""
        self._is_closing = self.is_lost = True
        self._network.forget(self)
        if tells:
            self.peer.hear_of_end(self._network.delay())

    def hear_of_end(self, delay: float) -> None:
        """This side learns that the other one is gone, unless nothing gets through."""
        if self._network.are_apart(self.machine.host, self.peer.machine.host):
            return
        self._network.at(self._loop.time() + delay, self._reset)

    def deliver_held(self) -> None:
        if self.is_lost or self._network.are_apart(self.machine.host, self.peer.machine.host):
            return
        if self.peer.is_lost:
            self.hear_of_end(self._network.delay())
        while self._held:
            self._send(self._held.popleft())

    def _send(self, data: bytes | None) -> None:
        if data == b"":
            return
        if self._network.are_apart(self.machine.host, self.peer.machine.host):
            self._held.append(data)
            return
        peer = self.peer
        # Two at the same instant would come in any order.
        peer.latest = max(peer.latest + _INSTANT, self._loop.time() + self._network.delay())
        self._network.at(peer.latest, peer.arrive, data)

    def arrive(self, data: bytes | None) -> None:
        if self.is_lost:
            # Nobody is there any more. If the host is up, it says so.
            if data is not None and self._network.is_up(self.machine.host):
                self.peer.hear_of_end(self._network.delay())
            return
        self._arrived.append(data)
        self.machine.context.run(self._read)

    def _read(self) -> None:
        while self._arrived and not self._is_paused and not self.is_lost:
            if self._protocol is None:
                return  # not accepted yet
            data = self._arrived.popleft()
            if data is None:
                self._protocol.eof_received()
                self.close()
                return
            if self._is_closing:
                return
            self._protocol.data_received(data)

    def _reset(self) -> None:
        self._is_closing = True
        self._lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._network.forget(self)
            self._soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(call, *args, context=self.machine.context)


async def speaks_no_tls(accepted: _End) -> bool:
    """Stands in the place of `remoting.arrivals.speaks_tls`."""
    return False
