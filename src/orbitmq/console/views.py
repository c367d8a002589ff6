"""The addresses of the views: those that a browser may be opened or reloaded at.

The script draws them; it has the same table (`VIEWS` in `main.js`). Everything else is an address
that means nothing, and is answered so: tools that look for metrics or files go by the status.
"""

from __future__ import annotations

from typing import Final

#: A name in braces stands for any text without a slash, as it is written in the address.
VIEWS: Final = (
    "/",
    "/topics",
    "/topics/{topic}",
    "/groups",
    "/groups/{group}",
    "/messages",
    "/dead-letters",
    "/dead-letters/{group}",
    "/progress",
    "/consumers",
    "/consumers/{group}",
    "/consumers/{group}/{client}",
    "/charts",
    "/send",
    "/topology",
    "/pipelines",
    "/pipelines/{name}",
    "/brokers",
    "/audit",
)


def is_view(address: str) -> bool:
    """Whether a view has this address: a path as it was asked for, not decoded."""
    parts = (address.rstrip("/") or "/").split("/")
    return any(_fits(pattern.split("/"), parts) for pattern in VIEWS)


def _fits(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(
        bool(part) if name.startswith("{") else name == part
        for name, part in zip(pattern, parts, strict=True)
    )
