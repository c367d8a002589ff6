"""The store: all messages of a broker in one folder, in Apache RocketMQ's formats.

    commitlog/  consumequeue/<topic>/<queue>/  index/  checkpoint  abort  lock

One owner uses a store, from one thread; it collects messages, writes them once per turn, reads,
and calls `tick` some times a second. Three threads help it and touch nothing but files: one
flushes the log, one the queues and the index, one makes the log's next file. `post` hands a call
from them to the owner's thread, for instance `loop.call_soon_threadsafe`; an owner without a loop
calls `wait_flushed`, or leaves it to `tick`. With `background=False` there are no threads:
everything happens inside the owner's calls, in an order that can be repeated.

What is promised, by flush policy:

    ASYNC   a message is stored when `write` has returned: it survives the death of the process,
            and that of the machine after the next flush (half a second, ten at the latest)
    SYNC    a message is stored when `when_flushed` calls back: it survives both. No reader sees
            it before
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from orbitmq.clock import SystemClock
from orbitmq.filter.tags import TagFilter
from orbitmq.message.hosts import pack_host
from orbitmq.store.errors import DiskFull, StoreClosed, WriteFailed
from orbitmq.store.files import DiskFiles, is_full
from orbitmq.store.mirroring import Mirroring
from orbitmq.store.nearreading import read_near
from orbitmq.store.opening import StoreParts
from orbitmq.store.queues import check_topic
from orbitmq.store.reading import read_queue
from orbitmq.store.searching import Boundary, offset_by_time, time_of
from orbitmq.store.settings import FlushPolicy, StoreSettings
from orbitmq.store.statistics import QueueState, StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from orbitmq.clock import Clock
    from orbitmq.filter.subscription import MessageFilter
    from orbitmq.store.arrivals import Arrival
    from orbitmq.store.consumequeue import ConsumeQueue
    from orbitmq.store.flushing import Post, WhenFlushed
    from orbitmq.store.reading import ReadResult
    from orbitmq.store.retention import CleanReport

log = logging.getLogger(__name__)

_UNLIMITED: Final = 1 << 62


class Store:
    """The messages of one broker. Constructing it opens the folder and repairs it after a crash."""

    def __init__(
        self,
        root: Path | str,
        settings: StoreSettings | None = None,
        *,
        store_host: tuple[str, int] = ("127.0.0.1", 10911),
        clock: Clock | None = None,
        files: DiskFiles | None = None,
        post: Post | None = None,
        background: bool = True,
    ) -> None:
        self.root = Path(root)
        self.settings = settings or StoreSettings()
        self._clock: Clock = clock or SystemClock()
        self._files = files or DiskFiles()
        self._post = post
        self._is_sync = self.settings.flush.policy is FlushPolicy.SYNC
        self._read_in_bulk = self.settings.read.in_bulk()
        self._parts = parts = StoreParts(
            self.root,
            self.settings,
            pack_host(*store_host),
            self._clock,
            self._files,
            self._wake,
            background=background,
        )
        self.recovery = parts.recovery  #: what opening found and did
        self._log = parts.log
        self._queues = parts.queues
        self._appender = parts.appender
        self._flusher = parts.flusher
        self._indexing = parts.indexing
        self._finding = parts.finding
        self._durability = parts.durability
        self._retention = parts.retention
        #: the log as masters send it and as slaves take it
        self.mirroring = Mirroring(
            parts.log,
            parts.queues,
            parts.appender,
            self.write,
            parts.refusal,
            deleted=parts.deletions.by_topic,
        )
        # Called for every message: without a detour.
        self.append = self._appender.append
        self.append_batch = self._appender.append_batch
        self.take_time_anew = self._appender.take_time_anew

    # ---- writing

    def on_arrival(self, call: Callable[[Sequence[Arrival]], None] | None) -> None:
        """Have messages announced as soon as they can be read: in `write`, or after the flush."""
        self._appender.arrived = call

    def write(self) -> int:
        """Write what was appended in this turn, all or nothing; where the log ends now."""
        end = self._appender.write()
        if self._is_sync:
            self._flusher.ask(end)
        return end

    def discard(self) -> None:
        """Forget what was appended since the last `write`."""
        self._appender.discard()

    def when_flushed(self, upto: int, call: WhenFlushed) -> None:
        """Call, in the owner's thread, when the log below `upto` is on the disk, or has failed."""
        if self._flusher.when_flushed(upto, call):
            self.settle()

    def wait_flushed(self, upto: int, timeout: float | None = None) -> bool:
        """Wait here for the same; False when time is up, StoreFailed when the disk failed."""
        try:
            return self._flusher.wait(upto, timeout)
        finally:
            self.settle()

    def settle(self) -> None:
        """Announce what has become readable, and answer those who wait for a flush."""
        # Looked at once: the flusher goes on meanwhile, and nobody may be told that a message is
        # stored before readers can see it.
        flushed = self._flusher.flushed
        if self._is_sync:
            self._appender.publish(flushed)
        self._flusher.settle(flushed)

    def tick(self) -> None:
        """Do a bounded part of the work in the background; to be called a few times a second."""
        self._flusher.flush_now()
        self.settle()
        self._log.rest(self._flusher.flushed)
        if self._indexing is not None:
            self._indexing.step(self._appender.dispatched, self.settings.index_step)
        if self._flusher.failure is None and not self._parts.is_read_only:
            self._durability.step()

    def clean(self) -> CleanReport:
        """Delete what is too old or too much, and look at the disk; every ten seconds or so."""
        report = self._retention.run(self._clock.now())
        self._parts.try_to_write()
        return report

    def ask_for_cleaning(self) -> None:
        """Delete expired files at any hour in the next runs of `clean`."""
        self._retention.ask_for_cleaning()

    # ---- reading

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        wanted: MessageFilter | None = None,
        max_bytes: int = _UNLIMITED,
        *,
        in_bulk: bool = False,
        judge: int = 0,
    ) -> ReadResult:
        """The messages of a queue from `offset` on that the filter lets pass.

        A filter that has to look into messages looks into `judge` at a time, if that is given:
        the result may have a `rest` then, to go on with.
        """
        if not self._parts.is_open:
            raise StoreClosed(self.root)
        queue = self._queues.by_key.get((topic, queue_id))
        settings = self._read_in_bulk if in_bulk else self.settings.read
        if wanted is None or (isinstance(wanted, TagFilter) and wanted.matches_all):
            wanted = None
            if queue is not None and (
                near := read_near(queue, self._log, settings, offset, max_messages, max_bytes)
            ):
                return near
        return read_queue(
            queue, self._log, settings, offset, max_messages, wanted, max_bytes, judge
        )

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that can be read; 0 for an unknown queue."""
        queue = self._queue(topic, queue_id)
        return queue.min_offset if queue else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the next message to become readable has; 0 for an unknown queue."""
        queue = self._queue(topic, queue_id)
        return queue.max_offset if queue else 0

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The offset that belongs to an instant, within the bounds of the queue."""
        return offset_by_time(self._queue(topic, queue_id), self._log, time_ms, boundary)

    def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """When the first readable message was stored, in milliseconds; -1 when there is none."""
        queue = self._queue(topic, queue_id)
        if queue is None or queue.min_offset >= queue.max_offset:
            return -1
        return time_of(queue, self._log, queue.min_offset)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message of a queue was stored, in milliseconds; -1 when it is not there."""
        queue = self._queue(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return -1
        return time_of(queue, self._log, offset)

    def queue_entries(
        self, topic: str, queue_id: int, first: int, count: int
    ) -> list[tuple[int, int, int]] | None:
        """Offset in the log, size and tag code of entries of a queue; None when there is none."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return None
        if first < queue.min_offset:
            return []
        return [
            queue.entry(number) for number in range(first, min(first + count, queue.max_offset))
        ]

    def message_at(self, physical_offset: int) -> memoryview:
        """The checked record that begins at an offset of the log."""
        self._check_open()
        return self._finding.message_at(physical_offset)

    def written_at(self, physical_offset: int) -> memoryview:
        """The same, also if it waits for the disk: not to be shown to anybody before it is there.

        Whatever is stored because of it comes behind it in the log, so the disk has both, or only
        this one, or neither.
        """
        self._check_open()
        return self._finding.written_at(physical_offset)

    def message_by_offset_id(self, offset_id: str) -> memoryview:
        """The checked record that an offset id names."""
        self._check_open()
        return self._finding.message_by_offset_id(offset_id)

    def lookup(
        self,
        topic: str,
        key: str,
        max_results: int = 64,
        begin_ms: int = 0,
        end_ms: int = _UNLIMITED,
    ) -> list[memoryview]:
        """Messages of a topic with this key or this unique id, newest first.

        All that can be read are found, unless the index is further behind than a look-up may
        catch up with (`StoreSettings.index_catch_up`): see `statistics().indexed`.
        """
        self._check_open()
        return self._finding.lookup(topic, key, max_results, begin_ms, end_ms)

    def looking_up(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _UNLIMITED
    ) -> Iterator[memoryview | None]:
        """The same in short rounds, with None for those that found nothing.

        Others may use the store between two rounds; if it is closed, the next one raises.
        """
        self._check_open()
        return self._while_open(self._finding.looking_up(topic, key, begin_ms, end_ms))

    def _while_open(self, rounds: Iterator[memoryview | None]) -> Iterator[memoryview | None]:
        for found in rounds:
            yield found
            self._check_open()

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        self._check_open()
        return self._queues.get(topic, queue_id)

    def _check_open(self) -> None:
        if not self._parts.is_open:
            raise StoreClosed(self.root)

    # ---- the whole

    def queues(self) -> list[QueueState]:
        """All queues and their bounds."""
        return [
            QueueState(queue.topic, queue.queue_id, queue.min_offset, queue.max_offset)
            for queue in self._queues.by_key.values()
        ]

    def deleted_below(self, topic: str) -> int:
        """The end of the log when the topic was last deleted: messages below are gone; else 0."""
        return self._parts.deletions.by_topic.get(topic, 0)

    def delete_topic(self, topic: str, *, is_noted: bool = False) -> int:
        """Forget the queues of a topic; its messages go with the log. How many queues there were.

        A topic without queues is none to the store, unless its deletion is to be noted all the
        same (`is_noted`): whoever keeps messages of it elsewhere asks `deleted_below` about them.
        The disk knows of it when this returns. Recovery's start is moved beyond the messages soon,
        because queues that are gone would make it begin at the first file.
        """
        self.write()
        check_topic(topic)
        if not is_noted and not any(queue.topic == topic for queue in self._queues.by_key.values()):
            return 0
        self._note_deletions({topic: self._log.end})
        return self._forget_queues(topic)

    def delete_topic_below(self, topic: str, below: int) -> bool:
        """Delete a topic as a master has, whose messages of it below this offset are deleted.

        Those that are yet to come get into no queue. False, and nothing is done, when there are
        messages beyond: they may be of a topic that was made again.
        """
        self.write()
        check_topic(topic)
        queues = [queue for queue in self._queues.by_key.values() if queue.topic == topic]
        if any(queue.last_end > below for queue in queues):
            return False
        self._note_deletions({topic: below})
        self._forget_queues(topic)
        return True

    def deletions(self) -> dict[str, int]:
        """The topics that `deleted_below` knows something of."""
        return dict(self._parts.deletions.by_topic)

    def follow_deletions(self, master: Mapping[str, int]) -> None:
        """Delete what a master has deleted: of every topic the messages below an offset.

        A queue that goes on beyond is one of a topic that was made again. Its numbers began anew,
        and so did it: nothing in it is older.
        """
        known, start = self._parts.deletions.by_topic, self._log.start
        news = {
            topic: below
            for topic, below in master.items()
            if below > max(known.get(topic, 0), start)
        }
        if news:
            self.write()
            self._note_deletions(news)
            self._durability.is_wanted = True
            self._queues.delete_below(news)

    def _forget_queues(self, topic: str) -> int:
        self._appender.forget_topic(topic)
        self._durability.is_wanted = True
        return self._queues.delete_topic(topic)

    def statistics(self) -> StoreStatistics:
        """Numbers for an operator."""
        refusal = self._parts.refusal()
        return StoreStatistics(
            log_start=self._log.start,
            log_end=self._log.end,
            flushed=self._flusher.flushed,
            durable=self._durability.durable,
            dispatched=self._appender.dispatched,
            indexed=self._indexing.position if self._indexing else 0,
            indexed_ms=self._indexing.index.last_ms if self._indexing else 0,
            log_files=len(self._log.files),
            queues=len(self._queues.by_key),
            queue_memory=self._queues.memory,
            flushes=self._flusher.flush_count,
            used_ratio=self._retention.used_ratio,
            refusal=str(refusal) if refusal else "",
        )

    def close(self) -> None:
        """Bring everything to the disk and leave the folder to others.

        When that fails the folder is left all the same, marked as after a crash.
        """
        if not self._parts.is_open:
            return
        self._post = None
        try:
            if self._flusher.failure is None and not self._parts.is_read_only:
                end = self._appender.write()
                self.wait_flushed(end)
                if self._indexing is not None:
                    self._indexing.advance(self._appender.dispatched, _UNLIMITED)
                self._durability.finish()
                if self._durability.durable == self._log.end:
                    self._files.unlink(self.root / "abort")
                    self._files.sync_folder(self.root)
        except OSError as error:
            raise WriteFailed(f"the store in {self.root} was not closed properly ({error})") from (
                error
            )
        finally:
            self._leave()

    def abandon(self) -> None:
        """Leave the folder as a crash would: nothing more is written or flushed."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _note_deletions(self, deleted: Mapping[str, int]) -> None:
        try:
            self._parts.deletions.note_all(deleted)
        except OSError as error:
            kind = DiskFull if is_full(error) else WriteFailed
            topics = ", ".join(map(repr, deleted))
            raise kind(f"topic {topics} was not deleted: {error}") from error

    def _leave(self) -> None:
        self._post = None
        self._parts.release()

    def _wake(self) -> None:
        """Flusher thread: have the owner look, if it still can."""
        post = self._post
        if post is not None:
            try:
                post(self.settle)
            except RuntimeError:
                log.debug("the owner's loop is closed")
