"""The ordinals by which RocketMQ releases announce themselves, and what depends on them.

Apache numbers a release by its place in an enumeration that has a snapshot before every release.
From 3.0.1 on the releases of a minor line therefore lie two apart, and only the place at which each
line begins has to be known.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from orbitmq.wire.errors import WireError


class Gate(enum.IntEnum):
    """Versions at which peers begin to behave differently."""

    #: Clients that understand a pushed reset of offsets.
    CLIENT_RESETS_OFFSETS = 28
    #: Clients that answer GET_CONSUMER_RUNNING_INFO and CONSUME_MESSAGE_DIRECTLY.
    CLIENT_TELLS_STATE = 62
    #: Requests whose `maxReconsumeTimes` counts.
    MAX_RECONSUME_TIMES = 121
    #: Brokers to which a Java client sends subscriptions other than tags.
    SQL_SUBSCRIPTIONS = 232
    #: The last clients that leave `_UNIQUE_KEY_QUERY` out of what they sign.
    UNSIGNED_UNIQUE_KEY_QUERY = 399
    #: Requesters of a route that read quoted integer keys.
    STANDARD_JSON = 401
    #: Brokers whose registration may carry queue mappings.
    QUEUE_MAPPINGS = 413
    #: The last clients that do not know GO_AWAY.
    BEFORE_GO_AWAY = 475


#: Announced on every command of ours: 5.3.3, the release whose protocol this package speaks.
OUR_VERSION = 479

#: Apache's name for every ordinal above its last release.
HIGHER_VERSION = 612


class Release(NamedTuple):
    """A release of RocketMQ, or the snapshot before it."""

    major: int
    minor: int
    patch: int
    is_snapshot: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}{'-SNAPSHOT' if self.is_snapshot else ''}"


class _Line(NamedTuple):
    """Where a minor line begins: the ordinal of the snapshot before its first patch release."""

    ordinal: int
    first_patch: int
    last_patch: int = 9


_LINES: dict[tuple[int, int], _Line] = {
    (3, 0): _Line(16, 1, last_patch=15),
    (3, 1): _Line(46, 0),
    (3, 2): _Line(66, 0),
    # 3.3 to 3.9 begin with patch 1 and are therefore eighteen apart.
    **{(3, minor): _Line(86 + 18 * (minor - 3), 1) for minor in range(3, 10)},
    **{(4, minor): _Line(212 + 20 * minor, 0) for minor in range(10)},
    **{(5, minor): _Line(412 + 20 * minor, 0) for minor in range(10)},
}


def ordinal_of(release: Release) -> int:
    """The number under which a release announces itself."""
    line = _LINES.get((release.major, release.minor))
    if line is None or not line.first_patch <= release.patch <= line.last_patch:
        raise WireError(f"RocketMQ has no ordinal for {release}; 3.0.1 to 5.9.9 have one")
    return line.ordinal + 2 * (release.patch - line.first_patch) + (not release.is_snapshot)


def release_of(ordinal: int) -> Release | None:
    """The release behind an ordinal; None for previews of 3.0.0 and for numbers not given out."""
    for (major, minor), line in _LINES.items():
        patch, is_release = divmod(ordinal - line.ordinal, 2)
        patch += line.first_patch
        if line.first_patch <= patch <= line.last_patch:
            return Release(major, minor, patch, not is_release)
    return None
