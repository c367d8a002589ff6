"""The pull consumer for programs with an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from orbitmq.client.checks import kind
from orbitmq.client.consumer.allocation import Strategy, strategy_named
from orbitmq.client.consumer.starting import Beginning, consume_from
from orbitmq.client.consumer.subscription import Subscription
from orbitmq.client.durations import Duration, Instant, seconds
from orbitmq.client.engine import Engine
from orbitmq.client.errors import SettingError
from orbitmq.client.identity import ProcessCheck
from orbitmq.client.names import check_group
from orbitmq.client.namespaces import wrap_group, wrap_queue, wrap_topic
from orbitmq.client.pullconsumer.columns import chunks_to_arrow
from orbitmq.client.pullconsumer.committing import Commits, Trouble, positions_of
from orbitmq.client.pullconsumer.core import WHAT, PullCore
from orbitmq.client.pullconsumer.offsets import END, FIRST, Find, at_time, find_offsets, lags
from orbitmq.client.pullconsumer.settings import PollSettings
from orbitmq.client.queue import Queue, each_queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.client.settings import ClientSettings, resolve

if TYPE_CHECKING:
    from orbitmq.client.consumer.assignmentnews import AssignmentListener
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.consumer.setbacks import Setback
    from orbitmq.client.pullconsumer.chunks import Chunk
    from orbitmq.clock import Clock

#: Seconds that an iteration waits before it looks whether something keeps it from messages.
A_WHILE: Final = 5.0


class AsyncPullConsumer:
    """Fetches messages ahead, and gives them out when it is asked.

    async with AsyncPullConsumer("billing", name_server="localhost:9876") as consumer:
        consumer.subscribe("orders", "paid || refunded")
        async for message in consumer:
            ...

    It subscribes to topics, whose queues it shares with the other members of its group, or is
    assigned queues; not both. Nothing is retried for the application: what fails is its business.

    With `auto_commit` (the default) a message counts as done when it was returned by a poll and
    another poll has followed, and is committed within the interval after that. When the consumer is
    stopped, everything returned counts as done, unless an error ends its `async with` block, or one
    that came after the last poll is being handled where `stop` is called (in a `finally`, for
    instance). Without it, progress is what `commit` says: what a new group polls before its first
    commit may be passed over after a crash, when it begins at the end, or at a later time, anew;
    `commit({queue: consumer.position(queue)})` before the first poll prevents that.

    One task polls at a time.
    """

    def __init__(
        self,
        group: str,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        polling: PollSettings | None = None,
        consume_from: Beginning = "last",
        allocation: str | Strategy = "AVG",
        rebalancing: RebalanceSettings | None = None,
        on_assignment: AssignmentListener | None = None,
    ) -> None:
        """`consume_from` is where a queue without progress begins: "last", "first", or a time.

        `on_assignment` is called with a topic, all its queues and the own ones, after changes.
        """
        engine = Engine(resolve(name_server, client))
        self._set_up(
            engine, True, group, polling, consume_from, allocation, rebalancing, on_assignment
        )

    @classmethod
    def on(
        cls,
        engine: Engine,
        group: str,
        *,
        polling: PollSettings | None = None,
        consume_from: Beginning = "last",
        allocation: str | Strategy = "AVG",
        rebalancing: RebalanceSettings | None = None,
        on_assignment: AssignmentListener | None = None,
    ) -> AsyncPullConsumer:
        """A consumer that shares the connections of a running client, which outlives it."""
        consumer = cls.__new__(cls)
        consumer._set_up(
            engine, False, group, polling, consume_from, allocation, rebalancing, on_assignment
        )
        return consumer

    def _set_up(
        self,
        engine: Engine,
        owns_engine: bool,
        group: str,
        polling: PollSettings | None,
        begin: Beginning,
        allocation: str | Strategy,
        rebalancing: RebalanceSettings | None,
        listener: AssignmentListener | None,
    ) -> None:
        self.group = check_group(group)
        self.settings = (
            PollSettings() if polling is None else kind(polling, "polling", PollSettings)
        )
        self._namespace = engine.settings.namespace
        self._check_process = ProcessCheck(WHAT, from_start=True)
        self._trouble = Trouble()
        self._core = PullCore(
            engine,
            wrap_group(self._namespace, group),
            self.settings,
            owns_engine=owns_engine,
            strategy=strategy_named(allocation, "allocation"),
            begin=consume_from(begin),
            rebalancing=rebalancing,
            listener=listener,
        )

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What was being worked on when the error came is not done.
        await self._core.stop(settles=error is None)

    async def start(self) -> None:
        """Join the group. Raises `SubscriptionRefused` when a broker cannot serve a condition."""
        self._check_process.begin()
        self._trouble.note()
        await self._core.start()

    async def stop(self, *, done: bool | None = None) -> None:
        """Commit (if that is automatic), give the queues up and leave. May be repeated.

        `done` is whether what the last poll returned counts as done, for automatic commits. By
        default it does, unless an error is being handled that came after that poll: then it comes
        again, as it does when the error ends an `async with` block.

        Of several callers the first one says so, and all wait until it is stopped. When one is
        cancelled, the stop goes on; call it again to wait for its end.
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

        Replaces an earlier subscription to the topic, for everything that no poll has returned yet:
        what was fetched ahead by the old one is fetched anew. All members of a group must say the
        same.
        """
        self._core.subscribe(self._subscription(topic, tags, sql))

    def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic up; what they have returned counts as done."""
        self._core.unsubscribe(wrap_topic(self._namespace, topic))

    async def assign(
        self, queues: Iterable[Queue], tags: str | None = None, *, sql: str | None = None
    ) -> None:
        """Read exactly these queues from now on, whatever others of the group do.

        Those that were assigned before and still are go on where they are, from there on by this
        filter; what was returned so far counts as done. Raises `NoRoute`, `SettingError` for a
        queue that does not exist, or `SubscriptionRefused`; then nothing has changed.
        """
        await self._core.assign(*self._wanted(queues, tags, sql))

    def plan(
        self, queues: Iterable[Queue], tags: str | None = None, sql: str | None = None
    ) -> None:
        """Before the start: be assigned these queues with it."""
        self._core.plan(*self._wanted(queues, tags, sql))

    def _wanted(
        self, queues: Iterable[Queue], tags: str | None, sql: str | None
    ) -> tuple[list[Subscription], list[Queue]]:
        """What assigned queues are, as brokers know it, and what is wanted of their topics."""
        wanted = [self._known(queue) for queue in queues]
        topics = sorted({queue.topic for queue in wanted})
        return [self._subscription(topic, tags, sql) for topic in topics], wanted

    def _known(self, queue: Queue) -> Queue:
        """A queue as brokers know it; the application may leave the namespace out."""
        if not isinstance(queue, Queue):
            raise SettingError(f"queues are Queue(topic, broker, id), got {queue!r}")
        return wrap_queue(self._namespace, queue)

    def _subscription(self, topic: str, tags: str | None, sql: str | None) -> Subscription:
        if tags is not None and sql is not None:
            raise SettingError("a subscription is by tags or by a SQL92 condition, not by both")
        topic = wrap_topic(self._namespace, topic)
        return Subscription.by_tags(topic, tags) if sql is None else Subscription.by_sql(topic, sql)

    def assignment(self) -> tuple[Queue, ...]:
        """The queues that are this consumer's now."""
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
        timeout: Duration | None = None,  # noqa: ASYNC109  # no error: there are no messages
        *,
        max_messages: int | None = None,
    ) -> list[ReceivedMessage]:
        """The next messages, of any assigned queue; none when there are none within the time.

        Raises `AccessDenied` at once when brokers let this account read none of the topics: then
        nothing can come, whatever is waited for.

        As long as none of its topics could ever be consumed, because no name server answers
        (`NoNameServer`), there is no such topic (`NoRoute`), or the broker does not have the group
        (`GroupRefused`), a poll without messages raises that, when its time is up; another poll may
        succeed. What happens once any of them was consumed is logged and passes, as is whatever
        else goes wrong: see `troubles`.
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
        """The next message, however long it takes; ends when the consumer is stopped.

        Raises `AccessDenied` as `poll` does, and `NoNameServer`, `NoRoute` or `GroupRefused` after
        some seconds without any message; the next call goes on.
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

        Has no rows when there are none within the time. With `min_messages` it waits for more of
        them to be joined, as long as the time lasts; batches of a thousand and more are what
        columns are made for. `columns` chooses names of `orbitmq.message.arrow.MESSAGE_SCHEMA`.
        A damaged body raises `BodyCorrupt`, and the same messages come again; with
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
        """What a poll is made of; not decoded yet."""
        count = self.settings.max_messages if max_messages is None else max_messages
        if count < 1 or (max_bytes is not None and max_bytes < 1):
            raise SettingError(
                f"a poll must allow at least one message and byte, got {count} and {max_bytes}"
            )
        self._trouble.note()
        left = max(0.0, until - self.clock.monotonic())
        return await self._core.next_chunks(count, max_bytes, left, least=min(min_messages, count))

    async def lend_chunks(
        self,
        lent: list[Chunk],
        until: float,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        min_messages: int = 1,
    ) -> None:
        """The same into a list, where they are found also when nobody waits any more."""
        lent += await self.next_chunks(until, max_messages, max_bytes, min_messages)

    def messages_of(self, chunks: Sequence[Chunk]) -> list[ReceivedMessage]:
        """Chunks as messages."""
        group, namespace = self.group, self._namespace
        return [m for chunk in chunks for m in chunk.messages(group, namespace)]

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that could not be read come again."""
        self._core.cache.give_back(chunks)

    def deadline(self, timeout: Duration | None) -> float:
        """When a poll ends that begins now."""
        wait = self.settings.timeout if timeout is None else seconds(timeout, "timeout")
        return self.clock.monotonic() + wait

    def _read(self, chunks: Sequence[Chunk]) -> list[ReceivedMessage]:
        try:
            return self.messages_of(chunks)
        except BaseException:
            # Whatever it is: what the application did not get must not pass for done.
            self.give_back(chunks)
            raise

    # ---- positions

    def position(self, queue: Queue) -> int:
        """The offset that the next poll of a queue begins with. Raises `QueueNotAssigned`."""
        return self._core.position(self._known(queue))

    async def seek(self, queue: Queue, offset: int) -> None:
        """Go on from this offset. Raises `QueueNotAssigned` or `OffsetOutOfRange`."""
        await self._core.seek({self._known(queue): offset})

    async def seek_to_begin(self, *queues: Queue) -> None:
        """Go on from the first message that is there; in all assigned queues, or in these."""
        await self._seek_to(queues, FIRST)

    async def seek_to_end(self, *queues: Queue) -> None:
        """Go on with messages that come from now on."""
        await self._seek_to(queues, END)

    async def seek_to_time(self, time: Instant, *queues: Queue) -> None:
        """Go on from the first message stored at or after a time; from the end without one."""
        await self._seek_to(queues, at_time(time))

    async def _seek_to(self, queues: Sequence[Queue], find: Find) -> None:
        found = await self._found(queues or None, find)
        await self._core.seek({self._known(queue): offset for queue, offset in found.items()})

    def pause(self, *queues: Queue | Iterable[Queue]) -> None:
        """Fetch and return nothing of these queues, or of all; they stay assigned.

        Queues are given one by one, or several as a list: `pause(*queues)`, `pause(queues)`.
        """
        self._core.pause(self._each(queues))

    def resume(self, *queues: Queue | Iterable[Queue]) -> None:
        """Go on with these queues, given as to `pause`, or with all."""
        self._core.resume(self._each(queues))

    def _each(self, queues: Sequence[Queue | Iterable[Queue]]) -> tuple[Queue, ...]:
        """Queues given one by one or several at once; without any argument, all that are ours."""
        return tuple(map(self._known, each_queue(queues))) if queues else self.assignment()

    # ---- what brokers know

    async def first_offsets(self, queues: Iterable[Queue] | None = None) -> dict[Queue, int]:
        """Where queues begin: the first message that the broker still has."""
        return await self._found(queues, FIRST)

    async def end_offsets(self, queues: Iterable[Queue] | None = None) -> dict[Queue, int]:
        """Where queues end: the offset that the next message will get."""
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
        """Messages that are in the assigned queues and were not returned, as the last pulls saw."""
        return lags(self._core)

    # ---- progress

    async def commit(self, done: Commits | None = None) -> dict[Queue, int]:
        """Store progress, and return when the broker has it. Returns the positions stored.

        Without an argument: everything that polls have returned. A position is the offset of the
        next message to consume; a message stands for everything up to it. Raises what the broker
        refuses with, `QueueNotAssigned` for a queue that was lost meanwhile, and `OffsetOutOfRange`
        for a position beyond the end, which would skip messages that are still to come.
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
        """Commit everything that polls have returned, but these chunks from these offsets on."""
        cache = self._core.cache
        positions = {queue.owned.queue: queue.returned for queue in cache.queues}
        spells = {queue.owned: queue.spell for queue in cache.queues}
        for chunk, offset in unread:
            # Those of a queue that was lost or sought meanwhile are of no interest any more.
            if spells.get(chunk.owned) == chunk.spell:
                queue = chunk.owned.queue
                positions[queue] = min(positions[queue], offset)
        return await self._core.commit(positions)

    async def committed(self, queue: Queue) -> int | None:
        """The group's progress in a queue, as the broker has it; None without any."""
        self._core.check_running()
        queue = self._known(queue)
        await self._core.engine.routes.get(queue.topic)
        return await self._core.progress.stored(queue)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps messages away now, a sentence each; none while all is well."""
        return self._core.troubles

    def counts(self) -> dict[tuple[Queue, Setback], int]:
        """How often pulls were put off, by queue and reason."""
        return self._core.puller.counts()
