"""How a cluster is reached, as a value that travels: a driver makes it, its workers use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from orbitmq.client.settings import ClientSettings
from orbitmq.remoting.tls import ClientTls
from orbitmq.wire.acl import Credentials

__all__ = ["ClientTls", "Credentials", "RangeAccess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeAccess:
    """The name servers of a cluster, and what it asks of its clients. Equal ones share sockets."""

    name_servers: tuple[str, ...]
    credentials: Credentials | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    timeout: float = 3.0  #: seconds without a byte after which a request or answer is given up

    def settings(self, *, instance: str | None = None) -> ClientSettings:
        """The same for an engine."""
        return ClientSettings(
            name_servers=self.name_servers,
            credentials=self.credentials,
            tls=None if self.tls is None else self.tls.context(),
            instance=instance,
            request_timeout=self.timeout,
            # Whoever ends the process of a planner does not wait longer.
            stop_timeout=1.0,
        )
