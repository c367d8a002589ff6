"""What `orbitmq top` looks like, and which keys change that.

The three tables share the lines of the screen: what one does not need, the others get.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from orbitmq.cli.frames import FrameRecord, TopGroupRecord, TopTopicRecord
from orbitmq.cli.grouprecords import CallTimesRecord, QueueProgressRecord
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import (
    NOTHING,
    count,
    duration,
    fine,
    harmless,
    moment,
    rate,
    several,
    share,
)
from orbitmq.client.names import is_retry_topic

if TYPE_CHECKING:
    from rich.console import RenderableType

R = TypeVar("R")

#: Lines of the screen that are not rows: the head, titles and headings with a blank before, keys.
_FIXED_LINES: Final = 12
#: Looks whose lag a small curve shows.
_LOOKS: Final = 12
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_HELP: Final = "↑ ↓ choose a group   s order   p pause   q quit"

_ORDERS: Final[Mapping[str, Callable[[TopGroupRecord], tuple[object, ...]]]] = {
    "most lag": lambda each: (-each.lag, each.group),
    "oldest": lambda each: (-(each.lag_seconds or 0.0), each.group),
    "fastest growing": lambda each: (-(each.lag_change or 0.0), each.group),
    "busiest": lambda each: (-each.out_rate, each.group),
    "name": lambda each: (each.group,),
}


@dataclass
class View:
    """What the person at the terminal wants to see."""

    #: The group whose queues are shown; None: the one with most lag.
    chosen: str | None = None
    order: str = "most lag"
    is_paused: bool = False
    is_interactive: bool = False
    #: The last lags of each group.
    lags: dict[str, deque[int]] = field(default_factory=dict)

    def note(self, frame: FrameRecord) -> None:
        """Remember the lags of a frame; of groups that are gone nothing is kept."""
        self.lags = {
            each.group: self.lags.get(each.group, deque(maxlen=_LOOKS)) for each in frame.groups
        }
        for each in frame.groups:
            self.lags[each.group].append(each.lag)

    def press(self, key: str, frame: FrameRecord | None) -> bool:
        """Do what a key says; whether the cluster is to be looked at anew for it."""
        if key == "p":
            self.is_paused = not self.is_paused
            return not self.is_paused
        if key == "s":
            names = list(_ORDERS)
            self.order = names[(names.index(self.order) + 1) % len(names)]
        if key in ("up", "down") and frame is not None and frame.groups:
            names = [each.group for each in self.sorted(frame.groups)]
            shown = self.chosen or frame.group
            at = names.index(shown) if shown in names else -1 if key == "down" else len(names)
            self.chosen = names[max(0, min(len(names) - 1, at + (1 if key == "down" else -1)))]
            return True
        return False

    def sorted(self, groups: Sequence[TopGroupRecord]) -> list[TopGroupRecord]:
        return sorted(groups, key=_ORDERS[self.order])


#: What terminals send for a key.
_KEYS: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up",
    b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"s": "s", b"p": "p", b" ": "p", b"q": "q", b"Q": "q", b"\x04": "q",
}  # fmt: skip


@contextlib.contextmanager
def keys(pressed: Callable[[str], None]) -> Iterator[bool]:
    """Tell of single keys while this lasts; whether there is somebody to press them."""
    if not sys.stdin.isatty():
        yield False
        return
    source = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(source)

    def read() -> None:
        data = os.read(source, 64)
        if not data:
            pressed("q")
        for key in meant(data):
            pressed(key)

    tty.setcbreak(source)
    loop.add_reader(source, read)
    try:
        yield True
    finally:
        loop.remove_reader(source)
        termios.tcsetattr(source, termios.TCSADRAIN, before)


def meant(data: bytes) -> Iterator[str]:
    """The keys that a terminal's bytes stand for; others are passed over."""
    while data:
        code = next((code for code in _KEYS if data.startswith(code)), None)
        if code is not None:
            yield _KEYS[code]
        data = data[len(code or b"x") :]


def drawn(frame: FrameRecord, view: View, lines: int) -> RenderableType:
    """A frame within so many lines."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    when = moment(frame.at, frame.at, exact=True)
    is_first = frame.rate_seconds is None
    span = "last minute, by brokers" if is_first else f"last {duration(frame.rate_seconds)}"
    head = (
        f"OrbitMQ top  {when}  in {rate(frame.in_rate)}/s  out {rate(frame.out_rate)}/s  "
        f"({span})  lag {count(sum(each.lag for each in frame.groups))}  "
        f"{several(len(frame.brokers), 'broker')}"
    )
    parts: list[RenderableType] = [Text(head + ("  PAUSED" if view.is_paused else ""), "bold")]
    for broker in frame.brokers:
        state = "up" if broker.is_up else "DOWN"
        # What brokers tell in the first frame is of other seconds.
        came, went = (None, None) if is_first else (broker.in_rate, broker.out_rate)
        line = (
            f"{broker.broker} {broker.address} {state}  in {rate(came)}/s  "
            f"out {rate(went)}/s  disk {share(broker.disk_used)}"
        )
        parts.append(Text(harmless(line), style="" if broker.is_up else "red"))
    free = max(9, lines - _FIXED_LINES - len(frame.brokers) - (frame.problem is not None) * 2)
    groups = view.sorted(frame.groups)
    fits = shared(free, len(groups), len(frame.topics), len(frame.queues))
    first = _first_shown(groups, frame.group, fits[0])
    parts += _part(f"Groups, {view.order} first" if view.order != "name" else "Groups by name",
                   groups, fits[0], _groups(frame.group, view), first)  # fmt: skip
    parts += _part("Topics, busiest first", frame.topics, fits[1], _TOPICS)
    if frame.group is not None:
        title = f"Queues of {frame.group}{handlers(frame.handlers)}"
        parts += _part(title, frame.queues, fits[2], _QUEUES)
    if frame.problem is not None:
        parts += [Text(""), Text(harmless(f"! {frame.problem}"), style="red")]
    if view.is_interactive:
        parts += [Text(""), Text(_HELP, style="dim")]
    return Group(*parts)


def shared(lines: int, *wanted: int) -> list[int]:
    """How many lines each gets: a fair part, and of what others leave as much as it needs."""
    given = [0] * len(wanted)
    while (left := lines - sum(given)) > 0:
        hungry = [place for place, most in enumerate(wanted) if given[place] < most]
        if not hungry:
            break
        part = max(1, left // len(hungry))
        for place in hungry[:left]:
            given[place] += min(part, wanted[place] - given[place])
    return given


def trend(lags: Sequence[int]) -> str:
    """The last lags as a small curve, from the least of them to the most."""
    least, most = min(lags, default=0), max(lags, default=0)
    if not most or len(lags) < 2:
        return ""
    span = most - least
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((lag - least) / span * top) if span else top // 2] for lag in lags)


def drains(group: TopGroupRecord) -> str:
    """How long until nothing waits, at the present pace."""
    if not group.lag:
        return NOTHING
    if group.lag_change is None:
        return "?"
    return duration(group.lag / -group.lag_change) if group.lag_change < 0 else "never"


def handlers(times: Sequence[CallTimesRecord]) -> str:
    """How long calls of handlers take, for the topic with most of them."""
    if not times:
        return ""
    most = max(times, key=lambda each: (not is_retry_topic(each.topic), each.calls))
    return (
        f"; calls for {most.topic}: p50 {fine(most.p50_seconds)}, p95 {fine(most.p95_seconds)}, "
        f"p99 {fine(most.p99_seconds)}, longest {fine(most.longest_seconds)}"
    )


def _first_shown(groups: Sequence[TopGroupRecord], chosen: str | None, most: int) -> int:
    """Where the list begins, so that the group whose queues are shown is in it."""
    place = next((at for at, each in enumerate(groups) if each.group == chosen), 0)
    return max(0, min(place - most + 1, len(groups) - most))


def _part(
    title: str, rows: Sequence[R], most: int, columns: Columns[R], first: int = 0
) -> Sequence[RenderableType]:
    from rich.text import Text  # noqa: PLC0415

    more = f" ({first + 1} to {first + most} of {len(rows)})" if len(rows) > most else ""
    shown = rows[first : first + most]
    return (Text(""), Text(harmless(title) + more, style="bold"), columns.grid(shown))


def _change(group: TopGroupRecord) -> str:
    if group.lag_change is None:
        return NOTHING
    return f"{group.lag_change:+,.1f}"


def _groups(chosen: str | None, view: View) -> Columns[TopGroupRecord]:
    mark = "> " if view.is_interactive else ""
    blank = " " * len(mark)
    return (
        Columns[TopGroupRecord]()
        .text("group", lambda each: (mark if each.group == chosen else blank) + each.group)
        .text("state", lambda each: each.state, bad=lambda e: e.state != "online" and e.lag > 0)
        .number("members", lambda each: count(each.members))
        .number("lag", lambda each: count(each.lag))
        .number("lag/s", _change, bad=lambda each: (each.lag_change or 0) > 0)
        .number("oldest", lambda each: duration(each.lag_seconds))
        .number("out/s", lambda each: rate(each.out_rate))
        .number("empty in", drains)
        .text("trend", lambda each: trend(view.lags.get(each.group, ())))
    )


_TOPICS = (
    Columns[TopTopicRecord]()
    .text("topic", lambda each: each.topic)
    .number("in/s", lambda each: rate(each.in_rate))
    .number("messages", lambda each: count(each.messages))
)
_QUEUES = (
    Columns[QueueProgressRecord]()
    .text("topic", lambda each: each.topic)
    .text("queue", lambda each: f"{each.broker}:{each.queue_id}")
    .number("lag", lambda each: count(each.lag))
    .number("oldest", lambda each: duration(each.lag_seconds))
    .text("owner", lambda each: each.owner or NOTHING, bad=lambda e: e.owner is None and e.lag > 0)
)
