"""What a broker says about itself (GET_BROKER_RUNTIME_INFO), as numbers instead of texts.

Keys differ among releases and single values may be missing or odd: what cannot be read is None, and
`raw` has everything as it came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.wire.versions import release_of

#: Above this share of the disk Apache's broker deletes old files early, and soon refuses messages.
DISK_WARNING = 0.85
#: More than this is written and not yet visible to consumers: something is wrong with the disk.
BEHIND_WARNING = 64 * 1024 * 1024

_FINDING = re.compile(r"groupFinding_(\d+)")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """How many topics or groups there are, and from how many on use alone makes no more."""

    what: str  #: topics, or groups
    count: int
    most: int
    setting: str  #: of the broker, that has `most`

    @property
    def share(self) -> float:
        return self.count / self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """The state of a running broker. Rates are per second over the last 10 s."""

    version: str
    started_at: float | None
    in_rate: float | None
    out_rate: float | None
    in_today: int | None
    out_today: int | None
    #: Share of the disk that is in use, 0 to 1.
    disk_used: float | None
    #: Bytes that are stored and not yet in a queue.
    dispatch_behind: int | None
    log_start: int | None
    log_end: int | None
    earliest_message_at: float | None
    #: Requests that wait.
    waiting_sends: int | None
    waiting_pulls: int | None
    #: What this broker has found wrong in groups, in words; only OrbitMQ's looks for it.
    findings: tuple[str, ...]
    raw: Mapping[str, str] = field(hash=False)

    @property
    def is_orbitmq(self) -> bool:
        """Whether this is a broker of ours rather than Apache's."""
        return is_orbitmq(self.raw)

    @property
    def name_conflicts(self) -> str:
        """Which other broker is registered by the name of this one; empty when none is."""
        return self.raw.get("nameConflicts", "")

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        """What the broker has room for; only OrbitMQ's has and tells such bounds."""
        table = _Table(self.raw)
        found = (
            (what, table.whole(what), table.whole(f"maxAuto{what.title()}"))
            for what in ("topics", "groups")
        )
        return tuple(
            Ceiling(what, count, most, f"broker.max_auto_{what}")
            for what, count, most in found
            if count is not None and most
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What needs a hand, in words."""
        found: list[str] = []
        if self.disk_used is not None and self.disk_used >= DISK_WARNING:
            found.append(
                f"the disk is {self.disk_used:.0%} full; messages are refused when it is full: "
                "shorten the retention or add space"
            )
        if self.dispatch_behind is not None and self.dispatch_behind > BEHIND_WARNING:
            found.append(
                f"{self.dispatch_behind} bytes are stored and not yet visible to consumers"
            )
        if refusal := self.raw.get("storeRefusal"):
            found.append(f"it refuses messages: {refusal}")
        if lost := self.raw.get("unreachableNameServers"):
            found.append(f"it cannot reach the name servers {lost}")
        if self.name_conflicts:
            found.append(self.name_conflicts)
        if self.raw.get("brokerActive") == "false":
            found.append("it is not active")
        return (*found, *self.findings)


def is_orbitmq(raw: Mapping[str, str]) -> bool:
    """Whether runtime information is that of a broker of ours."""
    return "groupFindings" in raw


def runtime_info(raw: Mapping[str, str], version: int) -> RuntimeInfo:
    """The table of a broker that announces itself with this version."""
    table = _Table(raw)
    release = release_of(version)
    described = raw.get("brokerVersionDesc", "").removeprefix("V").replace("_", ".")
    return RuntimeInfo(
        version=described or ("" if release is None else str(release)),
        started_at=table.time("bootTimestamp"),
        in_rate=table.rate("putTps"),
        # Releases of 4.x spell it with one r.
        out_rate=table.rate("getTransferredTps", "getTransferedTps"),
        in_today=table.difference("msgPutTotalTodayNow", "msgPutTotalTodayMorning"),
        out_today=table.difference("msgGetTotalTodayNow", "msgGetTotalTodayMorning"),
        disk_used=table.number("commitLogDiskRatio"),
        dispatch_behind=table.whole("dispatchBehindBytes"),
        log_start=table.whole("commitLogMinOffset"),
        log_end=table.whole("commitLogMaxOffset"),
        earliest_message_at=table.time("earliestMessageTimeStamp"),
        waiting_sends=table.whole("sendThreadPoolQueueSize"),
        waiting_pulls=table.whole("pullThreadPoolQueueSize"),
        findings=_findings(raw),
        raw=dict(raw),
    )


def _findings(raw: Mapping[str, str]) -> tuple[str, ...]:
    numbered = [
        (int(match[1]), text) for name, text in raw.items() if (match := _FINDING.fullmatch(name))
    ]
    return tuple(text for _, text in sorted(numbered))


class _Table:
    """Reads single values."""

    def __init__(self, raw: Mapping[str, str]) -> None:
        self._raw = raw

    def number(self, *names: str) -> float | None:
        for name in names:
            try:
                return float(self._raw[name].split()[0])
            except (KeyError, ValueError, IndexError):
                continue
        return None

    def rate(self, *names: str) -> float | None:
        """The first of the three numbers that rates are."""
        return self.number(*names)

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def time(self, name: str) -> float | None:
        value = self.number(name)
        return None if value is None or value <= 0 else value / 1000

    def difference(self, later: str, earlier: str) -> int | None:
        end, start = self.whole(later), self.whole(earlier)
        return None if end is None or start is None else max(0, end - start)
