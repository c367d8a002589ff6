"""`orbitmq top`: lag, rates and owners, live; on a terminal full-screen, else frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from orbitmq.cli.choosing import seconds
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import Misused
from orbitmq.cli.frames import FrameRecord, Frames, TopGroupRecord, TopTopicRecord
from orbitmq.cli.grouprecords import QueueProgressRecord
from orbitmq.cli.session import Session
from orbitmq.cli.stopping import unless, wish_to_stop
from orbitmq.cli.tables import Columns, drawing
from orbitmq.cli.wording import NOTHING, count, duration, harmless, moment, rate, share
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from rich.console import RenderableType

app = section("Watch a cluster.")

R = TypeVar("R")

#: Rows that a frame has at most when there is no screen to fit into.
_ROWS = 15
#: Lines that are not rows of the three tables: head, titles, headings, the foot.
_FIXED_LINES = 12


@command(
    app,
    "top",
    examples=(
        "orbitmq top",
        "orbitmq top --group billing --interval 5s",
        "orbitmq top --once --json | jq .in_rate",
    ),
    prints=FrameRecord,
)
async def top(
    session: Session,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", "-g", help="Show the queues of this group; else of the one with most lag."
        ),
    ] = None,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="DURATION", help="Between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    number: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="End after so many frames.")
    ] = None,
) -> None:
    """Watch brokers, topics, groups and who has which queue. On a terminal, q ends it."""
    pause = seconds(interval, "--interval")
    if pause <= 0:
        raise Misused("--interval must be longer than nothing, as 2s")
    frames = Frames(session.admin, session.out.clock, group)
    most = 1 if once else number
    out = session.out
    with wish_to_stop() as wish:
        if out.is_terminal and not out.is_json and not once:
            await _on_screen(session, frames, wish, pause, most)
            return
        shown = 0
        while not wish.is_set() and shown != most:
            frame = await unless(wish, frames.next())
            if frame is None:
                return
            if out.is_json:
                out.record(frame)
            else:
                if shown:
                    out.raw("")
                # One text: whoever reads it never sees half a frame.
                out.raw(drawing(_drawn(frame, _ROWS), is_terminal=out.is_terminal))
            shown += 1
            if shown != most:
                await _wait(wish, pause)


async def _on_screen(
    session: Session, frames: Frames, wish: asyncio.Event, pause: float, most: int | None
) -> None:
    """Redraw in place until q, Ctrl-C or the number of frames; errors are shown and outlived."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    shown = 0
    with (
        _keys(wish),
        Live(Text("looking ..."), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not wish.is_set() and shown != most:
            try:
                frame = await unless(wish, frames.next())
            except OrbitError as error:
                if not shown:
                    raise
                live.update(Text(harmless(f"{error}\ntrying again"), style="red"), refresh=True)
                await _wait(wish, pause)
                continue
            if frame is None:
                return
            lines = shutil.get_terminal_size().lines - _FIXED_LINES - len(frame.brokers)
            live.update(_drawn(frame, max(3, lines // 3)), refresh=True)
            shown += 1
            if shown != most:
                await _wait(wish, pause)


async def _wait(wish: asyncio.Event, pause: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause):
            await wish.wait()


@contextlib.contextmanager
def _keys(wish: asyncio.Event) -> Iterator[None]:
    """Take single keys while this lasts: q is the wish to stop."""
    if not sys.stdin.isatty():
        yield
        return
    source = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(source)

    def pressed() -> None:
        keys = os.read(source, 64)
        if not keys or b"q" in keys.lower():
            wish.set()

    tty.setcbreak(source)
    loop.add_reader(source, pressed)
    try:
        yield
    finally:
        loop.remove_reader(source)
        termios.tcsetattr(source, termios.TCSADRAIN, before)


# What a frame looks like.


def _drawn(frame: FrameRecord, rows: int) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    when = moment(frame.at, frame.at, exact=True)
    head = (
        f"OrbitMQ top  {when}  in {rate(frame.in_rate)}/s  out {rate(frame.out_rate)}/s  "
        f"{len(frame.brokers)} brokers"
    )
    parts: list[RenderableType] = [Text(head, style="bold")]
    for broker in frame.brokers:
        state = "up" if broker.is_up else "DOWN"
        line = (
            f"{broker.broker} {broker.address} {state}  in {rate(broker.in_rate)}/s  "
            f"out {rate(broker.out_rate)}/s  disk {share(broker.disk_used)}"
        )
        parts.append(Text(harmless(line), style="" if broker.is_up else "red"))
    parts += _part("Groups, most lag first", frame.groups, rows, _GROUPS)
    parts += _part("Topics, busiest first", frame.topics, rows, _TOPICS)
    if frame.group is not None:
        parts += _part(f"Queues of {frame.group}", frame.queues, rows, _QUEUES)
    if frame.problem is not None:
        parts += [Text(""), Text(harmless(f"! {frame.problem}"), style="red")]
    return Group(*parts)


def _part(
    title: str, rows: Sequence[R], most: int, columns: Columns[R]
) -> Sequence[RenderableType]:
    from rich.text import Text  # noqa: PLC0415

    more = f" ({most} of {len(rows)})" if len(rows) > most else ""
    return (Text(""), Text(harmless(title) + more, style="bold"), columns.grid(rows[:most]))


def _change(group: TopGroupRecord) -> str:
    if group.lag_change is None:
        return NOTHING
    return f"{group.lag_change:+,.1f}"


_GROUPS = (
    Columns[TopGroupRecord]()
    .text("group", lambda each: each.group)
    .text("state", lambda each: each.state, bad=lambda e: e.state != "online" and e.lag > 0)
    .number("members", lambda each: count(each.members))
    .number("lag", lambda each: count(each.lag))
    .number("lag/s", _change, bad=lambda each: (each.lag_change or 0) > 0)
    .number("behind", lambda each: duration(each.lag_seconds))
    .number("out/s", lambda each: rate(each.out_rate))
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
    .number("behind", lambda each: duration(each.lag_seconds))
    .text("owner", lambda each: each.owner or NOTHING, bad=lambda e: e.owner is None and e.lag > 0)
)
