"""How streams are that give rows back, as a run and as the console see them; no Spark is needed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from orbitmq.spark.consolelink import QueryReport
from orbitmq.spark.consuming.returns import Settled
from orbitmq.spark.health import WINDOW, QueryReports, SentBack, SentBackCounts, stream_of
from orbitmq.spark.pipelines.run import Progress, Run, StreamTarget
from tests.support.store import HandClock


class Link:
    """A console that asks when it is told to."""

    def __init__(self) -> None:
        self.looks: dict[str, Callable[[], Any]] = {}

    def watch(self, name: str, look: Callable[[], Any]) -> None:
        self.looks[name] = look

    def news(self) -> None:
        return


class Stream:
    """A stream of Spark that reports what it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"id of {name}"
        self.isActive = True
        self.status = {"isDataAvailable": True, "isTriggerActive": True}
        self.lastProgress: Any = None
        self.recentProgress: list[Any] = []
        self._moments = itertools.count()

    def report(self, batch: int, rows: int) -> Any:
        self.lastProgress = SimpleNamespace(
            id=self.id,
            batchId=batch,
            numInputRows=rows,
            timestamp=f"2026-01-01T00:{next(self._moments):04}",
            batchDuration=500,
            durationMs={"triggerExecution": 500},
            processedRowsPerSecond=rows * 2.0,
            inputRowsPerSecond=rows * 2.0,
            sources=[],
            stateOperators=[],
        )
        self.recentProgress = [*self.recentProgress[-99:], self.lastProgress]
        return self.lastProgress


#: What a run and a console say of a stream; both have its state and its counts.
Seen = Progress | QueryReport


class Watched:
    """A run whose streams are looked at."""

    def __init__(self, clock: HandClock) -> None:
        spark: Any = SimpleNamespace()
        self.clock = clock
        self.run = Run(spark, name="tested", name_server="127.0.0.1:9876")

    def started(self, stream: Stream) -> None:
        raise NotImplementedError

    def batch(self, stream: Stream, number: int, rows: int) -> None:
        """A batch has ended."""
        raise NotImplementedError

    def look(self, stream: Stream) -> Seen:
        raise NotImplementedError

    def settled(self, stream: Stream, **counts: Any) -> None:
        """Rows of the running batch went back."""
        self.run.returned.add(stream.id, Settled(**{"retried": 0, "dead": 0, **counts}))


class ByTheRun(Watched):
    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock)
        self._targets: dict[str, StreamTarget] = {}

    def started(self, stream: Stream) -> None:
        query: Any = stream
        self._targets[stream.name] = StreamTarget(query, self.run, clock=self.clock)

    def batch(self, stream: Stream, number: int, rows: int) -> None:
        stream.report(number, rows)
        self.look(stream)

    def look(self, stream: Stream) -> Seen:
        return self._targets[stream.name].look()


class ByTheConsole(Watched):
    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock)
        link: Any = Link()
        self._link = link
        self._reports = QueryReports(self.run.spark, link, {}, self.run.returned, clock=clock)

    def started(self, stream: Stream) -> None:
        event: Any = SimpleNamespace(id=stream.id, runId=f"run of {stream.id}", name=stream.name)
        self._reports.started(event)

    def batch(self, stream: Stream, number: int, rows: int) -> None:
        event: Any = SimpleNamespace(progress=stream.report(number, rows))
        self._reports.progressed(event)

    def look(self, stream: Stream) -> Seen:
        event: Any = SimpleNamespace(id=stream.id)
        self._reports.idle(event)
        found: Seen = self._link.looks[stream.name]()
        return found


@pytest.fixture(params=[ByTheRun, ByTheConsole])
def watched(request):
    made: Watched = request.param(HandClock())
    return made


def test_a_stream_whose_rows_come_back_is_failing(watched):
    stream = Stream("bad")
    watched.started(stream)

    watched.settled(stream, retried=9, dead=3)
    watched.batch(stream, 0, 15)
    seen = watched.look(stream)

    assert (seen.state, seen.failed_share) == ("failing", 0.8)
    assert (seen.retried, seen.dead) == (9, 3)


def test_a_stream_is_not_judged_by_what_another_one_gives_back(watched):
    good, bad = Stream("good"), Stream("bad")
    watched.started(good)
    watched.started(bad)

    watched.settled(bad, retried=1000)
    watched.batch(bad, 0, 1000)
    watched.batch(good, 0, 900)

    assert watched.look(bad).state == "failing"
    seen = watched.look(good)
    assert (seen.state != "failing", seen.failed_share) == (True, 0.0)
    assert (seen.retried, seen.dead) == (0, 0)


def test_what_was_before_a_restart_is_forgotten(watched):
    stream = Stream("restarted")
    watched.started(stream)
    watched.settled(stream, retried=500)
    watched.batch(stream, 0, 500)
    assert watched.look(stream).state == "failing"
    # The next batch gives rows back and is lost with the stream.
    watched.settled(stream, retried=90)

    again = Stream("restarted")
    watched.started(again)
    watched.settled(again, retried=3)
    watched.batch(again, 1, 400)

    seen = watched.look(again)
    assert (seen.state != "failing", seen.failed_share) == (True, 3 / 400)
    assert seen.retried == 3


def test_a_batch_that_has_not_ended_says_nothing_yet(watched):
    stream = Stream("busy")
    watched.started(stream)
    watched.batch(stream, 0, 5000)
    watched.clock.advance(WINDOW + 100)
    # Spark says now and then that nothing came, under the number of the next batch.
    watched.batch(stream, 1, 0)

    watched.settled(stream, retried=10)
    during = watched.look(stream)
    watched.batch(stream, 1, 5000)
    after = watched.look(stream)

    assert (during.state != "failing", during.failed_share) == (True, None)
    assert (after.state != "failing", after.failed_share) == (True, 10 / 5000)
    assert (during.retried, after.retried) == (10, 10)


def test_what_the_next_batch_sent_back_is_taken_off_when_it_ends(watched):
    stream = Stream("quick")
    watched.started(stream)
    watched.settled(stream, retried=1)
    watched.settled(stream, retried=100)

    watched.batch(stream, 0, 10)
    watched.batch(stream, 1, 390)

    assert watched.look(stream).failed_share == 101 / 400


def test_rows_that_middleware_held_are_no_failures(watched):
    stream = Stream("idempotent")
    watched.started(stream)

    watched.settled(stream, held=6)
    watched.batch(stream, 0, 6)
    held = watched.look(stream)
    watched.settled(stream, held=6)
    watched.batch(stream, 1, 8)
    seen = watched.look(stream)

    assert (held.state != "failing", held.failed_share, held.retried) == (True, None, 0)
    assert (seen.state != "failing", seen.failed_share, seen.retried) == (True, 0.0, 0)


def test_what_went_back_outside_of_any_batch_is_of_no_stream():
    counts = SentBackCounts()

    counts.add(None, Settled(retried=2, dead=1))
    counts.add("a", Settled(retried=1, dead=0))

    assert counts.total() == SentBack(retried=3, dead=1)
    assert (counts.of("a"), counts.of("b")) == (SentBack(retried=1), SentBack())


@pytest.mark.parametrize(
    ("properties", "stream"), [({"sql.streaming.queryId": "q"}, "q"), ({}, None)]
)
def test_the_stream_is_that_of_the_calling_thread(properties, stream):
    context = SimpleNamespace(getLocalProperty=properties.get)
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))

    assert stream_of(frame) == stream


def test_a_connect_session_does_not_know_the_stream():
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace())

    assert stream_of(frame) is None


def test_a_function_for_batches_can_take_the_run_to_another_process():
    """As a Connect session does: the session, the console and the counts stay behind."""

    class Unmovable(SimpleNamespace):
        def __reduce__(self) -> str:
            raise TypeError("it cannot be sent")

    here: Any = Run(
        Unmovable(),  # type: ignore[arg-type]
        name="billing",
        name_server=["one:9876", "two:9876"],
        checkpoint="folder",
        console=Unmovable(),  # type: ignore[arg-type]
    )
    here.returned.add(None, Settled(retried=3, dead=1))

    pickled = cloudpickle.dumps(lambda: here)  # PySpark's
    there = cloudpickle.loads(pickled)()

    assert there.options == here.options == {"nameServer": "one:9876;two:9876"}
    assert (there.name, there.checkpoint("a")) == ("billing", "folder/a")
    assert there.console is None
    assert there.returned.total() == SentBack()
    there.returned.add(None, Settled(retried=1, dead=0))
    assert here.returned.total() == SentBack(retried=3, dead=1)


def test_a_run_in_another_process_has_the_session_of_whatever_batch_it_is(monkeypatch):
    """Connect makes the function while the session is the query's, and calls it in another."""
    own, of_the_query, of_the_batch = (SimpleNamespace() for _ in range(3))
    here: Any = Run(own, name_server="one:9876")  # type: ignore[arg-type]

    monkeypatch.setattr(SparkSession, "active", lambda: of_the_query)
    there: Any = copy.copy(here)
    monkeypatch.setattr(SparkSession, "active", lambda: of_the_batch)

    assert there.spark is of_the_batch
    assert here.spark is own
