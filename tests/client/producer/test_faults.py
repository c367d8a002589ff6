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
