"""The index entries of many records at once, from the bytes of the log.

Of a record the index wants its topic, its `UNIQ_KEY` and every word of its `KEYS`. Topic and
properties lie side by side at the end of a record, so these ends are copied together into one
text, closed by the separator of properties, and every further step treats the text as a whole:
find the separators, keep the items with the right names, cut the keys at spaces, hash the pieces.
No object is made for a message or a key.

    topic 02 02 name 01 value 02 name 01 value 02 02 topic 02 02 ...

The two bytes between topic and properties are the length of the properties in the record; they
are overwritten with separators, or a length could pass for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orbitmq.message.record import MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE
from orbitmq.message.scan import starts_with
from orbitmq.message.sysflag import (
    BORN_HOST_V6,
    STORE_HOST_V6,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
)
from orbitmq.store.keyhash import hash_pieces, hash_texts, index_hash, index_hashes, utf16_lengths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Text = NDArray[np.uint8]

#: How many bytes of topics and properties are worked on at a time: what a core's cache holds.
_BLOCK: Final = 192 * 1024
_NAME_END: Final = 1
_ITEM_END: Final = 2
_SEPARATOR: Final = b"\x02"
_SPACE: Final = 0x20
_LAST_LETTERS: Final = 4


@dataclass(frozen=True, slots=True)
class KeyEntries:
    """What the index has to hold for some records, in the order of the log."""

    hashes: NDArray[np.int32]
    offsets: Ints
    store_ms: Ints

    def __len__(self) -> int:
        return len(self.hashes)

    def between(self, first: int, end: int) -> KeyEntries:
        """The entries `[first, end)`."""
        span = slice(first, end)
        return KeyEntries(self.hashes[span], self.offsets[span], self.store_ms[span])

    def only(self, chosen: NDArray[np.bool_]) -> KeyEntries:
        """The entries where `chosen` holds."""
        return KeyEntries(self.hashes[chosen], self.offsets[chosen], self.store_ms[chosen])


def entries_of_log(chunk: memoryview, starts: ArrayLike, base: int) -> KeyEntries:
    """The entries of the records at `starts` in a chunk of the log that begins at offset `base`.

    Rolled-back transactions have none. What is no whole record has none either: whether the log
    is sound is not decided here.
    """
    tails = _tails(chunk, np.asarray(starts, np.int64), base)
    blocks = [_entries_of_block(chunk, block) for block in tails.blocks()]
    return KeyEntries(
        np.concatenate([block.hashes for block in blocks]) if blocks else np.zeros(0, np.int32),
        np.concatenate([block.offsets for block in blocks]) if blocks else np.zeros(0, np.int64),
        np.concatenate([block.store_ms for block in blocks]) if blocks else np.zeros(0, np.int64),
    )


def entries_of_fields(
    offsets: ArrayLike,
    store_ms: ArrayLike,
    topics: Sequence[str],
    unique_keys: Sequence[str | None],
    keys: Sequence[str | None],
) -> KeyEntries:
    """The entries of records whose fields are at hand as objects."""
    words: list[str] = []
    owners: list[int] = []
    for at, (unique_key, joined) in enumerate(zip(unique_keys, keys, strict=True)):
        found = [unique_key] if unique_key else []
        found += [word for word in (joined or "").split(" ") if word]
        words += found
        owners += [at] * len(found)
    owner = np.array(owners, np.int64)
    hashes = index_hashes(hash_texts(topics)[owner], hash_texts(words), utf16_lengths(words))
    return KeyEntries(
        hashes, np.asarray(offsets, np.int64)[owner], np.asarray(store_ms, np.int64)[owner]
    )


@dataclass(frozen=True, slots=True)
class _Tails:
    """Where topic and properties of records lie in a chunk, one row for each record."""

    offsets: Ints
    store_ms: Ints
    topic_starts: Ints
    topic_ends: Ints
    ends: Ints

    def blocks(self) -> Iterator[_Tails]:
        """The same rows, in blocks that are worked on at a time."""
        filled = np.cumsum(self.ends - self.topic_starts)
        first = 0
        while first < len(self.ends):
            before = int(filled[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(filled, before + _BLOCK, "right")))
            span = slice(first, end)
            yield _Tails(
                self.offsets[span],
                self.store_ms[span],
                self.topic_starts[span],
                self.topic_ends[span],
                self.ends[span],
            )
            first = end


def _tails(chunk: memoryview, starts: Ints, base: int) -> _Tails:
    limit = len(chunk)
    starts = starts[(starts >= 0) & (starts <= limit - MIN_RECORD_SIZE)]
    size, magic = _int32(chunk, starts), _int32(chunk, starts + 4)
    sys_flag = _int32(chunk, starts + 36)
    born_extra = np.where(sys_flag & BORN_HOST_V6, 12, 0)
    extra = born_extra + np.where(sys_flag & STORE_HOST_V6, 12, 0)
    store_ms = _gather(chunk, ">i8", starts + 56 + born_extra)
    body_length = _int32(chunk, starts + 84 + extra)
    topic_field = starts + 88 + extra + body_length
    wide = magic == MAGIC_V2
    topic_length = np.where(
        wide, _gather(chunk, ">i2", topic_field), _gather(chunk, "i1", topic_field)
    )
    topic_starts = topic_field + 1 + wide
    topic_ends = topic_starts + topic_length
    properties_length = _gather(chunk, ">i2", topic_ends)
    ends = topic_ends + 2 + properties_length
    # Lengths were read wherever they led to; a record counts only if they are all possible and
    # add up to its size.
    sound = (
        (wide | (magic == MAGIC_V1))
        & (np.minimum(np.minimum(body_length, topic_length), properties_length) >= 0)
        & (ends == starts + size)
        & (ends <= limit)
        & (sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK)
    )
    return _Tails(
        (starts + base)[sound],
        store_ms[sound],
        topic_starts[sound],
        topic_ends[sound],
        ends[sound],
    )


def _int32(chunk: memoryview, at: Ints) -> Ints:
    return _gather(chunk, ">i4", at)


def _gather(chunk: memoryview | Text, kind: str, at: Ints) -> Ints:
    """The integers at the places `at`; a place outside of the chunk gives one from its edge."""
    if not len(at):
        return np.zeros(0, np.int64)
    dtype = np.dtype(kind)
    room = len(chunk) - dtype.itemsize + 1
    anywhere: NDArray[Any] = np.ndarray((room,), dtype, chunk, strides=(1,))
    return anywhere[np.clip(at, 0, room - 1)].astype(np.int64)


def _entries_of_block(chunk: memoryview, tails: _Tails) -> KeyEntries:
    lengths = tails.ends - tails.topic_starts
    firsts = np.cumsum(lengths + 1) - (lengths + 1)
    topic_ends = firsts + (tails.topic_ends - tails.topic_starts)
    joined = bytearray(_SEPARATOR).join(
        [
            chunk[start:end]
            for start, end in zip(tails.topic_starts.tolist(), tails.ends.tolist(), strict=True)
        ]
    )
    joined += _SEPARATOR
    text = np.frombuffer(joined, np.uint8)
    text[topic_ends] = _ITEM_END
    text[topic_ends + 1] = _ITEM_END

    items = _Items(text, firsts, topic_ends + 2)
    unique_keys = items.named(b"UNIQ_KEY")
    words = items.named(b"KEYS").words(text)
    keys = unique_keys.merged_with(words)

    count = len(firsts)
    hashes = hash_pieces(
        text,
        np.concatenate((firsts, keys.starts)),
        np.concatenate((topic_ends, keys.ends)),
    )
    found = index_hashes(hashes[keys.owners], hashes[count:], keys.ends - keys.starts)
    if not joined.isascii():
        _correct_beyond_ascii(found, joined, text, firsts, topic_ends, keys)
    return KeyEntries(found, tails.offsets[keys.owners], tails.store_ms[keys.owners])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of the text, in its order, and the rows of the records they belong to."""

    owners: Ints
    starts: Ints
    ends: Ints

    def words(self, text: Text) -> _Pieces:
        """What stands between spaces."""
        spaces = np.flatnonzero(text == _SPACE)
        if len(spaces) and len(self.starts):
            piece = np.searchsorted(self.starts, spaces, "right") - 1
            spaces = spaces[(piece >= 0) & (spaces < self.ends[piece])]
        if not (len(spaces) and len(self.starts)):
            return self
        # Pieces do not overlap, so sorting the bounds brings each start before its end.
        starts = np.sort(np.concatenate((self.starts, spaces + 1)), kind="stable")
        ends = np.sort(np.concatenate((self.ends, spaces)), kind="stable")
        full = ends > starts
        starts, ends = starts[full], ends[full]
        owners = self.owners[np.searchsorted(self.starts, starts, "right") - 1]
        return _Pieces(owners, starts, ends)

    def merged_with(self, others: _Pieces) -> _Pieces:
        """Both, by record, and in a record these before the others."""
        owners = np.concatenate((self.owners, others.owners))
        order = np.argsort(owners, kind="stable")
        return _Pieces(
            owners[order],
            np.concatenate((self.starts, others.starts))[order],
            np.concatenate((self.ends, others.ends))[order],
        )


class _Items:
    """The properties in a text of joined record ends."""

    __slots__ = (
        "_firsts",
        "_item_ends",
        "_last_letters",
        "_name_ends",
        "_property_starts",
        "_text",
    )

    def __init__(self, text: Text, firsts: Ints, property_starts: Ints) -> None:
        self._text, self._firsts, self._property_starts = text, firsts, property_starts
        name_ends = np.flatnonzero(text == _NAME_END)
        self._name_ends = name_ends = name_ends[name_ends >= _LAST_LETTERS]
        self._item_ends = np.flatnonzero(text == _ITEM_END)
        #: Of every name, as a number: what most names differ in.
        self._last_letters = np.ndarray((max(0, len(text) - 3),), "<u4", text, strides=(1,))[
            name_ends - _LAST_LETTERS
        ]

    def named(self, name: bytes) -> _Pieces:
        """The values of one property, whose name has four letters or more.

        In a record the last one counts, an empty one does not.
        """
        text, size = self._text, len(name)
        # A name that stands right behind the end of an item is one: it holds no 01 itself, and
        # further ones belong to the value.
        wanted = int.from_bytes(name[-_LAST_LETTERS:], "little")
        ends = self._name_ends[self._last_letters == wanted]
        ends = ends[ends > size]
        ends = ends[starts_with(text, ends - size - 1, _SEPARATOR + name)]
        value_ends = self._item_ends[np.searchsorted(self._item_ends, ends)]
        owners = np.searchsorted(self._firsts, ends, "right") - 1
        # A topic that holds separators must not pass for a property.
        is_one = (value_ends > ends + 1) & (ends - size >= self._property_starts[owners])
        ends, value_ends, owners = ends[is_one], value_ends[is_one], owners[is_one]
        is_last = np.append(owners[1:] != owners[:-1], np.ones(min(1, len(owners)), np.bool_))
        return _Pieces(owners[is_last], ends[is_last] + 1, value_ends[is_last])


def _correct_beyond_ascii(
    found: NDArray[np.int32],
    joined: bytearray,
    text: Text,
    firsts: Ints,
    topic_ends: Ints,
    keys: _Pieces,
) -> None:
    """Hash again, one by one, where topic or key has bytes that are not code units."""
    wide = np.flatnonzero(text > 0x7F)
    wide_topic = np.searchsorted(wide, firsts) < np.searchsorted(wide, topic_ends)
    wide_key = np.searchsorted(wide, keys.starts) < np.searchsorted(wide, keys.ends)
    for at in np.flatnonzero(wide_key | wide_topic[keys.owners]).tolist():
        owner = keys.owners[at]
        topic = joined[firsts[owner] : topic_ends[owner]].decode(errors="replace")
        key = joined[keys.starts[at] : keys.ends[at]].decode(errors="replace")
        found[at] = index_hash(topic, key)
