"""Messages that were consumed do not reach the handler again."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from orbitmq.client.consumer.handlers import Binding, bind_handler
from orbitmq.client.consumer.verdict import DONE, DeadLetter, Outcome, Retry
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
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError, WrongUse
from orbitmq.message.properties import KEYS
from orbitmq.names import wrap_topic
from tests.support.consuming import DEADLINE, GROUP, QUEUE, LockStub, consuming, received, until
from tests.support.forking import in_a_fork
from tests.support.scarcethreads import refuse_threads


class Time:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

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
    yield made
    made.close()


def bound(
    function: Callable[[Any], object], idempotence: Idempotence, *, is_async: bool = False
) -> Binding:
    if not is_async:
        return bind_handler(function, group=GROUP, batch=True, middleware=[idempotence])

    async def handle(messages: list[ReceivedMessage]) -> object:
        await asyncio.sleep(0)
        return function(messages)

    return bind_handler(handle, group=GROUP, middleware=[idempotence])


async def call(binding: Binding, *messages: ReceivedMessage) -> Outcome:
    if binding.is_async:
        return await binding.call_async(QUEUE, messages)
    return binding.call(QUEUE, messages)


both = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@both
@pytest.mark.feature("D14")
async def test_a_message_that_was_consumed_is_not_consumed_again(store, time, is_async):
    seen: list[str] = []
    idempotence = Idempotence(store, now=time)
    binding = bound(
        lambda batch: seen.extend(m.msg_id for m in batch), idempotence, is_async=is_async
    )

    first = await call(binding, received(1))
    second = await call(binding, received(1), received(2))

    assert first is second is DONE
    assert seen == ["ID1", "ID2"]
    assert idempotence.dropped == 1


@both
@pytest.mark.parametrize("fails", ["raises", "answers"])
async def test_a_message_that_failed_is_consumed_again(store, time, is_async, fails):
    calls: list[int] = []

    def handle(batch):
        calls.append(1)
        if len(calls) > 1:
            return None
        if fails == "raises":
            raise ValueError("once")
        return False

    binding = bound(handle, Idempotence(store, now=time), is_async=is_async)

    assert (await call(binding, received(1))).failed
    assert await call(binding, received(1)) is DONE
    assert await call(binding, received(1)) is DONE
    assert len(calls) == 2


async def test_what_was_seen_in_one_namespace_is_new_in_another(store, time):
    calls: list[str | None] = []
    idempotence = Idempotence(store, key=by_keys, now=time)
    binding = bound(lambda batch: calls.extend(m.namespace for m in batch), idempotence)

    for namespace in ("red", "blue", "red", None):
        queue = Queue(wrap_topic(namespace, "orders"), "broker-a", 0)
        stored = received(0, queue=queue, properties={KEYS: "order 1"}).stored
        await call(binding, ReceivedMessage(stored, queue, GROUP, None, namespace))

    assert calls == ["red", "blue", None]


async def test_of_a_batch_only_what_succeeded_is_seen(store, time):
    batches: list[list[int]] = []

    def handle(batch):
        batches.append([message.queue_offset for message in batch])
        return 0

    binding = bound(handle, Idempotence(store, now=time))
    await call(binding, received(0), received(1), received(2))
    await call(binding, received(0), received(1), received(2))

    assert batches == [[0, 1, 2], [1, 2]]


def keyed(offset: int, key: str, body: bytes = b"x") -> ReceivedMessage:
    """A message of its own about something that others may be about, too."""
    return received(offset, body=body, properties={KEYS: key})


@both
async def test_copies_in_one_batch_are_one(store, time, is_async):
    handled: list[int] = []
    idempotence = Idempotence(store, key=by_keys, now=time)
    binding = bound(
        lambda batch: handled.extend(m.queue_offset for m in batch), idempotence, is_async=is_async
    )

    outcome = await call(binding, keyed(1, "k"), keyed(2, "k"), keyed(3, "other"), keyed(4, "k"))

    assert outcome is DONE
    assert handled == [1, 3]
    assert idempotence.dropped == 2
    assert await call(binding, keyed(5, "k")) is DONE
    assert handled == [1, 3]


@both
@pytest.mark.parametrize("fails", [DeadLetter("poison"), Retry("later"), ValueError("no"), False])
async def test_what_is_behind_a_message_that_failed_is_looked_at_again(
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
    assert outcome.hold == 7
    assert idempotence.dropped == 0
    assert await call(binding, keyed(2, "k"), keyed(3, "k")) is DONE
    assert handled == [2]
    assert idempotence.dropped == 1


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
async def test_a_good_message_behind_a_poisonous_one_with_its_key_is_handled(time, ordered):
    handled: list[int] = []

    def handle(batch):
        if batch[0].body == b"poison":
            raise DeadLetter("poison")
        handled.extend(message.queue_offset for message in batch)

    binding = bound(handle, Idempotence(key=by_keys, retry=0.01, now=time))
    async with consuming({"orders": binding}, ordered=ordered, suspend=0.01) as bench:
        copies = [keyed(0, "k", b"poison"), keyed(1, "k"), keyed(2, "k")]
        owned = bench.own(copies, lock=LockStub() if ordered else None)
        await until(lambda: len(owned.window) == 0)

    assert handled == [1]
    assert bench.position(owned) == 3
    dead = bench.sent_back.given_up if ordered else bench.sent_back.back
    assert [message.queue_offset for message, _ in dead] == [0]


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


async def test_a_message_is_remembered_for_the_length_of_the_window(store, time):
    calls: list[int] = []
    idempotence = Idempotence(store, window=timedelta(minutes=1), now=time)
    binding = bound(lambda batch: calls.append(1), idempotence)
    await call(binding, received(1))

    time.now += 59
    await call(binding, received(1))
    assert len(calls) == 1

    time.now += 2
    await call(binding, received(1))
    assert len(calls) == 2


async def test_what_somebody_works_on_comes_again_later(store, time):
    entered, opened = threading.Event(), threading.Event()
    calls: list[list[int]] = []

    def slow(batch):
        calls.append([message.queue_offset for message in batch])
        if len(calls) == 1:
            entered.set()
            opened.wait(DEADLINE)

    binding = bound(slow, Idempotence(store, retry=7, now=time))
    first = asyncio.create_task(asyncio.to_thread(binding.call, QUEUE, [received(1)]))
    await asyncio.to_thread(entered.wait, DEADLINE)

    outcome = await call(binding, received(1), received(2))

    assert [message.queue_offset for message in outcome.failed] == [1]
    assert [message.queue_offset for message in outcome.held] == [1]
    assert outcome.hold == 7
    opened.set()
    await first
    assert await call(binding, received(1)) is DONE
    assert calls == [[1], [2]]


class Counting(SeenInMemory):
    """Notes how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = 0
        self.renewed_at = 0.0

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        self.claims += 1
        return super().claim(key, now, lease=lease)

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        is_held = super().renew(key, now, lease=lease)
        self.renewed_at = now
        return is_held


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
@both
async def test_the_message_of_a_process_that_died_at_work_is_no_dead_letter(
    time, ordered, is_async
):
    attempts: list[int] = []
    store = Counting()
    idempotence = Idempotence(store, lease=60, retry=0.002, now=time)
    binding = bound(
        lambda batch: attempts.extend(m.attempt for m in batch), idempotence, is_async=is_async
    )
    key = idempotence._name(GROUP, received(1))
    assert key is not None
    assert store.claim(key, time.now, lease=60) is Claim.TAKEN

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
    idempotence = Idempotence(store, lease=0.3, now=time)
    key = idempotence._name(GROUP, received(1))
    assert key is not None

    def handle(message):
        entered.set()
        opened.wait(DEADLINE)

    async def handle_async(message):
        await asyncio.to_thread(handle, message)

    binding = bind_handler(
        handle_async if is_async else handle, group=GROUP, middleware=[idempotence]
    )
    working = asyncio.create_task(
        binding.call_async(QUEUE, [received(1)])
        if is_async
        else asyncio.to_thread(binding.call, QUEUE, [received(1)])
    )
    try:
        assert await asyncio.to_thread(entered.wait, DEADLINE)
        for _ in range(3):
            time.now += 0.2
            now = time.now
            await until(lambda now=now: store.renewed_at == now)  # type: ignore[misc]
        assert store.claim(key, time.now, lease=1) is Claim.BUSY
    finally:
        opened.set()
        assert await working is DONE

    assert store.claim(key, time.now, lease=1) is Claim.SEEN
    await until(lambda: idempotence._renewal._thread is None)


async def test_claims_are_renewed_again_once_the_system_has_threads_again(time, monkeypatch):
    store = Counting()
    entered, opened = threading.Event(), threading.Event()
    idempotence = Idempotence(store, lease=0.3, now=time)
    refuse_threads(monkeypatch, "orbitmq idempotence", times=1)

    def handle(message):
        entered.set()
        opened.wait(DEADLINE)

    binding = bind_handler(handle, group=GROUP, middleware=[idempotence])
    failed = binding.call(QUEUE, [received(1)])
    assert "can't start new thread" in str(failed.failure)
    assert not idempotence._renewal._keys

    working = asyncio.create_task(asyncio.to_thread(binding.call, QUEUE, [received(1)]))
    try:
        assert await asyncio.to_thread(entered.wait, DEADLINE)
        time.now += 0.2
        await until(lambda: store.renewed_at == time.now)
    finally:
        opened.set()
        assert await working is DONE
    await until(lambda: idempotence._renewal._thread is None)


def test_only_claims_that_are_still_held_can_be_renewed(store):
    store.claim("k", 0, lease=10)
    assert store.renew("k", 8, lease=10)
    assert store.claim("k", 17, lease=10) is Claim.BUSY

    store.release("k")
    assert not store.renew("k", 18, lease=10)
    assert store.claim("k", 18, lease=10) is Claim.TAKEN
    store.done("k", 19, window=100)
    assert not store.renew("k", 20, lease=1000)
    assert store.claim("k", 120, lease=10) is Claim.TAKEN


def test_a_claim_that_another_process_has_by_now_is_not_renewed(tmp_path):
    slow, quick = SeenInSqlite(tmp_path / "seen.db"), SeenInSqlite(tmp_path / "seen.db")
    slow.claim("k", 0, lease=10)
    quick.claim("k", 20, lease=10)

    assert not slow.renew("k", 21, lease=10)
    slow.close()
    quick.close()


async def test_a_store_that_fails_in_a_batch_keeps_no_claims(time):
    class FailsOnce(Counting):
        def claim(self, key: str, now: float, *, lease: float) -> Claim:
            if self.claims == 1:
                self.claims += 1
                raise OSError("disk full")
            return super().claim(key, now, lease=lease)

    binding = bound(lambda batch: None, Idempotence(FailsOnce(), now=time))

    assert len((await call(binding, received(1), received(2))).failed) == 2
    assert await call(binding, received(1), received(2)) is DONE


async def test_business_keys_make_different_messages_one(store, time):
    calls: list[int] = []
    binding = bound(lambda batch: calls.append(1), Idempotence(store, key=by_keys, now=time))

    await call(binding, received(1, properties={KEYS: "order-7"}))
    await call(binding, received(2, properties={KEYS: "order-7"}))
    await call(binding, received(3))
    await call(binding, received(4))

    assert len(calls) == 3, "messages without a key are not looked after"


async def test_a_broken_store_does_not_repeat_what_was_consumed(caplog):
    class Broken(SeenInMemory):
        def done(self, key: str, now: float, *, window: float) -> None:
            raise OSError("disk full")

    assert await call(bound(lambda batch: None, Idempotence(Broken())), received(1)) is DONE
    assert "could not be noted" in caplog.text


def test_memory_forgets_the_oldest_when_it_is_full():
    store = SeenInMemory(limit=3)
    for number in range(5):
        store.claim(str(number), 0, lease=10)
        store.done(str(number), 0, window=100)

    assert len(store) == 3
    assert store.claim("0", 1, lease=10) is Claim.TAKEN
    assert store.claim("4", 1, lease=10) is Claim.SEEN


def test_sqlite_remembers_after_the_process(tmp_path):
    first = SeenInSqlite(tmp_path / "seen.db")
    first.claim("k", 0, lease=10)
    first.done("k", 0, window=100)
    first.close()
    second = SeenInSqlite(tmp_path / "seen.db")

    assert second.claim("k", 50, lease=10) is Claim.SEEN
    second.close()


def test_sqlite_sweeps_what_is_old(tmp_path):
    store = SeenInSqlite(tmp_path / "seen.db", sweep=10)
    for number in range(20):
        store.claim(str(number), number, lease=1)
        store.done(str(number), number, window=5)
    rows = store._opened().execute("SELECT count(*) FROM seen").fetchone()

    assert rows[0] < 10
    store.close()


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


class TestForks:
    def test_a_store_that_was_used_belongs_to_its_process(self, tmp_path):
        for store in (SeenInMemory(), SeenInSqlite(tmp_path / "seen.db")):
            with contextlib.closing(store):
                store.claim("k", 0, lease=100)

                def act(store=store):
                    with contextlib.closing(store), pytest.raises(UsedAfterFork) as refused:
                        store.claim("other", 0, lease=100)
                    return str(refused.value)

                assert "make a new one after the fork" in in_a_fork(act).said
                assert store.claim("k", 1, lease=100) is Claim.BUSY

    def test_each_fork_of_an_unused_store_has_claims_of_its_own(self, tmp_path):
        with contextlib.closing(SeenInSqlite(tmp_path / "seen.db")) as store:
            assert in_a_fork(lambda: store.claim("there", 0, lease=100).name).said == "TAKEN"

            assert store.claim("there", 1, lease=100) is Claim.BUSY
            assert not store.renew("there", 1, lease=100)

    def test_a_store_that_was_closed_says_so(self, tmp_path):
        store = SeenInSqlite(tmp_path / "seen.db")
        store.close()
        store.close()

        with pytest.raises(WrongUse, match="closed"):
            store.claim("k", 0, lease=1)


def test_a_claim_that_lapsed_is_not_released_for_its_next_owner(tmp_path):
    slow, quick = SeenInSqlite(tmp_path / "seen.db"), SeenInSqlite(tmp_path / "seen.db")
    slow.claim("k", 0, lease=10)
    quick.claim("k", 20, lease=10)

    slow.release("k")

    assert slow.claim("k", 21, lease=10) is Claim.BUSY
    slow.close()
    quick.close()


@pytest.mark.parametrize("wrong", [{"window": 0}, {"lease": -1}, {"retry": 0}])
def test_durations_have_to_be_positive(wrong):
    with pytest.raises(SettingError, match=r"Idempotence\.\w+ must be positive"):
        Idempotence(**wrong)  # one of several


async def test_a_consumer_with_it_handles_every_message_once(time):
    handled: list[str] = []

    def handle(message):
        handled.append(message.msg_id)

    middleware = [Idempotence(retry=0.01, now=time)]
    binding = bind_handler(handle, group=GROUP, middleware=middleware)
    async with consuming({"orders": binding}) as bench:
        copies = [received(n, properties={"UNIQ_KEY": f"ID{n % 10}"}) for n in range(50)]
        owned = bench.own(copies)
        await until(lambda: len(owned.window) == 0)

    assert sorted(handled) == sorted(f"ID{n}" for n in range(10))
    assert bench.sent_back.back == [], "copies of messages at work wait, and are dropped then"


def test_a_file_of_what_was_seen_can_be_sent_to_another_process_and_a_memory_cannot(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(SeenInSqlite("seen.sqlite")) as here:
        here.claim("one", 0.0, lease=60)
        packed = pickle.dumps(Idempotence(here, key=by_keys, window=10, retry=2))
        monkeypatch.chdir("/")
        there = pickle.loads(packed)  # noqa: S301  # our own

        with contextlib.closing(there.store):
            assert there.store.claim("one", 1.0, lease=60) is Claim.BUSY
            there.store.release("one")
            assert there.store.claim("one", 1.0, lease=60) is Claim.BUSY, "it is not its own"
    assert (there._key, there._window, there._retry) == (by_keys, 10, 2)

    with pytest.raises(WrongUse, match="give Idempotence a SeenInSqlite"):
        pickle.dumps(Idempotence())


@pytest.mark.parametrize("path", [":memory:", Path(":memory:"), ""])
def test_a_database_without_a_file_cannot_be_sent_to_another_process(path):
    with (
        contextlib.closing(SeenInSqlite(path)) as store,
        pytest.raises(WrongUse, match="give Idempotence a SeenInSqlite with the path"),
    ):
        pickle.dumps(store)


class SeenMachine(RuleBasedStateMachine):
    """Both stores against a model: a key is free, claimed until, or seen until."""

    keys = st.sampled_from("abc")

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.model: dict[str, tuple[str, float]] = {}
        self.stores: list[SeenStore] = [SeenInMemory(), SeenInSqlite(":memory:")]

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()

    @rule(key=keys, lease=st.floats(1, 20))
    def claim(self, key: str, lease: float) -> None:
        state, until_time = self.model.get(key, ("free", 0.0))
        expected = Claim.TAKEN
        if until_time > self.now:
            expected = Claim.SEEN if state == "seen" else Claim.BUSY
        if expected is Claim.TAKEN:
            self.model[key] = ("claimed", self.now + lease)

        assert [store.claim(key, self.now, lease=lease) for store in self.stores] == [expected] * 2

    @rule(key=keys, window=st.floats(1, 20))
    def done(self, key: str, window: float) -> None:
        if self.model.get(key, ("free", 0.0))[0] != "claimed":
            return
        self.model[key] = ("seen", self.now + window)
        for store in self.stores:
            store.done(key, self.now, window=window)

    @rule(key=keys)
    def release(self, key: str) -> None:
        if self.model.get(key, ("free", 0.0))[0] != "claimed":
            return
        del self.model[key]
        for store in self.stores:
            store.release(key)

    @rule(seconds=st.floats(0, 15))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds


TestSeenStores = SeenMachine.TestCase
TestSeenStores.settings = settings(max_examples=40, stateful_step_count=30)
