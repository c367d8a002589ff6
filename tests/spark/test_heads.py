"""How long brokers that did not answer are left alone."""

from __future__ import annotations

from orbitmq.spark.heads import BrokerPauses


def pause_after(pauses: BrokerPauses, wait: float, *, asked: float = 100.0) -> float:
    """How long a broker is left alone that kept us waiting, to a tenth of a second."""
    answered = asked + wait
    pauses.note(["a"], {"a"}, since=asked, now=answered)
    return next(
        tenth / 10 for tenth in range(10_000) if pauses.is_over("a", answered + tenth / 10 + 1e-6)
    )


def test_a_broker_that_refuses_at_once_is_asked_again_soon_however_often() -> None:
    pauses = BrokerPauses(5.0)

    assert [pause_after(pauses, 0.0) for _ in range(6)] == [5.0] * 6


def test_a_broker_that_hangs_is_left_alone_for_longer_and_longer() -> None:
    pauses = BrokerPauses(5.0)

    assert [pause_after(pauses, 3.0) for _ in range(6)] == [5.0, 6.0, 12.0, 24.0, 24.0, 24.0]


def test_who_has_answered_begins_anew() -> None:
    pauses = BrokerPauses(5.0)
    for _ in range(4):
        pause_after(pauses, 3.0)

    pauses.note(["a", "b"], {"b"}, since=500.0, now=500.0)

    assert pauses.is_over("a", 500.0)
    assert not pauses.is_over("b", 504.0)
    assert pause_after(pauses, 3.0, asked=600.0) == 5.0
