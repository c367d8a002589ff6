"""What a group wants of a topic."""

from __future__ import annotations

import sys

import pytest

from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError
from orbitmq.filter import InvalidFilter
from orbitmq.message.stored import StoredMessage
from orbitmq.wire.javajson import encode_body

QUEUE = Queue("orders", "broker-a", 0)


class Time:
    now = 1_700_000_000.123

    def __call__(self) -> float:
        return self.now


def message(tag: str | None) -> ReceivedMessage:
    properties = {} if tag is None else {"TAGS": tag}
    stored = StoredMessage.build(topic="orders", stored_body=b"", properties=properties)
    return ReceivedMessage(stored, QUEUE)


@pytest.mark.parametrize("everything", [None, "", "*"])
def test_none_empty_and_a_star_mean_every_message(everything):
    subscription = Subscription.by_tags("orders", everything)

    assert subscription.expression == "*"
    wanted = [message("a"), message(None)]
    assert subscription.accepted(wanted) == wanted


def test_a_heartbeat_says_it_as_java_does():
    subscriptions = Subscriptions(Time())
    subscriptions.put(Subscription.by_tags("orders", "TagA||TagB"))

    (data,) = subscriptions.to_data()

    assert encode_body(data) == (
        b'{"classFilterMode":false,"codeSet":[2598919,2598920],"expressionType":"TAG",'
        b'"subString":"TagA||TagB","subVersion":1700000000123,"tagsSet":["TagA","TagB"],'
        b'"topic":"orders"}'
    )


def test_a_later_subscription_replaces_the_earlier_one_and_has_a_higher_version():
    time = Time()
    subscriptions = Subscriptions(time)
    first = subscriptions.put(Subscription.by_tags("orders", "a"))
    time.now -= 3600  # the clock was set back

    second = subscriptions.put(Subscription.by_tags("orders", "b"))

    assert second.version == first.version + 1
    assert subscriptions.topics == ("orders",)
    assert subscriptions.get("orders") == second


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Subscription.by_tags("or ders"), "a topic may consist of"),
        (lambda: Subscription.by_tags("orders", "||"), "needs a tag"),
        (lambda: Subscription.by_sql("orders", "  "), "text that is not empty"),
    ],
)
def test_a_subscription_that_cannot_be_is_refused(make, words):
    with pytest.raises(OrbitError, match=words):
        make()


def test_a_condition_with_a_fault_is_refused_with_its_place():
    with pytest.raises(InvalidFilter) as refused:
        Subscription.by_sql("orders", "amount > > 5")

    assert refused.value.column == 10


def test_without_the_parser_a_condition_is_left_to_the_broker(monkeypatch):
    monkeypatch.setitem(sys.modules, "lark", None)
    for name in [name for name in sys.modules if name.startswith("orbitmq.filter.")]:
        if name.rsplit(".", 1)[1] in ("sql", "grammar", "building"):
            monkeypatch.delitem(sys.modules, name)

    subscription = Subscription.by_sql("orders", "amount > > 5")

    assert not subscription.is_by_tags
