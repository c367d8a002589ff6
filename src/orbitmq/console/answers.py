"""Answers as JSON, and errors as sentences with a status."""

from __future__ import annotations

import logging
import math
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from orbitmq.client.admin import (
    BrokerNotFound,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    NotSupported,
    QueueNotFound,
    TopicNotFound,
)
from orbitmq.client.errors import BrokerUnavailable, NoNameServer
from orbitmq.console.errors import BadInput, ConsoleError, TooManyAttempts
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import RemotingError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The largest body of a request.
LARGEST = 4 * 1024 * 1024

_NOT_THERE = (
    BrokerNotFound,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    QueueNotFound,
    TopicNotFound,
)
_AWAY = (BrokerUnavailable, NoNameServer, RemotingError)


def answer(content: object, status: int = 200) -> Response:
    """Something as JSON."""
    return Response(_encode(content), status, media_type="application/json")


def failed(error: OrbitError) -> Response:
    """An error: its sentence, its kind, and whether trying again may help."""
    content = {
        "error": str(error),
        "kind": type(error).__name__,
        "retriable": error.retriable,
    }
    response = answer(content, status_of(error))
    if isinstance(error, TooManyAttempts):
        response.headers["retry-after"] = str(math.ceil(error.wait))
    return response


def status_of(error: OrbitError) -> int:
    if isinstance(error, ConsoleError):
        return error.status
    if isinstance(error, _NOT_THERE):
        return 404
    if isinstance(error, NotSupported):
        return 501
    return 502 if isinstance(error, _AWAY) else 400


async def told(request: Request, exception: Exception) -> Response:
    """The handler of everything that OrbitMQ raises on purpose."""
    if not isinstance(exception, OrbitError):
        raise exception
    if status_of(exception) >= 500:
        log.info("%s", exception, extra={"path": request.url.path})
    return failed(exception)


async def not_there(request: Request, exception: Exception) -> Response:
    """The handler of addresses that mean nothing, and of methods that they do not have."""
    if not isinstance(exception, HTTPException):
        raise exception
    content = {
        "error": f"{request.method} {request.url.path}: {exception.detail}",
        "kind": "NotThere",
        "retriable": False,
    }
    return answer(content, exception.status_code)


async def given(request: Request, kind: type[T], *, largest: int = LARGEST) -> T:
    """The body of a request. Raises `BadInput`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            raise BadInput(f"a request has {largest} bytes at most")
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise BadInput(str(error)) from error


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number of the query. Raises `BadInput`."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise BadInput(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return value


def text(request: Request, name: str) -> str | None:
    """A text of the query; None when it is empty."""
    return request.query_params.get(name) or None


def needed(request: Request, name: str) -> str:
    """A text of the query. Raises `BadInput`."""
    value = text(request, name)
    if value is None:
        raise BadInput(f"{name} must be given")
    return value


def _encode(content: object) -> bytes:
    return msgspec.json.encode(content, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise NotImplementedError(type(value))
