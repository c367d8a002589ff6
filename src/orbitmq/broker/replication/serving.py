"""Serving slaves: a master listens on a port of its own and sends its log to whoever asks.

Anybody who reaches the port gets every message: it is for the machines of the cluster only.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from orbitmq.broker.parts import Parts
from orbitmq.broker.replication.copies import Copies
from orbitmq.broker.replication.replica import Replica
from orbitmq.broker.settings import HA_DISTANCE
from orbitmq.remoting.address import Address, socket_address
from orbitmq.remoting.errors import ListenFailed
from orbitmq.store.arrivals import Arrival

log = logging.getLogger(__name__)

_BACKLOG = 16
_ACCEPT_PAUSE = 1.0
#: Looks at silent slaves so many times within the time of a heartbeat.
_LOOKS = 5


class Serving:
    """The slaves of a master. A job of the background; listens from its construction on."""

    def __init__(self, parts: Parts) -> None:
        """Raises `ListenFailed`."""
        self._parts = parts
        self._settings = settings = parts.settings.replication
        self._mirroring = parts.store.mirroring
        self._listener = _listen(parts)
        self.address = Address(parts.address.host, self._listener.getsockname()[1])
        self.replicas: set[Replica] = set()
        self.copies: Copies | None = None
        if settings.in_sync_replicas > 1:
            self.copies = Copies(
                settings.in_sync_replicas - 1,
                settings.copy_timeout,
                lambda: self.replicas,
                parts.loop,
            )
            parts.turns.wait_for_copies(self.copies.when_copied)
        parts.background.every(settings.heartbeat / _LOOKS, self._look)

    @property
    def in_sync(self) -> int:
        """How many slaves are close behind."""
        return sum(1 for replica in self.replicas if replica.is_in_sync)

    def arrived(self, _: Sequence[Arrival]) -> None:
        """Something new can be read, and so sent."""
        for replica in self.replicas:
            replica.wake()

    # The job.

    def begin(self) -> None:
        if self._listener.fileno() >= 0:
            self._parts.loop.add_reader(self._listener, self._accept)

    def end(self) -> None:
        self._parts.loop.remove_reader(self._listener)
        self._listener.close()
        for replica in tuple(self.replicas):
            replica.close("this broker stops")
        if self.copies is not None:
            self.copies.end()

    # Slaves.

    def _accept(self) -> None:
        try:
            accepted, name = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No more file handles, most likely: somebody else has to give one back first.
            log.warning("a slave could not be let in: %s", error)
            self._parts.loop.remove_reader(self._listener)
            self._parts.loop.call_later(_ACCEPT_PAUSE, self.begin)
            return
        address = socket_address(name)
        if len(self.replicas) >= self._settings.replicas:
            log.warning(
                "slave turned away: %d are connected", len(self.replicas), extra={"slave": address}
            )
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replicas.add(
            Replica(
                accepted,
                address,
                self._mirroring,
                self._settings,
                self._parts.loop,
                self._parts.clock,
                reported=self._reported,
                closed=self.replicas.discard,
            )
        )

    def _reported(self, _: Replica) -> None:
        if self.copies is not None:
            self.copies.acknowledged()

    def _look(self) -> None:
        now = self._parts.clock.monotonic()
        for replica in tuple(self.replicas):
            replica.look(now)


def _listen(parts: Parts) -> socket.socket:
    host, port = parts.settings.server.host, parts.settings.replication.port
    if port is None:
        port = parts.port + HA_DISTANCE
    address = Address(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ListenFailed(
            address, f"{error} (slaves are served there; broker.replication.port chooses it)"
        ) from error
    listener.setblocking(False)
    return listener
