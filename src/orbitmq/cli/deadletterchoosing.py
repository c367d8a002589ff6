"""The flags that say which dead letters a command is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from orbitmq.cli.choosing import time_of
from orbitmq.client.admin.deadletters import DeadLetterFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which dead letters; all that is given must hold."""

    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Died at or after: a date, or 2h for 2 h ago."
        ),
    ] = None
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Died before; as --since.")
    ] = None
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Has this key; may be repeated.")
    ] = None
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Was sent to this topic.")] = (
        None
    )
    reason: Annotated[
        str | None, typer.Option("--reason", help="Its reason contains this, in any case.")
    ] = None
    pile: Annotated[
        str | None,
        typer.Option("--pile", metavar="LINE", help="The first line of its reason is just this."),
    ] = None
    min_attempts: Annotated[
        int | None, typer.Option("--min-attempts", min=0, help="Tried so often at least.")
    ] = None
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", min=0, help="Tried so often at most.")
    ] = None
    letter: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            help="Has this id, which all letters of a message share, or this offset id, which one "
            "has; may be repeated.",
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
