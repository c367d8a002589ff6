"""Flags that choose brokers, queues, messages and times, the same in every command."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import typer

from orbitmq.cli.errors import Misused
from orbitmq.client.admin.errors import BadRequest
from orbitmq.client.admin.moments import moment
from orbitmq.client.queue import Queue

Broker: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--broker", "-b", metavar="NAME", help="Only on this broker; may be repeated."),
]
ClusterName: TypeAlias = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="Only on brokers of this cluster.")
]
TopicName: TypeAlias = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
GroupName: TypeAlias = Annotated[
    str, typer.Argument(metavar="GROUP", help="The consumer group's name.")
]
Queues: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="BROKER:ID", help="Only this queue; may be repeated."),
]
_TIME = "a date such as 2026-01-31T23:59:59, or an age such as 90s, 15m, 2h or 7d"
Since: TypeAlias = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help=f"Stored at or after: {_TIME}.")
]
Until: TypeAlias = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Stored before; as --since.")
]
Tags: TypeAlias = Annotated[
    str | None, typer.Option("--tags", metavar="'A || B'", help="Only with one of these tags.")
]
Sql: TypeAlias = Annotated[
    str | None,
    typer.Option("--sql", metavar="CONDITION", help='Only where this holds, as "a > 5" (SQL92).'),
]

_AGE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|min|h|d|w)")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def seconds(text: str, flag: str) -> float:
    """A duration: `90s`, `15m`, or a plain number of seconds. Raises `Misused`."""
    if found := _AGE.fullmatch(text.strip()):
        return float(found[1]) * _UNITS[found[2]]
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise Misused(f"{flag} must be a duration such as 90s, 15m, 2h or 7d, got {text!r}")
    return value


def check_positive(value: float | None, flag: str) -> None:
    """Refuse what is no rate and no pause; None is fine. Raises `Misused`."""
    if value is not None and not 0 < value < float("inf"):
        raise Misused(f"{flag} must be a number above 0, got {value!r}")


def time_of(text: str | None, now: float, flag: str, also: str = "") -> float | None:
    """A time as people write it, an age counted back from now. Raises `Misused`.

    `also` is what else the flag takes, for the refusal.
    """
    if text is None:
        return None
    if is_age(text):
        return now - seconds(text, flag)
    if text.strip().lower() == "now":
        return now
    try:
        return moment(text)
    except BadRequest as error:
        raise Misused(f"{flag} must be {also}{_TIME}, got {text!r}") from error


def is_age(text: str) -> bool:
    """Whether a time is written as so long before now."""
    return _AGE.fullmatch(text.strip()) is not None


def queues_of(topic: str, texts: Iterable[str] | None) -> tuple[Queue, ...] | None:
    """Queues as people write them, `broker-a:3`; None: none were named. Raises `Misused`."""
    if not texts:
        return None
    return tuple(queue_of(topic, text) for text in texts)


def queue_of(topic: str, text: str) -> Queue:
    """`broker-a:3`. Raises `Misused`."""
    broker, colon, number = text.rpartition(":")
    if not colon or not broker or not number.isdecimal():
        raise Misused(f"a queue is named as broker-a:3, got {text!r}")
    return Queue(topic, broker, int(number))


def filter_of(tags: str | None, sql: str | None) -> tuple[str, str]:
    """An expression and its type. Raises `Misused`."""
    if tags is not None and sql is not None:
        raise Misused("--tags and --sql cannot be given together")
    return (sql, "SQL92") if sql is not None else (tags or "*", "TAG")
