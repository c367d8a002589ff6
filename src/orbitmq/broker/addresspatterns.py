"""Which hosts are meant: addresses as people write them into white lists.

The forms are those of RocketMQ's plain ACL. Every part of an address is a number, `*` for any, or a
range; the last part may be a choice. Several patterns may stand in one text, with commas between:

    *                     everybody
    192.168.0.1           one host
    192.168.*.*           a network
    192.168.1-20.*        several networks
    192.168.0.{7,9}       two hosts
    2001:db8::1-ff        IPv6: parts are hexadecimal, `::` stands for zeros
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from orbitmq.broker.errors import BrokerError

_ANY = "*"
#: Commas between patterns, not those inside braces.
_between_patterns = re.compile(r",(?![^{]*\})").split


class PatternError(BrokerError):
    """A text that names no hosts."""


@dataclass(frozen=True, slots=True)
class HostPattern:
    """The hosts whose parts all lie within bounds; without parts: every host."""

    parts: tuple[tuple[tuple[int, int], ...], ...]

    def matches(self, parts: tuple[int, ...]) -> bool:
        if not self.parts:
            return True
        return len(parts) == len(self.parts) and all(
            any(low <= part <= high for low, high in ranges)
            for part, ranges in zip(parts, self.parts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class HostPatterns:
    """Hosts that any of some patterns means."""

    patterns: tuple[HostPattern, ...] = ()

    def __contains__(self, host: str) -> bool:
        """Whether a host, an address in numbers, is meant."""
        if not self.patterns:
            return False
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is None:
                parts = tuple(int(part, 16) for part in address.exploded.split(":"))
                return any(pattern.matches(parts) for pattern in self.patterns)
            address = address.ipv4_mapped
        return any(pattern.matches(tuple(address.packed)) for pattern in self.patterns)


NO_HOSTS: Final = HostPatterns()


def parse_patterns(text: str) -> HostPatterns:
    """All patterns of a text; none of an empty one. Raises `PatternError`."""
    return HostPatterns(
        tuple(_parse(word.strip()) for word in _between_patterns(text) if word.strip())
    )


def _parse(text: str) -> HostPattern:
    try:
        if text == _ANY:
            return HostPattern(())
        if ":" in text:
            return HostPattern(_parsed(_expanded(text), base=16, count=8))
        return HostPattern(_parsed(text.split("."), base=10, count=4))
    except ValueError:
        raise PatternError(
            f"a white list takes addresses such as 192.168.0.1, 192.168.*.*, 192.168.1-20.*, "
            f"192.168.0.{{7,9}} and 2001:db8::*, got {text!r}"
        ) from None


def _expanded(text: str) -> list[str]:
    """The eight parts of an IPv6 address, with the zeros for which `::` stands."""
    before, zeros, after = text.partition("::")
    first = before.split(":") if before else []
    last = after.split(":") if after else []
    missing = 8 - len(first) - len(last)
    if zeros and missing < 1:
        raise ValueError
    return [*first, *(["0"] * missing if zeros else []), *last]


def _parsed(parts: list[str], *, base: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    if len(parts) != count:
        raise ValueError
    largest = 255 if base == 10 else 0xFFFF
    ranges = []
    for place, part in enumerate(parts, 1):
        choices = [part]
        if place == count and part.startswith("{") and part.endswith("}"):
            choices = part[1:-1].split(",")
        ranges.append(tuple(_range(choice.strip(), base, largest) for choice in choices))
    return tuple(ranges)


def _range(text: str, base: int, largest: int) -> tuple[int, int]:
    if text == _ANY:
        return 0, largest
    first, dash, last = text.partition("-")
    low = _number(first, base)
    high = _number(last, base) if dash else low
    if not low <= high <= largest:
        raise ValueError
    return low, high


def _number(text: str, base: int) -> int:
    # `int` takes signs, underscores and the digits of other scripts as well.
    if not text.isascii() or not text.isalnum():
        raise ValueError
    return int(text, base)
