"""What runs around handlers: hooks and context managers, in threads and on the loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

from orbitmq.client.consumer.handlers import Binding, bind_handler, bind_listener
from orbitmq.client.consumer.verdict import DEAD, DONE, DeadLetter, Outcome, Retry, Verdict
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery, LogDeliveries, TimeLimit, TimeLimitExceeded
from orbitmq.errors import SettingError
from tests.support.consuming import DEADLINE, GROUP, QUEUE, received
from tests.support.forking import in_a_fork
from tests.support.scarcethreads import refuse_threads

MESSAGES = [received(offset) for offset in range(3)]


class Recorder:
    """Middleware that notes what it is told."""

    def __init__(self, name: str = "", told: list[str] | None = None) -> None:
        self.told = [] if told is None else told
        self._name = name
        self.errors: list[BaseException | None] = []

    def before(self, delivery: Delivery) -> None:
        self.told.append(self._name + "before")

    def after(self, delivery: Delivery) -> None:
        self.told.append(self._name + "after")

    def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
        self.told.append(self._name + "on_failure")
        self.errors.append(error)


class AsyncRecorder(Recorder):
    """The same with hooks that have to be awaited."""

    async def before(self, delivery: Delivery) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().before(delivery)

    async def after(self, delivery: Delivery) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().after(delivery)


def bound(function: Any, *middleware: object, is_async: bool, batch: bool = True) -> Binding:
    """A handler of the wanted kind that does what a function does."""
    if not is_async:
        return bind_handler(function, group=GROUP, batch=batch, middleware=middleware)

    async def handler(messages: Any) -> object:
        await asyncio.sleep(0)
        return function(messages)

    return bind_handler(handler, group=GROUP, batch=batch, middleware=middleware)


def call(binding: Binding, messages: Sequence[ReceivedMessage] = MESSAGES) -> Outcome:
    if not binding.is_async:
        return binding.call(QUEUE, messages)

    async def calling() -> Outcome:
        return await binding.call_async(QUEUE, messages)

    return asyncio.run(calling())


both = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@both
def test_the_first_middleware_is_the_outermost(is_async):
    told: list[str] = []

    @contextmanager
    def surrounding(delivery: Delivery) -> Iterator[None]:
        told.append("in")
        yield
        told.append("out")

    call(bound(lambda _: None, Recorder("a ", told), surrounding, is_async=is_async))

    assert told == ["a before", "in", "out", "a after"]


@both
@pytest.mark.parametrize("answer", [False, 0, Verdict.RETRY])
def test_a_failure_by_answer_is_one_without_an_error(is_async, answer):
    recorder = Recorder()

    call(bound(lambda _: answer, recorder, is_async=is_async))

    assert recorder.told == ["before", "on_failure"]
    assert recorder.errors == [None]


@both
def test_a_failure_by_error_comes_with_the_error(is_async):
    recorder = Recorder()
    error = ValueError("no")

    def fail(_):
        raise error

    outcome = call(bound(fail, recorder, is_async=is_async))

    assert recorder.errors == [error]
    assert list(outcome.failed) == MESSAGES


@both
@pytest.mark.parametrize(
    ("signal", "level"), [(Retry(level=4), 4), (DeadLetter("bad"), DEAD), (OSError("x"), 0)]
)
def test_what_before_raises_counts_as_raised_by_the_handler(is_async, signal, level):
    called: list[object] = []
    outer = Recorder()

    class Refusing:
        def before(self, delivery: Delivery) -> None:
            raise signal

    outcome = call(bound(called.append, outer, Refusing(), is_async=is_async))

    assert not called
    assert outcome.failure is not None
    assert outcome.failure.level == level
    assert outer.told == ["before", "on_failure"]


@both
def test_a_context_manager_may_swallow_an_error(is_async):
    @contextmanager
    def forgiving(delivery: Delivery) -> Iterator[None]:
        with suppress(KeyError):
            yield

    def fail(_):
        raise KeyError

    assert call(bound(fail, forgiving, is_async=is_async)) is DONE


@both
def test_an_error_that_is_swallowed_before_the_handler_was_called_is_no_success(is_async):
    called: list[object] = []

    @contextmanager
    def forgiving(delivery: Delivery) -> Iterator[None]:
        with suppress(OSError):
            yield

    class Broken:
        def before(self, delivery: Delivery) -> None:
            delivery.drop(MESSAGES[0])
            raise OSError("the store is locked")

    outcome = call(bound(called.append, forgiving, Broken(), is_async=is_async))

    assert not called
    assert list(outcome.failed) == MESSAGES[1:]
    assert outcome.failure is not None
    assert outcome.failure.reason == "the handler was not called"


@both
def test_an_error_of_the_way_out_that_is_swallowed_changes_nothing(is_async):
    @contextmanager
    def forgiving(delivery: Delivery) -> Iterator[None]:
        with suppress(OSError):
            yield

    class Broken:
        def after(self, delivery: Delivery) -> None:
            raise OSError("the store is locked")

    assert call(bound(lambda _: None, forgiving, Broken(), is_async=is_async)) is DONE


def test_middleware_cannot_change_the_messages_of_a_delivery_unnoticed():
    refused: list[Exception] = []

    class Clearing:
        def before(self, delivery: Delivery) -> None:
            try:
                delivery.messages = ()  # type: ignore[misc]  # what must not be possible
            except AttributeError as error:
                refused.append(error)
            try:
                delivery.messages.clear()  # type: ignore[attr-defined]  # likewise
            except AttributeError as error:
                refused.append(error)

    called: list[list[ReceivedMessage]] = []
    outcome = call(bound(called.append, Clearing(), is_async=False))

    assert len(refused) == 2
    assert outcome is DONE
    assert called == [MESSAGES]


@both
def test_a_dropped_message_counts_as_done_and_a_put_off_one_as_failed(is_async):
    seen: list[list[ReceivedMessage]] = []

    class Choosing:
        def before(self, delivery: Delivery) -> None:
            delivery.drop(MESSAGES[0])
            delivery.put_off(MESSAGES[2], Retry("later", delay=3))

    outcome = call(bound(seen.append, Choosing(), is_async=is_async))

    assert seen == [[MESSAGES[1]]]
    assert list(outcome.failed) == [MESSAGES[2]]
    assert outcome.failure is not None
    assert outcome.failure.delay == 3


@both
def test_a_handler_without_messages_left_is_not_called(is_async):
    seen: list[object] = []

    class Dropping:
        def before(self, delivery: Delivery) -> None:
            for message in delivery.messages:
                delivery.drop(message)

    assert call(bound(seen.append, Dropping(), is_async=is_async)) is DONE
    assert not seen


@both
def test_an_index_is_that_of_the_messages_that_were_given(is_async):
    class DroppingFirst:
        def before(self, delivery: Delivery) -> None:
            delivery.drop(MESSAGES[0])

    outcome = call(bound(lambda _: 0, DroppingFirst(), is_async=is_async))

    assert [message.queue_offset for message in outcome.failed] == [2]


class Watching:
    """Notes what it sees of a delivery when it is over."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], list[int]]] = []

    def after(self, delivery: Delivery) -> None:
        self._note("after", delivery)

    def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
        assert error is None
        self._note("on_failure", delivery)

    def _note(self, hook: str, delivery: Delivery) -> None:
        succeeded = [message.queue_offset for message in delivery.succeeded]
        self.seen.append((hook, succeeded, [message.queue_offset for message in delivery.done]))


@both
@pytest.mark.parametrize(
    ("verdict", "in_order", "seen"),
    [
        (Verdict.SUCCESS, True, ("after", [0, 1, 2], [])),
        (Verdict.COMMIT, True, ("after", [0, 1, 2], [0, 1, 2])),
        (Verdict.ROLLBACK, True, ("on_failure", [], [])),
        (Verdict.RETRY, True, ("on_failure", [], [])),
        (Verdict.SUCCESS, False, ("after", [0, 1, 2], [0, 1, 2])),
        (Verdict.COMMIT, False, ("on_failure", [], [])),
        (Verdict.ROLLBACK, False, ("on_failure", [], [])),
    ],
)
def test_middleware_sees_what_becomes_of_messages_of_a_listener_that_commits_by_itself(
    is_async, verdict, in_order, seen
):
    watching = Watching()

    def listen(messages, context):
        context.auto_commit = False
        return verdict

    async def listen_async(messages, context):
        return listen(messages, context)

    listener = listen_async if is_async else listen
    binding = bind_listener(listener, group=GROUP, middleware=[watching], in_order=in_order)
    call(binding)

    assert watching.seen == [seen]


def test_the_log_says_that_a_listener_rolled_back(caplog):
    def listen(messages, context):
        context.auto_commit = False
        return Verdict.ROLLBACK

    call(bind_listener(listen, group=GROUP, middleware=[LogDeliveries()]))

    assert "the listener rolled back what was not committed" in caplog.text


def test_the_log_does_not_call_done_what_is_not_committed(caplog):
    caplog.set_level(logging.INFO, logger="orbitmq.client.middleware")
    verdicts = iter([Verdict.SUCCESS, Verdict.COMMIT])

    def listen(messages, context):
        context.auto_commit = False
        return next(verdicts)

    binding = bind_listener(listen, group=GROUP, middleware=[LogDeliveries()])
    call(binding)
    call(binding)

    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("succeeded and is not committed yet")
    assert second.endswith("is done")


class Seeing:
    """Middleware that notes what has succeeded: in its hooks, and at the end."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def before(self, delivery: Delivery) -> None:
        delivery.at_end(lambda ended: self._tell("end", ended))

    def after(self, delivery: Delivery) -> None:
        self._tell("after", delivery)

    def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
        self._tell("on_failure", delivery)

    def _tell(self, when: str, delivery: Delivery) -> None:
        self.told.append((when, len(delivery.succeeded)))


@both
def test_the_outcome_is_what_the_middleware_inside_made_of_it(is_async):
    outermost, outer, inner = Seeing(), Seeing(), Seeing()

    @contextmanager
    def forgiving(delivery: Delivery) -> Iterator[None]:
        with suppress(OSError):
            yield

    class Broken:
        def after(self, delivery: Delivery) -> None:
            raise OSError("the database is gone")

    stages = [outermost, forgiving, outer, Broken(), inner]
    outcome = call(bound(lambda _: None, *stages, is_async=is_async))

    assert outcome is DONE
    count = len(MESSAGES)
    assert inner.told == [("after", count), ("end", count)]
    assert outer.told == [("on_failure", 0), ("end", count)]
    assert outermost.told == [("after", count), ("end", count)]


@both
def test_what_fails_at_the_end_is_logged_and_changes_nothing(is_async, caplog):
    ended: list[Outcome] = []

    def fail(_):
        raise OSError("the store is gone")

    class Ending:
        def before(self, delivery: Delivery) -> None:
            delivery.at_end(lambda delivery: ended.append(delivery.outcome))
            delivery.at_end(fail)

    assert call(bound(lambda _: None, Ending(), is_async=is_async)) is DONE

    assert ended == [DONE]
    assert "the store is gone" in caplog.text


def test_what_has_to_be_awaited_at_the_end_needs_a_coroutine_handler(caplog):
    ended: list[Outcome] = []

    async def end(delivery):
        await asyncio.sleep(0)
        ended.append(delivery.outcome)

    class Ending:
        def before(self, delivery: Delivery) -> None:
            delivery.at_end(end)

    call(bound(lambda _: None, Ending(), is_async=True))
    assert ended == [DONE]
    call(bound(lambda _: None, Ending(), is_async=False))
    assert ended == [DONE]
    assert "needs an `async def` handler" in caplog.text


def test_coroutine_hooks_are_awaited_around_a_coroutine_handler():
    recorder = AsyncRecorder()

    call(bound(lambda _: recorder.told.append("handler"), recorder, is_async=True))

    assert recorder.told == ["before", "handler", "after"]


def test_an_asynchronous_context_manager_surrounds_a_coroutine_handler():
    told: list[str] = []

    @asynccontextmanager
    async def surrounding(delivery: Delivery) -> AsyncIterator[None]:
        told.append(delivery.handler)
        yield
        told.append("out")

    call(bound(lambda _: None, surrounding, is_async=True))

    assert told == ["handler", "out"]


@asynccontextmanager
async def asynchronous(delivery: Delivery) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("middleware", [AsyncRecorder(), asynchronous])
def test_asynchronous_middleware_is_refused_around_a_plain_handler(middleware):
    with pytest.raises(SettingError, match="needs an `async def` handler"):
        bound(lambda _: None, middleware, is_async=False)


@pytest.mark.parametrize("wrong", [object(), 7, "log", Recorder])
def test_what_is_no_middleware_is_refused(wrong):
    if wrong is Recorder:
        wrong = int
    with pytest.raises(SettingError, match="a middleware must have before, after or on_failure"):
        bound(lambda _: None, wrong, is_async=False)


def test_deliveries_are_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="orbitmq.client.middleware")

    call(bound(lambda _: None, LogDeliveries(), is_async=False))
    call(bound(lambda _: False, LogDeliveries(), is_async=False))

    levels = [record.levelname for record in caplog.records]
    assert levels == ["DEBUG", "INFO", "DEBUG", "WARNING"]
    assert caplog.records[1].__dict__["message_id"] == "ID0"


class TestTimeLimit:
    def test_code_around_a_socket_does_not_take_it_for_its_own_trouble(self):
        taken: list[OSError] = []

        def spin(_):
            try:
                while True:
                    time.monotonic()
            except OSError as error:  # TimeoutError is one
                taken.append(error)

        outcome = call(bound(spin, TimeLimit(0.05), is_async=False))

        assert taken == []
        assert outcome.failure is not None
        assert isinstance(outcome.failure.error, TimeLimitExceeded)

    def test_a_slow_coroutine_is_cancelled(self):
        async def wait(message):
            await asyncio.Event().wait()

        outcome = call(bind_handler(wait, group=GROUP, middleware=[TimeLimit(0.05)]))

        assert outcome.failure is not None
        assert isinstance(outcome.failure.error, TimeoutError)

    def test_a_handler_that_swallows_the_interruption_has_failed_all_the_same(self):
        def stubborn(_):
            try:
                while True:
                    time.monotonic()
            except TimeLimitExceeded:
                pass

        outcome = call(bound(stubborn, TimeLimit(0.05), is_async=False))

        assert outcome.failure is not None
        assert isinstance(outcome.failure.error, TimeLimitExceeded)

    def test_an_interruption_never_strikes_after_the_handler(self):
        limit = 0.002
        strays: list[BaseException] = []

        def until_due(_):
            due = time.monotonic() + limit
            while time.monotonic() < due:
                pass

        def work(binding):
            try:
                for _ in range(100):
                    call(binding)
                for _ in range(10_000):
                    time.monotonic()
            except BaseException as error:  # noqa: BLE001  # it must not come
                strays.append(error)

        binding = bound(until_due, TimeLimit(limit), is_async=False)
        threads = [threading.Thread(target=work, args=(binding,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)

        assert not strays

    def test_it_works_in_a_fork_of_a_process_that_has_used_it(self):
        def spin(_):
            while True:
                time.monotonic()

        binding = bound(spin, TimeLimit(0.05), is_async=False)
        call(binding)

        forked = in_a_fork(lambda: str(call(binding).failure))

        assert "longer than 0.05 s" in forked.said
        assert "longer than 0.05 s" in str(call(binding).failure)

    def test_it_works_again_once_the_system_has_threads_again(self, monkeypatch):
        def spin(_):
            end = time.monotonic() + DEADLINE
            while time.monotonic() < end:
                pass

        limit = TimeLimit(0.05)
        binding = bound(spin, limit, is_async=False)
        refuse_threads(monkeypatch, "orbitmq-time-limit", times=1)

        assert "can't start new thread" in str(call(binding).failure)
        assert "longer than 0.05 s" in str(call(binding).failure)

    def test_a_limit_may_be_longer_than_a_thread_can_wait(self):
        binding = bound(lambda _: None, TimeLimit(timedelta.max), is_async=False)

        assert [call(binding) for _ in range(3)] == [DONE] * 3

    def test_it_can_be_sent_to_another_process(self):
        copy = pickle.loads(pickle.dumps(TimeLimit(0.05)))  # noqa: S301  # our own

        assert repr(copy) == "TimeLimit(0.05)"

    @pytest.mark.parametrize("wrong", [0, -1, "1s"])
    def test_a_limit_has_to_be_positive(self, wrong):
        with pytest.raises(SettingError, match=r"TimeLimit\.limit"):
            TimeLimit(wrong)


class Striking:
    """A limit that strikes at the n-th line of the way out of all middleware, if it is in time."""

    def __init__(self, line: int) -> None:
        self._lines_left = line
        self._is_left = False
        self.has_struck = False

    @contextmanager
    def limit(self, _: Delivery) -> Iterator[None]:
        try:
            yield
        finally:
            self._is_left = True

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not ExitStack.__exit__.__code__:
            return None
        if event == "line" and not self._is_left:
            self._lines_left -= 1
            if not self._lines_left:
                self.has_struck = True
                raise TimeLimitExceeded
        return self.trace


def test_a_limit_that_strikes_on_the_way_out_leaves_all_middleware_around_it():
    for line in itertools.count(1):
        striking, told = Striking(line), list[str]()
        binding = bound(
            lambda _, trace=striking.trace: sys.settrace(trace),
            Recorder("outer ", told),
            striking.limit,
            is_async=False,
        )
        before = sys.gettrace()
        try:
            outcome = call(binding)
        finally:
            sys.settrace(before)

        left = "outer on_failure" if striking.has_struck else "outer after"
        assert told == ["outer before", left], line
        assert outcome.has_failed is striking.has_struck, line
        if not striking.has_struck:
            break

    assert line > 4
