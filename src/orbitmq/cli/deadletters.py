"""`orbitmq dlq`: lists, counts, shows, exports and resends dead letters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import GroupName, Session, check_positive, command, time_of
from orbitmq.cli.main import FAILED, CommandError
from orbitmq.cli.messages import preview, print_message
from orbitmq.cli.output import Columns, body_fields, count
from orbitmq.client.admin.deadletters import (
    DeadLetter,
    DeadLetterFilter,
    ExportFormat,
    ResendOutcome,
    ResendResult,
    ResendTo,
    copy_of,
    with_copies,
)
from orbitmq.client.admin.messages import BodyForm
from orbitmq.client.admin.topics import TopicKind
from orbitmq.client.message import ReceivedMessage
from orbitmq.console.words import NOTHING, several
from orbitmq.names import DEAD_LETTER_PREFIX
from orbitmq.parsing import fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Chooses dead letters; every given flag must match."""

    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Dead since this time: a date, or an age such as 2h."
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="TIME", help="Dead before this time, written as for --since."
        ),
    ] = None
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="With this key; may be repeated.")
    ] = None
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", help="Originally sent to this topic.")
    ] = None
    reason: Annotated[
        str | None,
        typer.Option(
            "--reason", help="With this text in the reason; upper and lower case are equal."
        ),
    ] = None
    pile: Annotated[
        str | None,
        typer.Option(
            "--pile", metavar="LINE", help="With exactly this as the first line of the reason."
        ),
    ] = None
    min_attempts: Annotated[
        int | None,
        typer.Option("--min-attempts", min=0, help="With at least this number of attempts."),
    ] = None
    max_attempts: Annotated[
        int | None,
        typer.Option("--max-attempts", min=0, help="With at most this number of attempts."),
    ] = None
    letter: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            help="With this message id, which all letters of a message share, or this "
            "offset id, which is unique; may be repeated.",
        ),
    ] = None

    def filter(self, now: float) -> DeadLetterFilter:
        return DeadLetterFilter(
            since=time_of(self.since, now, "--since"),
            until=time_of(self.until, now, "--until"),
            keys=tuple(self.key or ()),
            topic=self.topic,
            reason=self.reason,
            pile=self.pile,
            min_attempts=self.min_attempts,
            max_attempts=self.max_attempts,
            ids=tuple(self.letter or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRecord:
    """A dead letter: the fields of an exported file, and its latest resend."""

    group: str
    id: str  #: of the message, the same through all retries; `message show` takes it
    unique_id: str | None  #: the same; null if its producer gave it none
    offset_id: str  #: of this letter; unique also when the message died more than once
    topic: str | None  #: that it was sent to
    origin_id: str | None  #: offset id of the message as it was sent
    reason: str  #: as the consumer reported it; unknown at Apache's brokers
    attempts: int
    resent_times: int  #: earlier resends
    resent_at: float | None  #: when it was last resent; null: not yet
    resent_as: str | None  #: offset id of that copy
    died_at: float
    born_at: float
    tags: str | None
    keys: tuple[str, ...]
    broker: str
    queue_id: int
    queue_offset: int
    properties: Mapping[str, str]
    body: str | None
    body_base64: str | None

    @classmethod
    def of(cls, letter: DeadLetter, copy: ReceivedMessage | None) -> DeadLetterRecord:
        message = letter.message
        body, encoded = body_fields(message.body)
        return fill(
            cls,
            letter,
            message,
            id=message.msg_id,
            offset_id=letter.id,
            resent_at=None if copy is None else copy.stored_at,
            resent_as=None if copy is None else copy.offset_id,
            broker=message.queue.broker,
            queue_id=message.queue.id,
            body=body,
            body_base64=encoded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PileRecord:
    """Dead letters that have something in common."""

    name: str
    count: int
    first_died_at: float
    last_died_at: float
    sample_id: str  #: id of the latest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRecord:
    """The dead letters of a group; without a group one line for each that has any."""

    group: str
    count: int
    resent: int | None  #: of these, resent; null when there are too many to look each one up
    by_reason: tuple[PileRecord, ...]  #: the largest pile first; empty when no group was named
    by_topic: tuple[PileRecord, ...]
    by_age: tuple[PileRecord, ...]

    @property
    def open(self) -> int | None:
        """Letters that were not resent."""
        return None if self.resent is None else self.count - self.resent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendRecord:
    """The outcome of resending one letter; one line for each."""

    group: str
    id: str  #: of the message
    offset_id: str  #: of the letter
    result: str  #: sent, `would be sent`, `already sent` or failed
    topic: str | None  #: that it went, or would go, to
    sent_as: str | None  #: offset id of the copy
    problem: str | None

    @classmethod
    def of(cls, outcome: ResendOutcome) -> ResendRecord:
        letter = outcome.letter
        return fill(cls, outcome, letter, id=letter.message.msg_id, offset_id=letter.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """A file that was written."""

    group: str
    file: str
    count: int


app = section()

#: Most letters of a group that are looked up to count resends.
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
    newest: Annotated[bool, typer.Option("--newest", "-r", help="Newest first.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-l", min=0, help="The maximum number of letters; 0: all.")
    ] = 50,
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
        await session.admin.groups.settings(group)  # raises if no broker has it
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
        str,
        typer.Argument(
            metavar="[GROUP]", help="The group, counted by reason; by default all groups."
        ),
    ] = "",
) -> None:
    """Count dead letters: of all groups, or of one by reason, topic and age."""
    if not group:
        await _of_all_groups(session)
        return
    out = session.out
    where = choice.filter(out.clock.now())
    found = await session.admin.dead_letters.summary(group, where)
    record = fill(SummaryRecord, found, resent=await _resent(session, group, found.count, where))
    if not record.count:
        await session.admin.groups.settings(group)  # raises if no broker has it
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
    """The number of letters that were resent; None if there are too many to look each one up."""
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
        str,
        typer.Argument(metavar="[ID]", help="The id or offset id; by default the latest letter."),
    ] = "",
    form: Annotated[
        BodyForm, typer.Option("--format", "-f", help="The format of the body.")
    ] = BodyForm.AUTO,
) -> None:
    """Show one dead letter with its reason and body."""
    where = DeadLetterFilter(ids=(letter_id,)) if letter_id else None
    found = await session.admin.dead_letters.sample(group, 1, where)
    if not found:
        await session.admin.groups.settings(group)  # raises if no broker has it
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
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The file to write; its suffix decides the format."),
    ],
    choice: Choice,
    file_format: Annotated[
        ExportFormat | None,
        typer.Option("--format", "-f", help="The format, if the suffix does not decide it."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing file.")] = False,
) -> None:
    """Write dead letters to a file: JSON lines for tools, Parquet for Spark and notebooks."""
    if file.exists() and not replace:
        raise CommandError(f"{file} exists; overwrite it with --replace")
    where = choice.filter(session.out.clock.now())
    number = await session.admin.dead_letters.export(group, file, where, format=file_format)
    if session.out.is_json:
        session.out.record(ExportRecord(group=group, file=str(file), count=number))
    else:
        session.out.line(f"{several(number, 'dead letter')} of group {group} written to {file}")


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
        typer.Option(
            "--to",
            help="retry: only this group gets them; origin: all groups of the original topic do.",
        ),
    ] = ResendTo.RETRY,
    rate: Annotated[
        float | None, typer.Option("--rate", help="The maximum number of messages per second.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", min=1, help="The maximum number of letters.")
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Include letters that were resent before."),
    ] = False,
) -> None:
    """Send dead letters again; letters that were resent before are left out."""
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
        # Keeps ids, not bodies: there may be many letters.
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
        # Consent was given for these letters, not for later ones.
        meant = where if chosen is None else replace(where, ids=chosen)
        async for outcome in resending(meant, rate=rate, dry_run=session.is_dry_run):
            tell(ResendRecord.of(outcome))
    words = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    if not counts:
        await session.admin.groups.settings(group)  # raises if no broker has it
    out.note(words or f"group {group} has no such dead letters")
    if counts[ResendResult.FAILED]:
        raise typer.Exit(FAILED)


def _resend_line(record: ResendRecord) -> str:
    about = record.problem or (f"as {record.sent_as}" if record.sent_as else "")
    goes = f" to {record.topic}" if record.topic else ""
    line = f"{record.id}  {record.result}{goes}"
    return f"{line}{': ' if record.problem else ' '}{about}".rstrip()
