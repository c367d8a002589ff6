"""An embedded cluster and pytest fixtures for tests of programs that use OrbitMQ.

with EmbeddedCluster() as cluster:
    cluster.create_topic("orders")
    run_my_program(name_server=cluster.name_server)
    assert [message.body for message in cluster.messages("orders")] == [b"paid"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orbitmq.errors import OrbitError, install_command

if TYPE_CHECKING:
    from orbitmq.testing.cluster import AsyncEmbeddedCluster, EmbeddedCluster, MovableClock

__all__ = ["AsyncEmbeddedCluster", "BrokerMissing", "EmbeddedCluster", "MovableClock"]

_HOMES = {
    "AsyncEmbeddedCluster": "orbitmq.testing.cluster",
    "EmbeddedCluster": "orbitmq.testing.cluster",
    "MovableClock": "orbitmq.testing.cluster",
}


#: Packages that a broker needs and a client does not.
_OF_BROKERS = ("numpy", "pyarrow", "lark")


class BrokerMissing(OrbitError):
    """An embedded cluster needs packages that are not installed."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"an embedded cluster is a real broker, which needs {package}, which is not installed; "
            f"{install_command('broker')}"
        )


def __getattr__(name: str) -> object:
    """Import on first use: pytest loads `plugin` in every run, and few runs need a broker."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OF_BROKERS:
            raise
        raise BrokerMissing(package) from error
