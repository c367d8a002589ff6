"""A fault: something that is wrong, in words, with the command that looks into it or mends it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote


class Check(enum.StrEnum):
    """What is looked at; a fault belongs to one of these."""

    NAME_SERVERS = "name servers"
    BROKERS = "brokers"
    ADDRESSES = "advertised addresses"
    DISKS = "disks"
    HEALTH = "health"
    ROOM = "room for topics and groups"
    TOPICS = "topics"
    CLOCKS = "clocks"
    SUBSCRIPTIONS = "subscriptions"
    CLIENT_IDS = "client ids"
    STUCK_QUEUES = "stuck queues"
    UNBALANCED = "unbalanced groups"
    ENDLESS_RETRIES = "endless retries"
    UNATTENDED = "unattended groups"
    FALLING_BEHIND = "falling behind"
    DEAD_LETTERS = "dead letters"
    GROUP_SETTINGS = "group settings"
    PIPELINES = "pipelines"
    JAVA = "Java"
    WORKERS = "Python of workers"


class Weight(enum.StrEnum):
    """How soon it needs a hand."""

    BAD = "bad"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    check: Check
    #: In a word or two.
    kind: str
    weight: Weight
    #: What it is about, and where the page shows it.
    subject: str
    link: str = "/"
    text: str
    #: What to do about it.
    remedy: str
    command: str | None = None


def page_of(place: str, name: str) -> str:
    """Where the page shows something, whatever is in its name."""
    return f"/{place}/{quote(name, safe='')}"


def sorted_faults(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The worst first, those of one kind together."""
    return tuple(sorted(faults, key=lambda fault: (fault.weight, fault.kind)))


def gathered(faults: Iterable[Fault], shown: int = 5) -> list[Mapping[str, object]]:
    """Faults by kind, how many there are and the first of them.

    Forty groups without consumers are one thing that happened and not forty.
    """
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    return [
        {"kind": kind, "weight": some[0].weight, "count": len(some), "faults": some[:shown]}
        for kind, some in kinds.items()
    ]
