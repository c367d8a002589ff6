"""What a setting means, in which unit it is, and what it may be.

The meaning is what the comment beside the field says (`#:`), so that there is one place to write it
and nothing to keep in step. Where the sources are not at hand, in a bundle of compiled files, there
are no descriptions, and everything else is the same.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orbitmq.cli.schema import SECTIONS, Setting, nested_class, types_of

_field = re.compile(r"    (\w+): .*?(?:#: ?(.*))?$").fullmatch
_comment = re.compile(r"    #: ?(.*)").fullmatch
#: What is for tools and not for readers.
_remark = re.compile(r"\s*# .*")

#: Whole numbers that count bytes, besides those that say so.
_BYTES = frozenset(
    {
        *("max_record", "preallocate_step", "recovery_chunk", "max_gap", "memory_distance"),
        *("tail_memory", "frame", "header", "ext_key", "ext_value", "inflated", "index_catch_up"),
        "index_step",
    }
)
_EPOCH = frozenset({"accept_from"})


@dataclass(frozen=True, slots=True)
class Description:
    """What is told about a setting."""

    meaning: str  #: empty when nobody wrote it down
    allowed: str
    unit: str  #: empty where there is none


def describe(setting: Setting) -> Description:
    """What is told about a setting."""
    *above, name = setting.fields
    holder: type = type(SECTIONS[setting.section])
    for step in above:
        holder = nested_class(types_of(holder)[step]) or holder
    return Description(comments_of(holder).get(name, ""), setting.kind.allowed, _unit(setting))


def _unit(setting: Setting) -> str:
    name, allowed = setting.fields[-1], setting.kind.allowed
    if name in _EPOCH:
        return "seconds since 1970"
    if name.endswith("ratio"):
        return "share, 0 to 1"
    if "whole number" in allowed:
        return "bytes" if name in _BYTES or {"bytes", "size"} & set(name.split("_")) else ""
    return "seconds" if "a number" in allowed else ""


@functools.cache
def comments_of(settings_class: type) -> Mapping[str, str]:
    """The comment on every field that has one."""
    try:
        lines = inspect.getsource(settings_class).splitlines()
    except (OSError, TypeError):
        return {}
    return dict(_comments(lines))


def _comments(lines: list[str]) -> Iterator[tuple[str, str]]:
    above: list[str] = []
    for line in lines:
        if (comment := _comment(line)) is not None:
            above.append(comment[1])
        elif (found := _field(line)) is not None:
            text = " ".join([*above, *([found[2]] if found[2] else [])])
            above = []
            if text := _remark.sub("", text).strip():
                yield found[1], _sentence(text)
        elif not line.strip():
            above = []


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
