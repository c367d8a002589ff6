"""One run of the demo, from the broker's start to the summary."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.live import Live

from examples.demo.billing import Billing
from examples.demo.children import Child, Cluster, Shippers, Shops, kill_descendants
from examples.demo.history import History, Moment
from examples.demo.interrupts import Interrupts
from examples.demo.options import Options
from examples.demo.orders import BILLING, QUEUES, TOPIC
from examples.demo.screen import line, view
from examples.demo.sparkstart import in_peace, start_spark, without_java, words_of_spark_in
from examples.demo.story import Story
from examples.demo.summary import Ending, GivenUp, add_up, show, verdict
from examples.demo.terminal import wait_for_key
from orbitmq import Admin
from orbitmq.client.errors import TopicNotFound
from orbitmq.errors import OrbitError
from orbitmq.names import dead_letter_topic

#: Says that a folder was made by the demo and may be deleted by it.
MARK = ".orbitmq-demo"
#: Seconds between two looks at everything.
BEAT = 0.5
#: Seconds between two lines where there is no terminal to draw on.
LINE_EVERY = 5.0
#: How long the broker may take to start.
BROKER_PATIENCE = 30.0
#: What ends a run that is interrupted.
_ASKED = "Stopped by you before everything was handled."
#: How long the groups may take to finish what was sent.
PATIENCE = 180.0


def run(options: Options, interrupts: Interrupts) -> int:
    """The exit code: 0 if everything adds up, also when it was interrupted or a member killed."""
    screen = Console()
    logging.getLogger("orbitmq").addHandler(logging.NullHandler())
    demo = Demo(options, screen, interrupts)
    if interrupts.came:
        return demo.nothing_sent()
    make_folder(options.folder)
    return demo.run()


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


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that works while orders come."""

    cluster: Cluster
    shops: Shops
    billing: Billing
    shippers: Shippers

    @property
    def problem(self) -> str | None:
        """What makes it senseless to go on, if something does."""
        if not self.cluster.is_running:
            return f"The broker {self.cluster.ending}."
        return self.billing.problem or self.shippers.problem


class Demo:
    """The run. Whoever wants it to end is heard between its steps; none of them is cut off."""

    def __init__(self, options: Options, screen: Console, interrupts: Interrupts) -> None:
        self._options = options
        self._folder = options.folder.resolve()
        self._screen = screen
        self._interrupts = interrupts
        self._history = History()
        self._began = 0.0
        self._running: list[Child | Shippers] = []
        interrupts.at_hard_end = self._end_hard

    def run(self) -> int:
        self._interrupts.doing = "the broker starts"
        cluster = Cluster(self._folder)
        self._running.append(cluster)
        try:
            if not self._is_up(cluster):
                return self.nothing_sent() if self._interrupts.came else self._no_broker(cluster)
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
            if self._interrupts.came:
                cluster.kill()
            cluster.end()
            self._tidy()

    def _tidy(self) -> None:
        if not self._options.keep:
            shutil.rmtree(self._folder / "broker", ignore_errors=True)

    def _end_hard(self) -> None:
        """The end of a demo that took too long to end in order."""
        for each in self._running:
            each.kill()
        kill_descendants()  # Java, which would hold the terminal
        self._tidy()

    def nothing_sent(self) -> int:
        """The summary of a run that was ended before its first order."""
        self._screen.print("Stopped early: nothing was sent, so there is nothing to sum up.")
        return 0

    def _is_up(self, cluster: Cluster) -> bool:
        """Wait for the broker, but not for one that has ended or is not wanted any more."""
        deadline = monotonic() + BROKER_PATIENCE
        while not cluster.is_ready.wait(0.1):
            if self._interrupts.came or not cluster.is_running or monotonic() > deadline:
                return False
        return True

    def _no_broker(self, cluster: Cluster) -> int:
        self._screen.print(f"[red]the broker did not start, see {cluster.log}[/red]")
        return 1

    def _with_spark(self, cluster: Cluster, admin: Admin) -> int:
        self._interrupts.doing = "Spark starts"
        spark = in_peace(start_spark)
        billing = Billing(spark, cluster.name_server, cluster.console, self._folder)
        shippers = Shippers(cluster.name_server, self._folder)
        self._running.append(shippers)
        parts: Parts | None = None
        problem: str | None = None
        try:
            if not self._interrupts.came:
                in_peace(billing.warm_up)
            if not self._interrupts.came:
                billing.start()
                shippers.join()
                shops = Shops(
                    cluster.name_server,
                    self._folder,
                    rate=self._options.rate,
                    seed=self._options.seed,
                )
                self._running.append(shops)
                parts = Parts(cluster, shops, billing, shippers)
                self._interrupts.has_orders = True
                self._interrupts.doing = "the last orders have a moment to be handled"
                problem = self._watch(parts, admin)
        finally:
            if parts is not None:
                parts.shops.end()
            is_hurried = self._interrupts.came
            self._interrupts.doing = "the running batch ends"
            billing.stop(self._interrupts.left() if is_hurried else None)
            shippers.end()
            if not is_hurried:
                with without_java():
                    spark.stop()
        if parts is None:
            return self.nothing_sent()
        self._screen.print()
        if problem is not None:
            colour = "yellow" if problem == _ASKED else "red"
            self._screen.print(f"[{colour}]{problem}[/{colour}]", soft_wrap=True)
        self._interrupts.doing = "the summary is made"
        code = self._sum_up(parts, Ending(problem, shippers.fallen), admin)
        if self._interrupts.came:
            # Java and the broker's data have nothing left to say.
            self._end_hard()
            sys.stdout.flush()
            os._exit(code)
        if self._options.stays and problem is None:
            self._screen.print(
                f"The console stays at {cluster.console} with all of this. Press any key to end."
            )
            wait_for_key(self._interrupts)
        return code

    def _watch(self, parts: Parts, admin: Admin) -> str | None:
        """Until everything that was sent is done. Returns what ended it early, if something did."""
        shops, shippers = parts.shops, parts.shippers
        self._began = monotonic()
        steps = [(0.3, shippers.join), (0.5, shippers.join), (0.75, shippers.leave)]
        ended_at: float | None = None
        no_shops: str | None = None
        is_early = False
        phase = "Orders come in."
        story = Story(self._options.rate, parts.cluster.console)
        told = -LINE_EVERY
        live = Live(console=self._screen, refresh_per_second=4, transient=False)
        with live:
            while True:
                for word in shippers.look_after():
                    self._screen.print(word, soft_wrap=True)
                self._note(parts, admin)
                passed = monotonic() - self._began
                left = self._options.seconds - passed
                if ended_at is None and left > 0 and not shops.is_running:
                    no_shops = f"The process of the shops {shops.ending}, no more orders come."
                    self._screen.print(no_shops, soft_wrap=True)
                if ended_at is None and (left <= 0 or self._interrupts.came or no_shops):
                    shops.end()
                    ended_at = passed
                    told = -LINE_EVERY
                    phase = "The last orders are being handled."
                    if is_early := left > 0:
                        phase = f"Stopped early. {phase}"
                is_sending = ended_at is None
                now = self._history.moments[-1]
                for word in story.of(now, parts.billing.counts, is_sending=is_sending):
                    self._screen.print(f"[dim]{passed:3.0f} s[/dim]  {word}", soft_wrap=True)
                is_done = not is_sending and self._is_done(parts)
                shown = (self._history, parts.billing.counts, phase, left if is_sending else None)
                live.update(view(*shown))
                if not self._screen.is_terminal and (is_done or passed - told >= LINE_EVERY):
                    told = passed
                    self._screen.print(line(*shown), soft_wrap=True)
                while steps and not is_early and passed > steps[0][0] * self._options.seconds:
                    steps.pop(0)[1]()
                problem = parts.problem
                if problem is not None:
                    return problem
                if is_done:
                    return no_shops
                if self._interrupts.is_grace_over:
                    return _ASKED
                if ended_at is not None and passed - ended_at > PATIENCE:
                    return f"not everything was handled within {PATIENCE:g} s"
                threading.Event().wait(BEAT)

    def _note(self, parts: Parts, admin: Admin) -> None:
        """Look at everything. At what is done first: what is sent later is not behind, then."""
        try:
            dead = dead_letters(admin)
        except OrbitError:  # as while a broker is gone
            dead = self._history.moments[-1].dead if self._history.moments else 0
        billed, shipped = parts.billing.counts.billed, parts.shippers.count
        self._history.moments.append(
            Moment(
                seconds=monotonic() - self._began,
                # Shops tell of a handful when all of it is acknowledged; some may be shipped then.
                sent=max(parts.shops.sent, shipped),
                billed=billed,
                shipped=shipped,
                dead=dead,
                members=parts.shippers.members,
            )
        )

    def _is_done(self, parts: Parts) -> bool:
        now = self._history.moments[-1]
        if now.billed + now.dead < now.sent or now.shipped < now.sent:
            return False
        # It may have been billed twice; the results themselves are only read at the end.
        return parts.billing.orders() + now.dead >= now.sent

    def _sum_up(self, parts: Parts, ending: Ending, admin: Admin) -> int:
        billing = parts.billing
        try:
            letters = list(admin.dead_letters.list(BILLING))
            dead = frozenset(key for letter in letters for key in letter.message.keys)
            given_up = GivenUp(dead, len(dead))
        except OrbitError:  # the broker is gone
            letters = []
            given_up = GivenUp(frozenset(), self._history.moments[-1].dead)
        sums, rows = add_up(
            parts.shops.sent,
            self._options.seed,
            billing.results,
            billing.totals,
            parts.shippers.shipped,
            given_up,
        )
        show(sums, rows, sorted({letter.reason for letter in letters}), ending, self._screen)
        if ending.problem == _ASKED:
            return 1 if sums.misjudged else 0
        picture = self._folder / "history.svg"
        self._history.draw(picture, verdict(sums, ending))
        shown = self._options.folder
        self._screen.print(
            f"Results: {shown / billing.results.name} and {shown / billing.totals.folder.name}, "
            "as Parquet",
            soft_wrap=True,
        )
        self._screen.print(
            f"Picture: {shown / picture.name}, throughput and lag over time", soft_wrap=True
        )
        if self._options.keep:
            self._screen.print(
                f"Broker:  .venv/bin/orbitmq up --data {shown / 'broker'}, with all its messages",
                soft_wrap=True,
            )
        is_well = sums.adds_up and ending.problem is None
        if self._options.picture is not None and is_well:
            shutil.copyfile(picture, self._options.picture)
        return 0 if is_well else 1


def dead_letters(admin: Admin) -> int:
    """How many orders the broker has given up."""
    try:
        return admin.topics.status(dead_letter_topic(BILLING)).messages
    except TopicNotFound:
        return 0
