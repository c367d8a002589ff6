"""How handlers and listeners are recognised and called, and what their answers mean."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.handlers import DEFAULT_BATCH, bind_handler, bind_listener
from orbitmq.client.consumer.verdict import (
    BY_ATTEMPTS,
    DEAD,
    LONGEST_REASON,
    ConsumeContext,
    DeadLetter,
    Retry,
    Verdict,
    outcome_of_answer,
    outcome_of_error,
    outcome_of_verdict,
    reason_of,
)
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import LogDeliveries
from orbitmq.errors import ClientError, OrbitError, SettingError
from tests.support.consuming import GROUP, QUEUE, called, consuming, received, until

if TYPE_CHECKING:
    # Not there when the program runs: annotations that cannot be evaluated.
    from orbitmq.client import message as only_for_types

MESSAGES = [received(offset) for offset in range(3)]
RETRY, SUCCESS = Verdict.RETRY, Verdict.SUCCESS
surrounded = pytest.mark.parametrize(
    "middleware", [[], [LogDeliveries()]], ids=["bare", "surrounded"]
)


# ---- which functions are handlers


def one(message: ReceivedMessage) -> None: ...


def many(messages: list[ReceivedMessage]) -> None: ...


def sequence(messages: Sequence[ReceivedMessage]) -> None: ...


def hidden(messages: list[only_for_types.ReceivedMessage]) -> None: ...


def generator(message: ReceivedMessage) -> Iterator[int]:
    yield 1


async def async_generator(message: ReceivedMessage) -> AsyncIterator[int]:
    yield 1


class Methods:
    def one(self, message: ReceivedMessage) -> None: ...

    def many(self, messages: list[ReceivedMessage]) -> None: ...

    async def __call__(self, messages: list[ReceivedMessage]) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "batch_size", "is_async"),
    [
        (one, "one", 1, False),
        (many, "many", DEFAULT_BATCH, False),
        (sequence, "sequence", DEFAULT_BATCH, False),
        (hidden, "hidden", DEFAULT_BATCH, False),
        (Methods().one, "Methods.one", 1, False),
        (Methods().many, "Methods.many", DEFAULT_BATCH, False),
        (Methods(), "Methods", DEFAULT_BATCH, True),
        (functools.partial(Methods()), "partial", DEFAULT_BATCH, True),
        (print, "print", 1, False),
    ],
)
def test_a_handler_is_known_by_its_signature(function, name, batch_size, is_async):
    binding = bind_handler(function, group=GROUP)

    assert (binding.name, binding.batch_size, binding.is_async) == (name, batch_size, is_async)


@pytest.mark.parametrize(
    ("bind", "function", "words"),
    [
        (bind_handler, None, "callable"),
        (bind_listener, "bill", "callable"),
        (bind_handler, lambda: None, "takes no argument; a handler is called with a message"),
        (bind_handler, lambda message, context: None, r"takes \(message, context\); .*required"),
        (bind_listener, lambda messages: None, "a list of messages and a context"),
        (bind_handler, generator, "generator has a `yield`"),
        (bind_handler, functools.partial(async_generator), "has a `yield`"),
        (functools.partial(bind_handler, batch_size=0), many, "batch_size must be .*1 to 1024"),
        (functools.partial(bind_handler, batch_size=1025), many, "batch_size must be .*1 to 1024"),
    ],
)
def test_a_function_that_would_fail_with_every_message_is_refused(bind, function, words):
    with pytest.raises(SettingError, match=words):
        bind(function, group=GROUP)


# ---- calls


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("is_listener", [False, True], ids=["handler", "listener"])
def test_a_batch_belongs_to_the_handler_which_may_change_it(is_async, is_listener):
    def consume(messages, *_):
        messages.clear()
        raise ValueError("no")

    async def consume_async(messages, *_):
        consume(messages)

    function: Any = consume_async if is_async else consume
    bind: Any = bind_listener if is_listener else functools.partial(bind_handler, batch=True)

    outcome = called(bind(function, group=GROUP), list(MESSAGES))

    assert list(outcome.failed) == MESSAGES
    assert isinstance(outcome.failure.error, ValueError)


class Odd(BaseException):
    """Not an `Exception`, and the application's own."""


@surrounded
@pytest.mark.parametrize("error", [Odd("x"), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_every_error_of_a_handler_is_a_failure(error, middleware, is_async):
    def fail(_):
        raise error

    async def fail_async(_):
        await asyncio.sleep(0)
        raise error

    binding = bind_handler(fail_async if is_async else fail, group=GROUP, middleware=middleware)

    outcome = called(binding, MESSAGES)

    assert list(outcome.failed) == MESSAGES
    assert outcome.failure.error is error


class Later:
    """An awaitable that is no coroutine."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self._answer


async def refuse(reason: str) -> None:
    raise DeadLetter(reason)


@surrounded
@pytest.mark.parametrize(
    ("function", "is_good"),
    [
        (lambda _: refuse("no"), False),
        (lambda _: Later(None), True),
        (lambda _: Later(False), False),
    ],
)
async def test_an_awaitable_that_a_def_handler_returns_is_awaited(function, is_good, middleware):
    binding = bind_handler(function, group=GROUP, middleware=middleware)
    assert not binding.is_async

    async with consuming({"orders": binding}) as bench:
        owned = bench.own(MESSAGES)
        await until(lambda: bench.position(owned) == 3)

    assert len(bench.sent_back.back) == (0 if is_good else 3)


# ---- answers


def failed(outcome: Any) -> list[int]:
    return [message.queue_offset for message in outcome.failed]


@pytest.mark.feature("D4")
@pytest.mark.parametrize(
    ("answer", "is_batch", "expected"),
    [
        (None, False, []),
        (True, False, []),
        (SUCCESS, False, []),
        (False, False, [0, 1, 2]),
        (RETRY, False, [0, 1, 2]),
        (-1, True, [0, 1, 2]),
        (0, True, [1, 2]),
        (7, True, []),
    ],
)
def test_an_answer_of_a_handler_says_which_messages_failed(answer, is_batch, expected):
    assert failed(outcome_of_answer(answer, MESSAGES, "bill", is_batch=is_batch)) == expected


@pytest.mark.parametrize(
    ("answer", "is_batch"),
    [("done", True), (-2, True), (1.5, True), ([], True), (Verdict.COMMIT, True), (0, False)],
)
def test_an_answer_without_a_meaning_is_refused_with_what_is_allowed(answer, is_batch):
    with pytest.raises(ClientError, match=r"bill returned .*None, True, False or a Verdict"):
        outcome_of_answer(answer, MESSAGES, "bill", is_batch=is_batch)


def listened(verdict: object, **context: Any) -> Any:
    return outcome_of_verdict(verdict, ConsumeContext(GROUP, QUEUE, **context), MESSAGES, "listen")


@pytest.mark.feature("D4")
@pytest.mark.parametrize(
    ("verdict", "context", "expected", "level"),
    [
        (SUCCESS, {}, [], None),
        (SUCCESS, {"ack_index": 0}, [1, 2], BY_ATTEMPTS),
        (SUCCESS, {"ack_index": -3, "delay_level": 4}, [0, 1, 2], 4),
        (SUCCESS, {"ack_index": 7}, [], None),
        (RETRY, {"delay_level": 7}, [0, 1, 2], 7),
        (RETRY, {"delay_level": DEAD}, [0, 1, 2], DEAD),
        (None, {}, [0, 1, 2], BY_ATTEMPTS),
    ],
)
def test_a_listener_says_with_its_context_which_messages_failed(verdict, context, expected, level):
    outcome = listened(verdict, **context)

    assert failed(outcome) == expected
    assert (None if outcome.failure is None else outcome.failure.level) == level


@pytest.mark.parametrize(
    ("verdict", "context", "words"),
    [
        (RETRY, {"delay_level": "3"}, r"context\.delay_level must be"),
        (RETRY, {"suspend": "1 s"}, r"context\.suspend must be"),
        (SUCCESS, {"ack_index": ""}, r"context\.ack_index must be"),
        (True, {}, "listen returned True"),
        ("SUCCESS", {}, "listen returned 'SUCCESS'"),
    ],
)
def test_a_wrong_verdict_or_context_is_named(verdict, context, words):
    with pytest.raises(OrbitError, match=words):
        listened(verdict, **context)


# ---- what is raised


class Improper(Retry):
    """Made without the constructor of its base."""

    def __init__(self, delay: object) -> None:
        self.delay = delay  # type: ignore[assignment]  # that is the point


@pytest.mark.parametrize(
    ("raised", "level", "delay", "reason"),
    [
        (Retry(), BY_ATTEMPTS, None, "the handler asked for a retry"),
        (Retry("bank closed", delay=30), BY_ATTEMPTS, 30.0, "bank closed"),
        (Retry(delay=timedelta(minutes=1)), BY_ATTEMPTS, 60.0, "the handler asked for a retry"),
        (Retry(level=5), 5, None, "the handler asked for a retry"),
        (Improper(30), BY_ATTEMPTS, 30.0, "the handler asked for a retry"),
        (Improper("soon"), BY_ATTEMPTS, None, "SettingError: Retry.delay must be seconds"),
        (DeadLetter(None), DEAD, None, "the handler gave it up"),
        (DeadLetter(ValueError("no order\nmore")), DEAD, None, "ValueError: no order"),
        (DeadLetter("half a \ud800"), DEAD, None, "half a ?"),
        (DeadLetter("é" * 5000), DEAD, None, "é" * (LONGEST_REASON // 2)),
        (OSError("disk"), BY_ATTEMPTS, None, "OSError: disk"),
    ],
)
def test_an_error_says_when_or_whether_messages_come_again(raised, level, delay, reason):
    failure: Any = outcome_of_error(raised, MESSAGES).failure

    assert (failure.level, failure.delay) == (level, delay)
    assert failure.reason.startswith(reason)
    # What a handler asks for is no error to be logged with a traceback.
    is_asked = isinstance(raised, Retry | DeadLetter) and not failure.reason.startswith("Setting")
    assert (failure.error is None) is is_asked


@pytest.mark.parametrize(
    "wrong",
    [{"delay": -1}, {"delay": "soon"}, {"delay": float("nan")}, {"level": 0}, {"level": 2**31},
     {"delay": 1, "level": 1}],
)  # fmt: skip
def test_a_retry_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(SettingError, match="Retry"):
        Retry(**wrong)


@given(st.text(max_size=5000))
def test_a_reason_is_one_line_that_can_travel(text):
    reason = reason_of(ValueError(text))

    assert reason.startswith("ValueError")
    assert len(reason.encode("utf-8", "replace")) <= LONGEST_REASON
    assert len(reason.splitlines()) == 1


def test_retry_and_dead_letter_can_be_pickled():
    dead = pickle.loads(pickle.dumps(DeadLetter("because")))  # noqa: S301  # our own
    retry = pickle.loads(pickle.dumps(Retry(ValueError("no"), delay=5)))  # noqa: S301  # our own

    assert dead.reason == "because"
    assert (retry.reason, retry.delay, retry.level) == ("ValueError: no", 5.0, None)
