"""Tag expressions: `TagA || TagB`, matched by hash in the broker and by text in the client.

A queue entry carries the hash of its message's tag, so a broker can skip a message without reading
it. Different tags may share a hash: what passes the broker is therefore checked once more by text
in the client, and only both checks together are the filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.filter.errors import InvalidFilter
from orbitmq.javahash import java_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from orbitmq.filter.properties import Properties

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
