"""Compiled filters, each kept once and not more of them than there is room for.

What a client brings with a pull is compiled and kept, since its next pull brings the same. But
nothing ties anybody to a few expressions, and a compiled one takes up to a hundred times the memory
of its text. So the room is counted in bytes, and an expression has a longest length: SQL's is its
grammar's, and tag lists have the same one here. (Apache's brokers take tag lists of any length, and
compile them anew for each pull.) Tag lists have a room of their own: they are compiled without an
allowance, so whoever brings ever new ones would push out SQL, which takes much longer to compile.

A broker compares hashes; the tags themselves are for clients, and are not kept.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.subscription import TAG, MessageFilter, compile_filter
from orbitmq.filter.tags import TagFilter

#: Characters of an expression: 800 tags that are UUIDs, or some thousands of shorter ones.
LONGEST_EXPRESSION = 32_768
#: Expressions of SQL that are kept, and as many tag lists; and the bytes that each may take.
MOST_FILTERS = 4096
MOST_BYTES = 48 * 1024 * 1024
MOST_TAG_BYTES = 16 * 1024 * 1024

#: Bytes of a compiled filter, as measured: of any, for each hash of a tag list, and for each
#: character of an SQL expression.
_FILTER = 128
_HASH = 40
_CHARACTER = 100

#: An expression and its language.
_Key = tuple[str | None, str]


class CompiledFilters:
    """The filters that were used last."""

    def __init__(
        self,
        *,
        lenient: bool,
        most: int = MOST_FILTERS,
        most_bytes: int = MOST_BYTES,
        most_tag_bytes: int = MOST_TAG_BYTES,
    ) -> None:
        self._lenient = lenient
        self._sql = _Room(most, most_bytes)
        self._tags = _Room(most, most_tag_bytes)

    def __len__(self) -> int:
        return len(self._sql.filters) + len(self._tags.filters)

    @property
    def bytes(self) -> int:
        """What they take together."""
        return self._sql.bytes + self._tags.bytes

    def has(self, expression: str | None, kind: str) -> bool:
        """Whether a filter is there without compiling anything."""
        return (expression, kind) in self._room(kind).filters

    def get(self, expression: str | None, kind: str) -> MessageFilter:
        """The filter of an expression; raises `OrbitError` when it is none."""
        key = (expression, kind)
        room = self._room(kind)
        found = room.filters.get(key)
        if found is not None:
            room.filters.move_to_end(key)
            return found
        compiled = self._compile(expression, kind)
        room.add(key, compiled)
        return compiled

    def _room(self, kind: str) -> _Room:
        return self._tags if kind == TAG or not kind else self._sql

    def _compile(self, expression: str | None, kind: str) -> MessageFilter:
        check_length(expression)
        compiled = compile_filter(expression, kind, lenient=self._lenient)
        if isinstance(compiled, TagFilter):
            return TagFilter(codes=compiled.codes, matches_all=compiled.matches_all)
        return compiled


class _Room:
    """Filters of one kind, as many as fit; who was used last is last."""

    __slots__ = ("_most", "_most_bytes", "bytes", "filters")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.filters: OrderedDict[_Key, MessageFilter] = OrderedDict()
        #: What they take together.
        self.bytes = 0

    def add(self, key: _Key, compiled: MessageFilter) -> None:
        self.filters[key] = compiled
        self.bytes += _size(key[0], compiled)
        while self.bytes > self._most_bytes or len(self.filters) > self._most:
            (oldest, _), dropped = self.filters.popitem(last=False)
            self.bytes -= _size(oldest, dropped)


def check_length(expression: str | None) -> None:
    """Raise `InvalidFilter` for an expression that no broker should have to keep."""
    if expression is not None and len(expression) > LONGEST_EXPRESSION:
        raise InvalidFilter(
            f"the expression has {len(expression)} characters, {LONGEST_EXPRESSION} are allowed",
            expression,
            LONGEST_EXPRESSION,
        )


def memory_of(compiled: MessageFilter) -> int:
    """About how many bytes a filter takes."""
    if isinstance(compiled, TagFilter):
        return _FILTER + _HASH * len(compiled.codes)
    return _FILTER + _CHARACTER * len(getattr(compiled, "text", ""))


def _size(expression: str | None, compiled: MessageFilter) -> int:
    return memory_of(compiled) + sys.getsizeof(expression)
