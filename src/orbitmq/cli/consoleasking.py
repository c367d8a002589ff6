"""Asking a console how pipelines are."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from orbitmq.cli.errors import CommandError, Misused
from orbitmq.console.pipelines import Pipeline, PipelineReport
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


def reported_pipelines(console: str) -> list[Pipeline]:
    """What pipelines said last to a console. Raises `Misused` or `CommandError`."""
    parts = urllib.parse.urlsplit(console)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Misused(f"the address of a console begins with http:// or https://, got {console!r}")
    found = _asked(f"{parts.scheme}://{parts.netloc}/api/v1/pipelines")
    try:
        return [
            # What is shown has all that was reported.
            Pipeline(each["name"], msgspec.convert(each, PipelineReport), each["reported_at"])
            for each in found["pipelines"]
        ]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise CommandError(f"{console} answers something else than a console would") from error


def _asked(url: str) -> Any:
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # of http and https only
    # A console is near; what stands between here and the rest of the world does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.UNAUTHORIZED:
                raise CommandError(
                    f"the console wants to know who asks: set {TOKEN_VARIABLE} to its token"
                ) from error
            raise CommandError(f"the console answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"no console answers at {url}: {error}") from error
