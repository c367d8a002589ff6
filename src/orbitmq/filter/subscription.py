"""The filter of a subscription, whichever language its expression is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orbitmq.errors import OrbitError
from orbitmq.filter.tags import parse_tags

if TYPE_CHECKING:
    from orbitmq.filter.properties import Properties

TAG = "TAG"
SQL92 = "SQL92"


class MessageFilter(Protocol):
    """What a reader of a queue asks: first by the queue entry, then, if needed, by the message."""

    @property
    def needs_properties(self) -> bool:
        """Whether the message itself has to be looked at."""

    def accepts_code(self, tag_code: int) -> bool:
        """Whether a message with this tag code may match."""

    def accepts_properties(self, properties: Properties) -> bool:
        """Whether a message with these properties, decoded or as stored, may match."""


class UnknownFilterType(OrbitError):
    """A subscription in a filter language that does not exist, or is not installed."""


def compile_filter(
    expression: str | None, expression_type: str | None = None, *, lenient: bool = False
) -> MessageFilter:
    """The filter for a subscription as it came over the wire; no type means tags."""
    if not expression_type or expression_type == TAG:
        return parse_tags(expression)
    if expression_type != SQL92:
        raise UnknownFilterType(
            f"there is no filter type {expression_type!r}; use {TAG} or {SQL92}"
        )
    try:
        from orbitmq.filter.sql import compile_sql  # noqa: PLC0415  # tags need no grammar
    except ModuleNotFoundError as missing:
        if missing.name != "lark":
            raise
        raise UnknownFilterType(
            f"{SQL92} filters need a parser that is not installed: pip install 'orbitmq[broker]'"
        ) from missing
    return compile_sql(expression or "", lenient=lenient)
