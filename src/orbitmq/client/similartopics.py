"""Which topic somebody meant who named one that is not there.

A cluster may have ten thousand topics, and to compare two names well takes a tenth of a
millisecond. So only those are compared that have most of their beginning and end in common with the
name, as slips of it have; and not on the event loop.
"""

from __future__ import annotations

import asyncio
import difflib
import heapq
import operator
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Protocol

from orbitmq.client.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, is_system_topic
from orbitmq.client.namespaces import SEPARATOR
from orbitmq.errors import OrbitError
from orbitmq.wire.bodies import TopicList
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.wire.command import Command

#: How much two names have in common, from 0 to 1, before one is taken for a slip of the other.
_ALIKE: Final = 0.75
#: Names of which the shorter one is not even this much of the longer one are never that alike.
_SHORTER: Final = _ALIKE / (2 - _ALIKE)
#: As many names are compared at most.
_COMPARED: Final = 100


class AsksNameServers(Protocol):
    """Whoever can ask name servers: the engine of a client, or an admin."""

    async def ask_name_server(self, code: int, /) -> Command: ...


async def similar_topic(asking: AsksNameServers, topic: str) -> str | None:
    """The topic most like this one; None when none is, or when nobody says which there are."""
    if not _may_be_meant(topic):
        return None  # nobody has typed it
    try:
        answer = await asking.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        known = decode_body(TopicList, answer.body).topic_list
    except OrbitError:
        return None  # a hint is not worth another error
    return await asyncio.to_thread(most_similar, topic, known)


def most_similar(topic: str, known: Iterable[str]) -> str | None:
    """The most similar of the topics that somebody may have meant, if there is one."""
    space, name = _split(topic)
    names = [rest for each in known if _may_be_meant(each) for rest in _within(space, each)]
    likely = [each for each in names if each != name and _is_as_long(each, name)]
    nearest = heapq.nlargest(_COMPARED, likely, key=lambda each: _common(each, name))
    close = difflib.get_close_matches(name, nearest, 1, _ALIKE)
    return space + close[0] if close else None


def _may_be_meant(topic: str) -> bool:
    """Whether an application has made it for its messages."""
    return not topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) and not is_system_topic(topic)


def _within(space: str, topic: str) -> tuple[str, ...]:
    """The name of a topic in a namespace; nothing if it is in another."""
    own, name = _split(topic)
    return (name,) if own == space else ()


def _split(topic: str) -> tuple[str, str]:
    """The namespace with its separator, and the name in it."""
    space, separator, name = topic.rpartition(SEPARATOR)
    return space + separator, name


def _is_as_long(one: str, other: str) -> bool:
    return len(one) >= _SHORTER * len(other) and len(other) >= _SHORTER * len(one)


def _common(one: str, other: str) -> int:
    """How many characters are the same from the beginning on, and back from the end."""
    return _same(one, other) + _same(reversed(one), reversed(other))


def _same(one: Iterable[str], other: Iterable[str]) -> int:
    """How many characters are the same until the first that is not."""
    return sum(1 for _ in takewhile(bool, map(operator.eq, one, other)))
