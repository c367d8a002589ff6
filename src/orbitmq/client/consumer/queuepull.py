"""The one pull of a queue: what speaks against asking, and what an answer leads to.

Which comes first when messages were found, their handlers or the next pull? As long as the broker
has more, the pull: it is served while handlers run. At the end of the queue, where it would be held
anyway, the handlers: to ask costs as much as half of the way of a message from the socket to its
handler. The loop does what it is given in order, so that the pull only has to be put behind them;
and with it what is counted and kept of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from orbitmq.client.consumer.pullanswers import (
    MENDED_BY_HEARTBEAT,
    NextStep,
    Pulled,
    forbidden_type,
    read_pulled,
)
from orbitmq.client.consumer.refusals import is_access_denied
from orbitmq.client.consumer.setbacks import UNREACHED, Setback, SetbackCounts, tell
from orbitmq.client.errors import BrokerRefused, BrokerUnavailable
from orbitmq.client.topicroute import MASTER
from orbitmq.errors import OrbitError
from orbitmq.filter.tags import ALL
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.pulling import Puller
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.remoting.address import Address
    from orbitmq.remoting.connection import Connection

log = logging.getLogger(__name__)

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

    def __init__(self, puller: Puller, owned: OwnedQueue, counts: SetbackCounts) -> None:
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

    def _against(self) -> tuple[Setback, object] | None:
        """What speaks against a pull now, in the order in which Java clients look at it."""
        puller, owned = self._puller, self.owned
        owned.last_pull = puller.engine.clock.monotonic()
        if not puller.engine.is_running:
            return Setback.NOT_RUNNING, "the client is not running"
        if puller.is_paused or owned.is_paused:
            return Setback.PAUSED, "until resumed"
        if (reason := puller.receiver.held_back(owned)) is not None:
            self._is_held_back = True
            return Setback(reason), f"next offset {owned.next_offset}"
        if owned.lock is not None and not owned.lock.is_held(owned.last_pull):
            return Setback.NOT_LOCKED, "the broker has not confirmed the lock"
        self._subscription = puller.subscriptions.get(owned.queue.topic)
        if self._subscription is None:
            return Setback.NOT_SUBSCRIBED, "the topic is not subscribed to"
        return None

    def _ask(self) -> None:
        puller, owned = self._puller, self.owned
        queue = owned.queue
        try:
            address, broker_id = puller.engine.routes.address(queue.broker, wanted=self._broker_id)
        except BrokerUnavailable as error:
            puller.shared.refresh_route(queue.topic)
            self._put_off(Setback.NO_BROKER, error)
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
            self._put_off(Setback.NOT_SENT, error)

    def not_connected(self, error: OrbitError) -> None:
        """The connection that this pull waited for could not be made."""
        if self._goes_on():
            self._broker_is_lost()
            self._put_off(Setback.NOT_SENT, error)

    # ---- being answered

    def _answered(self, outcome: Command | RemotingError) -> None:
        owned = self.owned
        if (self._is_over or owned.is_draining or owned.is_dropped) and not self._goes_on():
            return
        try:
            if isinstance(outcome, RemotingError):
                self._broker_is_lost()
                self._put_off(Setback.NO_ANSWER, outcome)
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
            self._put_off(Setback.UNREADABLE, error)
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
            self._put_off(Setback.BROKER_BUSY, answer.remark)
            return
        if answer.code in MENDED_BY_HEARTBEAT:
            self._puller.shared.heartbeat()
        refused = BrokerRefused(answer.code, answer.remark, self._address or "", self._code)
        off = forbidden_type(answer)
        if off is None and self._broker_id != MASTER and is_access_denied(refused):
            # A slave has accounts of its own, and nobody has to be let in there.
            self._broker_id = MASTER
            self._put_off(Setback.REFUSED, refused)
        elif self._puller.refusals.refused(self.owned.queue, refused, off):
            self._put_off(Setback.REFUSED, None)
        else:
            self._put_off(Setback.REFUSED, f"code {answer.code}: {answer.remark}")

    def _consume(self, pulled: Pulled) -> None:
        assert self._subscription is not None  # noqa: S101  # it was sent with the request
        took = self._monotonic() - self._sent_at
        try:
            wanted = self._puller.receiver.received(self.owned, pulled, self._subscription)
        except OrbitError as error:
            # Never skipped: the next answer to the same question may be whole.
            self._put_off(Setback.UNREADABLE, error)
            return
        self._found = wanted, took
        self.owned.next_offset = pulled.next_offset
        if pulled.next_offset <= pulled.offset:
            self.note_found()
            self._note_going_back(pulled)
            self._set_timer(self._puller.delays[Setback.WENT_BACK])
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
            self._put_off(Setback.NOT_HELD, "an empty pull was answered at once")
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
        self._counts.note(Setback.WENT_BACK)
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
        self._counts.note(Setback.ILLEGAL_OFFSET)
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
            self._put_off(Setback.FAILED, error)

    def _put_off(self, setback: Setback, detail: object | None) -> None:
        """Pull later; without `detail`, it is told elsewhere why."""
        count = self._counts.note(setback)
        if setback in UNREACHED:
            self._puller.unreached[self.owned.queue.broker] = str(detail)
        # To have fetched enough ahead is what a consumer that is polled is for.
        is_told = detail is None or (self._puller.is_polled and self._is_held_back)
        if count and not is_told:
            tell(self._puller.group, self.owned.queue, setback, count, detail)
        self._set_timer(self._puller.delays[setback])

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
