"""Requests about a group: its members as brokers list them, and what each member holds.

A broker lists the members that are connected to it, usually all of them. So a member is asked
through a broker that has listed it.

The answers do not depend on the topic, and tasks that ask the same at the same time share one
request. `after` says how new an answer must be, as counted by `asked`; by default newer than now.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import msgspec

from orbitmq.client.consumer.pull import is_access_denied
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import MASTER, Queue
from orbitmq.errors import BrokerRefused, ClientError, NotRunning, OrbitError
from orbitmq.logonce import LogAtIntervals
from orbitmq.remoting.settings import ConnectFailed, RequestTimedOut
from orbitmq.wire.bodies import (
    ConsumerConnection,
    ConsumerList,
    ConsumerRunningInfo,
    ConsumerStatus,
    ConsumeType,
    LanguageName,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    GetConsumerConnectionRequest,
    GetConsumerListRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
)
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.routes import TopicRoute
    from orbitmq.remoting.settings import Address
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers import Header


log = logging.getLogger(__name__)

#: The field in which OrbitMQ's brokers report inconsistencies of a group.
FINDINGS: Final = "findings"
#: A property of running info: the queues that a member claims (see `handover`).
CLAIMS: Final = "orbitmq.claims"
#: Another one: the queues that a member holds and is releasing.
LEAVING: Final = "orbitmq.leaving"

#: Seconds between two log lines for an inconsistency that lasts.
TELL_AGAIN: Final = 600.0

#: After as many requests without an answer a Java member is not asked any more.
MOST_UNANSWERED: Final = 3


class _Finding(msgspec.Struct, rename="camel"):
    text: str
    kind: str = ""
    topic: str | None = None
    client_id: str | None = None


class MemberSilent(ClientError):
    """A member that was asked through a broker and did not answer."""

    retriable = True

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        super().__init__(f"member {client_id!r} did not report what it holds")


@dataclass(frozen=True, slots=True)
class Listing:
    """The members of a group by the lists of several brokers: those in any of them."""

    members: frozenset[str]
    #: Whether all lists are equal.
    is_agreed: bool = True
    #: Whether no broker was too late with its list.
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Holdings:
    """The queues that a member reports, and that others must not begin."""

    held: frozenset[Queue]
    #: Those of them that it is releasing.
    leaving: frozenset[Queue] = frozenset()
    #: The queues that it claims.
    claimed: frozenset[Queue] = frozenset()


class GroupMembers:
    """Asks the brokers of a topic about the members of a group."""

    def __init__(
        self, engine: Engine, group: str, *, answer_within: float = 1.0, silence: float = 5.0
    ) -> None:
        """A silent broker is asked after all others for `silence` seconds."""
        self._engine = engine
        self._group = group
        self._answer_within = answer_within
        self._silence = silence
        #: The last list of each broker; it may have an id twice.
        self._lists: dict[Address, tuple[str, ...]] = {}
        #: Until when silent brokers are asked last.
        self._silent_until: dict[Address, float] = {}
        #: Unanswered requests to Java members, in a row.
        self._unanswered: dict[str, int] = {}
        #: Whether the account may ask members, as far as known.
        self.may_ask = True
        self._findings = LogAtIntervals(interval=TELL_AGAIN)
        self._questions = RequestCoalescer(engine.spawn)

    @property
    def asked(self) -> int:
        """The number of requests sent so far, for use as `after`."""
        return self._questions.sent

    async def of(self, topic: str) -> frozenset[str]:
        """The client ids that one broker of the topic lists. Raises `OrbitError`."""
        return (await self.listed(topic))[0]

    async def listed(
        self, topic: str, *, after: int | None = None
    ) -> tuple[frozenset[str], Address]:
        """The same, and the broker."""
        after = self.asked if after is None else after
        refused: ConnectFailed | None = None
        denied: BrokerRefused | None = None
        for broker in self._brokers(await self._engine.routes.get(topic)):
            try:
                within = self._engine.settings.request_timeout
                return await self._list(broker, within, after), broker
            except ConnectFailed as error:
                refused = refused or error
            except BrokerRefused as error:
                if not is_access_denied(error):
                    raise
                # Brokers have their own accounts: the next one may allow it.
                denied = error
        raise refused or denied or _no_address(topic)

    async def everywhere(
        self, topic: str, listed: frozenset[str], broker: Address, *, after: int | None = None
    ) -> Listing:
        """The list of one broker combined with those of the topic's other brokers."""
        after = self.asked if after is None else after
        route = await self._engine.routes.get(topic)
        others = [each for each in self._brokers(route) if each != broker]
        found = await asyncio.gather(*(self._listed_by(other, after) for other in others))
        lists = [listed, *(each for each in found if not isinstance(each, OrbitError))]
        members = frozenset[str]().union(*lists)
        return Listing(
            members,
            is_agreed=all(members == each for each in lists),
            is_whole=not any(isinstance(each, RequestTimedOut) for each in found),
        )

    async def _listed_by(self, broker: Address, after: int) -> frozenset[str] | OrbitError:
        """The list of a broker, or the error."""
        within = self._answer_within
        if self._is_silent(broker):
            return RequestTimedOut(broker, RequestCode.GET_CONSUMER_LIST_BY_GROUP, within)
        try:
            return await self._list(broker, within, after)
        except OrbitError as error:
            log.debug("%s does not list group %s: %s", broker, self._group, error)
            return error

    async def _list(self, broker: Address, within: float, after: int) -> frozenset[str]:
        try:
            # The shared request may have a longer limit.
            async with asyncio.timeout(within):
                return await self._questions.answer(
                    ("members", broker), after, lambda: self._ask_list(broker)
                )
        except TimeoutError:
            self._is_late(broker)
            code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
            raise RequestTimedOut(broker, code, within) from None

    async def _ask_list(self, broker: Address) -> frozenset[str]:
        try:
            answer = await self._engine.ask(
                broker,
                RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                GetConsumerListRequest(consumer_group=self._group),
                timeout=max(self._engine.settings.request_timeout, self._answer_within),
            )
        except RequestTimedOut:
            self._is_late(broker)
            raise
        except OrbitError:
            self._lists.pop(broker, None)
            raise
        self._silent_until.pop(broker, None)
        self._log_findings(answer.ext_fields.get(FINDINGS))
        listed = self._lists[broker] = decode_body(ConsumerList, answer.body).consumer_id_list
        for member in self._unanswered.keys() - set().union(*self._lists.values()):
            del self._unanswered[member]
        return frozenset(listed)

    def _is_late(self, broker: Address) -> None:
        self._silent_until[broker] = self._engine.clock.monotonic() + self._silence

    def _is_silent(self, broker: Address) -> bool:
        return self._engine.clock.monotonic() < self._silent_until.get(broker, float("-inf"))

    def _log_findings(self, text: str | None) -> None:
        """Log what a broker finds wrong with this group."""
        if text is None:
            return
        try:
            findings = msgspec.json.decode(text, type=list[_Finding])
        except msgspec.MsgspecError:
            # A field of the same name with another content.
            return
        for finding in findings:
            # Not by the text, which may change with every member that joins.
            what = f"{finding.kind} {finding.topic} {finding.client_id}"
            if self._findings.note(what, self._engine.clock.monotonic()):
                log.warning("%s", finding.text, extra={"group": self._group})

    async def as_counted(
        self, topic: str, members: Collection[str], *, after: int
    ) -> tuple[str, ...]:
        """The members in order, as often as all of them count them.

        A broker lists an id twice until it gives a dead connection up. Java members count it twice,
        ours do not.
        """
        most = Counter(members)
        for broker in self._brokers(await self._engine.routes.get(topic)):
            most |= Counter(each for each in self._lists.get(broker, ()) if each in most)
        if most.total() > len(most):
            try:
                languages = await self._languages(topic, members, after)
            except OrbitError as error:
                log.debug("the languages of members are not known: %s", error)
                languages = {}
            if all(languages.get(each) is LanguageName.PYTHON for each in members):
                return tuple(sorted(most))
        return tuple(sorted(most.elements()))

    async def java(
        self, topic: str, members: Collection[str], *, after: int | None = None
    ) -> dict[str, bool]:
        """Which of `members` are push consumers of Apache's Java client, as far as brokers know.

        Raises when no broker answers.
        """
        languages = await self._languages(topic, members, self.asked if after is None else after)
        return {member: each is LanguageName.JAVA for member, each in languages.items()}

    async def _languages(
        self, topic: str, members: Collection[str], after: int
    ) -> dict[str, LanguageName | None]:
        """The languages of members; None for a Java client that is no push consumer."""
        route = await self._engine.routes.get(topic)
        found: dict[str, LanguageName | None] = {}
        trouble: OrbitError | None = None
        for broker in sorted(self._brokers(route), key=lambda each: -self._lists_of(each, members)):
            try:
                found = await self._languages_at(broker, after) | found
            except OrbitError as error:
                trouble = trouble or error
            if found.keys() >= set(members):
                break
        if not found:
            raise trouble or _no_address(topic)
        return {member: found[member] for member in members if member in found}

    async def _languages_at(self, broker: Address, after: int) -> dict[str, LanguageName | None]:
        return await self._questions.answer(
            ("languages", broker), after, lambda: self._ask_languages(broker)
        )

    async def _ask_languages(self, broker: Address) -> dict[str, LanguageName | None]:
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GetConsumerConnectionRequest(consumer_group=self._group),
        )
        found = decode_body(ConsumerConnection, answer.body)
        is_pushed = found.consume_type is ConsumeType.CONSUME_PASSIVELY
        return {
            each.client_id: each.language
            if is_pushed or each.language is not LanguageName.JAVA
            else None
            for each in found.connection_set
            if each.client_id is not None
        }

    def _lists_of(self, broker: Address, members: Collection[str]) -> int:
        return len(set(members).intersection(self._lists.get(broker, ())))

    async def begun(self, client_id: str, topic: str) -> frozenset[Queue]:
        """The queues in which a Java member has a position. Raises when it does not answer.

        Some clients that call themselves Java's never answer; they are asked a few times.
        """
        # Requests for several topics at the same time are counted once.
        times = self._unanswered.get(client_id, 0) + 1
        if times > MOST_UNANSWERED:
            raise MemberSilent(client_id)
        try:
            answer = await self._ask_member(
                topic,
                client_id,
                RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
                GetConsumerStatusRequest(topic=topic, group=self._group, client_addr=client_id),
            )
        except RequestTimedOut:
            self._note_unanswered(client_id, times)
            raise
        tables = decode_body(ConsumerStatus, answer.body).consumer_table or {}
        if client_id not in tables:
            self._note_unanswered(client_id, times)
            raise MemberSilent(client_id)
        self._unanswered.pop(client_id, None)
        return frozenset(
            Queue(each.topic, each.broker_name, each.queue_id) for each in tables[client_id]
        )

    def _note_unanswered(self, client_id: str, times: int) -> None:
        if times == MOST_UNANSWERED and self._unanswered.get(client_id) != times:
            log.warning(
                "member %s of group %s does not report its queues, and is not asked any more: this "
                "member starts its former queues after the time of a hand-over",
                client_id,
                self._group,
                extra={"group": self._group, "client": client_id},
            )
        self._unanswered[client_id] = times

    async def holdings(self, client_id: str, topic: str, *, after: int | None = None) -> Holdings:
        """The queues of all topics that a member holds or claims. Raises when it does not answer.

        The answer is shared by topics with the same brokers.
        """
        route = await self._engine.routes.get(topic)
        return await self._questions.answer(
            ("holdings", client_id, frozenset(route.brokers)),
            self.asked if after is None else after,
            lambda: self._ask_holdings(client_id, topic),
        )

    async def _ask_holdings(self, client_id: str, topic: str) -> Holdings:
        answer = await self._ask_member(
            topic,
            client_id,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            GetConsumerRunningInfoRequest(consumer_group=self._group, client_id=client_id),
        )
        info = decode_body(ConsumerRunningInfo, answer.body)
        held = frozenset(
            Queue(each.topic, each.broker_name, each.queue_id) for each in info.mq_table
        )
        leaving = held.intersection(_queues_in(info.properties.get(LEAVING, "")))
        claims = frozenset(_queues_in(info.properties.get(CLAIMS, "")))
        return Holdings(held, leaving, claims)

    async def _ask_member(
        self, topic: str, client_id: str, code: RequestCode, header: Header
    ) -> Command:
        """Ask a member through a broker that has listed it, or else through another one."""
        route = await self._engine.routes.get(topic)
        trouble: OrbitError | None = None
        for broker in sorted(
            self._brokers(route), key=lambda each: -self._lists_of(each, (client_id,))
        ):
            try:
                answer = await self._engine.ask(broker, code, header, timeout=self._answer_within)
            except ConnectFailed as error:
                trouble = trouble or error
            except BrokerRefused as refused:
                if refused.code == ResponseCode.NO_PERMISSION:
                    self._is_forbidden(refused)
                if refused.code != ResponseCode.SYSTEM_ERROR:
                    raise
                # The answer of a broker without a connection to that member.
                trouble = refused
            else:
                self.may_ask = True
                return answer
        raise trouble or _no_address(topic)

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

    def _brokers(self, route: TopicRoute) -> Iterator[Address]:
        """One address for each broker of a topic, in random order, silent ones last."""
        chance = self._engine.chance
        names = list(route.brokers)
        chance.shuffle(names)
        found = [
            addresses.get(MASTER) or chance.choice(list(addresses.values()))
            for addresses in map(route.brokers.__getitem__, names)
            if addresses
        ]
        return iter(sorted(found, key=self._is_silent))


def _no_address(topic: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"of topic {topic}", "the route names no address")


def queues_text(queues: Iterable[Queue]) -> str:
    """Queues as the text of a property."""
    return msgspec.json.encode([(queue.topic, queue.broker, queue.id) for queue in queues]).decode()


def _queues_in(text: str) -> Iterator[Queue]:
    if not text:
        return
    try:
        found = msgspec.json.decode(text, type=list[tuple[str, str, int]])
    except msgspec.MsgspecError:
        # A property of the same name with another content.
        return
    for topic, broker, place in found:
        yield Queue(topic, broker, place)


# ---- shared requests


V = TypeVar("V")
#: Runs a coroutine in the background, under a name.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]

#: The number of answers kept.
_MOST = 256


class RequestCoalescer:
    """Sends one request for all tasks that ask the same. Belongs to the event loop.

    Some tasks need an answer to a request that was sent after an event, such as a claim. So
    requests are numbered, and a caller names the number that was `sent` at the event: a later
    answer is shared, an earlier one is not used.
    """

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        #: By subject: the number of the last request, and the task that has its answer.
        self._asked: dict[Hashable, tuple[int, asyncio.Task[Any]]] = {}
        #: The number of requests sent so far.
        self.sent = 0

    async def answer(
        self, subject: Hashable, after: int, ask: Callable[[], Coroutine[Any, Any, V]]
    ) -> V:
        """The answer to a request about `subject` that was not among the first `after`.

        An error is an answer as well. A caller that is cancelled leaves the request to the others.
        """
        number, task = self._asked.get(subject, (0, None))
        if task is None or number <= after:
            task = self._spawn(_outcome(ask), f"ask about {subject}")
            self.sent += 1
            self._asked.pop(subject, None)
            self._asked[subject] = (self.sent, task)
            if len(self._asked) > _MOST:
                del self._asked[next(iter(self._asked))]
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and not (current and current.cancelling()):
                # The client has stopped; this caller was not cancelled.
                raise NotRunning("this client", was_stopped=True) from None
            raise
        if isinstance(outcome, OrbitError):
            raise outcome
        return cast("V", outcome)


async def _outcome(ask: Callable[[], Coroutine[Any, Any, V]]) -> V | OrbitError:
    try:
        return await ask()
    except OrbitError as error:
        return error
