"""One send, from its first attempt to its outcome: the rules that all ways of sending share.

A `Sending` is the state of one call. The first attempt is made in whatever way suits the caller:
by a coroutine, by a callback, or by a blocked thread that writes the socket itself. `settle` then
says what its outcome means: a result, an error, or another attempt. Further attempts are always
made by a coroutine on the loop; they are rare.

What counts as an attempt is what reached a broker, because only that may have stored the message.
A connection that could not be made stored nothing, so it is tried again, elsewhere or after a
pause, as long as there is time: a broker that restarts is not seen by callers whose timeout is
longer than its absence. (Java's client counts these, too, and fails within milliseconds.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from orbitmq.client.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ClientError,
    NotRunning,
    SendFailed,
)
from orbitmq.client.producer.drafts import Draft
from orbitmq.client.producer.faults import Faults
from orbitmq.client.producer.queuechoice import Selector
from orbitmq.client.producer.results import STORED, SendResult, SendStatus
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.queue import Queue
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import ConnectFailed, RemotingError, TooManyRequests
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.errors import HeaderError
from orbitmq.wire.headers.send import SendMessageResponse

#: Refusals after which another broker is tried, and whether the one that refused is avoided: a
#: broker without the topic, or without the right to it, is a good one for other topics.
RETRIED: Final[Mapping[int, bool]] = {
    int(ResponseCode.SYSTEM_ERROR): True,
    int(ResponseCode.SYSTEM_BUSY): True,
    int(ResponseCode.SERVICE_NOT_AVAILABLE): True,
    int(ResponseCode.GO_AWAY): True,
    int(ResponseCode.TOPIC_NOT_EXIST): False,
    int(ResponseCode.NO_PERMISSION): False,
    int(ResponseCode.NO_BUYER_ID): False,
    int(ResponseCode.NOT_IN_CURRENT_UNIT): False,
}
#: Nothing was taken, and the message is welcome elsewhere: as good as no connection.
_NOT_COUNTED: Final = int(ResponseCode.GO_AWAY)

_OK: Final = SendStatus.OK


class Sending(msgspec.Struct, eq=False):
    """The state of one call. Changed by one attempt at a time."""

    draft: Draft
    #: When the call was made, and how long it may take altogether.
    made: float
    timeout: float
    #: The one queue that the message may go to, or what picks it.
    queue: Queue | None = None
    select: Selector | None = None
    #: Chosen for the next attempt already.
    first: Queue | None = None
    #: When the attempt under way began.
    began: float = 0.0
    #: Attempts made, and those of them that may have stored the message.
    attempts: int = 0
    counted: int = 0
    #: Whether the answer to one of them was lost: nobody knows then whether the message is stored.
    is_open: bool = False
    #: How often each broker was tried, in the order of the last times.
    tried: dict[str, int] = {}
    #: Brokers that cannot do what the message wishes, and how they said so: passed over.
    unable: dict[str, OrbitError] = {}
    error: OrbitError | None = None
    #: Stored, but not as safely as wanted.
    result: SendResult | None = None

    @property
    def deadline(self) -> float:
        """When the time of the call is up."""
        return self.made + self.timeout

    @property
    def is_bound(self) -> bool:
        """Whether the message may go to one queue only."""
        return self.queue is not None or self.select is not None

    @property
    def topic(self) -> str:
        """As the application knows it."""
        message = self.draft.message
        return self.draft.topic if message is None else message.topic

    def failed(self) -> SendFailed:
        """The error that ends the call."""
        failure = SendFailed(self.topic, self.attempts, self.error)
        failure.__cause__ = self.error
        return failure


def settle(
    sending: Sending,
    queue: Queue,
    outcome: Command | OrbitError,
    *,
    now: float,
    settings: SendSettings,
    faults: Faults,
) -> SendResult | None:
    """What an attempt led to: a result, or None for another attempt. Called by any thread.

    Raises `BrokerRefused` for a refusal that would be repeated by any broker, and `SendFailed` when
    there is no attempt or no time left.
    """
    sending.attempts += 1
    broker = queue.broker
    if isinstance(outcome, Command):
        status = STORED.get(outcome.code)
        if status is not None:
            sending.counted += 1
            faults.answered(broker, now - sending.began)
            result = result_of(sending.draft, queue, status, outcome)
            if status is _OK or sending.is_bound or not settings.retry_not_stored_ok:
                return result
            sending.result = result
        else:
            _note_refusal(sending, queue, outcome, faults)
    else:
        _note_failure(sending, queue, outcome, faults)
    sending.tried[broker] = sending.tried.pop(broker, 0) + 1
    if _may_go_on(sending, now, settings):
        return None
    return given_up(sending)


def given_up(sending: Sending) -> SendResult:
    """What is left when there is no further attempt: an unsafe result, or else the last error."""
    if sending.result is not None:
        return sending.result
    raise sending.failed()


def outcome_at_stop(sending: Sending) -> SendResult | NotRunning:
    """What becomes of a call when the producer is stopped: it may be stored all the same."""
    return sending.result or NotRunning("this producer", was_stopped=True)


def result_of(draft: Draft, queue: Queue, status: SendStatus, answer: Command) -> SendResult:
    """Where the broker says that the message is. Raises `SendFailed` if nobody can read that."""
    try:
        header = answer.header(SendMessageResponse)
    except HeaderError as error:
        raise SendFailed(draft.topic, 1, error) from error
    if header.queue_id != queue.id:
        queue = Queue(queue.topic, queue.broker, header.queue_id)
    return SendResult(
        status,
        draft.unique_id,
        header.msg_id,
        queue,
        header.queue_offset,
        header.transaction_id,
        header.recall_handle,
    )


def attempt_time(sending: Sending, now: float, settings: SendSettings, *, others: bool) -> float:
    """Seconds that the next attempt may take; `others`: whether there are other brokers."""
    left = sending.made + sending.timeout - now
    if not others and settings.attempt_timeout is None:
        return left
    if sending.is_bound or sending.counted >= settings.retries:
        return left
    if settings.attempt_timeout is not None:
        return min(left, settings.attempt_timeout)
    return left / 2


def pause_before(sending: Sending, broker: str, settings: SendSettings) -> float:
    """Seconds to wait before an attempt: none unless this broker was tried before."""
    times = sending.tried.get(broker, 0)
    return settings.retry_pause * 2 ** min(times - 1, 6) if times else 0.0


def _note_refusal(sending: Sending, queue: Queue, answer: Command, faults: Faults) -> None:
    refusal = BrokerRefused(answer.code, answer.remark, queue.broker, sending.draft.code)
    avoid = RETRIED.get(answer.code)
    if avoid is None:
        raise refusal
    if avoid:
        faults.failed(queue.broker)
    if answer.code != _NOT_COUNTED:
        sending.counted += 1
    sending.error = refusal


def _note_failure(sending: Sending, queue: Queue, error: OrbitError, faults: Faults) -> None:
    if not isinstance(error, RemotingError | ClientError) or not error.retriable:
        raise error
    faults.failed(queue.broker)
    if not isinstance(error, ConnectFailed | BrokerUnavailable):
        sending.counted += 1
        # What waits in too great a number is not sent.
        sending.is_open |= not isinstance(error, TooManyRequests)
    sending.error = error


def _may_go_on(sending: Sending, now: float, settings: SendSettings) -> bool:
    allowed = 0 if sending.is_bound else settings.retries
    return sending.counted <= allowed and now < sending.deadline
