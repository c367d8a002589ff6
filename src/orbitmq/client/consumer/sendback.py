"""Sends failed messages back to the broker, which delivers them later or makes dead letters.

A message goes to the broker that stored it (36); if that broker does not take it, a copy goes to
the group's retry topic at any broker; if that fails, the caller keeps the message and tries again.
A message that is given up is kept while its broker is away.

Orderly consumption retries in place and sends only what it gives up. It uses the retry topic, whose
broker makes dead letters of a group that holds locks, so that the attempts counted here are stored.

OrbitMQ's brokers also read three properties: an exact delay, the reason of the failure, and a mark
of messages that never reached their handler, which costs no attempt.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.verdict import DEAD, DELAY_LEVELS, Failure
from orbitmq.client.producer.producer import AsyncProducer
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
    from orbitmq.client.message import Message, ReceivedMessage
    from orbitmq.client.producer.send import SendResult


log = logging.getLogger(__name__)

#: The level of the first retry; each further retry is one level up.
FIRST_LEVEL: Final = 3
#: Retries that brokers allow unless the group has another number.
DEFAULT_RETRIES: Final = 16
#: "No limit" on the wire.
NO_LIMIT: Final = 2**31 - 1

#: Fields of a send-back, and properties of a copy, that OrbitMQ's broker knows.
_REASON_FIELD: Final = "reason"
_DELAY_FIELD: Final = "delayMs"
_REASON_PROPERTY: Final = "DLQ_REASON"
_PUT_OFF_PROPERTY: Final = "__ORBIT_PUT_OFF"

#: Longer than any broker waits, and no more digits than it reads.
_LONGEST_DELAY_MS: Final = 10**15 - 1
#: Bytes of properties that a copy leaves to brokers, mostly for two long topic names.
_LEFT_TO_BROKERS: Final = 1024

#: Properties that a copy must not have again. `WAIT` may be false in the original; but a failed
#: message is finished when its copy was taken, so its copy must be stored first.
_SPENT: Final = (
    WAIT,
    TRANSACTION_PREPARED,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    _PUT_OFF_PROPERTY,
)


#: The producer of results, and of messages that no broker takes back, named as in Apache's clients.
_INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"


class LazyProducer:
    """A producer that is started by its first message."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._producer: AsyncProducer | None = None

    async def forward(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
    ) -> object:
        """Send an existing message to another topic. Raises `OrbitError`."""
        producer = await self._started()
        return await producer.forward(topic, body, properties, flag=flag, sys_flag=sys_flag)

    async def send(self, message: Message) -> SendResult:
        """Send a message of the application. Raises `OrbitError`."""
        return await (await self._started()).send(message)

    async def _started(self) -> AsyncProducer:
        if self._producer is None:
            self._producer = AsyncProducer.on(self._engine, _INNER_PRODUCER)
            await self._producer.start()
        return self._producer

    async def stop(self) -> None:
        if self._producer is not None:
            await self._producer.stop()


def level_for(delay: float) -> int:
    """The first delay level that is not shorter, or the longest one."""
    return min(bisect.bisect_left(DELAY_LEVELS, delay), len(DELAY_LEVELS) - 1) + 1


class SendBack:
    """Sends failed messages of one group back."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        producer: LazyProducer,
        *,
        max_retries: int | None = None,
        timeout: float = 5.0,
    ) -> None:
        """`group` is the name that brokers know; without `max_retries` the broker decides."""
        self._engine = engine
        self._group = group
        self._producer = producer
        self._max_retries = max_retries
        self._timeout = timeout

    async def send_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Have a message delivered later, or given up; False when no broker took it."""
        if failure.is_held:
            return await self._put_off(message, failure)
        is_taken = await self._sent_back(message, failure)
        # Without a limit here the broker uses the group's, which is not known here.
        is_used_up = message.reconsume_times >= self._allowed(message.queue.broker)
        if is_taken and (failure.level == DEAD or is_used_up):
            self._log_dead(
                message, failure, is_sure=failure.level == DEAD or self._max_retries is not None
            )
        return is_taken

    def is_dead(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Whether a message that was taken is a dead letter, as far as known here."""
        if failure.level == DEAD:
            return True
        times, allowed = message.reconsume_times, self._allowed(message.queue.broker)
        # A message that came again after the default attempts shows that its group has more.
        return times == allowed if self._max_retries is None else times >= allowed

    async def _sent_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        try:
            await self._ask(message, failure)
        except OrbitError as error:
            # A broker that is away will be back, with the message.
            is_kept = failure.level == DEAD and not isinstance(error, BrokerRefused)
            log.warning(
                "the broker did not take %s back, %s: %s",
                self._named(message),
                "keeping it" if is_kept else "sending it to the retry topic",
                error,
                extra=log_fields(self._group, message),
            )
            if is_kept:
                return False
        else:
            return True
        times = message.reconsume_times
        if failure.level == DEAD:
            # With no attempts allowed it is not consumed again.
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
        """The retries of a message that its broker has counted, as far as known."""
        return DEFAULT_RETRIES if self._max_retries is None else self._max_retries

    async def _put_off(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Have a message delivered again with its present number of attempts."""
        return await self._resend(
            message,
            Failure(is_held=True),
            attempts=message.reconsume_times,
            level=level_for(failure.delay or 0.0),
            # The group may be allowed more than is known here.
            allowed=NO_LIMIT,
        )

    async def give_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        """Make a message of an orderly group a dead letter; False when it was not taken."""
        is_taken = await self._given_up(message, failure)
        if is_taken:
            self._log_dead(message, failure, is_sure=True)
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
                "%s could not be sent to the dead letters: %s",
                self._named(message),
                error,
                extra=log_fields(self._group, message),
            )
            return False
        return True

    async def _ask(self, message: ReceivedMessage, failure: Failure) -> None:
        stored = message.stored
        level, extra = failure.level, {}
        # A message that is given up does not wait.
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
        """Send a copy to the retry topic with a number of attempts."""
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
                extra=log_fields(self._group, message),
            )
            return False
        return True

    def _log_dead(self, message: ReceivedMessage, failure: Failure, *, is_sure: bool) -> None:
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
            extra=log_fields(self._group, message),
        )

    def _named(self, message: ReceivedMessage) -> str:
        return (
            f"message {message.msg_id} (group {self._group}, offset {message.queue_offset} of "
            f"{message.queue}, attempt {message.attempt})"
        )


def log_fields(group: str, message: ReceivedMessage) -> dict[str, object]:
    """The fields of a log line about a message."""
    return {
        "group": group,
        "queue": str(message.queue),
        "offset": message.queue_offset,
        "message_id": message.msg_id,
        "attempt": message.attempt,
    }


def _origin_topic(message: ReceivedMessage) -> str:
    """The original topic of a message, as brokers know it."""
    return message.get(RETRY_TOPIC) or message.stored.topic


def _fitting(reason: str, properties: Mapping[str, str]) -> str:
    """A reason, cut to the bytes that the other properties leave."""
    taken = sum(
        len(f"{name}{value}".encode("utf-8", "replace")) + 2 for name, value in properties.items()
    )
    room = MAX_PROPERTIES - _LEFT_TO_BROKERS - taken - len(_REASON_PROPERTY) - 2
    return _one_value(reason).encode("utf-8", "replace")[: max(0, room)].decode("utf-8", "ignore")


def _one_value(text: str) -> str:
    """Text without the characters that separate properties."""
    return "".join(each if each.isprintable() else " " for each in text)


# ---- the broker's limit of attempts


async def retries_allowed(engine: Engine, group: str, broker: str, *, timeout: float) -> int:  # noqa: ASYNC109
    """The retries that a broker allows a group. Apache's brokers create the group on this request.

    Raises `OrbitError` if the broker is away, has no such group or denies the request.
    """
    answer = await engine.ask(
        engine.routes.master(broker),
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        GroupRequest(group=group),
        timeout=timeout,
    )
    # Below 0 there are no retries either.
    return max(0, decode_body(SubscriptionGroupConfig, answer.body).retry_max_times)
