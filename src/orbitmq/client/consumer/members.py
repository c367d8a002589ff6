"""Who is in a group, as a broker sees it, and what a member holds, as it says itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from orbitmq.client.errors import BrokerRefused, BrokerUnavailable, ClientError
from orbitmq.client.queue import Queue
from orbitmq.client.topicroute import MASTER
from orbitmq.remoting.errors import ConnectFailed
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.membership import (
    ConsumerConnection,
    ConsumerList,
    ConsumeType,
    LanguageName,
)
from orbitmq.wire.bodies.offsets import ConsumerStatus
from orbitmq.wire.bodies.stats import ConsumerRunningInfo
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.membership import (
    GetConsumerConnectionRequest,
    GetConsumerListRequest,
)
from orbitmq.wire.headers.stats import GetConsumerRunningInfoRequest, GetConsumerStatusRequest

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.topicroute import TopicRoute
    from orbitmq.remoting.address import Address
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers.base import Header

log = logging.getLogger(__name__)

#: The field in which our brokers tell what is wrong inside a group (see `broker.findings`).
FINDINGS: Final = "findings"
#: A property of running info: the queues that a member is about to begin (see `handover`).
CLAIMS: Final = "orbitmq.claims"


#: While something is wrong inside a group, it is told again after so many seconds.
TELL_AGAIN: Final = 600.0


class _Finding(msgspec.Struct, rename="camel"):
    text: str
    kind: str = ""
    topic: str | None = None
    client_id: str | None = None


class MemberSilent(ClientError):
    """A member that was asked through a broker, and did not say anything."""

    retriable = True

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        super().__init__(f"member {client_id!r} did not say what it holds")


class GroupMembers:
    """Asks brokers of a topic about the members of a group."""

    def __init__(self, engine: Engine, group: str, *, answer_within: float = 1.0) -> None:
        self._engine = engine
        self._group = group
        self._answer_within = answer_within
        #: Whether brokers allow members to be asked, as far as is known.
        self.may_ask = True
        self._findings = Reminders(interval=TELL_AGAIN)

    async def of(self, topic: str) -> tuple[str, ...]:
        """The client ids that a broker of the topic lists, as it lists them. Raises."""
        return (await self.listed(topic))[0]

    async def listed(self, topic: str) -> tuple[tuple[str, ...], Address]:
        """The same, and which broker has listed them."""
        answer, broker = await self._ask_any(
            topic,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            GetConsumerListRequest(consumer_group=self._group),
            self._engine.settings.request_timeout,
        )
        self._tell_findings(answer.ext_fields.get(FINDINGS))
        return decode_body(ConsumerList, answer.body).consumer_id_list, broker

    def _tell_findings(self, told: str | None) -> None:
        """What a broker finds wrong with this group: else nobody would hear of it but operators."""
        if told is None:
            return
        try:
            findings = msgspec.json.decode(told, type=list[_Finding])
        except msgspec.MsgspecError:
            # Somebody else's field.
            return
        for finding in findings:
            # Not by its text: who is in it may change with every member that joins.
            what = f"{finding.kind} {finding.topic} {finding.client_id}"
            if self._findings.note(what, self._engine.clock.monotonic()):
                log.warning("%s", finding.text, extra={"group": self._group})

    async def java(self, topic: str) -> frozenset[str]:
        """The members that are push consumers of Apache's Java client. Raises."""
        answer = await self._ask(
            topic,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GetConsumerConnectionRequest(consumer_group=self._group),
            self._engine.settings.request_timeout,
        )
        found = decode_body(ConsumerConnection, answer.body)
        if found.consume_type is not ConsumeType.CONSUME_PASSIVELY:
            return frozenset()
        return frozenset(
            each.client_id
            for each in found.connection_set
            if each.client_id is not None and each.language is LanguageName.JAVA
        )

    async def begun(self, client_id: str, topic: str) -> frozenset[Queue]:
        """The queues in which a Java member has a position. Raises when it does not say."""
        answer = await self._ask_member(
            topic,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
            GetConsumerStatusRequest(topic=topic, group=self._group, client_addr=client_id),
        )
        tables = decode_body(ConsumerStatus, answer.body).consumer_table or {}
        if client_id not in tables:
            raise MemberSilent(client_id)
        return frozenset(
            Queue(each.topic, each.broker_name, each.queue_id) for each in tables[client_id]
        )

    async def holdings(self, client_id: str, topic: str) -> frozenset[Queue]:
        """The queues that a member holds, or is about to begin. Raises when it does not say."""
        answer = await self._ask_member(
            topic,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            GetConsumerRunningInfoRequest(consumer_group=self._group, client_id=client_id),
        )
        info = decode_body(ConsumerRunningInfo, answer.body)
        held = {Queue(each.topic, each.broker_name, each.queue_id) for each in info.mq_table}
        return frozenset(held.union(_claims_in(info.properties.get(CLAIMS, ""))))

    async def _ask_member(self, topic: str, code: RequestCode, header: Header) -> Command:
        try:
            answer = await self._ask(topic, code, header, self._answer_within)
        except BrokerRefused as refused:
            if refused.code == ResponseCode.NO_PERMISSION:
                self._is_forbidden(refused)
            raise
        self.may_ask = True
        return answer

    def _is_forbidden(self, refused: BrokerRefused) -> None:
        if not self.may_ask:
            return
        self.may_ask = False
        log.warning(
            "members of group %s may not ask each other what they hold, so a queue that changes "
            "hands is begun after %g s, whether or not a handler of its former owner still runs; "
            "allow them Get on the group beside Sub: %s",
            self._group,
            self._answer_within,
            refused,
            extra={"group": self._group},
        )

    async def _ask(self, topic: str, code: RequestCode, header: Header, within: float) -> Command:
        return (await self._ask_any(topic, code, header, within))[0]

    async def _ask_any(
        self, topic: str, code: RequestCode, header: Header, within: float
    ) -> tuple[Command, Address]:
        """Ask any broker of a topic; another one only when nobody can be reached there."""
        refused: ConnectFailed | None = None
        for address in self._brokers(await self._engine.routes.get(topic)):
            try:
                return await self._engine.ask(address, code, header, timeout=within), address
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
