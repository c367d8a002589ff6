"""De-duplication: of the messages of a topic with the same `DEDUP_ID`, one is stored in a window.

A window maps hashes of ids to offsets in the log. Invariant: the log is the truth. A hash only
leads to a record, and the record says whether it has the id, so no message is taken for another
one. Ids are as durable as their messages: at a start, windows are read from their files, and what
came later from the log. A slave follows its log in the same way, for a takeover. See
docs/internals/deduplication.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from orbitmq import names
from orbitmq.atomicfile import replace_file, write_all
from orbitmq.broker.timers import RecallHandle
from orbitmq.message.properties import (
    DEDUP_ID,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_OUT_MS,
    UNIQ_KEY,
    property_value,
)
from orbitmq.message.record import MessageError
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreError
from orbitmq.store.verify import TopicNumbers, find_record, scan_log

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from orbitmq.broker.broker import Parts
    from orbitmq.message.scan import RecordArrays

    Rows: TypeAlias = NDArray[np.void]

log = logging.getLogger(__name__)

#: In the properties of every message with an id; it may be a part of a value.
MARK: Final = f"{DEDUP_ID}\x01"
RAW_MARK: Final = MARK.encode()
_LATER_MARK: Final = b"\x02" + RAW_MARK
_MARKED: Final = re.compile(RAW_MARK)
_REAL_TOPIC: Final = f"{REAL_TOPIC}\x01".encode()
#: Topics of messages that wait for their time; their real topic is a property.
_PARKED: Final = frozenset({names.SCHEDULE_TOPIC, names.TIMER_TOPIC})

#: Windows are saved when the log has grown by this much, which a start reads again after a crash.
_SAVE_BYTES: Final = 64 * 1024 * 1024
#: Seconds after which a smaller change is saved.
_SAVE_INTERVAL: Final = 30.0
#: Bytes of the log that are scanned at once.
_CHUNK: Final = 8 * 1024 * 1024
#: Bytes of the log that a slave scans in a tick.
_STEP: Final = 2 * 1024 * 1024
#: Bytes at the end of the log that are scanned if there are no files.
_WITHOUT_FILES: Final = 1 << 30
#: Ids of a window that are forgotten at once.
_AT_ONCE: Final = 50_000
_POSITION: Final = ".position"
_ENTRY: Final = np.dtype([("key", "<i8"), ("offset", "<i8"), ("second", "<u4")])
#: A file with this many entries beyond the window is rewritten.
_SPARE: Final = 65_536


class Original(NamedTuple):
    """The first copy of a message."""

    at: int  #: in the log
    queue_id: int
    number: int  #: in the queue
    unique_id: str
    recall_handle: str | None = None

    def told(self, place: int) -> str:
        """The copy at a place of a request, for the answer."""
        return f"{place}:{self.queue_id}:{self.number}:{self.unique_id}"


def key_of(dedup_id: bytes) -> int:
    """The hash of an id: 60 bits, so that it takes 32 bytes of memory."""
    return int.from_bytes(hashlib.blake2b(dedup_id, digest_size=8).digest(), "little") >> 4


def keys_of(ids: Iterable[bytes]) -> list[int]:
    """The same for many."""
    blake = hashlib.blake2b
    digests = b"".join([blake(each, digest_size=8).digest() for each in ids])
    keys: list[int] = (np.frombuffer(digests, "<u8") >> np.uint64(4)).tolist()
    return keys


def ids_of(properties: Iterable[bytes], *, skip: int = 0) -> list[bytes]:
    """The id of each message by its properties; empty where there is none.

    `skip` bytes stand before each property string.
    """
    found = []
    for raw in properties:
        _, mark, rest = raw.rpartition(_LATER_MARK)
        if not mark and raw.startswith(RAW_MARK, skip):
            mark, rest = RAW_MARK, raw[skip + len(RAW_MARK) :]
        found.append(rest.partition(b"\x02")[0] if mark else b"")
    return found


class _Window:
    """The ids of one topic, in the order of the log."""

    __slots__ = ("again", "fresh", "last", "order", "places", "seconds")

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self.order: deque[int] = deque()
        #: How often an id stands in `order` beyond the first time, as when its first copy is gone.
        self.again: Counter[int] = Counter()
        #: The offset of the last id that was noted; those up to it are not noted again.
        self.last = -1
        #: How many were stored in which second, in order.
        self.seconds: deque[list[int]] = deque()
        self.fresh = _Entries()

    def note(self, keys: Sequence[int], offsets: Sequence[int], second: int) -> None:
        """Add ids."""
        places, count = self.places, len(keys)
        if places.keys().isdisjoint(keys) and len(set(keys)) == count:
            places.update(zip(keys, offsets, strict=True))
        else:
            # The first copy of one is gone, or another id has the same hash.
            for key, offset in zip(keys, offsets, strict=True):
                if key in places:
                    self.again[key] += 1
                places[key] = offset
        self.order.extend(keys)
        self.last = offsets[-1]
        self.fresh.add(keys, offsets, second)
        if self.seconds and self.seconds[-1][0] >= second:
            self.seconds[-1][1] += count
        else:
            self.seconds.append([second, count])

    def evict(self, until: int, most: int) -> int:
        """Forget what is older than a second, and the oldest beyond a number; returns how many.

        Only some at a time: a million would hold up the loop for 0.2 s.
        """
        count, seconds = 0, self.seconds
        excess = len(self.order) - most
        while seconds and count < _AT_ONCE and (seconds[0][0] < until or count < excess):
            taken = seconds[0][1] if seconds[0][0] < until else excess - count
            taken = min(taken, seconds[0][1], _AT_ONCE - count)
            count += taken
            seconds[0][1] -= taken
            if not seconds[0][1]:
                seconds.popleft()
        order, places = self.order, self.places
        if self.again:
            for _ in range(count):
                self._forget(order.popleft())
        else:
            for _ in range(count):
                del places[order.popleft()]
        return count

    def undo(self, noted: int) -> None:
        """Take back the last ids, whose messages were not stored."""
        for _ in range(noted):
            self._forget(self.order.pop())
            while not self.seconds[-1][1]:
                self.seconds.pop()
            self.seconds[-1][1] -= 1
        self.fresh.drop(noted)

    def _forget(self, key: int) -> None:
        if self.again[key] > 0:
            self.again[key] -= 1
        else:
            del self.places[key], self.again[key]


class _Entries:
    """Ids that are not in the file of their topic yet."""

    __slots__ = ("keys", "offsets", "seconds")

    def __init__(self) -> None:
        self.keys = array("q")
        self.offsets = array("q")
        self.seconds = array("q")

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Sequence[int], offsets: Sequence[int], second: int) -> None:
        self.keys.extend(keys)
        self.offsets.extend(offsets)
        self.seconds.extend(array("q", [second]) * len(keys))

    def drop(self, count: int) -> None:
        if count:
            for column in (self.keys, self.offsets, self.seconds):
                del column[-count:]

    def encoded(self) -> bytes:
        rows = np.empty(len(self), _ENTRY)
        rows["key"], rows["offset"], rows["second"] = self.keys, self.offsets, self.seconds
        return rows.tobytes()


#: A topic, its new entries, and the ids of its window.
_News: TypeAlias = tuple[str, _Entries, int]


class Deduplication:
    """The windows of all topics. Belongs to the loop."""

    def __init__(self, parts: Parts, disk: DiskFiles | None = None) -> None:
        self._parts = parts
        self._settings = settings = parts.settings.dedup
        self.is_on = settings.enabled
        #: Messages that were not stored, by topic.
        self.dropped: Counter[str] = Counter()
        self.remembered = 0
        #: The end of what was scanned, or noted, of the log.
        self.position = 0
        self._files = _WindowFiles(parts.settings.root / "dedup", disk or DiskFiles())
        self._windows: dict[str, _Window] = {}
        #: What the present write has added: to which window, and how many.
        self._turn: list[tuple[_Window, int]] = []
        self._forgotten: set[str] = set()
        #: What is to be appended to files; a save takes off what it has written.
        self._unsaved: deque[_News] = deque()
        self._saved_position = -1
        self._saved_at = parts.clock.monotonic()
        self._saving: asyncio.Task[None] | None = None

    @property
    def capability(self) -> str | None:
        """For clients: the window in seconds and in messages; None when it is off."""
        if not self.is_on:
            return None
        return f"{self._settings.window:.0f}:{self._settings.topic_ids}"

    # ---- sends

    def takes(self, topic: str) -> bool:
        """Whether ids count in a topic: not where brokers and consumers store copies."""
        return self.is_on and _is_plain(topic)

    def are_new(self, topic: str, keys: Sequence[int]) -> bool:
        """Whether none of these ids is known, and no two are the same; may be wrong with False."""
        window = self._windows.get(topic)
        is_new = window is None or window.places.keys().isdisjoint(keys)
        return is_new and len(set(keys)) == len(keys)

    def find(self, topic: str, dedup_id: bytes) -> Original | None:
        """The first copy of a message, if it is in the window."""
        window, key = self._windows.get(topic), key_of(dedup_id)
        if window is None or key not in window.places:
            return None
        parts = self._parts
        if window.places[key] >= parts.store.mirroring.written:
            # It is in the present write, which may fail: then the id is not known any more.
            parts.writes.finish()
        at = window.places.get(key)
        if at is None or at < parts.store.deleted_below(topic):
            return None
        try:
            message = decode_message(parts.store.written_at(at))
        except (StoreError, MessageError):
            return None  # retention was faster than the window
        if (message.get_property(DEDUP_ID) or "").encode() != dedup_id:
            return None
        if message.store_ms // 1000 < self._since():
            return None
        return self._original(topic, message)

    def _original(self, topic: str, message: StoredMessage) -> Original | None:
        queue_id, handle = message.queue_id, None
        if message.topic in _PARKED:
            queue_id = int(message.get_property(REAL_QUEUE_ID) or 0)
        if (message.get_property(REAL_TOPIC) or message.topic) != topic:
            return None
        unique_id = message.get_property(UNIQ_KEY) or ""
        if message.topic == names.TIMER_TOPIC:
            due_ms = int(message.get_property(TIMER_OUT_MS) or 0)
            handle = RecallHandle(topic, self._parts.settings.name, due_ms, unique_id).encode()
        at, number = message.physical_offset, message.queue_offset
        return Original(at, queue_id, number, unique_id, handle)

    def note(self, topic: str, keys: Sequence[int], offsets: Sequence[int]) -> None:
        """Ids of messages that were appended to the present write."""
        if not self._turn:
            self._parts.writes.after_write.append(self._settle)
        window = self._window(topic)
        window.note(keys, offsets, int(self._parts.clock.now()))
        self._turn.append((window, len(keys)))
        self.remembered += len(keys)

    def _settle(self, are_stored: bool) -> None:
        turn, self._turn = self._turn, []
        if are_stored:
            self._evict([window for window, _ in turn])
            return
        for window, noted in reversed(turn):
            window.undo(noted)
            self.remembered -= noted

    def forget(self, topic: str) -> None:
        """A topic was deleted."""
        window = self._windows.pop(topic, None)
        self.dropped.pop(topic, None)
        if window is not None:
            self.remembered -= len(window.order)
            self._forgotten.add(topic)

    def _window(self, topic: str) -> _Window:
        window = self._windows.get(topic)
        if window is None:
            window = self._windows[topic] = _Window()
        return window

    def _since(self) -> int:
        """The second from which ids are remembered."""
        return int(self._parts.clock.now() - self._settings.window)

    def _evict(self, windows: Iterable[_Window]) -> None:
        settings, until = self._settings, self._since()
        for window in windows:
            self.remembered -= window.evict(until, settings.topic_ids)
        if self.remembered > settings.ids:
            # The largest window gives way, some at a time: finding it takes a look at all.
            largest = max(self._windows.values(), key=lambda each: len(each.order))
            spare = self.remembered - settings.ids + settings.ids // 64
            self.remembered -= largest.evict(until, max(0, len(largest.order) - spare))

    # ---- following the log

    def load(self) -> None:
        """Read the files, and what the log has beyond them; before the broker serves."""
        if not self.is_on:
            return
        store = self._parts.store
        end, start = store.mirroring.written, store.mirroring.start
        since = self._since()
        for topic, rows in self._files.load(end):
            low = max(start, store.deleted_below(topic))
            kept = rows[(rows["offset"] >= low) & (rows["second"] >= since)]
            window = self._window(topic)
            for second, part in _by_second(kept[-self._settings.topic_ids :]):
                window.note(part["key"].tolist(), part["offset"].tolist(), second)
                self.remembered += len(part)
            window.fresh = _Entries()
            if len(rows):
                window.last = int(rows["offset"][-1])
        position = self._files.position(end)
        if position is None:
            position = end - _WITHOUT_FILES
        self.position = max(start, min(position, end))
        self._follow(end)
        self._evict(tuple(self._windows.values()))

    def _follow(self, upto: int, budget: int = 1 << 62) -> None:
        """Note the ids in the log up to `upto`."""
        store, settings = self._parts.store, self._parts.settings.store
        size, chunk = settings.file_size, max(_CHUNK, 2 * settings.max_record)
        self.position = max(self.position, store.mirroring.start)
        stop = min(upto, self.position + budget)
        while self.position < stop:
            base = self.position
            view = store.mirroring.stretch(base, chunk)
            if view is None or not len(view):
                return
            for block in scan_log(view, base, start=0, check_crc=False):
                if len(block.records):
                    self._note_block(view, base, block.records)
                    self.position = base + block.stopped_at
            if self.position == base:
                # The end of the file, or damage.
                behind = find_record(view, base, 1, len(view))
                self.position = min(base - base % size + size, base + (behind or len(view)))

    def _note_block(self, view: memoryview, base: int, records: RecordArrays) -> None:
        firsts: dict[str, dict[int, int]] = {}
        second = int(records.store_ms[-1]) // 1000
        for topic, dedup_id, at in _found(view, records):
            window, key = self._window(topic), key_of(dedup_id)
            # What is known is in the file, or a copy that was stored again later.
            if base + at > window.last and key not in window.places:
                firsts.setdefault(topic, {}).setdefault(key, base + at)
        for topic, places in firsts.items():
            window = self._window(topic)
            window.note(list(places), list(places.values()), second)
            self.remembered += len(places)
            self._evict((window,))

    # ---- saving

    def step(self) -> None:
        """Due work, a few times a second."""
        if not self.is_on:
            return
        end = self._parts.store.mirroring.written
        if self._parts.settings.is_slave:
            behind = end - self.position
            self._follow(end, min(max(_STEP, behind // 8), 4 * _STEP))
        else:
            self._parts.writes.finish()
            self.position = end = self._parts.store.mirroring.written
        now = self._parts.clock.monotonic()
        is_due = self.position - self._saved_position >= _SAVE_BYTES
        if not is_due and now - self._saved_at >= _SAVE_INTERVAL:
            self._saved_at = now
            is_due = self.position != self._saved_position and any(
                len(each.fresh) for each in self._windows.values()
            )
        if is_due and self._saving is None:
            self._saved_at = now
            self._evict(tuple(self._windows.values()))
            self._saving = asyncio.get_running_loop().create_task(self._save())
            self._saving.add_done_callback(lambda _: setattr(self, "_saving", None))

    async def _save(self) -> None:
        await asyncio.to_thread(self._saver())

    async def close(self) -> None:
        """Save everything, after a save that is under way."""
        if not self.is_on:
            return
        if self._saving is not None:
            await asyncio.wait((self._saving,))
        if not self._parts.settings.is_slave:
            self.position = self._parts.store.mirroring.written
        self._saver()()

    def _saver(self) -> Callable[[], None]:
        """What writes the present state; for any thread."""
        position, forgotten, self._forgotten = self.position, self._forgotten, set()
        for topic, window in list(self._windows.items()):
            if len(window.fresh):
                self._unsaved.append((topic, window.fresh, len(window.order)))
                window.fresh = _Entries()
            elif not window.order:
                del self._windows[topic]
                forgotten.add(topic)

        def save() -> None:
            try:
                self._files.save(self._unsaved, forgotten, position)
            except OSError:
                # Until the next save, a start scans the log from the last position.
                log.exception("ids of messages were not saved")
            else:
                self._saved_position = position

        return save


def _is_plain(topic: str) -> bool:
    return not topic.startswith((names.RETRY_PREFIX, names.DEAD_LETTER_PREFIX)) and (
        topic == names.BENCHMARK_TOPIC or not names.is_system_topic(topic)
    )


def _found(view: memoryview, records: RecordArrays) -> Iterator[tuple[str, bytes, int]]:
    """The messages with an id: topic, id and place in the view."""
    first = int(records.starts[0])
    data = bytes(view[first : int(records.ends[-1])])
    hits = list(_MARKED.finditer(data))
    if not hits:
        return
    at = np.array([hit.start() for hit in hits]) + first
    rows = np.searchsorted(records.starts, at, "right") - 1
    begins = records.properties_at[rows]
    last_of_rows: dict[int, int] = {}
    for place, row, begin in zip(at.tolist(), rows.tolist(), begins.tolist(), strict=True):
        # Not in a body, nor in the middle of a value.
        if place == begin or (place > begin and data[place - first - 1] == 2):
            last_of_rows[row] = place - first + len(RAW_MARK)
    numbers = TopicNumbers()
    topics = numbers.of(view, records).tolist()
    for row, place in sorted(last_of_rows.items()):
        topic = numbers.names[topics[row]]
        begin, end = int(records.properties_at[row]) - first, int(records.ends[row]) - first
        if topic in _PARKED:
            topic = property_value(data[begin:end], REAL_TOPIC) or topic
        elif data.find(_REAL_TOPIC, begin, end) >= 0:
            continue  # the copy that was delivered: the one that waited counts
        dedup_id = data[place:end].partition(b"\x02")[0]
        if dedup_id and _is_plain(topic):
            yield topic, dedup_id, int(records.starts[row])


def _by_second(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Rows of the same second together, in order."""
    if not len(rows):
        return
    cuts = np.flatnonzero(np.diff(rows["second"].astype(np.int64))) + 1
    for part in np.split(rows, cuts):
        yield int(part["second"][0]), part


class _WindowFiles:
    """A file for each topic, which is appended to, and the position that they have reached."""

    def __init__(self, folder: Path, files: DiskFiles) -> None:
        self._folder = folder
        self._files = files
        #: Entries in each file.
        self._counts: dict[str, int] = {}

    def load(self, end: int) -> Iterator[tuple[str, Rows]]:
        """The entries of each topic; what is damaged, or beyond the end of the log, is cut off."""
        for topic in self._files.names(self._folder):
            if topic == _POSITION or topic.endswith(".tmp"):
                continue
            path = self._folder / topic
            data = self._files.read_bytes(path)
            rows = np.frombuffer(data[: len(data) - len(data) % _ENTRY.itemsize], _ENTRY)
            offsets = rows["offset"].astype(np.int64)
            is_good = offsets < end
            is_good[1:] &= offsets[1:] > offsets[:-1]
            count = len(rows) if is_good.all() else int(is_good.argmin())
            if count * _ENTRY.itemsize != len(data):
                self._cut(path, count * _ENTRY.itemsize)
            self._counts[topic] = count
            yield topic, rows[:count]

    def _cut(self, path: Path, size: int) -> None:
        try:
            fd = self._files.open(path)
            try:
                self._files.truncate(fd, size)
            finally:
                self._files.close(fd)
        except OSError:
            log.exception("a file of ids could not be repaired", extra={"file": str(path)})

    def position(self, end: int) -> int | None:
        """Everything in the log below it is in the files; None when that is not known."""
        path = self._folder / _POSITION
        try:
            found = int(self._files.read_bytes(path))
        except (OSError, ValueError):
            return None
        if found > end:
            # The end of the log was lost. Ids of what is written in its place are not in the files.
            self._files.unlink(path)
            self._files.sync_folder(self._folder)
            return end
        return found

    def save(self, news: deque[_News], forgotten: Iterable[str], position: int) -> None:
        """Append the news, then write the position. Raises `OSError`."""
        self._files.make_folder(self._folder)
        for topic in forgotten:
            self._files.unlink(self._folder / topic)
            self._counts.pop(topic, None)
        while news:
            self._append(*news[0])
            news.popleft()
        replace_file(self._folder / _POSITION, str(position).encode(), disk=self._files)

    def _append(self, topic: str, entries: _Entries, live: int) -> None:
        path, count = self._folder / topic, self._counts.get(topic, 0)
        data = entries.encoded()
        if count > 2 * live + _SPARE:
            kept = max(0, live - len(entries))
            old = self._files.read_bytes(path)[: count * _ENTRY.itemsize]
            count = kept
            data = old[len(old) - kept * _ENTRY.itemsize :] + data
            replace_file(path, data, disk=self._files)
        else:
            fd = self._files.open(path, create=True)
            try:
                write_all(self._files, fd, data, count * _ENTRY.itemsize)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
        self._counts[topic] = count + len(entries)
