"""Brokers without the group: known one by one, and told of without flooding."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.pull import Refusals, forbidden_type
from orbitmq.client.routes import Queue
from orbitmq.clock import SystemClock
from orbitmq.errors import AccessDenied, BrokerRefused
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import ForbiddenType, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.consumers import consumer_of, producer_of
from tests.support.consuming import until
from tests.support.pulling import FAST
from tests.support.rebalancing import QUICK, answering

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


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_pull_that_is_served_ends_the_refusal_of_its_broker_and_of_no_other(refusals):
    refuse(refusals, ONE, HERE)
    refuse(refusals, TWO, HERE)
    refuse(refusals, OTHER, THERE)

    refusals.served(TWO, HERE)

    assert addresses(refusals) == [str(THERE)]


# ---- in a cluster


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        for topic in ("orders", "invoices"):
            await cluster.create_topic(topic, queues=1)
        yield cluster


@contextmanager
def without_group(broker: Broker, noted: Callable[[int], None]) -> Iterator[None]:
    """Have a broker say that there is no such group, whatever it is asked."""

    def refuse(_: Connection, request: Command) -> Command:
        noted(request.code)
        return request.answer(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark="the group is not here"
        )

    with ExitStack() as stack:
        for code in (RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.PULL_MESSAGE):
            stack.enter_context(answering(broker, code, refuse))
        yield


async def test_one_broker_without_the_group_is_one_trouble_however_often_it_says_so(
    cluster, caplog
):
    caplog.set_level(logging.INFO, "orbitmq.client")
    refused: list[int] = []
    seen: list[str] = []
    troubles: set[tuple[str, ...]] = set()
    rebalance = replace(QUICK, spacing=0.01, retry=0.02, interval=0.02)
    consumer = consumer_of(cluster, "billing", rebalance=rebalance, pull=FAST)
    for topic in ("orders", "invoices"):
        consumer.on(topic)(lambda message: seen.append(message.text()))

    async with consumer, producer_of(cluster) as producer:
        await until(
            lambda: {queue.broker for queue in consumer.assignment()} == {"broker-a", "broker-b"}
        )
        with without_group(cluster.brokers[1], refused.append):
            # Pulls that were held before the group was gone are answered with these.
            for topic in ("orders", "invoices"):
                await producer.send(topic, b"before", queue=Queue(topic, "broker-b", 0))
            await until(lambda: consumer.statistics().troubles)
            while (
                refused.count(RequestCode.PULL_MESSAGE) < 40
                or refused.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) < 20
            ):
                served = seen.count("served")
                await producer.send("orders", b"served", queue=Queue("orders", "broker-a", 0))
                await until(lambda served=served: seen.count("served") > served)  # type: ignore[misc]  # of the loop
                troubles.add(consumer.statistics().troubles)
        told = errors(caplog)
        await producer.send("orders", b"after", queue=Queue("orders", "broker-b", 0))
        await until(lambda: "after" in seen)
        await until(lambda: consumer.statistics().troubles == ())

    assert len(troubles) == 1  # it does not come and go
    assert [len(each) for each in troubles] == [1]
    assert 1 <= len(told) <= 2  # of the pulls, and of the rounds of rebalancing
    assert set(told) == set(*troubles)
    over = [line for line in caplog.messages if "trouble with ('group'" in line]
    assert len(over) <= 1  # when it was


async def test_what_one_of_two_brokers_denies_ends_no_consumer_and_what_both_deny_does(cluster):
    seen: list[str] = []
    consumer = consumer_of(cluster, "billing", rebalance=QUICK, pull=FAST)
    consumer.on("orders")(lambda message: seen.append(message.text()))

    with ExitStack() as stack:
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
