"""What a consumer says when it gets nothing, when a handler fails, and when it is over."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.dispatch import after_failure
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.verdict import DEAD, Failure, Retry
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import TimeLimit
from orbitmq.client.producer.producer import Producer
from orbitmq.client.pullconsumer.consumer import PullConsumer
from orbitmq.errors import NotRunning, SettingError
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consumers import consumer_of, send
from tests.support.consuming import until

#: What is not there is looked for often.
LOOKS = RebalanceSettings(spacing=0.02, retry=0.02, interval=0.1)


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster() as running:
        await running.create_topic("orders", queues=1)
        yield running


# ---- getting nothing


async def test_a_topic_that_is_not_there_is_waited_for_told_of_once_and_shown(cluster, caplog):
    consumer = consumer_of(cluster, "billing", rebalance=LOOKS)
    seen: list[str] = []
    consumer.on("ordesr")(lambda message: seen.append(message.text()))

    async with consumer:
        shown = consumer.statistics().troubles
        metrics = consumer.metrics()
        await cluster.create_topic("ordesr", queues=1)
        await send(cluster, "ordesr", ["x"])
        await until(lambda: seen == ["x"])
        later = consumer.statistics().troubles

    told = [line for line in caplog.messages if "waits for a topic" in line]
    assert len(told) == 1
    assert "group billing waits for a topic: no broker serves topic 'ordesr'" in told[0]
    assert "do you mean 'orders'?" in told[0]
    assert shown == tuple(told)
    assert 'orbitmq_consumer_troubles{group="billing"' in metrics
    assert metrics.rstrip().endswith(" 1")
    assert later == ()


@pytest.mark.parametrize("limit", ["max_auto_groups", "auto_create_group"])
async def test_a_group_that_the_broker_does_not_make_is_an_error_told_once_with_the_remedy(
    limit, caplog
):
    def adjust(settings):
        if limit == "max_auto_groups":
            return replace(settings, max_auto_groups=1)
        return replace(settings, auto_create_group=False)

    seen: list[str] = []
    async with AsyncEmbeddedCluster(adjust=adjust) as cluster:
        await cluster.create_topic("orders", queues=1)
        await cluster.create_topic("invoices", queues=1)
        consumer = consumer_of(cluster, "billing", rebalance=LOOKS)
        consumer.on("orders")(lambda message: seen.append(message.text()))
        consumer.on("invoices")(lambda message: seen.append(message.text()))

        async with consumer:
            await until(lambda: len(consumer.statistics().troubles) > 0)
            shown = consumer.statistics().troubles
            async with AsyncAdmin(name_server=cluster.name_server) as admin:
                await admin.groups.create("billing")
            await send(cluster, "orders", ["x"])
            await until(lambda: seen == ["x"])
            await until(lambda: consumer.statistics().troubles == ())

    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert shown == tuple(errors)
    assert limit in errors[0]
    assert "orbitmq group create billing" in errors[0]


# ---- failing


_DEAD = "it goes to the dead letters"
_UNLESS = "unless the"


@pytest.mark.parametrize(
    ("attempt", "failure", "retries", "pause", "words"),
    [
        (
            1,
            Failure(),
            None,
            None,
            f"of 17, again in 10 s {_UNLESS} group is set otherwise at the broker",
        ),
        (16, Failure(), 16, None, f"of 17, again in 2 h {_UNLESS} broker has other delays"),
        (3, Failure(delay=45.0), 5, None, "of 6, again in 45 s"),
        (3, Failure(level=5), 5, None, "of 6, again in 1 min"),
        (6, Failure(), 5, None, f"of 6, the last: {_DEAD}"),
        (
            17,
            Failure(),
            None,
            None,
            f"of 17, the last: {_DEAD} {_UNLESS} broker allows the group more",
        ),
        (2, Failure(DEAD), 5, None, f", given up: {_DEAD}"),
        (2, Failure(), None, 1.0, ", without a limit; again in 1 s, its queue waits"),
        (2, Failure(), 2, 0.5, "of 3, again in 0.5 s, its queue waits"),
        (3, Failure(), 2, 1.0, f"of 3, the last: {_DEAD}, and its queue goes on"),
        (1, Failure(DEAD), 2, 1.0, f", given up: {_DEAD}, and its queue goes on"),
    ],
)
def test_the_log_says_what_happens_next_to_a_failed_message(
    attempt, failure, retries, pause, words
):
    begin = f"attempt {attempt}" + ("" if words.startswith(",") else " ")

    assert after_failure(attempt, failure, retries, pause) == begin + words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_retries": 5}, "attempt 1 of 6, again in 45 s"),
        ({"model": "broadcasting"}, "attempt 1, not tried again: it was broadcast"),
    ],
)
async def test_the_log_says_when_a_failed_message_comes_again(
    cluster, caplog, tmp_path, monkeypatch, options, words
):
    monkeypatch.setenv("HOME", str(tmp_path))  # where broadcasting keeps its progress
    caplog.set_level(logging.INFO, "orbitmq.client.consumer")
    consumer = consumer_of(cluster, "billing", **options)

    @consumer.on("orders")
    def bill(message: ReceivedMessage) -> None:
        raise Retry("the bank is closed", delay=45)

    async with consumer:
        await send(cluster, "orders", ["x"])
        await until(lambda: any("failed on" in line for line in caplog.messages))

    told = next(line for line in caplog.messages if "failed on" in line)
    assert f"; {words}): the bank is closed" in told


# ---- mistakes of the first hour


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Consumer("billing", name_server=cast("Any", 9876)), "texts like host:9876"),
        (lambda: Producer("svc", name_server=cast("Any", 9876)), "texts like host:9876"),
        (lambda: PullConsumer("billing", name_server=cast("Any", 9876)), "texts like host:9876"),
        (lambda: Consumer("billing", name_server=[]), "at least one host:port"),
        (
            lambda: Consumer("billing", name_server="a:1", middleware=cast("Any", TimeLimit(3))),
            r"must be a list, got .*write \[TimeLimit\(3\)\]",
        ),
        (lambda: _consumer().on(cast("Any", print)), r'write @consumer.on\("topic"\)'),
        (lambda: _consumer().on("orders", tags=cast("Any", ["a"]))(print), "'paid || refunded'"),
        (lambda: _consumer().on("orders", sql=cast("Any", 5))(print), "a text that is not empty"),
    ],
)
def test_what_is_given_wrongly_is_named_with_what_is_allowed(mistake, words):
    with pytest.raises(SettingError, match=words.replace("||", r"\|\|")):
        mistake()


def test_an_option_with_a_wrong_name_is_refused():
    wrong: Any = {"worker": 3}

    with pytest.raises(TypeError, match="a consumer has no option worker"):
        Consumer("billing", name_server="127.0.0.1:9876", **wrong)
    with pytest.raises(TypeError, match="a handler has no option worker"):
        _consumer().on("orders", **wrong)(print)


def _consumer() -> Consumer:
    return Consumer("billing", name_server="127.0.0.1:9876")


# ---- looking at it


async def test_after_its_end_a_consumer_still_says_what_it_has_done(cluster):
    consumer = consumer_of(cluster, "billing")
    consumer.on("orders")(lambda message: None)
    with pytest.raises(NotRunning, match="start it"):
        consumer.statistics()

    async with consumer:
        client_id = consumer.client_id
        await send(cluster, "orders", range(5))
        await until(lambda: consumer.statistics().topics["orders"].consumed == 5)

    assert consumer.statistics().topics["orders"].consumed == 5
    assert consumer.client_id == client_id
    assert f'client_id="{client_id}",topic="orders"}} 5' in consumer.metrics()
    with pytest.raises(NotRunning, match="was stopped"):
        consumer.pause()
