"""Dead letters: triage by reason, samples, replay with the outcome of each, export."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from orbitmq.client.admin import DeadLetterFilter, ExportFormat, ResendOutcome, ResendTo
from orbitmq.console import commandlines
from orbitmq.console.answers import answer, given, number, text
from orbitmq.console.api.groups import group_row
from orbitmq.console.api.shownmessages import shown_letter
from orbitmq.console.errors import BadInput
from orbitmq.console.notebooks import dead_letter_snippet
from orbitmq.console.parts import Parts, parts_of, who
from orbitmq.console.replays import Replay
from orbitmq.console.triage import triage

_MOST_LETTERS = 500
#: Outcomes in one answer; the rest are asked for by `from`.
_MOST_OUTCOMES = 1000


class Which(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which letters, and how they are sent."""

    reason: str | None = None
    topic: str | None = None
    key: str | None = None
    ids: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    count: int | None = None
    rate: float | None = None
    to: str = ResendTo.RETRY.value
    again: bool = False
    dry_run: bool = False

    @property
    def filter(self) -> DeadLetterFilter:
        return DeadLetterFilter(
            since=self.since,
            until=self.until,
            keys=(self.key,) if self.key else (),
            topic=self.topic,
            reason=self.reason,
            ids=self.ids,
        )


def _which(request: Request) -> Which:
    """The same, out of a query."""
    since, until = text(request, "since"), text(request, "until")
    try:
        return Which(
            reason=text(request, "reason"),
            topic=text(request, "topic"),
            key=text(request, "key"),
            since=None if since is None else float(since),
            until=None if until is None else float(until),
        )
    except ValueError as error:
        raise BadInput("since and until are seconds since the epoch") from error


async def groups(request: Request) -> Response:
    """The groups that have dead letters."""
    found = [group_row(each) for each in parts_of(request).snapshot.groups.values()]
    rows = [row for row in found if row["dead_letters"]]
    rows.sort(key=lambda row: (-row["dead_last_hour"], -row["dead_letters"], row["name"]))
    return answer({"rows": rows})


async def summary(request: Request) -> Response:
    """The piles of a group's letters, by reason, with a sample of each."""
    parts = parts_of(request)
    group = request.path_params["group"]
    which = _which(request)
    letters = parts.admin.dead_letters.list(group, which.filter, newest_first=True)
    async with aclosing(letters):
        found = await triage(letters, parts.clock.now())
    servers = ";".join(parts.settings.client.name_servers)
    return answer(
        {
            "group": group,
            "count": found.count,
            "is_complete": found.is_complete,
            "reasons": [
                {
                    "name": pile.name,
                    "count": pile.count,
                    "first_died_at": pile.first_died_at,
                    "last_died_at": pile.last_died_at,
                    "resent": pile.resent,
                    "topics": pile.topics,
                    "ages": pile.ages,
                    "sample": None if pile.sample is None else shown_letter(pile.sample),
                    "command": commandlines.resend_dead_letters(group, reason=pile.name, limit=10),
                    "notebook": dead_letter_snippet(servers, group, pile.name),
                }
                for pile in found.piles
            ],
            "commands": {
                "list": commandlines.list_dead_letters(group),
                "export": commandlines.export_dead_letters(group, f"{group}.parquet"),
            },
            "notebook": dead_letter_snippet(servers, group, None),
        }
    )


async def letters(request: Request) -> Response:
    """Letters, the newest first."""
    parts = parts_of(request)
    most = number(request, "count", 50, 1, _MOST_LETTERS)
    found = await parts.admin.dead_letters.sample(
        request.path_params["group"], most, _which(request).filter
    )
    return answer({"rows": [shown_letter(each) for each in found]})


async def replay(request: Request) -> Response:
    """Begin to send letters again; `dry_run` only says which."""
    parts = parts_of(request)
    group = request.path_params["group"]
    which = await given(request, Which)
    if which.to not in tuple(ResendTo):
        raise BadInput(f"to must be one of {', '.join(ResendTo)}")
    if which.rate is not None and which.rate <= 0:
        raise BadInput(f"rate must be above 0, got {which.rate}")
    if which.count is not None and which.count < 1:
        raise BadInput(f"count must be 1 or more, got {which.count}")
    command = commandlines.resend_dead_letters(
        group,
        reason=which.reason,
        topic=which.topic,
        limit=which.count,
        rate=which.rate,
        to=which.to,
        again=which.again,
    )
    if not which.dry_run:
        parts.check_write(command)
    begun = parts.replays.begin(
        group,
        which.filter,
        to=ResendTo(which.to),
        rate=which.rate,
        limit=which.count,
        again=which.again,
        dry_run=which.dry_run,
        who=who(request),
        command=command,
        now=parts.clock.now(),
    )
    return answer(shown_replay(begun), 202)


async def replays(request: Request) -> Response:
    """Resendings that are under way or over, the newest first."""
    found = parts_of(request).replays.all
    return answer({"replays": [shown_replay(each, outcomes=False) for each in found[:50]]})


async def one_replay(request: Request) -> Response:
    """How far one is, with outcomes from `from` on."""
    found = parts_of(request).replays.get(request.path_params["id"])
    return answer(shown_replay(found, start=number(request, "from", 0, 0, 10**9)))


async def end_replay(request: Request) -> Response:
    """Stop a resending; what was sent is sent."""
    parts = parts_of(request)
    return answer(shown_replay(await parts.replays.end(request.path_params["id"])))


def shown_replay(replay: Replay, *, outcomes: bool = True, start: int = 0) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": replay.id,
        "group": replay.group,
        "command": replay.command,
        "is_dry_run": replay.is_dry_run,
        "is_running": replay.is_running,
        "started_at": replay.started_at,
        "ended_at": replay.ended_at,
        "counts": replay.counts,
        "summary": replay.summary,
        "problem": replay.problem,
        "was_stopped": replay.was_stopped,
    }
    if outcomes:
        some = replay.outcomes[start : start + _MOST_OUTCOMES]
        shown["outcomes"] = [_outcome(each) for each in some]
    return shown


def _outcome(outcome: ResendOutcome) -> dict[str, Any]:
    return {
        "letter": outcome.letter.id,
        "id": outcome.letter.message.msg_id,
        "keys": outcome.letter.keys,
        "result": outcome.result,
        "topic": outcome.topic,
        "sent_as": outcome.sent_as,
        "problem": outcome.problem,
    }


async def export(request: Request) -> Response:
    """The letters in a file: `format` is `jsonl` or `parquet`."""
    parts: Parts = parts_of(request)
    group = request.path_params["group"]
    form = text(request, "format") or ExportFormat.JSONL.value
    if form not in tuple(ExportFormat):
        raise BadInput(f"format must be one of {', '.join(ExportFormat)}")
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="orbitmq-export-")
    path = Path(folder.name) / f"dead-letters.{form}"
    try:
        await parts.admin.dead_letters.export(group, path, _which(request).filter)
    except BaseException:
        folder.cleanup()
        raise
    return FileResponse(
        path,
        filename=f"{group}-dead-letters.{form}",
        media_type="application/octet-stream",
        background=BackgroundTask(folder.cleanup),
    )


routes = [
    Route("/dead-letters", groups),
    Route("/dead-letters/{group}", summary),
    Route("/dead-letters/{group}/letters", letters),
    Route("/dead-letters/{group}/export", export),
    Route("/dead-letters/{group}/replay", replay, methods=["POST"]),
    Route("/replays", replays),
    Route("/replays/{id}", one_replay, methods=["GET"]),
    Route("/replays/{id}", end_replay, methods=["DELETE"]),
]
