"""Messages are seen when they are done for good: listeners that commit and roll back themselves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from time import monotonic, time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.client.consumer.handlers import Binding, bind_listener
from orbitmq.client.consumer.verdict import ConsumeContext, Outcome, Verdict
from orbitmq.client.consumer.window import Ownership
from orbitmq.client.idempotence import (
    Claim,
    Idempotence,
    SeenInMemory,
    SeenInSqlite,
    SeenStore,
    by_keys,
)
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery, TimeLimit, TimeLimitExceeded
from orbitmq.message.properties import KEYS
from tests.support.consuming import DEADLINE, GROUP, QUEUE, LockStub, consuming, received, until

Listener = Callable[[Sequence[ReceivedMessage], ConsumeContext], Verdict]

both = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    made: SeenStore = (
        SeenInMemory() if request.param == "memory" else SeenInSqlite(tmp_path / "seen.db")
    )
    with contextlib.closing(made):
        yield made


def bound(
    listen: Listener, *middleware: object, is_async: bool = False, in_order: bool = True
) -> Binding:
    async def listen_async(
        messages: Sequence[ReceivedMessage], context: ConsumeContext
    ) -> Verdict | None:
        await asyncio.sleep(0)
        return listen(messages, context)

    return bind_listener(
        listen_async if is_async else listen, group=GROUP, middleware=middleware, in_order=in_order
    )


class Committing:
    """A listener that commits by itself, and says what a test wants, one verdict after the other.

    It has a transaction, as applications have that do this: what was handled and is not committed
    is forgotten with a rollback.
    """

    def __init__(self, *verdicts: Verdict, then: Verdict = Verdict.COMMIT) -> None:
        self._verdicts = list(verdicts)
        self._then = then
        #: Offsets of the messages of each call, one after the other.
        self.calls: list[int] = []
        self._pending: list[str] = []
        self.committed: list[str] = []

    def __call__(self, messages: Sequence[ReceivedMessage], context: ConsumeContext) -> Verdict:
        context.auto_commit = False
        context.suspend = 0.01
        self.calls += [message.queue_offset for message in messages]
        verdict = self._verdicts.pop(0) if self._verdicts else self._then
        if verdict is Verdict.ROLLBACK:
            self._pending.clear()
        elif verdict is not Verdict.RETRY:
            self._pending += [" ".join(message.keys) or message.msg_id for message in messages]
        if verdict is Verdict.COMMIT:
            self.committed += self._pending
            self._pending.clear()
        return verdict


SUCCESS, COMMIT, ROLLBACK, RETRY = Verdict.SUCCESS, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.RETRY


def call(binding: Binding, *messages: ReceivedMessage, spell: Ownership | None = None) -> Outcome:
    """A call in a spell of owning the queue, or one that stands alone."""
    return binding.call(QUEUE, messages, spell)


@both
async def test_what_was_rolled_back_reaches_the_listener_again(store, is_async):
    listen = Committing(SUCCESS, SUCCESS, ROLLBACK, SUCCESS, SUCCESS, COMMIT)
    binding = bound(listen, Idempotence(store), is_async=is_async)

    async with consuming({"orders": binding}, ordered=True) as bench:
        owned = bench.own([received(n) for n in range(3)], lock=LockStub())
        await until(lambda: len(owned.window) == 0)

    assert listen.calls == [0, 1, 2, 0, 1, 2]
    assert listen.committed == ["ID0", "ID1", "ID2"]
    assert bench.position(owned) == 3


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
@both
async def test_a_verdict_that_is_a_mistake_without_order_is_retried(store, is_async, verdict):
    listen = Committing(verdict, then=SUCCESS)
    binding = bound(listen, Idempotence(store), is_async=is_async, in_order=False)

    async with consuming({"orders": binding}) as bench:
        owned = bench.own([received(0)])
        await until(lambda: len(owned.window) == 0)
        assert bench.sent_back.offsets == [0]
        bench.feed(owned, [received(1, properties={"UNIQ_KEY": "ID0"}, reconsume_times=1)])
        await until(lambda: len(owned.window) == 0)
        bench.feed(owned, [received(2, properties={"UNIQ_KEY": "ID0"})])
        await until(lambda: len(owned.window) == 0)

    assert listen.calls == [0, 1], "auto_commit means nothing here: success is done"


def test_what_is_not_committed_is_not_seen_by_who_gets_the_queue_next(store):
    here, there = Committing(SUCCESS, SUCCESS, COMMIT), Committing()
    binding, other = bound(here, Idempotence(store)), bound(there, Idempotence(store))
    spell = Ownership()
    call(binding, received(0), spell=spell)

    call(other, received(0))

    assert there.calls == [0], "this process may be dead by now"
    call(binding, received(1), spell=spell)
    call(binding, received(2), spell=spell)
    for offset in (1, 2):
        call(other, received(offset))
    assert there.calls == [0], "a commit is for those before it, too"


def test_a_queue_that_is_read_again_since_the_last_commit_is_handled_again():
    listen = Committing(SUCCESS, SUCCESS, SUCCESS, COMMIT)
    idempotence = Idempotence()
    binding = bound(listen, idempotence)

    # The second time, the queue was lost, and is back.
    for spell in (Ownership(), Ownership()):
        for offset in (0, 1):
            call(binding, received(offset), spell=spell)

    assert listen.calls == [0, 1, 0, 1]
    assert idempotence.dropped == 0
    call(binding, received(0), spell=spell)
    assert listen.calls == [0, 1, 0, 1]


def keyed(offset: int, key: str) -> ReceivedMessage:
    return received(offset, properties={KEYS: key})


@both
async def test_what_is_open_when_a_queue_is_lost_is_not_committed_when_it_is_back(store, is_async):
    listen = Committing(SUCCESS, then=COMMIT)
    binding = bound(listen, Idempotence(store, key=by_keys), is_async=is_async)

    async with consuming({"orders": binding}, ordered=True) as bench:
        lost = bench.own([keyed(0, "k")], lock=LockStub())
        await until(lambda: listen.calls == [0] and not lost.running)
        lost.drop()
        back = bench.own([keyed(1, "x")], lock=LockStub())
        await until(lambda: len(back.window) == 0)
        bench.feed(back, [keyed(2, "k")])
        await until(lambda: len(back.window) == 0)

    assert listen.calls == [0, 1, 2]


def test_a_late_call_of_a_lost_queue_leaves_nothing_open_in_the_queue_that_is_back():
    listen = Committing(SUCCESS, SUCCESS, COMMIT)
    idempotence = Idempotence(key=by_keys)
    binding = bound(listen, idempotence)
    lost, back = Ownership(), Ownership()

    call(binding, keyed(1, "x"), spell=back)
    call(binding, keyed(0, "late"), spell=lost)
    call(binding, keyed(2, "y"), spell=back)

    for offset, key in enumerate(["x", "y", "late"], 3):
        call(binding, keyed(offset, key), spell=back)
    assert listen.calls == [1, 0, 2, 5], "x and y are seen"


def test_what_is_open_is_forgotten_with_the_spell_of_owning_its_queue():
    idempotence = Idempotence()
    binding = bound(Committing(then=SUCCESS), idempotence)
    spells = [Ownership() for _ in range(3)]
    for offset, spell in enumerate(spells):
        call(binding, received(offset), spell=spell)
    assert len(idempotence._open) == 3

    del spell, spells
    gc.collect()

    assert len(idempotence._open) == 0


@pytest.mark.parametrize("verdict", [SUCCESS, COMMIT, ROLLBACK])
def test_a_call_that_stands_alone_has_nothing_to_do_with_what_is_open(store, verdict):
    listen = Committing(SUCCESS, verdict, SUCCESS, COMMIT)
    binding = bound(listen, Idempotence(store, key=by_keys))
    spell = Ownership()
    call(binding, keyed(0, "open"), spell=spell)

    call(binding, keyed(7, "asked for"))

    elsewhere = Committing()
    other = bound(elsewhere, Idempotence(store, key=by_keys))
    call(other, keyed(0, "open"))
    call(other, keyed(7, "asked for"))
    assert elsewhere.calls == ([0] if verdict is COMMIT else [0, 7])
    call(binding, keyed(1, "open"), spell=spell)
    assert listen.calls == [0, 7], "it is open as before"


class Failing:
    """Middleware that fails after the handler, once."""

    def __init__(self) -> None:
        self._may_fail = True

    def __call__(self, delivery: Delivery) -> contextlib.AbstractContextManager[None]:
        return self._around()

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        yield
        if self._may_fail:
            self._may_fail = False
            raise OSError("the database is gone")


@pytest.mark.parametrize("is_outside", [False, True], ids=["inside", "outside"])
@both
async def test_a_success_that_middleware_turns_into_a_failure_is_not_seen(
    store, is_async, is_outside
):
    listen = Committing(then=SUCCESS)
    middleware: list[object] = [Idempotence(store), Failing()]
    if is_outside:
        middleware.reverse()
    binding = bound(listen, *middleware, is_async=is_async, in_order=False)

    async with consuming({"orders": binding}) as bench:
        owned = bench.own([received(0)])
        await until(lambda: len(owned.window) == 0)
        assert bench.sent_back.offsets == [0]
        bench.feed(owned, [received(1, properties={"UNIQ_KEY": "ID0"}, reconsume_times=1)])
        await until(lambda: len(owned.window) == 0)
        bench.feed(owned, [received(2, properties={"UNIQ_KEY": "ID0"})])
        await until(lambda: len(owned.window) == 0)

    assert listen.calls == [0, 1]


@pytest.mark.parametrize("is_outside", [False, True], ids=["inside", "outside"])
def test_a_handler_that_goes_on_after_its_time_is_up_has_not_seen_its_message(store, is_outside):
    def listen(messages, context):
        deadline = monotonic() + DEADLINE
        with contextlib.suppress(TimeLimitExceeded):
            while monotonic() < deadline:
                pass
        return SUCCESS

    middleware: list[object] = [Idempotence(store), TimeLimit(0.01)]
    if is_outside:
        middleware.reverse()

    outcome = call(bound(listen, *middleware), received(0))

    assert outcome.failed
    again = Committing()
    # By then, a claim has lapsed that was struck just when it was made.
    later = Idempotence(store, now=lambda: time() + 3600)
    call(bound(again, later), received(0))
    assert again.calls == [0]


async def test_a_call_that_is_cancelled_after_its_handler_has_not_seen_its_message(store):
    committing = asyncio.Event()

    @contextlib.asynccontextmanager
    async def transaction(delivery: Delivery) -> AsyncIterator[None]:
        yield
        committing.set()
        await asyncio.Event().wait()

    binding = bound(Committing(), Idempotence(store), transaction, is_async=True)
    calling = asyncio.create_task(binding.call_async(QUEUE, [received(0)], Ownership()))
    async with asyncio.timeout(DEADLINE):
        await committing.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    again = Committing()
    call(bound(again, Idempotence(store)), received(0))
    assert again.calls == [0]


@both
async def test_a_rollback_counts_although_middleware_fails_after_it(is_async, caplog):
    listen = Committing(SUCCESS, ROLLBACK, SUCCESS, COMMIT)
    failing = Failing()
    is_due = iter([False])

    def after_the_first(delivery):
        return failing(delivery) if next(is_due, True) else contextlib.nullcontext()

    binding = bound(listen, after_the_first, Idempotence(), is_async=is_async)

    async with consuming({"orders": binding}, ordered=True) as bench:
        owned = bench.own([received(0), received(1)], lock=LockStub())
        await until(lambda: len(owned.window) == 0)

    assert listen.calls == [0, 1, 0, 1]
    assert listen.committed == ["ID0", "ID1"]
    assert "the database is gone" in caplog.text


async def test_copies_of_what_is_open_are_committed_with_it(store):
    listen = Committing(SUCCESS, ROLLBACK, SUCCESS, COMMIT)
    idempotence = Idempotence(store, key=by_keys)
    messages = [received(n, properties={KEYS: key}) for n, key in enumerate("aab")]

    async with consuming({"orders": bound(listen, idempotence)}, ordered=True) as bench:
        owned = bench.own(messages, lock=LockStub())
        await until(lambda: len(owned.window) == 0)

    assert listen.calls == [0, 2, 0, 2]
    assert listen.committed == ["a", "b"]
    assert idempotence.dropped == 2


async def test_a_message_that_is_dropped_commits_nothing_that_is_open(store):
    listen = Committing(SUCCESS, then=SUCCESS)
    binding = bound(listen, Idempotence(store))
    call(bound(Committing(), Idempotence(store)), received(1))  # seen, in a life before

    async with consuming({"orders": binding}, ordered=True) as bench:
        owned = bench.own([received(0), received(1), received(2)], lock=LockStub())
        await until(lambda: listen.calls == [0, 2] and owned.window.taken_count == 3)

        assert bench.position(owned) in (None, 0)


async def test_a_message_that_is_dropped_is_done_when_nothing_is_open():
    store = SeenInMemory()
    call(bound(Committing(), Idempotence(store)), received(0))
    listen = Committing()

    async with consuming({"orders": bound(listen, Idempotence(store))}, ordered=True) as bench:
        owned = bench.own([received(0)], lock=LockStub())
        await until(lambda: bench.position(owned) == 1)

    assert listen.calls == []


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
async def test_verdicts_count_although_some_messages_are_held_back(verdict):
    store = SeenInMemory()
    idempotence = Idempotence(store, retry=0.01)
    listen = Committing(verdict)
    key = idempotence._name(GROUP, received(1))
    assert key is not None
    assert store.claim(key, idempotence._now(), lease=1000) is Claim.TAKEN
    binding = bind_listener(listen, group=GROUP, batch_size=3, middleware=[idempotence])

    async with consuming({"orders": binding}, ordered=True, suspend=0.01) as bench:
        owned = bench.own([received(n) for n in range(3)], lock=LockStub())
        await until(lambda: bench.position(owned) == 1)
        store.release(key)
        await until(lambda: len(owned.window) == 0)

    assert listen.calls == ([0, 2, 1] if verdict is COMMIT else [0, 2, 0, 2, 1])
    assert listen.committed == ["ID0", "ID2", "ID1"]
    assert bench.position(owned) == 3


keys = st.lists(st.sampled_from("abcd"), min_size=1, max_size=7)
scripts = st.lists(st.sampled_from([SUCCESS, SUCCESS, COMMIT, ROLLBACK, RETRY]), max_size=10)


@settings(max_examples=25, deadline=None)
@given(keys=keys, script=scripts, is_async=st.booleans())
def test_whatever_is_said_each_key_is_committed_once(keys, script, is_async):
    listen = Committing(*script)
    last = len(keys)

    def ending(messages, context):
        if messages[0].queue_offset == last:
            listen._verdicts.clear()  # and so it commits
        return listen(messages, context)

    async def consume():
        binding = bound(ending, Idempotence(key=by_keys), is_async=is_async)
        async with consuming({"orders": binding}, ordered=True, suspend=0.01) as bench:
            messages = [
                received(n, properties={KEYS: key}) for n, key in enumerate([*keys, "the last"])
            ]
            owned = bench.own(messages, lock=LockStub())
            await until(lambda: len(owned.window) == 0)
            return bench.position(owned)

    assert asyncio.run(consume()) == last + 1
    assert sorted(listen.committed) == sorted({*keys, "the last"})
