"""The progress of a pipeline as it is seen: a live table on a terminal, lines, or JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from orbitmq.cli.pipelinerecords import PipelineEventRecord
from orbitmq.cli.printing import Printer
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import count, duration, harmless, rate, several, share

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from orbitmq.spark.pipelines.progress import Progress

#: States that are worth a line of their own.
_TOLD = ("failing", "failed", "finished", "stopped")
#: Queues whose lag is shown, those with most first.
_MOST_QUEUES = 8


class Screen(Protocol):
    """Where progress goes."""

    def note(self, text: str) -> None:
        """Something that is going on."""

    def started(self, options: Mapping[str, str]) -> None:
        """The pipeline begins."""

    def progress(self, progress: Sequence[Progress]) -> None:
        """Where it stands."""

    def restarting(self, problem: str, number: int, pause: float) -> None:
        """It failed and is started again."""

    def close(self) -> None:
        """Nothing more is drawn over. May be called again."""


@contextlib.contextmanager
def screen_for(out: Printer, pipeline: str) -> Iterator[Screen]:
    """The one that suits the output."""
    screen: Screen
    if out.is_json:
        screen = JsonScreen(out, pipeline)
    elif out.is_terminal:
        screen = LiveScreen(out, pipeline)
    else:
        screen = LineScreen(out, pipeline)
    try:
        yield screen
    finally:
        screen.close()


class JsonScreen:
    """One object per line."""

    def __init__(self, out: Printer, pipeline: str) -> None:
        self._out = out
        self._pipeline = pipeline

    def note(self, text: str) -> None:
        """Programs need not know."""

    def started(self, options: Mapping[str, str]) -> None:
        self._tell(event="started", options=options)

    def progress(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            self._out.record(PipelineEventRecord.of(self._pipeline, each, self._out.clock.now()))

    def restarting(self, problem: str, number: int, pause: float) -> None:
        self._tell(event="restarting", error=problem, restarts=number, pause_seconds=pause)

    def close(self) -> None:
        """Nothing is open."""

    def _tell(self, **fields: Any) -> None:
        self._out.record(
            PipelineEventRecord(at=self._out.clock.now(), pipeline=self._pipeline, **fields)
        )


class LineScreen:
    """One line for every batch and every change."""

    def __init__(self, out: Printer, pipeline: str) -> None:
        self._out = out
        self._pipeline = pipeline
        self._told: dict[str, tuple[str, int | None]] = {}

    def note(self, text: str) -> None:
        self._out.note(text)

    def started(self, options: Mapping[str, str]) -> None:
        given = "".join(f" {name}={value}" for name, value in options.items())
        self._out.line(f"{self._pipeline} started{given}")

    def progress(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            # States come and go within a batch; a line for each would tell nothing.
            state = each.state if each.state in _TOLD else ""
            if self._told.get(each.query) != (state, each.batch):
                self._told[each.query] = (state, each.batch)
                self._out.line(_line(each))

    def restarting(self, problem: str, number: int, pause: float) -> None:
        self._out.line(f"{self._pipeline} failed: {problem}; restart {number} in {duration(pause)}")

    def close(self) -> None:
        """Nothing is open."""


def _line(progress: Progress) -> str:
    parts = [progress.query, progress.state]
    if progress.batch is not None:
        parts.append(f"batch {progress.batch}")
    parts.append(several(progress.rows, "row"))
    if progress.rows_per_second is not None:
        parts.append(f"{rate(progress.rows_per_second)}/s")
    if progress.total_lag is not None:
        parts.append(f"lag {count(progress.total_lag)}")
    if progress.retried or progress.dead:
        parts.append(f"{count(progress.retried)} retried, {count(progress.dead)} dead")
    if progress.failed_share:
        parts.append(f"{share(progress.failed_share)} failed lately")
    if progress.late:
        parts.append(_too_late(progress))
    if progress.error is not None:
        parts.append(progress.error)
    return "  ".join(parts)


def _too_late(progress: Progress) -> str:
    return f"{count(progress.late)} came too late for their windows and are not counted"


class LiveScreen:
    """A table that is drawn again in its place."""

    def __init__(self, out: Printer, pipeline: str) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        self._out = out
        self._pipeline = pipeline
        self._said = ""
        self._last: Sequence[Progress] = ()
        # One of its own: while Spark starts, standard output goes elsewhere.
        self._file = os.fdopen(os.dup(1), "w")
        self._live: Live | None = Live(
            console=Console(file=self._file, highlight=False), refresh_per_second=4
        )
        self._live.start()

    def note(self, text: str) -> None:
        self._said = text
        self._draw()

    def started(self, options: Mapping[str, str]) -> None:
        self.note("Ctrl-C stops after the batch that runs")

    def progress(self, progress: Sequence[Progress]) -> None:
        self._last = progress
        self._draw()

    def restarting(self, problem: str, number: int, pause: float) -> None:
        self.note(f"failed: {problem}; restart {number} in {duration(pause)}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._file.close()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(drawn(self._pipeline, self._said, self._last), refresh=True)


def drawn(pipeline: str, said: str, progress: Sequence[Progress]) -> RenderableType:
    """What is seen on a terminal."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[RenderableType] = [
        Text.assemble((harmless(pipeline), "bold"), ("  " + harmless(said), "dim"))
    ]
    if progress:
        parts.append(_QUERIES.grid(progress))
    lags = [(queue, lag) for each in progress for queue, lag in each.lag.items() if lag]
    lags.sort(key=lambda each: (-each[1], each[0]))
    if lags:
        more = f" ({_MOST_QUEUES} of {len(lags)} queues)" if len(lags) > _MOST_QUEUES else ""
        parts += [
            Text(""),
            Text(f"Unread in each queue{more}", style="bold"),
            _LAGS.grid(lags[:_MOST_QUEUES]),
        ]
    for each in progress:
        if each.late:
            parts.append(Text(harmless(f"! {each.query}: {_too_late(each)}"), style="red"))
        if each.error is not None:
            parts.append(Text(harmless(f"! {each.query}: {each.error}"), style="red"))
    return Group(*parts)


_QUERIES: Columns[Progress] = (
    Columns["Progress"]()
    .text("query", lambda each: each.query)
    .text("state", lambda each: each.state, bad=lambda each: each.state in ("failing", "failed"))
    .number("batch", lambda each: count(each.batch))
    .number("rows", lambda each: count(each.rows))
    .number("rows/s", lambda each: rate(each.rows_per_second))
    .number("took", lambda each: duration(each.batch_seconds))
    .number("unread", lambda each: count(each.total_lag))
    .number("retried", lambda each: count(each.retried))
    .number("dead", lambda each: count(each.dead), bad=lambda each: each.dead > 0)
    .number("failed", lambda each: share(each.failed_share), bad=lambda e: e.state == "failing")
)
_LAGS = (
    Columns[tuple[str, int]]()
    .text("queue", lambda each: each[0])
    .number("messages", lambda each: count(each[1]))
)
