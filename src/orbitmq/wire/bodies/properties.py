"""Bodies of configuration requests: text that Java's `Properties` reads and RocketMQ writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

#: A key ends at the first separator that no backslash protects.
_KEY = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)


def parse_properties(text: str) -> dict[str, str]:
    """`key=value` lines; also with `:` or blanks between them, comments, and continued lines."""
    found: dict[str, str] = {}
    for line in _logical_lines(text):
        match = _KEY.match(line)
        if match is not None:
            found[_unescaped(match[1])] = _unescaped(match[2])
    return found


def format_properties(values: Mapping[str, str]) -> str:
    """One `key=value` line each, sorted. RocketMQ escapes nothing, so neither do we."""
    return "".join(f"{name}={value}\n" for name, value in sorted(values.items()))


def _logical_lines(text: str) -> Iterator[str]:
    pending = ""
    for line in re.split(r"\r\n|\r|\n", text):
        line = line.lstrip(" \t\f")
        if not pending and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending += line[:-1]
            continue
        yield pending + line
        pending = ""
    if pending:
        yield pending


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    escaped = match[1]
    if len(escaped) == 5:
        return chr(int(escaped[1:], 16))
    return _LETTERS.get(escaped, escaped)
