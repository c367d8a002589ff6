"""A topic or group that nobody has, told with the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from orbitmq.cli.errors import CommandError
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import GroupNotFound, TopicNotFound
from orbitmq.errors import OrbitError


async def unknown(
    admin: AsyncAdmin, error: TopicNotFound | GroupNotFound, remedy: str | None = None
) -> CommandError:
    """The error to end with. `remedy` is said instead of how to make one, if nothing is alike."""
    if isinstance(error, TopicNotFound):
        name, sentence = error.topic, f"no broker has topic {error.topic!r}"
    else:
        name, sentence = error.group, f"no broker knows group {error.group!r}"
    try:
        if isinstance(error, TopicNotFound):
            known = [each.name for each in await admin.topics.list()]
        else:
            known = [each.group for each in await admin.groups.list()]
    except OrbitError:
        known = []  # the hint is not worth another error
    if hint := closest(name, known):
        return CommandError(sentence + hint)
    return CommandError(str(error) if remedy is None else f"{sentence}; {remedy}")


def closest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: which of the known ones was probably meant; empty when none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; do you mean {close[0]}?" if close else ""
