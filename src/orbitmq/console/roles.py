"""Roles of the console's users, and what each may do: the one table of it.

Needs no web framework. docs/console.md has the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class Role(enum.StrEnum):
    """The role of a user; a later one may do all that an earlier one may."""

    READER = "reader"
    OPERATOR = "operator"
    ADMIN = "admin"


class Right(enum.StrEnum):
    """What a session may do."""

    LOOK = "look"
    SEND = "send"
    RESEND = "resend"
    PROGRESS = "progress"
    PIPELINES = "pipelines"
    DECODERS = "decoders"
    ALERTS = "alerts"
    TOPICS = "topics"
    MASKED = "masked"
    ACCESS = "access"


@dataclass(frozen=True, slots=True)
class Rule:
    """Who has a right."""

    about: str  #: completes "may"
    least: Role  #: the first role that has it
    #: Whether the console must have been started with `--write`.
    is_change: bool = True
    #: Whether a session without a user has it: on loopback, or with the console's password.
    is_for_all: bool = True


RULES: Final[Mapping[Right, Rule]] = {
    Right.LOOK: Rule("see everything but masked fields", Role.READER, is_change=False),
    Right.SEND: Rule("send messages, and send them again", Role.OPERATOR),
    Right.RESEND: Rule("resend dead letters", Role.OPERATOR),
    Right.PROGRESS: Rule("reset, skip and clone progress, pause and resume groups", Role.OPERATOR),
    Right.PIPELINES: Rule("take pipelines off the list", Role.OPERATOR),
    Right.DECODERS: Rule("choose how bodies are read", Role.OPERATOR, is_change=False),
    Right.ALERTS: Rule("silence alerts, and test webhooks", Role.OPERATOR),
    Right.TOPICS: Rule("create, change and delete topics", Role.ADMIN),
    Right.MASKED: Rule("see masked fields", Role.ADMIN, is_change=False, is_for_all=False),
    Right.ACCESS: Rule(
        "manage users and end sessions", Role.ADMIN, is_change=False, is_for_all=False
    ),
}

_ORDER: Final = tuple(Role)


def has_right(role: Role | None, right: Right) -> bool:
    """Whether a role has a right; None: a session without a user."""
    rule = RULES[right]
    if role is None:
        return rule.is_for_all
    return _ORDER.index(role) >= _ORDER.index(rule.least)
