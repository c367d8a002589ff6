"""How far a group is in each queue: kept in memory, and put by where it outlives the consumer.

Three words mean three things. No progress *yet* is None. A position is the offset of the next
message to consume. *Could not ask* is an error, always: a consumer that took it for "none" would
jump to where its group begins and skip what lies between, or consume everything again.

Rules of the table in memory (`TrackedProgress`):

* a position only grows, unless the caller says otherwise (a seek, a reset, orderly consumption);
* a frozen position does not change until it is forgotten: whoever still finishes messages of
  before cannot move what was corrected or reset;
* what was known to be put by does not count for a position that is frozen: others have moved it
  since, as pulls do, and a reset back to it would not be told;
* what is put by is what changed since it was put by last, or is in doubt, one writing at a time per
  broker, so that an older position never overtakes a newer one on its way. Whoever comes while one
  is on its way goes with the next one, together with all others who wait: a broker that is silent
  costs two timeouts, however many queues wait for it.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import logging
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec import field

from orbitmq.atomicfile import FolderLock, replace_file
from orbitmq.client.consumer.pull import AnswerUnusable, PullStatus, read_pulled
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import MASTER, Queue
from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, ClientError, OrbitError, SettingError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.message.record import BORN_HOST_V6, V4_HOST_SIZE, V6_HOST_SIZE, MessageError
from orbitmq.message.stored import decode_messages, without_inner_batches
from orbitmq.names import is_retry_topic
from orbitmq.parsing import Instant, epoch, moment
from orbitmq.remoting.settings import ConnectFailed, RemotingError
from orbitmq.wire.bodies import ConsumeFromWhere, MessageQueue
from orbitmq.wire.codes import BodyError, RequestCode, ResponseCode, WireError
from orbitmq.wire.headers import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    OffsetResponse,
    PullFlag,
    PullMessageRequest,
    QueryConsumerOffsetRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from orbitmq.wire.javajson import Body, Int64, decode_body, quoted

if TYPE_CHECKING:
    from orbitmq.client.consumer.handover import Ownership
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine, Periodic
    from orbitmq.message.stored import StoredMessage
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.command import Command
    from orbitmq.wire.frame import Bytes
    from orbitmq.wire.headers import Header


class ProgressStore(Protocol):
    """Where a consumer keeps its positions; an application may bring its own.

    Its own is most easily a subclass of `TrackedProgress`, which leaves two methods to write.
    """

    async def load(self) -> None:
        """Called once, before anything else."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        """Messages before `offset` are done with."""

    def freeze(self, queue: Queue, offset: int) -> None:
        """Set a position that nothing changes any more until it is forgotten."""

    def read(self, queue: Queue) -> int | None:
        """The position in memory."""

    async def fetch(self, queue: Queue) -> int | None:
        """The position where it is put by, also taken into memory; None: no progress yet.

        Raises when it cannot be said.
        """

    async def persist(self, queues: Iterable[Queue]) -> None:
        """Put the positions of `queues` by; returns when they are. Raises when one is not."""

    def forget(self, queue: Queue) -> None:
        """Drop a position from memory; what is put by stays."""

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        """The positions in memory, of one topic or of all."""


@runtime_checkable
class Doubting(Protocol):
    """A store that goes by what it believes to be put by, and can be told not to."""

    def doubt(self, queues: Iterable[Queue]) -> None:
        """See to it, when the positions of `queues` are put by next, that they really are."""


@runtime_checkable
class Supposing(Protocol):
    """A store that may name a position of which nothing is put by, and later another one."""

    def is_supposed(self, queue: Queue) -> bool:
        """Whether what was fetched may be no more than a supposition."""

    def insist(self, queues: Iterable[Queue]) -> None:
        """Have positions put by the next time, whether they have changed or not."""


class _Batch:
    """Positions that are put by together, and what became of them."""

    __slots__ = ("failed", "is_done", "queues")

    def __init__(self) -> None:
        self.queues: set[Queue] = set()
        self.failed: Mapping[Queue, Exception] = {}
        self.is_done = False


class TrackedProgress(ABC):
    """Positions in memory, with what is known to be put by; where to, subclasses say."""

    def __init__(self) -> None:
        self._positions: dict[Queue, int] = {}
        self._frozen: set[Queue] = set()
        #: What the store is known to hold.
        self._stored: dict[Queue, int] = {}
        self._turns: dict[Hashable, asyncio.Lock] = {}
        #: What goes next, by turn.
        self._next: dict[Hashable, _Batch] = {}

    # What a subclass says.

    @abstractmethod
    async def stored(self, queue: Queue) -> int | None:
        """The position that is put by; None: none yet. Raises when it cannot be said."""

    @abstractmethod
    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        """Put positions by; those that could not be, with the reason. May raise for all of them."""

    def turn_of(self, queue: Queue) -> Hashable:
        """Positions that are put by one after the other have the same turn."""
        return queue.broker

    # The interface.

    async def load(self) -> None:  # noqa: B027  # most stores have nothing to read beforehand
        """Read what has to be read beforehand, if anything."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        known = self._positions.get(queue)
        if known is not None:
            if increase_only and offset <= known:
                return
            if self._frozen and queue in self._frozen:
                return
        self._positions[queue] = offset

    def freeze(self, queue: Queue, offset: int) -> None:
        self._positions[queue] = offset
        self._frozen.add(queue)
        self._stored.pop(queue, None)

    def read(self, queue: Queue) -> int | None:
        return self._positions.get(queue)

    async def fetch(self, queue: Queue) -> int | None:
        offset = await self.stored(queue)
        if offset is None:
            self._stored.pop(queue, None)
        else:
            self._stored[queue] = offset
            self.update(queue, offset, increase_only=False)
        return offset

    async def persist(self, queues: Iterable[Queue]) -> None:
        by_turn: dict[Hashable, list[Queue]] = {}
        for queue in queues:
            if self._is_changed(queue):
                by_turn.setdefault(self.turn_of(queue), []).append(queue)
        outcomes = await asyncio.gather(
            *(self._persist(turn, some) for turn, some in by_turn.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def doubt(self, queues: Iterable[Queue]) -> None:
        self.insist(queues)

    def insist(self, queues: Iterable[Queue]) -> None:
        """Have positions put by the next time, whether they have changed or not."""
        for queue in queues:
            self._stored.pop(queue, None)

    def forget(self, queue: Queue) -> None:
        self._positions.pop(queue, None)
        self._stored.pop(queue, None)
        self._frozen.discard(queue)

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        if topic is None:
            return dict(self._positions)
        return {queue: at for queue, at in self._positions.items() if queue.topic == topic}

    async def _persist(self, turn: Hashable, queues: list[Queue]) -> None:
        batch = self._next.setdefault(turn, _Batch())
        batch.queues.update(queues)
        async with self._turns.setdefault(turn, asyncio.Lock()):
            # Unless somebody who waited too has done it for all.
            if not batch.is_done:
                if self._next.get(turn) is batch:
                    del self._next[turn]
                batch.failed = await self._put_by(batch.queues)
                batch.is_done = True
        for queue in queues:
            if queue in batch.failed:
                raise batch.failed[queue]

    async def _put_by(self, queues: Iterable[Queue]) -> Mapping[Queue, Exception]:
        # Looked at again: whoever had the turn before may have put the same ones by.
        changed = {queue: self._positions[queue] for queue in queues if self._is_changed(queue)}
        if not changed:
            return {}
        were_frozen = self._frozen.intersection(changed)
        try:
            failed = await self.store(changed)
        except Exception as error:  # noqa: BLE001  # raised in whoever waits for it
            return dict.fromkeys(changed, error)
        for queue, offset in changed.items():
            # Meanwhile it may have been given up, and even be somebody else's; or be frozen, and is
            # then put by once more.
            was_frozen_since = queue in self._frozen and queue not in were_frozen
            if queue not in failed and queue in self._positions and not was_frozen_since:
                self._stored[queue] = offset
        return failed

    def _is_changed(self, queue: Queue) -> bool:
        offset = self._positions.get(queue)
        return offset is not None and self._stored.get(queue) != offset


class MemoryProgress(TrackedProgress):
    """Positions that end with the process, or that are shared by passing one mapping around."""

    def __init__(self, kept: dict[Queue, int] | None = None) -> None:
        super().__init__()
        self.kept = {} if kept is None else kept

    async def stored(self, queue: Queue) -> int | None:
        return self.kept.get(queue)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        self.kept.update(changed)
        return {}


# Progress at the brokers: where members of a group hand their queues to each other.
#
# Positions belong to the master of a queue. A slave has copies, some seconds old, and the next copy
# overwrites whatever it was told meanwhile. While no master can be reached a slave is asked and
# told all the same, so that members who meet there know of each other; but what it says counts
# less:
#
# * a position that it has may be behind, which repeats messages and loses none: it is believed;
# * that it has none, or one at 0 (which brokers also say of young queues without progress), may
#   only mean that it has not heard yet: nobody knows, and the queue is begun later;
# * that it took a report does not put the position by: it is reported again until a master took it.
#
# The first positions of a group in a topic need care. Apache's brokers keep them in one table for
# both, which they make when the first report comes; of two first reports at the same time each
# finds no table and makes one, and the one that is put in its place last is all that remains. Both
# were answered with success. So reports of a topic go one after the other until one was taken; and
# because other members may have made theirs at the same time, the broker is asked with the next
# report if the first of a queue is there, and told again if not. (Java clients report everything
# every five seconds, whether it has changed or not.)
#
# What a broker was told counts for as long as the connection on which it was told: one that was
# killed has lost what it had not written yet, and a slave that became the master may be behind.
# After that the broker is asked, and told again if it has less. If it has more, somebody else has
# the queue by now, and is not set back.


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


# Progress in a file: of a broadcasting consumer, which shares it with nobody.
#
# The file is the one that Apache's Java client keeps, in the same place, and either reads what the
# other wrote. It is replaced as a whole, by a rename after its bytes are on the disk, and the one
# before stays beside it as ``.bak``: whenever the process or the machine ends, a whole file is
# there.
#
# Two consumers must not have one file: each would take the progress of the other for its own, and
# skip after a restart what it has never seen. Whoever comes second is refused (Apache's client lets
# both write). An application that wants several on one machine gives each an instance of its own.
#
# A file that is there and cannot be read, with no readable backup, is an error. Taking it for "no
# progress yet" would skip or repeat everything (Apache's client does that when there is no backup).


log = logging.getLogger(__name__)

#: Below the home directory, as Apache's.
FOLDER = ".rocketmq_offsets"
FILE = "offsets.json"


class ProgressFileError(ClientError):
    """A file of progress that cannot be read or written."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(
            f"progress file {path}: {problem}; mend it, or delete it and its .bak to begin where "
            "consume_from says"
        )


def progress_path(group: str, client_id: str, folder: Path | str | None = None) -> Path:
    """Where a group's file is; `folder` is for the files of all groups."""
    root = Path.home() / FOLDER if folder is None else Path(folder)
    return root / client_id / group / FILE


class LocalFileProgress(TrackedProgress):
    """Positions in one file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = FolderLock(path.with_name("in-use.lock"))

    @property
    def path(self) -> Path:
        return self._path

    async def load(self) -> None:
        """Take the file for this consumer, and read it. Raises `SettingError` if it is taken."""
        await asyncio.to_thread(self._take)
        for queue, offset in (await asyncio.to_thread(read_positions, self._path)).items():
            self.update(queue, offset, increase_only=False)
            self._stored[queue] = offset

    def close(self) -> None:
        """Let another consumer have the file. May be repeated."""
        self._lock.release()

    def _take(self) -> None:
        try:
            is_taken = self._lock.take()
        except OSError as error:
            problem = f"its folder cannot be used: {error.strerror or error}"
            raise ProgressFileError(self._path, problem) from error
        if not is_taken:
            raise SettingError(
                f"another consumer on this machine has its progress in {self._path}; to have "
                "several, give each an instance of its own, the same at every start: "
                "client=ClientSettings(instance='cache-1', ...)"
            )

    async def stored(self, queue: Queue) -> int | None:
        return (await asyncio.to_thread(read_positions, self._path)).get(queue)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        await asyncio.to_thread(merge_positions, self._path, dict(changed))
        return {}

    def turn_of(self, queue: Queue) -> Hashable:
        """One file, one writer at a time."""
        return self._path


class _Offsets(Body, frozen=True, kw_only=True):
    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


def read_positions(path: Path) -> dict[Queue, int]:
    """What a file, or else its backup, says; nothing if neither is there."""
    damage: ProgressFileError | None = None
    for each in (path, _backup(path)):
        try:
            found = _read(each)
        except ProgressFileError as error:
            damage = damage or error
            continue
        if found is not None:
            if damage is not None:
                log.warning("a backup of progress is used: %s", damage)
            return found
    if damage is not None:
        raise damage
    return {}


def merge_positions(path: Path, changed: Mapping[Queue, int]) -> None:
    """Put positions into a file, beside those that it has of other queues."""
    known = read_positions(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if known:
            replace_file(_backup(path), _text(known))
        replace_file(path, _text({**known, **changed}))
    except OSError as error:
        raise ProgressFileError(path, f"cannot be written: {error.strerror or error}") from error


def _backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")


def _read(path: Path) -> dict[Queue, int] | None:
    """The positions in one file; None when there is no such file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProgressFileError(path, f"cannot be read: {error.strerror or error}") from error
    try:
        table = decode_body(_Offsets, data).offset_table
    except BodyError as error:
        raise ProgressFileError(path, f"is damaged: {error}") from error
    return {
        Queue(queue.topic, queue.broker_name, queue.queue_id): offset
        for queue, offset in table.items()
    }


def _text(positions: Mapping[Queue, int]) -> bytes:
    """In the layout of Java's: maps keyed by objects are not JSON, and its readers expect them."""
    entries = b",\n".join(
        b'\t\t{\n\t\t\t"brokerName":%b,\n\t\t\t"queueId":%d,\n\t\t\t"topic":%b\n\t\t}:%d'
        % (quoted(queue.broker), queue.id, quoted(queue.topic), offset)
        for queue, offset in sorted(positions.items())
    )
    return b'{\n\t"offsetTable":{\n%b\n\t}\n}' % entries


# A store of progress that the application brought, behind errors that a consumer knows.
#
# Its methods are the application's code: a database that is away raises what its driver raises.
# Whoever puts positions by is prepared for `OrbitError`, tries again, and gives back what it holds;
# so everything else that comes out of such a store is made one here, in one place, with its cause.


class ProgressStoreFailed(ClientError):
    """The application's own store of progress raised an error."""

    retriable = True

    def __init__(self, store: object, what: str, cause: Exception) -> None:
        self.what = what
        super().__init__(
            f"{type(store).__name__}.{what} failed: {type(cause).__name__}: {cause}; "
            "the consumer goes on and tries again"
        )


class GuardedProgressStore:
    """Passes everything on to the application's store; what it raises becomes an `OrbitError`."""

    def __init__(self, store: ProgressStore) -> None:
        self._store = store

    async def load(self) -> None:
        with self._declared("load"):
            await self._store.load()

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        with self._declared("update"):
            self._store.update(queue, offset, increase_only=increase_only)

    def freeze(self, queue: Queue, offset: int) -> None:
        with self._declared("freeze"):
            self._store.freeze(queue, offset)

    def read(self, queue: Queue) -> int | None:
        with self._declared("read"):
            return self._store.read(queue)

    async def fetch(self, queue: Queue) -> int | None:
        with self._declared("fetch"):
            return await self._store.fetch(queue)

    async def persist(self, queues: Iterable[Queue]) -> None:
        with self._declared("persist"):
            await self._store.persist(queues)

    def forget(self, queue: Queue) -> None:
        with self._declared("forget"):
            self._store.forget(queue)

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        with self._declared("positions"):
            return self._store.positions(topic)

    def doubt(self, queues: Iterable[Queue]) -> None:
        if isinstance(self._store, Doubting):
            with self._declared("doubt"):
                self._store.doubt(queues)

    @contextmanager
    def _declared(self, what: str) -> Iterator[None]:
        try:
            yield
        except OrbitError:
            raise
        except Exception as error:
            # Whatever a driver raises, also what looks like a time-out of ours.
            raise ProgressStoreFailed(self._store, what, error) from error


# When the progress of a consumer is put by.
#
# Every few seconds, for all queues; and soon after a queue has nothing left to do, because somebody
# may be waiting to see that all is done: a person, a test, a job that follows. A queue counts as
# idle when nothing of it is cached and no handler has finished on it for a moment. A queue under
# load is never idle: its progress goes along with every pull, and with the regular report.
#
# A queue that gets a message now and then is idle after each of them, and must not be reported each
# time. So a broker is told early once, and then not sooner than a second later; each time that the
# next occasion comes before its time, the distance doubles, up to that of the regular report. A
# broker without an occasion for twice the distance begins anew.


#: Seconds for which a position that was reset is not replaced by what was consumed from there.
_SEEN: Final = 1.0
#: Seconds between two early reports to a broker: to begin with, and at most.
_DISTANCE: Final = 1.0
_LONGEST: Final = 8.0


@dataclass(slots=True)
class _Pace:
    """How often a broker is told early."""

    last: float
    distance: float

    def went(self, now: float, *, longest: float) -> None:
        """A report goes out, after an occasion that came too soon or after a quiet time."""
        if now - self.last > 2 * self.distance:
            self.distance = _DISTANCE
        else:
            self.distance = min(2 * self.distance, longest)
        self.last = now


class OffsetCommitter:
    """Puts the progress of the owned queues by. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        progress: ProgressStore,
        owned: Mapping[Queue, OwnedQueue],
        *,
        interval: float,
        when_idle: float,
    ) -> None:
        """`when_idle` is how long a queue is idle before it is reported; 0: it is not."""
        self._engine = engine
        self._group = group
        self._progress = progress
        self._owned = owned
        self._interval = interval
        self._longest = max(_DISTANCE, min(interval, _LONGEST))
        self._when_idle = when_idle
        self._outages = LogOncePerOutage(log)
        self._regular: Periodic | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_stopped = False
        #: Queues that are not reported for being idle before these times.
        self._not_before: dict[Queue, float] = {}
        #: Until when the handler calls of a queue were covered by an early report.
        self._covered: dict[Queue, float] = {}
        self._paces: dict[str, _Pace] = {}

    def start(self) -> None:
        self._regular = self._engine.every(
            self._interval, self._report_all, name=f"progress of {self._group}"
        )

    def stop(self) -> None:
        """Report no more; what is owned is reported when it is released."""
        self._is_stopped = True
        if self._regular is not None:
            self._regular.stop()
        if self._look is not None:
            self._look.cancel()

    def became_empty(self) -> None:
        """Nothing of some queue is cached any more. Called often; costs little."""
        if self._look is None and self._when_idle > 0 and not self._is_stopped:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(self._when_idle, self._look_for_idle)

    def let_be_seen(self, queues: Iterable[Queue]) -> None:
        """Progress was reset: whoever did that reads it back, so it stays there for a moment."""
        until = self._engine.clock.monotonic() + _SEEN
        self._not_before.update(dict.fromkeys(queues, until))

    def _look_for_idle(self) -> None:
        self._look = None
        now = self._engine.clock.monotonic()
        latest = now - self._when_idle
        self._not_before = {queue: at for queue, at in self._not_before.items() if at > now}
        self._covered = {queue: at for queue, at in self._covered.items() if queue in self._owned}
        waiting = [
            owned
            for owned in self._owned.values()
            if not len(owned.window)
            and not owned.is_reset
            and owned.last_consumed > self._covered_until(owned)
        ]
        idle = [
            owned.queue
            for owned in waiting
            if owned.last_consumed <= latest
            and owned.queue not in self._not_before
            and self._may_tell(owned.queue.broker, now)
        ]
        if len(idle) < len(waiting):
            self.became_empty()
        if idle and self._engine.is_running:
            self._note_early(idle, now, latest)
            self._engine.spawn(self._report(idle), f"progress of idle queues of {self._group}")

    def _covered_until(self, owned: OwnedQueue) -> float:
        return self._covered.get(owned.queue, float("-inf"))

    def _may_tell(self, broker: str, now: float) -> bool:
        pace = self._paces.get(broker)
        return pace is None or now >= pace.last + pace.distance

    def _note_early(self, queues: list[Queue], now: float, covered: float) -> None:
        self._covered.update(dict.fromkeys(queues, covered))
        for broker in {queue.broker for queue in queues}:
            pace = self._paces.get(broker)
            if pace is None:
                self._paces[broker] = _Pace(now, _DISTANCE)
            else:
                pace.went(now, longest=self._longest)

    async def _report_all(self) -> None:
        # What was dropped is settled by whoever gives it up, and a reset by `releases`, once.
        await self._report(
            queue
            for queue, owned in self._owned.items()
            if not (owned.is_dropped or owned.is_reset)
        )

    async def _report(self, queues: Iterable[Queue]) -> None:
        try:
            await self._progress.persist(list(queues))
        except OrbitError as error:
            self._outages.failed(
                "progress", "progress of group %s cannot be put by: %s", self._group, error
            )
        else:
            self._outages.recovered("progress")


# Positions that could not be put by when their queue was given up, kept until they are.
#
# A broker that is killed leaves the route, and so its queues leave the shares of their owners.
# Nobody can take their progress at that moment; but the consumer lives on and knows where it was.
# When the broker is back, it has what was saved before its end, or less. It is asked then, and told
# if it has less. If it has more, somebody else has the queue by now, and is not set back.
#
# But a broker that was killed may have lost messages as well, or a slave that had not got them may
# have taken its place. Their numbers go to other messages, maybe before we are back: a position
# tells nothing then of what lies before it, and to believe it would pass those over. So a message
# is kept with each position, by which it is seen that everything before is what it was
# (`landmarks`): the first one that is unfinished, or the last one that was fetched. What is told is
# never beyond that message: stretches that the filter left out behind it may have been lost, too.
# If it is not there any more, or cannot be read, the position is thrown away.
#
# Only where the broker has no progress and the group would begin behind the position, that needs no
# proof: nothing is passed over by it that would not be otherwise.
#
# A position of a queue whose progress is reset meanwhile is thrown away, too, and the oldest if
# there are very many. All that costs is that messages come again.


#: So many positions are kept.
MOST: Final = 10_000

#: What is no answer of a broker, but of nobody.
_AWAY: Final = (RemotingError, BrokerUnavailable)
#: What makes an answer to a pull one that nobody can read.
_UNREADABLE: Final = (WireError, MessageError, AnswerUnusable)


class _Kept:
    """A position, what proves that it still counts, and whose turn it is to put it by."""

    __slots__ = ("landmark", "position", "turn")

    def __init__(self, position: int, landmark: Landmark | None) -> None:
        self.position = position
        self.landmark = landmark
        self.turn = asyncio.Lock()


class Unreported:
    """What is still to be reported of queues that were given up. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        progress: ProgressStore,
        ownership: Ownership,
        starting: StartOffsets,
        *,
        most: int = MOST,
    ) -> None:
        self._engine = engine
        self._group = group
        self._progress = progress
        self._ownership = ownership
        self._starting = starting
        self._most = most
        self._reports: Periodic | None = None
        self._kept: dict[Queue, _Kept] = {}

    def start(self, interval: float) -> None:
        """Report what can be reported, again and again."""
        self._reports = self._engine.every(
            interval, self.report, name=f"late reports of {self._group}"
        )

    def wake(self) -> None:
        """Somebody was connected to: try it now."""
        if self._reports is not None and self._kept:
            self._reports.wake()

    def stop(self) -> None:
        if self._reports is not None:
            self._reports.stop()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, queue: Queue, position: int, landmark: Landmark | None) -> None:
        """A queue is given up with a position that nobody took.

        `landmark` is some message of it, the nearer to the position the better.
        """
        self._kept.pop(queue, None)
        self._kept[queue] = _Kept(position, landmark)
        if len(self._kept) > self._most:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            log.warning(
                "progress of group %s in %s is forgotten, because so much else is unreported: "
                "its messages come again",
                self._group,
                oldest,
                extra={"group": self._group, "queue": str(oldest)},
            )

    def drop(self, queues: Iterable[Queue]) -> None:
        """The progress of these was settled by somebody else."""
        for queue in queues:
            was_kept = self._kept.pop(queue, None) is not None
            if was_kept and queue not in self._ownership.owned:
                # It may be on its way already, and wait for its turn.
                self._progress.forget(queue)

    async def report(self) -> None:
        """Report what can be; a queue that is about to be ours is settled when it is begun."""
        away: set[str] = set()
        for queue in list(self._kept):
            if queue.broker in away or self._is_ours(queue):
                continue
            try:
                await self.settle(queue)
            except OrbitError as error:
                if isinstance(error, (*_AWAY, BrokerRefused)):
                    # The others there would have to wait as long for the same.
                    away.add(queue.broker)
                log.debug("progress in %s is still unreported: %s", queue, error)
            else:
                if not self._is_ours(queue):
                    self._progress.forget(queue)

    def _is_ours(self, queue: Queue) -> bool:
        return queue in self._ownership.owned or queue in self._ownership.claims

    async def settle(self, queue: Queue) -> None:
        """Put by what is kept of a queue, if anything is. Raises when its broker cannot, now.

        Its position in memory is then what is put by.
        """
        kept = self._kept.get(queue)
        if kept is None:
            return
        async with kept.turn:
            if self._kept.get(queue) is not kept:
                return
            try:
                told = await self._tell(queue, kept)
            except BrokerRefused as refused:
                if refused.code == ResponseCode.SYSTEM_BUSY:
                    raise
                told = None
                log.warning(
                    "progress of group %s in %s is refused, its messages come again: %s",
                    self._group,
                    queue,
                    refused,
                    extra={"group": self._group, "queue": str(queue)},
                )
            if self._kept.get(queue) is kept:
                del self._kept[queue]
        if told is not None:
            log.info(
                "progress of group %s in %s reported: %d, after its broker came back",
                self._group,
                queue,
                told,
                extra={"group": self._group, "queue": str(queue), "offset": told},
            )

    async def _tell(self, queue: Queue, kept: _Kept) -> int | None:
        """Report a position, if there is less and it still counts; what was reported."""
        held = await self._progress.fetch(queue)
        if held is not None and held >= kept.position:
            return None
        position = await self._proven(queue, kept, held)
        if self._kept.get(queue) is not kept:
            # Somebody has reset the progress meanwhile.
            return None
        if position is None:
            log.warning(
                "progress of group %s in %s was %d, but the messages before that may be other ones "
                "now: they come again",
                self._group,
                queue,
                kept.position,
                extra={"group": self._group, "queue": str(queue), "offset": kept.position},
            )
            return None
        if held is not None and held >= position:
            return None
        self._progress.update(queue, position)
        await self._progress.persist([queue])
        return position

    async def _proven(self, queue: Queue, kept: _Kept, held: int | None) -> int | None:
        """How far what lies before a position is what it was: see the head of the module."""
        mark = kept.landmark
        if mark is not None:
            try:
                found = await landmark_at(self._engine, self._group, queue, mark.offset)
            except _UNREADABLE as error:
                # It would be the next time, too, and the queue would never be begun.
                log.debug("what %s has at %d proves nothing: %s", queue, mark.offset, error)
                found = None
            if found == mark:
                return min(kept.position, mark.offset + 1)
        if held is None and kept.position <= await self._starting.without_progress(queue):
            return kept.position
        return None


# Messages by which it is seen that a queue still holds what it held.
#
# A broker that lost the end of its log gives the numbers of what it lost to other messages. Then a
# position in the queue means something else, which the number does not show. But a log loses only
# its end: if one message is still where it was, everything before it is there, too. One look tells.
#
# A landmark is what such a message is known by. Another one at the same place would have to be
# stored and made in the same milliseconds, be as long, and have the same checksum of its body.


_SERVED: Final = frozenset(int(status.value) for status in PullStatus)

#: The size, the checksum, the offset, the system flag and the time of making of a record.
_read_head = struct.Struct(">i4xI8xq8xiq").unpack_from
_read_time = struct.Struct(">q").unpack_from
_BORN_HOST_AT: Final = 48


class Landmark(msgspec.Struct, frozen=True, gc=False):
    """What the message at an offset is known by."""

    offset: int
    size: int
    crc: int
    born_ms: int
    store_ms: int

    @classmethod
    def of(cls, stored: StoredMessage) -> Landmark:
        return cls(
            stored.queue_offset, stored.size, stored.stored_crc, stored.born_ms, stored.store_ms
        )

    @classmethod
    def in_records(cls, records: Bytes, at: int) -> Landmark:
        """Of the message whose record begins at `at`; nothing else of it is read."""
        size, crc, offset, flag, born_ms = _read_head(records, at)
        host = V6_HOST_SIZE if flag & BORN_HOST_V6 else V4_HOST_SIZE
        (store_ms,) = _read_time(records, at + _BORN_HOST_AT + host)
        return cls(offset, size, crc, born_ms, store_ms)


async def landmark_at(engine: Engine, group: str, queue: Queue, offset: int) -> Landmark | None:
    """The landmark that the master has at an offset; None if it has no message there."""
    # Whoever is to go on elsewhere has yet to hear it, and would not from us.
    header = look(group, queue, offset, keep_reset=True)
    answer = await engine.ask(
        engine.routes.master(queue.broker), RequestCode.PULL_MESSAGE, header, accept=_SERVED
    )
    pulled = read_pulled(answer, offset)
    if pulled is None or pulled.status is not PullStatus.FOUND:
        return None
    for message in without_inner_batches(decode_messages(pulled.body), offset):
        return Landmark.of(message) if message.queue_offset == offset else None
    return None


def look(
    group: str, queue: Queue, offset: int, *, keep_reset: bool | None = None
) -> PullMessageRequest:
    """A pull of one message, whatever it is, that moves nothing: who may consume may ask that."""
    return PullMessageRequest(
        consumer_group=group,
        topic=queue.topic,
        broker_name=queue.broker,
        queue_id=queue.id,
        queue_offset=offset,
        max_msg_nums=1,
        sys_flag=int(PullFlag.SUBSCRIPTION),
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription="*",
        expression_type="TAG",
        keep_reset=keep_reset,
    )


# Where a queue begins: at its group's progress, and only without any, where `consume_from` says.
#
# | no progress, `consume_from` | ordinary topic          | retry topic |
# |-----------------------------|-------------------------|-------------|
# | last (the default)          | the end                 | 0           |
# | first                       | the first message       | 0           |
# | a time                      | the first at or after it| the end     |
#
# A group's retry topic begins at 0 because everything in it is the group's own. With a time it does
# not, as with Apache, whose clients of the same group must not begin elsewhere.
#
# A question that cannot be answered is an error; the queue is not begun and tried again later.
# There is no third outcome: a guess here is a silent loss, or everything twice.
#
# The end is the one of the first look: it is asked for before the progress, and kept until the
# queue is begun, however often that fails. (Apache's clients ask for it afterwards, and pass over
# what is stored in between.) Where a group begins without progress is its progress from then on,
# and is put by before the first pull: whoever has the queue next would begin at an end that has
# moved on.


class Begin(enum.Enum):
    """Which message of a queue is meant."""

    LAST = "last"
    FIRST = "first"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class ConsumeFrom:
    """Where a group without progress begins; has no effect on a queue that has some."""

    begin: Begin
    time: float | None = None  #: seconds since the epoch

    LAST: ClassVar[ConsumeFrom]
    FIRST: ClassVar[ConsumeFrom]

    @property
    def wire_name(self) -> ConsumeFromWhere:
        """As heartbeats say it."""
        return _WIRE_NAMES[self.begin]

    def __str__(self) -> str:
        return self.begin.value if self.time is None else f"time {self.time:.3f}"


ConsumeFrom.LAST = ConsumeFrom(Begin.LAST)
ConsumeFrom.FIRST = ConsumeFrom(Begin.FIRST)

_WIRE_NAMES: Mapping[Begin, ConsumeFromWhere] = {
    Begin.LAST: ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
    Begin.FIRST: ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    Begin.TIME: ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
}

#: What users may give: a `ConsumeFrom`, "last", "first", or a time.
Beginning: TypeAlias = ConsumeFrom | str | Instant

_NAMES: Mapping[str, ConsumeFrom] = {
    "last": ConsumeFrom.LAST,
    "first": ConsumeFrom.FIRST,
    ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET.value: ConsumeFrom.LAST,
    ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET.value: ConsumeFrom.FIRST,
}
_JAVA_TIME = re.compile(r"[0-9]{14}")


def consume_from(given: Beginning, name: str = "consume_from") -> ConsumeFrom:
    """What a user gave as a `ConsumeFrom`; a text of digits is a local time, yyyyMMddHHmmss."""
    if isinstance(given, ConsumeFrom):
        return given
    if not isinstance(given, str):
        return ConsumeFrom(Begin.TIME, epoch(given, name))
    if (named := _NAMES.get(given)) is not None:
        return named
    if _JAVA_TIME.fullmatch(given):
        with suppress(SettingError):
            return ConsumeFrom(Begin.TIME, moment(given))
    raise SettingError(
        f"{name} must be 'last', 'first', a time as yyyyMMddHHmmss, a datetime or seconds since "
        f"the epoch, got {given!r}"
    )


class _Point(enum.Enum):
    """What is asked from the broker."""

    ZERO = enum.auto()
    FIRST = enum.auto()
    END = enum.auto()
    TIME = enum.auto()


#: Where a queue without progress begins: an ordinary topic's, and a retry topic's.
WITHOUT_PROGRESS: Mapping[Begin, tuple[_Point, _Point]] = {
    Begin.LAST: (_Point.END, _Point.ZERO),
    Begin.FIRST: (_Point.FIRST, _Point.ZERO),
    Begin.TIME: (_Point.TIME, _Point.END),
}


class StartOffsets:
    """Works out where queues begin."""

    def __init__(
        self, engine: Engine, progress: ProgressStore, begin: ConsumeFrom = ConsumeFrom.LAST
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._begin = begin
        #: Where queues ended when they were first looked at, until they are begun.
        self._ends: dict[Queue, int] = {}

    async def offset(self, queue: Queue) -> int:
        """The offset of the first message to pull. Raises when it cannot be worked out."""
        offset, _ = await self._find(queue)
        self._ends.pop(queue, None)
        return offset

    async def begin(self, queue: Queue) -> int:
        """The same; and it is put by, unless it was. Raises when that cannot be done either."""
        offset, is_stored = await self._find(queue)
        progress = self._progress
        if not is_stored:
            progress.update(queue, offset)
            await self._put_by(queue)
        elif isinstance(progress, Supposing) and progress.is_supposed(queue):
            progress.insist([queue])
            await self._put_by(queue)
        self._ends.pop(queue, None)
        return offset

    async def _find(self, queue: Queue) -> tuple[int, bool]:
        """Where a queue begins, and whether that is progress of its group."""
        unseen = await self._look(queue) if self._point(queue) is _Point.END else None
        stored = await self._progress.fetch(queue)
        if stored is not None:
            return stored, True
        if unseen is not None:
            raise unseen
        end = self._ends.get(queue)
        return (await self.without_progress(queue) if end is None else end), False

    async def _look(self, queue: Queue) -> OrbitError | None:
        """See where a queue ends; why that cannot be said, which matters only without progress."""
        try:
            end = await end_offset(self._engine, queue)
        except (BrokerRefused, BrokerUnavailable, RemotingError) as error:
            return error
        # A broker that was killed may have lost the end that was seen.
        self._ends[queue] = min(end, self._ends.get(queue, end))
        return None

    async def _put_by(self, queue: Queue) -> None:
        # A broker that does not take progress of the group refuses its pulls as well, and is told
        # of there. Until then the position is in memory, and goes with the next report.
        with suppress(BrokerRefused):
            await self._progress.persist([queue])

    async def without_progress(self, queue: Queue) -> int:
        """Where a queue of which nothing is put by begins now."""
        point = self._point(queue)
        if point is _Point.ZERO:
            return 0
        if point is _Point.FIRST:
            return await self._first(queue)
        if point is _Point.END:
            return await end_offset(self._engine, queue)
        return await offset_at(self._engine, queue, self._begin.time or 0.0)

    def _point(self, queue: Queue) -> _Point:
        ordinary, retry = WITHOUT_PROGRESS[self._begin.begin]
        return retry if is_retry_topic(queue.topic) else ordinary

    async def _first(self, queue: Queue) -> int:
        try:
            return await first_offset(self._engine, queue)
        except BrokerRefused as refused:
            if refused.code != ResponseCode.NO_PERMISSION:
                raise
            # Who may only consume may not ask. Then as Java clients do, who never ask: if there is
            # nothing at 0 any more, the answer to the first pull says where there is.
            return 0


async def first_offset(engine: Engine, queue: Queue) -> int:
    """The offset of the first message that the broker still has."""
    header = GetMinOffsetRequest(topic=queue.topic, queue_id=queue.id, broker_name=queue.broker)
    return await _ask(engine, queue, RequestCode.GET_MIN_OFFSET, header)


async def end_offset(engine: Engine, queue: Queue) -> int:
    """The offset that the next message will get."""
    header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.id, broker_name=queue.broker)
    return await _ask(engine, queue, RequestCode.GET_MAX_OFFSET, header)


async def offset_at(engine: Engine, queue: Queue, time: float) -> int:
    """The offset of the first message stored at or after a time; the end if there is none."""
    header = SearchOffsetRequest(
        topic=queue.topic,
        queue_id=queue.id,
        timestamp=milliseconds(time),
        broker_name=queue.broker,
    )
    return await _ask(engine, queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)


async def _ask(engine: Engine, queue: Queue, code: RequestCode, header: Header) -> int:
    # Masters only: a slave's end lies behind, and what it does not have yet would come twice.
    answer = await engine.ask(engine.routes.master(queue.broker), code, header)
    return answer.header(OffsetResponse).offset
