"""Asking a console how pipelines are."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from orbitmq.cli.errors import CommandError, Misused
from orbitmq.console import commandlines
from orbitmq.console.checks.faults import Fault
from orbitmq.console.pipelines import PipelineReport
from orbitmq.spark.consolelink import CONSOLE_VARIABLE, TOKEN_VARIABLE

_TIMEOUT = 5.0

ConsoleAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--console",
        metavar="URL",
        envvar=CONSOLE_VARIABLE,
        help=f"A console that pipelines report to; its token is read from {TOKEN_VARIABLE}.",
    ),
]


@dataclass(frozen=True, slots=True)
class Reported:
    """A pipeline as its console sees it now, by the console's clock."""

    name: str
    #: What it said last; the state is the console's word.
    report: PipelineReport
    reported_at: float
    faults: tuple[Fault, ...]


def checked_address(console: str) -> str:
    """The address of a console. Raises `Misused`."""
    parts = urllib.parse.urlsplit(console)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Misused(f"the address of a console begins with http:// or https://, got {console!r}")
    return f"{parts.scheme}://{parts.netloc}"


def reported_pipelines(console: str) -> list[Reported]:
    """What pipelines said last to a console. Raises `Misused` or `CommandError`."""
    found = _asked(f"{checked_address(console)}/api/v1/pipelines")
    try:
        return [
            Reported(
                each["name"],
                # What is shown has all that was reported.
                msgspec.convert(each, PipelineReport),
                each["reported_at"],
                tuple(
                    _with_address(fault, console)
                    for fault in msgspec.convert(each["faults"], tuple[Fault, ...])
                ),
            )
            for each in found["pipelines"]
        ]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise CommandError(f"{console} answers something else than a console would") from error


def forget_pipeline(console: str, name: str) -> None:
    """Take a pipeline off a console's list. Raises `Misused` or `CommandError`."""
    address = checked_address(console)
    headers = {}
    if not os.environ.get(TOKEN_VARIABLE):
        # One without a login lets everybody in who has been there before.
        headers["x-csrf-token"] = str(_asked(f"{address}/api/v1/me").get("csrf") or "")
    path = urllib.parse.quote(name, safe="")
    _asked(f"{address}/api/v1/pipelines/{path}", "DELETE", headers)


def _with_address(fault: Fault, console: str) -> Fault:
    """A console does not know by which name it is reached; who asked it does."""
    if fault.command != commandlines.show_pipeline(fault.subject):
        return fault
    return replace(fault, command=commandlines.show_pipeline(fault.subject, console))


def _asked(url: str, method: str = "GET", more: Mapping[str, str] | None = None) -> Any:
    """What a console answers; None where it has nothing to say."""
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {**(more or {}), **({"authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310  # of http and https only
    # A console is near; what stands between here and the rest of the world does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return None if answer.status == http.HTTPStatus.NO_CONTENT else json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.UNAUTHORIZED:
                raise CommandError(
                    f"the console wants to know who asks: set {TOKEN_VARIABLE} to its token"
                ) from error
            raise CommandError(f"the console answers: {_reason(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"no console answers at {url}: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    """Why a console refuses: in its own words, if it has some."""
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
