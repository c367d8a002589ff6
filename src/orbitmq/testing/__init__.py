"""An embedded cluster and pytest fixtures for tests of programs that use OrbitMQ.

with EmbeddedCluster() as cluster:
    cluster.create_topic("orders")
    run_my_program(name_server=cluster.name_server)
    assert [message.body for message in cluster.messages("orders")] == [b"paid"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orbitmq.testing.background import EmbeddedCluster
    from orbitmq.testing.clock import MovableClock
    from orbitmq.testing.embedded import AsyncEmbeddedCluster

__all__ = ["AsyncEmbeddedCluster", "EmbeddedCluster", "MovableClock"]

_HOMES = {
    "AsyncEmbeddedCluster": "orbitmq.testing.embedded",
    "EmbeddedCluster": "orbitmq.testing.background",
    "MovableClock": "orbitmq.testing.clock",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, then: pytest loads `plugin` in every run, and few need a broker."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
