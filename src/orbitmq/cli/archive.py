"""`orbitmq archive`: closed log files as Parquet, which the Spark source reads without the broker.

`orbitmq pipeline run archive` differs: it copies one topic through Spark as messages arrive.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from orbitmq.archive import Catalog, Entries, Location, LogEntry, problems_of, strays
from orbitmq.cli.application import plain_command, section
from orbitmq.cli.main import CommandError, Misused
from orbitmq.cli.output import Columns, Printer, count, size
from orbitmq.names import topic_problem
from orbitmq.store.archive import (
    archive_log_file,
    check_same_log,
    closed_log_files,
    deleted_topics,
)

app = section()

Folder = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="Its folder, or a URI such as s3://bucket/archive.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFileRecord:
    """An archived log file."""

    broker: str
    log_file: int  #: the offset of its first byte
    messages: int
    topics: int
    left_out: int  #: records that are not archived, as those of delays and half messages
    log_bytes: int
    parquet_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedTopicRecord:
    """What an archive has of a topic."""

    topic: str
    broker: str
    queues: int
    messages: int
    first_day: str
    last_day: str
    parquet_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveCheckRecord:
    """The check of an archived log file."""

    broker: str
    log_file: int
    messages: int
    problems: tuple[str, ...]


@plain_command(
    app,
    "run",
    examples=(
        "orbitmq archive run orbitmq-data/broker-a --to archive",
        "orbitmq archive run /var/lib/orbitmq --to s3://bucket/archive --broker broker-a",
    ),
    prints=ArchivedFileRecord,
)
def run(
    data: Annotated[
        Path, typer.Argument(metavar="DATA_FOLDER", help="The folder of a broker, running or not.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="ARCHIVE", help="A folder, or a URI such as s3://bucket/archive."
        ),
    ],
    broker: Annotated[
        str | None,
        typer.Option("--broker", help="The broker's name; by default that of its folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Archive the closed log files of a broker that are not archived yet."""
    name = broker or data.absolute().name
    if topic_problem(name) is not None:
        raise Misused(f"{name!r} cannot be the name of a broker; give its name with --broker")
    closed = closed_log_files(data)
    entries = Entries(Location(to))
    lock = entries.location.lock(name)
    out = Printer(as_json)
    written = 0
    try:
        done = set(entries.log_files(name))
        if known := [file for file in closed if file.start in done]:
            check_same_log(entries.read(name, known[-1].start), known[-1])
        for file in closed:
            if file.start in done:
                continue
            for entry in archive_log_file(
                file,
                entries,
                name,
                writer=f"command {socket.gethostname()}:{os.getpid()}",
                deleted=deleted_topics(data),
            ):
                if entry is not None:
                    _say(out, entry)
            written += 1
    finally:
        if lock is not None:
            lock.release()
    if not as_json:
        out.line(
            f"{written} log files of {name} archived, {len(closed) - written} were before; the "
            "newest is archived when it is full"
        )


def _say(out: Printer, entry: LogEntry) -> None:
    record = ArchivedFileRecord(
        broker=entry.broker,
        log_file=entry.log_start,
        messages=sum(part.rows for part in entry.files),
        topics=len({part.topic for part in entry.files}),
        left_out=entry.left_out,
        log_bytes=entry.log_end - entry.log_start,
        parquet_bytes=sum(part.size for part in entry.files),
    )
    if out.is_json:
        out.record(record)
        return
    out.line(
        f"log file {record.log_file}: {count(record.messages)} messages of {record.topics} topics, "
        f"{size(record.log_bytes)} as {size(record.parquet_bytes)} of Parquet"
    )
    for first, end in entry.damaged:
        out.note(f"orbitmq: offsets {first} to {end} of the log hold no messages")


@plain_command(
    app,
    "list",
    examples=("orbitmq archive list archive", "orbitmq archive list archive --json"),
    prints=ArchivedTopicRecord,
)
def list_topics(archive: Folder, as_json: AsJson = False) -> None:
    """List the topics of an archive."""
    out = Printer(as_json)
    records = _topics(Catalog(Location(archive)).entries())
    if as_json:
        out.records(records)
        return
    out.table(
        Columns[ArchivedTopicRecord]()
        .text("topic", lambda each: each.topic)
        .text("broker", lambda each: each.broker)
        .number("queues", lambda each: count(each.queues))
        .number("messages", lambda each: count(each.messages))
        .text("first day", lambda each: each.first_day)
        .text("last day", lambda each: each.last_day)
        .number("Parquet", lambda each: size(each.parquet_bytes)),
        records,
        empty=f"nothing is archived in {archive}; archive with: orbitmq archive run",
    )


def _topics(entries: Sequence[LogEntry]) -> list[ArchivedTopicRecord]:
    parts = sorted(
        ((part.topic, entry.broker) for entry in entries for part in entry.files),
    )
    found = []
    for topic, broker in dict.fromkeys(parts):
        own = [
            part
            for entry in entries
            if entry.broker == broker
            for part in entry.files
            if part.topic == topic
        ]
        found.append(
            ArchivedTopicRecord(
                topic=topic,
                broker=broker,
                queues=len({queue.queue for part in own for queue in part.queues}),
                messages=sum(part.rows for part in own),
                first_day=min(part.day for part in own),
                last_day=max(part.day for part in own),
                parquet_bytes=sum(part.size for part in own),
            )
        )
    return found


@plain_command(
    app,
    "verify",
    examples=("orbitmq archive verify archive", "orbitmq archive verify s3://bucket/archive"),
    prints=ArchiveCheckRecord,
)
def verify(archive: Folder, as_json: AsJson = False) -> None:
    """Read all files of an archive and compare them with what was written."""
    out = Printer(as_json)
    catalog = Catalog(Location(archive))
    entries = Entries(catalog.location)
    bad = 0
    for entry in catalog.entries():
        problems = problems_of(entries, entry)
        bad += len(problems)
        _report(out, entry, problems)
    for before, after in pairwise(catalog.entries()):
        if before.broker == after.broker and before.log_end != after.log_start:
            bad += 1
            out.note(
                f"orbitmq: the log of {before.broker} from {before.log_end} to {after.log_start} "
                "is not archived: the broker deleted it before, or was not the writer"
            )
    for path in strays(entries, catalog.entries()):
        out.note(f"orbitmq: {path} belongs to no entry; if no run is at work, it may be deleted")
    if bad:
        raise CommandError(f"{bad} problems in the archive {archive}")
    if not as_json:
        files = sum(len(entry.files) for entry in catalog.entries())
        out.line(f"{count(files)} files of {len(catalog.entries())} log files are whole")


def _report(out: Printer, entry: LogEntry, problems: Sequence[str]) -> None:
    if out.is_json:
        out.record(
            ArchiveCheckRecord(
                broker=entry.broker,
                log_file=entry.log_start,
                messages=sum(part.rows for part in entry.files),
                problems=tuple(problems),
            )
        )
        return
    for problem in problems:
        out.line(problem)
