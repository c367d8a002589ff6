"""`orbitmq top`: lag, rates and owners, live. Full-screen on a terminal, else frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import termios
import tty
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from orbitmq.cli.application import section
from orbitmq.cli.cluster import BrokerRecord
from orbitmq.cli.command import Session, command, seconds
from orbitmq.cli.groups import CallTimesRecord, QueueProgressRecord, call_times_of
from orbitmq.cli.main import Misused
from orbitmq.cli.output import (
    Columns,
    count,
    drawing,
    fine,
    harmless,
    moment,
    rate,
)
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.cluster import ClusterStatus
from orbitmq.client.admin.groups import GroupProgress, GroupSummary
from orbitmq.client.admin.topics import NOT_LISTED, TopicKind, TopicStatus
from orbitmq.client.errors import AdminError
from orbitmq.client.signals import unless
from orbitmq.clock import Clock
from orbitmq.console.collect import BrokerTables, readers
from orbitmq.console.history import WINDOW
from orbitmq.console.words import NOTHING, duration, several, share
from orbitmq.errors import OrbitError
from orbitmq.names import is_retry_topic
from orbitmq.parsing import fill

if TYPE_CHECKING:
    from rich.console import RenderableType


# A sample takes a fixed number of requests per broker, some for each group with lag, and one for
# each topic. All rates of a frame are differences of offsets over the same period, so that the
# rates of topics, brokers and the cluster add up. The first frame has no earlier sample and shows
# the rates that brokers count, over 10 s or a minute.


K = TypeVar("K", bound=Hashable)

#: The most topics; more would make a sample take seconds.
MOST_TOPICS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTopicRecord:
    """A topic; the busiest first."""

    topic: str
    messages: int
    in_rate: float  #: stored messages per second


@dataclass(frozen=True, slots=True, kw_only=True)
class TopGroupRecord:
    """A group; the largest lag first."""

    group: str
    state: str
    members: int
    lag: int
    lag_change: float | None  #: messages per second; negative: it shrinks; null in the first frame
    lag_seconds: float | None
    out_rate: float  #: finished messages per second; in the first frame: pulled


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRecord:
    """The state of a cluster at an instant."""

    at: float
    #: The period of all rates in seconds, 30 at most. Null in the first frame, whose rates are
    #: those that brokers count: over the last minute, those of brokers over the last 10 s.
    rate_seconds: float | None
    in_rate: float  #: messages per second, of all topics
    out_rate: float  #: messages per second, of all groups
    brokers: tuple[BrokerRecord, ...]
    topics: tuple[TopTopicRecord, ...]
    groups: tuple[TopGroupRecord, ...]
    group: str | None  #: the owner of `queues`: the chosen group, or the one with the largest lag
    queues: tuple[QueueProgressRecord, ...]
    handlers: tuple[CallTimesRecord, ...]  #: durations of its handlers, if members report them
    problem: str | None = None  #: why a part of the frame is missing


@dataclass(frozen=True, slots=True)
class _Look:
    """A sample of the counters."""

    at: float
    #: Next offsets, by topic and broker.
    stored: Mapping[tuple[str, str], int]
    #: Committed offsets, by group, topic and broker.
    done: Mapping[tuple[str, str, str], int]
    #: Lags, by group.
    lags: Mapping[str, int]


class Frames:
    """Samples a cluster and computes frames."""

    def __init__(
        self, admin: AsyncAdmin, tables: BrokerTables, clock: Clock, group: str | None = None
    ) -> None:
        self._admin = admin
        self._tables = tables
        self._clock = clock
        self._group = group
        #: The samples for the rates, the oldest first.
        self._looks: deque[_Look] = deque()

    def choose(self, group: str | None) -> None:
        """Show the queues of this group; None: of the one with the largest lag."""
        self._group = group

    async def next(self) -> FrameRecord:
        """Take a sample and return the frame."""
        admin = self._admin
        cluster = await admin.cluster()
        listing = await admin.groups.list(members=True, times=True)
        statuses = await self._topics()
        lags = {each.group: each.lag for each in listing}
        look = _Look(self._clock.monotonic(), _stored(statuses), await self._done(cluster), lags)
        rates = self._rates(look)
        topics = [_topic(each, rates) for each in statuses.values()]
        groups = [_group(each, rates) for each in listing]
        groups.sort(key=lambda each: (-each.lag, each.group))
        shown = self._group or (groups[0].group if groups and groups[0].lag else None)
        progress, problem = await self._progress(shown)
        missing = [f"{each.server}: {each.reason}" for each in listing.unreachable]
        return FrameRecord(
            at=self._clock.now(),
            rate_seconds=None if rates is None else rates.seconds,
            in_rate=sum(each.in_rate for each in topics),
            out_rate=sum(each.out_rate for each in groups),
            brokers=tuple(_broker(BrokerRecord.of(each), rates) for each in cluster.brokers),
            topics=tuple(sorted(topics, key=lambda each: (-each.in_rate, each.topic))),
            groups=tuple(groups),
            group=shown,
            queues=() if progress is None else _queues(progress),
            handlers=() if progress is None else call_times_of(progress),
            problem="; ".join([*missing, *([problem] if problem else [])]) or None,
        )

    def _rates(self, look: _Look) -> _Rates | None:
        """The rates up to a sample; None for the first."""
        looks = self._looks
        looks.append(look)
        while len(looks) > 2 and looks[1].at <= look.at - WINDOW:
            looks.popleft()
        return _Rates(tuple(looks)) if looks[0].at < look.at else None

    async def _done(self, cluster: ClusterStatus) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for node in readers(cluster):
            try:
                places = await self._tables.positions(node.address)
            except OrbitError:
                # The list of groups reports it as unreachable.
                continue
            for group, queues in places.items():
                for queue, place in queues.items():
                    key = (group, queue.topic, queue.broker)
                    found[key] = found.get(key, 0) + place.done
        return found

    async def _topics(self) -> dict[str, TopicStatus]:
        listing = await self._admin.topics.list(kinds=set(TopicKind) - NOT_LISTED)
        names = [topic.name for topic in listing.items[:MOST_TOPICS]]
        statuses = await asyncio.gather(*map(self._status, names))
        return {each.topic: each for each in statuses if each is not None}

    async def _status(self, topic: str) -> TopicStatus | None:
        try:
            return await self._admin.topics.status(topic)
        except AdminError:
            # Deleted in the meantime.
            return None

    async def _progress(self, group: str | None) -> tuple[GroupProgress | None, str]:
        if group is None:
            return None, ""
        try:
            return await self._admin.groups.progress(group), ""
        except AdminError as error:
            return None, str(error)


def _queues(progress: GroupProgress) -> tuple[QueueProgressRecord, ...]:
    places = sorted(progress.queues, key=lambda each: (-each.lag, each.queue))
    return tuple(fill(QueueProgressRecord, each) for each in places)


class _Rates:
    """Rates between two samples."""

    def __init__(self, looks: Sequence[_Look]) -> None:
        now = looks[-1]
        self.seconds = now.at - looks[0].at
        self._lags = _changed([each.lags for each in looks])
        self.topics: defaultdict[str, float] = defaultdict(float)
        self.groups: defaultdict[str, float] = defaultdict(float)
        #: Stored and finished, by broker.
        self.stored: defaultdict[str, float] = defaultdict(float)
        self.done: defaultdict[str, float] = defaultdict(float)
        # A reset does not count.
        for (topic, broker), change in _changed([each.stored for each in looks]).items():
            self.topics[topic] += max(0, change) / self.seconds
            self.stored[broker] += max(0, change) / self.seconds
        for (group, _, broker), change in _changed([each.done for each in looks]).items():
            self.groups[group] += max(0, change) / self.seconds
            self.done[broker] += max(0, change) / self.seconds

    def lag_change(self, group: str) -> float | None:
        change = self._lags.get(group)
        return None if change is None else change / self.seconds


def _changed(counts: Sequence[Mapping[K, int]]) -> dict[K, int]:
    """The change of each counter that both samples have."""
    first: dict[K, int] = {}
    for each in reversed(counts[:-1]):
        first.update(each)
    return {key: count - first[key] for key, count in counts[-1].items() if key in first}


def _stored(statuses: Mapping[str, TopicStatus]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for topic, status in statuses.items():
        for each in status.queues:
            key = (topic, each.queue.broker)
            found[key] = found.get(key, 0) + each.max_offset
    return found


def _broker(broker: BrokerRecord, rates: _Rates | None) -> BrokerRecord:
    if rates is None or not broker.is_up:
        return broker
    if broker.id:
        # A slave's messages are counted at its master.
        return replace(broker, in_rate=None, out_rate=None)
    name = broker.broker
    return replace(broker, in_rate=rates.stored[name], out_rate=rates.done[name])


def _topic(status: TopicStatus, rates: _Rates | None) -> TopTopicRecord:
    name = status.topic
    in_rate = status.in_rate if rates is None else rates.topics[name]
    return TopTopicRecord(topic=name, messages=status.messages, in_rate=in_rate)


def _group(group: GroupSummary, rates: _Rates | None) -> TopGroupRecord:
    name = group.group
    # Old brokers do not report offsets by group; use their own count.
    out_rate = group.consume_rate if rates is None else rates.groups.get(name, group.consume_rate)
    return TopGroupRecord(
        group=name,
        state=group.state.value,
        members=0 if group.members is None else len(group.members.client_ids),
        lag=group.lag,
        lag_change=None if rates is None else rates.lag_change(name),
        lag_seconds=group.lag_seconds,
        out_rate=out_rate,
    )


app = section()

#: Lines of a frame without a screen.
_LINES = 60


@command(
    app,
    "top",
    examples=(
        "orbitmq top",
        "orbitmq top --group billing --interval 5s",
        "orbitmq top --once --json | jq .in_rate",
    ),
    prints=FrameRecord,
    former={"--count": "--limit", "-c": "--limit"},
)
async def top(
    session: Session,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            help="Show the queues of this group; by default of the group with the most lag.",
        ),
    ] = None,
    interval: Annotated[
        str,
        typer.Option("--interval", "-i", metavar="DURATION", help="The time between two frames."),
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    number: Annotated[
        int | None, typer.Option("--limit", "-l", min=1, help="The number of frames.")
    ] = None,
) -> None:
    """Watch brokers, topics, groups and the owners of queues.

    All rates of a frame are over the same period of up to 30 seconds, which its head shows. "In"
    counts stored messages, "out" messages that groups have finished. The first frame shows the
    rates that brokers counted over the last minute.

    Keys on a terminal: up and down choose the group whose queues are shown, s changes the order of
    groups, p pauses, q quits.
    """
    pause = seconds(interval, "--interval")
    if pause <= 0:
        raise Misused("--interval must be above 0, such as 2s")
    tables = BrokerTables(session.engine)
    frames = Frames(session.admin, tables, session.out.clock, group)
    most = 1 if once else number
    out = session.out
    with session.stop_requested() as stopping:
        if out.is_terminal and not out.is_json and not once:
            await _on_screen(session, frames, stopping, pause, most)
            return
        shown, view = 0, View()
        lost_at: float | None = None
        while not stopping.is_set() and shown != most:
            try:
                frame = await unless(stopping, frames.next())
            except OrbitError as error:
                if not shown:
                    raise
                if lost_at is None:
                    lost_at = out.clock.now()
                    since = moment(lost_at, lost_at, exact=True)
                    out.note(f"orbitmq: not reachable since {since}, trying again: {error}")
                await _wait(stopping, pause)
                continue
            if frame is None:
                return
            if lost_at is not None:
                out.note(f"orbitmq: reachable again after {duration(out.clock.now() - lost_at)}")
                lost_at = None
            view.note(frame)
            if out.is_json:
                out.record(frame)
            else:
                if shown:
                    out.raw("")
                # One write, so that a reader never sees half a frame.
                out.raw(drawing(drawn(frame, view, _LINES), is_terminal=out.is_terminal))
            shown += 1
            if shown != most:
                await _wait(stopping, pause)


async def _on_screen(
    session: Session, frames: Frames, stopping: asyncio.Event, pause: float, most: int | None
) -> None:
    """Redraw in place until q, Ctrl-C or the last frame; errors are shown and retried."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    view = View()
    news = asyncio.Event()
    frame: FrameRecord | None = None

    def pressed(key: str) -> None:
        if key == "q":
            stopping.set()
        if view.press(key, frame):
            frames.choose(view.chosen)
            news.set()
        if frame is not None:
            # Show the choice immediately, its queues after the next sample.
            seen = frame
            if view.chosen not in (None, frame.group):
                seen = replace(frame, group=view.chosen, queues=(), handlers=())
            live.update(drawn(seen, view, shutil.get_terminal_size().lines), refresh=True)

    shown = 0
    with (
        Live(Text("looking ..."), console=console, screen=True, auto_refresh=False) as live,
        keys(pressed) as view.is_interactive,
    ):
        while not stopping.is_set() and shown != most:
            news.clear()
            try:
                found = None if view.is_paused else await unless(stopping, frames.next())
            except OrbitError as error:
                if not shown:
                    raise
                live.update(Text(harmless(f"{error}\ntrying again"), style="red"), refresh=True)
                await _wait(stopping, pause)
                continue
            if found is not None:
                frame = found
                view.note(frame)
                live.update(drawn(frame, view, shutil.get_terminal_size().lines), refresh=True)
                shown += 1
            if shown != most:
                await _wait(stopping, pause, news)


async def _wait(stopping: asyncio.Event, pause: float, news: asyncio.Event | None = None) -> None:
    """Wait for the end of the pause or for a key."""
    waiting = [asyncio.ensure_future(each.wait()) for each in (stopping, news) if each is not None]
    try:
        await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


R = TypeVar("R")

#: Lines that are not rows: the head, titles, headers, blank lines and keys.
_FIXED_LINES: Final = 12
#: The samples of a lag curve.
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
    """The choices of the user at the terminal."""

    #: The group whose queues are shown; None: the one with the largest lag.
    chosen: str | None = None
    order: str = "most lag"
    is_paused: bool = False
    is_interactive: bool = False
    #: The last lags of each group.
    lags: dict[str, deque[int]] = field(default_factory=dict)

    def note(self, frame: FrameRecord) -> None:
        """Remember the lags of a frame; forget groups that are gone."""
        self.lags = {
            each.group: self.lags.get(each.group, deque(maxlen=_LOOKS)) for each in frame.groups
        }
        for each in frame.groups:
            self.lags[each.group].append(each.lag)

    def press(self, key: str, frame: FrameRecord | None) -> bool:
        """Handle a key; True if it needs a new sample."""
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


#: The escape sequences of keys.
_KEYS: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up",
    b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"s": "s", b"p": "p", b" ": "p", b"q": "q", b"Q": "q", b"\x04": "q",
}  # fmt: skip


@contextlib.contextmanager
def keys(pressed: Callable[[str], None]) -> Iterator[bool]:
    """Call back for single keys; yields False without a terminal."""
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
    """The known keys in the bytes of a terminal."""
    while data:
        code = next((code for code in _KEYS if data.startswith(code)), None)
        if code is not None:
            yield _KEYS[code]
        data = data[len(code or b"x") :]


def drawn(frame: FrameRecord, view: View, lines: int) -> RenderableType:
    """A frame in a number of lines."""
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
        # The rates of the first frame are over other periods.
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
    """Divide the lines of the screen: a fair share each, the rest to those that need more."""
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
    """The last lags as a small curve."""
    least, most = min(lags, default=0), max(lags, default=0)
    if not most or len(lags) < 2:
        return ""
    span = most - least
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((lag - least) / span * top) if span else top // 2] for lag in lags)


def drains(group: TopGroupRecord) -> str:
    """The time until the lag is 0 at the present rate."""
    if not group.lag:
        return NOTHING
    if group.lag_change is None:
        return "?"
    return duration(group.lag / -group.lag_change) if group.lag_change < 0 else "never"


def handlers(times: Sequence[CallTimesRecord]) -> str:
    """The handler durations of the topic with most calls."""
    if not times:
        return ""
    most = max(times, key=lambda each: (not is_retry_topic(each.topic), each.calls))
    return (
        f"; calls for {most.topic}: p50 {fine(most.p50_seconds)}, p95 {fine(most.p95_seconds)}, "
        f"p99 {fine(most.p99_seconds)}, longest {fine(most.longest_seconds)}"
    )


def _first_shown(groups: Sequence[TopGroupRecord], chosen: str | None, most: int) -> int:
    """The first row, so that the chosen group is visible."""
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
