"""The number by which a consume queue filters tags without reading the message."""

from __future__ import annotations

from functools import lru_cache

from orbitmq.javahash import java_hash


def tag_code(tags: str | None) -> int:
    """The 64-bit signed code of the TAGS property; 0 for a message without tags.

    It is the 32-bit Java hash with its sign kept, so readers that compare 32 bits agree with those
    that compare 64. Several tags joined by `||` are hashed as one text, as Apache's broker does.
    """
    return _cached_hash(tags) if tags else 0


# Few distinct tags make up a topic; the bound is there for those who put an id into the tag.
_cached_hash = lru_cache(maxsize=8192)(java_hash)
