"""The FastStream broker: acknowledgements, groups, requests, the test client."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import NackMessage, RejectMessage, SetupError, SubscriberNotFound
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256
from faststream.specification import AsyncAPI
from pydantic import BaseModel

from orbitmq import Admin, SendResult
from orbitmq.errors import SettingError
from orbitmq.integrations.faststream import (
    RocketMQBroker,
    RocketMQMessage,
    RocketMQResponse,
    RocketMQRoute,
    RocketMQRouter,
    TestRocketMQBroker,
)
from orbitmq.integrations.faststream.annotations import RocketMQProducer

pytestmark = pytest.mark.feature("W2")

PATIENCE = 30.0


class Order(BaseModel):
    id: str
    cents: int


@pytest.fixture
def topic() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def make(orbit_shared_cluster):
    """Makes brokers that are stopped at the end."""
    made: list[RocketMQBroker] = []

    def broker(**options: Any) -> RocketMQBroker:
        made.append(RocketMQBroker(orbit_shared_cluster.name_server, logger=None, **options))
        return made[-1]

    yield broker
    for each in made:
        await each.stop()


async def until(condition, *, within: float = PATIENCE) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_model_arrives_and_what_is_returned_is_published(make, topic):
    broker = make()
    got: list[Any] = []

    @broker.subscriber(topic)
    @broker.publisher(f"{topic}-paid", tag="paid")
    async def bill(order: Order, message: RocketMQMessage, producer: RocketMQProducer) -> Order:
        assert message.raw_message.keys == ("o-1",)
        assert producer.statistics().failed == 0
        return Order(id=order.id, cents=order.cents * 2)

    @broker.subscriber(f"{topic}-paid", tags="paid")
    async def paid(order: Order, message: RocketMQMessage) -> None:
        got.append((order, message.headers["content-type"], message.raw_message.tags))

    await broker.start()
    result = await broker.publish(Order(id="1", cents=5), topic, keys="o-1")

    assert isinstance(result, SendResult)
    await until(lambda: got)
    assert got == [(Order(id="1", cents=10), "application/json", "paid")]


@pytest.mark.parametrize(
    ("policy", "error", "ends_as"),
    [
        (AckPolicy.NACK_ON_ERROR, ValueError("bad"), "retried"),
        (AckPolicy.REJECT_ON_ERROR, ValueError("bad"), "dead"),
        (AckPolicy.ACK, ValueError("bad"), "done"),
        (AckPolicy.ACK_FIRST, ValueError("bad"), "done"),
        (AckPolicy.ACK, NackMessage(delay=0.5), "retried"),
        (AckPolicy.NACK_ON_ERROR, RejectMessage(), "dead"),
    ],
)
async def test_policies_say_what_becomes_of_a_message(
    make, topic, policy, error, ends_as, orbit_shared_cluster
):
    broker, calls = make(), 0

    @broker.subscriber(topic, group=topic, ack_policy=policy)
    async def handle(body: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error

    await broker.start()
    await broker.publish("x", topic)

    await until(lambda: calls == (2 if ends_as == "retried" else 1))
    if ends_as == "dead":
        await until(lambda: orbit_shared_cluster.messages(f"%DLQ%{topic}"))
    await broker.stop()
    with Admin(name_server=orbit_shared_cluster.name_server) as admin:
        lag = admin.groups.progress(topic).lag
    assert (lag, calls) == (0, 2 if ends_as == "retried" else 1)
    assert len(orbit_shared_cluster.messages(f"%DLQ%{topic}")) == (ends_as == "dead")


async def test_a_message_is_acknowledged_by_hand(make, topic):
    broker, attempts = make(), []

    @broker.subscriber(topic, ack_policy=AckPolicy.MANUAL)
    async def handle(body: str, message: RocketMQMessage) -> None:
        attempts.append(message.raw_message.attempt)
        if len(attempts) == 1:
            await message.nack(delay=0.2)
        else:
            await message.ack()

    await broker.start()
    await broker.publish("x", topic)

    await until(lambda: attempts == [1, 2])


async def test_a_body_that_does_not_fit_is_a_dead_letter_at_once(make, topic, orbit_shared_cluster):
    broker = make()

    @broker.subscriber(topic, group=topic)
    async def handle(order: Order) -> None: ...

    await broker.start()
    await broker.publish({"id": "1"}, topic)

    await until(lambda: orbit_shared_cluster.messages(f"%DLQ%{topic}"))


def collecting(bodies: list[str]):
    async def handle(body: str) -> None:
        bodies.append(body)

    return handle


async def test_groups_get_copies_and_members_share(make, topic):
    got: dict[str, list[str]] = {"one": [], "other": []}
    brokers = [make(), make()]
    for broker in brokers:
        for group, bodies_of_group in got.items():
            subscribe = broker.subscriber(topic, group=f"{topic}-{group}", max_workers=4)
            subscribe(collecting(bodies_of_group))

        await broker.start()

    bodies = [str(number) for number in range(20)]
    await brokers[0].publish_batch(*bodies, topic=topic)

    await until(lambda: sorted(got["one"]) == sorted(got["other"]) == sorted(bodies))


async def test_a_request_gets_what_the_handler_returns(make, topic):
    broker = make()

    @broker.subscriber(topic)
    async def double(number: int) -> RocketMQResponse:
        return RocketMQResponse({"number": 2 * number}, headers={"by": "double"})

    await broker.start()
    answer = await broker.request(21, topic, correlation_id="c-1", timeout=PATIENCE)

    assert await answer.decode() == {"number": 42}
    assert (answer.headers["by"], answer.correlation_id) == ("double", "c-1")


async def test_a_request_without_an_answer_times_out(make, topic):
    broker = make()
    await broker.start()

    with pytest.raises(TimeoutError):
        await broker.request("x", topic, timeout=0.3)


async def test_batches_and_empty_bodies(make, topic):
    broker, got = make(), []

    @broker.subscriber(topic, batch=True, batch_size=10)
    async def handle(bodies: list[str]) -> None:
        got.extend(bodies)

    await broker.start()
    await broker.publish_batch("a", "", "ä", topic=topic)

    await until(lambda: sorted(got) == ["", "a", "ä"])


async def test_a_subscriber_without_handlers_is_polled(make, topic):
    broker = make()
    subscriber = broker.subscriber(topic)
    await broker.start()
    await broker.publish("first", topic)

    message = await subscriber.get_one(timeout=PATIENCE)
    assert message is not None
    assert await message.decode() == "first"
    await broker.publish("second", topic)
    async for message in subscriber:
        assert await message.decode() == "second"
        break


async def test_a_delay_and_an_ordering_key(make, topic):
    broker, got = make(), []

    @broker.subscriber(topic, ordered=True)
    async def handle(body: str, message: RocketMQMessage) -> None:
        got.append((body, message.raw_message.queue.id))

    await broker.start()
    await broker.publish("late", topic, delay=1)
    for number in range(5):
        await broker.publish(str(number), topic, ordering_key="o-1")

    await until(lambda: len(got) == 6)
    ordered = [each for each in got if each[0] != "late"]
    assert [body for body, _ in ordered] == list("01234")
    assert len({queue for _, queue in ordered}) == 1
    assert got[-1][0] == "late"


async def test_two_subscribers_of_a_topic_need_two_groups(make, topic):
    broker = make(group="one")

    @broker.subscriber(topic)
    async def first(body: str) -> None: ...

    @broker.subscriber(topic)
    async def second(body: str) -> None: ...

    with pytest.raises(SetupError, match="give each its own group"):
        await broker.start()


async def test_a_router_has_a_prefix(make, topic):
    got = []

    async def handle(body: str) -> None:
        got.append(body)

    broker = make(routers=[RocketMQRouter(f"{topic}-", [RocketMQRoute(handle, "in")])])
    await broker.start()
    await broker.publish("x", f"{topic}-in")

    await until(lambda: got == ["x"])


async def test_it_is_pinged_and_may_be_restarted(make, topic):
    broker, got = make(), []

    @broker.subscriber(topic)
    async def handle(body: str) -> None:
        got.append(body)

    assert not await broker.ping()
    for number in range(2):
        await broker.start()
        assert await broker.ping(5)
        await broker.publish(str(number), topic)
        await until(lambda number=number: len(got) == number + 1)
        await broker.stop()


async def test_the_test_client_needs_no_cluster():
    broker = RocketMQBroker("127.0.0.1:1", logger=None)
    publisher = broker.publisher("paid")

    @broker.subscriber("orders", tags="new")
    @publisher
    async def bill(order: Order) -> int:
        return order.cents

    async with TestRocketMQBroker(broker) as test:
        await test.publish(Order(id="1", cents=5), "orders", tag="old")
        bill.mock.assert_not_called()
        await test.publish(Order(id="1", cents=5), "orders", tag="new")

        bill.mock.assert_called_once_with({"id": "1", "cents": 5})
        publisher.mock.assert_called_once_with(5)
        assert await (await test.request(Order(id="1", cents=7), "orders", tag="new")).decode() == 7
        with pytest.raises(SubscriberNotFound):
            await test.request("x", "nowhere")


async def test_the_test_client_may_use_a_real_cluster(make, topic):
    broker = make()

    @broker.subscriber(topic)
    async def handle(body: str) -> None: ...

    async with TestRocketMQBroker(broker, with_real=True) as test:
        await test.publish("x", topic)
        await handle.wait_call(PATIENCE)
        handle.mock.assert_called_once_with("x")


def test_the_asyncapi_document_describes_channels():
    broker = RocketMQBroker("127.0.0.1:9876", description="the cluster")

    @broker.subscriber("orders", title="Orders")
    @broker.publisher("paid")
    async def bill(order: Order) -> int:
        """Bills an order."""
        return order.cents

    document = AsyncAPI(broker).to_specification().to_jsonable()

    assert set(document["channels"]) == {"Orders", "paid:Publisher"}
    assert document["servers"]["development"]["protocol"] == "rocketmq"
    assert "Order" in document["components"]["schemas"]


def test_an_account_and_tls_come_from_faststreams_security():
    RocketMQBroker("127.0.0.1:9876", security=SASLPlaintext("access", "secret", use_ssl=True))
    RocketMQBroker("127.0.0.1:9876", security=BaseSecurity(use_ssl=True))

    with pytest.raises(SetupError, match="SASLPlaintext"):
        RocketMQBroker("127.0.0.1:9876", security=SASLScram256("access", "secret"))


def test_a_wrong_argument_is_named():
    with pytest.raises(SettingError, match="name_servers"):
        RocketMQBroker("::::")
    with pytest.raises(SetupError, match="max_workers"):
        RocketMQBroker("127.0.0.1:9876").subscriber("orders", max_workers=0)
