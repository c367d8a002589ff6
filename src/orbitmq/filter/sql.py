"""SQL92 filters on message properties: compiled once, then asked for every message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.filter.errors import IncomparableValues
from orbitmq.filter.evaluate import compile_condition
from orbitmq.filter.grammar import parse
from orbitmq.filter.properties import lookup_in

if TYPE_CHECKING:
    from orbitmq.filter.evaluate import Condition
    from orbitmq.filter.properties import Properties


def compile_sql(text: str, *, lenient: bool = False) -> SqlFilter:
    """The filter that `text` describes; `InvalidFilter` names the place of a fault.

    Text after a complete expression is refused, unless `lenient` asks for what Apache does: ignore
    it. Expressions that are accepted either way mean the same either way.
    """
    parsed = parse(text, lenient=lenient)
    return SqlFilter(text, parsed.ignored_from, compile_condition(parsed.condition))


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A compiled expression."""

    text: str
    #: Where the text begins that does not belong to the expression; None when all of it does.
    ignored_from: int | None
    _condition: Condition = field(repr=False, compare=False)

    @property
    def needs_properties(self) -> bool:
        """Always: a queue entry tells nothing about them."""
        return True

    def accepts_code(self, tag_code: int) -> bool:
        """Always: whether the message matches is seen in its properties."""
        return True

    def accepts_properties(self, properties: Properties) -> bool:
        """Whether a message with these properties matches."""
        return self.matches(properties)

    def matches(self, properties: Properties) -> bool:
        """Whether the expression is true, and neither false, null nor impossible to evaluate."""
        try:
            return self._condition(lookup_in(properties)) is True
        except IncomparableValues:
            return False

    def evaluate(self, properties: Properties) -> bool | None:
        """True, false or null; `IncomparableValues` when a value cannot be read as needed."""
        return self._condition(lookup_in(properties))
