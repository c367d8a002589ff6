"""What a connection and its owner owe each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes

if TYPE_CHECKING:
    from orbitmq.remoting.connection import Connection

#: An answer: a command, or the pieces of an encoded one.
Answer: TypeAlias = Command | Sequence[Bytes]

#: Changes a request of ours before it is sent: signs it, for instance.
Prepare: TypeAlias = Callable[[Command], Command]


class Owner(Protocol):
    """Whoever a connection belongs to. Called on the loop; must not block."""

    def connection_opened(self, connection: Connection) -> None: ...

    def request_received(self, connection: Connection, request: Command) -> None: ...

    def turn_done(self, connection: Connection) -> None: ...

    def connection_closed(self, connection: Connection) -> None: ...
