"""Errors of the client: facts as attributes, a remedy in the text, and fit to travel."""

from __future__ import annotations

import copy
import pickle

import pytest

from orbitmq.client.errors import (
    BrokerUnavailable,
    NoNameServer,
    RecallUnsupported,
    TimesUnsupported,
    UsedAfterFork,
)
from orbitmq.errors import (
    BrokerRefused,
    ClientError,
    MessageRefused,
    NoRoute,
    NotRunning,
    SendFailed,
)
from orbitmq.message.record import BodyTooLarge
from orbitmq.remoting.settings import Address, ConnectFailed, RequestTimedOut
from orbitmq.wire.codes import Release, RequestCode, ResponseCode

HERE = Address("127.0.0.1", 9876)

ERRORS = [
    NotRunning("this producer"),
    NotRunning("this producer", was_stopped=True),
    UsedAfterFork("this producer", 1, 2),
    NoNameServer([(HERE, "refused")]),
    NoRoute("orders", [HERE, "b:1"]),
    BrokerUnavailable("broker-a", "no master"),
    BrokerRefused(17, "no such topic", HERE, 10),
    SendFailed("orders", 3, RequestTimedOut(HERE, 10, 3.0)),
    MessageRefused("tags", "must be a text"),
    TimesUnsupported("delay", "broker-a", Release(4, 9, 7)),
    RecallUnsupported(BrokerRefused(3, "not supported", HERE, 370), "broker-a"),
    ConnectFailed(HERE, "refused", retry_in=1.5),
    BodyTooLarge(10),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_survives_a_journey_to_another_process(error):
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert set(vars(again)) == set(vars(error))
    for name, value in vars(error).items():
        assert str(getattr(again, name)) == str(value)
    assert str(copy.copy(error)) == str(error)


def test_a_refusal_says_what_its_code_means():
    known = BrokerRefused(
        ResponseCode.TOPIC_NOT_EXIST, "no such topic", HERE, RequestCode.SEND_MESSAGE
    )
    unknown = BrokerRefused(4711, None, HERE, 10)

    assert known.name == "TOPIC_NOT_EXIST"
    assert str(known) == (
        "127.0.0.1:9876 refused 'send message': no such topic (TOPIC_NOT_EXIST, code 17)"
    )
    assert unknown.name == "code 4711"
    assert str(unknown) == "127.0.0.1:9876 refused 'request 10': no reason given (code 4711)"


def test_errors_say_what_can_be_done():
    assert "orbitmq topic create orders" in str(NoRoute("orders", ["a:1"]))
    assert "after the fork" in str(UsedAfterFork("this producer", 1, 2))
    assert "127.0.0.1:9876: refused" in str(NoNameServer([(HERE, "refused")]))
    assert "name_server, in Spark nameServer" in str(NoNameServer([(HERE, "refused")]))
    assert "start it" in str(NotRunning("this producer"))
    assert "make a new one" in str(NotRunning("this producer", was_stopped=True))


def test_all_are_told_apart_from_errors_of_others():
    assert all(isinstance(error, ClientError) for error in ERRORS[:9])
    assert NoRoute.retriable
    assert NoNameServer.retriable
    assert not MessageRefused.retriable
