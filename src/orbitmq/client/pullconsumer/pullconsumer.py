"""The pull consumer for programs without an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from orbitmq.client.durations import Duration, Instant
from orbitmq.client.errors import NotRunning, WrongUse
from orbitmq.client.identity import ProcessCheck
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.pullconsumer.asyncpullconsumer import A_WHILE, AsyncPullConsumer
from orbitmq.client.pullconsumer.columns import chunks_to_arrow
from orbitmq.client.pullconsumer.committing import Commits, Trouble
from orbitmq.client.pullconsumer.core import ONE_AT_A_TIME, WHAT
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.allocation import Strategy
    from orbitmq.client.consumer.assignmentnews import AssignmentListener
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.consumer.setbacks import Setback
    from orbitmq.client.consumer.starting import Beginning
    from orbitmq.client.pullconsumer.chunks import Chunk
    from orbitmq.client.pullconsumer.settings import PollSettings
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.client.settings import ClientSettings

T = TypeVar("T")


class PullConsumer:
    """Fetches messages ahead, and gives them out when it is asked.

    with PullConsumer("billing", name_server="localhost:9876") as consumer:
        consumer.subscribe("orders", "paid || refunded")
        for message in consumer:
            ...

    The blocking twin of `AsyncPullConsumer`: the same names with the same meaning. Messages are
    fetched on a thread of its own and decoded on the caller's. One thread polls at a time; the
    other calls may come from any thread.
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
        """As for `AsyncPullConsumer`; `on_assignment` is called on the consumer's own thread."""
        self._consumer = AsyncPullConsumer(
            group,
            name_server=name_server,
            client=client,
            polling=polling,
            consume_from=consume_from,
            allocation=allocation,
            rebalancing=rebalancing,
            on_assignment=on_assignment,
        )
        self.group = self._consumer.group
        self.settings = self._consumer.settings
        self._thread = LoopThread(f"orbitmq pull consumer {group}")
        self._check_process = ProcessCheck(WHAT, from_start=True)
        self._is_running = False
        self._was_stopped = False
        #: What an iteration has taken and not returned yet.
        self._iterated: deque[tuple[Chunk, ReceivedMessage]] = deque()
        #: The chunks of that, from their first message on, and in the same order.
        self._chunks: list[Chunk] = []
        #: What a call has taken and not returned; it was broken off if there is something and no
        #: call takes anything.
        self._lent: list[Chunk] | None = None
        self._is_taking = False
        self._trouble = Trouble()

    # ---- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Commit (if that is automatic), give the queues up and leave. May be repeated.

        `done` is whether what the last poll returned counts as done, for automatic commits. By
        default it does, unless an error is being handled that came after that poll: then it comes
        again, as it does when the error ends a `with` block.
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
            # Whoever comes second waits too: its program may end with its return.
            with suppress(NotRunning):  # somebody else has stopped it meanwhile
                self._thread.run(stopping)
        finally:
            self._thread.stop()

    @property
    def client_id(self) -> str:
        return self._consumer.client_id

    # ---- which queues

    def subscribe(self, topic: str, tags: str | None = None, *, sql: str | None = None) -> None:
        """Share the queues of a topic with the group; by tags (`a || b`) or a SQL92 condition.

        Replaces an earlier subscription to the topic; see `AsyncPullConsumer.subscribe`.
        """
        self._take_back()
        self._do(lambda: self._consumer.subscribe(topic, tags, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic up."""
        self._take_back()
        self._do(lambda: self._consumer.unsubscribe(topic))

    def assign(
        self, queues: Iterable[Queue], tags: str | None = None, *, sql: str | None = None
    ) -> None:
        """Read exactly these queues from now on, whatever others of the group do.

        See `AsyncPullConsumer.assign`.
        """
        self._take_back()
        if self._is_running:
            self._run(self._consumer.assign(tuple(queues), tags, sql=sql))
        else:
            self._do(lambda: self._consumer.plan(queues, tags, sql))

    def assignment(self) -> tuple[Queue, ...]:
        """The queues that are this consumer's now."""
        return self._do(self._consumer.assignment)

    def queues(self, topic: str) -> tuple[Queue, ...]:
        """All queues of a topic that can be read. Raises `NoRoute`."""
        return self._run(self._consumer.queues(topic))

    # ---- messages

    def poll(
        self, timeout: Duration | None = None, *, max_messages: int | None = None
    ) -> list[ReceivedMessage]:
        """The next messages, of any assigned queue; none when there are none within the time.

        Raises `AccessDenied` when that is why nothing can come any more, and `NoNameServer`,
        `NoRoute` or `GroupRefused` when that is why nothing could be consumed since the beginning:
        see `AsyncPullConsumer.poll`.
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
        """The next message, however long it takes; ends when the consumer is stopped.

        Messages are taken from the consumer's thread by the batch, which counts as done, for
        automatic commits, as a whole. Whatever else is called meanwhile sees the position of the
        iteration.

        Raises `AccessDenied` as `poll` does, and `NoNameServer`, `NoRoute` or `GroupRefused` after
        some seconds without any message; the next call goes on.
        """
        while self._is_running:
            if not self._iterated:
                try:
                    self._fill_iteration()
                except NotRunning:
                    break  # stopped by another thread
                continue
            try:
                # Nothing is called from here to the return: that is where interrupts come, and
                # they find the message either taken and returned, or neither.
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
        self._iterated, _ = self._taken(self._read_one_by_one, self._consumer.deadline(A_WHILE))

    def _read_one_by_one(self, chunks: list[Chunk]) -> deque[tuple[Chunk, ReceivedMessage]]:
        """The messages with their chunks; one that cannot be read comes again, and its turn."""
        read: deque[tuple[Chunk, ReceivedMessage]] = deque()
        self._chunks = chunks
        for place, chunk in enumerate(chunks):
            try:
                messages = self._consumer.messages_of([chunk])
            except OrbitError:
                if not read:
                    raise
                self._do(partial(self._give_back_since, chunks, place))
                break
            read.extend((chunk, message) for message in messages)
        return read

    # ---- taken, and not returned yet

    def _taken(
        self,
        read: Callable[[list[Chunk]], T],
        until: float,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        min_messages: int = 1,
    ) -> tuple[T, bool]:
        """What is read of the next chunks, on this thread; and whether there were any.

        They count as returned with the return of this call. Whatever breaks it off before, an error
        or an interrupt, leaves them to `_take_back`, which the next call begins with.
        """
        if self._is_taking:
            raise WrongUse(ONE_AT_A_TIME)
        self._trouble.note()
        lent: list[Chunk] = []
        self._lent = lent
        try:
            self._is_taking = True
            limits = max_messages, max_bytes, min_messages
            self._run(self._consumer.lend_chunks(lent, until, *limits))
            found = read(lent), bool(lent)
            self._lent = None
        finally:
            self._is_taking = False
        return found

    def _take_back(self) -> None:
        """Give back what was taken and not returned: it must not pass for done."""
        if self._iterated or (self._lent is not None and not self._is_taking):
            self._do(self._give_back)

    def _give_back(self) -> None:
        """On the loop, in one step: a caller that is interrupted finds it done, or not begun."""
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

    def _give_back_since(self, chunks: list[Chunk], place: int) -> None:
        """On the loop, as before: of what a call has taken, this and what follows."""
        rest = chunks[place:]
        del chunks[place:]
        self._consumer.give_back(rest)

    # ---- positions

    def position(self, queue: Queue) -> int:
        """The offset that the next poll of a queue begins with. Raises `QueueNotAssigned`."""
        self._take_back()
        return self._do(lambda: self._consumer.position(queue))

    def seek(self, queue: Queue, offset: int) -> None:
        """Go on from this offset. Raises `QueueNotAssigned` or `OffsetOutOfRange`."""
        self._take_back()
        self._run(self._consumer.seek(queue, offset))

    def seek_to_begin(self, *queues: Queue) -> None:
        """Go on from the first message that is there; in all assigned queues, or in these."""
        self._take_back()
        self._run(self._consumer.seek_to_begin(*queues))

    def seek_to_end(self, *queues: Queue) -> None:
        """Go on with messages that come from now on."""
        self._take_back()
        self._run(self._consumer.seek_to_end(*queues))

    def seek_to_time(self, time: Instant, *queues: Queue) -> None:
        """Go on from the first message stored at or after a time; from the end without one."""
        self._take_back()
        self._run(self._consumer.seek_to_time(time, *queues))

    def pause(self, *queues: Queue | Iterable[Queue]) -> None:
        """Fetch and return nothing of these queues, or of all; they stay assigned.

        Queues are given one by one, or several as a list: `pause(*queues)`, `pause(queues)`.
        """
        self._take_back()
        self._do(lambda: self._consumer.pause(*queues))

    def resume(self, *queues: Queue | Iterable[Queue]) -> None:
        """Go on with these queues, given as to `pause`, or with all."""
        self._do(lambda: self._consumer.resume(*queues))

    # ---- what brokers know

    def first_offsets(self, queues: Iterable[Queue] | None = None) -> dict[Queue, int]:
        """Where queues begin: the first message that the broker still has."""
        return self._run(self._consumer.first_offsets(queues))

    def end_offsets(self, queues: Iterable[Queue] | None = None) -> dict[Queue, int]:
        """Where queues end: the offset that the next message will get."""
        return self._run(self._consumer.end_offsets(queues))

    def offsets_for_time(
        self, time: Instant, queues: Iterable[Queue] | None = None
    ) -> dict[Queue, int]:
        """The offsets of the first messages stored at or after a time; the end without one."""
        return self._run(self._consumer.offsets_for_time(time, queues))

    def lag(self) -> dict[Queue, int]:
        """Messages that are in the assigned queues and were not returned, as the last pulls saw."""
        return self._do(self._consumer.lag)

    # ---- progress

    def commit(self, done: Commits | None = None) -> dict[Queue, int]:
        """Store progress, and return when the broker has it; see `AsyncPullConsumer.commit`.

        An iteration goes on with what it has; without an argument, that is not committed.
        """
        if done is not None:
            return self._run(self._consumer.commit(done))
        return self._run(self._commit_returned())

    async def _commit_returned(self) -> dict[Queue, int]:
        """On the loop: what was broken off is given back, what an iteration still has is not."""
        if self._lent is not None and not self._is_taking:
            self._give_back()
        return await self._consumer.commit_but(self._unread())

    def _unread(self) -> list[tuple[Chunk, int]]:
        """What was taken and not returned: chunks, and from which offset on.

        One look at each chunk, not at each message: `commit` may follow every single one.
        """
        unread = [(chunk, chunk.first_offset) for chunk in self._lent or ()]
        try:
            current, message = self._iterated[0]
        except IndexError:
            return unread
        chunks = self._chunks
        # Not found if another thread iterates, and has come to the next ones: all of them, then.
        place = next((n for n, each in enumerate(chunks) if each is current), -1)
        unread += [(chunk, chunk.first_offset) for chunk in chunks[place + 1 :]]
        return [(current, message.queue_offset), *unread]

    def committed(self, queue: Queue) -> int | None:
        """The group's progress in a queue, as the broker has it; None without any."""
        return self._run(self._consumer.committed(queue))

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps messages away now, a sentence each; none while all is well."""
        return self._do(lambda: self._consumer.troubles)

    def counts(self) -> dict[tuple[Queue, Setback], int]:
        """How often pulls were put off, by queue and reason."""
        return self._do(self._consumer.counts)

    # ---- crossing over

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
        """A call that does not wait, made where the state belongs."""
        self._check_process()
        if not self._is_running:
            # Before the start nobody else touches it; afterwards it says so itself.
            return call()
        return self._thread.run(_called(call))


async def _called(call: Callable[[], T]) -> T:
    return call()
