"""How much all connections of a process may take together, at whichever door they came in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from orbitmq.remoting.settings import ServerSettings
from orbitmq.remoting.unfinished import UnfinishedFrames


class Capacity:
    """Counts who is in, and has the memory for what has begun to arrive.

    Servers that share one have one limit of connections. A host may have a part of them only, so
    that one machine cannot lock out all others.
    """

    def __init__(self, settings: ServerSettings, monotonic: Callable[[], float]) -> None:
        self._most = settings.connections
        self._most_of_a_host = min(settings.host_connections, settings.connections)
        self._guests: dict[Hashable, str] = {}
        self._hosts: Counter[str] = Counter()
        self.frames = UnfinishedFrames(
            settings.unfinished_bytes,
            patience=settings.crowded_frame,
            rate=settings.frame_rate,
            monotonic=monotonic,
        )
        #: Connections that were not let in, or that came to nothing: for lack of room, or because
        #: they spoke another way than is wanted here, or not at all.
        self.refused = 0

    @property
    def connections(self) -> int:
        """How many are in."""
        return len(self._guests)

    def enter(self, guest: Hashable, host: str) -> str | None:
        """Let somebody in, who has to `leave` later; or why not."""
        if len(self._guests) >= self._most:
            return f"{self._most} connections are open already (server.connections)"
        if self._hosts.get(host, 0) >= self._most_of_a_host:
            return (
                f"{self._most_of_a_host} connections of its host are open already "
                "(server.host_connections)"
            )
        self._guests[guest] = host
        self._hosts[host] += 1
        return None

    def leave(self, guest: Hashable) -> None:
        """Make room for somebody else. Idempotent."""
        host = self._guests.pop(guest, None)
        if host is None:
            return
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]
