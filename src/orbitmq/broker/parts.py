"""Everything that the handlers of a broker share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from orbitmq.broker.clients import Channel
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.errors import ConnectionLost
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.base import Header

if TYPE_CHECKING:
    from orbitmq.broker.access import Access
    from orbitmq.broker.background import Background
    from orbitmq.broker.configfile import ConfigFile
    from orbitmq.broker.consumers import ConsumerTable
    from orbitmq.broker.counters import Counters
    from orbitmq.broker.delays import Delays
    from orbitmq.broker.destinations import Destinations
    from orbitmq.broker.disagreements import Disagreements
    from orbitmq.broker.filters import FilterTable
    from orbitmq.broker.groups import GroupTable
    from orbitmq.broker.holding import Holding
    from orbitmq.broker.latencies import Latencies
    from orbitmq.broker.locks import OrderLocks
    from orbitmq.broker.pacing import Pacing
    from orbitmq.broker.producers import ProducerTable
    from orbitmq.broker.progress import ProgressTable
    from orbitmq.broker.registration import Registration
    from orbitmq.broker.replication.roles import Replication
    from orbitmq.broker.settings import BrokerSettings
    from orbitmq.broker.timers import Timers
    from orbitmq.broker.topics import TopicTable
    from orbitmq.broker.transactionchecks import TransactionChecks
    from orbitmq.broker.turns import Turns
    from orbitmq.clock import Clock
    from orbitmq.message.ids import UniqueIds
    from orbitmq.remoting.address import Address
    from orbitmq.remoting.capacity import Capacity
    from orbitmq.store.store import Store


class Parts:
    """The parts of one broker. Complete before any handler is made; all belong to one loop."""

    __slots__ = (
        "_connection_closed",
        "_settings_changed",
        "_stopping",
        "access",
        "address",
        "background",
        "capacity",
        "chance",
        "clock",
        "config_files",
        "consumers",
        "counters",
        "delays",
        "destinations",
        "disagreements",
        "filters",
        "groups",
        "held",
        "latencies",
        "locks",
        "loop",
        "pacing",
        "port",
        "producers",
        "progress",
        "progress_saved",
        "registration",
        "replication",
        "settings",
        "started_at",
        "store",
        "store_host",
        "timers",
        "topics",
        "transactions",
        "turns",
        "unique_ids",
    )

    settings: BrokerSettings
    clock: Clock
    chance: random.Random
    loop: asyncio.AbstractEventLoop
    #: Where clients reach this broker, a number and the real port.
    address: Address
    #: The port that is listened on, which clients may be given another number for.
    port: int
    #: The address, packed, as every stored message carries it.
    store_host: bytes
    #: Epoch seconds.
    started_at: float
    store: Store
    topics: TopicTable
    groups: GroupTable
    consumers: ConsumerTable
    producers: ProducerTable
    disagreements: Disagreements
    progress: ProgressTable
    #: Returns when the disk knows the progress as it is now. Raises `ConfigNotSaved`.
    progress_saved: Callable[[], Awaitable[None]]
    locks: OrderLocks
    filters: FilterTable
    counters: Counters
    latencies: Latencies
    unique_ids: UniqueIds
    turns: Turns
    pacing: Pacing
    held: Holding
    background: Background
    destinations: Destinations
    delays: Delays
    timers: Timers
    transactions: TransactionChecks
    registration: Registration
    #: Who is let in, and what has begun to arrive.
    capacity: Capacity
    replication: Replication
    access: Access
    #: Every file that a table is saved in.
    config_files: list[ConfigFile[Any]]

    def __init__(self) -> None:
        self.config_files = []
        self._settings_changed: list[Callable[[], None]] = []
        self._connection_closed: list[Callable[[Connection], object]] = []
        self._stopping: list[Callable[[], None]] = []

    def change_settings(self, settings: BrokerSettings) -> None:
        """Go on with other settings; who keeps something made of them is told."""
        self.settings = settings
        for call in self._settings_changed:
            call()

    def on_settings_changed(self, call: Callable[[], None]) -> None:
        """Have `call` called after the settings changed."""
        self._settings_changed.append(call)

    def on_connection_closed(self, call: Callable[[Connection], object]) -> None:
        """Have `call` called for every connection that has ended."""
        self._connection_closed.append(call)

    def connection_closed(self, connection: Connection) -> None:
        """Tell everybody that a connection has ended."""
        self.held.forget(connection)
        self.pacing.forget(connection)
        for call in self._connection_closed:
            call(connection)

    def on_stop(self, call: Callable[[], None]) -> None:
        """Have `call` called when the broker stops, while the store is still open.

        By then nothing is accepted any more, and no job or task of the background runs.
        """
        self._stopping.append(call)

    def stopping(self) -> None:
        """Tell everybody that the broker stops."""
        for call in self._stopping:
            call()

    def notify(
        self, channel: Channel, code: int, header: Header | None = None, *, body: Bytes = b""
    ) -> bool:
        """Tell a client something; whether it was still there."""
        if not isinstance(channel, Connection) or not channel.is_open:
            return False
        try:
            channel.notify(code, header, body=body)
        except ConnectionLost:
            return False
        return True
