"""Compiled filters, each kept once and not more of them than there is room for.

What a client brings with a pull is compiled and kept, since its next pull brings the same. But
nothing ties anybody to a few expressions, and a compiled one takes up to a hundred times the memory
of its text. So the room is counted in bytes, and an expression has a longest length: SQL's is its
grammar's, and tag lists have the same one here. (Apache's brokers take tag lists of any length, and
compile them anew for each pull.)

A broker compares hashes; the tags themselves are for clients, and are not kept.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.subscription import MessageFilter, compile_filter
from orbitmq.filter.tags import TagFilter

#: Characters of an expression: 800 tags that are UUIDs, or some thousands of shorter ones.
LONGEST_EXPRESSION = 32_768
#: Expressions that are kept, and the bytes that they may take together.
MOST_FILTERS = 4096
MOST_BYTES = 64 * 1024 * 1024

#: Bytes of a compiled filter, as measured: of any, for each hash of a tag list, and for each
#: character of an SQL expression.
_FILTER = 128
_HASH = 40
_CHARACTER = 100


class CompiledFilters:
    """The filters that were used last."""

    def __init__(
        self, *, lenient: bool, most: int = MOST_FILTERS, most_bytes: int = MOST_BYTES
    ) -> None:
        self._lenient = lenient
        self._most = most
        self._most_bytes = most_bytes
        self._filters: OrderedDict[tuple[str | None, str], MessageFilter] = OrderedDict()
        #: What they take together.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._filters)

    def has(self, expression: str | None, kind: str) -> bool:
        """Whether a filter is there without compiling anything."""
        return (expression, kind) in self._filters

    def get(self, expression: str | None, kind: str) -> MessageFilter:
        """The filter of an expression; raises `OrbitError` when it is none."""
        key = (expression, kind)
        found = self._filters.get(key)
        if found is not None:
            self._filters.move_to_end(key)
            return found
        compiled = self._compile(expression, kind)
        self._filters[key] = compiled
        self.bytes += _room(expression, compiled)
        while self.bytes > self._most_bytes or len(self._filters) > self._most:
            (oldest, _), dropped = self._filters.popitem(last=False)
            self.bytes -= _room(oldest, dropped)
        return compiled

    def _compile(self, expression: str | None, kind: str) -> MessageFilter:
        check_length(expression)
        compiled = compile_filter(expression, kind, lenient=self._lenient)
        if isinstance(compiled, TagFilter):
            return TagFilter(codes=compiled.codes, matches_all=compiled.matches_all)
        return compiled


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


def _room(expression: str | None, compiled: MessageFilter) -> int:
    return memory_of(compiled) + sys.getsizeof(expression)
