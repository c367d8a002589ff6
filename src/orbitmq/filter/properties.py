"""A message's properties as a filter sees them: a decoded map, or the bytes as they are stored.

Stored properties are `name 0x01 value 0x02`, one after the other. A filter asks for one or two of
the eight to twelve that a message has, so the bytes are searched for those and the others are never
decoded. Entries without a value count as absent, and of two with one name the later counts: both as
Apache's decoder leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeAlias

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
