"""What is in the process that is nothing but clusters.

Brokers are as in `orbitmq.testing`: small files and a clock that can be moved on are all that
differs from those of a user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from orbitmq.broker.settings import BrokerSettings
from orbitmq.testing import EmbeddedCluster


def adjusted(settings: BrokerSettings, changes: Mapping[str, Any]) -> BrokerSettings:
    """Settings of a broker with some of them changed; those of a part by a mapping of their own."""
    return replace(
        settings,
        **{
            name: replace(getattr(settings, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        },
    )


class HostedCluster(EmbeddedCluster):
    """A cluster in the other process, which is asked there; its answers can travel."""

    def __init__(self, brokers: int, changes: Mapping[str, Any]) -> None:
        super().__init__(brokers=brokers, adjust=partial(adjusted, changes=changes))

    def begin(self) -> tuple[str, tuple[str, ...]]:
        self.start()
        return self.name_server, self.broker_addresses

    def records(self, topic: str) -> list[bytes]:
        return [message.encode() for message in self.messages(topic)]
