"""Pull consumers: they fetch ahead, and return messages when they are polled.

`PullConsumer` is `AsyncPullConsumer` on an event loop in a thread of its own. If a blocking call is
interrupted, the messages that it took and did not return are given back by the next call.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    ParamSpec,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
)

from orbitmq.arguments import check_known, explained, warn_deprecated
from orbitmq.client.consumer.progress import Beginning, consume_from
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.consumer.strategies import Strategy, strategy_named
from orbitmq.client.consumer.subscriptions import Subscription
from orbitmq.client.engine import Engine, ProcessCheck
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.cache import chunks_to_arrow
from orbitmq.client.pullconsumer.core import (
    END,
    FIRST,
    ONE_AT_A_TIME,
    WHAT,
    Commits,
    Find,
    PullCore,
    Trouble,
    at_position,
    at_time,
    find_offsets,
    lags,
    positions_of,
)
from orbitmq.client.routes import Queue, each_queue
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.errors import NotRunning, OrbitError, SettingError, WrongUse
from orbitmq.names import check_group, wrap_group, wrap_topic
from orbitmq.parsing import AnyPosition, Duration, Fields, Instant, instance, position, seconds

if TYPE_CHECKING:
    from orbitmq.client.consumer.pull import PullDelay
    from orbitmq.client.consumer.rebalance import AssignmentListener
    from orbitmq.client.consumer.settings import RebalanceSettings
    from orbitmq.client.pullconsumer.cache import Chunk
    from orbitmq.clock import Clock


T = TypeVar("T")


class PullOptions(TypedDict, total=False):
    """The options of a pull consumer beside its client."""

    polling: PollSettings | None
    #: Where a queue without a committed offset begins: "latest" (the default), "earliest", a time
    #: ("2026-11-18T09:00", "-10m", a datetime), or an offset.
    consume_from: Beginning
    strategy: Strategy | str
    rebalance: RebalanceSettings | None
    #: Called with a topic, all its queues and the own ones whenever these change.
    on_assignment: AssignmentListener | None
    #: Deprecated: `strategy`.
    allocation: Strategy | str
    #: Deprecated: `rebalance`.
    rebalancing: RebalanceSettings | None


def _renamed(options: PullOptions) -> PullOptions:
    """The options by their present names."""
    if "allocation" in options:
        warn_deprecated("PullConsumer(allocation=)", "strategy=")
        options["strategy"] = options.pop("allocation")
    if "rebalancing" in options:
        warn_deprecated("PullConsumer(rebalancing=)", "rebalance=")
        options["rebalance"] = options.pop("rebalancing")
    check_known(options, tuple(PullOptions.__annotations__))
    return options


MIB = 1024 * 1024


def _pulls() -> PullSettings:
    # Apache's brokers give 32 messages whatever is asked; ours gives more, and arrays like many.
    return PullSettings(batch_size=1024, batch_bytes=MIB)


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class PollSettings:
    """Numbers and seconds of polling."""

    #: Commit automatically what earlier polls returned. Off: only `commit` stores progress; a group
    #: without progress then begins by `consume_from` again until something is committed.
    auto_commit: bool = True
    auto_commit_interval: float = 5.0
    max_messages: int = 500  #: of a poll without a number
    timeout: float = 5.0  #: of a poll without a timeout
    #: Limits of messages fetched ahead; a queue above one is not pulled until it is polled.
    max_cached_messages: int = 5000  #: per queue
    max_cached_bytes: int = 16 * MIB  #: per queue
    max_cached_bytes_in_all: int = 256 * MIB  #: of all queues
    pull: PullSettings = field(default_factory=_pulls)

    def __post_init__(self) -> None:
        fields = Fields(self, "poll")
        fields.switches("auto_commit")
        fields.durations("auto_commit_interval")
        fields.durations("timeout", least=0)
        fields.whole("max_messages", "max_cached_messages")
        fields.whole("max_cached_bytes", "max_cached_bytes_in_all")
        fields.kinds(pull=PullSettings)


@dataclass(frozen=True, slots=True)
class PullStatistics:
    """The state of a pull consumer."""

    #: How often pulls were delayed, by queue and reason.
    delays: dict[tuple[Queue, PullDelay], int]
    #: Messages behind the end of each queue, as of its last pull.
    lag: dict[Queue, int]
    #: Present problems that delay messages, a sentence each.
    troubles: tuple[str, ...]


#: Seconds that an iteration waits before it checks for problems.
A_WHILE: Final = 5.0


@explained()
class AsyncPullConsumer:
    """Fetches messages ahead, and returns them when it is polled.

    async with AsyncPullConsumer("billing", name_server="localhost:9876") as consumer:
        consumer.subscribe("orders", "paid || refunded")
        async for message in consumer:
            ...

    It subscribes to topics, whose queues it shares with the other members of its group, or is
    assigned queues; not both. It does not retry messages: the application handles failures.

    With `auto_commit` (the default) a message counts as done when it was returned by a poll and
    another poll has followed, and is committed within the interval after that. When the consumer is
    stopped, everything returned counts as done, unless an error ends its `async with` block, or an
    error that occurred after the last poll is being handled where `stop` is called (in a `finally`,
    for instance). Without it, only `commit` stores progress: a new group that begins at the end may
    skip, after a crash, what it polled before its first commit;
    `commit({queue: consumer.position(queue)})` before the first poll prevents that.

    One task polls at a time.
    """

    def __init__(
        self,
        group: str,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        **options: Unpack[PullOptions],
    ) -> None:
        self._set_up(Engine(resolve(name_server, client)), True, group, _renamed(options))

    @classmethod
    def on(cls, engine: Engine, group: str, **options: Unpack[PullOptions]) -> AsyncPullConsumer:
        """A consumer that shares the connections of a running client, which outlives it."""
        consumer = cls.__new__(cls)
        consumer._set_up(engine, False, group, _renamed(options))
        return consumer

    def _set_up(self, engine: Engine, owns_engine: bool, group: str, options: PullOptions) -> None:
        self.group = check_group(group)
        polling = options.get("polling")
        self.settings = (
            PollSettings() if polling is None else instance(polling, "polling", PollSettings)
        )
        self._namespace = engine.settings.namespace
        self._check_process = ProcessCheck(WHAT, from_start=True)
        self._trouble = Trouble()
        self._core = PullCore(
            engine,
            wrap_group(self._namespace, group),
            self.settings,
            owns_engine=owns_engine,
            strategy=strategy_named(options.get("strategy", "AVG"), "strategy"),
            begin=consume_from(options.get("consume_from", "latest")),
            rebalance=options.get("rebalance"),
            listener=options.get("on_assignment"),
        )

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # What was in work when the error occurred is not done.
        await self._core.stop(settles=error is None)

    async def start(self) -> None:
        """Join the group. Raises `SubscriptionRefused` when a broker cannot serve a condition."""
        self._check_process.begin()
        self._trouble.note()
        await self._core.start()

    async def stop(self, *, done: bool | None = None) -> None:
        """Commit (if that is automatic), release the queues and leave. May be called again.

        `done` is whether what the last poll returned counts as done, for automatic commits. By
        default it does, unless an error that occurred after that poll is being handled: then it is
        delivered again, as when the error ends an `async with` block.

        The first of several callers sets `done`, and all wait for the end. The stop continues when
        a caller is cancelled; call it again to wait for the end.
        """
        await self._core.stop(settles=not self._trouble.is_there if done is None else done)

    @property
    def client_id(self) -> str:
        return self._core.engine.client_id

    @property
    def clock(self) -> Clock:
        return self._core.engine.clock

    # ---- which queues

    def subscribe(self, topic: str, tags: str | None = None, *, sql: str | None = None) -> None:
        """Share the queues of a topic with the group; by tags (`a || b`) or by a SQL92 condition.

        Replaces an earlier subscription to the topic for everything that no poll has returned yet:
        what was fetched ahead is fetched again. All members of a group must subscribe alike.
        """
        self._core.subscribe(self._subscription(topic, tags, sql))

    def unsubscribe(self, topic: str) -> None:
        """Release the queues of a topic; what polls returned of them counts as done."""
        self._core.unsubscribe(wrap_topic(self._namespace, topic))

    async def assign(
        self, queues: Iterable[Queue], tags: str | None = None, *, sql: str | None = None
    ) -> None:
        """Read exactly these queues from now on, independently of the group's other members.

        Queues that were assigned before continue where they are, by the new filter; what was
        returned so far counts as done. Raises `NoRoute`, `SettingError` for a queue that does not
        exist, or `SubscriptionRefused`; then nothing has changed.
        """
        await self._core.assign(*self._wanted(queues, tags, sql))

    def plan(
        self, queues: Iterable[Queue], tags: str | None = None, sql: str | None = None
    ) -> None:
        """Set the queues that the start assigns."""
        self._core.plan(*self._wanted(queues, tags, sql))

    def _wanted(
        self, queues: Iterable[Queue], tags: str | None, sql: str | None
    ) -> tuple[list[Subscription], list[Queue]]:
        """The subscriptions and the queues of an assignment, as brokers know them."""
        wanted = [self._known(queue) for queue in queues]
        topics = sorted({queue.topic for queue in wanted})
        return [self._subscription(topic, tags, sql) for topic in topics], wanted

    def _known(self, queue: Queue) -> Queue:
        """A queue as brokers know it; the application may omit the namespace."""
        if not isinstance(queue, Queue):
            raise SettingError(f"queues are Queue(topic, broker, id), got {queue!r}")
        topic = wrap_topic(self._namespace, queue.topic)
        return queue if topic == queue.topic else Queue(topic, queue.broker, queue.id)

    def _subscription(self, topic: str, tags: str | None, sql: str | None) -> Subscription:
        if tags is not None and sql is not None:
            raise SettingError("a subscription is by tags or by a SQL92 condition, not by both")
        topic = wrap_topic(self._namespace, topic)
        return Subscription.by_tags(topic, tags) if sql is None else Subscription.by_sql(topic, sql)

    def assignment(self) -> tuple[Queue, ...]:
        """The queues that this consumer has now."""
        return tuple(
            sorted(queue for queue, owned in self._core.owned.items() if not owned.is_draining)
        )

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """All queues of a topic that can be read. Raises `NoRoute`."""
        self._core.check_running()
        return await self._core.engine.routes.subscribe_queues(wrap_topic(self._namespace, topic))

    # ---- messages

    async def poll(
        self,
        timeout: Duration | None = None,  # noqa: ASYNC109  # then the result is empty
        *,
        max_messages: int | None = None,
    ) -> list[ReceivedMessage]:
        """The next messages of any assigned queue; empty when none arrive within the time.

        Raises `AccessDenied` immediately when this account may read none of the topics.

        Until one of its topics was consumed, a poll without messages raises the reason at its end:
        no name server answers (`NoNameServer`), the topic does not exist (`NoRoute`), or the broker
        does not have the group (`GroupRefused`). Another poll may succeed. Later and other problems
        are logged: see `statistics`.
        """
        until = self.deadline(timeout)
        while True:
            chunks = await self.next_chunks(until, max_messages)
            messages = self._read(chunks)
            if messages or not chunks:
                return messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """Wait for the next message; ends when the consumer is stopped.

        Raises `AccessDenied` as `poll` does, and `NoNameServer`, `NoRoute` or `GroupRefused` after
        some seconds without any message; the next call continues.
        """
        core = self._core
        self._trouble.note()
        while core.is_running:
            chunks = core.chunks_now(1) or await core.next_chunks(1, None, A_WHILE)
            if messages := self._read(chunks):
                return messages[0]
        raise StopAsyncIteration

    async def poll_arrow(
        self,
        timeout: Duration | None = None,  # noqa: ASYNC109  # as in `poll`
        *,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        min_messages: int = 1,
        columns: Sequence[str] | None = None,
        null_bad_bodies: bool = False,
    ) -> Any:
        """The next messages as a `pyarrow.RecordBatch`, straight from the pulled bytes.

        Has no rows when none arrive within the time. With `min_messages` it waits for that many as
        long as the time lasts; columns pay off from about a thousand rows. `columns` chooses names
        of `orbitmq.message.arrow.MESSAGE_SCHEMA`.
        A damaged body raises `BodyCorrupt`, and the same messages are returned again; with
        `null_bad_bodies` it is null instead. Raises `AccessDenied`, `NoNameServer`, `NoRoute` or
        `GroupRefused` as `poll` does.
        """
        until = self.deadline(timeout)
        while True:
            chunks = await self.next_chunks(until, max_messages, max_bytes, min_messages)
            try:
                batch = chunks_to_arrow(chunks, columns, null_bad_bodies=null_bad_bodies)
            except BaseException:
                self.give_back(chunks)
                raise
            if batch.num_rows or not chunks:
                return batch

    async def next_chunks(
        self,
        until: float,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        min_messages: int = 1,
    ) -> list[Chunk]:
        """The messages of a poll, not decoded yet."""
        count = self.settings.max_messages if max_messages is None else max_messages
        if count < 1 or (max_bytes is not None and max_bytes < 1):
            raise SettingError(
                f"a poll must allow at least one message and byte, got {count} and {max_bytes}"
            )
        self._trouble.note()
        left = max(0.0, until - self.clock.monotonic())
        return await self._core.next_chunks(count, max_bytes, left, least=min(min_messages, count))

    def messages_of(self, chunks: Sequence[Chunk]) -> list[ReceivedMessage]:
        """Chunks as messages."""
        group, namespace = self.group, self._namespace
        return [m for chunk in chunks for m in chunk.messages(group, namespace)]

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Return chunks that could not be read to the cache."""
        self._core.cache.give_back(chunks)

    def deadline(self, timeout: Duration | None) -> float:
        """The end of a poll that begins now."""
        wait = self.settings.timeout if timeout is None else seconds(timeout, "timeout")
        return self.clock.monotonic() + wait

    def _read(self, chunks: Sequence[Chunk]) -> list[ReceivedMessage]:
        try:
            return self.messages_of(chunks)
        except BaseException:
            # Messages that the application did not get must not count as done.
            self.give_back(chunks)
            raise

    # ---- positions

    def position(self, queue: Queue) -> int:
        """The offset that the next poll of a queue begins with. Raises `QueueNotAssigned`."""
        return self._core.position(self._known(queue))

    async def seek(self, queue: Queue, offset: int | AnyPosition) -> None:
        """Continue from this offset, or from "earliest", "latest" or a time as `consume_from` has.

        Raises `QueueNotAssigned` or `OffsetOutOfRange`.
        """
        if isinstance(offset, int) and not isinstance(offset, bool):
            await self._core.seek({self._known(queue): offset})
        else:
            await self._seek_to((queue,), at_position(position(offset, "seek")))

    async def seek_to_begin(self, *queues: Queue) -> None:
        """Continue from the first stored message, in all assigned queues or in these."""
        await self._seek_to(queues, FIRST)

    async def seek_to_end(self, *queues: Queue) -> None:
        """Continue with messages that are stored from now on."""
        await self._seek_to(queues, END)

    async def seek_to_time(self, time: Instant, *queues: Queue) -> None:
        """Continue from the first message stored at or after a time; from the end without one."""
        await self._seek_to(queues, at_time(time))

    async def _seek_to(self, queues: Sequence[Queue], find: Find) -> None:
        found = await self._found(queues or None, find)
        await self._core.seek({self._known(queue): offset for queue, offset in found.items()})

    def pause(self, *queues: Queue | Iterable[Queue]) -> None:
        """Stop fetching and returning messages of these queues, or of all; they stay assigned.

        Queues are given one by one, or several as a list: `pause(*queues)`, `pause(queues)`.
        """
        self._core.pause(self._each(queues))

    def resume(self, *queues: Queue | Iterable[Queue]) -> None:
        """Continue with these queues, given as to `pause`, or with all."""
        self._core.resume(self._each(queues))

    def _each(self, queues: Sequence[Queue | Iterable[Queue]]) -> tuple[Queue, ...]:
        """Queues given one by one or as a list; without any argument, all assigned ones."""
        return tuple(map(self._known, each_queue(queues))) if queues else self.assignment()

    # ---- what brokers know

    async def first_offsets(self, queues: Iterable[Queue] | None = None) -> dict[Queue, int]:
        """The offset of the first stored message of each queue."""
        return await self._found(queues, FIRST)

    async def end_offsets(self, queues: Iterable[Queue] | None = None) -> dict[Queue, int]:
        """The offset that the next message of each queue will get."""
        return await self._found(queues, END)

    async def offsets_for_time(
        self, time: Instant, queues: Iterable[Queue] | None = None
    ) -> dict[Queue, int]:
        """The offsets of the first messages stored at or after a time; the end without one."""
        return await self._found(queues, at_time(time))

    async def _found(self, queues: Iterable[Queue] | None, find: Find) -> dict[Queue, int]:
        asked = self.assignment() if queues is None else tuple(queues)
        found = await find_offsets(self._core, map(self._known, asked), find)
        # Named as they were asked for.
        return {queue: found[self._known(queue)] for queue in asked}

    def lag(self) -> dict[Queue, int]:
        """Messages in the assigned queues that were not returned, as of the last pulls."""
        return lags(self._core)

    # ---- progress

    async def commit(self, done: Commits | None = None) -> dict[Queue, int]:
        """Store progress, and return when the broker has it. Returns the positions stored.

        Without an argument: everything that polls have returned. A position is the offset of the
        next message to consume; a message stands for everything up to it. Raises the broker's
        refusal, `QueueNotAssigned` for a queue that was lost meanwhile, and `OffsetOutOfRange` for
        a position beyond the end, which would skip later messages.
        """
        if done is None:
            return await self._core.commit()
        positions = positions_of(done)
        stored = await self._core.commit(
            {self._known(queue): offset for queue, offset in positions.items()}
        )
        # Named as they were given.
        return {queue: stored[self._known(queue)] for queue in positions}

    async def commit_but(self, unread: Iterable[tuple[Chunk, int]]) -> dict[Queue, int]:
        """Commit everything that polls have returned, except these chunks from these offsets on."""
        cache = self._core.cache
        positions = {queue.owned.queue: queue.returned for queue in cache.queues}
        generations = {queue.owned: queue.generation for queue in cache.queues}
        for chunk, offset in unread:
            # Chunks of a queue that was lost or sought meanwhile are stale.
            if generations.get(chunk.owned) == chunk.generation:
                queue = chunk.owned.queue
                positions[queue] = min(positions[queue], offset)
        return await self._core.commit(positions)

    async def committed(self, queue: Queue) -> int | None:
        """The group's progress in a queue at the broker; None without any."""
        self._core.check_running()
        queue = self._known(queue)
        await self._core.engine.routes.get(queue.topic)
        return await self._core.progress.stored(queue)

    def statistics(self) -> PullStatistics:
        """The delays, the lag and the present problems."""
        return PullStatistics(self._core.puller.counts(), self.lag(), self._core.troubles)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Deprecated: use `statistics().troubles`."""
        warn_deprecated("AsyncPullConsumer.troubles", "statistics().troubles")
        return self.statistics().troubles

    def counts(self) -> dict[tuple[Queue, PullDelay], int]:
        """Deprecated: use `statistics().delays`."""
        warn_deprecated("AsyncPullConsumer.counts()", "statistics().delays")
        return self.statistics().delays


# ---- the blocking face


Q = ParamSpec("Q")
_Async: TypeAlias = Callable[Concatenate[AsyncPullConsumer, Q], Coroutine[Any, Any, T]]
_Plain: TypeAlias = Callable[Concatenate[AsyncPullConsumer, Q], T]
_Blocking: TypeAlias = Callable[Concatenate["PullConsumer", Q], T]


def _waiting(method: _Async[Q, T], *, gives_back: bool = True) -> _Blocking[Q, T]:
    """A coroutine method as a blocking one.

    `gives_back`: messages that an iteration has read ahead are given back first, so that they do
    not count as returned.
    """

    @functools.wraps(method)
    def blocking(self: PullConsumer, /, *args: Q.args, **options: Q.kwargs) -> T:
        if gives_back:
            self._take_back()
        return self._run(method(self._consumer, *args, **options))

    return blocking


def _now(method: _Plain[Q, T], *, gives_back: bool = True) -> _Blocking[Q, T]:
    """A method that does not wait, called on the consumer's thread; see `_waiting`."""

    @functools.wraps(method)
    def blocking(self: PullConsumer, /, *args: Q.args, **options: Q.kwargs) -> T:
        if gives_back:
            self._take_back()
        return self._do(lambda: method(self._consumer, *args, **options))

    return blocking


@explained()
class PullConsumer:
    """Fetches messages ahead, and returns them when it is polled.

    with PullConsumer("billing", name_server="localhost:9876") as consumer:
        consumer.subscribe("orders", "paid || refunded")
        for message in consumer:
            ...

    The blocking face of `AsyncPullConsumer`, with the same methods. Messages are fetched on a
    thread of its own and decoded on the caller's. One thread polls at a time; the other methods may
    be called from any thread.
    """

    def __init__(
        self,
        group: str,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        **options: Unpack[PullOptions],
    ) -> None:
        """As for `AsyncPullConsumer`; `on_assignment` is called on the consumer's own thread."""
        self._consumer = AsyncPullConsumer(
            group, name_server=name_server, client=client, **_renamed(options)
        )
        self.group = self._consumer.group
        self.settings = self._consumer.settings
        self._thread = LoopThread(f"orbitmq pull consumer {group}")
        self._check_process = ProcessCheck(WHAT, from_start=True)
        self._is_running = False
        self._was_stopped = False
        #: Messages that an iteration has taken and not returned yet.
        self._iterated: deque[tuple[Chunk, ReceivedMessage]] = deque()
        #: Chunks that a call has taken and not returned. The call was interrupted if there are some
        #: while no call is taking chunks.
        self._lent: list[Chunk] | None = None
        self._is_taking = False
        self._trouble = Trouble()

    # ---- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop(self._consumer.__aexit__(kind, error, trace))

    def start(self) -> None:
        """Join the group. Raises `SubscriptionRefused` when a broker cannot serve a condition."""
        self._check_process.begin()
        if self._was_stopped:
            raise NotRunning(WHAT, was_stopped=True)
        self._trouble.note()
        self._thread.start()
        try:
            self._thread.run(self._consumer.start())
        except BaseException:
            if not self._is_running:
                self._thread.stop()
            raise
        self._is_running = True

    def stop(self, *, done: bool | None = None) -> None:
        """Commit (if that is automatic), release the queues and leave. May be called again.

        `done` is whether what the last poll returned counts as done, for automatic commits. By
        default it does, unless an error that occurred after that poll is being handled: then it is
        delivered again, as when the error ends a `with` block.
        """
        self._stop(self._consumer.stop(done=not self._trouble.is_there if done is None else done))

    def _stop(self, stopping: Coroutine[Any, Any, None]) -> None:
        if self._is_running and self._check_process.is_same:
            with suppress(NotRunning):  # as below
                self._take_back()
        self._is_running = False
        self._was_stopped = True
        if not self._thread.is_running:
            stopping.close()
            return
        try:
            # A second caller waits, too: its program may exit when this returns.
            with suppress(NotRunning):  # another thread has stopped it meanwhile
                self._thread.run(stopping)
        finally:
            self._thread.stop()

    @property
    def client_id(self) -> str:
        return self._consumer.client_id

    # ---- which queues

    subscribe = _now(AsyncPullConsumer.subscribe)
    unsubscribe = _now(AsyncPullConsumer.unsubscribe)
    assignment = _now(AsyncPullConsumer.assignment, gives_back=False)
    queues = _waiting(AsyncPullConsumer.queues, gives_back=False)

    def assign(
        self, queues: Iterable[Queue], tags: str | None = None, *, sql: str | None = None
    ) -> None:
        """Read exactly these queues from now on, independently of the group's other members.

        See `AsyncPullConsumer.assign`.
        """
        self._take_back()
        if self._is_running:
            self._run(self._consumer.assign(tuple(queues), tags, sql=sql))
        else:
            self._do(lambda: self._consumer.plan(queues, tags, sql))

    # ---- messages

    def poll(
        self, timeout: Duration | None = None, *, max_messages: int | None = None
    ) -> list[ReceivedMessage]:
        """The next messages of any assigned queue; empty when none arrive within the time.

        Raises `AccessDenied`, `NoNameServer`, `NoRoute` or `GroupRefused` as
        `AsyncPullConsumer.poll` does.
        """
        self._take_back()
        until = self._consumer.deadline(timeout)
        while True:
            messages, were_any = self._taken(self._consumer.messages_of, until, max_messages)
            if messages or not were_any:
                return messages

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReceivedMessage:
        """Wait for the next message; ends when the consumer is stopped.

        Messages are taken from the consumer's thread in batches; for automatic commits a batch
        counts as done as a whole. Other methods see the position of the iteration.

        Raises `AccessDenied` as `poll` does, and `NoNameServer`, `NoRoute` or `GroupRefused` after
        some seconds without any message; the next call continues.
        """
        while self._is_running:
            if not self._iterated:
                try:
                    self._fill_iteration()
                except NotRunning:
                    break  # stopped by another thread
                continue
            try:
                # No call is made from here to the return, so that no interrupt comes between taking
                # a message and returning it.
                chunk, message = self._iterated[0]
                del self._iterated[0]
            except IndexError:
                continue  # given back by another thread
            if not chunk.owned.is_dropped:
                return message
        raise StopIteration

    def poll_arrow(
        self,
        timeout: Duration | None = None,
        *,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        min_messages: int = 1,
        columns: Sequence[str] | None = None,
        null_bad_bodies: bool = False,
    ) -> Any:
        """The next messages as a `pyarrow.RecordBatch`; see `AsyncPullConsumer.poll_arrow`.

        Raises `AccessDenied`, `NoNameServer`, `NoRoute` or `GroupRefused` as `poll` does.
        """
        self._take_back()
        read = partial(chunks_to_arrow, columns=columns, null_bad_bodies=null_bad_bodies)
        until = self._consumer.deadline(timeout)
        while True:
            batch, were_any = self._taken(read, until, max_messages, max_bytes, min_messages)
            if batch.num_rows or not were_any:
                return batch

    def _fill_iteration(self) -> None:
        self._take_back()
        self._iterated, _ = self._taken(self._read_each, self._consumer.deadline(A_WHILE))

    def _read_each(self, chunks: list[Chunk]) -> deque[tuple[Chunk, ReceivedMessage]]:
        """The messages with their chunks."""
        read = self._consumer.messages_of
        return deque((chunk, message) for chunk in chunks for message in read([chunk]))

    # ---- messages that were taken and not returned yet

    def _taken(
        self,
        read: Callable[[list[Chunk]], T],
        until: float,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        min_messages: int = 1,
    ) -> tuple[T, bool]:
        """The next chunks, decoded by `read` on this thread, and whether there were any.

        They count as returned when this call returns. After an error or an interrupt before, the
        next call gives them back by `_take_back`.
        """
        if self._is_taking:
            raise WrongUse(ONE_AT_A_TIME)
        self._trouble.note()
        lent: list[Chunk] = []
        self._lent = lent
        try:
            self._is_taking = True
            self._run(self._lend(lent, until, max_messages, max_bytes, min_messages))
            found = read(lent), bool(lent)
            self._lent = None
        finally:
            self._is_taking = False
        return found

    async def _lend(self, lent: list[Chunk], *limits: Any) -> None:
        """Take chunks into a list that the caller keeps when it is interrupted."""
        lent += await self._consumer.next_chunks(*limits)

    def _take_back(self) -> None:
        """Give back what was taken and not returned, so that it does not count as done."""
        if self._iterated or (self._lent is not None and not self._is_taking):
            self._do(self._give_back)

    def _give_back(self) -> None:
        """On the loop, in one step: an interrupted caller finds it done or not started."""
        rest: dict[int, Chunk] = {}
        if self._lent is not None and not self._is_taking:
            rest = {id(chunk): chunk for chunk in self._lent}
            self._lent = None
        # Item by item, because another thread may be iterating.
        while self._iterated:
            with suppress(IndexError):
                chunk, message = self._iterated.popleft()
                rest.setdefault(id(chunk), chunk.since(message.queue_offset))
        self._consumer.give_back(tuple(rest.values()))

    # ---- positions

    position = _now(AsyncPullConsumer.position)
    seek = _waiting(AsyncPullConsumer.seek)
    seek_to_begin = _waiting(AsyncPullConsumer.seek_to_begin)
    seek_to_end = _waiting(AsyncPullConsumer.seek_to_end)
    seek_to_time = _waiting(AsyncPullConsumer.seek_to_time)
    pause = _now(AsyncPullConsumer.pause)
    resume = _now(AsyncPullConsumer.resume, gives_back=False)

    # ---- what brokers know

    first_offsets = _waiting(AsyncPullConsumer.first_offsets, gives_back=False)
    end_offsets = _waiting(AsyncPullConsumer.end_offsets, gives_back=False)
    offsets_for_time = _waiting(AsyncPullConsumer.offsets_for_time, gives_back=False)
    lag = _now(AsyncPullConsumer.lag, gives_back=False)
    statistics = _now(AsyncPullConsumer.statistics, gives_back=False)
    committed = _waiting(AsyncPullConsumer.committed, gives_back=False)

    # ---- commits

    def commit(self, done: Commits | None = None) -> dict[Queue, int]:
        """Store progress, and return when the broker has it; see `AsyncPullConsumer.commit`.

        Without an argument, messages that an iteration has not returned yet are not committed.
        """
        if done is not None:
            return self._run(self._consumer.commit(done))
        return self._run(self._commit_returned())

    async def _commit_returned(self) -> dict[Queue, int]:
        """On the loop: gives back the chunks of an interrupted call, not those of an iteration."""
        if self._lent is not None and not self._is_taking:
            self._give_back()
        return await self._consumer.commit_but(self._unread())

    def _unread(self) -> list[tuple[Chunk, int]]:
        """Chunks that were taken and not returned, with the offset from which on."""
        unread = [(chunk, chunk.first_offset) for chunk in self._lent or ()]
        # The first of each chunk comes last, and counts.
        first = {id(chunk): (chunk, message) for chunk, message in reversed(tuple(self._iterated))}
        return [*unread, *((chunk, each.queue_offset) for chunk, each in first.values())]

    @property
    def troubles(self) -> tuple[str, ...]:
        """Deprecated: use `statistics().troubles`."""
        warn_deprecated("PullConsumer.troubles", "statistics().troubles")
        return self.statistics().troubles

    def counts(self) -> dict[tuple[Queue, PullDelay], int]:
        """Deprecated: use `statistics().delays`."""
        warn_deprecated("PullConsumer.counts()", "statistics().delays")
        return self.statistics().delays

    # ---- calls to the consumer's thread

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_process()
            if not self._is_running:
                raise NotRunning(WHAT, was_stopped=self._was_stopped)
        except OrbitError:
            coroutine.close()
            raise
        return self._thread.run(coroutine)

    def _do(self, call: Callable[[], T]) -> T:
        """Make a call that does not wait on the consumer's thread."""
        self._check_process()
        if not self._is_running:
            # Before the start no other thread uses the state; after the end the call raises.
            return call()
        return self._thread.run(_called(call))


async def _called(call: Callable[[], T]) -> T:
    return call()
