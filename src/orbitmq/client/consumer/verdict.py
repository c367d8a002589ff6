"""The result of a handler call, and what follows from it for the messages.

The results are None or True (done), False (retry), a `Verdict`, or for a batch the index of the
last message that succeeded. `Retry` and `DeadLetter` are raised; every other exception is a retry.
Any other result counts as an exception. A low-level listener must return a verdict.

An ordered listener with `auto_commit` off leaves messages uncommitted. Only its own `COMMIT` or
`ROLLBACK` ends that: neither an error nor a message that middleware dropped does.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from orbitmq.errors import ClientError, SettingError
from orbitmq.parsing import Duration, seconds, whole

if TYPE_CHECKING:
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue


#: Seconds of the delay levels from level 1 on, as brokers have them by default.
DELAY_LEVELS: Final = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
#: Bytes of a reason that travel with a failed message.
LONGEST_REASON: Final = 1024
#: The largest level on the wire; brokers use their last level for one that they do not have.
HIGHEST_LEVEL: Final = 2**31 - 1
#: Delay levels of a send-back: the broker chooses by the attempts; dead letter immediately.
BY_ATTEMPTS: Final = 0
DEAD: Final = -1
#: The reason of messages that stay in their queue for a while.
HELD: Final = "middleware keeps the message from the handler for now"
_SILENCE: Final = "the listener returned no verdict"


class Verdict(enum.Enum):
    """The result for all messages of a call."""

    SUCCESS = enum.auto()
    #: Retry, through the broker, or in order after a pause of the queue.
    RETRY = enum.auto()
    #: Ordered listeners that commit by themselves: everything up to here is done.
    COMMIT = enum.auto()
    #: The same listeners: everything since the last commit is delivered again.
    ROLLBACK = enum.auto()


class Retry(Exception):
    """Raised by a handler: the messages are retried, optionally after a given delay."""

    def __init__(
        self, reason: object = "", *, delay: Duration | None = None, level: int | None = None
    ) -> None:
        """`delay` in seconds, exact with OrbitMQ's broker, else rounded up; or `level` 1 to 18.

        Without either, the delay grows with the attempts. The reason is a text or an exception.
        """
        if delay is not None and level is not None:
            raise SettingError("give Retry a delay or a level, not both")
        #: Seconds.
        self.delay = None if delay is None else seconds(delay, "Retry.delay")
        if self.delay is not None and self.delay < 0:
            raise SettingError(f"Retry.delay must not be negative, got {self.delay}")
        self.level = None if level is None else whole(level, "Retry.level", most=HIGHEST_LEVEL)
        self.reason = _travelling(reason)
        super().__init__(self.reason)


class DeadLetter(Exception):
    """Raised by a handler: a retry is useless, the messages become dead letters."""

    def __init__(self, reason: object = "") -> None:
        """The reason is a text or an exception."""
        self.reason = _travelling(reason)
        super().__init__(self.reason)


class BodyMismatch(DeadLetter):
    """Raised instead of a call: bodies that do not match what the handler takes.

    The other messages of a batch are offered again without them; that costs no attempt.
    """

    def __init__(self, reason: str, messages: Sequence[ReceivedMessage]) -> None:
        super().__init__(reason)
        #: Those that do not match.
        self.messages = messages


class AnswerInvalid(ClientError):
    """A handler returned a value that has no meaning."""

    def __init__(self, handler: str, answer: object, *, is_batch: bool) -> None:
        self.handler = handler
        self.answer = repr(answer)[:200]
        allowed = "None, True, False or a Verdict"
        if is_batch:
            allowed += ", or the index of the last message that succeeded (-1: none)"
        super().__init__(f"{handler} returned {self.answer}; it may return {allowed}")


@dataclass(frozen=True, slots=True)
class Failure:
    """What happens to failed messages."""

    #: `BY_ATTEMPTS`, `DEAD`, or the delay level of the next attempt.
    level: int = BY_ATTEMPTS
    #: Seconds until the next attempt, instead of a level.
    delay: float | None = None
    #: One line for people who look at the message later.
    reason: str | None = None
    #: The exception, for the log; None for a verdict, `Retry` or `DeadLetter`.
    error: BaseException | None = None
    #: The handler was not called: this costs no attempt.
    is_held: bool = False
    #: The handler was not called, as the body is not what it takes.
    is_mismatch: bool = False

    @property
    def is_silence(self) -> bool:
        """Whether a listener returned no verdict."""
        return self.reason == _SILENCE

    @property
    def pause(self) -> float | None:
        """Seconds until the next attempt, if the handler gave a delay or a level."""
        if self.delay is not None or self.level <= 0:
            return self.delay
        return float(DELAY_LEVELS[min(self.level, len(DELAY_LEVELS)) - 1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one call."""

    verdict: Verdict
    #: Failed messages; the others of the call are done.
    failed: Sequence[ReceivedMessage] = ()
    failure: Failure | None = None
    #: Failed messages that never reached the handler: they stay here and are offered again after
    #: `hold` seconds (0: at once), without spending an attempt.
    held: Sequence[ReceivedMessage] = ()
    hold: float = 0.0
    #: The pause of the queue that an ordered listener asks for.
    suspend: float | None = None
    #: Whether successful messages are committed. None: not decided by a listener; the call joins
    #: the uncommitted ones before it.
    auto_commit: bool | None = True

    @property
    def is_rolled_back(self) -> bool:
        """Whether everything since the last commit is delivered again, without an attempt spent."""
        return self.verdict is Verdict.ROLLBACK and self.auto_commit is False

    @property
    def has_failed(self) -> bool:
        """Whether messages of the call are delivered again."""
        return bool(self.failed) or self.is_rolled_back

    def commits(self, *, is_open: bool) -> bool:
        """Whether successful messages, and uncommitted ones before, are committed now.

        `is_open`: whether earlier calls have left uncommitted messages.
        """
        if self.auto_commit is False:
            return self.verdict is Verdict.COMMIT
        # A failure concerns its own call only.
        is_said = self.auto_commit is True and self.verdict is not Verdict.RETRY
        return is_said or not is_open

    @property
    def held_failure(self) -> Failure:
        """What happens to held messages where they cannot stay."""
        return Failure(delay=self.hold, reason=HELD, is_held=True)

    @property
    def tried(self) -> Sequence[ReceivedMessage]:
        """Failed messages that have spent an attempt: all but the held ones."""
        if not self.held:
            return self.failed
        held = {id(message) for message in self.held}
        return [message for message in self.failed if id(message) not in held]


#: The outcome of nearly every call.
DONE: Final = Outcome(Verdict.SUCCESS)
#: The same for messages that middleware kept from a listener.
SPARED: Final = Outcome(Verdict.SUCCESS, auto_commit=None)
_RETURNED_RETRY: Final = Failure(reason="the handler asked for a retry")
_ROLLED_BACK: Final = Failure(reason="the listener rolled back what was not committed")
_LEFT_OUT: Final = Failure(reason="the handler acknowledged only the messages before it")


@dataclass(slots=True)
class ConsumeContext:
    """What a low-level listener may set in addition to its verdict."""

    group: str
    queue: Queue
    #: With `SUCCESS`: the index of the last message that succeeded. None: all did.
    ack_index: int | None = None
    #: With `RETRY`: -1 dead letter, 0 by the attempts, else the delay level.
    delay_level: int = BY_ATTEMPTS
    #: In order: if False, only `COMMIT` commits, and `ROLLBACK` is possible.
    auto_commit: bool = True
    #: In order: the pause of the queue after a failure. None: as set for the consumer.
    suspend: Duration | None = None


def outcome_of_answer(
    answer: object, messages: Sequence[ReceivedMessage], handler: str, *, is_batch: bool
) -> Outcome:
    """The outcome of a handler's result. Raises `AnswerInvalid`."""
    if answer is None or answer is True or answer is Verdict.SUCCESS:
        return DONE
    if answer is False or answer is Verdict.RETRY:
        return Outcome(Verdict.RETRY, messages, _RETURNED_RETRY)
    if is_batch and isinstance(answer, int) and answer >= -1:
        return _acknowledged(answer, messages, _LEFT_OUT)
    raise AnswerInvalid(handler, answer, is_batch=is_batch)


def outcome_of_error(error: BaseException, messages: Sequence[ReceivedMessage]) -> Outcome:
    """The outcome of an exception of a handler or listener."""
    failure = _failure_of(error)
    if isinstance(error, BodyMismatch):
        mismatched = {id(message) for message in error.messages}
        held = [message for message in messages if id(message) not in mismatched]
        return Outcome(Verdict.RETRY, messages, replace(failure, is_mismatch=True), held=held)
    return Outcome(Verdict.RETRY, messages, failure)


def outcome_of_verdict(
    verdict: object,
    context: ConsumeContext,
    messages: Sequence[ReceivedMessage],
    listener: str,
    *,
    in_order: bool = True,
) -> Outcome:
    """The outcome of a listener's verdict. Raises `AnswerInvalid`, `SettingError`."""
    auto_commit = bool(context.auto_commit) or not in_order
    if verdict is Verdict.SUCCESS and context.ack_index is None:
        return DONE if auto_commit else Outcome(Verdict.SUCCESS, auto_commit=False)
    level, index, suspend = _said_in(context)
    if verdict is Verdict.SUCCESS:
        return _acknowledged(max(-1, index), messages, Failure(level), auto_commit=auto_commit)
    if verdict is None or verdict is Verdict.RETRY:
        reason = _SILENCE if verdict is None else _RETURNED_RETRY.reason
        return Outcome(
            Verdict.RETRY,
            messages,
            Failure(level, reason=reason),
            suspend=suspend,
            auto_commit=auto_commit,
        )
    if isinstance(verdict, Verdict):
        if not in_order:
            # A mistake and no success: there is nothing uncommitted here.
            reason = f"{verdict.name} is for consumption in order"
            return Outcome(Verdict.RETRY, messages, Failure(reason=reason))
        outcome = Outcome(verdict, suspend=suspend, auto_commit=auto_commit)
        return replace(outcome, failure=_ROLLED_BACK) if outcome.is_rolled_back else outcome
    raise AnswerInvalid(listener, verdict, is_batch=False)


def reason_of(error: BaseException) -> str:
    """The type of an exception and the first line of its text, shortened."""
    lines = text_of(error).splitlines()
    return _cut(type(error).__name__ + (f": {lines[0]}" if lines else ""))


def text_of(value: object) -> str:
    """The text of an object, whose `__str__` may fail."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001  # whatever its `__str__` raises
        return f"(no text: {type(error).__name__})"


def _travelling(reason: object) -> str:
    """A reason in the form that travels with a message."""
    if isinstance(reason, BaseException):
        return reason_of(reason)
    return "" if reason is None else _cut(text_of(reason))


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:LONGEST_REASON].decode("utf-8", "ignore")


def _said_in(context: ConsumeContext) -> tuple[int, int, float | None]:
    """The checked delay level, index and pause of a context. Raises `SettingError`.

    Checked here, where it counts as raised by the listener, and not while the call is settled.
    """
    level = whole(context.delay_level, "context.delay_level", least=DEAD, most=HIGHEST_LEVEL)
    index = -1 if context.ack_index is None else context.ack_index
    whole(index, "context.ack_index", least=-sys.maxsize)
    suspend = context.suspend
    return level, index, None if suspend is None else seconds(suspend, "context.suspend")


def _acknowledged(
    index: int,
    messages: Sequence[ReceivedMessage],
    failure: Failure,
    *,
    auto_commit: bool = True,
) -> Outcome:
    failed = messages[index + 1 :]
    if not failed:
        return DONE if auto_commit else Outcome(Verdict.SUCCESS, auto_commit=False)
    return Outcome(Verdict.SUCCESS, failed, failure, auto_commit=auto_commit)


def _failure_of(error: BaseException) -> Failure:
    # By attributes, as a subclass of the application may have left `__init__` out.
    match error:
        case DeadLetter():
            reason = _travelling(getattr(error, "reason", ""))
            return Failure(DEAD, reason=reason or "the handler gave it up")
        case Retry():
            try:
                asked = Retry(
                    getattr(error, "reason", ""),
                    delay=getattr(error, "delay", None),
                    level=getattr(error, "level", None),
                )
            except SettingError as wrong:
                return Failure(reason=reason_of(wrong), error=error)
            reason = asked.reason or _RETURNED_RETRY.reason or ""
            return Failure(asked.level or BY_ATTEMPTS, asked.delay, reason)
        case _:
            return Failure(reason=reason_of(error), error=error)
