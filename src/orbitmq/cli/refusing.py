"""What is said of a value that a flag cannot have: the value, and what is allowed.

Typer has values checked by pydantic since 0.20 or so, whose texts speak of inputs and parsing, and
leave out what was given. Older releases check for themselves and say it well; those are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What each kind of refusal means to somebody at a command line.
_ALLOWED: Mapping[str, str] = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number that is not so large",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
}
_BOUNDS: Mapping[str, str] = {
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} at most",
}


def reword(error: Any) -> None:
    """Give an error of the command's parser our words; who prints it names the flag itself.

    `error` is of click's classes, of Typer's own or of click itself by Typer's release.
    """
    found = getattr(error.__cause__, "errors", None)
    if not callable(found) or not hasattr(error, "message"):
        return
    problems = found()
    if not problems:
        return
    error.message = _sentence(problems[0], str(error.message), _range(error))


def _sentence(problem: Mapping[str, Any], said: str, bounds: str) -> str:
    kind, got = str(problem["type"]), problem["input"]
    if kind == "value_error":
        # Typer's own words, about choices.
        return said.removeprefix("Value error, ")
    if kind in _ALLOWED:
        return f"must be {_ALLOWED[kind]}{bounds}, got {got!r}"
    if kind in _BOUNDS:
        return f"must be {bounds[2:] or _BOUNDS[kind].format_map(problem['ctx'])}, got {got!r}"
    return f"{said}, got {got!r}"


def _range(error: Any) -> str:
    """`, from 1 to 26` or `, 1 or more`, if the flag has bounds."""
    described = getattr(getattr(error, "param", None), "type_descriptor", None)
    info = getattr(described, "parameter_info", None)
    least, most = getattr(info, "min", None), getattr(info, "max", None)
    if least is None and most is None:
        return ""
    if least is None:
        return f", {most} at most"
    return f", {least} or more" if most is None else f", from {least} to {most}"
