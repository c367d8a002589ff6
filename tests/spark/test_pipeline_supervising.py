"""How a pipeline is started, watched, brought to rest and started again; no Spark is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.errors import SettingError
from orbitmq.spark.pipelines.builtin import RateLimit
from orbitmq.spark.pipelines.definition import Definition, PipelineBroken, PipelineRefused
from orbitmq.spark.pipelines.run import End, Progress, Restarting, RestartPolicy, Run, Supervisor
from tests.support.store import HandClock

DEADLINE = 20.0


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
    clock: HandClock | None = None
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

        supervisor = Supervisor(
            Definition.of(pipeline, "staged"),
            {},
            run_of(),
            drain_file=self.folder / "drain",
            policy=self.policy,
            stop_timeout=self.stop_timeout,
            look_every=0.001,
            on_progress=progressed,
            on_restart=self.restarts.append,
            clock=self.clock,
        )
        return supervisor.run(ended or threading.Event())


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


SLOW_START = "org.apache.spark.SparkException: Python worker failed to connect back."


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_python_process_that_starts_too_slowly_is_no_mistake(tmp_path, restarts):
    outcomes = [RuntimeError(SLOW_START), StreamingQuery(failure=SLOW_START), StreamingQuery()]
    staged = Staged(tmp_path, outcomes, RestartPolicy(restarts=restarts, first_pause=0.001))

    report = staged.run()

    assert (report.end, report.restarts) == (End.FINISHED, 2)
    assert [each.problem for each in staged.restarts] == [SLOW_START] * 2


def test_a_python_process_that_never_starts_ends_the_pipeline(tmp_path):
    staged = Staged(tmp_path, [RuntimeError(SLOW_START)] * 9, RestartPolicy(restarts=0))

    with pytest.raises(PipelineBroken, match=r"after 3 restart.*failed to connect back"):
        staged.run()
    assert staged.made == 4


def test_failures_long_ago_count_no_more(tmp_path):
    clock = HandClock()

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


@pytest.fixture
def stopping():
    """A request to stop, made before the start."""
    ended = threading.Event()
    ended.set()
    return ended


def test_a_stop_waits_until_no_batch_runs_and_lets_none_start(tmp_path, stopping):
    query = StreamingQuery(lasts=-1)
    drains: list[bool] = []

    def is_resting():
        drains.append((tmp_path / "drain").exists())
        return len(drains) > 5

    query.is_resting = is_resting
    report = Staged(tmp_path, [query]).run(stopping)

    assert (report.end, report.is_clean, query.is_stopped) == (End.STOPPED, True, True)
    assert all(drains)
    assert not (tmp_path / "drain").exists()


@pytest.mark.parametrize("fails", [True, False])
def test_a_batch_that_fails_or_takes_too_long_makes_no_clean_end(tmp_path, stopping, fails):
    query = StreamingQuery(lasts=-1)

    def is_resting():
        if fails:
            query.lasts, query.error = 0, "no sink"
        return False

    query.is_resting = is_resting
    report = Staged(tmp_path, [query], stop_timeout=0.02).run(stopping)

    assert (report.end, report.is_clean) == (End.STOPPED, False)
    expected = [("failed", "no sink")] if fails else [("stopped", None)]
    assert [(each.state, each.error) for each in report.progress] == expected


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


def run_of(**options: Any) -> Run:
    spark: Any = SimpleNamespace()
    return Run(spark, name="staged", name_server="127.0.0.1:9876", **options)


# Settings and the rate.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RestartPolicy(restarts=-1), "restarts must be 0 or more"),
        (lambda: RestartPolicy(first_pause=0), "first_pause must be positive"),
        (lambda: run_of(trigger=1.0, once=True), "once and trigger"),
        (lambda: run_of().checkpoint(), "has no checkpoint"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, words):
    with pytest.raises(SettingError, match=words):
        make()


@given(rate=st.floats(0.5, 1e6), portions=st.lists(st.integers(1, 1000), min_size=2, max_size=50))
def test_no_more_than_the_rate_passes_but_for_one_portion(rate, portions):
    clock = HandClock()
    began = clock.monotonic()
    pace = RateLimit(rate, clock, clock.advance)

    for portion in portions:
        pace.take(portion)

    passed = sum(portions) - portions[-1]
    assert clock.monotonic() - began == pytest.approx(passed / rate, rel=1e-6, abs=1e-6)
