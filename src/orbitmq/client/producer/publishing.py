"""Carries sends out: finds queues, makes attempts, judges and repeats them.

Everything here belongs to the loop of the engine, except what says that threads may call it. Those
only read tables whose entries are replaced as a whole, and never wait for the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable, SendFailed
from orbitmq.client.producer.brokerlinks import BrokerLinks
from orbitmq.client.producer.drafts import Draft
from orbitmq.client.producer.errors import TimesUnsupported
from orbitmq.client.producer.faults import Faults
from orbitmq.client.producer.frames import SendFrames
from orbitmq.client.producer.results import SendResult, SendStatus
from orbitmq.client.producer.sending import (
    Sending,
    attempt_time,
    given_up,
    outcome_at_stop,
    pause_before,
    result_of,
    settle,
)
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.producer.targets import Targets
from orbitmq.client.queue import Queue
from orbitmq.errors import OrbitError
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.errors import RemotingError, RequestTimedOut
from orbitmq.remoting.pending import settling
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Is given the result or the error of a send, once, on the loop.
Done: TypeAlias = Callable[[SendResult | BaseException], None]

#: The queue of a message, and whether its topic has other brokers.
Found: TypeAlias = tuple[Queue, bool]

_GO_AWAY: Final = int(ResponseCode.GO_AWAY)


class Attempt(NamedTuple):
    """An attempt that was made, and what came of it."""

    queue: Queue
    outcome: Command | OrbitError
    connection: Connection | None


class Publisher:
    """Sends for one producer group."""

    def __init__(
        self, engine: Engine, group: str, settings: SendSettings, *, for_threads: bool = False
    ) -> None:
        """`for_threads` lets threads other than the loop's write to connections and read them."""
        self._engine = engine
        self._settings = settings
        self._monotonic = engine.clock.monotonic
        self._faults = Faults(
            self._monotonic, avoid_failed=settings.avoid_failed, avoid_slow=settings.avoid_slow
        )
        self.frames = SendFrames(
            group, settings, engine.clock.now, engine.settings.channel.connection.limits
        )
        self._links = BrokerLinks(engine, self._faults, for_threads=for_threads)
        # Looked at for every send.
        self._connections, self._sides = self._links.connections, self._links.sides
        self._targets = Targets(
            engine,
            self._faults,
            default_queues=settings.auto_create_queues,
            changed=self._links.forget,
        )
        self._known = self._targets.publications.get

    def close(self) -> None:
        """Let go of what was kept; what is still under way ends with an error."""
        self._links.close()
        self._targets.publications.close()

    # ---- sending

    async def send(self, sending: Sending) -> SendResult:
        """Make attempts until one has an outcome that counts. Raises what `settle` raises.

        But what was stored, though not as safely as wanted, has not failed, whatever comes after.
        And what may have been stored by an attempt whose answer was lost was not refused, whatever
        comes after that: no error but `SendFailed` leaves this open, or `NotRunning` after a stop.
        """
        try:
            return await self._send(sending)
        except OrbitError as error:
            if sending.result is not None:
                return sending.result
            if sending.is_open and not isinstance(error, SendFailed):
                sending.error = error
                raise sending.failed() from error
            raise

    async def _send(self, sending: Sending) -> SendResult:
        while True:
            queue, others = await self._targets.choose(sending)
            pause = pause_before(sending, queue.broker, self._settings)
            if pause and not await self._pause(sending, pause):
                return given_up(sending)
            sending.first = None
            attempt = await self._attempt(sending, queue, others)
            if isinstance(attempt.outcome, TimesUnsupported):
                self._pass_over(sending, queue, attempt.outcome)
                continue
            result = self._settle(sending, *attempt)
            if result is not None:
                return result

    @staticmethod
    def _pass_over(sending: Sending, queue: Queue, error: TimesUnsupported) -> None:
        """Have another broker asked; raises the error when the message may not go elsewhere."""
        if sending.is_bound:
            raise error
        sending.unable[queue.broker] = error

    async def _pause(self, sending: Sending, seconds: float) -> bool:
        """Wait before a broker is tried again; False when the time was up before that."""
        left = sending.deadline - self._monotonic()
        await asyncio.sleep(min(seconds, max(0.0, left)))
        return seconds < left

    async def go_on(self, sending: Sending, attempt: Attempt | None) -> SendResult:
        """Continue what a thread has begun."""
        if attempt is not None:
            result = self._settle(sending, *attempt)
            if result is not None:
                return result
        return await self.send(sending)

    async def prepare(self, sending: Sending) -> None:
        """Find its queue and connect to the broker, so that `begin` sends at once.

        What goes wrong here goes wrong again, and is told, when it is sent; or goes right then,
        elsewhere, if the broker cannot be reached.
        """
        found = await self.find(sending)
        if not isinstance(found, Exception):
            await self.connect(sending, *found)

    async def find(self, sending: Sending) -> Found | Exception:
        """The first half of that; or what is in the way."""
        try:
            found = await self._targets.choose(sending)
        except Exception as error:  # noqa: BLE001  # also a selector's
            log.debug("a send cannot begin at once: %r", error)
            return error
        sending.first = found[0]
        return found

    async def connect(
        self, sending: Sending, queue: Queue, others: bool, *, leaves_half: bool = False
    ) -> bool:
        """The second half; False when the broker cannot be reached.

        `leaves_half`: where there are other brokers, it takes no more than half of the time.
        """
        now = self._monotonic()
        limit = attempt_time(sending, now, self._settings, others=others)
        if limit <= 0:
            return True  # which says nothing about the broker
        if leaves_half and others:
            limit = min(limit, (sending.deadline - now) / 2)
        end = now + limit
        try:
            await self._links.connected(queue, limit)
        except (RemotingError, BrokerUnavailable) as error:
            log.debug("a send cannot begin at once: %r", error)
            self._faults.failed(queue.broker)
            sending.error, sending.first = error, None
            return False
        try:
            await self._links.check_times(sending.draft, queue, end - self._monotonic())
        except Exception as error:  # noqa: BLE001  # told when it is sent
            log.debug("a send cannot begin at once: %r", error)
        return True

    def pass_by(self, sending: Sending, broker: str) -> None:
        """Choose anew for one that may go anywhere and has waited for this broker in vain."""
        if not self._links.is_open(broker):
            self._faults.failed(broker)
        sending.first = None
        sending.tried[broker] = sending.tried.pop(broker, 0) + 1
        with suppress(Exception):  # told when it is sent
            chosen = self._targets.choose_known(sending)
            if chosen is not None:
                sending.first = chosen[0]

    def knows(self, topic: str) -> bool:
        """Whether the queues of a topic are known."""
        return self._known(topic) is not None

    def is_ready(self, sending: Sending) -> bool:
        """Whether `begin` would send at once. Otherwise later sends might overtake this one."""
        try:
            chosen = self._targets.choose_known(sending)
        except Exception:  # noqa: BLE001  # a selector's: told when it is sent
            return True
        if chosen is None:
            return False
        queue = sending.first = chosen[0]
        if self._links.is_unsure_of(queue, sending.draft):
            return False
        return self._links.is_open(queue.broker)

    def begin(self, sending: Sending, done: Done) -> None:
        """Send without a task of its own, unless something goes wrong; `done` is told."""
        if not self.begin_at_once(sending, done):
            self._finish_later(sending, done, "send")

    def begin_at_once(self, sending: Sending, done: Done) -> bool:
        """The same if nothing has to be found out before; False, and nothing is done, otherwise."""
        try:
            first = self._first(sending)
        except Exception as error:  # noqa: BLE001  # a selector's
            done(error)
            return True
        if first is None:
            return False
        queue, limit = first
        if limit <= 0:
            done(self._expired(sending, queue))
            return True
        connection = self._connections.get(queue.broker)
        if connection is None or not connection.is_open:
            sending.first = queue
            return False
        sending.first = None

        def settled(outcome: Command | RemotingError) -> None:
            try:
                result = self._settle(sending, queue, outcome, connection)
                if result is None:
                    self._finish_later(sending, done, "send again")
                    return
            except OrbitError as error:
                # As in `send`: what was stored has not failed, also if there is no second attempt.
                done(error if sending.result is None else sending.result)
            else:
                done(result)

        try:
            connection.submit_encoded(
                sending.draft.code,
                self.frames.encoder(sending.draft, queue, connection),
                settled,
                timeout=limit,
            )
        except RemotingError as error:
            settled(error)
        except Exception as error:  # noqa: BLE001  # no frame can be made of it: the caller's to see
            done(error)
        return True

    def expired(self, sending: Sending) -> SendFailed:
        """The error of one whose time was up while it waited for others before it."""
        queue = sending.queue or sending.first
        if queue is not None and self.knows(sending.draft.topic):
            return self._expired(sending, queue)
        if sending.error is None:
            sending.error = self._targets.unanswered(sending.timeout)
        return sending.failed()

    def _expired(self, sending: Sending, queue: Queue) -> SendFailed:
        """The time was up before anything was sent, which is no fault of the broker."""
        if sending.error is None:
            try:
                where = self._links.address(queue)
            except BrokerUnavailable as error:
                sending.error = error
            else:
                sending.error = RequestTimedOut(where, sending.draft.code, sending.timeout)
        return sending.failed()

    def _finish_later(self, sending: Sending, done: Done, name: str) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            # Here and not in the coroutine, which may be cancelled before its first step.
            if task.cancelled():
                done(outcome_at_stop(sending))

        self._engine.spawn(self._finish(sending, done), name).add_done_callback(ended)

    async def _finish(self, sending: Sending, done: Done) -> None:
        try:
            result = await self.send(sending)
        except Exception as error:  # noqa: BLE001  # also a selector's: it is the caller's to see
            done(error)
        else:
            done(result)

    def from_thread(self, sending: Sending) -> SendResult | Attempt | None:
        """Make the first attempt on the calling thread; `go_on` with all but a result.

        Raises `SendFailed` if there is no time for one.
        """
        first = self._first(sending)
        if first is None:
            return None
        queue, limit = first
        side = self._sides.get(queue.broker)
        if side is None or not side.connection.is_open:
            return None
        if limit <= 0:
            raise self._expired(sending, queue)
        sending.first = None
        draft = sending.draft
        encode = self.frames.encoder(draft, queue, side.connection)
        try:
            answer = side.ask(draft.code, encode, limit)
        except RemotingError as error:
            return Attempt(queue, error, side.connection)
        if answer.code:
            return Attempt(queue, answer, side.connection)
        faults = self._faults
        if faults.avoid_slow or faults.avoided:
            faults.answered(queue.broker, self._monotonic() - sending.began)
        return result_of(draft, queue, SendStatus.OK, answer)

    def _first(self, sending: Sending) -> tuple[Queue, float] | None:
        """Where a first attempt goes and how long it may take; None when that is not known yet."""
        draft = sending.draft
        publication = self._known(draft.topic)
        if publication is None:
            return None
        is_free = sending.queue is None and sending.select is None and sending.first is None
        if is_free and draft.wish is None and not self._faults.avoided:
            # Most sends are so, and there is nothing to consider.
            queue = publication.rotation.next_queue(publication.queues)
        else:
            queue = self._targets.choice(sending, publication)
            if draft.wish is not None and self._links.is_unsure_of(queue, draft):
                sending.first = queue
                return None
        sending.began = now = self._monotonic()
        others = publication.has_others
        return queue, attempt_time(sending, now, self._settings, others=others)

    async def tell(self, sending: Sending) -> None:
        """Send one-way: one attempt, without an answer. Raises `SendFailed`."""
        while True:
            queue, _ = await self._targets.choose(sending)
            sending.first = None
            try:
                await self._tell(sending, queue)
            except TimesUnsupported as error:
                self._pass_over(sending, queue, error)
            else:
                return

    async def _tell(self, sending: Sending, queue: Queue) -> None:
        try:
            connection = await self._links.connected(queue, sending.timeout)
            await self._links.check_times(sending.draft, queue, sending.timeout)
            header = self.frames.header(sending.draft, queue)
            connection.notify(sending.draft.code, header, body=sending.draft.body)
        except (RemotingError, BrokerUnavailable) as error:
            self._faults.failed(queue.broker)
            sending.error = error
            sending.attempts += 1
            raise sending.failed() from error

    def tell_from_thread(self, sending: Sending) -> bool:
        """Send one-way on the calling thread; False when the loop has to do it."""
        first = self._first(sending)
        side = None if first is None else self._sides.get(first[0].broker)
        if first is None or side is None or not side.is_open:
            return False
        draft = sending.draft
        header = self.frames.header(draft, first[0])
        try:
            side.tell(
                lambda opaque: side.connection.encoded(
                    Command.request(
                        draft.code, header, opaque=opaque, body=draft.body, one_way=True
                    )
                )
            )
        except RemotingError:
            return False
        return True

    def told(self) -> None:
        """The loop has told a broker something for this thread, which may not overtake it."""
        for side in list(self._sides.values()):
            side.told()

    # ---- queues

    async def queues(self, topic: str, within: float | None = None) -> tuple[Queue, ...]:
        """The queues of a topic that can be sent to, as brokers know them; see `Targets.queues`."""
        return await self._targets.queues(topic, within)

    async def is_before_5(self, topic: str, timeout: float) -> bool:  # noqa: ASYNC109
        """Whether a broker of the topic is of the old line, as far as they have said so.

        What goes wrong here goes wrong again, and is told, when something is sent.
        """
        try:
            # Half of the time, at most, is for the question: the rest is for sending.
            async with asyncio.timeout(max(0.0, timeout / 2)):
                brokers = {queue.broker for queue in await self.queues(topic)}
                return await self._links.versions.any_before_5(brokers)
        except (OrbitError, TimeoutError):
            return False

    # ---- attempts

    async def _attempt(self, sending: Sending, queue: Queue, others: bool) -> Attempt:
        now = sending.began = self._monotonic()
        limit = attempt_time(sending, now, self._settings, others=others)
        if limit <= 0:
            raise self._expired(sending, queue)
        end = now + limit
        draft = sending.draft
        connection: Connection | None = None
        try:
            connection = self._connections.get(queue.broker)
            if connection is None or not connection.is_open:
                connection = await self._links.connected(queue, limit)
                limit = end - self._monotonic()
            if self._links.is_unsure_of(queue, draft):
                await self._links.check_times(draft, queue, limit)
                limit = end - self._monotonic()
            answer = await self._ask(connection, draft, queue, limit)
        except (RemotingError, BrokerUnavailable, TimesUnsupported) as error:
            return Attempt(queue, error, connection)
        return Attempt(queue, answer, connection)

    async def _ask(
        self,
        connection: Connection,
        draft: Draft,
        queue: Queue,
        timeout: float,  # noqa: ASYNC109
    ) -> Command:
        answered: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        opaque = connection.submit_encoded(
            draft.code,
            self.frames.encoder(draft, queue, connection),
            settling(answered),
            timeout=timeout,
        )
        try:
            return await answered
        except asyncio.CancelledError:
            connection.give_up(opaque)
            raise

    def _settle(
        self,
        sending: Sending,
        queue: Queue,
        outcome: Command | OrbitError,
        connection: Connection | None,
    ) -> SendResult | None:
        if isinstance(outcome, OrbitError):
            self._targets.publications.refresh_soon(sending.draft.topic)
        elif outcome.code == _GO_AWAY and connection is not None:
            self._links.went_away(queue, connection)
        return settle(
            sending,
            queue,
            outcome,
            now=self._monotonic(),
            settings=self._settings,
            faults=self._faults,
        )
