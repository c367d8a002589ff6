"""What a handler says about the messages that it was given, and what that means for them.

A handler says it by what it returns or raises:

    returns None or True        all of them are done
    returns False               all of them failed and come again
    returns a `Verdict`         as it says
    returns an index            of a batch: those after the index failed; -1: all of them
    raises `Retry`              all failed and come again, when it says so
    raises `DeadLetter`         all are given up and go to the dead letters
    raises anything else        all failed and come again

Anything else that it returns is a mistake that must not pass for success; it counts as raised.

A low-level listener must say something: None is a failure there, as with Apache's clients.

A listener in order that turns `auto_commit` off leaves what succeeds uncommitted: it is done with
the next `COMMIT`, and comes again with a `ROLLBACK`, or when the queue goes to somebody else. Only
the listener's own verdict ends that stretch. What is said in its place (an error, a message that
middleware dropped) neither commits it nor takes it back.
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


#: Seconds of the delay levels, from level 1 on, as brokers have them unless configured otherwise.
DELAY_LEVELS: Final = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
#: Bytes of a reason that travel with a failed message.
LONGEST_REASON: Final = 1024
#: What fits the wire; brokers take a level that they do not have for their last one.
HIGHEST_LEVEL: Final = 2**31 - 1
#: What a send-back says for a delay level: the broker chooses by the attempts; dead at once.
BY_ATTEMPTS: Final = 0
DEAD: Final = -1
#: The reason of messages that stay where they are for a while.
HELD: Final = "middleware keeps the message from the handler for now"
_SILENCE: Final = "the listener returned no verdict"


class Verdict(enum.Enum):
    """What a handler or listener says about all messages of a call."""

    SUCCESS = enum.auto()
    #: They come again: through the broker, or in order after a pause with their queue waiting.
    RETRY = enum.auto()
    #: Listeners in order that commit by themselves: everything up to here is done.
    COMMIT = enum.auto()
    #: Listeners in order that commit by themselves: everything since the last commit comes again.
    ROLLBACK = enum.auto()


class Retry(Exception):
    """Raised by a handler: the messages come again, after a delay of its choice."""

    def __init__(
        self, reason: object = "", *, delay: Duration | None = None, level: int | None = None
    ) -> None:
        """`delay` is exact with OrbitMQ's broker, else rounded up to a level; `level` is 1 to 18.

        With neither, the delay grows with the attempts. The reason is a text, or an error.
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
    """Raised by a handler: trying again is of no use, the messages go to the dead letters."""

    def __init__(self, reason: object = "") -> None:
        """The reason is a text, or an error."""
        self.reason = _travelling(reason)
        super().__init__(self.reason)


class AnswerInvalid(ClientError):
    """A handler returned something that says nothing about its messages."""

    def __init__(self, handler: str, answer: object, *, is_batch: bool) -> None:
        self.handler = handler
        self.answer = repr(answer)[:200]
        allowed = "None, True, False or a Verdict"
        if is_batch:
            allowed += ", or the index of the last message that succeeded (-1: none)"
        super().__init__(f"{handler} returned {self.answer}; it may return {allowed}")


@dataclass(frozen=True, slots=True)
class Failure:
    """What shall happen to messages that failed."""

    #: `BY_ATTEMPTS`, `DEAD`, or the delay level of the next attempt.
    level: int = BY_ATTEMPTS
    #: Seconds until the next attempt, in the place of a level.
    delay: float | None = None
    #: One line for whoever looks at the message later.
    reason: str | None = None
    #: What was raised, for the log; None for a verdict or a signal.
    error: BaseException | None = None
    #: The handler was never called: this must not cost an attempt.
    is_held: bool = False

    @property
    def is_silence(self) -> bool:
        """Whether a listener said nothing at all."""
        return self.reason == _SILENCE

    @property
    def pause(self) -> float | None:
        """Seconds until the next attempt, if the handler named a delay or a level."""
        if self.delay is not None or self.level <= 0:
            return self.delay
        return float(DELAY_LEVELS[min(self.level, len(DELAY_LEVELS)) - 1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the messages of one call."""

    verdict: Verdict
    #: Those that failed; the others of the call are done.
    failed: Sequence[ReceivedMessage] = ()
    failure: Failure | None = None
    #: Of the failed ones, those that never reached the handler: they stay here, and are offered to
    #: it again after `hold` seconds. No attempt is spent on that.
    held: Sequence[ReceivedMessage] = ()
    hold: float = 0.0
    #: Of the failed ones, those that middleware put off: they come again as it says, whatever the
    #: handler says of the others.
    put_off: Sequence[ReceivedMessage] = ()
    put_off_failure: Failure | None = None
    #: A listener in order may say how long its queue pauses.
    suspend: float | None = None
    #: Whether what succeeded is done now. None: no listener said so; if calls before this one left
    #: something uncommitted, this call joins it.
    auto_commit: bool | None = True

    @property
    def is_rolled_back(self) -> bool:
        """Whether everything since the last commit comes again, without an attempt spent."""
        return self.verdict is Verdict.ROLLBACK and self.auto_commit is False

    @property
    def has_failed(self) -> bool:
        """Whether messages of the call come again."""
        return bool(self.failed) or self.is_rolled_back

    def commits(self, *, is_open: bool) -> bool:
        """Whether what succeeded, and what was left uncommitted before, is done for good now.

        `is_open`: whether calls before this one have left anything uncommitted.
        """
        if self.auto_commit is False:
            return self.verdict is Verdict.COMMIT
        # A failure speaks of its own call, not of those before.
        is_said = self.auto_commit is True and self.verdict is not Verdict.RETRY
        return is_said or not is_open

    @property
    def held_failure(self) -> Failure:
        """What shall happen to the held ones where messages cannot stay."""
        return Failure(delay=self.hold, reason=HELD, is_held=True)

    @property
    def tried(self) -> Sequence[ReceivedMessage]:
        """Those that failed with the attempt spent: all but the held ones."""
        if not self.held:
            return self.failed
        held = {id(message) for message in self.held}
        return [message for message in self.failed if id(message) not in held]

    @property
    def failures(self) -> Sequence[tuple[Sequence[ReceivedMessage], Failure]]:
        """The tried ones, by what shall happen to them."""
        failure, tried = self.failure or Failure(), self.tried
        if self.put_off_failure is None:
            return [(tried, failure)] if tried else []
        put_off = {id(message) for message in self.put_off}
        handled = [message for message in tried if id(message) not in put_off]
        both = ((handled, failure), (self.put_off, self.put_off_failure))
        return [(messages, each) for messages, each in both if messages]


#: Nearly every call ends so.
DONE: Final = Outcome(Verdict.SUCCESS)
#: The same where a listener had nothing to say in the matter: middleware spared it the messages.
SPARED: Final = Outcome(Verdict.SUCCESS, auto_commit=None)
_RETURNED_RETRY: Final = Failure(reason="the handler asked for a retry")
_UNACCOUNTED: Final = Failure(
    reason="what was said about the messages of the call does not add up to them"
)
_ROLLED_BACK: Final = Failure(reason="the listener rolled back what was not committed")
_LEFT_OUT: Final = Failure(reason="the handler acknowledged only the messages before it")


@dataclass(slots=True)
class ConsumeContext:
    """What a low-level listener is told, and where it says more than its verdict."""

    group: str
    queue: Queue
    #: With `SUCCESS`: the index of the last message that succeeded. None: all did.
    ack_index: int | None = None
    #: With `RETRY`: -1 dead letter, 0 by the attempts, else the delay level.
    delay_level: int = BY_ATTEMPTS
    #: In order: with False, only `COMMIT` moves progress on, and `ROLLBACK` is possible.
    auto_commit: bool = True
    #: In order: how long the queue pauses after a failure. None: as the consumer is set.
    suspend: Duration | None = None


def outcome_of_answer(
    answer: object, messages: Sequence[ReceivedMessage], handler: str, *, is_batch: bool
) -> Outcome:
    """What a handler's answer means. Raises `AnswerInvalid`."""
    if answer is None or answer is True or answer is Verdict.SUCCESS:
        return DONE
    if answer is False or answer is Verdict.RETRY:
        return Outcome(Verdict.RETRY, messages, _RETURNED_RETRY)
    if is_batch and isinstance(answer, int) and answer >= -1:
        return _acknowledged(answer, messages, _LEFT_OUT)
    raise AnswerInvalid(handler, answer, is_batch=is_batch)


def outcome_of_error(error: BaseException, messages: Sequence[ReceivedMessage]) -> Outcome:
    """What it means that a handler or a listener raised something."""
    return Outcome(Verdict.RETRY, messages, _failure_of(error))


def outcome_of_verdict(
    verdict: object,
    context: ConsumeContext,
    messages: Sequence[ReceivedMessage],
    listener: str,
    *,
    in_order: bool = True,
) -> Outcome:
    """What a low-level listener's verdict means. Raises `AnswerInvalid`, `SettingError`."""
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
            # A mistake, and no success: nothing is left uncommitted here that it could be about.
            reason = f"{verdict.name} is for consumption in order"
            return Outcome(Verdict.RETRY, messages, Failure(reason=reason))
        outcome = Outcome(verdict, suspend=suspend, auto_commit=auto_commit)
        return replace(outcome, failure=_ROLLED_BACK) if outcome.is_rolled_back else outcome
    raise AnswerInvalid(listener, verdict, is_batch=False)


def accounted(outcome: Outcome, messages: Sequence[ReceivedMessage]) -> Outcome:
    """An outcome that speaks of all messages of its call, and of no others.

    What is not among the failed ones counts as done. So one that names strangers, or a message
    twice, cannot be believed in what it does not name either: all messages come again.
    """
    failed = [message.queue_offset for message in outcome.failed]
    if not failed:
        return outcome
    of_call = {message.queue_offset for message in messages}
    if len(set(failed)) == len(failed) and of_call.issuperset(failed):
        return outcome
    return Outcome(Verdict.RETRY, messages, _UNACCOUNTED, auto_commit=outcome.auto_commit)


def reason_of(error: BaseException) -> str:
    """The kind of an error and the first line of its text, short enough to travel."""
    lines = text_of(error).splitlines()
    return _cut(type(error).__name__ + (f": {lines[0]}" if lines else ""))


def text_of(value: object) -> str:
    """The text of somebody's object, which may be unable to give one."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001  # whatever its `__str__` raises
        return f"(no text: {type(error).__name__})"


def _travelling(reason: object) -> str:
    """A reason as it travels with a message, whatever somebody gave for one."""
    if isinstance(reason, BaseException):
        return reason_of(reason)
    return "" if reason is None else _cut(text_of(reason))


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:LONGEST_REASON].decode("utf-8", "ignore")


def _said_in(context: ConsumeContext) -> tuple[int, int, float | None]:
    """What a listener wrote into its context: delay level, index, pause. Raises `SettingError`.

    Here, where it counts as raised by the listener: later it would be found in the middle of
    settling what the listener said.
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
    # By what it has and not by what it was made with: a class of the application's own may have
    # left `__init__` out, or have written something else over it since.
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
