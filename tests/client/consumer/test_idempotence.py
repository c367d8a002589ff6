"""Messages that were consumed do not reach the handler again.

A listener in order that commits by itself is a case of its own: its messages are done when it has
committed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from orbitmq.client.consumer.handlers import Binding, bind_handler, bind_listener
from orbitmq.client.consumer.verdict import DONE, ConsumeContext, DeadLetter, Retry, Verdict
from orbitmq.client.consumer.window import Ownership
from orbitmq.client.errors import UsedAfterFork
from orbitmq.client.idempotence import (
    Claim,
    Idempotence,
    SeenInMemory,
    SeenInSqlite,
    SeenStore,
    by_keys,
)
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError, WrongUse
from orbitmq.message.properties import KEYS
from orbitmq.names import wrap_topic
from tests.support.consuming import DEADLINE, GROUP, QUEUE, LockStub, consuming, received, until
from tests.support.forking import in_a_fork


class Time:
    """Time that passes when a test says so."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    made: SeenStore = (
        SeenInMemory() if request.param == "memory" else SeenInSqlite(tmp_path / "seen.db")
    )
    with contextlib.closing(made):
        yield made


def bound(
    function: Callable[[Any], object], *middleware: object, is_async: bool = False
) -> Binding:
    if not is_async:
        return bind_handler(function, group=GROUP, batch=True, middleware=middleware)

    async def handle(messages: list[ReceivedMessage]) -> object:
        await asyncio.sleep(0)
        return function(messages)

    return bind_handler(handle, group=GROUP, middleware=middleware)


async def call(binding: Binding, *messages: ReceivedMessage) -> Any:
    if binding.is_async:
        return await binding.call_async(QUEUE, messages)
    return binding.call(QUEUE, messages)


def keyed(offset: int, key: str, body: bytes = b"x") -> ReceivedMessage:
    """A message of its own about something that others may be about, too."""
    return received(offset, body=body, properties={KEYS: key})


def key_of(message: ReceivedMessage) -> str:
    """The key in a store of a message that is known by its unique id."""
    return f"{GROUP}\x00{message.topic}\x00{message.unique_id}"


both = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@both
@pytest.mark.feature("D14")
@pytest.mark.parametrize("fails", ["raises", "answers"])
async def test_a_message_is_consumed_again_until_it_succeeded(store, time, is_async, fails):
    calls: list[list[str]] = []

    def handle(batch):
        calls.append([message.msg_id for message in batch])
        if len(calls) > 1:
            return None
        if fails == "raises":
            raise ValueError("once")
        return False

    idempotence = Idempotence(store, now=time)
    binding = bound(handle, idempotence, is_async=is_async)

    assert (await call(binding, received(1))).failed
    assert await call(binding, received(1)) is DONE
    assert await call(binding, received(1), received(2)) is DONE
    assert calls == [["ID1"], ["ID1"], ["ID2"]]
    assert idempotence.dropped == 1


async def test_a_group_of_each_namespace_sees_a_key_once_and_messages_without_a_key_always(
    store, time
):
    calls: list[str | None] = []
    idempotence = Idempotence(store, key=by_keys, now=time)
    binding = bound(lambda batch: calls.extend(m.namespace for m in batch), idempotence)

    for namespace, properties in (
        ("red", {KEYS: "order 1"}),
        ("blue", {KEYS: "order 1"}),
        ("red", {KEYS: "order 1"}),
        (None, {}),
        (None, {}),
    ):
        queue = Queue(wrap_topic(namespace, "orders"), "broker-a", 0)
        stored = received(0, queue=queue, properties=properties).stored
        await call(binding, ReceivedMessage(stored, queue, GROUP, None, namespace))

    assert calls == ["red", "blue", None, None]


@both
@pytest.mark.parametrize("fails", [DeadLetter("poison"), Retry("later"), ValueError("no"), False])
async def test_copies_behind_a_message_that_failed_are_looked_at_again(
    store, time, is_async, fails
):
    handled: list[int] = []

    def handle(batch):
        if batch[0].body == b"poison":
            if isinstance(fails, Exception):
                raise fails
            return fails
        handled.extend(message.queue_offset for message in batch)
        return None

    idempotence = Idempotence(store, key=by_keys, retry=7, now=time)
    binding = bound(handle, idempotence, is_async=is_async)

    outcome = await call(binding, keyed(1, "k", b"poison"), keyed(2, "k"), keyed(3, "k"))

    assert [message.queue_offset for message in outcome.tried] == [1]
    assert [message.queue_offset for message in outcome.held] == [2, 3]
    assert (outcome.hold, idempotence.dropped) == (7, 0)
    assert await call(binding, keyed(2, "k"), keyed(3, "k")) is DONE
    assert (handled, idempotence.dropped) == ([2], 1)


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=8), fates=st.data())
def test_no_message_counts_as_done_unless_one_of_its_key_is(keys, fates):
    done: set[str] = set()
    dead: set[int] = set()

    def handle(batch):
        good = fates.draw(st.integers(-1, len(batch) - 1))
        done.update(message.keys[0] for message in batch[: good + 1])
        return good

    binding = bound(handle, Idempotence(key=by_keys))
    left = [keyed(offset, key) for offset, key in enumerate(keys)]
    while left:
        outcome = binding.call(QUEUE, left)
        again = {message.queue_offset for message in outcome.failed}
        settled = [message for message in left if message.queue_offset not in again]
        assert done.issuperset(message.keys[0] for message in settled)
        # One that failed is given up here, as after its last attempt.
        dead |= {message.queue_offset for message in outcome.tried[:1]}
        left = [m for m in left if m.queue_offset in again and m.queue_offset not in dead]

    assert {key for offset, key in enumerate(keys) if offset not in dead} <= done


class Counting(SeenInMemory):
    """Notes how it is used."""

    claims = 0
    renewed_at = 0.0

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        self.claims += 1
        return super().claim(key, now, lease=lease)

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        is_held = super().renew(key, now, lease=lease)
        self.renewed_at = now
        return is_held


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
@both
async def test_the_message_of_a_process_that_died_at_work_waits_without_an_attempt(
    time, ordered, is_async
):
    attempts: list[int] = []
    store = Counting()
    idempotence = Idempotence(store, lease=60, retry=0.002, now=time)
    binding = bound(
        lambda batch: attempts.extend(m.attempt for m in batch), idempotence, is_async=is_async
    )
    store.claim(key_of(received(1)), time.now, lease=60)

    async with consuming({"orders": binding}, ordered=ordered, max_retries=3) as bench:
        owned = bench.own([received(1)], lock=LockStub() if ordered else None)
        await until(lambda: store.claims > 20)
        assert len(owned.window) == 1, "progress waits for it"
        assert attempts == []
        time.now += 61
        await until(lambda: len(owned.window) == 0)

    assert attempts == [1]
    assert bench.sent_back.back == bench.sent_back.given_up == []
    assert bench.position(owned) == 2


@both
async def test_a_handler_may_take_longer_than_the_lease(time, is_async):
    store = Counting()
    entered, opened = threading.Event(), threading.Event()
    key = key_of(received(1))

    def handle(message):
        entered.set()
        opened.wait(DEADLINE)

    async def handle_async(message):
        await asyncio.to_thread(handle, message)

    function = handle_async if is_async else handle
    middleware = [Idempotence(store, lease=0.3, now=time)]
    binding = bind_handler(function, group=GROUP, middleware=middleware)
    working = asyncio.create_task(
        binding.call_async(QUEUE, [received(1)])
        if is_async
        else asyncio.to_thread(binding.call, QUEUE, [received(1)])
    )
    try:
        assert await asyncio.to_thread(entered.wait, DEADLINE)
        for _ in range(3):
            time.now += 0.2
            await until(lambda: store.renewed_at == time.now)
        assert store.claim(key, time.now, lease=1) is Claim.BUSY
    finally:
        opened.set()
        assert await working is DONE

    assert store.claim(key, time.now, lease=1) is Claim.SEEN


async def test_a_broken_store_does_not_repeat_what_was_consumed(caplog):
    class Broken(SeenInMemory):
        def done(self, key: str, now: float, *, window: float) -> None:
            raise OSError("disk full")

    assert await call(bound(lambda batch: None, Idempotence(Broken())), received(1)) is DONE
    assert "could not be noted" in caplog.text


async def test_a_store_that_fails_in_the_middle_of_a_batch_keeps_no_claims():
    class FailsOnce(Counting):
        def claim(self, key: str, now: float, *, lease: float) -> Claim:
            if self.claims == 1:
                self.claims += 1
                raise OSError("disk full")
            return super().claim(key, now, lease=lease)

    binding = bound(lambda batch: None, Idempotence(FailsOnce()))

    assert len((await call(binding, received(1), received(2))).failed) == 2
    assert await call(binding, received(1), received(2)) is DONE


@pytest.mark.parametrize("wrong", [{"window": 0}, {"lease": -1}, {"retry": 0}])
def test_durations_have_to_be_positive(wrong):
    with pytest.raises(SettingError, match=r"Idempotence\.\w+ must be positive"):
        Idempotence(**wrong)


# ---- listeners in order that commit by themselves


SUCCESS, COMMIT, ROLLBACK, RETRY = Verdict.SUCCESS, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.RETRY


class Committing:
    """A listener with a transaction: a rollback forgets what was handled since the last commit."""

    def __init__(self, *verdicts: Verdict, then: Verdict = COMMIT) -> None:
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
        if messages[0].keys == ("last",):
            self._verdicts.clear()
        verdict = self._verdicts.pop(0) if self._verdicts else self._then
        if verdict is ROLLBACK:
            self._pending.clear()
        elif verdict is not RETRY:
            self._pending += [" ".join(message.keys) or message.msg_id for message in messages]
        if verdict is COMMIT:
            self.committed += self._pending
            self._pending.clear()
        return verdict


def listening(
    listen: Callable[..., Verdict],
    *middleware: object,
    is_async: bool = False,
    in_order: bool = True,
) -> Binding:
    async def listen_async(messages: Sequence[ReceivedMessage], context: ConsumeContext) -> Verdict:
        await asyncio.sleep(0)
        return listen(messages, context)

    return bind_listener(
        listen_async if is_async else listen, group=GROUP, middleware=middleware, in_order=in_order
    )


def test_only_what_was_committed_is_seen_by_the_next_owner_of_the_queue(store):
    here, there = Committing(SUCCESS, SUCCESS, COMMIT), Committing()
    binding, other = (listening(here, Idempotence(store)), listening(there, Idempotence(store)))
    ownership = Ownership()
    binding.call(QUEUE, [received(0)], ownership)

    other.call(QUEUE, [received(0)])

    assert there.calls == [0], "this process may be dead by now"
    for offset in (1, 2):
        binding.call(QUEUE, [received(offset)], ownership)
    for offset in (1, 2):
        other.call(QUEUE, [received(offset)])
    assert there.calls == [0], "a commit is for those before it, too"


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.sampled_from("abcd"), min_size=1, max_size=7),
    script=st.lists(st.sampled_from([SUCCESS, SUCCESS, COMMIT, ROLLBACK, RETRY]), max_size=10),
    is_async=st.booleans(),
)
def test_whatever_a_listener_says_each_key_is_committed_once(keys, script, is_async):
    listen = Committing(*script)
    messages = [keyed(offset, key) for offset, key in enumerate([*keys, "last"])]

    async def consume():
        binding = listening(listen, Idempotence(key=by_keys), is_async=is_async)
        async with consuming({"orders": binding}, ordered=True, suspend=0.01) as bench:
            owned = bench.own(messages, lock=LockStub())
            await until(lambda: len(owned.window) == 0)
            return bench.position(owned)

    assert asyncio.run(consume()) == len(messages)
    assert sorted(listen.committed) == sorted({*keys, "last"})


# ---- middleware around it


class Failing:
    """Middleware that fails after the handler, once."""

    may_fail = True

    def __call__(self, delivery: Delivery) -> contextlib.AbstractContextManager[None]:
        return self._around()

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        yield
        if self.may_fail:
            self.may_fail = False
            raise OSError("the database is gone")


@pytest.mark.parametrize("is_outside", [False, True], ids=["inside", "outside"])
@both
async def test_a_success_that_middleware_turns_into_a_failure_is_not_seen(
    store, is_async, is_outside
):
    calls: list[int] = []
    middleware: list[object] = [Idempotence(store), Failing()]
    if is_outside:
        middleware.reverse()
    binding = bound(lambda batch: calls.append(1), *middleware, is_async=is_async)

    outcomes = [await call(binding, received(1)) for _ in range(3)]

    assert [bool(outcome.failed) for outcome in outcomes] == [True, False, False]
    assert len(calls) == 2


# ---- stores


def test_memory_forgets_the_oldest_when_it_is_full():
    store = SeenInMemory(limit=3)
    for number in range(5):
        store.claim(str(number), 0, lease=10)
        store.done(str(number), 0, window=100)

    assert len(store) == 3
    assert store.claim("0", 1, lease=10) is Claim.TAKEN
    assert store.claim("4", 1, lease=10) is Claim.SEEN


def test_a_file_is_shared_and_a_claim_belongs_to_the_process_that_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(SeenInSqlite("seen.db")) as here:
        here.claim("lapsed", 0, lease=10)
        here.claim("done", 0, lease=10)
        here.done("done", 0, window=100)
        packed = pickle.dumps(Idempotence(here, key=by_keys))
        monkeypatch.chdir("/")
        with contextlib.closing(pickle.loads(packed).store) as there:  # noqa: S301  # our own
            assert there.claim("done", 50, lease=10) is Claim.SEEN
            assert there.claim("lapsed", 20, lease=10) is Claim.TAKEN

            assert not here.renew("lapsed", 21, lease=10)
            here.release("lapsed")
            assert here.claim("lapsed", 21, lease=10) is Claim.BUSY


def test_a_store_that_cannot_be_used_says_why(tmp_path):
    closed = SeenInSqlite(tmp_path / "seen.db")
    closed.close()
    closed.close()

    with pytest.raises(WrongUse, match="closed"):
        closed.claim("k", 0, lease=1)
    with pytest.raises(WrongUse, match="give Idempotence a SeenInSqlite"):
        pickle.dumps(Idempotence())


def _claim_all(path: Path, keys: int, claimed: Any) -> None:
    store = SeenInSqlite(path)
    taken = [key for key in range(keys) if store.claim(str(key), 0, lease=100) is Claim.TAKEN]
    claimed.put(taken)
    store.close()


def test_of_several_processes_one_gets_each_key(tmp_path):
    SeenInSqlite(tmp_path / "seen.db").close()
    context = multiprocessing.get_context("spawn")
    claimed = context.Queue()
    processes = [
        context.Process(target=_claim_all, args=(tmp_path / "seen.db", 100, claimed))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    taken = [key for _ in processes for key in claimed.get(timeout=60)]
    for process in processes:
        process.join(60)

    assert sorted(taken) == list(range(100))


def test_a_store_that_was_used_is_refused_in_a_fork(tmp_path):
    for store in (SeenInMemory(), SeenInSqlite(tmp_path / "seen.db")):
        with contextlib.closing(store):
            store.claim("k", 0, lease=100)

            def act(store=store):
                with contextlib.closing(store), pytest.raises(UsedAfterFork) as refused:
                    store.claim("other", 0, lease=100)
                return str(refused.value)

            assert "make a new one after the fork" in in_a_fork(act).said
            assert store.claim("k", 1, lease=100) is Claim.BUSY


class SeenMachine(RuleBasedStateMachine):
    """Both stores against a model: a key is free, claimed until, or seen until."""

    keys = st.sampled_from("abc")

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.model: dict[str, tuple[str, float]] = {}
        self.folder = tempfile.TemporaryDirectory()
        file = SeenInSqlite(Path(self.folder.name) / "seen.db", sweep=3)
        self.stores: list[SeenStore] = [SeenInMemory(), file]

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(key=keys, lease=st.floats(1, 20))
    def claim(self, key: str, lease: float) -> None:
        state, until_time = self.model.get(key, ("free", 0.0))
        expected = Claim.TAKEN
        if until_time > self.now:
            expected = Claim.SEEN if state == "seen" else Claim.BUSY
        if expected is Claim.TAKEN:
            self.model[key] = ("claimed", self.now + lease)

        assert [store.claim(key, self.now, lease=lease) for store in self.stores] == [expected] * 2

    def _is_claimed(self, key: str) -> bool:
        return self.model.get(key, ("free", 0.0))[0] == "claimed"

    @rule(key=keys, lease=st.floats(1, 20))
    def renew(self, key: str, lease: float) -> None:
        is_held = self._is_claimed(key)
        if is_held:
            self.model[key] = ("claimed", self.now + lease)

        assert [store.renew(key, self.now, lease=lease) for store in self.stores] == [is_held] * 2

    @rule(key=keys, window=st.floats(1, 20))
    def done(self, key: str, window: float) -> None:
        if self._is_claimed(key):
            self.model[key] = ("seen", self.now + window)
            for store in self.stores:
                store.done(key, self.now, window=window)

    @rule(key=keys)
    def release(self, key: str) -> None:
        if self._is_claimed(key):
            del self.model[key]
            for store in self.stores:
                store.release(key)

    @rule(seconds=st.floats(0, 15))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds


TestSeenStores = SeenMachine.TestCase
TestSeenStores.settings = settings(max_examples=40, stateful_step_count=30)
