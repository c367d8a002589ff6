"""The commands of `orbitmq group` that move progress: plan, consent, apply, read back.

What people are shown is what is done: a plan names the offset of every queue, and the same plan is
applied, also when messages arrive in between. What is printed at the end was read from the brokers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from orbitmq.cli.choosing import GroupName, Queues, queues_of, time_of
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import FAILED, Misused
from orbitmq.cli.session import Session
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import NOTHING, count, several
from orbitmq.client.admin.resetplan import (
    QueueMove,
    QueueOutcome,
    ResetFailed,
    ResetPlan,
    ResetReport,
    ResetTo,
)

app = section("Move progress.")

#: Said where the progress that is moved may be what a stream has told, and not what it goes by.
STREAMS_DO_NOT_MOVE = (
    "no member is online; if a Spark stream reports this progress: a stream goes on from its "
    "checkpoint, whatever is set here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMoveRecord:
    """What happens to the progress in one queue."""

    broker: str
    queue_id: int
    from_offset: int | None  #: null: the group has no progress here
    to_offset: int
    min_offset: int  #: what the queue had when the plan was made
    max_offset: int
    skipped: int  #: messages that the group will not get
    replayed: int  #: messages that it gets again
    read_back: int | None  #: progress after the move; null when nothing was done
    problem: str | None  #: why it has no effect

    @classmethod
    def of(cls, move: QueueMove, outcome: QueueOutcome | None = None) -> QueueMoveRecord:
        return cls(
            broker=move.queue.broker,
            queue_id=move.queue.id,
            from_offset=move.from_offset,
            to_offset=move.to_offset,
            min_offset=move.min_offset,
            max_offset=move.max_offset,
            skipped=move.skipped,
            replayed=move.replayed,
            read_back=None if outcome is None else outcome.read_back,
            problem=None if outcome is None else outcome.problem,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """A group's progress in a topic, and where it goes; one line for each topic."""

    group: str
    topic: str
    source: str | None  #: the group whose progress is copied
    result: str  #: moved, failed, unchanged, or `would be moved`
    is_dry_run: bool
    skipped: int
    replayed: int
    online: tuple[str, ...]  #: client ids of members that were online
    queues: tuple[QueueMoveRecord, ...]

    @classmethod
    def of(cls, plan: ResetPlan, result: str, report: ResetReport | None = None) -> MoveRecord:
        if report is None:
            queues = tuple(QueueMoveRecord.of(move) for move in plan.moves)
        else:
            queues = tuple(QueueMoveRecord.of(each.move, each) for each in report.outcomes)
        return cls(
            group=plan.group,
            topic=plan.topic,
            source=plan.source,
            result=result,
            is_dry_run=result.startswith("would"),
            skipped=plan.skipped,
            replayed=plan.replayed,
            online=plan.online,
            queues=queues,
        )


@command(
    app,
    "reset",
    examples=(
        "orbitmq group reset billing orders --to-time 2026-01-31T12:00:00 --dry-run",
        "orbitmq group reset billing orders --to-time 2h",
        "orbitmq group reset billing orders --to-begin --yes",
        "orbitmq group reset billing orders --to-offset 1500 --queue broker-a:3",
        "orbitmq group reset billing orders --by -100",
    ),
    prints=MoveRecord,
    changes=True,
)
async def reset(
    session: Session,
    group: GroupName,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Progress in this topic.")],
    to_begin: Annotated[
        bool, typer.Option("--to-begin", help="Everything that is still stored.")
    ] = False,
    to_end: Annotated[bool, typer.Option("--to-end", help="Nothing that is stored now.")] = False,
    to_time: Annotated[
        str | None,
        typer.Option(
            "--to-time", metavar="TIME", help="What was stored from then on; a date, or 2h ago: 2h."
        ),
    ] = None,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", help="This offset in every queue concerned.")
    ] = None,
    by: Annotated[
        int | None, typer.Option("--by", help="So many messages forward, or back if negative.")
    ] = None,
    queue: Queues = None,
) -> None:
    """Move a group's progress in a topic; works while its members are online as well."""
    ways = {
        "--to-begin": to_begin or None,
        "--to-end": to_end or None,
        "--to-time": to_time,
        "--to-offset": to_offset,
        "--by": by,
    }
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) != 1:
        got = f"got {' and '.join(given)}" if given else "got none"
        raise Misused(f"say where to with exactly one of {', '.join(ways)}; {got}")
    if to_begin:
        to = ResetTo.begin()
    elif to_end:
        to = ResetTo.end()
    elif to_time is not None:
        to = ResetTo.time(time_of(to_time, session.out.clock.now(), "--to-time") or 0.0)
    elif to_offset is not None:
        to = ResetTo.offset(to_offset)
    else:
        to = ResetTo.shift(by or 0)
    plan = await session.admin.progress.plan_reset(group, topic, to, queues=queues_of(topic, queue))
    await _carry_out(session, (plan,))


@command(
    app,
    "skip",
    examples=(
        "orbitmq group skip billing --dry-run",
        "orbitmq group skip billing orders --yes",
    ),
    prints=MoveRecord,
    changes=True,
)
async def skip(
    session: Session,
    group: GroupName,
    topic: Annotated[
        str, typer.Argument(metavar="[TOPIC]", help="Of this topic; else of all it consumes.")
    ] = "",
    retries: Annotated[
        bool, typer.Option("--retries", help="Those that failed before, too.")
    ] = False,
) -> None:
    """Skip the backlog: the group goes on with what comes from now on."""
    plans = await session.admin.progress.plan_skip(group, topic or None, retries=retries)
    await _carry_out(session, plans)


@command(
    app,
    "clone",
    examples=(
        "orbitmq group clone billing billing-next --dry-run",
        "orbitmq group clone billing billing-next --topic orders --yes",
    ),
    prints=MoveRecord,
    changes=True,
)
async def clone(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The group that is copied.")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The group that gets its progress.")
    ],
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", help="In this topic only; else in all.")
    ] = None,
) -> None:
    """Give a group the progress of another; a group that is not there yet is made."""
    plans = await session.admin.progress.plan_clone(source, target, topic)
    await _carry_out(session, plans)


async def _carry_out(session: Session, plans: Sequence[ResetPlan]) -> None:
    out = session.out
    changing = [plan for plan in plans if plan.is_change]
    for plan in plans:
        if not out.is_json:
            _print_plan(session, plan)
        elif session.is_dry_run or not plan.is_change:
            out.record(MoveRecord.of(plan, "would be moved" if plan.is_change else "unchanged"))
    if not changing:
        out.note("nothing to move: progress is there already")
        return
    # A stream reports progress and is no member; a group without members may be one's.
    if not any(plan.online or plan.source for plan in changing):
        out.note(STREAMS_DO_NOT_MOVE)
    if not session.may(_sentence(changing)):
        return
    failures = 0
    for plan in changing:
        try:
            report, result = await session.admin.progress.apply(plan), "moved"
        except ResetFailed as failed:
            report, result = failed.report, "failed"
            failures += 1
        if out.is_json:
            out.record(MoveRecord.of(plan, result, report))
        else:
            _print_report(session, report)
    if failures:
        raise typer.Exit(FAILED)


def _sentence(plans: Sequence[ResetPlan]) -> str:
    skipped = sum(plan.skipped for plan in plans)
    replayed = sum(plan.replayed for plan in plans)
    topics = ", ".join(repr(plan.topic) for plan in plans)
    return (
        f"this moves group {plans[0].group!r} in {topics}: {several(skipped, 'message')} skipped, "
        f"{count(replayed)} consumed again"
    )


def _print_plan(session: Session, plan: ResetPlan) -> None:
    origin = f", as group {plan.source}" if plan.source else ""
    session.out.table(
        Columns[QueueMove]()
        .text("queue", lambda move: f"{move.queue.broker}:{move.queue.id}")
        .number("has from", lambda move: count(move.min_offset))
        .number("up to", lambda move: count(move.max_offset))
        .number("progress", lambda move: count(move.from_offset))
        .number("goes to", lambda move: count(move.to_offset))
        .number("skipped", lambda move: count(move.skipped), bad=lambda move: move.skipped > 0)
        .number("again", lambda move: count(move.replayed)),
        plan.moves,
        title=f"Plan: group {plan.group} in topic {plan.topic}{origin}",
        empty="it has no queues",
    )
    if plan.online:
        session.out.line(f"online: {', '.join(plan.online)}")


def _print_report(session: Session, report: ResetReport) -> None:
    plan = report.plan
    session.out.table(
        Columns[QueueOutcome]()
        .text("queue", lambda each: f"{each.move.queue.broker}:{each.move.queue.id}")
        .number("wanted", lambda each: count(each.move.to_offset))
        .number("read back", lambda each: count(each.read_back))
        .text("problem", lambda each: each.problem or NOTHING, bad=lambda e: not e.is_effective),
        report.outcomes,
        title=f"Read back: group {plan.group} in topic {plan.topic}",
    )
    if not report.is_effective:
        failed = sum(not each.is_effective for each in report.outcomes)
        session.out.note(f"orbitmq: {several(failed, 'queue')} could not be moved")
