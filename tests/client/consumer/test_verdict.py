"""What handlers and listeners may say, and what it means."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.verdict import (
    BY_ATTEMPTS,
    DEAD,
    DONE,
    LONGEST_REASON,
    AnswerInvalid,
    ConsumeContext,
    DeadLetter,
    Retry,
    Verdict,
    outcome_of_answer,
    outcome_of_error,
    outcome_of_verdict,
    reason_of,
)
from orbitmq.errors import SettingError
from tests.support.consuming import GROUP, QUEUE, received

MESSAGES = [received(offset) for offset in range(4)]


def answered(answer: object, *, is_batch: bool = True) -> list[int]:
    """Offsets of the messages that failed, by this answer of a batch handler."""
    outcome = outcome_of_answer(answer, MESSAGES, "bill", is_batch=is_batch)
    return [message.queue_offset for message in outcome.failed]


@pytest.mark.parametrize("answer", [None, True, Verdict.SUCCESS])
def test_returning_nothing_or_success_is_success(answer):
    assert outcome_of_answer(answer, MESSAGES, "bill", is_batch=False) is DONE


@pytest.mark.parametrize("answer", [False, Verdict.RETRY])
def test_returning_false_or_retry_fails_all(answer):
    assert answered(answer) == [0, 1, 2, 3]


@given(st.integers(-1, 10))
def test_messages_after_the_index_failed(index):
    assert answered(index) == [offset for offset in range(4) if offset > index]


@pytest.mark.parametrize("answer", ["done", -2, 1.5, object(), [], Verdict.COMMIT])
def test_an_answer_that_says_nothing_is_refused_with_what_is_allowed(answer):
    with pytest.raises(AnswerInvalid, match=r"bill returned .*None, True, False or a Verdict"):
        answered(answer)


@pytest.mark.parametrize("answer", [0, 1, -1])
def test_a_handler_of_single_messages_cannot_answer_with_an_index(answer):
    with pytest.raises(AnswerInvalid, match="may return None"):
        answered(answer, is_batch=False)


@pytest.mark.parametrize(
    ("signal", "level", "delay"),
    [
        (Retry(), BY_ATTEMPTS, None),
        (Retry(delay=30), BY_ATTEMPTS, 30.0),
        (Retry(delay=timedelta(minutes=1)), BY_ATTEMPTS, 60.0),
        (Retry(level=5), 5, None),
        (DeadLetter("no such customer"), DEAD, None),
    ],
)
def test_a_signal_says_when_or_whether_messages_come_again(signal, level, delay):
    failure = outcome_of_error(signal, MESSAGES).failure

    assert failure is not None
    assert (failure.level, failure.delay) == (level, delay)
    assert failure.error is None, "a signal is no error to be logged with a traceback"


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay": -1},
        {"delay": "soon"},
        {"delay": float("nan")},
        {"level": 0},
        {"level": 1.5},
        {"level": 2**31},
        {"delay": 1, "level": 1},
    ],
)
def test_a_retry_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(SettingError, match="Retry"):
        Retry(**wrong)  # that is the point


@given(st.text(max_size=5000))
def test_a_reason_is_one_line_that_can_travel(text):
    reason = reason_of(ValueError(text))

    assert reason.startswith("ValueError")
    assert len(reason.encode("utf-8", "replace")) <= LONGEST_REASON
    assert len(reason.splitlines()) == 1


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("signal", [Retry, DeadLetter])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (ValueError("no such order\nand more"), "ValueError: no such order"),
        (Speechless(), "Speechless: (no text: ValueError)"),
        (404, "404"),
        (b"raw", "b'raw'"),
        ("half a \ud800", "half a ?"),
        ("x" * 5000, "x" * LONGEST_REASON),
        ("é" * 5000, "é" * (LONGEST_REASON // 2)),
    ],
)
def test_whatever_a_signal_is_given_as_a_reason_can_travel(signal, given, told):
    raised = signal(given)
    failure = outcome_of_error(raised, MESSAGES).failure

    assert failure is not None
    assert failure.reason == raised.reason == str(raised) == told


@pytest.mark.parametrize("signal", [Retry, DeadLetter])
def test_a_signal_without_a_reason_has_one(signal):
    failure = outcome_of_error(signal(None), MESSAGES).failure

    assert failure is not None
    assert "the handler" in (failure.reason or "")


def test_a_signal_of_somebodys_own_need_not_be_made_properly():
    class Later(Retry):
        def __init__(self, delay: object) -> None:
            self.delay = delay  # type: ignore[assignment]  # that is the point

    class Never(DeadLetter):
        def __init__(self) -> None:
            pass

    later, wrong, never = (
        outcome_of_error(each, MESSAGES).failure for each in (Later(30), Later("soon"), Never())
    )

    assert later is not None
    assert (later.level, later.delay) == (BY_ATTEMPTS, 30.0)
    assert wrong is not None
    assert wrong.delay is None
    assert "Retry.delay must be seconds" in (wrong.reason or "")
    assert never is not None
    assert never.level == DEAD


def test_signals_keep_what_they_say_when_pickled():
    assert pickle.loads(pickle.dumps(DeadLetter("because"))).reason == "because"  # noqa: S301
    retry = pickle.loads(pickle.dumps(Retry(ValueError("no"), delay=5)))  # noqa: S301
    assert (retry.reason, retry.delay, retry.level) == ("ValueError: no", 5.0, None)


class TestListener:
    """The low-level interface, where a verdict is owed."""

    def context(self, **given: object) -> ConsumeContext:
        return ConsumeContext(GROUP, QUEUE, **given)  # type: ignore[arg-type]

    def failed(self, verdict: object, context: ConsumeContext) -> list[int]:
        outcome = outcome_of_verdict(verdict, context, MESSAGES, "listen")
        return [message.queue_offset for message in outcome.failed]

    @pytest.mark.parametrize("verdict", [None, Verdict.RETRY])
    def test_no_verdict_is_a_failure(self, verdict):
        assert self.failed(verdict, self.context()) == [0, 1, 2, 3]

    @given(st.integers(-3, 10))
    def test_the_index_of_the_context_counts_with_success(self, index):
        context = self.context(ack_index=index)

        assert self.failed(Verdict.SUCCESS, context) == [n for n in range(4) if n > index]

    def test_the_delay_level_of_the_context_travels(self):
        context = self.context(delay_level=7)
        outcome = outcome_of_verdict(Verdict.RETRY, context, MESSAGES, "listen")

        assert outcome.failure is not None
        assert outcome.failure.level == 7

    @pytest.mark.parametrize(
        "wrong", [{"delay_level": "3"}, {"delay_level": 2.5}, {"suspend": "1 s"}, {"ack_index": ""}]
    )
    def test_what_cannot_be_done_is_refused_under_its_name(self, wrong):
        verdict = Verdict.SUCCESS if "ack_index" in wrong else Verdict.RETRY

        with pytest.raises(SettingError, match=rf"context\.{next(iter(wrong))} must be"):
            outcome_of_verdict(verdict, self.context(**wrong), MESSAGES, "listen")

    @pytest.mark.parametrize("verdict", [True, False, 3, "SUCCESS"])
    def test_anything_else_is_refused(self, verdict):
        with pytest.raises(AnswerInvalid, match="listen returned"):
            outcome_of_verdict(verdict, self.context(), MESSAGES, "listen")
