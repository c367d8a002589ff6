"""What runs around handlers: hooks and context managers, in threads and on the loop."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from orbitmq.client.consumer.handlers import Binding, bind_handler, bind_listener
from orbitmq.client.consumer.verdict import DEAD, DONE, DeadLetter, Retry, Verdict
from orbitmq.client.middleware import Delivery, LogDeliveries, TimeLimit, TimeLimitExceeded
from orbitmq.errors import SettingError
from tests.support.consuming import DEADLINE, GROUP, called, received
from tests.support.forking import in_a_fork

MESSAGES = [received(offset) for offset in range(3)]
SUCCESS, COMMIT, ROLLBACK, RETRY = Verdict.SUCCESS, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.RETRY

both = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


class Recorder:
    """Middleware that notes its hooks and what had succeeded by then."""

    def __init__(self, notes: list[Any] | None = None) -> None:
        self.notes = [] if notes is None else notes
        self.errors: list[BaseException | None] = []

    def before(self, delivery: Delivery) -> None:
        self.notes.append("before")
        delivery.at_end(lambda ended: self.notes.append(("end", len(ended.succeeded))))

    def after(self, delivery: Delivery) -> None:
        self.notes.append(("after", len(delivery.succeeded), len(delivery.done)))

    def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
        self.notes.append(("on_failure", len(delivery.succeeded), len(delivery.done)))
        self.errors.append(error)


class Raising:
    """Middleware that raises in a hook."""

    def __init__(self, error: Exception, hook: str) -> None:
        self._error = error
        setattr(self, hook, self._raise)

    def _raise(self, *_: object) -> None:
        raise self._error


@contextmanager
def forgiving(delivery: Delivery) -> Iterator[None]:
    with suppress(OSError):
        yield


def bound(function: Any, *middleware: object, is_async: bool = False) -> Binding:
    """A batch handler of the wanted kind that does what a function does."""
    if not is_async:
        return bind_handler(function, group=GROUP, batch=True, middleware=middleware)

    async def handler(messages: Any) -> object:
        await asyncio.sleep(0)
        return function(messages)

    return bind_handler(handler, group=GROUP, batch=True, middleware=middleware)


def call(binding: Binding) -> Any:
    return called(binding, MESSAGES)


def raising(error: BaseException) -> Any:
    def fail(_: object) -> None:
        raise error

    return fail


@both
@pytest.mark.parametrize(
    ("function", "inner", "level", "is_error"),
    [
        (lambda _: False, None, 0, False),
        (lambda _: RETRY, None, 0, False),
        (raising(ValueError("no")), None, 0, True),
        (raising(AssertionError()), Raising(Retry(level=4), "before"), 4, True),
        (raising(AssertionError()), Raising(DeadLetter("bad"), "before"), DEAD, True),
        (lambda _: None, Raising(OSError("x"), "after"), 0, True),
    ],
)
def test_a_failure_reaches_the_middleware_around_it(is_async, function, inner, level, is_error):
    outer = Recorder()

    outcome = call(bound(function, outer, *([inner] if inner else []), is_async=is_async))

    assert outer.notes == ["before", ("on_failure", 0, 0), ("end", 0)]
    assert [error is not None for error in outer.errors] == [is_error]
    assert list(outcome.failed) == MESSAGES
    assert outcome.failure.level == level


@both
@pytest.mark.parametrize(
    ("function", "inner", "reason"),
    [
        (raising(OSError("no")), [], None),
        (lambda _: None, [Raising(OSError("no"), "after")], None),
        (
            raising(AssertionError()),
            [Raising(OSError("no"), "before")],
            "the handler was not called",
        ),
    ],
    ids=["of the handler", "after it", "before it"],
)
def test_an_error_that_middleware_swallows_is_success_unless_the_handler_was_not_called(
    is_async, function, inner, reason
):
    outcome = call(bound(function, forgiving, *inner, is_async=is_async))

    assert (outcome.failure and outcome.failure.reason) == reason
    assert (outcome is DONE) is (reason is None)


@both
@pytest.mark.parametrize(
    ("dropped", "held", "seen", "failed"),
    [
        ([0], [], [1, 2], [2]),
        ([0], [2], [1], [2]),
        ([0, 1, 2], [], [], []),
        ([], [0], [1, 2], [0, 2]),
    ],
)
def test_middleware_keeps_messages_from_the_handler(is_async, dropped, held, seen, failed):
    got: list[int] = []

    class Choosing:
        def before(self, delivery: Delivery) -> None:
            for offset in dropped:
                delivery.drop(MESSAGES[offset])
            for offset in held:
                delivery.hold(MESSAGES[offset], 3)

    def handle(batch):
        got.extend(message.queue_offset for message in batch)
        return 0  # the first of those that it was called with is done

    outcome = call(bound(handle, Choosing(), is_async=is_async))

    assert got == seen
    assert sorted(message.queue_offset for message in outcome.failed) == failed
    assert [message.queue_offset for message in outcome.held] == held
    assert outcome.hold == (3 if held else 0)


@both
@pytest.mark.parametrize(
    ("verdict", "in_order", "seen"),
    [
        (SUCCESS, True, ("after", 3, 0)),
        (COMMIT, True, ("after", 3, 3)),
        (ROLLBACK, True, ("on_failure", 0, 0)),
        (RETRY, True, ("on_failure", 0, 0)),
        (SUCCESS, False, ("after", 3, 3)),
        (COMMIT, False, ("on_failure", 0, 0)),
        (ROLLBACK, False, ("on_failure", 0, 0)),
    ],
)
def test_middleware_sees_what_a_listener_that_commits_by_itself_has_finished(
    is_async, verdict, in_order, seen
):
    recorder = Recorder()

    def listen(messages, context):
        context.auto_commit = False
        return verdict

    async def listen_async(messages, context):
        return listen(messages, context)

    listener = listen_async if is_async else listen
    call(bind_listener(listener, group=GROUP, middleware=[recorder], in_order=in_order))

    assert recorder.notes[1] == seen
    assert recorder.errors in ([], [None])


@both
def test_an_error_at_the_end_is_logged_and_changes_nothing(is_async, caplog):
    class Ending:
        def before(self, delivery: Delivery) -> None:
            delivery.at_end(raising(OSError("the store is gone")))

    assert call(bound(lambda _: None, Ending(), is_async=is_async)) is DONE

    assert "the store is gone" in caplog.text


class AsyncHooks:
    """Middleware with hooks that have to be awaited."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    async def before(self, delivery: Delivery) -> None:
        await asyncio.sleep(0)
        self._notes.append("before")
        delivery.at_end(self._end)

    async def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
        self._notes.append("on_failure")

    async def _end(self, delivery: Delivery) -> None:
        await asyncio.sleep(0)
        self._notes.append("end")


@asynccontextmanager
async def asynchronous(delivery: Delivery):
    yield


def test_asynchronous_middleware_surrounds_a_coroutine_handler():
    notes: list[str] = []

    call(bound(lambda _: False, AsyncHooks(notes), asynchronous, is_async=True))

    assert notes == ["before", "on_failure", "end"]


@pytest.mark.parametrize(
    ("middleware", "words"),
    [
        (AsyncHooks([]), "needs an `async def` handler"),
        (asynchronous, "needs an `async def` handler"),
        (object(), "a middleware must have before, after or on_failure"),
        (int, "a middleware must have before, after or on_failure"),
    ],
)
def test_middleware_that_cannot_work_is_refused(middleware, words):
    with pytest.raises(SettingError, match=words):
        bound(lambda _: None, middleware)


def test_deliveries_are_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="orbitmq.client.middleware")
    verdicts = iter([SUCCESS, COMMIT, ROLLBACK])

    def listen(messages, context):
        context.auto_commit = False
        return next(verdicts)

    binding = bind_listener(listen, group=GROUP, middleware=[LogDeliveries()])
    for _ in range(3):
        call(binding)

    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["DEBUG", "INFO", "DEBUG", "INFO", "DEBUG", "WARNING"]
    assert lines[1][1].endswith("succeeded and is not committed yet")
    assert lines[3][1].endswith("is done")
    assert lines[5][1].endswith("the listener rolled back what was not committed")
    assert caplog.records[1].__dict__["message_id"] == "ID0"


# ---- time limits


def spin(_: object) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        pass


@pytest.mark.parametrize("caught", [OSError, TimeLimitExceeded])
def test_a_handler_that_takes_too_long_fails_even_if_it_catches_the_interrupt(caught):
    caught_errors: list[BaseException] = []

    def handle(_):
        try:
            spin(_)
        except caught as error:  # code around a socket catches OSError, and TimeoutError is one
            caught_errors.append(error)

    outcome = call(bound(handle, TimeLimit(0.05)))

    assert isinstance(outcome.failure.error, TimeLimitExceeded)
    assert bool(caught_errors) is (caught is TimeLimitExceeded)


def test_a_slow_coroutine_is_cancelled():
    async def wait(message):
        await asyncio.Event().wait()

    outcome = call(bind_handler(wait, group=GROUP, middleware=[TimeLimit(0.05)]))

    assert isinstance(outcome.failure.error, TimeoutError)


def test_an_interruption_never_strikes_after_the_handler():
    limit = 0.002
    strays: list[BaseException] = []

    def until_due(_):
        due = time.monotonic() + limit
        while time.monotonic() < due:
            pass

    binding = bound(until_due, TimeLimit(limit))

    def work():
        try:
            for _ in range(100):
                call(binding)
            for _ in range(10_000):
                time.monotonic()
        except BaseException as error:  # noqa: BLE001  # it must not come
            strays.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert not strays


def test_a_time_limit_works_in_a_fork_of_a_process_that_has_used_it():
    binding = bound(spin, TimeLimit(0.05))
    call(binding)

    forked = in_a_fork(lambda: str(call(binding).failure))

    assert "longer than 0.05 s" in forked.said
    assert "longer than 0.05 s" in str(call(binding).failure)


def test_a_time_limit_is_positive_and_can_be_pickled():
    assert repr(pickle.loads(pickle.dumps(TimeLimit(0.05)))) == "TimeLimit(0.05)"  # noqa: S301

    wrongs: tuple[Any, ...] = (0, -1, "1s")
    for wrong in wrongs:
        with pytest.raises(SettingError, match=r"TimeLimit\.limit"):
            TimeLimit(wrong)
