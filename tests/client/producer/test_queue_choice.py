"""Which queue a message goes to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.message import Message
from orbitmq.client.producer.send import Faults, RoundRobin, avoided_for, by_key
from orbitmq.client.routes import Queue
from orbitmq.errors import MessageRefused
from orbitmq.javahash import key_hash

MESSAGE = Message("orders", b"x")


def _queues(count: int, *brokers: str) -> tuple[Queue, ...]:
    return tuple(Queue("orders", broker, place) for broker in brokers for place in range(count))


def _faults(now: float = 0.0) -> Faults:
    return Faults(lambda: now, avoid_failed=True, avoid_slow=False)


def test_queues_take_turns_and_the_first_is_up_to_chance():
    queues = _queues(3, "a", "b")
    firsts = set()
    for seed in range(50):
        rotation = RoundRobin(random.Random(seed))
        chosen = [rotation.choose(queues, _faults()) for _ in range(12)]

        begin = queues.index(chosen[0])
        assert chosen == [queues[(begin + step) % 6] for step in range(12)]
        firsts.add(begin)
    assert firsts == set(range(6))


@given(
    brokers=st.lists(st.sampled_from("abcde"), min_size=1, unique=True),
    failed=st.sets(st.sampled_from("abcde")),
    tried=st.lists(st.sampled_from("abcde"), unique=True),
    seed=st.integers(0, 1000),
)
def test_a_good_broker_is_never_passed_over_for_a_bad_one(brokers, failed, tried, seed):
    faults = _faults()
    for broker in failed:
        faults.failed(broker)
    queues = _queues(2, *brokers)

    chosen = RoundRobin(random.Random(seed)).choose(queues, faults, tried).broker

    untried = [broker for broker in brokers if broker not in tried]
    best = [broker for broker in untried if broker not in failed]
    assert chosen in (best or brokers)
    if tried and set(brokers) != {tried[-1]}:
        assert chosen != tried[-1]


#: `hashCode()` of String, Integer and Long, computed with a Java runtime.
@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        ("order-1", -1207111310),
        ("o-1", 108115),
        ("", 0),
        ("polygenelubricants", -(2**31)),
        ("中文", 646394),
        (17, 17),
        (-5, -5),
        (2**31, -(2**31)),
        (5_000_000_000, 705032705),
        (-5_000_000_000, 705032702),
    ],
)
def test_keys_hash_as_in_java(key, hashed):
    assert key_hash(key) == hashed


@given(st.one_of(st.text(), st.integers(-(2**63), 2**63 - 1)), st.integers(1, 40))
def test_the_same_key_always_gives_the_same_queue(key, count):
    queues = _queues(count, "a")

    chosen = by_key(key)(queues, MESSAGE)

    assert chosen is by_key(key)(queues, Message("orders", b"other"))
    # Java: Math.abs(hash % n), where the remainder has the sign of the hash.
    hashed = key_hash(key)
    assert chosen.id == abs(hashed - count * int(hashed / count))


@pytest.mark.parametrize("key", [True, 2**63])
def test_other_keys_are_refused(key):
    with pytest.raises(MessageRefused, match=r"message\.key must be"):
        by_key(key)


# ---- brokers that failed or were slow are left alone for a while


class _Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("latency", "pause"),
    [
        (0.0, 0), (0.05, 0), (0.1, 0), (0.549, 0), (0.55, 2), (1.79, 2), (1.8, 5), (2.99, 5),
        (3.0, 6), (4.99, 6), (5.0, 10), (14.9, 10), (15.0, 30), (100.0, 30),
    ],
)  # fmt: skip
def test_how_long_a_slow_broker_is_avoided(latency, pause):
    time = _Time()
    faults = Faults(time, avoid_failed=True, avoid_slow=True)

    faults.answered("a", latency)

    assert avoided_for(latency) == pause
    assert faults.is_available("a") is (pause == 0)
    time.now += pause
    assert faults.is_available("a")


def test_a_failed_broker_is_avoided_for_ten_seconds_or_until_it_answers_well():
    time = _Time()
    faults = Faults(time, avoid_failed=True, avoid_slow=False)
    careless = Faults(time, avoid_failed=False, avoid_slow=False)

    for each in (faults, careless):
        each.failed("a")
    assert (faults.is_available("a"), faults.is_available("b")) == (False, True)
    assert careless.is_available("a")

    time.now += 10.0
    assert faults.is_available("a")
    faults.failed("a")
    faults.answered("a", 100.0)
    assert faults.is_available("a")
