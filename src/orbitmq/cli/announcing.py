"""What is printed when something listens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import typer

from orbitmq.cli.serving import Listening

Announce = Callable[[Sequence[Listening]], None]


def announcing(*, as_json: bool) -> Announce:
    return _as_json if as_json else _as_text


def _as_text(listening: Sequence[Listening]) -> None:
    width = max(len(one.name) for one in listening)
    for one in listening:
        folder = f"  data in {one.folder}" if one.folder else ""
        typer.echo(f"{one.name:<{width}}  {one.address}{folder}")
    typer.echo("ready; Ctrl-C stops")


def _as_json(listening: Sequence[Listening]) -> None:
    for one in listening:
        typer.echo(json.dumps({"event": "listening", **asdict(one)}))
    typer.echo(json.dumps({"event": "ready"}))
