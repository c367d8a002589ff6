"""What goes wrong with a filter: it cannot be compiled, or it cannot judge a message."""

from __future__ import annotations

from orbitmq.errors import OrbitError

#: How much of the faulty line an error shows on either side of the fault.
_EXCERPT = 40


class InvalidFilter(OrbitError):
    """A subscription expression that is refused, with the place of the fault.

    `position` counts characters from 0; `line` and `column` count from 1, as editors do.
    """

    def __init__(self, reason: str, expression: str, position: int) -> None:
        self.reason = reason
        self.expression = expression
        self.position = position
        self.line = expression.count("\n", 0, position) + 1
        self.column = position - (expression.rfind("\n", 0, position) + 1) + 1
        super().__init__(
            f"{reason}, at line {self.line}, column {self.column}:\n{excerpt(expression, position)}"
        )


class IncomparableValues(OrbitError):
    """A message whose properties an expression cannot compare, so it does not match.

    Apache's broker logs an exception in this case and skips the message; so does ours.
    """

    def __init__(self, text: str, wanted: str) -> None:
        self.text = text
        self.wanted = wanted
        super().__init__(text, wanted)

    def __str__(self) -> str:
        # Put together only when somebody reads it: a filter may meet this on every message.
        return f"the value {self.text!r} is not {self.wanted}"


def excerpt(text: str, position: int) -> str:
    """The line around `position` and a caret below it, fit for a log whatever the text holds."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    end = len(text) if end < 0 else end
    cut_start = max(start, position - _EXCERPT)
    cut_end = min(end, position + _EXCERPT)
    before = ("..." if cut_start > start else "") + _printable(text[cut_start:position])
    after = _printable(text[position:cut_end]) + ("..." if cut_end < end else "")
    return f"  {before}{after}\n  {' ' * len(before)}^"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)
