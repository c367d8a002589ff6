"""A client at the other end of a connection."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from orbitmq.clock import milliseconds
from orbitmq.wire.bodies.membership import Connection, LanguageName, ProducerInfo

#: A connection, as far as the tables care: something to tell one from another.
Channel = Hashable
#: Characters of a client id; those in use have some dozens.
LONGEST_ID = 4_096

#: How long a client may be silent before it counts as gone.
CLIENT_LIFE = 120.0


@dataclass(frozen=True, slots=True)
class Client:
    """Who a connection says it is."""

    id: str
    language: LanguageName = LanguageName.OTHER
    version: int = 0
    #: `host:port` of the connection.
    address: str = ""

    def connection(self) -> Connection:
        """An entry of a connection list."""
        return Connection(
            client_addr=self.address,
            client_id=self.id,
            language=self.language,
            version=self.version,
        )

    def producer_info(self, heard_at: float) -> ProducerInfo:
        """An entry of the list of all producers; `heard_at` is a time of day."""
        return ProducerInfo(
            client_id=self.id,
            language=self.language,
            last_update_timestamp=milliseconds(heard_at),
            remote_ip=self.address,
            version=self.version,
        )
