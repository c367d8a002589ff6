"""How long brokers that did not answer are left alone."""

from __future__ import annotations

from orbitmq.client.routes import Queue
from orbitmq.spark.stream import BrokerBackoff, longest_waits


def pause_after(pauses: BrokerBackoff, wait: float, *, asked: float = 100.0) -> float:
    """How long a broker is left alone that kept us waiting, to a tenth of a second."""
    answered = asked + wait
    pauses.note(["a"], {"a": wait}, answered)
    return next(
        tenth / 10 for tenth in range(10_000) if pauses.is_over("a", answered + tenth / 10 + 1e-6)
    )


def test_a_broker_that_hangs_is_left_alone_for_longer_and_longer():
    pauses = BrokerBackoff(5.0)

    assert [pause_after(pauses, 3.0) for _ in range(6)] == [5.0, 6.0, 12.0, 24.0, 24.0, 24.0]


def test_a_broker_that_refuses_does_not_pay_for_one_that_hangs():
    pauses = BrokerBackoff(5.0)

    for start in (100.0, 200.0, 300.0, 400.0):
        pauses.note(["a", "b"], {"a": 0.01, "b": 3.0}, start + 3.0)

    assert pauses.is_over("a", 408.0)
    assert not pauses.is_over("b", 426.0)


def test_refusals_do_not_make_the_first_hiccup_a_long_one():
    pauses = BrokerBackoff(5.0)
    for _ in range(6):
        pause_after(pauses, 0.01)

    assert [pause_after(pauses, 3.0) for _ in range(3)] == [5.0, 6.0, 12.0]


def test_a_broker_counts_with_the_longest_wait_for_one_of_its_queues():
    slow, quick, other = Queue("t", "a", 0), Queue("t", "a", 1), Queue("t", "b", 0)

    assert longest_waits([slow, quick, other], {slow: 3.0, quick: 0.1}) == {"a": 3.0, "b": 0.0}


def test_who_has_answered_begins_anew():
    pauses = BrokerBackoff(5.0)
    for _ in range(4):
        pause_after(pauses, 3.0)

    pauses.note(["a", "b"], {"b": 0.0}, 500.0)

    assert pauses.is_over("a", 500.0)
    assert not pauses.is_over("b", 504.0)
    assert pause_after(pauses, 3.0, asked=600.0) == 5.0
