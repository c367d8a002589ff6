"""`orbitmq dlq`: dead letters, grouped, looked at and exported; also the home of `dlq resend`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from orbitmq.cli import deadletterresending
from orbitmq.cli.choosing import GroupName
from orbitmq.cli.deadletterchoosing import Choice
from orbitmq.cli.deadletterrecords import (
    DeadLetterRecord,
    ExportRecord,
    PileRecord,
    SummaryRecord,
)
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import CommandError
from orbitmq.cli.messagerecords import preview, print_message
from orbitmq.cli.session import Session
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import NOTHING, count, several
from orbitmq.client.admin.bodies import BodyForm
from orbitmq.client.admin.deadletters import DeadLetter, DeadLetterFilter
from orbitmq.client.admin.exporting import ExportFormat
from orbitmq.client.admin.resent import copy_of, with_copies
from orbitmq.client.admin.topicvalues import TopicKind
from orbitmq.client.names import DEAD_LETTER_PREFIX
from orbitmq.client.received import ReceivedMessage

app = section("Look at dead letters, and send them again.")

#: Letters of one group that are looked up at most, to count those that were sent again.
MOST_COUNTED = 1000


@command(
    app,
    "list",
    examples=(
        "orbitmq dlq list billing",
        "orbitmq dlq list billing --since 1d --reason timeout --json | jq -r .id",
    ),
    prints=DeadLetterRecord,
)
async def list_letters(
    session: Session,
    group: GroupName,
    choice: Choice,
    newest: Annotated[bool, typer.Option("--newest", "-r", help="The newest first.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="At most; 0: all.")] = 50,
) -> None:
    """List the dead letters of a group."""
    out = session.out
    letters: list[tuple[DeadLetter, ReceivedMessage | None]] = []
    number = 0
    is_more = False
    where = choice.filter(out.clock.now())

    async def wanted() -> AsyncIterator[DeadLetter]:
        nonlocal number, is_more
        async for letter in session.admin.dead_letters.list(group, where, newest_first=newest):
            if limit and number == limit:
                is_more = True
                return
            number += 1
            yield letter

    async for letter, copy in with_copies(session.admin.messages, wanted()):
        if out.is_json:
            out.record(DeadLetterRecord.of(letter, copy))
        else:
            letters.append((letter, copy))
    if not number:
        await session.admin.groups.settings(group)  # raises if nobody has it
    if not out.is_json:
        out.table(
            Columns[tuple[DeadLetter, ReceivedMessage | None]]()
            .text("died", lambda each: out.moment(each[0].died_at))
            .id("id", lambda each: each[0].message.msg_id)
            .text("topic", lambda each: each[0].topic or NOTHING)
            .number("attempts", lambda each: count(each[0].attempts))
            .text("resent", lambda each: "no" if each[1] is None else out.moment(each[1].stored_at))
            .number("resent before", lambda each: count(each[0].resent_times))
            .text("keys", lambda each: " ".join(each[0].keys) or NOTHING)
            .text("reason", lambda each: each[0].reason)
            .text("body", lambda each: preview(each[0].message)),
            letters,
            empty=f"group {group} has no such dead letters",
        )
    if is_more:
        out.note(f"there are more than {limit}; --limit 0 shows all")


@command(
    app,
    "summary",
    examples=("orbitmq dlq summary", "orbitmq dlq summary billing --since 1d"),
    prints=SummaryRecord,
)
async def summary(
    session: Session,
    choice: Choice,
    group: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="Of this group, by reason; else of all.")
    ] = "",
) -> None:
    """Count dead letters: of all groups, or of one by reason, topic and age."""
    if not group:
        await _of_all_groups(session)
        return
    out = session.out
    where = choice.filter(out.clock.now())
    found = await session.admin.dead_letters.summary(group, where)
    record = SummaryRecord.of(found, await _resent(session, group, found.count, where))
    if not record.count:
        await session.admin.groups.settings(group)  # raises if nobody has it
    if out.is_json:
        out.record(record)
        return
    parts = "" if record.open is None else f": {record.open:,} open, {record.resent:,} resent"
    out.line(f"group {group} has {several(record.count, 'dead letter')}{parts}")
    for title, piles in (
        ("By reason", record.by_reason),
        ("By topic", record.by_topic),
        ("By age", record.by_age),
    ):
        if piles:
            out.table(
                Columns[PileRecord]()
                .number("count", lambda each: count(each.count))
                .text("first died", lambda each: out.moment(each.first_died_at))
                .text("last died", lambda each: out.moment(each.last_died_at))
                .id("sample", lambda each: each.sample_id)
                .text(title.removeprefix("By "), lambda each: each.name),
                piles,
                title=title,
            )


async def _of_all_groups(session: Session) -> None:
    topics = await session.admin.topics.list(kinds={TopicKind.DEAD_LETTER})
    statuses = await asyncio.gather(*(session.admin.topics.status(each.name) for each in topics))
    counts = {
        status.topic.removeprefix(DEAD_LETTER_PREFIX): status.messages
        for status in statuses
        if status.messages
    }
    records = [
        SummaryRecord(
            group=group,
            count=number,
            resent=await _resent(session, group, number),
            by_reason=(),
            by_topic=(),
            by_age=(),
        )
        for group, number in counts.items()
    ]
    records.sort(key=lambda each: (-each.count, each.group))
    out = session.out
    if out.is_json:
        out.records(records)
    else:
        out.table(
            Columns[SummaryRecord]()
            .text("group", lambda each: each.group)
            .number("dead letters", lambda each: count(each.count))
            .number("open", lambda each: count(each.open))
            .number("resent", lambda each: count(each.resent)),
            records,
            empty="" if topics.unreachable else "no group has dead letters",
        )
    session.missing(topics.unreachable)


async def _resent(
    session: Session, group: str, number: int, where: DeadLetterFilter | None = None
) -> int | None:
    """How many letters were sent again; None if there are too many to look each one up."""
    if number > MOST_COUNTED:
        return None
    letters = session.admin.dead_letters.list(group, where)
    return len(
        [copy async for _, copy in with_copies(session.admin.messages, letters) if copy is not None]
    )


@command(
    app,
    "show",
    examples=(
        "orbitmq dlq show billing",
        "orbitmq dlq show billing 7F00000100002A9F0000000000001234 --format json",
    ),
    prints=DeadLetterRecord,
)
async def show(
    session: Session,
    group: GroupName,
    letter_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="Its id or offset id; else the latest.")
    ] = "",
    form: Annotated[
        BodyForm, typer.Option("--format", "-f", help="How the body is shown.")
    ] = BodyForm.AUTO,
) -> None:
    """Show one dead letter with its reason and body."""
    where = DeadLetterFilter(ids=(letter_id,)) if letter_id else None
    found = await session.admin.dead_letters.sample(group, 1, where)
    if not found:
        await session.admin.groups.settings(group)  # raises if nobody has it
        wanted = f" {letter_id!r}" if letter_id else ""
        raise CommandError(f"group {group!r} has no dead letter{wanted}")
    (letter,) = found
    out = session.out
    copy = await copy_of(session.admin.messages, letter)
    if out.is_json:
        out.record(DeadLetterRecord.of(letter, copy))
        return
    resent = "no" if copy is None else f"{out.moment(copy.stored_at)}, as {copy.offset_id}"
    out.facts(
        ("id", letter.message.msg_id),
        ("offset id", letter.id),
        ("died", out.moment(letter.died_at)),
        ("reason", letter.reason),
        ("attempts", str(letter.attempts)),
        ("resent", resent),
        ("resent before", several(letter.resent_times, "time")),
        ("was sent to", letter.topic or NOTHING),
        ("origin id", letter.origin_id or NOTHING),
    )
    out.raw("")
    print_message(out, letter.message, form)


@command(
    app,
    "export",
    examples=(
        "orbitmq dlq export billing dead.jsonl",
        "orbitmq dlq export billing dead.parquet --since 7d",
    ),
    prints=ExportRecord,
)
async def export(
    session: Session,
    group: GroupName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its ending says what it is.")],
    choice: Choice,
    file_format: Annotated[
        ExportFormat | None, typer.Option("--format", "-f", help="If the ending does not say it.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a file that is there.")
    ] = False,
) -> None:
    """Write dead letters to a file: JSON lines for tools, Parquet for Spark and notebooks."""
    if file.exists() and not replace:
        raise CommandError(f"{file} is there already; say --replace to write it anew")
    where = choice.filter(session.out.clock.now())
    number = await session.admin.dead_letters.export(group, file, where, format=file_format)
    if session.out.is_json:
        session.out.record(ExportRecord(group=group, file=str(file), count=number))
    else:
        session.out.line(f"{several(number, 'dead letter')} of group {group} written to {file}")


app.add_typer(deadletterresending.app)
