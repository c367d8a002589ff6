"""The open connections of a producer to the masters of brokers, by the name of the broker.

A connection that is known here is looked up without asking routes or engine: that is what most
sends do. Whatever makes it doubtful empties the table, and it is found again by the slower way.

`connections` and `sides` stay the same objects: senders may keep them. Threads only read them.
"""

from __future__ import annotations

from contextlib import suppress

from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.producer.brokerversions import BrokerVersions
from orbitmq.client.producer.drafts import Draft
from orbitmq.client.producer.faults import Faults
from orbitmq.client.queue import Queue
from orbitmq.client.topicroute import MASTER
from orbitmq.remoting.address import Address
from orbitmq.remoting.blocking import BlockingSide
from orbitmq.remoting.connection import Connection


class BrokerLinks:
    """Belongs to the loop of the engine."""

    def __init__(self, engine: Engine, faults: Faults, *, for_threads: bool) -> None:
        """`for_threads` lets threads other than the loop's write to connections and read them."""
        self._engine = engine
        self._faults = faults
        self._for_threads = for_threads
        self.connections: dict[str, Connection] = {}
        #: What threads use of a connection.
        self.sides: dict[str, BlockingSide] = {}
        self.versions = BrokerVersions(engine)
        self._end_watch = engine.on_connected(self._reached)

    def close(self) -> None:
        self._end_watch()
        self.forget()

    def forget(self) -> None:
        """Masters may have changed; connections that are still right are found again."""
        self.connections.clear()
        self.sides.clear()

    def address(self, queue: Queue) -> Address:
        """Of the broker to which a queue is written. Raises `BrokerUnavailable`."""
        return self._engine.routes.master(queue.broker)

    async def connected(self, queue: Queue, timeout: float) -> Connection:  # noqa: ASYNC109
        """Raises `RemotingError`, or `BrokerUnavailable`."""
        connection = await self._engine.connection(self.address(queue), timeout)
        self.connections[queue.broker] = connection
        if self._for_threads:
            self.sides[queue.broker] = connection.for_threads()
        return connection

    def is_open(self, broker: str) -> bool:
        """Whether something can be sent to a broker at once."""
        connection = self.connections.get(broker)
        return connection is not None and connection.is_open

    def went_away(self, queue: Queue, connection: Connection) -> None:
        """Use another connection for what follows, unless there is one already."""
        broker = queue.broker
        if self.connections.get(broker) is connection:
            del self.connections[broker]
            self.sides.pop(broker, None)
        with suppress(BrokerUnavailable):
            where = self.address(queue)
            if self._engine.open_connection(where) is connection:
                self._engine.went_away(where, connection)

    def is_unsure_of(self, queue: Queue, draft: Draft) -> bool:
        """Whether the loop has to find out, or to say, that a broker cannot do what is wished."""
        return draft.wish is not None and not self.versions.keeps_times(queue.broker)

    async def check_times(self, draft: Draft, queue: Queue, within: float) -> None:
        """Raises `TimesUnsupported` where the broker would deliver at once what is for later."""
        if draft.wish is not None and not self.versions.keeps_times(queue.broker):
            await self.versions.check_times(queue.broker, draft.wish, within)

    def _reached(self, where: Address) -> None:
        """A broker is there, or there again: no reason to avoid it any longer."""
        if self._faults.is_empty:
            return
        for broker, addresses in self._engine.routes.brokers.items():
            if addresses.get(MASTER) == where:
                self._faults.forgive(broker)
