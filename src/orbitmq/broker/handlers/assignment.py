"""Which queues are whose, for consumers that have the broker work it out (400).

Java clients from 5.0 on ask so when `setClientRebalance(false)` is set, any broker of the topic, at
every rebalance. The answer follows from what the members would work out by themselves: all queues
of the topic that may be read, wherever they are, the client ids of the group, and the strategy. So
members that ask and members that do not share a group.

Queues are pulled here; popping is not served. Where a share cannot be told the request is refused,
and the client keeps what it has. Apache's broker answers success without a word then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orbitmq.broker import names
from orbitmq.broker.errors import Refused
from orbitmq.broker.parts import Parts
from orbitmq.broker.permissions import may_read
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.membership import (
    Assignments,
    MessageModel,
    QueryAssignment,
    QueueAssignment,
)
from orbitmq.wire.bodies.route import MessageQueue, QueueData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: How old a route may be: the members of a group ask one after the other.
_ROUTE_LIFE = 5.0
_MOST_ROUTES = 10_000
#: Of a name that somebody else has chosen, this much is shown and kept.
_SHOWN = 128

#: The share of the member at a place, of so many members.
_Strategy = Callable[[Sequence[MessageQueue], int, int], Sequence[MessageQueue]]
#: Queues that may be read, by topic, or why they cannot be told.
_Found = tuple[MessageQueue, ...] | Refused


@dataclass(frozen=True, slots=True)
class _Route:
    asked_at: float
    queues: asyncio.Task[_Found]


class Assigning:
    """Tells members of groups their queues."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._routes: dict[str, _Route] = {}
        self._refused = Reminders()

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.QUERY_ASSIGNMENT: self.query}

    async def query(self, _: Connection, request: Command) -> Command:
        """The queues of one member."""
        asked = decode_body(QueryAssignment, request.body)
        is_shared = asked.message_model is not MessageModel.BROADCASTING
        strategy = self._strategy(asked) if is_shared else None
        queues = await self._queues(asked.topic)
        if isinstance(queues, Refused):
            raise Refused(queues.code, str(queues))
        if strategy is not None:
            queues = self._share(asked, strategy, queues)
        assignments = tuple(QueueAssignment(message_queue=queue) for queue in queues)
        return request.answer(
            ResponseCode.SUCCESS,
            body=encode_body(Assignments(message_queue_assignments=assignments)),
        )

    def _strategy(self, asked: QueryAssignment) -> _Strategy:
        """The strategy by its name; of a group that has none of ours the log tells, too."""
        try:
            return _strategy(asked.strategy_name)
        except Refused as refused:
            self._tell(asked, refused)
            raise

    def _tell(self, asked: QueryAssignment, refused: Refused) -> None:
        """Say why a group will not get any message; else only the log of the client would."""
        group = names.shown(asked.consumer_group, _SHOWN)
        if count := self._refused.note(group, self._parts.clock.monotonic()):
            log.warning(
                "a consumer is told no queues: %s (time %d)",
                refused,
                count,
                extra={"group": group, "client": names.shown(asked.client_id, _SHOWN)},
            )

    def _share(
        self, asked: QueryAssignment, strategy: _Strategy, queues: Sequence[MessageQueue]
    ) -> tuple[MessageQueue, ...]:
        members = self._parts.consumers.members(asked.consumer_group)
        ids = sorted((member.client.id for member in members), key=_java_order)
        if asked.client_id not in ids:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"{names.shown(asked.client_id)} is not a member of group "
                f"{names.shown(asked.consumer_group)!r} here; send a heartbeat first",
            )
        ordered = sorted(queues, key=lambda each: (_java_order(each.broker_name), each.queue_id))
        return tuple(strategy(ordered, ids.index(asked.client_id), len(ids)))

    # Routes.

    async def _queues(self, topic: str) -> _Found:
        now = self._parts.clock.monotonic()
        route = self._routes.get(topic)
        if route is None or (now - route.asked_at >= _ROUTE_LIFE and route.queues.done()):
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            found = self._parts.loop.create_task(self._look_up(topic))
            route = self._routes[topic] = _Route(now, found)
        # For all who ask meanwhile, of whom one may go.
        return await asyncio.shield(route.queues)

    async def _look_up(self, topic: str) -> _Found:
        parts = self._parts
        try:
            route = await parts.registration.route(topic)
        except Refused as refused:
            return refused
        if route is not None:
            return tuple(queue for data in route.queue_datas for queue in _readable(topic, data))
        # Without a name server there is no other broker.
        config = parts.topics.get(topic)
        if config is None:
            return Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{names.shown(topic)}] not exist")
        own = QueueData(
            broker_name=parts.settings.name,
            perm=config.perm & parts.settings.permission,
            read_queue_nums=config.read_queue_nums,
        )
        return tuple(_readable(topic, own))


def _readable(topic: str, data: QueueData) -> list[MessageQueue]:
    if not may_read(data.perm):
        return []
    return [
        MessageQueue(topic=topic, broker_name=data.broker_name, queue_id=number)
        for number in range(data.read_queue_nums)
    ]


# Members that work their share out do it by `client.consumer.allocation`: both have to agree.


def _java_order(text: str) -> bytes:
    """Sorts texts as Java does."""
    return text.encode("utf-16-be", "surrogatepass")


def _in_pages(queues: Sequence[MessageQueue], place: int, members: int) -> Sequence[MessageQueue]:
    size, left = divmod(len(queues), members)
    start = place * size + min(place, left)
    return queues[start : start + size + (place < left)]


def _in_turn(queues: Sequence[MessageQueue], place: int, members: int) -> Sequence[MessageQueue]:
    return queues[place::members]


_STRATEGIES: Mapping[str, _Strategy] = {"AVG": _in_pages, "AVG_BY_CIRCLE": _in_turn}


def _strategy(name: str | None) -> _Strategy:
    found = _STRATEGIES.get(name or "")
    if found is None:
        raise Refused(
            ResponseCode.INVALID_PARAMETER,
            f"allocation strategy {names.shown(name or '', _SHOWN)!r} is not known to the broker, "
            f"which knows {' and '.join(_STRATEGIES)}; choose one of these, or have the client "
            "work its share out (setClientRebalance(true))",
        )
    return found
