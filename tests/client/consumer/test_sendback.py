"""Failed messages on their way back: what is asked, and what is done when the answer is no."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.retries import PUT_OFF
from orbitmq.client.consumer.sendback import NO_LIMIT, SendBack, level_for
from orbitmq.client.consumer.verdict import DEAD, DELAY_LEVELS, Failure, Outcome, Retry, Verdict
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.errors import BrokerRefused, SendFailed
from orbitmq.message.properties import (
    DELAY,
    MAX_RECONSUME_TIMES,
    ORIGIN_MESSAGE_ID,
    RECONSUME_TIME,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
    WAIT,
)
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.headers import ConsumerSendBackRequest
from tests.support.consuming import GROUP, received, retried


@dataclass
class Outside:
    """Stands for the engine, the broker behind it, and the producer of copies."""

    refuses: bool = False
    is_there: bool = True
    takes_copies: bool = True
    asked: list[tuple[ConsumerSendBackRequest, dict[str, str]]] = field(default_factory=list)
    copies: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)

    @property
    def routes(self) -> Outside:
        return self

    def master(self, name: str) -> str:
        if not self.is_there:
            raise BrokerUnavailable(name, "it has no master")
        return f"address of {name}"

    async def ask(self, where, code, header, *, extra, timeout) -> None:  # noqa: ASYNC109
        assert (where, timeout) == ("address of broker-a", 5.0)
        self.asked.append((header, dict(extra)))
        if self.refuses:
            raise BrokerRefused(ResponseCode.SYSTEM_ERROR, "no", where, code)

    async def forward(self, topic, body, properties, *, flag=0, sys_flag=0) -> None:
        self.copies.append((topic, body, dict(properties)))
        if not self.takes_copies:
            raise SendFailed(topic, 3)

    def sending_back(self, limit: int | None = None) -> SendBack:
        outside: Any = self
        return SendBack(outside, GROUP, outside, max_retries=limit)


@given(st.floats(0, 10_000))
def test_the_level_for_a_delay_is_the_first_that_is_not_shorter(delay):
    level = level_for(delay)

    assert 1 <= level <= 18
    assert DELAY_LEVELS[level - 1] >= delay or level == 18
    assert level == 1 or DELAY_LEVELS[level - 2] < delay


@pytest.mark.parametrize("limit", [None, 3])
async def test_the_broker_that_stored_it_is_asked(limit):
    outside = Outside()

    assert await outside.sending_back(limit).send_back(retried(7, "orders"), Failure(reason="no"))

    ((header, extra),) = outside.asked
    assert extra == {"reason": "no"}
    assert header == ConsumerSendBackRequest(
        offset=7000,
        group=GROUP,
        delay_level=0,
        origin_msg_id="ID7",
        origin_topic="orders",
        max_reconsume_times=limit,
    )
    assert not outside.copies


@pytest.mark.parametrize(
    ("failure", "level", "extra"),
    [
        (Failure(delay=45.5), 5, {"delayMs": "45500"}),
        # No broker waits for ages, and it reads no more digits.
        (Failure(delay=Retry(delay=timedelta.max).delay), 18, {"delayMs": "9" * 15}),
        (Failure(DEAD, delay=45.5, reason="poison"), DEAD, {"reason": "poison"}),
    ],
)
async def test_a_delay_travels_exactly_and_as_a_level_unless_the_message_is_given_up(
    failure, level, extra
):
    outside = Outside()

    assert await outside.sending_back().send_back(received(1), failure)

    assert [(header.delay_level, sent) for header, sent in outside.asked] == [(level, extra)]


@pytest.mark.parametrize("outside", [Outside(refuses=True), Outside(is_there=False)])
async def test_a_copy_of_what_its_broker_does_not_take_goes_to_the_retry_topic(outside):
    message = received(
        7,
        reconsume_times=2,
        properties={
            "colour": "red",
            TRANSACTION_PREPARED: "true",
            TIMER_DELAY_MS: "5000",
            PUT_OFF: "true",
            WAIT: "false",  # the copy has to be on the disk when it is taken
        },
    )

    assert await outside.sending_back().send_back(message, Failure(reason="because"))

    ((topic, body, properties),) = outside.copies
    assert (topic, body) == (f"%RETRY%{GROUP}", message.stored.stored_body)
    assert properties == {
        UNIQ_KEY: "ID7",
        "colour": "red",
        RETRY_TOPIC: "orders",
        ORIGIN_MESSAGE_ID: message.offset_id,
        RECONSUME_TIME: "3",
        MAX_RECONSUME_TIMES: "16",
        DELAY: "5",
        "DLQ_REASON": "because",
    }


_HELD = received(7, reconsume_times=20)
_HELD_FAILURE = Outcome(Verdict.RETRY, [_HELD], held=[_HELD], hold=5.0).held_failure


@pytest.mark.parametrize(
    ("call", "limit", "times", "failure", "expected"),
    [
        ("send_back", None, 0, Failure(level=9), {DELAY: "9", RECONSUME_TIME: "1"}),
        ("send_back", None, 0, Failure(delay=100), {DELAY: "6"}),
        # What never reached its handler costs no attempt, and locks do not make it a dead letter.
        (
            "send_back",
            None,
            20,
            _HELD_FAILURE,
            {RECONSUME_TIME: "20", MAX_RECONSUME_TIMES: str(NO_LIMIT), DELAY: "2", PUT_OFF: "true"},
        ),
        # A dead letter is allowed no attempt.
        ("send_back", 3, 2, Failure(DEAD), {RECONSUME_TIME: "3", MAX_RECONSUME_TIMES: "0"}),
        ("give_up", 16, 0, Failure(DEAD), {RECONSUME_TIME: "1", MAX_RECONSUME_TIMES: "0"}),
        ("give_up", 4, 4, Failure(), {RECONSUME_TIME: "5", MAX_RECONSUME_TIMES: "4"}),
        ("give_up", None, 0, Failure(), {MAX_RECONSUME_TIMES: str(NO_LIMIT)}),
    ],
)
async def test_a_copy_says_how_often_it_was_and_may_be_tried_and_how_long_it_waits(
    call, limit, times, failure, expected
):
    outside = Outside(refuses=True)
    message = received(7).with_reconsume_times(times)

    assert await getattr(outside.sending_back(limit), call)(message, failure)

    ((_, _, properties),) = outside.copies
    assert {name: properties[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("call", "failure", "outside", "copies"),
    [
        ("send_back", Failure(), Outside(refuses=True, takes_copies=False), 1),
        ("send_back", Failure(DEAD), Outside(refuses=True, takes_copies=False), 1),
        ("send_back", Failure(DEAD), Outside(is_there=False), 0),  # it will be back
        ("give_up", Failure(), Outside(refuses=True, takes_copies=False), 1),
    ],
)
async def test_what_no_broker_takes_stays_with_the_caller(call, failure, outside, copies):
    assert not await getattr(outside.sending_back(), call)(received(1), failure)

    assert len(outside.copies) == copies


async def test_the_broker_of_a_message_is_asked_to_give_it_up_when_no_copy_is_taken():
    outside = Outside(takes_copies=False)

    assert await outside.sending_back().give_up(received(1), Failure(reason="because"))

    ((header, extra),) = outside.asked
    assert (header.delay_level, extra) == (DEAD, {"reason": "because"})


@pytest.mark.parametrize(
    ("limit", "times", "failure", "is_dead", "words"),
    [
        (None, 0, Failure(DEAD, reason="no account"), True, "after 1 attempt: no account"),
        (3, 3, Failure(reason="ValueError: x"), True, "after 4 attempts: ValueError: x"),
        (None, 16, Failure(), True, "unless the broker allows the group more: no reason given"),
        # It came again after the default attempts: the broker allows its group more.
        (None, 17, Failure(), False, "unless the broker allows the group more: no reason given"),
        (3, 2, Failure(), False, None),
        (None, 15, Failure(), False, None),
    ],
)
async def test_a_message_that_was_given_up_or_has_used_its_attempts_is_logged_as_dead(
    limit, times, failure, is_dead, words, caplog
):
    message = received(7).with_reconsume_times(times)
    back = Outside().sending_back(limit)

    assert await back.send_back(message, failure)

    assert back.is_dead(message, failure) is is_dead
    lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(lines) == (words is not None)
    for line in lines:
        assert line.startswith(f"message ID7 of orders goes to the dead letters of group {GROUP} ")
        assert line.endswith(words)
