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
        ("billing, on Spark", "billed", now.billing_lag),
        ("shipping, plain", "shipped", now.shipping_lag),
    ):
        table.add_row(
            title,
            f"{getattr(now, name):,}",
            f"{history.rate(name):,.0f}",
            "" if behind is None else f"{behind:,}",
            trend(history, name),
        )
    rest = "" if left is None else f"  {left:.0f} s left."
    return Group(
        table,
        Text(
            f"Spark: {many(counts.batches, 'batch', 'batches')}, "
            f"the last took {counts.batch_seconds:.1f} s; "
            f"{many(counts.retried, 'retry', 'retries')}, "
            f"{many(now.dead, 'dead letter', 'dead letters')}.\n"
            f"Revenue so far: {counts.cents / 100:,.2f}. Members of shipping: {now.members}."
        ),
        Text(f"{phase}{rest}", style="dim"),
    )


def line(history: History, counts: Counts, phase: str, left: float | None) -> str:
    """The same in one line, for a log or a pipe."""
    now = history.moments[-1]
    rest = "" if left is None else f" {left:.0f} s left."
    return (
        f"{now.sent:,} sent ({history.rate('sent'):,.0f}/s), "
        f"{now.billed:,} billed on Spark in {many(counts.batches, 'batch', 'batches')} "
        f"({history.rate('billed'):,.0f}/s, {now.billing_lag:,} behind), "
        f"{now.shipped:,} shipped by {many(now.members, 'member', 'members')} "
        f"({history.rate('shipped'):,.0f}/s, {now.shipping_lag:,} behind), "
        f"{many(counts.retried, 'retry', 'retries')}, "
        f"{many(now.dead, 'dead letter', 'dead letters')}, "
        f"revenue {counts.cents / 100:,.2f}. {phase}{rest}"
    )


def many(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


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
