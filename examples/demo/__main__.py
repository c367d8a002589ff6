"""OrbitMQ at work: orders into a broker, billed by a Spark pipeline with retries and dead letters,
shipped by plain consumers whose members come and go; at the end a summary that adds up.

    make demo                                   about a minute and a half
    make demo ARGS="--seconds 20 --rate 1000"
    make demo ARGS="--keep"                     leaves broker data and results where they are

Three shops send orders. The group `billing` consumes them in a structured stream on Spark: some
orders fail at the first attempt and succeed at the second, a few are hopeless and end as dead
letters. The group `shipping` consumes the same orders with plain Python consumers, of which one
joins late and one leaves early. Everything runs on this machine, in processes of its own.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.live import Live

from examples.demo.billing import Billing
from examples.demo.children import Cluster, Shippers, Shops
from examples.demo.history import History, Moment
from examples.demo.orders import BILLING, QUEUES, TOPIC
from examples.demo.screen import line, view
from examples.demo.summary import add_up, show
from orbitmq import Admin
from orbitmq.client.admin.errors import TopicNotFound
from orbitmq.client.names import dead_letter_topic
from orbitmq.spark.session import local_session

#: Says that a folder was made by the demo and may be deleted by it.
MARK = ".orbitmq-demo"
#: Seconds between two looks at everything.
BEAT = 0.5
#: Seconds between two lines where there is no terminal to draw on.
LINE_EVERY = 5.0
#: How long the groups may take to finish what was sent.
PATIENCE = 180.0


def main() -> int:
    options = arguments()
    screen = Console(record=options.picture is not None)
    make_folder(options.folder)
    logging.getLogger("orbitmq").addHandler(logging.NullHandler())
    return Demo(options, screen).run()


def arguments() -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="make demo", description=about)
    parser.add_argument("--seconds", type=float, default=45.0, help="how long orders come (45)")
    parser.add_argument("--rate", type=float, default=400.0, help="orders per second (400)")
    parser.add_argument("--seed", type=int, default=7, help="which orders they are (7)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/demo"), help="a new or an earlier demo's folder"
    )
    parser.add_argument("--keep", action="store_true", help="keep the broker's data when done")
    parser.add_argument("--picture", type=Path, help="write the screen to this SVG file as well")
    options = parser.parse_args()
    for name in ("seconds", "rate"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            parser.error(f"--{name} must be positive, got {value:g}")
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


class Demo:
    """One run, from the broker's start to the summary."""

    def __init__(self, options: argparse.Namespace, screen: Console) -> None:
        self._options = options
        self._folder: Path = options.folder.resolve()
        self._screen = screen
        self._history = History()
        self._began = 0.0
        self._was_interrupted = threading.Event()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        cluster = Cluster(self._folder)
        try:
            if not cluster.is_ready.wait(30):
                self._screen.print(f"[red]the broker did not start, see {cluster.log}[/red]")
                return 1
            self._take_interrupts()
            with Admin(name_server=cluster.name_server) as admin:
                admin.topics.create(TOPIC, queues=QUEUES, exist_ok=True)
                self._screen.print(
                    f"[bold]OrbitMQ[/bold]  name server {cluster.name_server}, {QUEUES} queues\n"
                    f"Look around: {cluster.console}\n"
                    f"or in another terminal: "
                    f".venv/bin/orbitmq top --name-server {cluster.name_server}\n"
                    "[dim]Starting Spark, which takes some seconds ...[/dim]"
                )
                with words_of_spark_in(self._folder / "spark.log"):
                    return self._with_spark(cluster, admin)
        finally:
            cluster.end()
            if not self._options.keep:
                shutil.rmtree(self._folder / "broker", ignore_errors=True)

    def _take_interrupts(self) -> None:
        """From here on Ctrl-C and SIGTERM mean: no more orders, finish those that came."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._was_interrupted.set())

    def _with_spark(self, cluster: Cluster, admin: Admin) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Spark's imports, about other libraries
            spark = local_session(
                "orbitmq demo", cores=2, settings={"spark.sql.shuffle.partitions": "2"}
            )
        spark.sparkContext.setLogLevel("OFF")
        self._take_interrupts()  # Spark has put a handler of its own there
        billing = Billing(spark, cluster.name_server, self._folder)
        shippers = Shippers(cluster.name_server, self._folder)
        shops: Shops | None = None
        try:
            billing.warm_up()
            billing.start()
            shippers.join()
            shops = Shops(
                cluster.name_server,
                self._folder,
                rate=self._options.rate,
                seed=self._options.seed,
            )
            problem = self._watch(shops, billing, shippers, admin)
        finally:
            if shops is not None:
                shops.end()
            billing.stop()
            shippers.end()
            spark.stop()
        self._screen.print()
        if problem is not None:
            self._screen.print(f"[red]{problem}[/red]")
        return self._sum_up(cluster, shops.sent, billing, shippers)

    def _watch(
        self, shops: Shops, billing: Billing, shippers: Shippers, admin: Admin
    ) -> str | None:
        """Until everything that was sent is done. Returns what went wrong, if something did."""
        self._began = monotonic()
        steps = [(0.3, shippers.join), (0.5, shippers.join), (0.75, shippers.leave)]
        ended_at: float | None = None
        told = -LINE_EVERY
        with Live(console=self._screen, refresh_per_second=4, transient=False) as live:
            while True:
                self._note(shops, billing, shippers, dead_letters(admin))
                passed = monotonic() - self._began
                left = self._options.seconds - passed
                if ended_at is None and (left <= 0 or self._was_interrupted.is_set()):
                    shops.end()
                    ended_at = passed
                is_sending = ended_at is None
                phase = "Orders come in." if is_sending else "The last orders are being handled."
                if self._was_interrupted.is_set():
                    phase = f"Stopped early. {phase}"
                shown = (self._history, billing.counts, phase, left if is_sending else None)
                live.update(view(*shown))
                if not self._screen.is_terminal and passed - told >= LINE_EVERY:
                    told = passed
                    self._screen.print(line(*shown), soft_wrap=True)
                while is_sending and steps and passed > steps[0][0] * self._options.seconds:
                    steps.pop(0)[1]()
                problem = billing.problem or shippers.problem
                if problem is not None:
                    return problem
                if is_sending and not shops.is_running:
                    return f"the shops ended by themselves, see {shops.log}"
                if ended_at is not None:
                    if self._is_done(shops, shippers):
                        return None
                    if passed - ended_at > PATIENCE:
                        return f"not everything was handled within {PATIENCE:g} s"
                threading.Event().wait(BEAT)

    def _note(self, shops: Shops, billing: Billing, shippers: Shippers, dead: int) -> None:
        self._history.moments.append(
            Moment(
                seconds=monotonic() - self._began,
                sent=shops.sent,
                billed=billing.counts.billed,
                shipped=shippers.count,
                dead=dead,
                members=shippers.members,
            )
        )

    def _is_done(self, shops: Shops, shippers: Shippers) -> bool:
        now = self._history.moments[-1]
        return now.billed + now.dead >= shops.sent and len(shippers.shipped) >= shops.sent

    def _sum_up(self, cluster: Cluster, sent: int, billing: Billing, shippers: Shippers) -> int:
        sums, rows, reasons = add_up(
            sent, self._options.seed, billing.results, shippers.shipped, cluster.name_server
        )
        show(sums, rows, reasons, self._screen)
        picture = self._folder / "history.svg"
        self._history.draw(picture)
        shown = self._options.folder
        self._screen.print(f"Results: {shown / billing.results.name}, as Parquet")
        self._screen.print(f"Picture: {shown / picture.name}, throughput and lag over time")
        if self._options.picture is not None and sums.adds_up:
            self._screen.save_svg(str(self._options.picture), title="make demo")
        return 0 if sums.adds_up else 1


def dead_letters(admin: Admin) -> int:
    """How many orders the broker has given up."""
    try:
        return admin.topics.status(dead_letter_topic(BILLING)).messages
    except TopicNotFound:
        return 0


@contextmanager
def words_of_spark_in(log: Path) -> Iterator[None]:
    """Spark, its Java and its workers say much on the standard error: into a file with it."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
