"""Brokers that failed or were slow are left alone for a while."""

from __future__ import annotations

import pytest

from orbitmq.client.producer.send import Faults, avoided_for


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


def test_slow_brokers_are_avoided_only_if_so_wanted():
    faults = Faults(_Time(), avoid_failed=True, avoid_slow=False)

    faults.answered("a", 100.0)

    assert faults.is_available("a")


def test_a_failed_broker_is_avoided_for_ten_seconds():
    time = _Time()
    faults = Faults(time, avoid_failed=True, avoid_slow=False)

    faults.failed("a")

    assert not faults.is_available("a")
    assert faults.is_available("b")
    time.now += 9.99
    assert not faults.is_available("a")
    time.now += 0.01
    assert faults.is_available("a")


def test_failed_brokers_are_not_avoided_if_so_wanted():
    faults = Faults(_Time(), avoid_failed=False, avoid_slow=False)

    faults.failed("a")

    assert faults.is_available("a")


def test_one_good_answer_ends_it():
    faults = Faults(_Time(), avoid_failed=True, avoid_slow=True)
    faults.failed("a")
    assert not faults.is_empty

    faults.answered("a", 0.01)

    assert faults.is_available("a")
    assert faults.is_empty
