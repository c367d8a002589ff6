"""The foundation at work: orders into a store, a kill -9, and everything acknowledged still there.

    make demo            about 15 seconds
    make demo ARGS="--seconds 60 --keep"

A shop in a process of its own appends order events with synchronous flushing. In the middle of it
the process is killed. A second one opens the same folder, which repairs it, and goes on selling
until it is stopped properly. Then the messages are counted against what was acknowledged, read by
tag, by SQL92 condition and by key, and turned into columns.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.demo.shop import QUEUES, TOPIC
from orbitmq.filter import SQL92, MessageFilter, compile_filter
from orbitmq.message import StoredMessage, decode_message, decode_messages
from orbitmq.message.arrow import MESSAGE_SCHEMA, messages_to_arrow
from orbitmq.store.settings import ReadSettings, StoreSettings
from orbitmq.store.store import Store

#: One big read at a time: columns are cut from many messages at once.
READ = 4096
#: Says that a folder was made by the demo and may be deleted by it.
MARK = ".orbitmq-demo"
EXPENSIVE = "country = 'DE' AND cents > 90000"


@dataclass(slots=True)
class Selling:
    """A shop that runs, and how many of its messages are on the disk."""

    name: str
    process: subprocess.Popen[str]
    ended_by: str = ""
    listener: threading.Thread | None = None
    acknowledged: int = 0
    is_open: bool = False

    @classmethod
    def start(cls, folder: Path, name: str) -> Selling:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo.shop", str(folder), name],
            stdout=subprocess.PIPE,
            text=True,
        )
        selling = cls(name, process)
        selling.listener = threading.Thread(target=selling.listen, daemon=True)
        selling.listener.start()
        return selling

    def listen(self) -> None:
        for line in self.process.stdout or ():
            # A kill can cut a line in half; half a number was never printed whole.
            if line == "open\n":
                self.is_open = True
            elif line.endswith("\n"):
                self.acknowledged = int(line)

    def end(self, how: signal.Signals) -> None:
        """End the shop and hear what it had still printed."""
        self.ended_by = "kill -9" if how is signal.SIGKILL else how.name
        self.process.send_signal(how)
        self.process.wait(timeout=60)
        if self.listener is not None:
            self.listener.join()


def main() -> int:
    options = arguments()
    screen = Console(record=options.picture is not None)
    folder = options.folder
    make_folder(folder)
    screen.print(
        "[bold]OrbitMQ[/bold] - a store in RocketMQ's formats, "
        f"[dim]synchronous flushing, in {folder}[/dim]\n"
    )
    sold = sell(folder, options.seconds, screen)
    if sold is None:
        return 1
    settings = StoreSettings(read=ReadSettings(memory_count=READ, memory_bytes=8 << 20))
    with Store(folder, settings) as store:
        adds_up = show(store, sold, folder, screen)
    if options.picture is not None and adds_up:
        screen.save_svg(str(options.picture), title="make demo")
    if options.keep:
        screen.print(f"[dim]The store is kept in {folder}[/dim]")
    else:
        for part in ("commitlog", "consumequeue", "index", "checkpoint", "lock"):
            path = folder / part
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return 0 if adds_up else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to sell (10)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/demo"), help="a new or an earlier demo's folder"
    )
    parser.add_argument("--keep", action="store_true", help="keep the store when done")
    parser.add_argument("--picture", type=Path, help="write the screen to this SVG file as well")
    options = parser.parse_args()
    if not 0 < options.seconds < float("inf"):
        parser.error(f"--seconds must be positive, got {options.seconds:g}")
    if options.picture is not None and not options.picture.parent.is_dir():
        parser.error(f"--picture needs a folder that exists, got {options.picture.parent}")
    return options


def make_folder(folder: Path) -> None:
    """Begin anew in an empty folder; what the demo did not make itself is not touched."""
    mark = folder / MARK
    try:
        if folder.exists() and any(folder.iterdir()) and not mark.exists():
            sys.exit(f"{folder} is not empty and not a demo's; name another one with --folder")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.touch()
    except OSError as error:
        sys.exit(f"{folder} cannot be used: {error.strerror}; name another one with --folder")


def sell(folder: Path, seconds: float, screen: Console) -> list[Selling] | None:
    """Two shops one after the other; the first is killed."""
    shops: list[Selling] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]:>9,} on the disk  {task.fields[rate]:>8,.0f}/s"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=screen) as progress:
            for name, how in (("north", signal.SIGKILL), ("south", signal.SIGTERM)):
                shop = Selling.start(folder, name)
                shops.append(shop)
                bar = progress.add_task(f"shop {name}", total=1.0, count=0, rate=0.0)
                began: float | None = None
                while began is None or monotonic() - began < seconds / 2:
                    if shop.process.poll() is not None:
                        screen.print(f"[red]shop {name} ended by itself[/red]")
                        return None
                    if began is None and shop.is_open:
                        began = monotonic()
                    passed = monotonic() - began if began else 0.0
                    rate = shop.acknowledged / passed if passed else 0.0
                    share = passed * 2 / seconds
                    progress.update(bar, completed=share, count=shop.acknowledged, rate=rate)
                    threading.Event().wait(0.05)
                shop.end(how)
                word = f"[dim]ended by {shop.ended_by}[/dim]"
                progress.update(
                    bar, completed=1.0, description=f"shop {name} {word}", count=shop.acknowledged
                )
                progress.stop_task(bar)
    except KeyboardInterrupt:
        # From here on Ctrl-C has done its work: what was acknowledged is counted in any case.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if shops[-1].process.poll() is None:
            shops[-1].end(signal.SIGTERM)
        screen.print("[yellow]Stopped early; what was acknowledged until now is checked.[/yellow]")
    return shops


def show(store: Store, sold: list[Selling], folder: Path, screen: Console) -> bool:
    began = monotonic()
    orders = columns_of(store)
    seconds = monotonic() - began
    found = orders_by_shop(orders)
    report = store.recovery
    screen.print(
        f"[dim]Each start repaired what it found; this one looked at {report.records:,} records "
        f"in {report.seconds:.2f} s.[/dim]"
    )
    adds_up = show_sums(sold, found, screen)
    if not orders.num_rows:
        return adds_up
    show_reads(store, orders, seconds, screen)
    path = folder / "orders.parquet"
    pq.write_table(orders, path)
    size = path.stat().st_size / 1e6
    screen.print(f"All {orders.num_rows:,} orders as columns: {path} ({size:.1f} MB)")
    return adds_up


def columns_of(store: Store) -> pa.Table:
    """Everything in the topic, decoded a few thousand messages at a time."""
    batches = []
    for queue_id in range(QUEUES):
        for pieces in messages_of(store, queue_id):
            batches.append(messages_to_arrow(pieces, broker_name="demo"))
    return pa.Table.from_batches(batches, MESSAGE_SCHEMA)


def messages_of(
    store: Store, queue_id: int, wanted: MessageFilter | None = None
) -> Iterator[list[memoryview]]:
    offset = store.min_offset(TOPIC, queue_id)
    while offset < store.max_offset(TOPIC, queue_id):
        result = store.read(TOPIC, queue_id, offset, READ, wanted)
        if result.count:
            yield list(result.pieces)
        offset = result.next_offset


def orders_by_shop(orders: pa.Table) -> dict[str, list[int]]:
    """The numbers of the orders that each shop has in the store."""
    found: dict[str, list[int]] = {}
    for key in orders.column("keys").to_pylist():
        shop, _, number = key.partition("-")
        found.setdefault(shop, []).append(int(number))
    return found


def show_sums(sold: list[Selling], found: dict[str, list[int]], screen: Console) -> bool:
    table = Table(title="Acknowledged and found", title_justify="left")
    table.add_column("shop")
    table.add_column("ended by")
    for title in ("acknowledged", "found", "lost", "twice", "in flight"):
        table.add_column(title, justify="right")
    adds_up = True
    for shop in sold:
        numbers = found.get(shop.name, [])
        lost = shop.acknowledged - len({n for n in numbers if n < shop.acknowledged})
        twice = len(numbers) - len(set(numbers))
        in_flight = sum(number >= shop.acknowledged for number in numbers)
        is_good = not lost and not twice
        adds_up = adds_up and is_good
        counts = (shop.acknowledged, len(numbers), lost, twice, in_flight)
        cells = [f"{count:,}" for count in counts]
        table.add_row(shop.name, shop.ended_by, *cells, style="" if is_good else "red")
    screen.print(table)
    verdict = (
        "[green]acknowledged + in flight when it ended = found; lost 0, twice 0[/green]"
        if adds_up
        else "[red]This does not add up: please report it with the folder.[/red]"
    )
    screen.print(Panel(verdict, expand=False))
    return adds_up


def show_reads(store: Store, orders: pa.Table, seconds: float, screen: Console) -> None:
    paid = sum(1 for _ in matching(store, compile_filter("paid")))
    expensive = list(matching(store, compile_filter(EXPENSIVE, SQL92)))
    one = orders.column("keys")[orders.num_rows // 2].as_py()
    (by_key,) = store.lookup(TOPIC, one)
    message = decode_message(by_key)
    rate = orders.num_rows / seconds
    screen.print(
        f"As Arrow columns: {orders.num_rows:,} messages in {seconds:.2f} s, {rate:,.0f}/s"
    )
    screen.print(f"By tag 'paid' (on the queue entries alone): {paid:,}")
    screen.print(f"By SQL92 {EXPENSIVE!r}: {len(expensive):,}")
    screen.print(f"By key {one!r}: {bytes(message.body).decode()}, id {message.offset_id}")
    table = Table(title="Revenue of paid orders, from the columns", title_justify="left")
    table.add_column("country")
    table.add_column("orders", justify="right")
    table.add_column("revenue", justify="right")
    for row in revenue(orders).to_pylist():
        table.add_row(row["country"], f"{row['cents_count']:,}", f"{row['cents_sum'] / 100:,.2f}")
    screen.print(table)


def matching(store: Store, wanted: MessageFilter) -> Iterator[StoredMessage]:
    for queue_id in range(QUEUES):
        for pieces in messages_of(store, queue_id, wanted):
            for piece in pieces:
                yield from decode_messages(piece)


def revenue(orders: pa.Table) -> pa.Table:
    paid = orders.filter(pc.equal(orders.column("tags"), "paid"))
    properties = paid.column("properties").combine_chunks()
    columns = {
        "country": pc.map_lookup(properties, "country", "first"),
        "cents": pc.cast(pc.map_lookup(properties, "cents", "first"), pa.int64()),
    }
    grouped = pa.table(columns).group_by("country")
    return grouped.aggregate([("cents", "count"), ("cents", "sum")]).sort_by("country")


if __name__ == "__main__":
    sys.exit(main())
