"""Whether everything adds up, from what lies on the disk and at the broker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as ds
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from examples.demo.orders import BILLING, is_hopeless
from examples.demo.revenue import Place, Revenue, Totals, of_rows
from orbitmq import Admin

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Rows of the results that are shown.
LOOK = 3
_NUMBERS = ("customer", "cents", "reconsumeTimes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The orders that were acknowledged, and what became of them."""

    sent: int
    #: Rows of the results, and orders among them.
    billed_rows: int
    billed: int
    dead: int
    #: Orders that were neither billed nor given up.
    lost_in_billing: int
    #: Orders given up that should not have been, or the other way round.
    misjudged: int
    shipped_calls: int
    shipped: int
    lost_in_shipping: int
    #: What the stream summed up as it went, and what its rows come to afterwards.
    revenue: Mapping[Place, Revenue]
    revenue_of_rows: Mapping[Place, Revenue]

    @property
    def adds_up(self) -> bool:
        return (
            self.sent == self.billed + self.dead
            and self.sent == self.shipped
            and self.revenue == self.revenue_of_rows
            and not (self.lost_in_billing or self.misjudged or self.lost_in_shipping)
        )


def add_up(
    sent: int,
    seed: int,
    results: Path,
    totals: Totals,
    shipped: Mapping[str, int],
    name_server: str,
) -> tuple[Sums, pa.Table, list[str]]:
    """Count everything anew: Parquet files, dead letters, lines of the shippers."""
    orders = {f"order-{number}" for number in range(sent)}
    hopeless = {f"order-{number}" for number in range(sent) if is_hopeless(number, seed)}
    rows = ds.dataset(results).to_table() if any(results.rglob("*.parquet")) else pa.table({})
    billed = set(rows.column("order").to_pylist()) if rows.num_rows else set()
    with Admin(name_server=name_server) as admin:
        letters = list(admin.dead_letters.list(BILLING))
    dead = {key for letter in letters for key in letter.message.keys}
    sums = Sums(
        sent=sent,
        billed_rows=rows.num_rows,
        billed=len(billed),
        dead=len(dead),
        lost_in_billing=len(orders - billed - dead),
        misjudged=len(dead ^ hopeless) + len(billed & hopeless),
        shipped_calls=sum(shipped.values()),
        shipped=len(orders & shipped.keys()),
        lost_in_shipping=len(orders - shipped.keys()),
        revenue=totals.latest(),
        revenue_of_rows=of_rows(rows),
    )
    return sums, rows, sorted({letter.reason for letter in letters})


def show(sums: Sums, rows: pa.Table, reasons: list[str], screen: Console) -> None:
    table = Table(title="Every order is accounted for", title_justify="left")
    table.add_column("group")
    titles = ("sent", "done", "dead letters", "lost", "done twice")
    for title in titles:
        table.add_column(title, justify="right")
    billing = (
        sums.sent,
        sums.billed,
        sums.dead,
        sums.lost_in_billing,
        sums.billed_rows - sums.billed,
    )
    shipping = (
        sums.sent,
        sums.shipped,
        0,
        sums.lost_in_shipping,
        sums.shipped_calls - sums.shipped,
    )
    table.add_row("billing (Spark)", *(f"{count:,}" for count in billing))
    table.add_row("shipping (plain)", *(f"{count:,}" for count in shipping))
    screen.print(table)
    screen.print(
        Panel(
            "[green]sent = done + dead letters, in both groups; lost 0[/green]"
            if sums.adds_up
            else "[red]This does not add up: please report it, with the folder.[/red]",
            expand=False,
        )
    )
    for reason in reasons:
        screen.print(f"Dead letters say: [italic]{reason}[/italic]")
    if rows.num_rows:
        show_look(rows, screen)
    if sums.revenue:
        show_revenue(sums.revenue, screen)


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
