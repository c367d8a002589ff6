"""Long lists in windows: searched, sorted and cut here, so that a page asks for what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

from starlette.requests import Request

from orbitmq.console.answers import number
from orbitmq.console.errors import BadInput

Row = Mapping[str, Any]

MOST_ROWS = 500


#: A part of a list: how long that is, where the part begins, and what is in it.
Window = TypedDict("Window", {"total": int, "from": int, "rows": list[Row]})


def window(
    request: Request,
    rows: Iterable[Row],
    *,
    columns: Iterable[str],
    default: str,
    matches: Callable[[Row, str], bool] | None = None,
) -> Window:
    """The rows that a query means.

    `search` is part of a name; `sort` a column, with `-` in front for the largest first; `from` and
    `count` say which rows of the result.
    """
    params = request.query_params
    wanted = params.get("search", "").strip().lower()
    found = [row for row in rows if wanted in row["name"].lower()] if wanted else list(rows)
    if matches is not None and (choice := params.get("filter", "")):
        found = [row for row in found if matches(row, choice)]
    order = params.get("sort") or default
    column = order.removeprefix("-")
    if column not in columns:
        raise BadInput(f"sort must be one of {', '.join(columns)}, got {column[:40]!r}")
    found.sort(key=lambda row: row["name"])
    found.sort(key=lambda row: _place(row[column]), reverse=order.startswith("-"))
    start = number(request, "from", 0, 0, 10_000_000)
    count = number(request, "count", 100, 1, MOST_ROWS)
    return {"total": len(found), "from": start, "rows": found[start : start + count]}


def _place(value: Any) -> tuple[bool, Any]:
    """Sorts what is not known before everything else."""
    return (value is not None, value if value is not None else 0)
