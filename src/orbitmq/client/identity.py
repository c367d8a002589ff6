"""Who a client is: the id that brokers know it by, and the process that it lives in."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Final

from orbitmq.client.errors import UsedAfterFork
from orbitmq.client.settings import ClientSettings

#: The instance of a client whose id outlives it: progress of broadcasting is kept under that id.
STABLE_INSTANCE: Final = "DEFAULT"

#: Addresses of documentation, which nobody has: they are only looked up in the routing table.
_ELSEWHERE: Final = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9)),
)


def make_client_id(settings: ClientSettings, *, stable: bool = False) -> str:
    """`ip@instance`, and `@unit` where there is one.

    Without an instance of its own a client gets one that no other has; with `stable` it is the
    same after a restart, as broadcasting needs it.
    """
    instance = settings.instance or (STABLE_INSTANCE if stable else unique_instance())
    parts = [settings.client_ip or own_ip(), instance]
    if settings.unit:
        parts.append(settings.unit)
    return "@".join(parts)


def unique_instance() -> str:
    """The process and a number, as Java clients have it.

    Theirs is a time, which two containers, both of process 1, can share; ours is drawn.
    """
    return f"{os.getpid()}#{secrets.randbits(52)}"


def own_ip() -> str:
    """The address of this machine that it would call others from; loopback without a network."""
    for family, elsewhere in _ELSEWHERE:
        try:
            # Connecting a datagram socket sends nothing: it only chooses a local address.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(elsewhere)
                host = str(probe.getsockname()[0])
        except OSError:
            continue
        return f"[{host}]" if family == socket.AF_INET6 else host
    return "127.0.0.1"


class ProcessCheck:
    """Remembers the process that something belongs to, and refuses its use in another.

    That is the one it was made in; or, `from_start`, the one that it is started in. Until then it
    has nothing that a fork would take from it, no thread and no connection: programs make clients
    where modules are imported, and fork their workers afterwards.
    """

    __slots__ = ("_made_in", "_what", "pid")

    def __init__(self, what: str, *, from_start: bool = False) -> None:
        self._what = what
        self._made_in = os.getpid()
        #: The process that it belongs to, once it does. Who is in a hurry compares it first.
        self.pid: int | None = None if from_start else self._made_in

    def begin(self) -> bool:
        """A start: from now on it belongs to this process. Whether it was made in another.

        Raises `UsedAfterFork` if it was started in another.
        """
        self()
        self.pid = os.getpid()
        return self.pid != self._made_in

    def __call__(self) -> None:
        """Raise `UsedAfterFork` in any other process."""
        if self.pid is not None and os.getpid() != self.pid:
            raise UsedAfterFork(self._what, self.pid, os.getpid())

    def owner(self) -> int:
        """The process that it belongs to: this one, where it was just checked."""
        return self._made_in if self.pid is None else self.pid

    @property
    def is_same(self) -> bool:
        return self.pid is None or os.getpid() == self.pid
