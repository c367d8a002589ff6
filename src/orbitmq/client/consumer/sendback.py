"""Failed messages on their way back to the broker.

A failed message is sent back to the broker that stored it (36), which keeps a copy for the group
and delivers it later, or makes it a dead letter. When that broker does not take it, a copy is sent
to the group's retry topic as an ordinary message, to any broker. When that fails as well, whoever
asked keeps the message and tries again.

One that is given up goes the same way only when its broker says no, because the message is gone
there, as a rule: the copy says that it is allowed no attempts, and whoever takes it makes it a dead
letter at once. While the broker is away it is kept.

A consumer in order retries in place and gives a message up after its attempts. It sends the copy to
the retry topic as well; a broker makes it a dead letter at once, because the group holds locks on
queues. The attempts were counted in memory only, and that way they are told.

A message that never reached its handler, because middleware holds it, is none that failed: sent
back, it would lose an attempt. Where it cannot stay (in a task of Spark), a copy with the attempts
that it has goes to the retry topic. Should some member of the group consume in order, or have done
so a minute ago, its locks would make that a dead letter; so the copy is marked, and a broker of
ours has it wait. Apache's do not know the mark: what runs there needs a group of its own.

What a message carries is bounded, and it may have as much already: a reason that does not fit is
cut, or left out. The broker that takes a message back does so by itself.

Beyond what Apache's clients send: the mark, the reason of the failure, which ends up in dead
letters, and an exact delay. Brokers of Apache do not know the two fields and take the delay level,
which is the first one that is not shorter.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from orbitmq.client.consumer.verdict import DEAD, DELAY_LEVELS, Failure
from orbitmq.clock import milliseconds_up
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.message.properties import (
    DELAY,
    MAX_RECONSUME_TIMES,
    ORIGIN_MESSAGE_ID,
    RECONSUME_TIME,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TRANSACTION_PREPARED,
    WAIT,
)
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.names import retry_topic
from orbitmq.wire.bodies import SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import ConsumerSendBackRequest, GroupRequest
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.message import ReceivedMessage


log = logging.getLogger(__name__)

#: The level of the first retry; each further one is a level up.
FIRST_LEVEL: Final = 3
#: Retries that brokers allow unless the group says otherwise.
DEFAULT_RETRIES: Final = 16
#: What "no limit" is on the wire.
NO_LIMIT: Final = 2**31 - 1

#: Fields of a send-back, and properties of a copy, that OrbitMQ's broker knows.
_REASON_FIELD: Final = "reason"
_DELAY_FIELD: Final = "delayMs"
_REASON_PROPERTY: Final = "DLQ_REASON"
_PUT_OFF_PROPERTY: Final = "__ORBIT_PUT_OFF"

#: More than any broker waits for, and no more digits than it reads.
_LONGEST_DELAY_MS: Final = 10**15 - 1
#: Bytes of properties that a copy leaves to brokers: where it waits, where it came from if it is
#: dead, and what they note in every message. Two long names of topics are the most of it.
_LEFT_TO_BROKERS: Final = 1024

#: What must not count once more in a copy. `WAIT` is false in what a broker has sent once more, and
#: may be in what a producer sent; but a failed message is forgotten when its copy is taken.
_SPENT: Final = (
    WAIT,
    TRANSACTION_PREPARED,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    _PUT_OFF_PROPERTY,
)


class Resending(Protocol):
    """What sending back needs of a producer."""

    async def forward(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
    ) -> object:
        """Send a message that exists already to another topic; raises `OrbitError`."""


def level_for(delay: float) -> int:
    """The first delay level that is not shorter; the longest one if all are."""
    return min(bisect.bisect_left(DELAY_LEVELS, delay), len(DELAY_LEVELS) - 1) + 1


class SendBack:
    """Sends failed messages of one group back."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        producer: Resending,
        *,
        max_retries: int | None = None,
        timeout: float = 5.0,
    ) -> None:
        """`group` as brokers know it; `max_retries` None: as the group is set at the broker."""
        self._engine = engine
        self._group = group
        self._producer = producer
        self._max_retries = max_retries
        self._timeout = timeout

    async def send_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Have a message delivered again later, or given up; False when no broker took it."""
        if failure.is_held:
            return await self._put_off(message, failure)
        is_taken = await self._sent_back(message, failure)
        # Without a limit of our own the broker has the group's, which is not known here.
        is_used_up = message.reconsume_times >= self._allowed(message.queue.broker)
        if is_taken and (failure.level == DEAD or is_used_up):
            self._tell_dead(
                message, failure, is_sure=failure.level == DEAD or self._max_retries is not None
            )
        return is_taken

    def is_dead(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Whether a message that was taken back is a dead letter, as far as is known here."""
        if failure.level == DEAD:
            return True
        times, allowed = message.reconsume_times, self._allowed(message.queue.broker)
        # One that came again after the default attempts shows that its group has more of them.
        return times == allowed if self._max_retries is None else times >= allowed

    async def _sent_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        try:
            await self._ask(message, failure)
        except OrbitError as error:
            # A broker that is away will be there again, and has the message.
            is_kept = failure.level == DEAD and not isinstance(error, BrokerRefused)
            log.warning(
                "the broker did not take %s back, %s: %s",
                self._named(message),
                "keeping it" if is_kept else "sending it to the retry topic",
                error,
                extra=self._fields(message),
            )
            if is_kept:
                return False
        else:
            return True
        times = message.reconsume_times
        if failure.level == DEAD:
            # With no attempts allowed it is nowhere consumed again.
            return await self._resend(
                message, failure, attempts=times + 1, level=FIRST_LEVEL, allowed=0
            )
        level = failure.level or FIRST_LEVEL + times
        if failure.delay is not None:
            level = level_for(failure.delay)
        return await self._resend(
            message,
            failure,
            attempts=times + 1,
            level=level,
            allowed=self._allowed(message.queue.broker),
        )

    def _allowed(self, _broker: str) -> int:
        """The retries of a message that a broker has, as far as is known."""
        return DEFAULT_RETRIES if self._max_retries is None else self._max_retries

    async def _put_off(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Have a message delivered again with the attempts that it has."""
        return await self._resend(
            message,
            Failure(is_held=True),
            attempts=message.reconsume_times,
            level=level_for(failure.delay or 0.0),
            # A group may be allowed more than what is known here.
            allowed=NO_LIMIT,
        )

    async def give_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Make a message of a group that holds locks a dead letter; False when it was not taken."""
        is_taken = await self._given_up(message, failure)
        if is_taken:
            self._tell_dead(message, failure, is_sure=True)
        return is_taken

    async def _given_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        times = message.reconsume_times
        allowed = NO_LIMIT if self._max_retries is None else self._max_retries
        if failure.level == DEAD:
            # Also where the group holds no lock: the copy goes to any broker.
            allowed = 0
        if await self._resend(
            message, failure, attempts=times + 1, level=FIRST_LEVEL + times, allowed=allowed
        ):
            return True
        try:
            await self._ask(message, Failure(DEAD, reason=failure.reason))
        except OrbitError as error:
            log.warning(
                "%s could not be given up: %s",
                self._named(message),
                error,
                extra=self._fields(message),
            )
            return False
        return True

    async def _ask(self, message: ReceivedMessage, failure: Failure) -> None:
        stored = message.stored
        level, extra = failure.level, {}
        # A message that is given up waits for nothing.
        if failure.delay is not None and level != DEAD:
            level = level_for(failure.delay)
            extra[_DELAY_FIELD] = str(min(milliseconds_up(failure.delay), _LONGEST_DELAY_MS))
        if failure.reason:
            extra[_REASON_FIELD] = failure.reason
        header = ConsumerSendBackRequest(
            offset=stored.physical_offset,
            group=self._group,
            delay_level=level,
            origin_msg_id=message.msg_id,
            # Brokers of 5.5 fail without it.
            origin_topic=_origin_topic(message),
            max_reconsume_times=self._max_retries,
        )
        await self._engine.ask(
            self._engine.routes.master(message.queue.broker),
            RequestCode.CONSUMER_SEND_MSG_BACK,
            header,
            extra=extra,
            timeout=self._timeout,
        )

    async def _resend(
        self,
        message: ReceivedMessage,
        failure: Failure,
        *,
        attempts: int,
        level: int,
        allowed: int,
    ) -> bool:
        """Send a copy to the retry topic, with so many attempts behind it."""
        stored = message.stored
        properties = {
            name: value for name, value in stored.properties.items() if name not in _SPENT
        }
        properties |= {
            RETRY_TOPIC: _origin_topic(message),
            ORIGIN_MESSAGE_ID: message.origin_id,
            RECONSUME_TIME: str(attempts),
            MAX_RECONSUME_TIMES: str(allowed),
            DELAY: str(level),
        }
        if failure.is_held:
            properties[_PUT_OFF_PROPERTY] = "true"
        if reason := _fitting(failure.reason or "", properties):
            properties[_REASON_PROPERTY] = reason
        try:
            await self._producer.forward(
                retry_topic(self._group),
                stored.stored_body,
                properties,
                flag=stored.flag,
                sys_flag=stored.sys_flag,
            )
        except OrbitError as error:
            log.warning(
                "%s failed and could not be sent to the retry topic: %s",
                self._named(message),
                error,
                extra=self._fields(message),
            )
            return False
        return True

    def _tell_dead(self, message: ReceivedMessage, failure: Failure, *, is_sure: bool) -> None:
        attempts = message.reconsume_times + 1
        log.warning(
            "message %s of %s goes to the dead letters of group %s after %d attempt%s%s: %s",
            message.msg_id,
            _origin_topic(message),
            self._group,
            attempts,
            "" if attempts == 1 else "s",
            "" if is_sure else ", unless the broker allows the group more",
            failure.reason or "no reason given",
            extra=self._fields(message),
        )

    def _named(self, message: ReceivedMessage) -> str:
        return (
            f"message {message.msg_id} (group {self._group}, offset {message.queue_offset} of "
            f"{message.queue}, attempt {message.attempt})"
        )

    def _fields(self, message: ReceivedMessage) -> dict[str, object]:
        return {
            "group": self._group,
            "queue": str(message.queue),
            "offset": message.queue_offset,
            "message_id": message.msg_id,
            "attempt": message.attempt,
        }


def _origin_topic(message: ReceivedMessage) -> str:
    """The topic that a message was sent to, as brokers know it."""
    return message.get(RETRY_TOPIC) or message.stored.topic


def _fitting(reason: str, properties: Mapping[str, str]) -> str:
    """As much of a reason as fits beside these properties, as the value of one."""
    taken = sum(
        len(f"{name}{value}".encode("utf-8", "replace")) + 2 for name, value in properties.items()
    )
    room = MAX_PROPERTIES - _LEFT_TO_BROKERS - taken - len(_REASON_PROPERTY) - 2
    return _one_value(reason).encode("utf-8", "replace")[: max(0, room)].decode("utf-8", "ignore")


def _one_value(text: str) -> str:
    """Text that can be the value of a property: without the characters that separate them."""
    return "".join(each if each.isprintable() else " " for each in text)


# How often a message of a group may be tried, as a broker has it.


async def retries_allowed(engine: Engine, group: str, broker: str, *, timeout: float) -> int:  # noqa: ASYNC109
    """The retries that a broker allows a group, which Apache's makes by being asked for it.

    Raises `OrbitError` where it cannot be had: the broker is away or has no such group, or the
    account may not ask.
    """
    answer = await engine.ask(
        engine.routes.master(broker),
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        GroupRequest(group=group),
        timeout=timeout,
    )
    # Below 0, nothing is tried again either.
    return max(0, decode_body(SubscriptionGroupConfig, answer.body).retry_max_times)
