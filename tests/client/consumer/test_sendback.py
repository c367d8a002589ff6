"""Failed messages on their way back: what is asked, and what is done when the answer is no."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.delays import PUT_OFF
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
    encode_properties,
)
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import ConsumerSendBackRequest
from tests.support.consuming import GROUP, received


@dataclass
class Broker:
    """Stands for the engine and the broker behind it; refuses what it is told to."""

    refuses: bool = False
    is_there: bool = True
    asked: list[tuple[Any, ConsumerSendBackRequest, dict[str, str], float]] = field(
        default_factory=list
    )

    @property
    def routes(self) -> Broker:
        return self

    def master(self, name: str) -> str:
        if not self.is_there:
            raise BrokerUnavailable(name, "it has no master")
        return f"address of {name}"

    async def ask(
        self,
        where: str,
        code: int,
        header: Any,
        *,
        extra: Mapping[str, str],
        timeout: float,  # noqa: ASYNC109  # as the engine has it
    ) -> None:
        assert code == RequestCode.CONSUMER_SEND_MSG_BACK
        self.asked.append((where, header, dict(extra), timeout))
        if self.refuses:
            raise BrokerRefused(ResponseCode.SYSTEM_ERROR, "no", where, code)


@dataclass
class Resender:
    """Stands for the producer."""

    fails: bool = False
    sent: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)

    async def forward(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
    ) -> None:
        self.sent.append((topic, body, dict(properties)))
        if self.fails:
            raise SendFailed(topic, 3)


def sending_back(broker: Broker, resender: Resender, **options: Any) -> SendBack:
    return SendBack(broker, GROUP, resender, **options)  # type: ignore[arg-type]  # stands for it


@given(st.floats(0, 10_000))
def test_the_level_for_a_delay_is_the_first_that_is_not_shorter(delay):
    level = level_for(delay)

    assert 1 <= level <= 18
    assert DELAY_LEVELS[level - 1] >= delay or level == 18
    assert level == 1 or DELAY_LEVELS[level - 2] < delay


@pytest.mark.parametrize("limit", [None, 3])
async def test_the_broker_that_stored_it_is_asked(limit):
    broker, resender = Broker(), Resender()
    message = received(7)

    assert await sending_back(broker, resender, max_retries=limit).send_back(
        message, Failure(reason="ValueError: no")
    )

    ((where, header, extra, timeout),) = broker.asked
    assert where == "address of broker-a"
    assert timeout == 5.0
    assert extra == {"reason": "ValueError: no"}
    assert header == ConsumerSendBackRequest(
        offset=7000,
        group=GROUP,
        delay_level=0,
        origin_msg_id="ID7",
        origin_topic="orders",
        max_reconsume_times=limit,
    )
    assert not resender.sent


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
    broker = Broker()
    assert await sending_back(broker, Resender()).send_back(received(1), failure)

    assert (broker.asked[0][1].delay_level, broker.asked[0][2]) == (level, extra)


@pytest.mark.parametrize("broker", [Broker(refuses=True), Broker(is_there=False)])
async def test_what_its_broker_does_not_take_is_sent_to_the_retry_topic(broker):
    resender = Resender()
    message = received(
        7,
        reconsume_times=2,
        properties={
            "colour": "red",
            TRANSACTION_PREPARED: "true",
            TIMER_DELAY_MS: "5000",
            WAIT: "false",  # the copy has to be on the disk when it is taken
        },
    )

    assert await sending_back(broker, resender).send_back(message, Failure(reason="because"))

    ((topic, body, properties),) = resender.sent
    assert topic == f"%RETRY%{GROUP}"
    assert body == message.stored.stored_body
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


async def test_what_never_reached_its_handler_waits_in_the_retry_topic_at_no_cost():
    broker, resender = Broker(), Resender()
    # More attempts than are usual: the group may be allowed them.
    message = received(7, reconsume_times=20)
    held = Outcome(Verdict.RETRY, [message], held=[message], hold=5.0).held_failure

    assert await sending_back(broker, resender).send_back(message, held)

    ((topic, _, properties),) = resender.sent
    assert topic == f"%RETRY%{GROUP}"
    assert properties[RECONSUME_TIME] == "20"
    assert int(properties[MAX_RECONSUME_TIMES]) == NO_LIMIT
    assert properties[DELAY] == "2", "five seconds"
    assert "DLQ_REASON" not in properties
    assert properties[PUT_OFF] == "true", "else locks of the group would make it a dead letter"
    assert not broker.asked, "a broker that takes it back counts an attempt"


@pytest.mark.parametrize("failure", [Failure(), Failure(DEAD)])
@pytest.mark.parametrize("call", ["send_back", "give_up"])
async def test_what_no_broker_takes_stays_with_the_caller(call, failure):
    back = sending_back(Broker(refuses=True), Resender(fails=True))

    assert not await getattr(back, call)(received(1), failure)


@pytest.mark.parametrize(
    ("limit", "times", "failure", "told"),
    [
        (None, 0, Failure(DEAD, reason="no account"), "after 1 attempt: no account"),
        (3, 3, Failure(reason="ValueError: x"), "after 4 attempts: ValueError: x"),
        (None, 16, Failure(), "unless the broker allows the group more: no reason given"),
        (3, 2, Failure(reason="ValueError: x"), None),
        (None, 15, Failure(), None),
    ],
)
async def test_a_message_that_dies_is_in_the_log_with_all_that_is_known_of_it(
    limit, times, failure, told, caplog
):
    message = received(7).with_reconsume_times(times)

    assert await sending_back(Broker(), Resender(), max_retries=limit).send_back(message, failure)

    lines = [each for each in caplog.records if "dead letters" in each.getMessage()]
    assert [each.levelname for each in lines] == ([] if told is None else ["WARNING"])
    for line in lines:
        text = line.getMessage()
        assert told is not None
        assert text.endswith(told)
        assert message.msg_id in text
        assert f"of {message.topic} " in text
        assert f"group {GROUP} " in text


@pytest.mark.parametrize(
    ("limit", "times", "failure", "is_dead"),
    [
        (None, 0, Failure(DEAD), True),
        (2, 1, Failure(), False),
        (2, 2, Failure(delay=1.0), True),
        (2, 3, Failure(), True),
        (None, 15, Failure(), False),
        (None, 16, Failure(), True),
        # It came again after the default attempts: the broker allows its group more.
        (None, 17, Failure(), False),
    ],
)
def test_a_message_is_dead_when_it_is_given_up_or_its_attempts_are_used_up(
    limit, times, failure, is_dead
):
    message = received(7).with_reconsume_times(times)

    back = sending_back(Broker(), Resender(), max_retries=limit)

    assert back.is_dead(message, failure) is is_dead


async def test_a_message_that_is_given_up_is_kept_while_its_broker_is_away():
    resender = Resender()

    assert not await sending_back(Broker(is_there=False), resender).send_back(
        received(1), Failure(DEAD)
    )
    assert not resender.sent


@pytest.mark.parametrize("limit", [None, 3])
async def test_a_copy_of_what_is_given_up_and_gone_is_allowed_no_attempts(limit, caplog):
    resender = Resender()
    message = received(7).with_reconsume_times(2)

    assert await sending_back(Broker(refuses=True), resender, max_retries=limit).send_back(
        message, Failure(DEAD, reason="no account")
    )

    ((topic, _, properties),) = resender.sent
    assert topic == f"%RETRY%{GROUP}"
    assert (properties[RECONSUME_TIME], properties[MAX_RECONSUME_TIMES]) == ("3", "0")
    assert properties["DLQ_REASON"] == "no account"
    last = caplog.records[-1].getMessage()
    assert "goes to the dead letters" in last
    assert message.msg_id in last


@pytest.mark.parametrize("size", [20_000, 31_000, 31_600, 32_200])
async def test_a_reason_that_does_not_fit_is_cut_or_left_out(size):
    resender = Resender()
    message = received(1, properties={"mine": "x" * size})
    reason = "ValueError: " + "é" * 500

    assert await sending_back(Broker(refuses=True), resender).send_back(
        message, Failure(reason=reason)
    )

    properties = resender.sent[0][2]
    told = properties.get("DLQ_REASON", "")
    assert properties["mine"] == "x" * size
    assert reason.startswith(told)
    assert bool(told) is (size < 31_600)
    assert not told or len(encode_properties(properties)) <= MAX_PROPERTIES - 1024


class TestGivingUp:
    """In order: the attempts are known here only, and travel with a copy."""

    async def test_the_copy_says_how_often_it_was_tried(self):
        broker, resender = Broker(), Resender()
        message = received(7).with_reconsume_times(4)
        back = sending_back(broker, resender, max_retries=4)

        assert await back.give_up(message, Failure(reason="because"))

        properties = resender.sent[0][2]
        assert properties[RECONSUME_TIME] == "5"
        assert properties[MAX_RECONSUME_TIMES] == "4"
        assert properties["DLQ_REASON"] == "because"
        assert not broker.asked

    @pytest.mark.parametrize("max_retries", [None, 16])
    async def test_what_its_handler_gave_up_is_allowed_no_attempt(self, max_retries):
        resender = Resender()
        back = sending_back(Broker(), resender, max_retries=max_retries)
        await back.give_up(received(1), Failure(DEAD))

        properties = resender.sent[0][2]
        assert properties[RECONSUME_TIME] == "1"
        assert properties[MAX_RECONSUME_TIMES] == "0", "else it waits for the group's locks"

    async def test_otherwise_its_broker_is_asked(self):
        broker = Broker()

        assert await sending_back(broker, Resender(fails=True)).give_up(
            received(1), Failure(reason="because")
        )
        assert broker.asked[0][1].delay_level == DEAD
        assert broker.asked[0][2] == {"reason": "because"}
