"""Requests by message, and the replies to them."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.client.engine import Engine
from orbitmq.client.errors import NoReply
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.routes import Queue
from orbitmq.errors import WrongUse
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of
from tests.support.remoting import DEADLINE


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster(brokers=2) as cluster:
        await cluster.create_topic("questions")
        yield cluster


@pytest.fixture
async def service(cluster):
    """Answers every request to the topic `questions`."""
    consumer = consumer_of(cluster, "service")

    async with AsyncProducer("service", name_server=cluster.name_server) as producer:

        @consumer.on("questions")
        async def answer(request: ReceivedMessage) -> None:
            await producer.reply(request, b"re: " + request.body, properties={"mood": "good"})

        async with consumer:
            yield


@pytest.mark.feature("K7")
@pytest.mark.usefixtures("service")
async def test_a_request_is_answered_in_one_call(cluster):
    async with AsyncProducer("asker", name_server=cluster.name_server) as producer:
        reply = await producer.request("questions", b"how?", tags="t", timeout=DEADLINE)

    assert (reply.body, reply.get("mood")) == (b"re: how?", "good")
    assert reply.topic == "DefaultCluster_REPLY_TOPIC"
    (request,) = cluster.messages("questions")
    assert request.get_property("CORRELATION_ID") == reply.get("CORRELATION_ID")
    assert request.get_property("TTL") == str(round(DEADLINE * 1000))
    assert request.tags == "t"


@pytest.mark.usefixtures("service")
async def test_many_requests_each_get_their_own_reply(cluster):
    async with (
        Engine(quick_settings(cluster.name_server)) as engine,
        AsyncProducer.on(engine, "one") as one,
        AsyncProducer.on(engine, "two") as two,
    ):
        replies = await asyncio.gather(
            *(
                (one, two)[number % 2].request("questions", b"%d" % number, timeout=DEADLINE)
                for number in range(40)
            )
        )

    assert [reply.body for reply in replies] == [b"re: %d" % number for number in range(40)]


@pytest.mark.feature("K7")
async def test_a_request_without_a_reply_ends_at_its_timeout(cluster):
    async with AsyncProducer("asker", name_server=cluster.name_server) as producer:
        await producer.send("questions", b"so that the broker is known")
        with pytest.raises(NoReply, match=r"'questions' within 1 s"):
            await producer.request("questions", b"anybody?", timeout=1.0)


async def test_only_requests_can_be_replied_to(cluster):
    async with AsyncProducer("service", name_server=cluster.name_server) as producer:
        await producer.send("questions", b"just a message")
        (stored,) = cluster.messages("questions")
        message = ReceivedMessage(stored, Queue("questions", "broker-a", 0))

        with pytest.raises(WrongUse, match="REPLY_TO_CLIENT"):
            await producer.reply(message, b"?")
        with pytest.raises(WrongUse):
            await producer.reply(message, "")
