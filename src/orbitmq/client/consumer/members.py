"""Who is in a group, as brokers see it, and what a member holds, as it says itself.

A broker knows the members that are connected to it, and nobody else. As a rule all are connected to
every broker of a topic; when that is not so, and what follows, is in `survey`. Here it means that a
member is asked through a broker that has listed it.

Neither a list nor what a member holds is a matter of a topic: whoever has the same question at the
same time shares the answer (`sharedquestions`; `after` says how new it has to be, as counted by
`asked`; unless given, newer than now).
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

#: The field in which our brokers tell what is wrong inside a group (see `broker.findings`).
FINDINGS: Final = "findings"
#: A property of running info: the queues that a member is about to begin (see `handover`).
CLAIMS: Final = "orbitmq.claims"
#: Another one: the queues that a member holds, and is letting go of.
LEAVING: Final = "orbitmq.leaving"

#: While something is wrong inside a group, it is told again after so many seconds.
TELL_AGAIN: Final = 600.0

#: How often a Java member is asked for its positions without an answer; then it is so no more.
MOST_UNANSWERED: Final = 3


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


@dataclass(frozen=True, slots=True)
class Listing:
    """Who is in a group by the lists of several brokers: whoever is in one of them."""

    #: An id as often as the list has it that has it most often.
    members: tuple[str, ...]
    #: Whether the lists name the same members, each as often.
    is_agreed: bool = True
    #: Whether no broker kept its list to itself that may still be there.
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Holdings:
    """What stands against the claims of others, as a member says."""

    held: frozenset[Queue]
    #: Those of them of which it says that it is letting go.
    leaving: frozenset[Queue] = frozenset()
    #: The queues that it is about to begin.
    claimed: frozenset[Queue] = frozenset()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a broker says of a member."""

    language: LanguageName | None
    is_pushed: bool


class GroupMembers:
    """Asks brokers of a topic about the members of a group."""

    def __init__(
        self, engine: Engine, group: str, *, answer_within: float = 1.0, silence: float = 5.0
    ) -> None:
        """A broker that did not answer is asked after all others for the time of `silence`."""
        self._engine = engine
        self._group = group
        self._answer_within = answer_within
        self._silence = silence
        #: Whom each broker has listed last.
        self._lists: dict[Address, frozenset[str]] = {}
        #: When brokers that did not answer in time are asked like the others again.
        self._silent_until: dict[Address, float] = {}
        #: How often Java members were asked since they answered last, and when that was noted last.
        self._unanswered: dict[str, tuple[int, float]] = {}
        #: Whether brokers allow members to be asked, as far as is known.
        self.may_ask = True
        self._findings = LogAtIntervals(interval=TELL_AGAIN)
        self._questions = RequestCoalescer(engine.spawn)

    @property
    def asked(self) -> int:
        """How many questions were sent so far; what is asked `after` that is newer than now."""
        return self._questions.sent

    async def of(self, topic: str) -> tuple[str, ...]:
        """The client ids that a broker of the topic lists, as it lists them. Raises."""
        return (await self.listed(topic))[0]

    async def listed(
        self, topic: str, *, after: int | None = None
    ) -> tuple[tuple[str, ...], Address]:
        """The same, and which broker has listed them."""
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
                # Brokers have accounts of their own: the next one may let us in.
                denied = error
        raise refused or denied or _nobody_to_ask(topic)

    async def everywhere(
        self, topic: str, listed: tuple[str, ...], broker: Address, *, after: int | None = None
    ) -> Listing:
        """What a broker has listed, and what the others of the topic list beside it."""
        after = self.asked if after is None else after
        route = await self._engine.routes.get(topic)
        others = [each for each in self._brokers(route) if each != broker]
        found = await asyncio.gather(*(self._listed_by(other, after) for other in others))
        lists = [listed, *(each for each in found if not isinstance(each, OrbitError))]
        most: Counter[str] = Counter()
        for each in lists:
            most |= Counter(each)
        return Listing(
            tuple(most.elements()),
            is_agreed=all(most == Counter(each) for each in lists),
            is_whole=not any(isinstance(each, RequestTimedOut) for each in found),
        )

    async def _listed_by(self, broker: Address, after: int) -> tuple[str, ...] | OrbitError:
        """What one of several brokers lists, or why it does not."""
        within = self._answer_within
        if self._is_silent(broker):
            return RequestTimedOut(broker, RequestCode.GET_CONSUMER_LIST_BY_GROUP, within)
        try:
            return await self._list(broker, within, after)
        except OrbitError as error:
            log.debug("%s does not list group %s: %s", broker, self._group, error)
            return error

    async def _list(self, broker: Address, within: float, after: int) -> tuple[str, ...]:
        try:
            # Others may be more patient with the same question.
            async with asyncio.timeout(within):
                return await self._questions.answer(
                    ("members", broker), after, lambda: self._ask_list(broker)
                )
        except TimeoutError:
            self._is_late(broker)
            code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
            raise RequestTimedOut(broker, code, within) from None

    async def _ask_list(self, broker: Address) -> tuple[str, ...]:
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
        self._tell_findings(answer.ext_fields.get(FINDINGS))
        listed = decode_body(ConsumerList, answer.body).consumer_id_list
        self._lists[broker] = frozenset(listed)
        for member in [*self._unanswered]:
            if not any(member in each for each in self._lists.values()):
                del self._unanswered[member]
        return listed

    def _is_late(self, broker: Address) -> None:
        self._silent_until[broker] = self._engine.clock.monotonic() + self._silence

    def _is_silent(self, broker: Address) -> bool:
        return self._engine.clock.monotonic() < self._silent_until.get(broker, float("-inf"))

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

    async def java(
        self, topic: str, members: Collection[str], *, after: int | None = None
    ) -> dict[str, bool]:
        """Which of `members` are push consumers of Apache's Java client, as far as brokers say.

        Raises when none of them says anything.
        """
        kinds = await self._kinds(topic, members, self.asked if after is None else after)
        return {
            member: kind.is_pushed and kind.language is LanguageName.JAVA
            for member, kind in kinds.items()
        }

    async def are_ours(self, topic: str, members: Collection[str], *, after: int) -> bool:
        """Whether brokers say of all `members` that they are clients like this one."""
        try:
            kinds = await self._kinds(topic, members, after)
        except OrbitError as error:
            log.debug("the languages of members are not known: %s", error)
            return False
        ours = {member for member, kind in kinds.items() if kind.language is LanguageName.PYTHON}
        return ours >= set(members)

    async def _kinds(self, topic: str, members: Collection[str], after: int) -> dict[str, _Kind]:
        route = await self._engine.routes.get(topic)
        found: dict[str, _Kind] = {}
        trouble: OrbitError | None = None
        for broker in sorted(self._brokers(route), key=lambda each: -self._lists_of(each, members)):
            try:
                found = await self._kinds_at(broker, after) | found
            except OrbitError as error:
                trouble = trouble or error
            if found.keys() >= set(members):
                break
        if not found:
            raise trouble or _nobody_to_ask(topic)
        return {member: found[member] for member in members if member in found}

    async def _kinds_at(self, broker: Address, after: int) -> dict[str, _Kind]:
        return await self._questions.answer(
            ("kinds", broker), after, lambda: self._ask_kinds(broker)
        )

    async def _ask_kinds(self, broker: Address) -> dict[str, _Kind]:
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GetConsumerConnectionRequest(consumer_group=self._group),
        )
        found = decode_body(ConsumerConnection, answer.body)
        is_pushed = found.consume_type is ConsumeType.CONSUME_PASSIVELY
        return {
            each.client_id: _Kind(each.language, is_pushed)
            for each in found.connection_set
            if each.client_id is not None
        }

    def _lists_of(self, broker: Address, members: Collection[str]) -> int:
        return len(self._lists.get(broker, frozenset()).intersection(members))

    async def begun(self, client_id: str, topic: str) -> frozenset[Queue]:
        """The queues in which a Java member has a position. Raises when it does not say.

        Some clients that call themselves Java's never do: those are asked a few times.
        """
        if self._unanswered.get(client_id, (0, 0.0))[0] >= MOST_UNANSWERED:
            raise MemberSilent(client_id)
        asked_at = self._engine.clock.monotonic()
        try:
            answer = await self._ask_member(
                topic,
                client_id,
                RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
                GetConsumerStatusRequest(topic=topic, group=self._group, client_addr=client_id),
            )
        except RequestTimedOut:
            self._note_unanswered(client_id, asked_at)
            raise
        tables = decode_body(ConsumerStatus, answer.body).consumer_table or {}
        if client_id not in tables:
            self._note_unanswered(client_id, asked_at)
            raise MemberSilent(client_id)
        self._unanswered.pop(client_id, None)
        return frozenset(
            Queue(each.topic, each.broker_name, each.queue_id) for each in tables[client_id]
        )

    def _note_unanswered(self, client_id: str, asked_at: float) -> None:
        times, noted_at = self._unanswered.get(client_id, (0, float("-inf")))
        if asked_at < noted_at:
            # For another topic, at the same time: that is one silence.
            return
        self._unanswered[client_id] = times + 1, self._engine.clock.monotonic()
        if times + 1 == MOST_UNANSWERED:
            log.warning(
                "member %s of group %s does not say which queues it consumes, and is not asked any "
                "more: a queue that it had is begun here after the time of a hand-over",
                client_id,
                self._group,
                extra={"group": self._group, "client": client_id},
            )

    async def holdings(self, client_id: str, topic: str, *, after: int | None = None) -> Holdings:
        """The queues that a member holds, or is about to begin. Raises when it does not say.

        Those of all topics: one answer is for all that have the same brokers to ask it through.
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
        held: set[Queue] = set()
        leaving = set(_queues_in(info.properties.get(LEAVING, "")))
        for each, state in info.mq_table.items():
            queue = Queue(each.topic, each.broker_name, each.queue_id)
            held.add(queue)
            if state.is_dropped:
                leaving.add(queue)
        claims = frozenset(_queues_in(info.properties.get(CLAIMS, "")))
        return Holdings(frozenset(held), frozenset(leaving & held), claims)

    async def _ask_member(
        self, topic: str, client_id: str, code: RequestCode, header: Header
    ) -> Command:
        """Ask a member through a broker that has listed it; any other when that is cut off."""
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
                # So they say that no such member is connected to them.
                trouble = refused
            else:
                self.may_ask = True
                return answer
        raise trouble or _nobody_to_ask(topic)

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
        """One address for each broker of a topic, in any order, but those that are silent last."""
        chance = self._engine.chance
        names = list(route.brokers)
        chance.shuffle(names)
        found = [
            addresses.get(MASTER) or chance.choice(list(addresses.values()))
            for addresses in map(route.brokers.__getitem__, names)
            if addresses
        ]
        return iter(sorted(found, key=self._is_silent))


def _nobody_to_ask(topic: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"of topic {topic}", "the route names no address")


def queues_text(queues: Iterable[Queue]) -> str:
    """Queues as a property."""
    return msgspec.json.encode([(queue.topic, queue.broker, queue.id) for queue in queues]).decode()


def _queues_in(text: str) -> Iterator[Queue]:
    if not text:
        return
    try:
        found = msgspec.json.decode(text, type=list[tuple[str, str, int]])
    except msgspec.MsgspecError:
        # Somebody else's property: then there are none.
        return
    for topic, broker, place in found:
        yield Queue(topic, broker, place)


# Questions that several have at the same time, asked once.
#
# Each topic of a consumer wants to know who is in the group, and what the others hold; and none of
# these answers depends on the topic. But not every answer will do for everybody: whoever has
# claimed a queue needs one to a question that was sent *after* the claim (see `handover`). So
# questions are numbered as they are sent, and whoever asks says how many had been sent (`sent`) by
# the time that matters to him: a later one is shared, whether it was answered already or not, and
# an earlier one is asked again.


V = TypeVar("V")
#: Runs a coroutine in the background, under a name.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]

#: So many answers are kept; members come and go.
_MOST = 256


class RequestCoalescer:
    """What was asked last about each subject. Belongs to the event loop."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        #: By subject: the number of its last question, and who waits for the answer.
        self._asked: dict[Hashable, tuple[int, asyncio.Task[Any]]] = {}
        #: How many questions were sent so far.
        self.sent = 0

    async def answer(
        self, subject: Hashable, after: int, ask: Callable[[], Coroutine[Any, Any, V]]
    ) -> V:
        """The answer to a question about `subject` that was none of the first `after`.

        An error is an answer as well. Whoever is cancelled leaves the question to the others.
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
                # Not we are ended, but the client that was to ask.
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
