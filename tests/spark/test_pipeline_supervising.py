"""How a pipeline is started, watched, brought to rest and started again; no Spark is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.errors import SettingError
from orbitmq.spark.pipelines.builtin import RateLimit
from orbitmq.spark.pipelines.definition import Definition, PipelineBroken, PipelineRefused
from orbitmq.spark.pipelines.run import (
    End,
    Progress,
    QueryWatch,
    Restarting,
    RestartPolicy,
    Run,
    StreamTarget,
    Supervisor,
)

DEADLINE = 20.0


class Hands:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self._at = 0.0

    def now(self) -> float:
        return self._at

    def monotonic(self) -> float:
        return self._at

    def advance(self, seconds: float) -> None:
        self._at += seconds


class StreamingQuery:
    """A stream that does as it is told; supervised for its name, as Spark's two kinds are."""

    name = "fake"
    id = "1"

    def __init__(self, *, lasts: int = 0, failure: str | None = None) -> None:
        """It is over, and has failed if it is to; -1: it runs until it is stopped."""
        self.lasts = lasts
        self.error = failure
        self.is_stopped = False
        self.is_resting: Callable[[], bool] = lambda: False
        self.lastProgress = None
        self.recentProgress: list[Any] = []

    @property
    def isActive(self) -> bool:  # noqa: N802  # Spark's name
        return not self.is_stopped and self.lasts != 0

    @property
    def status(self) -> dict[str, object]:
        busy = not self.is_resting()
        return {"isDataAvailable": busy, "isTriggerActive": busy, "message": ""}

    def exception(self) -> str | None:
        return self.error

    def stop(self) -> None:
        self.is_stopped = True


@dataclass
class Staged:
    """A supervisor with streams that are given in advance, and what was told."""

    folder: Path
    outcomes: list[Any]
    policy: RestartPolicy = field(default_factory=lambda: RestartPolicy(first_pause=0.001))
    stop_timeout: float = DEADLINE
    clock: Hands | None = None
    told: list[tuple[Progress, ...]] = field(default_factory=list)
    restarts: list[Restarting] = field(default_factory=list)
    made: int = 0

    def run(self, ended: threading.Event | None = None) -> Any:
        def pipeline(run: Run) -> Any:
            outcome = self.outcomes[self.made]
            self.made += 1
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def progressed(progress: Any) -> None:
            self.told.append(tuple(progress))

        spark: Any = SimpleNamespace()
        supervisor = Supervisor(
            Definition.of(pipeline, "staged"),
            {},
            Run(spark, name="staged", name_server="127.0.0.1:9876"),
            drain_file=self.folder / "drain",
            policy=self.policy,
            stop_timeout=self.stop_timeout,
            look_every=0.001,
            on_progress=progressed,
            on_restart=self.restarts.append,
            clock=self.clock,
        )
        return supervisor.run(ended or threading.Event())


def test_a_pipeline_that_ends_by_itself_is_finished(tmp_path):
    staged = Staged(tmp_path, [StreamingQuery()])

    report = staged.run()

    assert (report.end, report.restarts, report.is_clean) == (End.FINISHED, 0, True)
    assert [each.state for each in report.progress] == ["finished"]


def test_a_pipeline_that_gives_back_nothing_is_finished(tmp_path):
    assert Staged(tmp_path, [None]).run().end is End.FINISHED


def test_failures_lead_to_restarts_with_growing_pauses_and_then_to_the_end(tmp_path):
    failing = [StreamingQuery(failure="no sink") for _ in range(4)]
    staged = Staged(tmp_path, failing, RestartPolicy(restarts=3, first_pause=0.001))

    with pytest.raises(PipelineBroken, match=r"failed after 3 restart.*no sink"):
        staged.run()

    assert [(each.number, each.pause) for each in staged.restarts] == [
        (1, 0.001),
        (2, 0.002),
        (3, 0.004),
    ]


def test_a_restart_that_cannot_even_start_counts_as_a_failure(tmp_path):
    outcomes = [StreamingQuery(failure="gone"), OSError("no broker"), StreamingQuery()]
    staged = Staged(tmp_path, outcomes)

    report = staged.run()

    assert (report.end, report.restarts) == (End.FINISHED, 2)
    assert [each.problem for each in staged.restarts] == ["gone", "no broker"]


def test_what_cannot_be_started_even_once_is_a_mistake_and_not_tried_again(tmp_path):
    staged = Staged(tmp_path, [ValueError("no such column"), StreamingQuery()])

    with pytest.raises(ValueError, match="no such column"):
        staged.run()
    assert staged.made == 1


def test_failures_long_ago_count_no_more(tmp_path):
    clock = Hands()

    class Slow(StreamingQuery):
        """Fails when it has run for an hour."""

        @property
        def isActive(self) -> bool:  # noqa: N802
            return False

        def exception(self) -> str | None:
            clock.advance(3600)
            return self.error

    outcomes = [Slow(failure="once a day") for _ in range(10)]
    policy = RestartPolicy(restarts=1, first_pause=0.001)
    staged = Staged(tmp_path, [*outcomes, StreamingQuery()], policy, clock=clock)

    assert staged.run().restarts == 10


def test_a_stream_that_fails_while_it_is_brought_to_rest_makes_no_clean_end(tmp_path):
    query = StreamingQuery(lasts=-1)

    def is_resting():
        query.lasts, query.error = 0, "no sink"
        return False

    query.is_resting = is_resting
    ended = threading.Event()
    ended.set()

    report = Staged(tmp_path, [query]).run(ended)

    assert (report.end, report.is_clean) == (End.STOPPED, False)
    assert [(each.state, each.error) for each in report.progress] == [("failed", "no sink")]


def test_a_stop_waits_until_no_batch_runs_and_takes_no_more_meanwhile(tmp_path):
    query = StreamingQuery(lasts=-1)
    looks = iter(range(1000))
    seen: list[bool] = []

    def is_resting():
        seen.append((tmp_path / "drain").exists())
        return next(looks) >= 5

    query.is_resting = is_resting
    ended = threading.Event()
    ended.set()

    report = Staged(tmp_path, [query]).run(ended)

    assert (report.end, report.is_clean, query.is_stopped) == (End.STOPPED, True, True)
    assert any(seen)
    assert not (tmp_path / "drain").exists()


def test_a_batch_that_takes_too_long_is_cut_off_and_that_is_told(tmp_path):
    query = StreamingQuery(lasts=-1)
    ended = threading.Event()
    ended.set()

    report = Staged(tmp_path, [query], stop_timeout=0.02).run(ended)

    assert (report.end, report.is_clean, query.is_stopped) == (End.STOPPED, False, True)


def test_when_one_of_several_fails_the_others_are_stopped_with_it(tmp_path):
    good, bad = StreamingQuery(lasts=-1), StreamingQuery(failure="broken")
    good.is_resting = lambda: True
    staged = Staged(tmp_path, [{"good": good, "bad": bad}], RestartPolicy(restarts=0))

    with pytest.raises(PipelineBroken, match="broken"):
        staged.run()
    assert good.is_stopped


def test_what_is_no_pipelines_outcome_is_refused_and_nothing_is_left_running(tmp_path):
    query = StreamingQuery(lasts=-1)

    with pytest.raises(PipelineRefused, match="it returned 'nonsense'"):
        Staged(tmp_path, [[query, "nonsense"]]).run()
    assert query.is_stopped


@given(first=st.floats(0.001, 10), longest=st.floats(0.001, 100), failures=st.integers(1, 10_000))
def test_pauses_double_up_to_the_longest(first, longest, failures):
    policy = RestartPolicy(first_pause=first, longest_pause=longest)

    pause = policy.pause(failures)

    assert pause == min(longest, first * 2.0 ** min(failures - 1, 60))


@pytest.mark.parametrize("wrong", [{"restarts": -1}, {"first_pause": 0}, {"healthy_after": -1.0}])
def test_a_senseless_policy_is_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        RestartPolicy(**wrong)


# What is seen.


def report_of(
    batch: int, rows: int, second: int, late: Sequence[int] = (), **sources: str | None
) -> Any:
    return SimpleNamespace(
        batchId=batch,
        numInputRows=rows,
        timestamp=f"2026-01-01T00:00:{second:02}.000Z",
        batchDuration=500,
        processedRowsPerSecond=rows * 2.0,
        sources=[SimpleNamespace(**sources)] if sources else [],
        stateOperators=[SimpleNamespace(numRowsDroppedByWatermark=each) for each in late],
    )


def test_rows_are_counted_once_and_idle_reports_change_nothing():
    query: Any = StreamingQuery(lasts=-1)
    watch = QueryWatch()
    end, latest = '{"t": {"a:0": 5, "a:1": 2}}', '{"t": {"a:0": 9, "a:1": 2}}'
    query.recentProgress = [report_of(0, 3, 1), report_of(1, 4, 2)]
    query.lastProgress = query.recentProgress[-1]
    watch.look(query)
    query.recentProgress.append(report_of(2, 5, 3, endOffset=end, latestOffset=latest))
    query.lastProgress = query.recentProgress[-1]
    watch.look(query)
    query.recentProgress.append(report_of(3, 0, 4))
    query.lastProgress = query.recentProgress[-1]

    assert watch.look(query)
    assert not watch.look(query)
    assert (watch.batch, watch.rows, watch.rows_per_second) == (2, 12, 10.0)
    assert watch.lag == {"t@a:0": 4, "t@a:1": 0}


def test_rows_that_came_too_late_are_counted_and_told_of(caplog):
    query: Any = StreamingQuery(lasts=-1)
    spark: Any = SimpleNamespace()
    target = StreamTarget(query, Run(spark, name="staged", name_server="127.0.0.1:9876"))
    seen = []
    for batch, late in enumerate([(), (3, 1), (0,), (2,)]):
        query.recentProgress.append(report_of(batch, 5, batch + 1, late))
        query.lastProgress = query.recentProgress[-1]
        seen.append(target.look().late)
        target.look()

    assert seen == [0, 4, 4, 6]
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" rows came after")[0] for text in told] == ["fake: 4", "fake: 2"]


@pytest.mark.parametrize(
    "offsets",
    [(None, None), ("7", "9"), ('{"starting": "latest"}', '{"t": {"a:0": 1}}'), ("{}", "[]")],
)
def test_offsets_of_other_sources_are_no_lag(offsets):
    watch = QueryWatch()

    watch.take(report_of(0, 1, 1, endOffset=offsets[0], latestOffset=offsets[1]))

    assert watch.lag == {}


# The pace.


def test_durations_may_be_given_as_such_to_a_run():
    spark: Any = SimpleNamespace()

    run = Run(spark, name_server="127.0.0.1:9876", trigger=timedelta(minutes=1))

    assert run.trigger == 60.0
    with pytest.raises(SettingError, match="once and trigger"):
        Run(spark, name_server="127.0.0.1:9876", trigger=1.0, once=True)
    with pytest.raises(SettingError, match="has no checkpoint"):
        run.checkpoint()


@given(rate=st.floats(0.5, 1e6), portions=st.lists(st.integers(1, 1000), min_size=2, max_size=50))
def test_no_more_than_the_rate_passes_but_for_one_portion(rate, portions):
    clock = Hands()
    began = clock.monotonic()
    pace = RateLimit(rate, clock, clock.advance)

    for portion in portions:
        pace.take(portion)

    passed = sum(portions) - portions[-1]
    assert clock.monotonic() - began == pytest.approx(passed / rate, rel=1e-6, abs=1e-6)
