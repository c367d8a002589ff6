"""`orbitmq dlq resend`: dead letters, sent again after somebody has agreed to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from orbitmq.cli.choosing import GroupName, check_positive
from orbitmq.cli.deadletterchoosing import Choice
from orbitmq.cli.deadletterrecords import ResendRecord
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import FAILED
from orbitmq.cli.session import Session
from orbitmq.cli.wording import several
from orbitmq.client.admin.resending import ResendResult, ResendTo

app = section("Send dead letters again.")


@command(
    app,
    "resend",
    examples=(
        "orbitmq dlq resend billing --dry-run",
        "orbitmq dlq resend billing --reason timeout --limit 10",
        "orbitmq dlq resend billing --since 1d --rate 50 --yes",
        "orbitmq dlq resend billing --to origin --id 7F00000100002A9F0000000000001234",
    ),
    prints=ResendRecord,
    changes=True,
)
async def resend(
    session: Session,
    group: GroupName,
    choice: Choice,
    to: Annotated[
        ResendTo,
        typer.Option("--to", help="retry: only this group gets it; origin: every group does."),
    ] = ResendTo.RETRY,
    rate: Annotated[
        float | None, typer.Option("--rate", help="At most so many per second.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", min=1, help="At most so many in all.")
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Those that were sent again before, too, wherever that was to."
        ),
    ] = False,
) -> None:
    """Send dead letters again, and say what became of each; one that was is left out."""
    out = session.out
    check_positive(rate, "--rate")
    where = choice.filter(out.clock.now())
    resending = partial(
        session.admin.dead_letters.resending, group, to=to, limit=limit, again=again
    )
    counts: Counter[str] = Counter()

    def tell(record: ResendRecord) -> None:
        counts[record.result] += 1
        if out.is_json:
            out.record(record)
        else:
            out.line(_resend_line(record))

    chosen: frozenset[str] | None = None
    if not session.is_dry_run and not session.says_yes:
        # Bodies are not kept: there may be many letters.
        planned = [ResendRecord.of(each) async for each in resending(where, dry_run=True)]
        chosen = frozenset(
            each.offset_id for each in planned if each.result == ResendResult.WOULD_BE_SENT
        )
        if chosen:
            who = "the group" if to is ResendTo.RETRY else "every group of their topic"
            letters = several(len(chosen), "dead letter")
            session.may(f"this sends {letters} of {group!r} again, to {who}")
        for record in planned:
            if record.offset_id not in chosen:
                tell(record)
    if chosen is None or chosen:
        # What somebody agreed to is sent, and not what has died or changed since.
        meant = where if chosen is None else replace(where, ids=chosen)
        async for outcome in resending(meant, rate=rate, dry_run=session.is_dry_run):
            tell(ResendRecord.of(outcome))
    words = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    if not counts:
        await session.admin.groups.settings(group)  # raises if nobody has it
    out.note(words or f"group {group} has no such dead letters")
    if counts[ResendResult.FAILED]:
        raise typer.Exit(FAILED)


def _resend_line(record: ResendRecord) -> str:
    about = record.problem or (f"as {record.sent_as}" if record.sent_as else "")
    goes = f" to {record.topic}" if record.topic else ""
    line = f"{record.id}  {record.result}{goes}"
    return f"{line}{': ' if record.problem else ' '}{about}".rstrip()
