"""A ring of hashes on which every member has several places and a key belongs to the next one.

Apache's ring, to the bit: the hash is the first four bytes of an MD5 digest, a member's places are
the hashes of `<id>-0`, `<id>-1`, ..., and a place that two members share belongs to the later one.
A broker lists a client that has two connections twice; its second entry adds further places, which
are numbered after those that the member still has.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable


class HashRing:
    """Members on a ring."""

    __slots__ = ("_members", "_places")

    def __init__(self, members: Iterable[str], places_each: int) -> None:
        ring: dict[int, str] = {}
        seen: set[str] = set()
        for member in members:
            first = sum(owner == member for owner in ring.values()) if member in seen else 0
            seen.add(member)
            for number in range(first, first + places_each):
                ring[place_of(f"{member}-{number}")] = member
        self._places = sorted(ring)
        self._members = [ring[place] for place in self._places]

    def owner(self, key: str) -> str:
        """The member with the first place at or after the key's, going round."""
        at = bisect.bisect_left(self._places, place_of(key))
        return self._members[at % len(self._members)]


def place_of(key: str) -> int:
    """Where a key stands on the ring: 0 to 2**32 - 1."""
    # Java writes a lone half of a character as a question mark.
    digest = hashlib.md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")
