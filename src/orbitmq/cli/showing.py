"""Prints the settings in force."""

from __future__ import annotations

import json
from collections.abc import Iterator

from orbitmq.cli.configuration import DEFAULT, Configuration

#: Longer values, of which there are few, push their origin to the right.
_VALUE_WIDTH = 24


def show(configuration: Configuration, *, only_changed: bool, as_json: bool) -> Iterator[str]:
    """The lines to print: a table, or one JSON object."""
    rows = [row for row in configuration.rows() if not only_changed or row.origin != DEFAULT]
    if as_json:
        table = {
            row.path: {"value": row.value, "origin": row.origin, "variable": row.variable}
            for row in rows
        }
        yield json.dumps(table, indent=2, ensure_ascii=False)
        return
    cells = [("setting", "value", "origin")]
    cells += [(row.path, json.dumps(row.value, ensure_ascii=False), row.origin) for row in rows]
    width = max(len(path) for path, _, _ in cells)
    for path, value, origin in cells:
        yield f"{path:<{width}}  {value:<{_VALUE_WIDTH}}  {origin}"
