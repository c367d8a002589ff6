"""What the last field of a queue entry says: a tag, or a time.

In the schedule topic it is the time of delivery, in milliseconds. Everywhere else it is the code of
the message's tag, by which readers choose without looking at the message; 0 without a tag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.clock import milliseconds_up
from orbitmq.message.properties import property_value
from orbitmq.message.tagcode import tag_code
from orbitmq.message.wellknown import DELAY, TAGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orbitmq.store.consumequeue import ConsumeQueue

_TAGS = b"TAGS\x01"
_ITEM_END = b"\x02"
_TAGS_ITEM = _ITEM_END + _TAGS
#: Few tags make up a topic; the bound is for those who put an id into the tag.
_KNOWN_TAGS = 8192


class EntryCodes:
    """The codes of new entries. Remembers tags."""

    def __init__(self, delay_levels: Sequence[float]) -> None:
        self._delays_ms = [milliseconds_up(delay) for delay in delay_levels]
        self._known: dict[bytes, int] = {}  #: by tags as they lie in properties

    def of(self, queue: ConsumeQueue, properties: bytes, store_ms: int) -> int:
        """The code of a message with these properties."""
        if queue.is_schedule:
            return self.in_schedule(properties, store_ms)
        # The usual case by hand, an eighth of what the general way takes: a tag that is known.
        _, name, rest = properties.rpartition(_TAGS_ITEM)
        if not name:
            if not properties.startswith(_TAGS):
                return 0
            rest = properties[len(_TAGS) :]
        code = self._known.get(rest.partition(_ITEM_END)[0])
        return self._learn(properties) if code is None else code

    def in_schedule(self, properties: bytes, store_ms: int) -> int:
        """The same in the schedule topic."""
        level = property_value(properties, DELAY)
        if level is not None and level.isdecimal() and int(level) > 0:
            delays = self._delays_ms
            return store_ms + delays[min(int(level), len(delays)) - 1]
        return tag_code(property_value(properties, TAGS))

    def _learn(self, properties: bytes) -> int:
        tag = property_value(properties, TAGS)
        if not tag:
            return 0
        if len(self._known) >= _KNOWN_TAGS:
            self._known.clear()
        code = tag_code(tag)
        self._known[tag.encode("utf-8", "replace")] = code
        return code
