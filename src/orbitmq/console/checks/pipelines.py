"""What can be wrong with pipelines on Spark, by what their drivers report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from orbitmq.console import commandlines
from orbitmq.console.checks.faults import Check, Fault, Weight, page_of
from orbitmq.console.pipelines import Pipeline, PipelineState
from orbitmq.console.words import duration, share


def of_pipelines(pipelines: Iterable[Pipeline], now: float) -> Iterator[Fault]:
    """Those that failed, that are failing, or that nobody hears of."""
    for each in pipelines:
        ill = _ILL.get(each.state_at(now))
        if ill is not None:
            yield Fault(
                check=Check.PIPELINES,
                kind=f"pipeline {each.state_at(now)}",
                weight=Weight.BAD,
                subject=each.name,
                link=page_of("pipelines", each.name),
                text=ill.text(each, now),
                remedy=ill.remedy,
                command=ill.command(each),
            )


@dataclass(frozen=True, slots=True)
class _Illness:
    text: Callable[[Pipeline, float], str]
    remedy: str
    command: Callable[[Pipeline], str]


def _failing(pipeline: Pipeline, _: float) -> str:
    report = pipeline.report
    counts = [
        f"{number:,} {what}"
        for number, what in ((report.retried, "retried"), (report.dead, "dead"))
        if number
    ]
    much = "much" if report.failed_share is None else share(report.failed_share)
    since = f" ({', '.join(counts)} since it was started)" if counts else ""
    return f"{much} of what it handled lately failed{since}: {_error(pipeline)}"


def _error(pipeline: Pipeline) -> str:
    return pipeline.report.error or "no reason was reported"


def _look_into(pipeline: Pipeline) -> str:
    """Why messages failed is with the dead letters, once there are some."""
    group = pipeline.report.group
    if group is not None and pipeline.report.dead:
        return commandlines.count_dead_letters(group)
    return commandlines.show_pipeline(pipeline.name)


def _run_again(_: Pipeline) -> str:
    return commandlines.command("pipeline", "run", "FILE")


_ILL: Mapping[PipelineState, _Illness] = {
    PipelineState.FAILED: _Illness(
        lambda pipeline, _: f"it failed: {_error(pipeline)}",
        "look at the driver's log; after a restart it goes on from its checkpoint",
        _run_again,
    ),
    PipelineState.FAILING: _Illness(
        _failing,
        "mend its handler or what that needs, and start it again; dead letters can be resent then",
        _look_into,
    ),
    PipelineState.LOST: _Illness(
        lambda pipeline, now: (
            f"it has not been heard of for {duration(now - pipeline.reported_at)}; its driver may "
            "be gone"
        ),
        "look at the driver's log; after a restart it goes on from its checkpoint",
        _run_again,
    ),
}
