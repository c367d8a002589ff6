"""What brokers say about themselves, and what they are told in return."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orbitmq.wire.bodies.route import QueueMappingInfo
from orbitmq.wire.bodies.topics import DataVersion, TopicConfig

#: The broker id of a master; slaves have larger ones.
MASTER = 0


class BrokerKey(NamedTuple):
    """What identifies one broker process."""

    cluster: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a broker says about itself."""

    cluster: str
    name: str
    id: int
    address: str
    ha_address: str = ""
    zone: str | None = None
    timeout: float = 120.0  #: seconds without a sign of life after which it is gone
    #: None: a broker before 5.0, which does not know of acting masters.
    acting_master: bool | None = None
    version: DataVersion = field(default_factory=DataVersion)
    topics: Sequence[TopicConfig] = ()
    mappings: Mapping[str, QueueMappingInfo] = field(default_factory=dict)
    filter_servers: tuple[str, ...] | None = None

    @property
    def key(self) -> BrokerKey:
        return BrokerKey(self.cluster, self.address)


class Registered(NamedTuple):
    """What came of a registration. A slave learns where its master is, if that is known."""

    master_address: str | None = None
    ha_address: str | None = None
    #: A living broker elsewhere that claims the same name and id; only one of them is listed.
    rival: str | None = None


class Expired(NamedTuple):
    """A broker that was not heard of for too long."""

    key: BrokerKey
    connection: Hashable
