"""Which topic somebody meant who named one that is not there."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from orbitmq.errors import OrbitError
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.route import TopicList
from orbitmq.wire.codes import RequestCode

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine

#: How much two names have in common, from 0 to 1, before one is taken for a slip of the other.
_ALIKE: Final = 0.75


async def similar_topic(engine: Engine, topic: str) -> str | None:
    """The topic most like this one; None when none is, or when nobody says which there are."""
    try:
        answer = await engine.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        known = decode_body(TopicList, answer.body).topic_list
    except OrbitError:
        return None  # a hint is not worth another error
    close = difflib.get_close_matches(topic, [each for each in known if each != topic], 1, _ALIKE)
    return close[0] if close else None
