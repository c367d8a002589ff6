"""Attributes of topics (`+key=value` sets, `-key` removes), and permissions.

A change is a text, or a map whose keys have the sign. It is applied or refused as a whole, because
an attribute may be fixed when the topic is created. Attributes that Apache's brokers act on and
this one does not are refused, with the reason; one in an Apache broker's file is kept
(`without_effect`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from orbitmq.broker.errors import Refused
from orbitmq.wire.codes import ResponseCode


@dataclass(frozen=True, slots=True)
class Attribute:
    """A key that topics may have: one of `choices`, or without any a number from `lowest` on."""

    default: str
    is_changeable: bool
    choices: frozenset[str] = frozenset()
    lowest: int = 0
    #: Values that Apache's brokers accept, and what this one does instead.
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def accepts(self, value: str) -> bool:
        if self.choices:
            return value in self.choices
        digits = value.removeprefix("-") if value[:1] == "-" else value.removeprefix("+")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            return False
        return self.lowest <= int(value) < 2**63

    @property
    def allowed(self) -> str:
        return ", ".join(sorted(self.choices)) or f"a whole number from {self.lowest}"


MESSAGE_TYPE = "message.type"
MIXED = "MIXED"

TOPIC_ATTRIBUTES: Mapping[str, Attribute] = {
    "queue.type": Attribute(
        "SimpleCQ",
        False,
        frozenset({"SimpleCQ"}),
        unsupported={"BatchCQ": "this broker has an entry in the queue for every message"},
    ),
    "cleanup.policy": Attribute(
        "DELETE",
        False,
        frozenset({"DELETE"}),
        unsupported={
            "COMPACTION": "this broker does not compact, it deletes messages by time and size"
        },
    ),
    MESSAGE_TYPE: Attribute(
        "NORMAL",
        True,
        frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", MIXED}),
    ),
    "reserve.time": Attribute("-1", True, lowest=-1),
}

#: Apache has none for groups yet.
GROUP_ATTRIBUTES: Mapping[str, Attribute] = {}


def parse_changes(text: str | None) -> dict[str, str]:
    """`+a=1,-b` as a map with signed keys."""
    changes: dict[str, str] = {}
    for piece in text.split(",") if text else ():
        key, equals, value = piece.partition("=")
        if key[:1] != ("+" if equals else "-") or (equals and (not value or "=" in value)):
            _refuse(f"attribute change {piece!r} is not of the form +key=value or -key")
        if key in changes:
            _refuse(f"attribute {key[1:]!r} is changed twice")
        changes[key] = value
    return changes


def changed_attributes(
    known: Mapping[str, Attribute],
    present: Mapping[str, str] | None,
    changes: Mapping[str, str],
) -> dict[str, str]:
    """The attributes after `changes`; `present` is None for what is being created."""
    attributes = dict(present or {})
    seen: set[str] = set()
    for signed, value in changes.items():
        sign, key = signed[:1], signed[1:]
        if sign not in ("+", "-") or not key or "+" in key or "-" in key:
            _refuse(f"attribute key {signed!r} must be + or - and a name without them")
        if key in seen:
            _refuse(f"attribute {key!r} is changed twice")
        seen.add(key)
        attribute = known.get(key)
        if attribute is None:
            _refuse(
                f"unsupported attribute {key!r}; known are {', '.join(sorted(known)) or 'none'}"
            )
        if present is None and sign == "-":
            _refuse(f"attribute {key!r} cannot be taken away from what does not exist yet")
        if present is not None and not attribute.is_changeable:
            _refuse(f"attribute {key!r} is fixed when the topic is created")
        if sign == "-":
            if key not in attributes:
                _refuse(f"attribute {key!r} is not set and cannot be taken away")
            del attributes[key]
        else:
            if not attribute.accepts(value):
                reason = attribute.unsupported.get(value)
                _refuse(
                    f"attribute {key!r} must be {attribute.allowed}, got {value!r}"
                    + (f": {reason}" if reason else "")
                )
            attributes[key] = value
    return attributes


def without_effect(known: Mapping[str, Attribute], present: Mapping[str, str]) -> Iterator[str]:
    """Attributes that an Apache broker would act on and this one does not, as `key=value`."""
    for key, value in present.items():
        attribute = known.get(key)
        if attribute is not None and value in attribute.unsupported:
            yield f"{key}={value}"


def _refuse(remark: str) -> NoReturn:
    raise Refused(ResponseCode.SYSTEM_ERROR, remark)


# Permissions: bits on the wire, letters for people.


class Perm(enum.IntFlag):
    """Bits of a permission. Other bits are kept and mean nothing."""

    #: Topics that are created by sending use this one as their template.
    INHERIT = 1
    WRITE = 2
    READ = 4
    PRIORITY = 8


READ_WRITE = int(Perm.READ | Perm.WRITE)

#: The index of the read bit in a group's forbidden bits.
READ_BIT = 2

_READ = int(Perm.READ)
_WRITE = int(Perm.WRITE)
_INHERIT = int(Perm.INHERIT)


def may_read(perm: int) -> bool:
    """Whether consumers may pull."""
    return perm & _READ != 0


def may_write(perm: int) -> bool:
    """Whether producers may send."""
    return perm & _WRITE != 0


def is_inherited(perm: int) -> bool:
    """Whether it is a template for topics made by sending."""
    return perm & _INHERIT != 0
