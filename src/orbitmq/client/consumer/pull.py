"""The pull loop: each owned queue has one pull request, which is sent again and again.

There is no task and no thread per queue. A pull is an object that steps when its request is
answered or its timer fires. Each step ends with a request under way, a timer, or a wait for a
connection, so that thousands of queues cost little.

A step is always followed by another one, until the queue is released. After any failure the same
offset is pulled again later; nothing is skipped.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias

import msgspec

from orbitmq.client.consumer.settings import FlowReason, PullSettings
from orbitmq.client.consumer.subscriptions import UnmatchedFilters
from orbitmq.client.errors import BrokerUnavailable, GroupRefused, refused_by
from orbitmq.client.routes import MASTER
from orbitmq.errors import AccessDenied, BrokerRefused, ClientError, OrbitError
from orbitmq.filter.tags import ALL
from orbitmq.logonce import LogAtIntervals
from orbitmq.message.record import BATCH_MASK
from orbitmq.message.stored import decode_messages, without_inner_batches
from orbitmq.remoting.settings import RemotingError
from orbitmq.wire.codes import ForbiddenType, RequestCode, ResponseCode
from orbitmq.wire.command import Command, RequestTemplate
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import PullFlag, PullMessageRequest, PullMessageResponse

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine
    from orbitmq.client.routes import Queue
    from orbitmq.clock import Clock
    from orbitmq.message.stored import StoredMessage
    from orbitmq.remoting.blocking import Encode
    from orbitmq.remoting.connection import Connection
    from orbitmq.remoting.settings import Address


log = logging.getLogger(__name__)


#: The hold of a pull while neither a match nor the lack of one is known. Only its answer tells how
#: many messages were filtered out.
_UNSETTLED_HOLD = 3.0
#: The hold of a pull to a broker that was unreachable: its answer shows that it is back.
_RETURN_HOLD = 0.1


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
        keeps_resets: bool = False,
        rebuild: Callable[[OwnedQueue], None] | None = None,
        count: Callable[[str, int, float], None] | None = None,
    ) -> None:
        """With `is_polled` the application polls and owns the position.

        With `keeps_resets` a broker reports a reset until its offset is committed there. `count` is
        called with the topic, the number of messages and the duration of each pull that found
        messages. `rebuild` is called with a queue whose offset was illegal, once the corrected
        offset is committed: the queue must begin again.
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
            keeps_resets=keeps_resets,
            progress=None if is_broadcasting or is_polled else progress,
        )
        self.rebuild = rebuild
        self.count = count
        self.is_paused = False
        self.refusals = Refusals(group, engine.clock)
        self.filtered = UnmatchedFilters(group)
        #: Unreachable or silent brokers by name, with the reason, until they answer. (A frozen
        #: broker still accepts connections, so a connection proves nothing.)
        self.unreached: dict[str, str] = {}
        self.shared = SharedRequests(engine)
        self._pulls: dict[OwnedQueue, QueuePull] = {}
        self._counts: dict[Queue, PullDelayCounts] = {}
        self._end_watch: Callable[[], None] | None = None
        #: When the offset of a queue was last corrected.
        self._corrected: dict[Queue, float] = {}

    def begin(self, owned: OwnedQueue) -> None:
        """Pull a queue from its `next_offset` on, until it is released."""
        if owned in self._pulls:
            return
        if self._end_watch is None:
            self._end_watch = self.engine.on_connected(self._connected)
        counts = self._counts.setdefault(owned.queue, PullDelayCounts())
        pull = self._pulls[owned] = QueuePull(self, owned, counts)
        self.receiver.queues_changed(len(self._pulls))
        pull.step()

    def end(self, owned: OwnedQueue) -> None:
        """Stop pulling a queue; the answer under way is ignored."""
        pull = self._pulls.pop(owned, None)
        if pull is not None:
            pull.end()
            self.refusals.given_up(owned.queue)
            if all(other.queue.topic != owned.queue.topic for other in self._pulls):
                self.filtered.forget(owned.queue.topic)
            self.receiver.queues_changed(len(self._pulls))

    def restart(self, owned: OwnedQueue) -> None:
        """Pull from the queue's present `next_offset`; the answer under way is ignored."""
        self.end(owned)
        self.filtered.forget(owned.queue.topic)
        self.begin(owned)

    def wake(self, owned: OwnedQueue) -> None:
        """Do not wait for the timer of a delayed pull."""
        pull = self._pulls.get(owned)
        if pull is not None:
            pull.wake()

    def has_room(self, owned: OwnedQueue) -> None:
        """Messages of a queue were finished: pull now if flow control held the pull back.

        Otherwise a fast consumer would be idle until the timer fires. Cheap when nothing waits.
        """
        pull = self._pulls.get(owned)
        if pull is not None:
            pull.has_room()

    def pause(self) -> None:
        """Send no pull until `resume`; queues stay owned."""
        self.is_paused = True

    def resume(self) -> None:
        """Pull again, immediately."""
        self.is_paused = False
        for pull in tuple(self._pulls.values()):
            pull.wake()

    def stop(self) -> None:
        """End all pulls."""
        for owned in tuple(self._pulls):
            self.end(owned)
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    @property
    def refusal(self) -> GroupRefused | AccessDenied | None:
        """Why nothing can be pulled, if brokers refuse the group in every queue."""
        return self.refusals.of_all(owned.queue for owned in self._pulls if not owned.is_paused)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What prevents messages from arriving, a sentence each."""
        # Paused queues are not pulled, so they would not notice that their broker is back.
        wanted = () if self.is_paused else (each for each in self._pulls if not each.is_paused)
        brokers = {owned.queue.broker for owned in wanted}
        unreached = [
            f"group {self.group} gets nothing from {broker} until it answers: {why}"
            for broker, why in self.unreached.items()
            if broker in brokers
        ]
        return (*self.refusals.current(), *unreached, *self.filtered.current())

    @property
    def queues(self) -> tuple[OwnedQueue, ...]:
        """The queues that are pulled."""
        return tuple(self._pulls)

    def note_found(self) -> None:
        """Count the messages of pulls whose handlers have not taken them yet."""
        for pull in self._pulls.values():
            pull.note_found()

    def counts(self) -> dict[tuple[Queue, PullDelay], int]:
        """How often pulls were delayed, by queue and reason, since the consumer was made."""
        return {
            (queue, reason): count
            for queue, counts in self._counts.items()
            for reason, count in counts.totals.items()
        }

    def _connected(self, where: Address) -> None:
        for pull in tuple(self._pulls.values()):
            pull.is_connected(where)

    # ---- called by the pulls

    def hold(self, broker: str, wanted: Subscription) -> float:
        """How long a broker may hold a pull that finds nothing."""
        longest = self.settings.hold
        if broker in self.unreached:
            return min(longest, _RETURN_HOLD)
        if wanted.expression == ALL or self.filtered.is_settled(wanted):
            return longest
        return min(longest, _UNSETTLED_HOLD)

    def is_read(self, topic: str) -> bool:
        """Whether all queues of a topic were read to their ends."""
        return all(
            # A queue that was never answered is empty: its pull is being held.
            owned.max_offset is None or owned.next_offset >= owned.max_offset
            for owned in self._pulls
            if owned.queue.topic == topic
        )

    def correct(self, owned: OwnedQueue, *, is_reset: bool = False, has_lost: bool = False) -> None:
        """Commit the offset of a queue that was dropped, and begin the queue again.

        `is_reset`: the offset was set by an administrator, who waits for it, and is not illegal.
        `has_lost`: the queue ends before the position, as its broker has lost messages.
        """
        try:
            if has_lost:
                # Neither the position nor the end may be committed: the group may be before both.
                self.progress.forget(owned.queue)
            else:
                # Frozen immediately: running handlers must not move it.
                self.progress.freeze(owned.queue, owned.next_offset)
        finally:
            self.engine.spawn(
                self._correct(owned, is_reset=is_reset, has_lost=has_lost),
                f"correct the progress of {owned.queue}",
            )

    async def _correct(self, owned: OwnedQueue, *, is_reset: bool, has_lost: bool) -> None:
        if not is_reset:
            await self._space_corrections(owned.queue)
        try:
            if has_lost:
                committed = await self.progress.fetch(owned.queue)
                # Otherwise the queue begins at the committed offset, or where a queue without
                # progress begins. A reset meanwhile has set the offset itself.
                is_beyond = committed is not None and committed > owned.next_offset
                if is_beyond and not owned.is_reset:
                    self.progress.freeze(owned.queue, owned.next_offset)
            await self.progress.persist([owned.queue])
        except OrbitError as error:
            # The queue begins at the committed offset and is corrected again.
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
        """Wait if the queue was corrected just before: a broker may repeat it endlessly."""
        monotonic = self.engine.clock.monotonic
        last = self._corrected.get(queue)
        if last is not None:
            await asyncio.sleep(last + self.settings.correction_delay - monotonic())
        self._corrected[queue] = monotonic()


# ---- pull requests


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
    """Encodes the pulls of one consumer.

    Pulls of a topic differ in a few numbers. The rest is encoded once, as a template.
    """

    def __init__(
        self,
        group: str,
        settings: PullSettings,
        *,
        is_polled: bool = False,
        keeps_resets: bool = False,
        progress: ProgressStore | None = None,
    ) -> None:
        """With `progress`, pulls carry the offset to commit; not in broadcasting."""
        self._group = group
        self._settings = settings
        self._progress = progress
        self._keep_reset = keeps_resets or None
        self._posts = settings.post_subscription or is_polled
        self._flag = int(PullFlag.SUSPEND)
        if self._posts:
            self._flag |= int(PullFlag.SUBSCRIPTION)
        if is_polled:
            self._flag |= int(PullFlag.LITE_PULL)
        self._code = _POLLED if is_polled else _PUSHED
        #: Brokers before 5.0, which do not know the request code of polled pulls.
        self._old_brokers: set[str] = set()
        #: By topic and broker, each for one version of the subscription.
        self._templates: dict[
            tuple[str, str], tuple[Subscription, RequestTemplate[PullMessageRequest]]
        ] = {}

    def code(self, broker: str) -> RequestCode:
        """The request code; polled pulls have their own where brokers know it."""
        return _PUSHED if broker in self._old_brokers else self._code

    def not_supported(self, broker: str, code: RequestCode) -> bool:
        """A broker does not know this code; whether there is another one to try."""
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
        """Encodes the next pull of a queue, which the broker may hold for `hold` seconds."""
        queue = owned.queue
        progress, flag = 0, self._flag
        if self._progress is not None and broker_id == MASTER:
            # A slave would not store it.
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
            # With the subscription in the request, brokers compare no version.
            "sub_version": 0 if self._posts and subscription.is_by_tags else subscription.version,
            "subscription": subscription.expression if self._posts else None,
            "expression_type": subscription.type,
            "keep_reset": self._keep_reset,
        }


# ---- answers to pulls, and the next step after each


class PullStatus(enum.Enum):
    """The result of a pull that was served."""

    __hash__ = object.__hash__  # each is one object; an enumeration's own is slow

    FOUND = ResponseCode.SUCCESS
    NO_NEW_MESSAGE = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MESSAGE = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = ResponseCode.PULL_OFFSET_MOVED


class NextStep(enum.Enum):
    """The step after a served pull. The broker's next offset is taken in every case."""

    __hash__ = object.__hash__

    CONSUME_AND_PULL = enum.auto()
    #: No message up to the next offset matched.
    PASS_AND_PULL = enum.auto()
    #: Release the queue, commit the offset that the broker names, and begin again from there.
    DROP_AND_CORRECT = enum.auto()
    #: Continue at the offset that the broker names.
    MOVE_AND_PULL = enum.auto()


#: The next step of a push consumer.
AFTER_PULL: Mapping[PullStatus, NextStep] = MappingProxyType(
    {
        PullStatus.FOUND: NextStep.CONSUME_AND_PULL,
        PullStatus.NO_NEW_MESSAGE: NextStep.PASS_AND_PULL,
        PullStatus.NO_MATCHED_MESSAGE: NextStep.PASS_AND_PULL,
        PullStatus.OFFSET_ILLEGAL: NextStep.DROP_AND_CORRECT,
    }
)

#: The next step of a polled consumer, which owns its position.
AFTER_POLLED_PULL: Mapping[PullStatus, NextStep] = MappingProxyType(
    {**AFTER_PULL, PullStatus.OFFSET_ILLEGAL: NextStep.MOVE_AND_PULL}
)

#: Refusals that the next heartbeat resolves: the broker does not know the subscription, or an older
#: version of it.
MENDED_BY_HEARTBEAT = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)

#: How remarks of brokers before 5.0 begin, which do not send the type, when reading is disabled.
_FORBIDDEN_WORDS: Mapping[str, ForbiddenType] = {
    "subscription group no permission": ForbiddenType.GROUP,
    "the topic[": ForbiddenType.TOPIC,
    "the broker[": ForbiddenType.BROKER,
    "the consumer group[": ForbiddenType.BROADCASTING,
}

_STATUSES: Mapping[int, PullStatus] = {int(status.value): status for status in PullStatus}

#: The remark of an answer whose offset was set by an administrator.
_RESET = "OFFSET_RESET"


class Pulled(msgspec.Struct, eq=False, gc=False):
    """The answer to a pull that was served."""

    status: PullStatus
    #: The requested offset.
    offset: int
    next_offset: int
    min_offset: int
    max_offset: int
    #: The broker id, among those of one name, to ask next.
    suggested_broker: int
    #: The records, concatenated; empty unless messages were found.
    body: Bytes
    #: Whether an administrator has set the group's offset.
    is_reset: bool


def forbidden_type(answer: Command) -> ForbiddenType | None:
    """What an operator has disabled, if that is why a pull was refused."""
    if answer.code != ResponseCode.NO_PERMISSION:
        return None
    sent = answer.ext_fields.get("forbiddenType", "")
    if sent.isdecimal() and int(sent) in set(ForbiddenType):
        return ForbiddenType(int(sent))
    said = answer.remark or ""
    return next((kind for words, kind in _FORBIDDEN_WORDS.items() if said.startswith(words)), None)


def read_pulled(answer: Command, offset: int) -> Pulled | None:
    """The parsed answer; None when the broker refused.

    Raises `HeaderError` or `ClientError` for an invalid answer.
    """
    status = _STATUSES.get(answer.code)
    if status is None:
        return None
    header = answer.header(PullMessageResponse)
    if header.offset_delta:
        raise ClientError(
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
        _is_reset(answer),
    )


def _is_reset(answer: Command) -> bool:
    return answer.code == ResponseCode.PULL_OFFSET_MOVED and answer.remark == _RESET


# ---- messages of an answer, and their receiver


class Receiver(Protocol):
    """Takes what the pull loop finds: a push or a polled consumer. On the loop; must not block."""

    def queues_changed(self, count: int) -> None:
        """The number of pulled queues has changed."""

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        """The limit that keeps a queue from being pulled for now."""

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        """Take the messages that were found; returns how many matched.

        Raises `MessageError` when they cannot be decoded, and has then taken none.
        """

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        """No message below `next_offset` matches, beside those received before."""

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        """The broker has no message at the requested offset and names another one."""


def decode_pulled(pulled: Pulled) -> list[StoredMessage]:
    """The messages of a pull. Raises `MessageError`."""
    stored = decode_messages(pulled.body)
    for each in stored:
        if each.sys_flag & BATCH_MASK == BATCH_MASK:
            return without_inner_batches(stored, pulled.offset)
    return stored


# ---- the pull of one queue


#: Seconds over which the first pulls after an outage are spread.
_RETURN_SPREAD: Final = 0.05


class QueuePull:
    """The one pull of a queue: a request under way, a timer, or a wait for a connection.

    While the broker has more messages, the next pull is sent before the handlers of the last one
    run. At the end of the queue, where the pull would be held anyway, the handlers come first: the
    loop runs in order, so the pull is only put behind them.
    """

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
        #: The number of messages of the last pull and its duration, until they are counted.
        self._found: tuple[int, float] | None = None
        #: The broker id to ask, as the last answer suggested.
        self._broker_id = MASTER
        self._timer: asyncio.Handle | None = None
        self._is_over = False
        self._has_gone_back = False
        #: Whether it waits for a connection.
        self._has_lost_broker = False
        #: Whether flow control holds it back.
        self._is_held_back = False
        # The request under way.
        self._offset = owned.next_offset
        self._sent_at = 0.0
        self._code = RequestCode.PULL_MESSAGE
        self._address: Address | None = None
        self._connection: Connection | None = None
        self._subscription: Subscription | None = None

    def end(self) -> None:
        """Stop; the answer under way is ignored."""
        self._is_over = True
        self.note_found()
        self._cancel_timer()

    def wake(self) -> None:
        """Step now if a timer is set."""
        if self._timer is not None:
            self._cancel_timer()
            self.step()

    def has_room(self) -> None:
        """Step now if flow control no longer holds the pull back."""
        if self._is_held_back and self._puller.receiver.held_back(self.owned) is None:
            self.wake()

    def is_connected(self, where: Address) -> None:
        """After a reconnection to the queue's broker, pull soon instead of at the timer.

        Queues and clients are spread, so that they do not all pull in the same instant.
        """
        if not self._has_lost_broker or self._timer is None:
            return
        engine = self._puller.engine
        if where in engine.routes.brokers.get(self.owned.queue.broker, {}).values():
            self._set_timer(_RETURN_SPREAD * engine.chance.random())

    # ---- the request

    def step(self) -> None:
        """Send the next request, unless something prevents it."""
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
        except Exception as error:  # noqa: BLE001  # the loop of a queue survives every failure
            self._failed(error)

    def _against(self) -> tuple[PullDelay, object] | None:
        """Why not to pull now, checked in the order of Java clients."""
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
        assert self._subscription is not None  # noqa: S101  # checked just before
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
        """The connection could not be made."""
        if self._goes_on():
            self._broker_is_lost()
            self._put_off(PullDelay.NOT_SENT, error)

    # ---- the answer

    def _answered(self, outcome: Command | RemotingError) -> None:
        owned = self.owned
        if (self._is_over or owned.is_draining or owned.is_dropped) and not self._goes_on():
            if owned.is_draining and not isinstance(outcome, RemotingError):
                # The broker has the offset of a reset already: the last commit must not replace it.
                owned.is_reset |= _is_reset(outcome)
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
            # The broker is stopping, or wants another connection: not an error yet.
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
            if self.owned.queue.topic not in self._puller.subscriptions:
                # The broker knows of the unsubscription; the queue is given back in a moment.
                self._put_off(PullDelay.NOT_SUBSCRIBED, None)
                return
            self._puller.shared.heartbeat()
        refused = refused_by(answer, self._address or "", self._code)
        off = forbidden_type(answer)
        if off is None and self._broker_id != MASTER and is_access_denied(refused):
            # A slave has its own accounts, which may lack this one.
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
            # Not skipped: the next answer may be intact.
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
            # After everything that the loop has to run so far, handlers included.
            self._cancel_timer()
            self._timer = self._loop.call_soon(self.step)
        else:
            self.note_found()
            self._pull_after(interval if wanted else 0.0)

    def _note_filtered(self, wanted: int, pulled: Pulled) -> None:
        assert self._subscription is not None  # noqa: S101  # as in `_consume`
        self._puller.filtered.note(
            self._subscription, wanted, max(0, pulled.next_offset - pulled.offset - wanted)
        )
        if not wanted and pulled.next_offset >= pulled.max_offset:
            self._puller.filtered.at_end(self._subscription.topic, self._puller.is_read)

    def note_found(self) -> None:
        """Count the messages that were found, once their handlers have them."""
        found, self._found = self._found, None
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
            # Not held by the broker: avoid a busy loop.
            self._put_off(PullDelay.NOT_HELD, "an empty pull was answered immediately")
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
        has_lost = not pulled.is_reset and pulled.next_offset < pulled.offset
        self._puller.correct(self.owned, is_reset=pulled.is_reset, has_lost=has_lost)
        self._goes_on()

    _STEPS: ClassVar[Mapping[NextStep, Callable[[QueuePull, Pulled], None]]] = {
        NextStep.CONSUME_AND_PULL: _consume,
        NextStep.PASS_AND_PULL: _pass,
        NextStep.MOVE_AND_PULL: _move,
        NextStep.DROP_AND_CORRECT: _drop,
    }

    # ---- the next step

    def _goes_on(self) -> bool:
        """Whether the queue is still pulled; if not, the pull ends."""
        if self._is_over:
            return False
        if self.owned.is_draining or self.owned.is_dropped:
            self._puller.end(self.owned)
            return False
        return True

    def _note_going_back(self, pulled: Pulled) -> None:
        """Log once that a broker goes back: it may have lost the end of its log."""
        self._counts.note(PullDelay.WENT_BACK)
        if self._has_gone_back:
            return
        self._has_gone_back = True
        log.warning(
            "broker %s moved %s back for group %s: after a pull at %d it returned %d as next",
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
        """Return to the master, and read the route: the queue may have moved."""
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
        """Pull later; without `detail` the reason is logged elsewhere."""
        count = self._counts.note(reason)
        if reason in UNREACHED:
            self._puller.unreached[self.owned.queue.broker] = str(detail)
        group, queue = self._puller.group, self.owned.queue
        # A full buffer is the normal state of a polled consumer.
        is_normal = self._puller.is_polled and self._is_held_back
        if count and detail is not None and not is_normal:
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
        self._set_timer(self._puller.delays[reason])

    def _pull_after(self, pause: float) -> None:
        if pause > 0:
            self._set_timer(pause)
        else:
            self.step()

    def _set_timer(self, pause: float) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(pause, self.step)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# ---- delays of pulls
#
# Ordinary delays (flow control, a pause) occur many times a second: the first of a queue is logged
# and then every thousandth. Failures in a row end with a served pull: the first of each row is
# logged and then every thousandth.


#: One line in the log for this many of a kind.
EVERY = 1000


class PullDelay(enum.StrEnum):
    """Why a pull is delayed, or unusual."""

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
    #: The broker answered an empty pull without holding it.
    NOT_HELD = "not held"
    #: Not a delay: the broker named an offset below the requested one.
    WENT_BACK = "went back"
    ILLEGAL_OFFSET = "illegal offset"
    FAILED = "failed"


#: Ordinary delays, not counted as failures in a row.
_ORDINARY = frozenset(
    {
        PullDelay.PAUSED,
        PullDelay.CACHED_MESSAGES,
        PullDelay.CACHED_BYTES,
        PullDelay.OFFSET_SPAN,
        PullDelay.NOT_HELD,
    }
)
#: The broker could not be reached.
UNREACHED = frozenset({PullDelay.NO_BROKER, PullDelay.NOT_SENT, PullDelay.NO_ANSWER})
#: Delays that need no attention. (A growing span means one message that does not finish.)
_NO_TROUBLE = _ORDINARY - {PullDelay.OFFSET_SPAN}


def delays(settings: PullSettings) -> Mapping[PullDelay, float]:
    """The delay in seconds for each reason."""
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

    __slots__ = ("_in_a_row", "totals")

    def __init__(self) -> None:
        self.totals: Counter[PullDelay] = Counter()
        self._in_a_row = 0

    def note(self, reason: PullDelay) -> int:
        """Count one; returns the count if it is worth a line in the log, else 0."""
        self.totals[reason] += 1
        if reason in _ORDINARY:
            count = self.totals[reason]
        else:
            self._in_a_row += 1
            count = self._in_a_row
        return count if count % EVERY == 1 else 0

    def served(self) -> None:
        """A pull was served: the row of failures ends."""
        self._in_a_row = 0


# ---- refusals
#
# - The account may not consume, or is not known: AccessDenied. Only a change of accounts helps.
# - The group does not exist and is not created on demand: GroupRefused.
# - Reading is off for the group, the topic or the broker: ReadingDisabled, until it is enabled.
#
# A refusal of a queue ends when a pull is served or the queue is released. It is logged when it
# begins and at intervals while it lasts. Its end does not restart the interval: where brokers with
# and without the group answer by turns, every other answer would be a beginning.


#: Seconds between two log lines for a refusal that lasts.
TELL_AGAIN: Final = 600.0

#: How to enable reading again, by what was disabled.
_UNDONE_BY: Final[Mapping[ForbiddenType, str]] = {
    ForbiddenType.BROKER: "let the broker be read: permission = 6 in its settings",
    ForbiddenType.GROUP: "resume it with: orbitmq group resume {group}",
    ForbiddenType.TOPIC: "turn it on with: orbitmq topic update {topic} --permission rw",
    ForbiddenType.BROADCASTING: "allow it with: orbitmq group update {group} --broadcast",
    ForbiddenType.SUBSCRIPTION: "an administrator can allow it again",
}


class ReadingDisabled(BrokerRefused):
    """An operator has disabled reading for a group, a topic or a broker."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, topic: str, kind: ForbiddenType, refused: BrokerRefused) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        self.kind = kind
        undone_by = _UNDONE_BY[kind].format(group=group, topic=topic)
        # The same text for all topics of a paused group.
        text = f"group {group!r} gets nothing from {self.address} for now: {self.remark}"
        self.args = (f"{text}; {undone_by}",)


Refusal: TypeAlias = AccessDenied | GroupRefused | ReadingDisabled


def is_access_denied(error: BaseException | None) -> bool:
    """Whether a server refused the account. Brokers before 5.3 have no code for it."""
    return isinstance(error, BrokerRefused) and (
        error.code == ResponseCode.NO_PERMISSION
        or (error.code == ResponseCode.SYSTEM_ERROR and "AclException" in error.remark)
    )


class Refusals:
    """The present refusals of one group, and the topics that were ever served."""

    def __init__(self, group: str, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._reminders = LogAtIntervals(interval=TELL_AGAIN)
        self._queues: dict[Queue, Refusal] = {}
        #: Topics whose members are not listed to this account.
        self._topics: dict[str, AccessDenied] = {}
        self._served: set[str] = set()
        #: Called with every refusal: it may be the one that makes all arrivals impossible.
        self.on_refused: Callable[[], object] = lambda: None

    def refused(
        self, queue: Queue, refused: BrokerRefused, off: ForbiddenType | None = None
    ) -> bool:
        """Note an error of a queue; whether it is one of the refusals above."""
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
        """No broker of a topic lists the members to this account, or accepts it as a member."""
        self._topics[topic] = denied
        self._note(denied)

    def seen(self, topic: str) -> None:
        """The members are listed, or no longer needed."""
        self._topics.pop(topic, None)

    def served(self, queue: Queue, where: Address | None) -> None:
        """A broker has served a pull, so it has the group and lets it read the topic."""
        self._served.add(queue.topic)
        if not self._queues:
            return
        self._queues.pop(queue, None)
        for other, refusal in tuple(self._queues.items()):
            is_over = other.topic == queue.topic or _is_of_all_topics(refusal)
            if is_over and refusal.address == str(where):
                del self._queues[other]

    def given_up(self, queue: Queue) -> None:
        """A queue is no longer pulled: its refusal ends."""
        self._queues.pop(queue, None)

    def was_served(self, topic: str) -> bool:
        """Whether any pull of a topic was ever served."""
        return topic in self._served

    def current(self) -> tuple[str, ...]:
        """The present refusals, a sentence each."""
        return tuple(dict.fromkeys(map(str, (*self._topics.values(), *self._queues.values()))))

    def of_all(self, queues: Iterable[Queue]) -> GroupRefused | AccessDenied | None:
        """A lasting refusal, if there are queues and all of them have one."""
        found = [self._queues.get(queue) for queue in queues]
        lasting = [each for each in found if isinstance(each, GroupRefused | AccessDenied)]
        return lasting[0] if lasting and len(lasting) == len(found) else None

    def denial(
        self, shares: Mapping[str, Collection[Queue]], owned: Collection[Queue]
    ) -> AccessDenied | None:
        """Why nothing can arrive until an account changes; None if anything can.

        `shares` are the own queues of each topic, `owned` those that are pulled.
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
        if count := self._reminders.note(str(refusal), self._clock.monotonic()):
            log.log(
                logging.WARNING if isinstance(refusal, ReadingDisabled) else logging.ERROR,
                "%s",
                refusal,
                extra={"group": self._group, "broker": refusal.address, "times": count},
            )
        self.on_refused()


def _is_of_all_topics(refusal: Refusal) -> bool:
    """Whether a broker refuses the group in all topics; one served pull ends that."""
    if isinstance(refusal, ReadingDisabled):
        return refusal.kind in (ForbiddenType.GROUP, ForbiddenType.BROKER)
    return isinstance(refusal, GroupRefused)


# ---- connections, routes and heartbeats for pulls


#: Seconds between two requests for the same thing.
SPACING = 1.0


class SharedRequests:
    """Connections, routes and heartbeats, each requested once for all pulls that need it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[Address, list[QueuePull]] = {}
        #: When each route was last read and, under None, when the last heartbeat was sent.
        self._requested: dict[str | None, float] = {}

    def wait_for(self, address: Address, pull: QueuePull) -> None:
        """Step the pull when there is a connection, or report the failure to it."""
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
        """Read a route, unless that was done just before."""
        if self._is_due(topic):
            self._engine.spawn(self._refresh(topic), f"refresh the route of {topic} for pulls")

    async def _refresh(self, topic: str) -> None:
        try:
            await self._engine.routes.get(topic, refresh=True)
        except OrbitError as error:
            log.debug("route not refreshed: %s", error, extra={"topic": topic})

    def heartbeat(self) -> None:
        """Send a heartbeat, unless that was done just before: a broker does not know us."""
        if self._is_due(None):
            self._engine.spawn(self._engine.heartbeat(), "heartbeat for pulls")

    def _is_due(self, what: str | None) -> bool:
        now = self._engine.clock.monotonic()
        if not self._engine.is_running or now - self._requested.get(what, -SPACING) < SPACING:
            return False
        self._requested[what] = now
        return True
