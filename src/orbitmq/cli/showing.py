"""Prints the settings in force."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orbitmq.cli.configuration import DEFAULT, Configuration, Row
from orbitmq.cli.describing import Description, describe
from orbitmq.cli.errors import SettingRefused
from orbitmq.cli.jsonoutput import line_of
from orbitmq.cli.schema import all_settings

#: Longer values, of which there are few, push their origin to the right.
_VALUE_WIDTH = 24
_TEXT_WIDTH = 96
_INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRecord:
    """A setting in force."""

    setting: str
    value: Any  #: null when there is none; a secret is hidden
    origin: str  #: default, a file, a variable of the environment or a flag
    variable: str  #: of the environment, which sets it
    meaning: str
    allowed: str
    unit: str

    @classmethod
    def of(cls, row: Row) -> SettingRecord:
        described = describe(all_settings()[row.path])
        return cls(
            setting=row.path,
            value=row.value,
            origin=row.origin,
            variable=row.variable,
            meaning=described.meaning,
            allowed=described.allowed,
            unit=described.unit,
        )


def show(
    configuration: Configuration,
    *,
    under: str = "",
    only_changed: bool = False,
    with_descriptions: bool = False,
    as_json: bool = False,
) -> Iterator[str]:
    """The lines to print: a table, what each setting means, or an object of JSON for each.

    `under` is a setting, or a part of its path that names several. Raises `SettingRefused`.
    """
    rows = [
        row
        for row in configuration.rows()
        if _is_under(row.path, under) and (not only_changed or row.origin != DEFAULT)
    ]
    if under and not any(_is_under(path, under) for path in all_settings()):
        raise SettingRefused(
            f"no setting is {under!r} or below it; orbitmq config show lists all of them"
        )
    if as_json:
        yield from (line_of(SettingRecord.of(row)) for row in rows)
    elif with_descriptions:
        yield from _as_text(rows)
    else:
        yield from _as_table(rows)


def _is_under(path: str, under: str) -> bool:
    return not under or path == under or path.startswith(under.rstrip(".") + ".")


def _as_text(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        described = describe(all_settings()[row.path])
        yield f"{row.path} = {json.dumps(row.value, ensure_ascii=False)}  ({row.origin})"
        for text in (described.meaning, f"{allowed(described)}; {row.variable}"):
            yield from textwrap.wrap(
                text, _TEXT_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
            )


def allowed(described: Description) -> str:
    """What a setting may be, with its unit."""
    unit = f" ({described.unit})" if described.unit else ""
    return f"{described.allowed}{unit}"


def _as_table(rows: Sequence[Row]) -> Iterator[str]:
    cells = [("setting", "value", "origin")]
    cells += [(row.path, json.dumps(row.value, ensure_ascii=False), row.origin) for row in rows]
    width = max(len(path) for path, _, _ in cells)
    for path, value, origin in cells:
        yield f"{path:<{width}}  {value:<{_VALUE_WIDTH}}  {origin}"
