"""How handlers and listeners are recognised, called and understood."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from orbitmq.client.consumer.handlers import (
    DEFAULT_BATCH,
    Binding,
    bind_handler,
    bind_listener,
    takes_batch,
)
from orbitmq.client.consumer.verdict import DONE, DeadLetter, Outcome, Verdict
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import LogDeliveries, TimeLimit
from orbitmq.errors import SettingError
from tests.support.consuming import DEADLINE, GROUP, QUEUE, consuming, received, until

if TYPE_CHECKING:
    # Not there when the program runs: annotations that cannot be evaluated.
    from orbitmq.client.message import ReceivedMessage as OnlyForTypes

MESSAGES = [received(offset) for offset in range(3)]


def call(binding: Binding, messages: Sequence[ReceivedMessage] = MESSAGES) -> Outcome:
    """Call a binding the way it wants to be called."""
    if binding.is_async:
        return asyncio.run(_awaited(binding, messages))
    return binding.call(QUEUE, messages)


async def _awaited(binding: Binding, messages: Sequence[ReceivedMessage]) -> Outcome:
    return await binding.call_async(QUEUE, messages)


def one(message: ReceivedMessage) -> None: ...


def many(messages: list[ReceivedMessage]) -> None: ...


def sequence(messages: Sequence[ReceivedMessage]) -> None: ...


def hidden(messages: list[OnlyForTypes]) -> None: ...


def bare(message):  # as many are in users' code
    ...


class Methods:
    def one(self, message: ReceivedMessage) -> None: ...

    def many(self, messages: list[ReceivedMessage]) -> None: ...

    async def __call__(self, messages: list[ReceivedMessage]) -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (one, False),
        (bare, False),
        (many, True),
        (sequence, True),
        (hidden, True),
        (Methods().one, False),
        (Methods().many, True),
        (Methods(), True),
        (lambda message: None, False),
        (print, False),
    ],
)
def test_a_batch_handler_is_known_by_its_annotation(function, expected):
    assert takes_batch(function) is expected


def test_a_batch_handler_gets_what_a_pull_brings_unless_told_otherwise():
    assert bind_handler(many, group=GROUP).batch_size == DEFAULT_BATCH
    assert bind_handler(many, group=GROUP, batch_size=5).batch_size == 5
    assert bind_handler(one, group=GROUP, batch_size=5).batch_size == 1


@pytest.mark.parametrize("size", [0, 1025, True, 2.5, "3"])
def test_a_batch_size_out_of_bounds_is_refused(size):
    with pytest.raises(SettingError, match=r"batch_size must be .*1 to 1024"):
        bind_handler(many, group=GROUP, batch_size=size)


@pytest.mark.parametrize("wrong", [None, 3, "bill"])
def test_what_cannot_be_called_is_no_handler(wrong):
    with pytest.raises(SettingError, match="callable"):
        bind_handler(wrong, group=GROUP)


def _yields(message: ReceivedMessage) -> Iterator[int]:
    yield 1


async def _yields_later(message: ReceivedMessage) -> AsyncIterator[int]:
    yield 1


class Yielding:
    def __call__(self, message: ReceivedMessage) -> Iterator[int]:
        yield 1


class YieldingLater:
    async def __call__(self, message: ReceivedMessage) -> AsyncIterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (lambda: None, "takes no argument; a handler is called with a message"),
        (lambda message, context: None, r"takes \(message, context\); .*required argument"),
        (lambda message, *, database: None, "missing a required .*argument: 'database'"),
        (_yields, "_yields has a `yield`"),
        (_yields_later, "_yields_later has a `yield`"),
        (Yielding(), "Yielding has a `yield`"),
        (YieldingLater(), "YieldingLater has a `yield`"),
        (functools.partial(Yielding()), "has a `yield`"),
        (functools.partial(_yields), "has a `yield`"),
    ],
)
def test_a_handler_that_would_fail_at_every_message_is_refused_at_once(handler, words):
    with pytest.raises(SettingError, match=words):
        bind_handler(handler, group=GROUP)


def test_a_class_is_called_to_make_its_objects_which_is_not_asynchronous():
    # Its objects could be awaited when they are called, but they are not.
    class Taken:
        def __init__(self, message: ReceivedMessage) -> None: ...

        async def __call__(self, message: ReceivedMessage) -> None: ...

    assert not bind_handler(Taken, group=GROUP).is_async
    assert bind_handler(functools.partial(Methods()), group=GROUP).is_async


def test_a_listener_that_takes_no_context_is_refused_at_once():
    wrong: Any = lambda messages: Verdict.SUCCESS  # noqa: E731

    with pytest.raises(SettingError, match="a list of messages and a context"):
        bind_listener(wrong, group=GROUP)


def test_a_handler_may_be_decorated_with_what_gives_it_more_arguments():
    def with_database(function):
        @functools.wraps(function)
        def call(message: ReceivedMessage) -> None:
            function(message, "the database")

        return call

    @with_database
    def bill(message: ReceivedMessage, database: str) -> None:
        seen.append(database)

    seen: list[str] = []

    outcome = bind_handler(bill, group=GROUP).call(QUEUE, [received(0)])

    assert outcome is DONE
    assert seen == ["the database"]


@pytest.mark.feature("D4")
def test_nothing_is_success_from_a_handler_and_failure_from_a_listener():
    def handler(messages): ...

    def listener(messages, context): ...

    def broken(messages):
        raise OSError("disk")

    assert call(bind_handler(handler, group=GROUP)) is DONE
    assert list(call(bind_listener(listener, group=GROUP)).failed) == MESSAGES
    assert list(call(bind_handler(broken, group=GROUP)).failed) == MESSAGES


def test_a_listener_is_told_its_queue_and_says_more_in_its_context():
    def listen(messages, context):
        assert (context.group, context.queue) == (GROUP, QUEUE)
        context.ack_index = 1
        return Verdict.SUCCESS

    binding = bind_listener(listen, group=GROUP, batch_size=3)

    assert [message.queue_offset for message in call(binding).failed] == [2]


def test_a_binding_is_named_after_its_function():
    def bill(message): ...

    assert bind_handler(bill, group=GROUP).name == "bill"
    assert bind_handler(Methods().one, group=GROUP).name == "Methods.one"
    assert bind_handler(Methods(), group=GROUP).name == "Methods"


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("is_listener", [False, True], ids=["handler", "listener"])
def test_a_batch_is_the_handlers_own_to_take_to_pieces(is_async, is_listener):
    def consume(messages, *_):
        messages.pop(0)
        messages.pop(0)
        raise ValueError("the second one")

    async def consume_async(messages, *_):
        consume(messages)

    function: Any = consume_async if is_async else consume
    if is_listener:
        binding = bind_listener(function, group=GROUP, batch_size=32)
    else:
        binding = bind_handler(function, group=GROUP, batch=True)

    outcome = call(binding, list(MESSAGES))

    assert list(outcome.failed) == MESSAGES
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, ValueError)


class Odd(BaseException):
    """Not an `Exception`, and the application's own."""


@pytest.mark.parametrize("error", [Odd("x"), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("surrounded", [False, True], ids=["bare", "with middleware"])
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_whatever_a_handler_raises_is_a_failure(error, surrounded, is_async):
    def fail(_):
        raise error

    async def fail_async(_):
        await asyncio.sleep(0)
        raise error

    middleware = [LogDeliveries()] if surrounded else []
    binding = bind_handler(fail_async if is_async else fail, group=GROUP, middleware=middleware)

    outcome = call(binding)

    assert list(outcome.failed) == MESSAGES
    assert outcome.failure is not None
    assert outcome.failure.error is error


@pytest.mark.parametrize("surrounded", [False, True], ids=["bare", "with middleware"])
def test_an_interrupt_of_the_program_is_not_kept_from_it(surrounded):
    async def interrupted(_):
        raise KeyboardInterrupt

    middleware = [LogDeliveries()] if surrounded else []
    binding = bind_handler(interrupted, group=GROUP, middleware=middleware)

    with pytest.raises(KeyboardInterrupt):
        call(binding)


def logged(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator as many write one: it does not know what it is around."""

    @functools.wraps(function)
    def wrapper(message: Any) -> Any:
        return function(message)

    return wrapper


class Later:
    """Something that can be awaited and is no coroutine."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, Any, object]:
        yield from asyncio.sleep(0).__await__()
        return self._answer


async def refuse(message: ReceivedMessage) -> None:
    await asyncio.sleep(0)
    raise DeadLetter("no")


async def accept(message: ReceivedMessage) -> bool:
    await asyncio.sleep(0)
    return True


@pytest.mark.parametrize(
    ("function", "is_good"),
    [
        (lambda message: accept(message), True),  # noqa: PLW0108  # as users write it
        (lambda message: refuse(message), False),  # noqa: PLW0108  # as users write it
        (logged(accept), True),
        (logged(refuse), False),
        (lambda message: Later(None), True),
        (lambda message: Later(False), False),
    ],
)
@pytest.mark.parametrize("middleware", [[], [LogDeliveries()]], ids=["bare", "surrounded"])
async def test_what_a_plain_function_returns_is_awaited_on_the_loop_of_the_consumer(
    function, is_good, middleware
):
    binding = bind_handler(function, group=GROUP, middleware=middleware)
    assert not binding.is_async
    async with consuming({"orders": binding}) as bench:
        owned = bench.own(MESSAGES)
        await until(lambda: bench.position(owned) == 3)

    assert len(bench.sent_back.back) == (0 if is_good else 3)


def test_without_a_consumer_what_was_returned_is_awaited_by_the_thread_itself():
    assert call(bind_handler(lambda message: accept(message), group=GROUP)) is DONE  # noqa: PLW0108  # as users write it
    failure = call(bind_handler(logged(refuse), group=GROUP)).failure
    assert failure is not None
    assert failure.reason == "no"


async def test_a_listener_may_return_what_has_to_be_awaited():
    async def listen(messages, context):
        await asyncio.sleep(0)
        context.delay_level = 7
        return Verdict.RETRY

    binding = bind_listener(lambda messages, context: listen(messages, context), group=GROUP)  # noqa: PLW0108  # as users write it
    async with consuming({"orders": binding}, ordered=False) as bench:
        bench.own(MESSAGES[:1])
        await until(lambda: len(bench.sent_back.back) == 1)

    assert bench.sent_back.back[0][1].level == 7


async def test_the_function_runs_in_a_thread_and_its_coroutine_on_the_loop():
    here = threading.get_ident()
    threads: dict[str, int] = {}
    variable: ContextVar[str] = ContextVar("variable")

    async def asynchronous(message):
        threads["coroutine"] = threading.get_ident()
        assert variable.get() == "set in the thread"
        assert asyncio.get_running_loop() is loop

    def handle(message):
        threads["function"] = threading.get_ident()
        variable.set("set in the thread")
        return asynchronous(message)

    loop = asyncio.get_running_loop()
    async with consuming(handle) as bench:
        owned = bench.own(MESSAGES[:1])
        await until(lambda: bench.position(owned) == 1)

    assert bench.sent_back.back == []
    assert threads["coroutine"] == here != threads["function"]


async def test_a_time_limit_ends_what_a_plain_function_returned():
    ended = asyncio.Event()

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    binding = bind_handler(lambda message: endless(), group=GROUP, middleware=[TimeLimit(0.05)])
    async with consuming({"orders": binding}) as bench:
        owned = bench.own(MESSAGES[:1])
        await until(lambda: bench.position(owned) == 1)
        async with asyncio.timeout(DEADLINE):
            await ended.wait()

    (failure,) = [failure for _, failure in bench.sent_back.back]
    assert "longer than 0.05 s" in (failure.reason or "")


async def test_a_stop_leaves_nothing_of_what_a_plain_function_returned():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    before = asyncio.all_tasks()
    async with consuming(lambda message: endless()) as bench:
        bench.own(MESSAGES[:1])
        async with asyncio.timeout(DEADLINE):
            await begun.wait()

    assert ended.is_set()
    assert asyncio.all_tasks() == before
    assert bench.sent_back.back == []


async def test_a_coroutine_of_a_plain_function_is_a_handler_that_asks():
    asked: list[bool] = []

    async def ask():
        asked.append(bench.consumption.worker_pool.is_caller)

    async with consuming(lambda message: ask()) as bench:
        owned = bench.own(MESSAGES[:1])
        await until(lambda: bench.position(owned) == 1)

    assert asked == [True]
    assert not bench.consumption.worker_pool.is_caller
