"""Dead letters: triage by reason, samples, resending with the outcome of each, export."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from orbitmq.client.admin.deadletters import (
    DeadLetterFilter,
    ExportFormat,
    ResendOutcome,
    ResendTo,
    looked_up,
)
from orbitmq.console import words
from orbitmq.console.api.groups import group_row
from orbitmq.console.api.messages import letter_row
from orbitmq.console.http import answer, int_param, pick, read_body, text_param
from orbitmq.console.resends import Replay, triage
from orbitmq.console.roles import Right
from orbitmq.console.settings import BadInput
from orbitmq.console.state import ConsoleState, actor_of, check_right, state_of, view_of
from orbitmq.console.words import Action, dead_letter_snippet

_MOST_LETTERS = 500
#: Outcomes in one answer; `from` selects the next ones.
_MOST_OUTCOMES = 1000
#: The end of the year 9999: later times cannot be recorded.
_LAST_MOMENT = 253_402_300_799.0


class LetterChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which letters: all given conditions must hold."""

    pile: str | None = None  #: the first line of their reason
    reason: str | None = None  #: a part of it
    topic: str | None = None
    key: str | None = None
    ids: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    min_attempts: int | None = None
    max_attempts: int | None = None

    @property
    def filter(self) -> DeadLetterFilter:
        """Raises `BadInput` or `BadRequest`."""
        for name in ("since", "until"):
            moment = getattr(self, name)
            if moment is not None and not 0 <= moment <= _LAST_MOMENT:
                raise BadInput(f"{name} must be seconds since the epoch, got {moment}")
        return DeadLetterFilter(
            since=self.since,
            until=self.until,
            keys=(self.key,) if self.key else (),
            topic=self.topic,
            reason=self.reason,
            pile=self.pile,
            min_attempts=self.min_attempts,
            max_attempts=self.max_attempts,
            ids=self.ids,
        )


class ResendRequest(LetterChoice, forbid_unknown_fields=True, kw_only=True):
    """Which letters, and how they are sent."""

    count: int | None = None
    rate: float | None = None
    to: str = ResendTo.RETRY.value
    again: bool = False
    dry_run: bool = False

    def command(self, group: str) -> str:
        """The command that does the same. Raises `BadInput`."""
        if self.to not in tuple(ResendTo):
            raise BadInput(f"to must be one of {', '.join(ResendTo)}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise BadInput(f"rate must be above 0, got {self.rate}")
        if self.count is not None and self.count < 1:
            raise BadInput(f"count must be 1 or more, got {self.count}")
        return words.command(
            Action.RESEND_DEAD_LETTERS,
            group,
            where=self.filter,
            limit=self.count,
            rate=self.rate,
            to=self.to,
            again=self.again,
            dry_run=self.dry_run,
        )


def _which(request: Request) -> LetterChoice:
    """The choice in a query."""
    names = LetterChoice.__struct_fields__
    found = {
        name: value for name in names if name != "ids" and (value := text_param(request, name))
    }
    try:
        return msgspec.convert(found, LetterChoice, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from error


async def groups(request: Request) -> Response:
    """The groups that have dead letters."""
    found = [group_row(each) for each in state_of(request).snapshot.groups.values()]
    rows = [row for row in found if row["dead_letters"]]
    rows.sort(key=lambda row: (-row["open_last_hour"], -row["open_letters"], row["name"]))
    return answer({"rows": rows})


async def summary(request: Request) -> Response:
    """The piles of a group's letters, by reason, with a sample of each.

    `reason`, `topic`, `key`, `since`, `until`, `min_attempts` and `max_attempts` choose.
    """
    state, view = state_of(request), view_of(request)
    group = request.path_params["group"]
    where = _which(request).filter
    letters = state.admin.dead_letters.list(group, where, newest_first=True)
    async with aclosing(letters):
        found = await triage(letters, state.clock.now(), state.collector.resent_letters(group))
    snapshot = state.collector.snapshot
    sample = None if snapshot is None else snapshot.groups.get(group)
    known = 0 if sample is None else sample.dead_letters
    if where == DeadLetterFilter() and found.is_complete and found.count != known:
        # Something died since the last look: all pages are to show the same number.
        state.collector.look_soon(configuration=not known)
    servers = state.settings.client.name_servers
    return answer(
        {
            "group": group,
            "count": found.count,
            "open": found.open,
            "is_complete": found.is_complete,
            "reasons": [
                pick(
                    pile,
                    "name count open first_died_at last_died_at resent topics ages",
                    sample=None if pile.sample is None else letter_row(pile.sample, view),
                    notebook=dead_letter_snippet(servers, group, where, pile.name),
                    command=state.command(
                        Action.LIST_DEAD_LETTERS, group, where=replace(where, pile=pile.name)
                    ),
                    commands={
                        "resend": state.command(
                            Action.RESEND_DEAD_LETTERS, group, where=replace(where, pile=pile.name)
                        ),
                        "sample": state.command(
                            Action.RESEND_DEAD_LETTERS,
                            group,
                            where=replace(where, pile=pile.name),
                            limit=10,
                        ),
                    },
                )
                for pile in found.piles
            ],
            "commands": {
                "list": state.command(Action.LIST_DEAD_LETTERS, group, where=where),
                "resend": state.command(Action.RESEND_DEAD_LETTERS, group, where=where),
                "summary": state.command(Action.COUNT_DEAD_LETTERS, group, where=where),
                "export": state.command(
                    Action.EXPORT_DEAD_LETTERS, group, f"{group}.parquet", where=where
                ),
            },
            "notebook": dead_letter_snippet(servers, group, where),
        }
    )


async def letters(request: Request) -> Response:
    """Letters, the newest first, and when each was sent again."""
    state, view = state_of(request), view_of(request)
    group = request.path_params["group"]
    most = int_param(request, "count", 50, 1, _MOST_LETTERS)
    where = _which(request).filter
    found = await state.admin.dead_letters.sample(group, most, where)
    return answer(
        {
            "rows": [
                letter_row(each, view) | {"resent_at": None if copy is None else copy.stored_at}
                for each, copy in await looked_up(state.admin.messages, found)
            ],
            "command": state.command(
                Action.LIST_DEAD_LETTERS, group, where=where, newest=True, limit=most
            ),
        }
    )


async def replay_command(request: Request) -> Response:
    """The command for a request; starts nothing."""
    command = (await read_body(request, ResendRequest)).command(request.path_params["group"])
    return answer({"command": state_of(request).for_cluster(command)})


async def replay(request: Request) -> Response:
    """Begin to send letters again; with `dry_run` only list them."""
    state = state_of(request)
    group = request.path_params["group"]
    wanted = await read_body(request, ResendRequest)
    command = state.for_cluster(wanted.command(group))
    if not wanted.dry_run:
        check_right(request, Right.RESEND, command)
    outcomes = state.admin.dead_letters.resending(
        group,
        wanted.filter,
        to=ResendTo(wanted.to),
        rate=wanted.rate,
        limit=wanted.count,
        again=wanted.again,
        dry_run=wanted.dry_run,
    )
    begun = state.replays.begin(
        group, outcomes, dry_run=wanted.dry_run, who=actor_of(request), command=command
    )
    return answer(shown_replay(begun), 202)


async def replays(request: Request) -> Response:
    """Resendings, running or ended, the newest first."""
    found = state_of(request).replays.all
    return answer({"replays": [shown_replay(each, outcomes=False) for each in found[:50]]})


async def one_replay(request: Request) -> Response:
    """One resending, with its outcomes from `from` on."""
    found = state_of(request).replays.get(request.path_params["id"])
    return answer(shown_replay(found, start=int_param(request, "from", 0, 0, 10**9)))


async def end_replay(request: Request) -> Response:
    """Stop a resending; what was sent stays sent. A dry run needs no write rights."""
    state = state_of(request)
    found = state.replays.get(request.path_params["id"])
    if not found.is_dry_run:
        check_right(request, Right.RESEND, "Ctrl-C where it runs")
    was_running = found.is_running
    ended = await state.replays.end(found.id)
    if was_running and not found.is_dry_run:
        # Its outcome is noted under the actor that began it.
        await state.audit.note(actor_of(request), found.command, "stopped by hand")
    return answer(shown_replay(ended))


def shown_replay(replay: Replay, *, outcomes: bool = True, start: int = 0) -> dict[str, Any]:
    shown = pick(
        replay,
        "id group command is_dry_run is_running started_at ended_at counts summary problem"
        " was_stopped",
    )
    if outcomes:
        some = replay.outcomes[start : start + _MOST_OUTCOMES]
        shown["outcomes"] = [_outcome(each) for each in some]
    return shown


def _outcome(outcome: ResendOutcome) -> dict[str, Any]:
    return pick(
        outcome,
        "result topic sent_as problem",
        letter=outcome.letter.id,
        id=outcome.letter.message.msg_id,
        keys=outcome.letter.keys,
    )


async def export(request: Request) -> Response:
    """The letters in a file: `format` is `jsonl` or `parquet`."""
    state: ConsoleState = state_of(request)
    group = request.path_params["group"]
    form = text_param(request, "format") or ExportFormat.JSONL.value
    if form not in tuple(ExportFormat):
        raise BadInput(f"format must be one of {', '.join(ExportFormat)}")
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="orbitmq-export-")
    path = Path(folder.name) / f"dead-letters.{form}"
    try:
        view = view_of(request)
        await state.admin.dead_letters.export(
            group, path, _which(request).filter, body=lambda letter: view.body(letter.message)
        )
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
    Route("/dead-letters/{group}/replay/command", replay_command, methods=["POST"]),
    Route("/replays", replays),
    Route("/replays/{id}", one_replay, methods=["GET"]),
    Route("/replays/{id}", end_replay, methods=["DELETE"]),
]
