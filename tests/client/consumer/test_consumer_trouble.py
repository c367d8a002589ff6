"""What a consumer says when it gets nothing, when a handler fails, and when it is over."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.dispatch import after_failure
from orbitmq.client.consumer.pull import Refusals, forbidden_type
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.verdict import DEAD, Failure
from orbitmq.client.middleware import TimeLimit
from orbitmq.client.producer.producer import Producer
from orbitmq.client.pullconsumer.consumer import PullConsumer
from orbitmq.client.routes import Queue
from orbitmq.clock import SystemClock
from orbitmq.errors import AccessDenied, BrokerRefused, SettingError
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import ForbiddenType, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.consumers import consumer_of, producer_of, send
from tests.support.consuming import until
from tests.support.pulling import FAST
from tests.support.rebalancing import QUICK, answering

QUEUE_COUNT = 1

#: What is not there is looked for often.
LOOKS = RebalanceSettings(spacing=0.02, retry=0.02, interval=0.1)


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

    with pytest.raises(TypeError, match="has no argument 'worker'; did you mean 'workers'"):
        Consumer("billing", name_server="127.0.0.1:9876", **wrong)
    with pytest.raises(TypeError, match="has no argument 'worker'"):
        _consumer().on("orders", **wrong)(print)


def _consumer() -> Consumer:
    return Consumer("billing", name_server="127.0.0.1:9876")


# ---- brokers without the group, or that deny


HERE, THERE = Address("10.0.0.1", 10911), Address("10.0.0.2", 10911)
ONE, TWO = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)
OTHER = Queue("invoices", "broker-b", 0)


@pytest.fixture
def refusals():
    return Refusals("billing", SystemClock())


def refuse(refusals: Refusals, queue: Queue, where: Address) -> None:
    code = ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    refused = BrokerRefused(code, "there is none", where, RequestCode.PULL_MESSAGE)
    refusals.refused(queue, refused)


def addresses(refusals: Refusals) -> list[str]:
    return [re.findall(r"from (\S+):", each)[0] for each in refusals.current()]


def test_a_pull_that_is_served_ends_the_refusal_of_its_broker_and_of_no_other(refusals):
    refuse(refusals, ONE, HERE)
    refuse(refusals, TWO, HERE)
    refuse(refusals, OTHER, THERE)

    refusals.served(TWO, HERE)

    assert addresses(refusals) == [str(THERE)]


async def test_what_one_of_two_brokers_denies_ends_no_consumer_and_what_both_deny_does(new_cluster):
    seen: list[str] = []

    async with new_cluster(brokers=2) as cluster, AsyncExitStack() as stack:
        await cluster.create_topic("orders", queues=1)
        consumer = consumer_of(cluster, "billing", rebalance=QUICK, pull=FAST)
        consumer.on("orders")(lambda message: seen.append(message.text()))
        stack.enter_context(denying(cluster.brokers[1]))
        running = asyncio.create_task(consumer.run())
        async with producer_of(cluster) as producer:
            await producer.send("orders", b"served", queue=Queue("orders", "broker-a", 0))
            await until(lambda: "served" in seen)
            await until(
                lambda: any(
                    str(cluster.brokers[1].address) in trouble and "not for you" in trouble
                    for trouble in consumer.statistics().troubles
                )
            )
            assert not running.done()

            stack.enter_context(denying(cluster.brokers[0]))
            await producer.send("orders", b"more", queue=Queue("orders", "broker-a", 0))
            with pytest.raises(AccessDenied, match="not for you"):
                await running


@contextmanager
def denying(broker: Broker) -> Iterator[None]:
    """Have a broker let nobody consume."""

    def deny(_: Connection, request: Command) -> Command:
        return request.answer(ResponseCode.NO_PERMISSION, remark="not for you")

    with ExitStack() as stack:
        for code in (
            RequestCode.HEART_BEAT,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            RequestCode.QUERY_CONSUMER_OFFSET,
            RequestCode.PULL_MESSAGE,
        ):
            stack.enter_context(answering(broker, code, deny))
        yield


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        (ResponseCode.NO_PERMISSION, "User:me has no permission to access Topic:orders"),
        (ResponseCode.SYSTEM_ERROR, "org.apache.rocketmq.acl.common.AclException: no permission"),
    ],
)
def test_both_ways_in_which_apaches_brokers_deny_are_known(refusals, code, remark):
    refused = BrokerRefused(code, remark, HERE, RequestCode.PULL_MESSAGE)

    assert refusals.refused(ONE, refused)

    assert isinstance(refusals.denial({"orders": [ONE]}, [ONE]), AccessDenied)
    assert refusals.denial({"orders": [ONE, TWO]}, [ONE, TWO]) is None
    assert refusals.denial({"orders": [ONE], "invoices": []}, [ONE]) is None


@pytest.mark.parametrize(
    ("remark", "kind"),
    [
        ("subscription group no permission, billing", ForbiddenType.GROUP),
        ("the topic[orders] pulling message is forbidden", ForbiddenType.TOPIC),
        ("the broker[10.0.0.1] pulling message is forbidden", ForbiddenType.BROKER),
        (
            "the consumer group[billing] can not consume by broadcast way",
            ForbiddenType.BROADCASTING,
        ),
        ("User:me has no permission to access Topic:orders", None),
    ],
)
def test_what_brokers_that_send_no_type_have_switched_off_is_no_denial(remark, kind):
    request = Command.request(RequestCode.PULL_MESSAGE, opaque=1)

    assert forbidden_type(request.answer(ResponseCode.NO_PERMISSION, remark=remark)) is kind


def test_a_pause_and_a_broken_disk_are_no_denial(refusals):
    code = ResponseCode.NO_PERMISSION
    paused = BrokerRefused(code, "it is paused", HERE, RequestCode.PULL_MESSAGE)
    broken = BrokerRefused(ResponseCode.SYSTEM_ERROR, "disk", HERE, RequestCode.PULL_MESSAGE)

    assert refusals.refused(ONE, paused, ForbiddenType.GROUP)
    assert not refusals.refused(TWO, broken)

    assert refusals.denial({"orders": [ONE]}, [ONE]) is None
    assert refusals.of_all([ONE]) is None
    assert "orbitmq group resume billing" in refusals.current()[0]
    refusals.served(OTHER, HERE)  # another topic: the group is not paused any more
    assert refusals.current() == ()
