"""Progress at the brokers: where members of a group hand their queues to each other.

Positions belong to the master of a queue. A slave has copies, some seconds old, and the next copy
overwrites whatever it was told meanwhile. While no master can be reached a slave is asked and told
all the same, so that members who meet there know of each other; but what it says counts less:

* a position that it has may be behind, which repeats messages and loses none: it is believed;
* that it has none, or one at 0 (which brokers also say of young queues without progress), may only
  mean that it has not heard yet: nobody knows, and the queue is begun later;
* that it took a report does not put the position by: it is reported again until a master took it.

The first positions of a group in a topic need care. Apache's brokers keep them in one table for
both, which they make when the first report comes; of two first reports at the same time each finds
no table and makes one, and the one that is put in its place last is all that remains. Both were
answered with success. So reports of a topic go one after the other until one was taken; and because
other members may have made theirs at the same time, the broker is asked with the next report if the
first of a queue is there, and told again if not. (Java clients report everything every five
seconds, whether it has changed or not.)

What a broker was told counts for as long as the connection on which it was told: one that was
killed has lost what it had not written yet, and a slave that became the master may be behind. After
that the broker is asked, and told again if it has less. If it has more, somebody else has the queue
by now, and is not set back.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.consumer.progress import TrackedProgress
from orbitmq.client.errors import BrokerUnavailable, ClientError
from orbitmq.client.topicroute import MASTER
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import ConnectFailed, RemotingError
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import (
    OffsetResponse,
    QueryConsumerOffsetRequest,
    UpdateConsumerOffsetRequest,
)

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers.base import Header

_ANSWERS = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})
_DONE = frozenset({int(ResponseCode.SUCCESS)})

#: A broker and a topic, for which a broker has one table of a group's positions.
_Table: TypeAlias = tuple[str, str]


class ProgressUnknown(ClientError):
    """A broker's answer about progress that means nothing."""

    retriable = True


class MasterAway(BrokerUnavailable):
    """Progress can neither be read for certain nor be put by: the master cannot be reached."""

    def __init__(self, queue: Queue, what: str) -> None:
        self.queue = queue
        self.what = what
        super().__init__(queue.broker, f"its master cannot be reached ({queue}: {what})")


class BrokerProgress(TrackedProgress):
    """Positions of a group, each at the broker of its queue.

    A report is answered before it counts as put by. (Apache's client does not wait for answers: a
    report that is lost, or refused, leaves the next owner of the queue behind without a word.)

    With `strict_last` a broker is asked not to say 0 for a young queue without progress, which it
    does unless told otherwise, so that "last" means the end there too.
    """

    def __init__(
        self, engine: Engine, group: str, *, strict_last: bool = False, timeout: float = 5.0
    ) -> None:
        super().__init__()
        self._engine = engine
        self._group = group
        self._set_zero = False if strict_last else None
        self._timeout = timeout
        #: Brokers and topics of which the broker has a table.
        self._tables: set[_Table] = set()
        #: Held by whoever makes one.
        self._making: dict[_Table, asyncio.Lock] = {}
        #: Queues that were reported once, and those of which that is certain to count.
        self._reported_once: set[Queue] = set()
        self._certain: set[Queue] = set()
        #: The connection to the master on which a position was last told or heard.
        self._known_on: dict[Queue, Connection] = {}

    async def stored(self, queue: Queue) -> int | None:
        _, offset = await self._query(queue, set_zero=self._set_zero)
        return offset

    async def _query(
        self, queue: Queue, *, set_zero: bool | None = None
    ) -> tuple[bool, int | None]:
        """The position that is put by, and whether the master says so."""
        connection, answer = await self._ask(
            queue,
            RequestCode.QUERY_CONSUMER_OFFSET,
            QueryConsumerOffsetRequest(
                consumer_group=self._group,
                topic=queue.topic,
                queue_id=queue.id,
                set_zero_if_not_found=set_zero,
                broker_name=queue.broker,
            ),
            _ANSWERS,
        )
        is_found = answer.code != ResponseCode.QUERY_NOT_FOUND
        offset = answer.header(OffsetResponse).offset if is_found else 0
        is_master = connection is not None
        if not is_master and offset == 0:
            raise MasterAway(queue, "a slave of it knows of no progress, which proves nothing")
        if not is_found:
            return is_master, None
        if offset < 0:
            raise ProgressUnknown(
                f"the broker of {queue} says that group {self._group!r} is at {offset}, "
                "which is no position"
            )
        if offset > 0:
            self._is_there(queue)
        if connection is not None and self._stored.get(queue, offset) == offset:
            self._known_on[queue] = connection
        return is_master, offset

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        by_table: dict[_Table, dict[Queue, int]] = {}
        for queue, offset in changed.items():
            by_table.setdefault(_table(queue), {})[queue] = offset
        failed = await asyncio.gather(*(self._store(*each) for each in by_table.items()))
        return {queue: error for some in failed for queue, error in some.items()}

    async def _store(self, table: _Table, changed: dict[Queue, int]) -> dict[Queue, Exception]:
        """Report positions of one table: one after the other until the table is there."""
        failed: dict[Queue, Exception] = {}
        rest = list(changed)
        if table not in self._tables:
            async with self._making.setdefault(table, asyncio.Lock()):
                while rest and table not in self._tables:
                    queue = rest.pop(0)
                    error = await self._report(queue, changed[queue])
                    if error is not None:
                        failed[queue] = error
                    if isinstance(error, RemotingError):
                        # Nobody is there, and each of the others would wait as long for that.
                        return failed | {queue: copy.copy(error) for queue in rest}
        outcomes = await asyncio.gather(*(self._report(each, changed[each]) for each in rest))
        return failed | {queue: error for queue, error in zip(rest, outcomes, strict=True) if error}

    def is_supposed(self, queue: Queue) -> bool:
        """Whether a broker may have said 0 because the queue is young, which it is not for ever."""
        return self._set_zero is not False and self.read(queue) == 0

    def doubt(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            self._known_on.pop(queue, None)

    def forget(self, queue: Queue) -> None:
        super().forget(queue)
        self._known_on.pop(queue, None)
        self._reported_once.discard(queue)
        self._certain.discard(queue)

    def _is_changed(self, queue: Queue) -> bool:
        is_uncertain = queue in self._reported_once and self.read(queue) is not None
        return is_uncertain or super()._is_changed(queue) or self._is_doubtful(queue)

    def _is_doubtful(self, queue: Queue) -> bool:
        """Whether the master was told on a connection that is not there any more, or is another."""
        if self.read(queue) is None:
            return False
        known_on = self._known_on.get(queue)
        return known_on is None or known_on is not self._master_connection(queue)

    def _master_connection(self, queue: Queue) -> Connection | None:
        master = self._engine.routes.brokers.get(queue.broker, {}).get(MASTER)
        return None if master is None else self._engine.open_connection(master)

    def _is_there(self, queue: Queue) -> None:
        """The master has a position of the queue, as it says."""
        self._tables.add(_table(queue))
        self._reported_once.discard(queue)
        self._certain.add(queue)

    def _was_reported(self, queue: Queue) -> None:
        self._tables.add(_table(queue))
        if queue in self._reported_once:
            self._reported_once.discard(queue)
            self._certain.add(queue)
        elif queue not in self._certain and self.read(queue) is not None:
            self._reported_once.add(queue)

    async def _report(self, queue: Queue, offset: int) -> OrbitError | None:
        try:
            if self._stored.get(queue) == offset:
                # Told before, once only or on another connection: see the head of the module.
                is_master, held = await self._query(queue, set_zero=False)
                if is_master and held is not None and held >= offset:
                    self._is_there(queue)
                    return None
            connection, _ = await self._ask(
                queue,
                RequestCode.UPDATE_CONSUMER_OFFSET,
                UpdateConsumerOffsetRequest(
                    consumer_group=self._group,
                    topic=queue.topic,
                    queue_id=queue.id,
                    commit_offset=offset,
                    broker_name=queue.broker,
                ),
                _DONE,
            )
        except OrbitError as error:
            return error
        if connection is not None:
            self._known_on[queue] = connection
            self._was_reported(queue)
            return None
        return MasterAway(queue, "progress is with a slave only, and reported again")

    async def _ask(
        self, queue: Queue, code: RequestCode, header: Header, accept: frozenset[int]
    ) -> tuple[Connection | None, Command]:
        """Ask the master; a slave only when nobody can be reached there.

        Returns the connection to the master, or None when it was a slave.

        See the head of the module for what a slave's answer is worth.
        """
        refused: ConnectFailed | None = None
        for number, address in sorted(self._engine.routes.brokers.get(queue.broker, {}).items()):
            try:
                # What is open before is what is asked on, or was asked on before it went away.
                used = await self._engine.connection(address, self._timeout)
                answer = await self._engine.ask(
                    address, code, header, timeout=self._timeout, accept=accept
                )
            except ConnectFailed as error:
                refused = refused or error
            else:
                return used if number == MASTER else None, answer
        raise refused or BrokerUnavailable(queue.broker, "no route has it")


def _table(queue: Queue) -> _Table:
    return queue.broker, queue.topic
