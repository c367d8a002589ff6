"""Whether everything adds up, from what lies on the disk and at the broker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.orders import is_hopeless, number_of
from examples.demo.revenue import Place, Revenue, Totals, of_rows, rows_in

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Rows of the results that are shown.
LOOK = 3
_NUMBERS = ("customer", "cents", "reconsumeTimes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The orders, and what became of them."""

    #: Those that were acknowledged. Shops that are killed may have sent some whose
    #: acknowledgement nobody heard: those of them that came are among these.
    sent: int
    #: Rows of the results, and orders among them.
    billed_rows: int
    billed: int
    dead: int
    #: Orders that were neither billed nor given up.
    open_in_billing: int
    #: Orders given up that should not have been, or the other way round.
    misjudged: int
    shipped_calls: int
    shipped: int
    open_in_shipping: int
    #: What the stream summed up as it went, and what its rows come to afterwards.
    revenue: Mapping[Place, Revenue]
    revenue_of_rows: Mapping[Place, Revenue]

    @property
    def adds_up(self) -> bool:
        return (
            self.sent == self.billed + self.dead
            and self.sent == self.shipped
            and self.revenue == self.revenue_of_rows
            and not (self.open_in_billing or self.misjudged or self.open_in_shipping)
        )


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Orders that ended as dead letters."""

    orders: frozenset[str]
    #: As many, unless the broker was gone when they were to be read: then those of the last look.
    count: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run came to its end."""

    #: What ended it before everything was handled.
    problem: str | None
    #: Shippers that ended by themselves.
    fallen: int


def add_up(
    sent: int,
    seed: int,
    results: Path,
    totals: Totals,
    shipped: Mapping[str, int],
    given_up: GivenUp,
) -> tuple[Sums, pa.Table]:
    """Count everything anew: Parquet files, dead letters, lines of the shippers."""
    rows = rows_in(results)
    billed = set(rows.column("order").to_pylist()) if rows.num_rows else set()
    dead = given_up.orders
    orders = {f"order-{number}" for number in range(sent)} | billed | dead | shipped.keys()
    hopeless = {order for order in orders if is_hopeless(number_of(order), seed)}
    unnamed = given_up.count - len(dead)
    sums = Sums(
        sent=len(orders),
        billed_rows=rows.num_rows,
        billed=len(billed),
        dead=given_up.count,
        open_in_billing=len(orders - billed - dead) - unnamed,
        misjudged=len(dead - hopeless) + len(billed & hopeless),
        shipped_calls=sum(shipped.values()),
        shipped=len(shipped),
        open_in_shipping=len(orders - shipped.keys()),
        revenue=totals.latest(),
        revenue_of_rows=of_rows(rows),
    )
    return sums, rows


def show(
    sums: Sums, rows: pa.Table, reasons: Iterable[str], ending: Ending, screen: Console
) -> None:
    table = Table(title=_title(sums, ending), title_justify="left")
    table.add_column("group", no_wrap=True)
    is_whole = ending.problem is None
    missing = "lost" if is_whole else "not handled yet"
    for title in ("sent", "done", "dead letters", missing, "done twice"):
        table.add_column(title, justify="right")
    billing = (
        sums.sent,
        sums.billed,
        sums.dead,
        sums.open_in_billing,
        sums.billed_rows - sums.billed,
    )
    shipping = (
        sums.sent,
        sums.shipped,
        0,
        sums.open_in_shipping,
        sums.shipped_calls - sums.shipped,
    )
    table.add_row("billing (Spark)", *(f"{count:,}" for count in billing))
    table.add_row("shipping (plain)", *(f"{count:,}" for count in shipping))
    screen.print(table)
    screen.print(Panel(_coloured_verdict(sums, ending), expand=False))
    if ending.fallen:
        who = (
            "1 shipper ended by itself"
            if ending.fallen == 1
            else f"{ending.fallen} shippers ended by themselves"
        )
        screen.print(
            f"{who}. What was not reported as done by then came again to others: "
            f"{sums.shipped_calls - sums.shipped:,} done twice.",
            soft_wrap=True,
        )
    for reason in reasons:
        screen.print(f"Dead letters say: [italic]{reason}[/italic]")
    if rows.num_rows:
        show_look(rows, screen)
    if sums.revenue:
        show_revenue(sums.revenue, screen)


def _title(sums: Sums, ending: Ending) -> str:
    if ending.problem is not None:
        return "Stopped early: this is how far it came"
    return "Every order is accounted for" if sums.adds_up else "Not every order is accounted for"


def verdict(sums: Sums, ending: Ending) -> str:
    """Whether it adds up, in one sentence."""
    return Text.from_markup(_coloured_verdict(sums, ending)).plain


def _coloured_verdict(sums: Sums, ending: Ending) -> str:
    if ending.problem is None and sums.adds_up:
        return "[green]sent = done + dead letters, in both groups; lost 0[/green]"
    if ending.problem is None or sums.misjudged:
        return "[red]This does not add up: please report it, with the folder.[/red]"
    if not (sums.open_in_billing or sums.open_in_shipping):
        return "[yellow]Every order that was sent had been handled by then.[/yellow]"
    return (
        "[yellow]sent = done + dead letters + not handled yet, in both groups. What is not handled "
        "yet was still at the broker.[/yellow]"
    )


def show_look(rows: pa.Table, screen: Console) -> None:
    """The newest of the results, as they lie there."""
    newest = rows.sort_by([("storeTimestamp", "descending")]).slice(0, LOOK).to_pylist()
    table = Table(title=f"The last {len(newest)} of the results", title_justify="left")
    for name in ("order", "customer", "segment", "country", "tags", "cents", "reconsumeTimes"):
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    for row in newest:
        table.add_row(*(str(row[column.header]) for column in table.columns))
    screen.print(table)


def show_revenue(revenue: Mapping[Place, Revenue], screen: Console) -> None:
    segments = sorted({place.segment for place in revenue})
    table = Table(title="Revenue of paid orders, summed up by the stream", title_justify="left")
    table.add_column("country")
    for segment in segments:
        table.add_column(segment, justify="right")
    for country in sorted({place.country for place in revenue}):
        sums = [revenue.get(Place(country, segment), Revenue(0, 0)) for segment in segments]
        table.add_row(country, *(f"{each.cents / 100:,.2f}" for each in sums))
    screen.print(table)
