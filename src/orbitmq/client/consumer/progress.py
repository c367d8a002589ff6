"""The group's progress: positions in memory, and the stores in which they are committed.

A position is the offset of the next message to consume. *No progress yet* is None. A failed read is
always an error: taken for "none" it would skip messages or repeat everything.

The table in memory (`TrackedProgress`): a position only grows, unless the caller says otherwise. A
frozen position (a reset, a correction) does not change until it is forgotten. Commits of a broker
go one after the other, so that none overtakes a newer one; all queues that wait share the next one.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from msgspec import field

from orbitmq.atomicfile import FolderLock, replace_file
from orbitmq.client.consumer.pull import PullStatus, read_pulled
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import MASTER, Queue
from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, ClientError, OrbitError, SettingError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.message.stored import decode_messages, without_inner_batches
from orbitmq.names import is_retry_topic
from orbitmq.parsing import AnyPosition, Place, Position, position
from orbitmq.remoting.settings import ConnectFailed, RemotingError
from orbitmq.wire.bodies import ConsumeFromWhere, MessageQueue
from orbitmq.wire.codes import BodyError, RequestCode, ResponseCode
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
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine, Periodic
    from orbitmq.message.stored import StoredMessage
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers import Header


class ProgressStore(Protocol):
    """Where a consumer keeps its positions; an application may pass its own.

    The easiest way is a subclass of `TrackedProgress`, which needs two methods.
    """

    async def load(self) -> None:
        """Called once, before anything else."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        """Messages before `offset` are finished."""

    def freeze(self, queue: Queue, offset: int) -> None:
        """Set a position that does not change until it is forgotten."""

    def read(self, queue: Queue) -> int | None:
        """The position in memory."""

    async def fetch(self, queue: Queue) -> int | None:
        """The committed offset, also taken into memory; None: no progress yet.

        Raises when it cannot be read.
        """

    async def persist(self, queues: Iterable[Queue]) -> None:
        """Commit the positions of `queues`. Raises when one could not be committed."""

    def forget(self, queue: Queue) -> None:
        """Drop a position from memory; the committed offset stays."""

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        """The positions in memory, of one topic or of all."""


class _Batch:
    """Positions that are committed together, and the result."""

    __slots__ = ("failed", "is_done", "queues")

    def __init__(self) -> None:
        self.queues: set[Queue] = set()
        self.failed: Mapping[Queue, Exception] = {}
        self.is_done = False


class TrackedProgress(ABC):
    """Positions in memory and the offsets known to be committed. Subclasses do the input/output."""

    def __init__(self) -> None:
        self._positions: dict[Queue, int] = {}
        self._frozen: set[Queue] = set()
        #: Offsets that the store is known to hold.
        self._stored: dict[Queue, int] = {}
        self._turns: dict[Hashable, asyncio.Lock] = {}
        #: The next commit, by turn.
        self._next: dict[Hashable, _Batch] = {}

    # What a subclass defines.

    @abstractmethod
    async def stored(self, queue: Queue) -> int | None:
        """The committed offset; None: none yet. Raises when it cannot be read."""

    @abstractmethod
    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        """Commit offsets; returns the failures. May raise for all of them."""

    def turn_of(self, queue: Queue) -> Hashable:
        """Queues with the same turn are committed one after the other."""
        return queue.broker

    # The interface.

    async def load(self) -> None:  # noqa: B027  # most stores have nothing to read beforehand
        """Read what has to be read before the start, if anything."""

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

    def insist(self, queues: Iterable[Queue]) -> None:
        """Commit positions again with the next commit, whether they have changed or not."""
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
            # Unless another waiting task has done it for all.
            if not batch.is_done:
                if self._next.get(turn) is batch:
                    del self._next[turn]
                batch.failed = await self._store_changed(batch.queues)
                batch.is_done = True
        for queue in queues:
            if queue in batch.failed:
                raise batch.failed[queue]

    async def _store_changed(self, queues: Iterable[Queue]) -> Mapping[Queue, Exception]:
        # Checked again: the previous commit may have covered the same ones.
        changed = {queue: self._positions[queue] for queue in queues if self._is_changed(queue)}
        if not changed:
            return {}
        were_frozen = self._frozen.intersection(changed)
        try:
            failed = await self.store(changed)
        except Exception as error:  # noqa: BLE001  # raised in the tasks that wait
            return dict.fromkeys(changed, error)
        for queue, offset in changed.items():
            # Meanwhile it may have been released, or frozen. Then it is committed again.
            was_frozen_since = queue in self._frozen and queue not in were_frozen
            if queue not in failed and queue in self._positions and not was_frozen_since:
                self._stored[queue] = offset
        return failed

    def _is_changed(self, queue: Queue) -> bool:
        offset = self._positions.get(queue)
        return offset is not None and self._stored.get(queue) != offset


class MemoryProgress(TrackedProgress):
    """Offsets that end with the process, or are shared by passing one mapping to several stores."""

    def __init__(self, kept: dict[Queue, int] | None = None) -> None:
        super().__init__()
        self.kept = {} if kept is None else kept

    async def stored(self, queue: Queue) -> int | None:
        return self.kept.get(queue)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        self.kept.update(changed)
        return {}


# ---- progress at the brokers


_ANSWERS = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})
_DONE = frozenset({int(ResponseCode.SUCCESS)})


class ProgressUnknown(ClientError):
    """A broker's answer about progress that is not valid."""

    retriable = True


class MasterAway(BrokerUnavailable):
    """Progress can be neither read reliably nor committed: the master cannot be reached."""

    def __init__(self, queue: Queue, what: str) -> None:
        self.queue = queue
        self.what = what
        super().__init__(queue.broker, f"its master cannot be reached ({queue}: {what})")


class BrokerProgress(TrackedProgress):
    """Offsets of a group, each at the master of its queue.

    A commit counts when it was answered, on the connection on which it was sent. After a
    reconnection the broker is asked, and the commit repeated if it has less: it may have lost a
    commit. If it has more, another member owns the queue. An offset beyond the end of the queue is
    not committed: the broker has lost messages, and the queue begins at the committed offset.

    A slave is asked while no master can be reached, but counts for less: an offset that it has is
    used (messages repeat), a missing one or 0 proves nothing, and its commits are repeated until a
    master has them.

    Apache's brokers can lose one of two simultaneous first commits of a topic, as each creates the
    table. So one commit of a topic goes before the others, and a queue's first one is verified.

    With `strict_last` brokers are asked not to answer 0 for a young queue without progress.
    """

    def __init__(
        self, engine: Engine, group: str, *, strict_last: bool = False, timeout: float = 5.0
    ) -> None:
        super().__init__()
        self._engine = engine
        self._group = group
        self._set_zero = False if strict_last else None
        self._timeout = timeout
        #: Queues committed once, and those verified afterwards.
        self._reported_once: set[Queue] = set()
        self._certain: set[Queue] = set()
        #: The connection to the master on which an offset was last committed or read.
        self._known_on: dict[Queue, Connection] = {}

    async def stored(self, queue: Queue) -> int | None:
        connection, offset = await self._query(queue, set_zero=self._set_zero)
        # A connection that replaces another one counts only after the end of the queue was seen.
        is_held = offset is not None and self._stored.get(queue, offset) == offset
        if connection is not None and is_held and queue not in self._known_on:
            self._known_on[queue] = connection
        return offset

    def doubt(self, queue: Queue) -> None:
        """Ask the broker with the next commit whether it still has the offset."""
        if not self._is_doubtful(queue):
            self._known_on.pop(queue, None)

    async def _query(
        self, queue: Queue, *, set_zero: bool | None = None
    ) -> tuple[Connection | None, int | None]:
        """The connection to the master, None for a slave, and the committed offset."""
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
        if connection is None and offset == 0:
            raise MasterAway(queue, "a slave of it has no progress, which proves nothing")
        if not is_found:
            return connection, None
        if offset < 0:
            raise ProgressUnknown(
                f"the broker of {queue} returned {offset} as the offset of group {self._group!r}, "
                "which is not an offset"
            )
        if offset > 0:
            self._is_there(queue)
        return connection, offset

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        by_topic: dict[tuple[str, str], dict[Queue, int]] = {}
        for queue, offset in changed.items():
            by_topic.setdefault((queue.broker, queue.topic), {})[queue] = offset
        failed = await asyncio.gather(*map(self._store, by_topic.values()))
        return {queue: error for some in failed for queue, error in some.items()}

    async def _store(self, changed: dict[Queue, int]) -> dict[Queue, Exception]:
        """Commit the offsets of one topic at one broker."""
        (first, offset), *others = changed.items()
        error = await self._report(first, offset)
        if isinstance(error, RemotingError):
            # The others would wait as long for the same failure.
            return {queue: copy.copy(error) for queue in changed}
        errors = [error, *await asyncio.gather(*(self._report(*each) for each in others))]
        return {queue: error for queue, error in zip(changed, errors, strict=True) if error}

    def is_supposed(self, queue: Queue) -> bool:
        """Whether a broker may have answered 0 only because the queue is young."""
        return self._set_zero is not False and self.read(queue) == 0

    def forget(self, queue: Queue) -> None:
        super().forget(queue)
        self._known_on.pop(queue, None)
        self._reported_once.discard(queue)
        self._certain.discard(queue)

    def _is_changed(self, queue: Queue) -> bool:
        is_uncertain = queue in self._reported_once and self.read(queue) is not None
        return is_uncertain or super()._is_changed(queue) or self._is_doubtful(queue)

    def _is_doubtful(self, queue: Queue) -> bool:
        """Whether the connection of the last commit or read is gone or replaced."""
        if self.read(queue) is None:
            return False
        known_on = self._known_on.get(queue)
        return known_on is None or known_on is not self._master_connection(queue)

    def _master_connection(self, queue: Queue) -> Connection | None:
        master = self._engine.routes.brokers.get(queue.broker, {}).get(MASTER)
        return None if master is None else self._engine.open_connection(master)

    def _is_there(self, queue: Queue) -> None:
        """The master has an offset of the queue."""
        self._reported_once.discard(queue)
        self._certain.add(queue)

    def _was_reported(self, queue: Queue) -> None:
        if queue in self._reported_once:
            self._reported_once.discard(queue)
            self._certain.add(queue)
        elif queue not in self._certain and self.read(queue) is not None:
            self._reported_once.add(queue)

    async def _report(self, queue: Queue, offset: int) -> OrbitError | None:
        unseen: OrbitError | None = None
        try:
            if queue in self._known_on and self._is_doubtful(queue):
                unseen = await self._check_end(queue, offset)
            if self._stored.get(queue) == offset:
                # Committed before, once only or on another connection.
                connection, held = await self._query(queue, set_zero=False)
                if connection is not None and held is not None and held >= offset:
                    if held == offset and unseen is None:
                        self._known_on[queue] = connection
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
                away=unseen,
            )
        except OrbitError as error:
            return error
        if connection is not None:
            self._known_on[queue] = connection
            self._was_reported(queue)
            return None
        return MasterAway(queue, "only a slave has the commit; it is repeated")

    async def _check_end(self, queue: Queue, offset: int) -> OrbitError | None:
        """Raise `BrokerUnavailable` if a broker that was away has lost what was consumed.

        Returns the error if the master is still away; it must not get the offset unseen.
        """
        end = offset
        try:
            with suppress(BrokerRefused):
                end = await end_offset(self._engine, queue)
        except (BrokerUnavailable, ConnectFailed) as error:
            return error
        if end < offset:
            raise BrokerUnavailable(queue.broker, f"{queue} ends at {end}, before {offset}")
        return None

    async def _ask(
        self,
        queue: Queue,
        code: RequestCode,
        header: Header,
        accept: frozenset[int],
        *,
        away: OrbitError | None = None,
    ) -> tuple[Connection | None, Command]:
        """Ask the master; a slave only if the master cannot be reached.

        Returns the connection to the master, or None for a slave. With the error `away` of the
        master only slaves are asked.
        """
        refused = away
        for number, address in sorted(self._engine.routes.brokers.get(queue.broker, {}).items()):
            if away is not None and number == MASTER:
                continue
            try:
                # The connection on which the request is sent.
                used = await self._engine.connection(address, self._timeout)
                answer = await self._engine.ask(
                    address, code, header, timeout=self._timeout, accept=accept
                )
            except ConnectFailed as error:
                refused = refused or error
            else:
                return used if number == MASTER else None, answer
        raise refused or BrokerUnavailable(queue.broker, "no route has it")


# ---- progress in a file


log = logging.getLogger(__name__)

#: The folder below the home directory, as Apache's clients have it.
FOLDER = ".rocketmq_offsets"
FILE = "offsets.json"


class ProgressFileError(ClientError):
    """A progress file that cannot be read or written."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(
            f"progress file {path}: {problem}; repair it, or delete it and its .bak to begin where "
            "consume_from says"
        )


def progress_path(group: str, client_id: str, folder: Path | str | None = None) -> Path:
    """The file of a group; `folder` has the files of all groups."""
    root = Path.home() / FOLDER if folder is None else Path(folder)
    return root / client_id / group / FILE


class LocalFileProgress(TrackedProgress):
    """Offsets of a broadcasting consumer in one file, in the place and format of Java clients.

    The file is replaced as a whole, after its bytes are on the disk, and the previous one stays as
    ``.bak``. One file has one consumer; a second one is refused. A file that cannot be read,
    without a readable backup, is an error and not "no progress".
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = FolderLock(path.with_name("in-use.lock"))

    @property
    def path(self) -> Path:
        return self._path

    async def load(self) -> None:
        """Lock and read the file. Raises `SettingError` if another consumer has it."""
        await asyncio.to_thread(self._take)
        for queue, offset in (await asyncio.to_thread(read_positions, self._path)).items():
            self.update(queue, offset, increase_only=False)
            self._stored[queue] = offset

    def close(self) -> None:
        """Unlock the file. May be repeated."""
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
    """The offsets in a file, or else in its backup; empty if neither exists."""
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
    """Write offsets into a file, beside those of other queues."""
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
    """The offsets in one file; None when there is no such file."""
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
    """The layout of Java clients:

    maps keyed by objects are not JSON, but their readers need them.
    """
    entries = b",\n".join(
        b'\t\t{\n\t\t\t"brokerName":%b,\n\t\t\t"queueId":%d,\n\t\t\t"topic":%b\n\t\t}:%d'
        % (quoted(queue.broker), queue.id, quoted(queue.topic), offset)
        for queue, offset in sorted(positions.items())
    )
    return b'{\n\t"offsetTable":{\n%b\n\t}\n}' % entries


# ---- progress stores of applications


class ProgressStoreFailed(ClientError):
    """The application's progress store raised an error."""

    retriable = True

    def __init__(self, store: object, what: str, cause: Exception) -> None:
        self.what = what
        super().__init__(
            f"{type(store).__name__}.{what} failed: {type(cause).__name__}: {cause}; "
            "the consumer goes on and tries again"
        )


def guarded(store: ProgressStore) -> ProgressStore:
    """The application's store; every exception becomes an `OrbitError`."""
    return cast("ProgressStore", _GuardedStore(store))


class _GuardedStore:
    """Forwards every method."""

    def __init__(self, store: ProgressStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any, **options: Any) -> Any:
            with self._declared(name):
                result = method(*args, **options)
            return self._awaited(name, result) if inspect.isawaitable(result) else result

        return call

    async def _awaited(self, name: str, result: Awaitable[Any]) -> Any:
        with self._declared(name):
            return await result

    @contextmanager
    def _declared(self, name: str) -> Iterator[None]:
        try:
            yield
        except OrbitError:
            raise
        except Exception as error:
            # Whatever a driver raises, also what looks like a timeout of ours.
            raise ProgressStoreFailed(self._store, name, error) from error


# ---- when offsets are committed


#: Seconds between two early commits, and between a reset and an early commit: the author of the
#: reset can read the offset back.
_DISTANCE: Final = 1.0


class OffsetCommitter:
    """Commits the positions of the owned queues. Belongs to the event loop.

    All queues are committed every few seconds. A queue that becomes idle is committed early, as
    a person or a job may be waiting for that.
    """

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
        """`when_idle`: seconds after which a queue counts as idle; 0: no early commits."""
        self._engine = engine
        self._group = group
        self._progress = progress
        self._owned = owned
        self._interval = interval
        self._when_idle = when_idle
        self._outages = LogOncePerOutage(log)
        self._regular: Periodic | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._no_early_before = float("-inf")
        #: What was consumed until then is covered by an early commit.
        self._covered = float("-inf")

    def start(self) -> None:
        self._regular = self._engine.every(
            self._interval, self._report_all, name=f"progress of {self._group}"
        )

    def stop(self) -> None:
        """Stop; owned queues are committed when they are released."""
        self._is_stopped = True
        if self._regular is not None:
            self._regular.stop()
        if self._look is not None:
            self._look.cancel()

    def became_empty(self) -> None:
        """Some queue has no cached message any more. Called often; cheap."""
        if self._look is None and self._when_idle > 0 and not self._is_stopped:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(self._when_idle, self._look_for_idle)

    def was_reset(self) -> None:
        """Offsets were reset: no early commit for a moment."""
        self._no_early_before = self._engine.clock.monotonic() + _DISTANCE

    def _look_for_idle(self) -> None:
        self._look = None
        now = self._engine.clock.monotonic()
        empty = [
            owned
            for owned in self._owned.values()
            if owned.last_consumed > self._covered and not (len(owned.window) or owned.is_draining)
        ]
        latest = now - self._when_idle
        idle = [each.queue for each in empty if each.last_consumed <= latest]
        if now < self._no_early_before or len(idle) < len(empty):
            self.became_empty()
        if now >= self._no_early_before and idle and self._engine.is_running:
            self._no_early_before = now + _DISTANCE
            self._covered = latest
            self._engine.spawn(self._report(idle), f"progress of idle queues of {self._group}")

    async def _report_all(self) -> None:
        # A queue that is being released commits by itself: its broker may have been away.
        await self._report(queue for queue, owned in self._owned.items() if not owned.is_draining)

    async def _report(self, queues: Iterable[Queue]) -> None:
        try:
            await self._progress.persist(list(queues))
        except OrbitError as error:
            self._outages.failed(
                "progress", "progress of group %s cannot be committed: %s", self._group, error
            )
        else:
            self._outages.recovered("progress")


_SERVED: Final = frozenset(int(status.value) for status in PullStatus)


async def message_at(engine: Engine, group: str, queue: Queue, offset: int) -> StoredMessage | None:
    """The message that the master has at an offset; None if there is none. Raises `OrbitError`."""
    # A pending reset stays with the broker: the members of the group have not received it yet.
    header = look(group, queue, offset, keep_reset=True)
    answer = await engine.ask(
        engine.routes.master(queue.broker), RequestCode.PULL_MESSAGE, header, accept=_SERVED
    )
    pulled = read_pulled(answer, offset)
    if pulled is None or pulled.status is not PullStatus.FOUND:
        return None
    for message in without_inner_batches(decode_messages(pulled.body), offset):
        return message if message.queue_offset == offset else None
    return None


def look(
    group: str, queue: Queue, offset: int, *, keep_reset: bool | None = None
) -> PullMessageRequest:
    """A pull of one message that moves no offset; consuming accounts may send it."""
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


# ---- where a queue begins
#
# | no progress, `consume_from` | ordinary topic          | retry topic |
# |-----------------------------|-------------------------|-------------|
# | latest (the default)        | the end                 | 0           |
# | earliest                    | the first message       | 0           |
# | a time                      | the first at or after it| the end     |
# | an offset                   | it, within its bounds   | 0           |
#
# A retry topic begins at 0 because all its messages are the group's own. With a time it begins at
# the end, as with Apache: clients of one group must not begin at different places.


#: What users may give: "latest", "earliest", a time, or an offset.
Beginning: TypeAlias = AnyPosition

_WIRE_NAMES: Mapping[Place, ConsumeFromWhere] = {
    Place.LATEST: ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
    Place.EARLIEST: ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    Place.TIME: ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
    # RocketMQ has no name for it.
    Place.OFFSET: ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
}


def wire_name(begin: Position) -> ConsumeFromWhere:
    """The name in heartbeats."""
    return _WIRE_NAMES[begin.place]


def consume_from(given: Beginning, name: str = "consume_from") -> Position:
    """Where a group without progress begins, from user input."""
    return position(given, name)


class StartOffsets:
    """Finds where queues begin: at the committed offset, and without one as `consume_from` says.

    A request that fails is an error, and the queue begins later: a guess would lose messages or
    repeat all of them. The end of a queue is read before its progress and kept until the queue
    begins, so that messages stored meanwhile are not skipped. A start without progress is committed
    before the first pull: the next owner would begin at an end that has moved on.
    """

    def __init__(
        self, engine: Engine, progress: ProgressStore, begin: Position = Position.LATEST
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._begin = begin
        #: The ends of queues at the first look, until they begin.
        self._ends: dict[Queue, int] = {}

    def forget(self, queue: Queue) -> None:
        """The offset of a queue was set: its earlier end does not count."""
        self._ends.pop(queue, None)

    async def offset(self, queue: Queue) -> int:
        """The offset of the first message to pull. Raises `OrbitError`."""
        offset, _ = await self._find(queue)
        self._ends.pop(queue, None)
        return offset

    async def begin(self, queue: Queue, is_wanted: Callable[[], bool] = lambda: True) -> int:
        """The same, and commits it unless it was committed. Raises `OrbitError`.

        Commits nothing if the queue `is_wanted` no more: another member may have begun it.
        """
        offset, is_stored = await self._find(queue)
        progress = self._progress
        if not is_wanted():
            return offset
        if not is_stored:
            progress.update(queue, offset)
            await self._commit(queue)
        elif isinstance(progress, BrokerProgress) and progress.is_supposed(queue):
            progress.insist([queue])
            await self._commit(queue)
        self._ends.pop(queue, None)
        return offset

    async def _find(self, queue: Queue) -> tuple[int, bool]:
        """The offset at which a queue begins, and whether it is the committed one."""
        unseen = await self._look(queue) if self._is_at_end(queue) else None
        stored = await self._progress.fetch(queue)
        if stored is not None:
            return stored, True
        if unseen is not None:
            raise unseen
        end = self._ends.get(queue)
        return (await self._without_progress(queue) if end is None else end), False

    async def _look(self, queue: Queue) -> OrbitError | None:
        """Read the end of a queue; the error, which matters only without progress."""
        try:
            end = await end_offset(self._engine, queue)
        except (BrokerRefused, BrokerUnavailable, RemotingError) as error:
            return error
        # A broker that was killed may have lost the end that was read.
        self._ends[queue] = min(end, self._ends.get(queue, end))
        return None

    async def _commit(self, queue: Queue) -> None:
        # A broker that refuses commits of the group refuses its pulls, too, and that is reported.
        # Until then the position is in memory and is committed later.
        with suppress(BrokerRefused):
            await self._progress.persist([queue])

    async def _without_progress(self, queue: Queue) -> int:
        """Where a queue without progress begins now, by the table above."""
        if self._is_at_end(queue):
            return await end_offset(self._engine, queue)
        if is_retry_topic(queue.topic):
            return 0
        if self._begin.place is Place.EARLIEST:
            return await self._first(queue)
        if self._begin.offset is not None:
            first = await self._first(queue)
            return min(max(self._begin.offset, first), await end_offset(self._engine, queue))
        return await offset_at(self._engine, queue, self._begin.time or 0.0)

    def _is_at_end(self, queue: Queue) -> bool:
        """Whether a queue without progress begins at its end."""
        ends = Place.TIME if is_retry_topic(queue.topic) else Place.LATEST
        return self._begin.place is ends

    async def _first(self, queue: Queue) -> int:
        try:
            return await first_offset(self._engine, queue)
        except BrokerRefused as refused:
            if refused.code != ResponseCode.NO_PERMISSION:
                raise
            # An account that may only consume may not ask. As Java clients do: if there is no
            # message at 0 any more, the answer to the first pull names the first offset.
            return 0


async def first_offset(engine: Engine, queue: Queue) -> int:
    """The offset of the first message at the broker."""
    header = GetMinOffsetRequest(topic=queue.topic, queue_id=queue.id, broker_name=queue.broker)
    return await _ask(engine, queue, RequestCode.GET_MIN_OFFSET, header)


async def end_offset(engine: Engine, queue: Queue) -> int:
    """The offset of the next message to be stored."""
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
    # Masters only: a slave's end lies behind, and messages between would be delivered twice.
    answer = await engine.ask(engine.routes.master(queue.broker), code, header)
    return answer.header(OffsetResponse).offset
