"""Who is in a group, as a broker sees it, and what a member holds, as it says itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.queue import Queue
from orbitmq.client.topicroute import MASTER
from orbitmq.remoting.errors import ConnectFailed
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.membership import ConsumerList
from orbitmq.wire.bodies.stats import ConsumerRunningInfo
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.membership import GetConsumerListRequest
from orbitmq.wire.headers.stats import GetConsumerRunningInfoRequest

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.topicroute import TopicRoute
    from orbitmq.remoting.address import Address
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers.base import Header

#: A property of running info: the queues that a member is about to begin (see `handover`).
CLAIMS: Final = "orbitmq.claims"


class GroupMembers:
    """Asks brokers of a topic about the members of a group."""

    def __init__(self, engine: Engine, group: str, *, answer_within: float = 1.0) -> None:
        self._engine = engine
        self._group = group
        self._answer_within = answer_within

    async def of(self, topic: str) -> tuple[str, ...]:
        """The client ids that a broker of the topic lists, as it lists them. Raises."""
        answer = await self._ask(
            topic,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            GetConsumerListRequest(consumer_group=self._group),
            self._engine.settings.request_timeout,
        )
        return decode_body(ConsumerList, answer.body).consumer_id_list

    async def holdings(self, client_id: str, topic: str) -> frozenset[Queue]:
        """The queues that a member holds, or is about to begin. Raises when it does not say."""
        answer = await self._ask(
            topic,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            GetConsumerRunningInfoRequest(consumer_group=self._group, client_id=client_id),
            self._answer_within,
        )
        info = decode_body(ConsumerRunningInfo, answer.body)
        held = {Queue(each.topic, each.broker_name, each.queue_id) for each in info.mq_table}
        return frozenset(held.union(_claims_in(info.properties.get(CLAIMS, ""))))

    async def _ask(self, topic: str, code: RequestCode, header: Header, within: float) -> Command:
        """Ask any broker of a topic; another one only when nobody can be reached there."""
        refused: ConnectFailed | None = None
        for address in self._brokers(await self._engine.routes.get(topic)):
            try:
                return await self._engine.ask(address, code, header, timeout=within)
            except ConnectFailed as error:
                refused = refused or error
        raise refused or BrokerUnavailable(f"of topic {topic}", "the route names no address")

    def _brokers(self, route: TopicRoute) -> Iterator[Address]:
        chance = self._engine.chance
        names = list(route.brokers)
        chance.shuffle(names)
        for name in names:
            addresses = route.brokers[name]
            if addresses:
                yield addresses.get(MASTER) or chance.choice(list(addresses.values()))


def claims_text(queues: Iterable[Queue]) -> str:
    """Claims as a property."""
    return msgspec.json.encode([(queue.topic, queue.broker, queue.id) for queue in queues]).decode()


def _claims_in(text: str) -> Iterator[Queue]:
    if not text:
        return
    try:
        found = msgspec.json.decode(text, type=list[tuple[str, str, int]])
    except msgspec.MsgspecError:
        # Somebody else's property: then there are no claims.
        return
    for topic, broker, place in found:
        yield Queue(topic, broker, place)
