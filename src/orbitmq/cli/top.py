"""`orbitmq top`: lag, rates and owners, live; on a terminal full-screen, else frame by frame."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import Annotated

import typer

from orbitmq.cli.choosing import seconds
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import Misused
from orbitmq.cli.frames import FrameRecord, Frames
from orbitmq.cli.session import Session
from orbitmq.cli.stopping import unless, wish_to_stop
from orbitmq.cli.tables import drawing
from orbitmq.cli.topscreen import View, drawn, keys
from orbitmq.cli.wording import duration, harmless
from orbitmq.cli.wording import moment as exactly
from orbitmq.console.tables import BrokerTables
from orbitmq.errors import OrbitError

app = section("Watch a cluster.")

#: Lines of a frame where there is no screen to fit into.
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
    """Watch brokers, topics, groups and who has which queue.

    All rates are of the same seconds, the last 30 at most: in is what is stored, out what groups
    finish, which several groups do with one message. The head says how many seconds they are; the
    first look has nothing to compare with, and shows what brokers counted in the last minute.

    On a terminal: up and down choose the group whose queues are shown, s orders groups in another
    way, p pauses and q ends it.
    """
    pause = seconds(interval, "--interval")
    if pause <= 0:
        raise Misused("--interval must be longer than nothing, as 2s")
    tables = BrokerTables(session.engine)
    frames = Frames(session.admin, tables, session.out.clock, group)
    most = 1 if once else number
    out = session.out
    with wish_to_stop() as wish:
        if out.is_terminal and not out.is_json and not once:
            await _on_screen(session, frames, wish, pause, most)
            return
        shown, view = 0, View()
        lost_at: float | None = None
        while not wish.is_set() and shown != most:
            try:
                frame = await unless(wish, frames.next())
            except OrbitError as error:
                if not shown:
                    raise
                if lost_at is None:
                    lost_at = out.clock.now()
                    since = exactly(lost_at, lost_at, exact=True)
                    out.note(f"orbitmq: not reachable since {since}, trying again: {error}")
                await _wait(wish, pause)
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
                # One text: whoever reads it never sees half a frame.
                out.raw(drawing(drawn(frame, view, _LINES), is_terminal=out.is_terminal))
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
    view = View()
    news = asyncio.Event()
    frame: FrameRecord | None = None

    def pressed(key: str) -> None:
        if key == "q":
            wish.set()
        if view.press(key, frame):
            frames.choose(view.chosen)
            news.set()
        if frame is not None:
            # What was chosen is seen at once, and its queues after the next look.
            seen = frame
            if view.chosen not in (None, frame.group):
                seen = replace(frame, group=view.chosen, queues=(), handlers=())
            live.update(drawn(seen, view, shutil.get_terminal_size().lines), refresh=True)

    shown = 0
    with (
        Live(Text("looking ..."), console=console, screen=True, auto_refresh=False) as live,
        keys(pressed) as view.is_interactive,
    ):
        while not wish.is_set() and shown != most:
            news.clear()
            try:
                found = None if view.is_paused else await unless(wish, frames.next())
            except OrbitError as error:
                if not shown:
                    raise
                live.update(Text(harmless(f"{error}\ntrying again"), style="red"), refresh=True)
                await _wait(wish, pause)
                continue
            if found is not None:
                frame = found
                view.note(frame)
                live.update(drawn(frame, view, shutil.get_terminal_size().lines), refresh=True)
                shown += 1
            if shown != most:
                await _wait(wish, pause, news)


async def _wait(wish: asyncio.Event, pause: float, news: asyncio.Event | None = None) -> None:
    """Until the pause is over, or something is wished."""
    waiting = [asyncio.ensure_future(each.wait()) for each in (wish, news) if each is not None]
    try:
        await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
