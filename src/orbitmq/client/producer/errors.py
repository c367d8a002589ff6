"""What can go wrong with a producer beyond what can with any client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from orbitmq.client.errors import BrokerRefused, ClientError, MessageRefused, SendFailed

if TYPE_CHECKING:
    from orbitmq.client.producer.results import SendResult
    from orbitmq.wire.versions import Release


class BatchFailed(SendFailed):
    """A part of a batch was not acknowledged; `results` says what was."""

    def __init__(
        self,
        topic: str,
        attempts: int,
        cause: BaseException | None,
        results: Sequence[SendResult | None],
    ) -> None:
        super().__init__(topic, attempts, cause)
        #: One for each message, in their order; None for those that were not acknowledged.
        self.results = tuple(results)
        stored = sum(result is not None for result in self.results)
        self.args = (f"{self.args[0]} ({stored} of {len(self.results)} messages are stored)",)


class NoReply(ClientError):
    """A request was sent and nobody replied in time; it may have been handled all the same."""

    retriable: ClassVar[bool] = True

    def __init__(self, topic: str, timeout: float) -> None:
        self.topic = topic
        self.timeout = timeout
        super().__init__(
            f"no reply to the request to {topic!r} within {timeout:g} s; is a consumer running "
            "that replies, and is it given enough time?"
        )


class NotARequest(ClientError):
    """A reply to a message that asks for none."""

    def __init__(self, msg_id: str, missing: str) -> None:
        self.msg_id = msg_id
        self.missing = missing
        super().__init__(
            f"message {msg_id} is no request: it has no property {missing}; only messages sent "
            "with `request` can be replied to"
        )


class RecallHandleInvalid(ClientError):
    """A text that is no handle of a message that is delivered later."""

    def __init__(self, handle: object, problem: str) -> None:
        self.handle = handle
        self.problem = problem
        shown = handle[:80] if isinstance(handle, str) else handle
        super().__init__(
            f"{shown!r} is no recall handle: {problem}; it is what `SendResult.recall_handle` of a "
            "message with `delay` or `deliver_at` says (with `delay_level` it is None: such a "
            "message cannot be taken back)"
        )


class TimesUnsupported(MessageRefused):
    """A message for later, and a broker that would deliver it at once."""

    def __init__(self, wish: str, broker: str, release: Release | None) -> None:
        self.broker = broker
        self.release = None if release is None else str(release)
        what = "an old release" if release is None else f"RocketMQ {release}"
        super().__init__(
            wish,
            f"needs brokers of RocketMQ 5.0 or later; {broker!r} is {what} and would deliver the "
            "message at once; use delay_level= there (1 to 18: 1s 5s 10s 30s 1m 2m ... 2h, unless "
            "the broker's messageDelayLevel says otherwise)",
        )


class RecallUnsupported(BrokerRefused):
    """A broker that takes no message back, whatever the handle is."""

    def __init__(self, refused: BrokerRefused, broker: str) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        self.broker = broker
        text = (
            f"broker {broker!r} ({self.address}) takes no messages back: its release of RocketMQ "
            "does not know how; let consumers drop the message instead, for instance by a key that "
            "they look up"
        )
        self.args = (text,)
