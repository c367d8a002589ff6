"""Who changed what, when and with which outcome: a line of JSON for each change, in a file."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from orbitmq.cli.errors import CommandError

#: What follows them is not written down.
_SECRETS = frozenset({"--secret-key"})


def append(file: Path, words: Sequence[str], *, at: float, problem: str | None) -> None:
    """Add a line; several commands may do so at once. Raises `CommandError`."""
    line = {
        "at": round(at, 3),
        "user": _user(),
        "host": socket.gethostname(),
        "command": ["orbitmq", *without_secrets(words)],
        "problem": problem,
    }
    data = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    try:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            # In one piece: appended lines of others stay whole, too.
            os.write(target, data)
        finally:
            os.close(target)
    except OSError as error:
        raise CommandError(f"the change cannot be written down in {file}: {error}") from error


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command as they may be shown."""
    shown: list[str] = []
    hides_next = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if hides_next:
            shown.append("(hidden)")
        elif equals and flag in _SECRETS:
            shown.append(f"{flag}=(hidden)")
        else:
            shown.append(word)
        hides_next = not hides_next and word in _SECRETS
    return shown


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A container's user need not have a name.
        return str(os.getuid())
