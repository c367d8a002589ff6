"""Tag expressions: `TagA || TagB`, matched by hash in the broker and by text in the client.

A queue entry carries the hash of its message's tag, so a broker can skip a message without reading
it. Different tags may share a hash: what passes the broker is therefore checked once more by text
in the client, and only both checks together are the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

from orbitmq.errors import InvalidFilter, OrbitError, install_command
from orbitmq.javahash import java_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


#: The expression that every message matches.
ALL = "*"
SEPARATOR = "||"

#: Java's `trim` removes these, and no other kind of blank.
_BLANKS = "".join(map(chr, range(0x21)))
#: Up to here, comparing with one code after the other is what costs least; beyond, numpy chooses.
_FEW_CODES = 12


def parse_tags(expression: str | None) -> TagFilter:
    """The filter that a subscription text stands for; none, empty and `*` mean every message.

    A text of blanks names no tag and matches nothing, while one of separators alone is refused:
    both as Apache's clients and brokers do it.
    """
    if not expression or expression == ALL:
        return TagFilter(matches_all=True)
    pieces = expression.split(SEPARATOR)
    if not any(pieces):
        raise InvalidFilter(
            f"a tag expression needs a tag between its separators; write TagA {SEPARATOR} TagB, "
            f"or {ALL} for every message",
            expression,
            0,
        )
    tags = frozenset(tag for piece in pieces if (tag := piece.strip(_BLANKS)))
    return TagFilter(tags=tags, codes=tuple(sorted({java_hash(tag) for tag in tags})))


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFilter:
    """A set of tags and of their hashes."""

    tags: frozenset[str] = frozenset()
    #: Signed 32-bit hashes of `tags`, ascending, each once.
    codes: tuple[int, ...] = ()
    matches_all: bool = False

    @property
    def needs_properties(self) -> bool:
        """Never: a queue entry is enough."""
        return False

    def accepts_code(self, tag_code: int) -> bool:
        """Whether a queue entry with this 64-bit code passes; only its low 32 bits count."""
        return self.matches_all or _signed_32(tag_code) in self.codes

    def accepts_properties(self, properties: Properties) -> bool:
        """Always: the tag was judged by its code."""
        return True

    def accepts_tag(self, tag: str | None) -> bool:
        """The client's check by text, after the broker's by hash."""
        return self.matches_all or tag in self.tags

    def mask(self, tag_codes: NDArray[np.integer]) -> NDArray[np.bool_]:
        """`accepts_code` for a column of queue entries, of any integer type and byte order."""
        import numpy as np  # noqa: PLC0415  # a client filters without numpy

        if self.matches_all:
            return np.ones(tag_codes.shape, dtype=np.bool_)
        low = tag_codes.astype(np.int32)  # wraps around, which is what keeps the low 32 bits
        if not 0 < len(self.codes) <= _FEW_CODES:
            return np.isin(low, np.array(self.codes, dtype=np.int32))
        accepted: NDArray[np.bool_] = low == self.codes[0]
        for code in self.codes[1:]:
            accepted |= low == code
        return accepted


def _signed_32(number: int) -> int:
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


# The filter of a subscription, whichever language its expression is in.


TAG = "TAG"
SQL92 = "SQL92"


class MessageFilter(Protocol):
    """What a reader of a queue asks: first by the queue entry, then, if needed, by the message."""

    @property
    def needs_properties(self) -> bool:
        """Whether the message itself has to be looked at."""

    def accepts_code(self, tag_code: int) -> bool:
        """Whether a message with this tag code may match."""

    def accepts_properties(self, properties: Properties) -> bool:
        """Whether a message with these properties, decoded or as stored, may match."""


class UnknownFilterType(OrbitError):
    """A subscription in a filter language that does not exist, or is not installed."""


def compile_filter(
    expression: str | None, expression_type: str | None = None, *, lenient: bool = False
) -> MessageFilter:
    """The filter for a subscription as it came over the wire; no type means tags."""
    if not expression_type or expression_type == TAG:
        return parse_tags(expression)
    if expression_type != SQL92:
        raise UnknownFilterType(
            f"there is no filter type {expression_type!r}; use {TAG} or {SQL92}"
        )
    try:
        from orbitmq.filter.sql import compile_sql  # noqa: PLC0415  # tags need no grammar
    except ModuleNotFoundError as missing:
        if missing.name != "lark":
            raise
        raise UnknownFilterType(
            f"{SQL92} filters need a parser that is not installed: {install_command('broker')}"
        ) from missing
    return compile_sql(expression or "", lenient=lenient)


# A message's properties as a filter sees them: a decoded map, or the bytes as they are stored.
#
# Stored properties are `name 0x01 value 0x02`, one after the other. A filter asks for one or two of
# the eight to twelve that a message has, so the bytes are searched for those and the others are
# never decoded. Entries without a value count as absent, and of two with one name the later counts:
# both as Apache's decoder leaves them.


Properties: TypeAlias = Mapping[str, str] | bytes | bytearray | memoryview
#: The text of a property, or None when the message has none of that name.
Lookup: TypeAlias = Callable[[str], str | None]

_STORED = (bytes, bytearray, memoryview)
_NAME_END = b"\x01"
_ENTRY_END = b"\x02"


def lookup_in(properties: Properties) -> Lookup:
    """How to ask these properties for one of them."""
    if not isinstance(properties, _STORED):
        return properties.get
    entries = _ENTRY_END + bytes(properties) + _ENTRY_END  # so that each lies between two marks

    def lookup(name: str) -> str | None:
        mark = _mark(name)
        at = entries.rfind(mark)
        while at >= 0:
            start = at + len(mark)
            end = entries.index(_ENTRY_END, start)
            if end > start:
                return entries[start:end].decode("utf-8", "replace")
            at = entries.rfind(mark, 0, start - 1)
        return None

    return lookup


@lru_cache(maxsize=1024)
def _mark(name: str) -> bytes:
    return _ENTRY_END + name.encode() + _NAME_END


# What goes wrong with a filter: it cannot be compiled, or it cannot judge a message.


class IncomparableValues(OrbitError):
    """A message whose properties an expression cannot compare, so it does not match.

    Apache's broker logs an exception in this case and skips the message; so does ours.
    """

    def __init__(self, text: str, wanted: str) -> None:
        self.text = text
        self.wanted = wanted
        super().__init__(text, wanted)

    def __str__(self) -> str:
        # Built only when it is read: a filter may meet this on every message.
        return f"the value {self.text!r} is not {self.wanted}"
