"""What is shown while the demo runs."""

from __future__ import annotations

from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from examples.demo.billing import Counts
from examples.demo.history import History

_BLOCKS = " ▁▂▃▄▅▆▇█"


def view(history: History, counts: Counts, phase: str, left: float | None) -> RenderableType:
    """One frame."""
    now = history.moments[-1]
    table = Table(expand=False, show_edge=False, pad_edge=False, box=None)
    table.add_column("")
    for title in ("messages", "per second", "behind"):
        table.add_column(title, justify="right")
    table.add_column("the last half minute")
    for title, name, behind in (
        ("three shops send", "sent", None),
        ("billing, on Spark", "billed", now.sent - now.billed - now.dead),
        ("shipping, plain", "shipped", now.sent - now.shipped),
    ):
        table.add_row(
            title,
            f"{getattr(now, name):,}",
            f"{history.rate(name):,.0f}",
            "" if behind is None else f"{max(0, behind):,}",
            trend(history, name),
        )
    rest = "" if left is None else f"  {left:.0f} s left."
    return Group(
        table,
        Text(
            f"Spark: {counts.batches} batches, the last took {counts.batch_seconds:.1f} s; "
            f"{counts.sent_back:,} sent back, {now.dead:,} dead letters. "
            f"Shipping: {now.members} members."
        ),
        Text(f"{phase}{rest}", style="dim"),
    )


def line(history: History, counts: Counts, phase: str, left: float | None) -> str:
    """The same in one line, for a log or a pipe."""
    now = history.moments[-1]
    rest = "" if left is None else f" {left:.0f} s left."
    return (
        f"{now.sent:,} sent, {now.billed:,} billed on Spark in {counts.batches} batches, "
        f"{now.shipped:,} shipped by {now.members} members, {counts.sent_back:,} sent back, "
        f"{now.dead:,} dead letters. {phase}{rest}"
    )


def trend(history: History, name: str) -> str:
    """How fast a count grew, drawn with blocks."""
    moments = history.moments[-61::2]
    grown = [
        max(0, getattr(after, name) - getattr(before, name)) for before, after in pairwise(moments)
    ]
    most = max(grown, default=0)
    if not most:
        return ""
    return "".join(_BLOCKS[round(count / most * (len(_BLOCKS) - 1))] for count in grown)
