"""The pull loop: every owned queue has one pull, which is asked again and again.

There is no task and no thread per queue. A pull is an object; it is stepped by the answer to its
last request or by a timer, and each step ends with a request on its way, a timer set, or the pull
waiting for a connection that others wait for too. Thousands of queues therefore cost a request
each and nothing else.

Whatever happens, a step is followed by another one, until the queue is no longer ours: a broker
that is gone, an answer that cannot be read or a bug in a receiver puts the pull off and is tried
again from the same offset. Nothing is ever skipped to get on.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias

import msgspec

from orbitmq.client.consumer.settings import FlowReason, FlowSettings, PullSettings
from orbitmq.client.errors import BrokerUnavailable, GroupRefused, refused_by
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import MASTER
from orbitmq.clock import milliseconds
from orbitmq.errors import (
    AccessDenied,
    BrokerRefused,
    ClientError,
    NoRoute,
    NotSupported,
    OrbitError,
    SettingError,
)
from orbitmq.filter import SQL92, TAG, TagFilter, UnknownFilterType, compile_filter, parse_tags
from orbitmq.filter.tags import ALL
from orbitmq.logonce import LogAtIntervals, LogOncePerOutage
from orbitmq.message.properties import TAGS
from orbitmq.message.record import BATCH_MASK
from orbitmq.message.stored import decode_messages, without_inner_batches
from orbitmq.names import check_topic
from orbitmq.remoting.settings import RemotingError
from orbitmq.wire.bodies import CheckClientRequest, SubscriptionData
from orbitmq.wire.codes import ForbiddenType, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import PullFlag, PullMessageRequest, PullMessageResponse
from orbitmq.wire.javajson import encode_body
from orbitmq.wire.templates import RequestTemplate

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine
    from orbitmq.client.routes import Queue
    from orbitmq.clock import Clock
    from orbitmq.message.stored import StoredMessage
    from orbitmq.remoting.blocking import Encode
    from orbitmq.remoting.connection import Connection
    from orbitmq.remoting.settings import Address


log = logging.getLogger(__name__)


#: Seconds after which it is said that nothing matches: other queues may be about to answer.
_MOMENT = 1.0
#: How long a broker may keep a pull as long as neither a match nor the lack of one is known: it
#: says only then how many messages came that nobody wanted.
_UNSETTLED_HOLD = 3.0
#: How long a broker that was not reached may keep a pull: its answer shows that it is back.
_RETURN_HOLD = 0.1


class UnmatchedFilters:
    """Subscriptions to a part of a topic, of which no message has come so far: a slip, maybe."""

    def __init__(self, group: str) -> None:
        self._group = group
        #: By topic: what is wanted, and how many messages were passed over; None after a match.
        self._passed: dict[str, tuple[Subscription, int | None]] = {}
        self._outages = LogOncePerOutage(log)

    def note(self, wanted: Subscription, matched: int, passed: int) -> None:
        """A pull has found so many messages, and was led past so many others."""
        topic = wanted.topic
        said, before = self._passed.get(topic, (wanted, 0))
        if not said.is_same_filter(wanted):
            before = 0
            self._outages.forget(topic)
        if matched:
            self._outages.recovered(topic)
        self._passed[topic] = (wanted, None if matched or before is None else before + passed)

    def is_unmatched(self, topic: str) -> bool:
        """Whether messages have come, and none of them was wanted."""
        return topic in self._passed and bool(self._passed[topic][1])

    def is_settled(self, wanted: Subscription) -> bool:
        """Whether something has matched, or it was said that nothing does."""
        said, passed = self._passed.get(wanted.topic, (wanted, 0))
        is_known = passed is None or self._outages.is_failing(wanted.topic)
        return is_known and said.is_same_filter(wanted)

    def tell(self, topic: str) -> None:
        """Say it once; what is wanted may still come."""
        if self._outages.is_failing(topic):
            return
        wanted, passed = self._passed[topic]
        kind = "tags" if wanted.is_by_tags else "condition"
        self._outages.failed(
            topic,
            "group %s gets nothing of %s so far: of %d messages none has matched the %s %r; check "
            "how they are written, or wait for such messages",
            self._group,
            topic,
            passed,
            kind,
            wanted.expression,
        )

    def restarted(self, topic: str) -> None:
        """A queue is read from elsewhere: what was passed over may come once more, and counts."""
        if self.is_unmatched(topic):
            self._passed[topic] = (self._passed[topic][0], 0)

    def given_up(self, topic: str, left: Iterable[OwnedQueue]) -> None:
        """One queue less of a topic; the last one takes the trouble along, but no match."""
        if self.is_unmatched(topic) and not any(owned.queue.topic == topic for owned in left):
            del self._passed[topic]
            self._outages.forget(topic)

    def standing(self) -> tuple[str, ...]:
        """What is wrong now, a sentence each."""
        return self._outages.current()


class Puller:
    """Pulls the owned queues of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        subscriptions: Subscriptions,
        progress: ProgressStore,
        receiver: Receiver,
        settings: PullSettings | None = None,
        *,
        is_broadcasting: bool = False,
        is_polled: bool = False,
        rebuild: Callable[[OwnedQueue], None] | None = None,
        count: Callable[[str, int, float], None] | None = None,
    ) -> None:
        """`is_polled`: the application polls, keeps its own position and is merely moved.

        `count` is told of pulls that found messages: the topic, how many were for us, and after how
        many seconds.

        `rebuild` is called with a queue that was dropped because its offset was illegal, when the
        corrected offset has been stored: it is to be gained anew, unless it is gone by then.
        """
        self.engine = engine
        self.group = group
        self.subscriptions = subscriptions
        self.progress = progress
        self.receiver = receiver
        self.settings = settings or PullSettings()
        self.delays = delays(self.settings)
        self.after = AFTER_POLLED_PULL if is_polled else AFTER_PULL
        self.is_polled = is_polled
        self.requests = PullRequests(
            group,
            self.settings,
            is_polled=is_polled,
            progress=None if is_broadcasting or is_polled else progress,
        )
        self.rebuild = rebuild
        self.count = count
        self.is_paused = False
        self.refusals = Refusals(group, engine.clock)
        self.filtered = UnmatchedFilters(group)
        #: Brokers, by name, that could not be asked, or did not answer, and why; until an answer
        #: comes. The kernel of a frozen broker takes connections, so that these show nothing.
        self.unreached: dict[str, str] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self.shared = SharedRequests(engine)
        self._pulls: dict[OwnedQueue, QueuePull] = {}
        self._counts: dict[Queue, PullDelayCounts] = {}
        self._end_watch: Callable[[], None] | None = None
        #: When the offset of a queue was last corrected.
        self._corrected: dict[Queue, float] = {}

    def begin(self, owned: OwnedQueue) -> None:
        """Pull a queue from its `next_offset` on, for as long as it is ours."""
        if owned in self._pulls:
            return
        if self._end_watch is None:
            self._end_watch = self.engine.on_connected(self._connected)
        counts = self._counts.setdefault(owned.queue, PullDelayCounts())
        pull = self._pulls[owned] = QueuePull(self, owned, counts)
        self.receiver.queues_changed(len(self._pulls))
        pull.step()

    def end(self, owned: OwnedQueue) -> None:
        """Pull a queue no longer. What is on its way will be ignored."""
        pull = self._pulls.pop(owned, None)
        if pull is not None:
            pull.end()
            self.refusals.given_up(owned.queue)
            self.filtered.given_up(owned.queue.topic, self._pulls)
            self.receiver.queues_changed(len(self._pulls))

    def restart(self, owned: OwnedQueue) -> None:
        """Pull from another `next_offset`; what is on its way will be ignored."""
        self.end(owned)
        self.filtered.restarted(owned.queue.topic)
        self.begin(owned)

    def wake(self, owned: OwnedQueue) -> None:
        """Look again now whether a queue that is put off can be pulled."""
        pull = self._pulls.get(owned)
        if pull is not None:
            pull.wake()

    def has_room(self, owned: OwnedQueue) -> None:
        """Messages of a queue are done with: pull it now if it was held back because of them.

        Without this it would be looked at when its timer ends, and a fast consumer would have
        nothing to do meanwhile. Costs little when nothing is held back.
        """
        pull = self._pulls.get(owned)
        if pull is not None:
            pull.has_room()

    def pause(self) -> None:
        """Begin no pull until `resume`. Queues stay ours."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on at once."""
        self.is_paused = False
        for pull in tuple(self._pulls.values()):
            pull.wake()

    def stop(self) -> None:
        """End all pulls."""
        for owned in tuple(self._pulls):
            self.end(owned)
        for look in self._looks.values():
            look.cancel()
        self._looks.clear()
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    @property
    def refusal(self) -> GroupRefused | AccessDenied | None:
        """Why nothing at all can be pulled, if brokers refuse the group in every queue."""
        return self.refusals.of_all(owned.queue for owned in self._pulls if not owned.is_paused)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps messages away now, a sentence each."""
        # A paused queue is not pulled, and would not notice that its broker answers again.
        wanted = () if self.is_paused else (each for each in self._pulls if not each.is_paused)
        brokers = {owned.queue.broker for owned in wanted}
        unreached = [
            f"group {self.group} gets nothing from {broker} until it answers: {why}"
            for broker, why in self.unreached.items()
            if broker in brokers
        ]
        return (*self.refusals.standing(), *unreached, *self.filtered.standing())

    @property
    def queues(self) -> tuple[OwnedQueue, ...]:
        """What is pulled."""
        return tuple(self._pulls)

    def owned(self, queue: Queue) -> OwnedQueue | None:
        """The queue as it is pulled now, if it is."""
        return next((owned for owned in self._pulls if owned.queue == queue), None)

    def note_found(self) -> None:
        """Have counted what pulls have found, also of messages that are on the way to handlers."""
        for pull in self._pulls.values():
            pull.note_found()

    def counts(self) -> dict[tuple[Queue, PullDelay], int]:
        """How often pulls were put off, by queue and reason, since the consumer was made."""
        return {
            (queue, reason): count
            for queue, counts in self._counts.items()
            for reason, count in counts.totals().items()
        }

    def _connected(self, where: Address) -> None:
        for pull in tuple(self._pulls.values()):
            pull.is_connected(where)

    # ---- for the pulls

    def hold(self, broker: str, wanted: Subscription) -> float:
        """How long a broker may keep a pull that finds nothing."""
        longest = self.settings.hold
        if broker in self.unreached:
            return min(longest, _RETURN_HOLD)
        if wanted.expression == ALL or self.filtered.is_settled(wanted):
            return longest
        return min(longest, _UNSETTLED_HOLD)

    def at_end(self, topic: str) -> None:
        """A queue has nothing more for now that is wanted: look soon whether anything has come."""
        if topic not in self._looks and self.filtered.is_unmatched(topic):
            loop = asyncio.get_running_loop()
            self._looks[topic] = loop.call_later(_MOMENT, self._look_for_matches, topic)

    def _look_for_matches(self, topic: str) -> None:
        del self._looks[topic]
        if self.filtered.is_unmatched(topic) and all(
            # One that was never answered is held, since it is empty.
            owned.max_offset is None or owned.next_offset >= owned.max_offset
            for owned in self._pulls
            if owned.queue.topic == topic
        ):
            self.filtered.tell(topic)

    def correct(self, owned: OwnedQueue, *, is_reset: bool = False) -> None:
        """A queue is dropped because its offset is illegal; begin it anew from the right one.

        `is_reset`: not illegal, but replaced by an administrator, who waits for that.
        """
        try:
            # Frozen now: handlers that still run must not move it with what they finish.
            self.progress.freeze(owned.queue, owned.next_offset)
        finally:
            self.engine.spawn(
                self._correct(owned, is_reset=is_reset), f"correct the progress of {owned.queue}"
            )

    async def _correct(self, owned: OwnedQueue, *, is_reset: bool) -> None:
        if not is_reset:
            await self._space_corrections(owned.queue)
        try:
            await self.progress.persist([owned.queue])
        except OrbitError as error:
            # Begun anew from what the store has, the queue is told the same again.
            log.warning(
                "corrected progress of group %s in %s could not be stored: %s",
                self.group,
                owned.queue,
                error,
                extra={"group": self.group, "queue": str(owned.queue)},
            )
        if self.rebuild is not None:
            self.rebuild(owned)

    async def _space_corrections(self, queue: Queue) -> None:
        """Wait, if the queue was corrected just before: a broker may say so again and again."""
        monotonic = self.engine.clock.monotonic
        last = self._corrected.get(queue)
        if last is not None:
            await asyncio.sleep(last + self.settings.correction_delay - monotonic())
        self._corrected[queue] = monotonic()


# Pulls as they go over the wire.
#
# Nearly everything in a pull is the same as in the one before, of whatever queue of the topic. It
# is encoded once, with gaps for the numbers that differ.


_PUSHED: Final = RequestCode.PULL_MESSAGE
_POLLED: Final = RequestCode.LITE_PULL_MESSAGE
_COMMIT: Final = int(PullFlag.COMMIT_OFFSET)
_VARYING: Final = (
    "queue_id",
    "queue_offset",
    "sys_flag",
    "commit_offset",
    "suspend_timeout_millis",
)


class PullRequests:
    """Encodes the pulls of one consumer."""

    def __init__(
        self,
        group: str,
        settings: PullSettings,
        *,
        is_polled: bool = False,
        progress: ProgressStore | None = None,
    ) -> None:
        """With `progress`, pulls carry it for the broker to store; in broadcasting they do not."""
        self._group = group
        self._settings = settings
        self._progress = progress
        self._posts = settings.post_subscription or is_polled
        self._flag = int(PullFlag.SUSPEND)
        if self._posts:
            self._flag |= int(PullFlag.SUBSCRIPTION)
        if is_polled:
            self._flag |= int(PullFlag.LITE_PULL)
        self._code = _POLLED if is_polled else _PUSHED
        #: Brokers that know no pulls but the usual ones: those before 5.0.
        self._old_brokers: set[str] = set()
        #: By topic and broker; each for one version of the subscription.
        self._templates: dict[
            tuple[str, str], tuple[Subscription, RequestTemplate[PullMessageRequest]]
        ] = {}

    def code(self, broker: str) -> RequestCode:
        """Polled pulls have a code of their own where brokers know it: a pool of their own."""
        return _PUSHED if broker in self._old_brokers else self._code

    def not_supported(self, broker: str, code: RequestCode) -> bool:
        """A broker does not know a pull of this code; whether it can be asked in another way."""
        if code is not _POLLED:
            return False
        self._old_brokers.add(broker)
        for key in [key for key in self._templates if key[1] == broker]:
            del self._templates[key]
        return True

    def encoder(
        self,
        owned: OwnedQueue,
        subscription: Subscription,
        broker_id: int,
        connection: Connection,
        hold: float,
    ) -> Encode:
        """What encodes the next pull of a queue from a broker, which may keep it so long."""
        queue = owned.queue
        progress, flag = 0, self._flag
        if self._progress is not None and broker_id == MASTER:
            # A slave would store it nowhere.
            progress = self._progress.read(queue) or 0
            if progress > 0:
                flag |= _COMMIT
        varying = (queue.id, owned.next_offset, flag, progress, round(hold * 1000))
        if connection.prepares:
            code = self.code(queue.broker)
            values = dict(zip(_VARYING, varying, strict=True))
            header = PullMessageRequest(**self._constant(owned, subscription), **values)  # type: ignore[arg-type]  # named as declared

            def prepared(opaque: int) -> Sequence[Bytes]:
                return connection.encoded(Command.request(code, header, opaque=opaque))

            return prepared
        template = self._template(owned, subscription)
        return lambda opaque: template.pieces(opaque, *varying)

    def _template(
        self, owned: OwnedQueue, subscription: Subscription
    ) -> RequestTemplate[PullMessageRequest]:
        key = (owned.queue.topic, owned.queue.broker)
        known = self._templates.get(key)
        if known is not None and known[0] is subscription:
            return known[1]
        constant = self._constant(owned, subscription)
        code = self.code(owned.queue.broker)
        template = RequestTemplate(code, PullMessageRequest, _VARYING, constant=constant)
        self._templates[key] = (subscription, template)
        return template

    def _constant(self, owned: OwnedQueue, subscription: Subscription) -> dict[str, object]:
        settings = self._settings
        return {
            "consumer_group": self._group,
            "topic": owned.queue.topic,
            "broker_name": owned.queue.broker,
            "max_msg_nums": settings.batch_size,
            "max_msg_bytes": settings.batch_bytes,
            # What is sent along needs no version: the broker compares nothing.
            "sub_version": 0 if self._posts and subscription.is_by_tags else subscription.version,
            "subscription": subscription.expression if self._posts else None,
            "expression_type": subscription.type,
        }


# What brokers answer to a pull, and what follows from it.
#
# The broker's next offset is taken in every case, so that stretches which the filter left out move
# progress on. What else happens is a table: one for consumers that are pushed to, one for those
# that the application polls, which own their position and are merely moved.


class PullStatus(enum.Enum):
    """What came of a pull that was served."""

    __hash__ = object.__hash__  # each is one object; an enumeration's own is slow

    FOUND = ResponseCode.SUCCESS
    NO_NEW_MESSAGE = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MESSAGE = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = ResponseCode.PULL_OFFSET_MOVED


class NextStep(enum.Enum):
    """What a served pull leads to."""

    __hash__ = object.__hash__

    CONSUME_AND_PULL = enum.auto()
    #: There was nothing for us up to the next offset.
    PASS_AND_PULL = enum.auto()
    #: Give the queue up, store the offset that the broker names, and begin anew from it.
    DROP_AND_CORRECT = enum.auto()
    #: Go on from the offset that the broker names.
    MOVE_AND_PULL = enum.auto()


#: What a pull's outcome does to the pull loop of a consumer that is pushed to.
AFTER_PULL: Mapping[PullStatus, NextStep] = MappingProxyType(
    {
        PullStatus.FOUND: NextStep.CONSUME_AND_PULL,
        PullStatus.NO_NEW_MESSAGE: NextStep.PASS_AND_PULL,
        PullStatus.NO_MATCHED_MESSAGE: NextStep.PASS_AND_PULL,
        PullStatus.OFFSET_ILLEGAL: NextStep.DROP_AND_CORRECT,
    }
)

#: The same for a consumer that the application polls: its position is its own.
AFTER_POLLED_PULL: Mapping[PullStatus, NextStep] = MappingProxyType(
    {**AFTER_PULL, PullStatus.OFFSET_ILLEGAL: NextStep.MOVE_AND_PULL}
)

#: Refusals that the next heartbeat mends: the broker does not know the subscription (any more), or
#: knows an older one.
MENDED_BY_HEARTBEAT = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)

#: How brokers before 5.0, which do not send the type, begin to say that reading is off.
_FORBIDDEN_WORDS: Mapping[str, ForbiddenType] = MappingProxyType(
    {
        "subscription group no permission": ForbiddenType.GROUP,
        "the topic[": ForbiddenType.TOPIC,
        "the broker[": ForbiddenType.BROKER,
        "the consumer group[": ForbiddenType.BROADCASTING,
    }
)

_STATUSES: Mapping[int, PullStatus] = {int(status.value): status for status in PullStatus}

#: How a broker says that the group's progress was set by an administrator.
_RESET = "OFFSET_RESET"


class AnswerUnusable(ClientError):
    """A broker answered a pull with something that this client cannot take apart."""


class Pulled(msgspec.Struct, eq=False, gc=False):
    """The answer to a pull that was served."""

    status: PullStatus
    #: The offset that was asked for.
    offset: int
    next_offset: int
    min_offset: int
    max_offset: int
    #: The id of the broker, among those of one name, to ask next.
    suggested_broker: int
    #: Records, one after the other; empty unless messages were found.
    body: Bytes
    #: Whether an administrator has set the progress of the group.
    is_reset: bool


def forbidden_type(answer: Command) -> ForbiddenType | None:
    """What somebody has switched off, if that is why a pull was refused."""
    if answer.code != ResponseCode.NO_PERMISSION:
        return None
    sent = answer.ext_fields.get("forbiddenType", "")
    if sent.isdecimal() and int(sent) in set(ForbiddenType):
        return ForbiddenType(int(sent))
    said = answer.remark or ""
    return next((kind for words, kind in _FORBIDDEN_WORDS.items() if said.startswith(words)), None)


def read_pulled(answer: Command, offset: int) -> Pulled | None:
    """What a broker found from `offset` on; None when it refused.

    Raises `HeaderError` or `AnswerUnusable` when the answer makes no sense.
    """
    status = _STATUSES.get(answer.code)
    if status is None:
        return None
    header = answer.header(PullMessageResponse)
    if header.offset_delta:
        raise AnswerUnusable(
            f"the broker serves a static topic (offsets are {header.offset_delta} off), which this "
            "client does not know"
        )
    return Pulled(
        status,
        offset,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        header.suggest_which_broker_id,
        answer.body if status is PullStatus.FOUND else b"",
        status is PullStatus.OFFSET_ILLEGAL and answer.remark == _RESET,
    )


# The one pull of a queue: what speaks against asking, and what an answer leads to.
#
# Which comes first when messages were found, their handlers or the next pull? As long as the broker
# has more, the pull: it is served while handlers run. At the end of the queue, where it would be
# held anyway, the handlers: to ask costs as much as half of the way of a message from the socket to
# its handler. The loop does what it is given in order, so that the pull only has to be put behind
# them; and with it what is counted and kept of them.


#: Seconds over which the first pulls after a lost connection are spread.
_RETURN_SPREAD: Final = 0.05


class QueuePull:
    """A pull, recycled: at any time it is on its way, waits for a timer, or for a connection."""

    __slots__ = (
        "_address",
        "_broker_id",
        "_code",
        "_connection",
        "_counts",
        "_found",
        "_has_gone_back",
        "_has_lost_broker",
        "_is_held_back",
        "_is_over",
        "_loop",
        "_monotonic",
        "_offset",
        "_puller",
        "_sent_at",
        "_subscription",
        "_timer",
        "owned",
    )

    def __init__(self, puller: Puller, owned: OwnedQueue, counts: PullDelayCounts) -> None:
        self.owned = owned
        self._puller = puller
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._monotonic = puller.engine.clock.monotonic
        #: How many messages the last pull found, and after how long, until that is noted.
        self._found: tuple[int, float] | None = None
        #: Which of the brokers of one name is asked, as the last answer suggested.
        self._broker_id = MASTER
        self._timer: asyncio.Handle | None = None
        self._is_over = False
        self._has_gone_back = False
        #: Whether it waits because there is no connection.
        self._has_lost_broker = False
        #: Whether it waits because too much is cached.
        self._is_held_back = False
        # Of the request that is on its way.
        self._offset = owned.next_offset
        self._sent_at = 0.0
        self._code = RequestCode.PULL_MESSAGE
        self._address: Address | None = None
        self._connection: Connection | None = None
        self._subscription: Subscription | None = None

    def end(self) -> None:
        """Ask no more; what is on its way is ignored."""
        self._is_over = True
        self.note_found()
        self._cancel_timer()

    def wake(self) -> None:
        """If a timer is set, do not wait for it."""
        if self._timer is not None:
            self._cancel_timer()
            self.step()

    def has_room(self) -> None:
        """If it waits because too much is cached, look whether that is still so."""
        if self._is_held_back and self._puller.receiver.held_back(self.owned) is None:
            self.wake()

    def is_connected(self, where: Address) -> None:
        """A broker was connected to: if it is the one that was lost, pull soon, not at the timer.

        Queues of one broker do not all pull in the same instant, nor do all clients.
        """
        if not self._has_lost_broker or self._timer is None:
            return
        engine = self._puller.engine
        if where in engine.routes.brokers.get(self.owned.queue.broker, {}).values():
            self._set_timer(_RETURN_SPREAD * engine.chance.random())

    # ---- asking

    def step(self) -> None:
        """Send the next request, if nothing speaks against it."""
        self._timer = None
        self._is_held_back = False
        self._has_lost_broker = False
        if self._found is not None:
            self.note_found()
        if not self._goes_on():
            return
        try:
            if (against := self._against()) is not None:
                self._put_off(*against)
            else:
                self._ask()
        except Exception as error:  # noqa: BLE001  # the loop of a queue survives whatever happens
            self._failed(error)

    def _against(self) -> tuple[PullDelay, object] | None:
        """What speaks against a pull now, in the order in which Java clients look at it."""
        puller, owned = self._puller, self.owned
        owned.last_pull = puller.engine.clock.monotonic()
        if not puller.engine.is_running:
            return PullDelay.NOT_RUNNING, "the client is not running"
        if puller.is_paused or owned.is_paused:
            return PullDelay.PAUSED, "until resumed"
        if (reason := puller.receiver.held_back(owned)) is not None:
            self._is_held_back = True
            return PullDelay(reason), f"next offset {owned.next_offset}"
        if owned.lock is not None and not owned.lock.is_held(owned.last_pull):
            return PullDelay.NOT_LOCKED, "the broker has not confirmed the lock"
        self._subscription = puller.subscriptions.get(owned.queue.topic)
        if self._subscription is None:
            return PullDelay.NOT_SUBSCRIBED, "the topic is not subscribed to"
        return None

    def _ask(self) -> None:
        puller, owned = self._puller, self.owned
        queue = owned.queue
        try:
            address, broker_id = puller.engine.routes.address(queue.broker, wanted=self._broker_id)
        except BrokerUnavailable as error:
            puller.shared.refresh_route(queue.topic)
            self._put_off(PullDelay.NO_BROKER, error)
            return
        connection = puller.engine.open_connection(address)
        if connection is None:
            puller.shared.wait_for(address, self)
            return
        assert self._subscription is not None  # noqa: S101  # looked at just before
        self._address, self._connection = address, connection
        self._offset = owned.next_offset
        self._sent_at = owned.last_pull
        self._code = puller.requests.code(queue.broker)
        hold = puller.hold(queue.broker, self._subscription)
        try:
            connection.submit_encoded(
                self._code,
                puller.requests.encoder(owned, self._subscription, broker_id, connection, hold),
                self._answered,
                timeout=puller.settings.timeout,
            )
        except OrbitError as error:
            self._put_off(PullDelay.NOT_SENT, error)

    def not_connected(self, error: OrbitError) -> None:
        """The connection that this pull waited for could not be made."""
        if self._goes_on():
            self._broker_is_lost()
            self._put_off(PullDelay.NOT_SENT, error)

    # ---- being answered

    def _answered(self, outcome: Command | RemotingError) -> None:
        owned = self.owned
        if (self._is_over or owned.is_draining or owned.is_dropped) and not self._goes_on():
            return
        try:
            if isinstance(outcome, RemotingError):
                self._broker_is_lost()
                self._put_off(PullDelay.NO_ANSWER, outcome)
            else:
                self._judge(outcome)
        except Exception as error:  # noqa: BLE001  # as in `step`
            self._failed(error)

    def _judge(self, answer: Command) -> None:
        if self._puller.unreached:
            self._puller.unreached.pop(self.owned.queue.broker, None)
        try:
            pulled = read_pulled(answer, self._offset)
        except OrbitError as error:
            self._put_off(PullDelay.UNREADABLE, error)
            return
        if pulled is None:
            self._refused(answer)
            return
        owned = self.owned
        self._puller.refusals.served(owned.queue, self._address)
        self._broker_id = pulled.suggested_broker
        owned.min_offset, owned.max_offset = pulled.min_offset, pulled.max_offset
        self._STEPS[self._puller.after[pulled.status]](self, pulled)

    def _refused(self, answer: Command) -> None:
        if answer.code == ResponseCode.GO_AWAY and self._address and self._connection:
            # The broker is stopping, or wants us on another connection: not an error yet.
            self._puller.engine.went_away(self._address, self._connection)
            self._pull_after(self._puller.settings.busy_delay)
            return
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            broker = self.owned.queue.broker
            if self._puller.requests.not_supported(broker, self._code):
                self.step()
                return
        if answer.code == ResponseCode.FLOW_CONTROL:
            self._put_off(PullDelay.BROKER_BUSY, answer.remark)
            return
        if answer.code in MENDED_BY_HEARTBEAT:
            self._puller.shared.heartbeat()
        refused = refused_by(answer, self._address or "", self._code)
        off = forbidden_type(answer)
        if off is None and self._broker_id != MASTER and is_access_denied(refused):
            # A slave has accounts of its own, and nobody has to be let in there.
            self._broker_id = MASTER
            self._put_off(PullDelay.REFUSED, refused)
        elif self._puller.refusals.refused(self.owned.queue, refused, off):
            self._put_off(PullDelay.REFUSED, None)
        else:
            self._put_off(PullDelay.REFUSED, f"code {answer.code}: {answer.remark}")

    def _consume(self, pulled: Pulled) -> None:
        assert self._subscription is not None  # noqa: S101  # it was sent with the request
        took = self._monotonic() - self._sent_at
        try:
            wanted = self._puller.receiver.received(self.owned, pulled, self._subscription)
        except OrbitError as error:
            # Never skipped: the next answer to the same question may be whole.
            self._put_off(PullDelay.UNREADABLE, error)
            return
        self._found = wanted, took
        self.owned.next_offset = pulled.next_offset
        if pulled.next_offset <= pulled.offset:
            self.note_found()
            self._note_going_back(pulled)
            self._set_timer(self._puller.delays[PullDelay.WENT_BACK])
            return
        self._counts.served()
        if self._subscription.expression != ALL:
            self._note_filtered(wanted, pulled)
        interval = self._puller.settings.interval
        if wanted and not interval and pulled.next_offset >= pulled.max_offset:
            self._step_soon()
        else:
            self.note_found()
            self._pull_after(interval if wanted else 0.0)

    def _note_filtered(self, wanted: int, pulled: Pulled) -> None:
        assert self._subscription is not None  # noqa: S101  # as in `_consume`
        self._puller.filtered.note(
            self._subscription, wanted, max(0, pulled.next_offset - pulled.offset - wanted)
        )
        if not wanted and pulled.next_offset >= pulled.max_offset:
            self._puller.at_end(self._subscription.topic)

    def note_found(self) -> None:
        """What is left to do about messages that were found, once their handlers have them."""
        found, self._found = self._found, None
        self.owned.keep_landmark()
        if found is not None and self._puller.count is not None:
            self._puller.count(self.owned.queue.topic, *found)

    def _pass(self, pulled: Pulled) -> None:
        self._puller.receiver.passed(self.owned, pulled.next_offset)
        self.owned.next_offset = pulled.next_offset
        if pulled.next_offset < pulled.offset:
            self._note_going_back(pulled)
        else:
            self._counts.served()
            if self._subscription is not None and self._subscription.expression != ALL:
                self._note_filtered(0, pulled)
        waited = self._monotonic() - self._sent_at
        if pulled.next_offset <= pulled.offset and waited < self._puller.settings.flow_delay:
            # Nothing new, and not held until there is: this must not go round in circles.
            self._put_off(PullDelay.NOT_HELD, "an empty pull was answered at once")
        else:
            self.step()

    def _move(self, pulled: Pulled) -> None:
        self._note_illegal(pulled)
        self._puller.receiver.moved(self.owned, pulled)
        self.owned.next_offset = pulled.next_offset
        self._pull_after(self._puller.settings.flow_delay)

    def _drop(self, pulled: Pulled) -> None:
        self._note_illegal(pulled)
        self.owned.next_offset = pulled.next_offset
        self.owned.drop()
        self._puller.correct(self.owned, is_reset=pulled.is_reset)
        self._goes_on()

    _STEPS: ClassVar[Mapping[NextStep, Callable[[QueuePull, Pulled], None]]] = {
        NextStep.CONSUME_AND_PULL: _consume,
        NextStep.PASS_AND_PULL: _pass,
        NextStep.MOVE_AND_PULL: _move,
        NextStep.DROP_AND_CORRECT: _drop,
    }

    # ---- going on

    def _goes_on(self) -> bool:
        """Whether the queue is still to be pulled; if not, the puller is told."""
        if self._is_over:
            return False
        if self.owned.is_draining or self.owned.is_dropped:
            self._puller.end(self.owned)
            return False
        return True

    def _note_going_back(self, pulled: Pulled) -> None:
        """Say once that a broker does not lead on: it may have lost the end of its log."""
        self._counts.note(PullDelay.WENT_BACK)
        if self._has_gone_back:
            return
        self._has_gone_back = True
        log.warning(
            "broker %s goes back in %s for group %s: asked for offset %d it names %d as next",
            self._address,
            self.owned.queue,
            self._puller.group,
            pulled.offset,
            pulled.next_offset,
            extra={
                "group": self._puller.group,
                "queue": str(self.owned.queue),
                "broker": str(self._address),
            },
        )

    def _note_illegal(self, pulled: Pulled) -> None:
        self._counts.note(PullDelay.ILLEGAL_OFFSET)
        log.warning(
            "offset %d of group %s in %s is %s, the queue has %d to %d: going on from %d",
            pulled.offset,
            self._puller.group,
            self.owned.queue,
            "replaced by an administrator" if pulled.is_reset else "illegal",
            pulled.min_offset,
            pulled.max_offset,
            pulled.next_offset,
            extra={"group": self._puller.group, "queue": str(self.owned.queue)},
        )

    def _broker_is_lost(self) -> None:
        """Do not insist on a slave that is gone, and find out whether the queue has moved."""
        self._broker_id = MASTER
        self._has_lost_broker = True
        self._puller.shared.refresh_route(self.owned.queue.topic)

    def _failed(self, error: Exception) -> None:
        log.error(
            "pulling %s for group %s failed; trying again: %s",
            self.owned.queue,
            self._puller.group,
            error,
            exc_info=error,
            extra={"group": self._puller.group, "queue": str(self.owned.queue)},
        )
        if self._goes_on():
            self._put_off(PullDelay.FAILED, error)

    def _put_off(self, reason: PullDelay, detail: object | None) -> None:
        """Pull later; without `detail`, it is told elsewhere why."""
        count = self._counts.note(reason)
        if reason in UNREACHED:
            self._puller.unreached[self.owned.queue.broker] = str(detail)
        # To have fetched enough ahead is what a consumer that is polled is for.
        is_told = detail is None or (self._puller.is_polled and self._is_held_back)
        if count and not is_told:
            tell(self._puller.group, self.owned.queue, reason, count, detail)
        self._set_timer(self._puller.delays[reason])

    def _pull_after(self, pause: float) -> None:
        if pause > 0:
            self._set_timer(pause)
        else:
            self.step()

    def _step_soon(self) -> None:
        """Ask behind what the loop was given to do so far: see the head of the module."""
        if self._timer is not None:
            self._cancel_timer()
        self._timer = self._loop.call_soon(self.step)

    def _set_timer(self, pause: float) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(pause, self.step)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Where pulled messages go: decided by the kind of consumer, asked by the pull loop.
#
# A consumer that is pushed to decodes them at once, checks tags by text, and gives what is new to
# its handlers through the window. A consumer that is polled keeps the bytes until somebody asks.


class Receiver(Protocol):
    """Takes what the pull loop finds. Called on the loop; must not block."""

    def queues_changed(self, count: int) -> None:
        """So many queues are pulled now."""

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        """Why a queue must not be pulled for now: too much of it is here already."""

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        """Take the messages that were found; returns how many were for us.

        Raises `MessageError` when they cannot be read, and has then taken none.
        """

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        """There is nothing for us below `next_offset` but what was received before."""

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        """The broker has no message at the offset asked for, and names another one."""


class Accepting(Protocol):
    """What receiving needs of consumption."""

    def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
        """Consume these, in time. Never blocks."""


class Positions(Protocol):
    """What receiving needs of a progress store."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        """Everything below `offset` is done with."""


class WindowReceiver:
    """The receiver of a consumer that is pushed to."""

    def __init__(
        self,
        progress: Positions,
        consumption: Accepting,
        *,
        flow: FlowSettings | None = None,
        is_orderly: bool = False,
        group: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._progress = progress
        self._consumption = consumption
        self._flow = flow or FlowSettings()
        self._is_orderly = is_orderly
        self._group = group
        self._namespace = namespace
        self._limits = self._flow.limits(1, is_orderly=is_orderly)

    def queues_changed(self, count: int) -> None:
        self._limits = self._flow.limits(count, is_orderly=self._is_orderly)

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        return self._limits.exceeded_by(owned.window)

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        queue, group, namespace = owned.queue, self._group, self._namespace
        stored = decode_pulled(pulled)
        found = [ReceivedMessage(each, queue, group, None, namespace) for each in stored]
        if stored:
            owned.newest = stored[-1]
        wanted = subscription.accepted(found)
        window = owned.window
        new = window.add(wanted, pulled.next_offset)
        if new:
            try:
                self._consumption.accept(owned, new)
            except BaseException:
                window.withdraw(new)
                raise
        elif not len(window):
            self._all_done(owned)
        return len(wanted)

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        owned.window.skip_to(next_offset)
        if not len(owned.window):
            self._all_done(owned)

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        """Does not happen here: the queue is dropped and begun anew."""

    def _all_done(self, owned: OwnedQueue) -> None:
        done = owned.window.commit_offset
        if done is not None:
            self._progress.update(owned.queue, done)


def decode_pulled(pulled: Pulled) -> list[StoredMessage]:
    """The messages that a pull found. Raises `MessageError`."""
    stored = decode_messages(pulled.body)
    for each in stored:
        if each.sys_flag & BATCH_MASK == BATCH_MASK:
            return without_inner_batches(stored, pulled.offset)
    return stored


# What pulls want of the engine that takes time, done once for all of them.
#
# A thousand queues of a broker that is away wait for one attempt to connect, ask for its route
# once, and need one heartbeat.


#: Seconds between two questions for the same thing.
SPACING = 1.0


class Waiting(Protocol):
    """A pull that waits for a connection."""

    def step(self) -> None:
        """There is one now."""

    def not_connected(self, error: OrbitError) -> None:
        """There is none, for now."""


class SharedRequests:
    """Connections, routes and heartbeats for callers that cannot wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[Address, list[Waiting]] = {}
        #: When routes were last asked for, and when the last heartbeat was wanted.
        self._refreshed: dict[str, float] = {}
        self._beaten: float | None = None

    def wait_for(self, address: Address, pull: Waiting) -> None:
        """Step the pull when there is a connection, or tell it that there is none."""
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.append(pull)
            return
        self._waiting[address] = [pull]
        self._engine.spawn(self._connect(address), f"connect to {address} for pulls")

    async def _connect(self, address: Address) -> None:
        failure: OrbitError | None = None
        try:
            await self._engine.connection(address)
        except OrbitError as error:
            failure = error
        finally:
            waiting = self._waiting.pop(address)
        for pull in waiting:
            if failure is None:
                pull.step()
            else:
                pull.not_connected(failure)

    def refresh_route(self, topic: str) -> None:
        """Ask where a topic is, unless that has just been asked."""
        now = self._engine.clock.monotonic()
        asked = self._refreshed.get(topic)
        if self._engine.is_running and (asked is None or now - asked >= SPACING):
            self._refreshed[topic] = now
            self._engine.spawn(self._refresh(topic), f"refresh the route of {topic} for pulls")

    async def _refresh(self, topic: str) -> None:
        try:
            await self._engine.routes.get(topic, refresh=True)
        except OrbitError as error:
            log.debug("route not refreshed: %s", error, extra={"topic": topic})

    def heartbeat(self) -> None:
        """Tell the brokers who we are, unless that has just been done: one does not know it."""
        now = self._engine.clock.monotonic()
        beaten = self._beaten
        if self._engine.is_running and (beaten is None or now - beaten >= SPACING):
            self._beaten = now
            self._engine.spawn(self._engine.heartbeat(), "heartbeat for pulls")


# Brokers that refuse to let a group consume, and whether anything can arrive in spite of them.
#
# - The account may not consume, or is not known: AccessDenied. Only a change of accounts helps.
# - The group does not exist and is not created on demand: GroupRefused.
# - Reading is off for the group, the topic or the broker: ReadingDisabled, until it is enabled.
#
# A refusal stands for a queue until a pull is served there or the queue is given up, and for a
# topic until its members are listed. It is an error in the log (ReadingDisabled: a warning) when it
# begins and, while it lasts, from time to time. That it ended does not bring the next line forward:
# where brokers with the group and without it answer by turns, at one address even, every other
# answer would be a beginning.


#: While a broker refuses a group, it is told again after so many seconds.
TELL_AGAIN: Final = 600.0

#: How to have messages again that were switched off; by what was.
_UNDONE_BY: Final[Mapping[ForbiddenType, str]] = {
    ForbiddenType.BROKER: "let the broker be read: permission = 6 in its settings",
    ForbiddenType.GROUP: "resume it with: orbitmq group resume {group}",
    ForbiddenType.TOPIC: "turn it on with: orbitmq topic update {topic} --permission rw",
    ForbiddenType.BROADCASTING: "allow it with: orbitmq group update {group} --broadcast",
    ForbiddenType.SUBSCRIPTION: "an administrator can allow it again",
}


class ReadingDisabled(BrokerRefused):
    """Somebody has switched the reading of a group, a topic or a broker off."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, topic: str, kind: ForbiddenType, refused: BrokerRefused) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        self.kind = kind
        undone_by = _UNDONE_BY[kind].format(group=group, topic=topic)
        # The same text for all topics of a group that is paused.
        text = f"group {group!r} gets nothing from {self.address} for now: {self.remark}"
        self.args = (f"{text}; {undone_by}",)


Refusal: TypeAlias = AccessDenied | GroupRefused | ReadingDisabled


def is_access_denied(error: BaseException | None) -> bool:
    """Whether a server refused because of who asks. Brokers before 5.3 have no code for it."""
    return isinstance(error, BrokerRefused) and (
        error.code == ResponseCode.NO_PERMISSION
        or (error.code == ResponseCode.SYSTEM_ERROR and "AclException" in error.remark)
    )


class Refusals:
    """What brokers refuse to one group now, and which topics were ever served."""

    def __init__(self, group: str, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._told = LogAtIntervals(interval=TELL_AGAIN)
        self._queues: dict[Queue, Refusal] = {}
        #: Topics whose members brokers do not list to this account.
        self._topics: dict[str, AccessDenied] = {}
        self._served: set[str] = set()
        #: Called with every refusal: maybe nothing can arrive any more.
        self.on_refused: Callable[[], None] = _nothing

    def refused(
        self, queue: Queue, refused: BrokerRefused, off: ForbiddenType | None = None
    ) -> bool:
        """A broker has refused to tell of a queue, or to serve it; whether that is one of these."""
        refusal: Refusal
        if refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            refusal = GroupRefused(self._group, refused)
        elif off is not None:
            refusal = ReadingDisabled(self._group, queue.topic, off, refused)
        elif is_access_denied(refused):
            refusal = AccessDenied(self._group, refused)
        else:
            return False
        self._queues[queue] = refusal
        self._note(refusal)
        return True

    def hidden(self, topic: str, denied: AccessDenied) -> None:
        """No broker of a topic lists the members to this account, or takes it as one of them."""
        self._topics[topic] = denied
        self._note(denied)

    def seen(self, topic: str) -> None:
        """The members are listed, or of no interest any more."""
        self._topics.pop(topic, None)

    def served(self, queue: Queue, where: Address | None) -> None:
        """A broker has answered a pull: it has the group, and lets it read the topic."""
        self._served.add(queue.topic)
        if not self._queues:
            return
        self._queues.pop(queue, None)
        for other, refusal in tuple(self._queues.items()):
            is_over = other.topic == queue.topic or _is_of_all_topics(refusal)
            if is_over and refusal.address == str(where):
                del self._queues[other]

    def given_up(self, queue: Queue) -> None:
        """A queue is not pulled any more: who refused it does not concern us because of it."""
        self._queues.pop(queue, None)

    def was_served(self, topic: str) -> bool:
        """Whether any pull of a topic ever was."""
        return topic in self._served

    def standing(self) -> tuple[str, ...]:
        """Those of now, a sentence each."""
        return tuple(dict.fromkeys(map(str, (*self._topics.values(), *self._queues.values()))))

    def of_all(self, queues: Iterable[Queue]) -> GroupRefused | AccessDenied | None:
        """One that does not pass by itself, if there are queues and all have such."""
        found = [self._queues.get(queue) for queue in queues]
        lasting = [each for each in found if isinstance(each, GroupRefused | AccessDenied)]
        return lasting[0] if lasting and len(lasting) == len(found) else None

    def denial(
        self, shares: Mapping[str, Collection[Queue]], owned: Collection[Queue]
    ) -> AccessDenied | None:
        """Why nothing can arrive until an account is changed; None while anything can.

        `shares` are the own queues of each topic, of which those `owned` are pulled.
        """
        if not (self._queues or self._topics):
            return None
        found: AccessDenied | None = None
        for topic, queues in shares.items():
            reasons = [self._queues.get(queue) for queue in queues]
            denied = [each for each in reasons if isinstance(each, AccessDenied)]
            if denied and len(denied) == len(reasons):
                reason = denied[0]
            elif topic in self._topics and not any(queue in owned for queue in queues):
                reason = self._topics[topic]
            else:
                return None
            found = found or reason
        return found

    def _note(self, refusal: Refusal) -> None:
        if count := self._told.note(str(refusal), self._clock.monotonic()):
            log.log(
                logging.WARNING if isinstance(refusal, ReadingDisabled) else logging.ERROR,
                "%s",
                refusal,
                extra={"group": self._group, "broker": refusal.address, "times": count},
            )
        self.on_refused()


def _is_of_all_topics(refusal: Refusal) -> bool:
    """Whether a broker refuses the group whatever it asks for: served once, that is over."""
    if isinstance(refusal, ReadingDisabled):
        return refusal.kind in (ForbiddenType.GROUP, ForbiddenType.BROKER)
    return isinstance(refusal, GroupRefused)


def _nothing() -> None:
    """For those who look by themselves."""


# Why a pull was put off: named, counted, and logged without flooding.
#
# Two kinds. Some are the normal course of things (flow control, a pause) and come and go many times
# a second; the first of a queue is logged and then every thousandth. Others are failures in a row,
# which end with a pull that is served; the first of each row is logged and then every thousandth.
# Held pulls that end without a message are neither.


#: One line in the log for so many of a kind.
EVERY = 1000


class PullDelay(enum.StrEnum):
    """Why a pull comes later, or is odd."""

    NOT_RUNNING = "not running"
    PAUSED = "paused"
    CACHED_MESSAGES = FlowReason.MESSAGES
    CACHED_BYTES = FlowReason.BYTES
    OFFSET_SPAN = FlowReason.SPAN
    NOT_LOCKED = "not locked"
    NOT_SUBSCRIBED = "not subscribed"
    NO_BROKER = "no broker"
    NOT_SENT = "not sent"
    NO_ANSWER = "no answer"
    BROKER_BUSY = "broker busy"
    REFUSED = "refused"
    UNREADABLE = "unreadable answer"
    #: The broker answers an empty pull without holding it.
    NOT_HELD = "not held"
    #: Not a delay: the broker named an offset below the one asked for.
    WENT_BACK = "went back"
    ILLEGAL_OFFSET = "illegal offset"
    FAILED = "failed"


#: The course of things: not counted as failures in a row.
_ORDINARY = frozenset(
    {
        PullDelay.PAUSED,
        PullDelay.CACHED_MESSAGES,
        PullDelay.CACHED_BYTES,
        PullDelay.OFFSET_SPAN,
        PullDelay.NOT_HELD,
    }
)
#: There is nobody to pull from.
UNREACHED = frozenset({PullDelay.NO_BROKER, PullDelay.NOT_SENT, PullDelay.NO_ANSWER})
#: What nobody has to look at. (A span that grows means one message that does not end.)
_NO_TROUBLE = _ORDINARY - {PullDelay.OFFSET_SPAN}


def delays(settings: PullSettings) -> Mapping[PullDelay, float]:
    """How long each of them puts a pull off."""
    special = {
        PullDelay.PAUSED: settings.paused_delay,
        PullDelay.CACHED_MESSAGES: settings.flow_delay,
        PullDelay.CACHED_BYTES: settings.flow_delay,
        PullDelay.OFFSET_SPAN: settings.flow_delay,
        PullDelay.NOT_HELD: settings.flow_delay,
        PullDelay.BROKER_BUSY: settings.busy_delay,
    }
    return MappingProxyType({each: special.get(each, settings.error_delay) for each in PullDelay})


class PullDelayCounts:
    """The delays of one queue."""

    __slots__ = ("_counts", "_in_a_row")

    def __init__(self) -> None:
        self._counts: Counter[PullDelay] = Counter()
        self._in_a_row = 0

    def note(self, reason: PullDelay) -> int:
        """Count one; returns the count that is worth a line in the log, else 0."""
        self._counts[reason] += 1
        if reason in _ORDINARY:
            count = self._counts[reason]
        else:
            self._in_a_row += 1
            count = self._in_a_row
        return count if count % EVERY == 1 else 0

    def served(self) -> None:
        """A pull was served: failures are no longer in a row."""
        self._in_a_row = 0

    def totals(self) -> Mapping[PullDelay, int]:
        return MappingProxyType(self._counts)


def tell(group: str, queue: Queue, reason: PullDelay, count: int, detail: object) -> None:
    """The line in the log."""
    log.log(
        logging.INFO if reason in _NO_TROUBLE else logging.WARNING,
        "pull of %s for group %s put off: %s (%s), %d so far",
        queue,
        group,
        reason.value,
        detail,
        count,
        extra={"group": group, "queue": str(queue)},
    )


# What a group wants of a topic: a tag expression or a SQL92 condition, and when that was said.
#
# Brokers keep the newest subscription of a group, by its version, and refuse pulls of a version
# that they have not heard of yet. A version is the time of the change in milliseconds, and always
# above the one before it, however fast changes follow each other or the clock is set back.


_EVERYTHING = TagFilter(matches_all=True)


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic and which of its messages are wanted. Make them with `by_tags` and `by_sql`."""

    topic: str
    #: As it is sent: tags with `||` between, `*` for everything, or a SQL92 condition.
    expression: str = ALL
    type: str = TAG
    #: When it was said, in milliseconds.
    version: int = 0
    tags: TagFilter = field(default=_EVERYTHING, compare=False, repr=False)

    @classmethod
    def by_tags(cls, topic: str, tags: str | None = ALL, *, version: int = 0) -> Subscription:
        """By tags: `paid || refunded`; `*`, nothing and None mean every message.

        Raises `InvalidFilter` when the text names no tag, `SettingError` for a bad topic.
        """
        if tags is not None and not isinstance(tags, str):
            raise SettingError(f"tags must be a text such as 'paid || refunded', got {tags!r}")
        found = parse_tags(tags)
        expression = ALL if found.matches_all else str(tags)
        return cls(check_topic(topic), expression, TAG, version, found)

    @classmethod
    def by_sql(cls, topic: str, condition: str, *, version: int = 0) -> Subscription:
        """By a condition on properties, such as `amount > 100 AND region = 'eu'`.

        It is checked here when the parser is installed (`InvalidFilter` shows the fault), and by
        a broker in any case: see `subscriptioncheck`.
        """
        given: object = condition
        if not isinstance(given, str) or not given.strip():
            raise SettingError(f"a SQL92 condition must be a text that is not empty, got {given!r}")
        # The parser is an extra; the broker that evaluates the condition has it.
        with suppress(UnknownFilterType):
            compile_filter(condition, SQL92)
        return cls(check_topic(topic), condition, SQL92, version)

    @property
    def is_by_tags(self) -> bool:
        return self.type == TAG

    def is_same_filter(self, other: Subscription) -> bool:
        """Whether both want the same of their topics, whenever they were said."""
        return (self.type, self.expression) == (other.type, other.expression)

    def accepted(self, messages: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """Those that were asked for: a broker compares hashes of tags, and hashes collide."""
        if self.tags.matches_all:
            return messages
        wanted = self.tags.tags
        return [each for each in messages if each.stored.get_property(TAGS) in wanted]

    def to_data(self) -> SubscriptionData:
        """What heartbeats carry, as Java clients write it."""
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            expression_type=self.type,
            sub_version=self.version,
            tags_set=tuple(sorted(self.tags.tags)),
            code_set=self.tags.codes,
        )


class Subscriptions:
    """The subscriptions of one consumer, one per topic. Belongs to the event loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` tells the time in seconds since the epoch."""
        self._now = now
        self._by_topic: dict[str, Subscription] = {}
        self._last_version = 0

    def __len__(self) -> int:
        return len(self._by_topic)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._by_topic.values())

    def __contains__(self, topic: object) -> bool:
        return topic in self._by_topic

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)

    def get(self, topic: str) -> Subscription | None:
        return self._by_topic.get(topic)

    def put(self, subscription: Subscription) -> Subscription:
        """Subscribe; replaces what was said about the topic before. Returns it with its version."""
        said = replace(subscription, version=self._next_version())
        self._by_topic[said.topic] = said
        return said

    def remove(self, topic: str) -> bool:
        """Unsubscribe; False when there was no such subscription."""
        return self._by_topic.pop(topic, None) is not None

    def renew(self, topic: str) -> None:
        """Give a subscription a new version: the share of the queues has changed."""
        if (said := self._by_topic.get(topic)) is not None:
            self._by_topic[topic] = replace(said, version=self._next_version())

    def to_data(self) -> tuple[SubscriptionData, ...]:
        """What heartbeats carry."""
        return tuple(each.to_data() for each in self._by_topic.values())

    def _next_version(self) -> int:
        self._last_version = max(milliseconds(self._now()), self._last_version + 1)
        return self._last_version


# Asks brokers whether they can serve a subscription, before anything depends on it.


#: Seconds before a broker that is busy is asked again; twice as long each time.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0


class SubscriptionRefused(NotSupported):
    """A broker cannot serve a subscription: it does not understand it, or does not filter so."""

    def __init__(self, topic: str, expression: str, reason: str) -> None:
        self.topic = topic
        self.expression = expression
        self.reason = reason
        super().__init__(f"the broker refuses {expression!r} for topic {topic!r}: {reason}")


async def check_subscriptions(
    engine: Engine, group: str, subscriptions: Iterable[Subscription]
) -> None:
    """Have one broker of each topic look at what is not about tags. Raises `SubscriptionRefused`.

    A topic that nobody serves yet is checked by whoever will serve it, with the first pull; so is
    one whose broker is busy for longer than a request may take (`request_timeout`).
    """
    for subscription in tuple(subscriptions):
        if not subscription.is_by_tags:
            await _check(engine, group, subscription)


async def _check(engine: Engine, group: str, subscription: Subscription) -> None:
    body = CheckClientRequest(
        client_id=engine.client_id, group=group, subscription_data=subscription.to_data()
    )
    try:
        await _ask(engine, subscription.topic, encode_body(body))
    except NoRoute as error:
        _was_not_checked(group, subscription.topic, error)
    except BrokerRefused as refused:
        if refused.code == ResponseCode.SYSTEM_BUSY:
            _was_not_checked(group, subscription.topic, refused)
            return
        if refused.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            log.info(
                "the broker of %s is too old to check the subscription of group %s",
                subscription.topic,
                group,
                extra={"group": group, "topic": subscription.topic},
            )
            return
        reason = refused.remark or refused.name
        raise SubscriptionRefused(subscription.topic, subscription.expression, reason) from refused


async def _ask(engine: Engine, topic: str, body: bytes) -> None:
    """Ask a broker of a topic until it is not busy, for as long as a request may take."""
    until = engine.clock.monotonic() + engine.settings.request_timeout
    pause = _FIRST_PAUSE
    while True:
        where = await engine.routes.broker_of(topic)
        try:
            await engine.ask(where, RequestCode.CHECK_CLIENT_CONFIG, body=body)
        except BrokerRefused as refused:
            is_busy = refused.code == ResponseCode.SYSTEM_BUSY
            if not is_busy or engine.clock.monotonic() + pause > until:
                raise
        else:
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _was_not_checked(group: str, topic: str, why: ClientError) -> None:
    log.warning(
        "the subscription of group %s to %s was not checked: %s",
        group,
        topic,
        why,
        extra={"group": group, "topic": topic},
    )
