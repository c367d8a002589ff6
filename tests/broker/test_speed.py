"""How soon a held pull is answered: a broker process, a sender and a receiver.

Ten milliseconds are promised on an idle machine. On a busy one it is the best of several rounds
that shows what the broker does with a message, and the middle of that round's messages.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.load.asking import Drive, Driven, Pace, Paced, Pulls, Sends, Target
from benchmarks.load.processes import Generator, OurBroker
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.store.settings import StoreSettings
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.broker import RawClient, bodies_in, until
from tests.support.tries import shortest_of

PROMISED = 0.010
ROUNDS = 40
#: Live messages a second, and for how long.
RATE = 200.0
SECONDS = 0.6


@pytest.mark.feature("B5")
@pytest.mark.timeout(180)
def test_a_held_pull_is_answered_within_ten_milliseconds_of_the_arrival(tmp_path):
    with OurBroker(tmp_path) as broker, Generator() as generator:
        took = shortest_of(lambda: _pace(generator, broker.target).median, PROMISED, ROUNDS)

    assert took < PROMISED


def _pace(generator: Generator, target: Target) -> Paced:
    """A live message every few milliseconds, so that each finds a pull that is held."""
    wish = Pace(
        target=target, way="broker", topic="live", body_size=1024, rate=RATE, seconds=SECONDS
    )
    done = generator.ask(wish)
    assert isinstance(done, Paced)
    return done


@pytest.mark.feature("B5")
async def test_an_empty_pull_is_held_for_as_long_as_its_client_asks(broker, client):
    await client.stored("orders", b"first")
    waiting = asyncio.ensure_future(client.pull("orders", offset=1, hold=15.0))
    await until(lambda: len(broker.parts.held) == 1)
    (pull,) = broker.parts.held.table.find(None, None, None)

    held_for = pull.deadline - pull.since
    await client.stored("orders", b"second")

    assert held_for == 15.0
    assert bodies_in(await waiting) == [b"second"]


@pytest.mark.feature("B5")
async def test_a_consumer_asks_to_be_held_for_fifteen_seconds():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=1)
        held = cluster.brokers[0].parts.held

        def asked():
            pulls = list(held.table.find(None, None, None))
            return [pull.deadline - pull.since for pull in pulls if pull.key[0] == "orders"]

        async with AsyncPullConsumer("billing", name_server=cluster.name_server) as consumer:
            consumer.subscribe("orders")
            polling = asyncio.ensure_future(consumer.poll(30.0))
            await until(asked, 20)
            held_for = asked()
            producer = await RawClient.open(cluster.brokers[0])
            await producer.stored("orders", b"hello")
            await producer.close()
            (message,) = await asyncio.wait_for(polling, 20)

    assert held_for == [15.0]
    assert message.body == b"hello"


MIB = 1 << 20
BODY = 8192
BACKLOG = 128 * MIB
OLD = Sends(topic="old", body_size=BODY, queues=1, per_request=32)

#: Seconds in which whoever waits gets what arrives: a few of the turns that a replay takes, and far
#: less than all that is asked for.
PROMISED_BESIDE = 0.050
DEADLINE = 120.0


@pytest.fixture
def replay():
    with Generator() as generator:
        yield generator


@pytest.mark.feature("I8")
@pytest.mark.timeout(180)
def test_a_replay_does_not_slow_the_tail(tmp_path, replay):
    read: list[int] = []
    with OurBroker(tmp_path) as broker, Generator() as live, ThreadPoolExecutor(1) as pool:

        def beside():
            replaying = pool.submit(_replay, replay, broker.target, seconds=SECONDS + 0.1)
            paced = _pace(live, broker.target)
            read.append(replaying.result(DEADLINE).bytes)
            return paced.median

        _fill(replay, broker.target)
        _pace(live, broker.target)
        took = shortest_of(beside, PROMISED_BESIDE, ROUNDS)

    print(f"\n{took * 1000:.2f} ms, {sum(read) / MIB:.0f} MiB read in {len(read)} rounds")
    assert all(read)
    assert took < PROMISED_BESIDE


@pytest.mark.feature("I8")
@pytest.mark.timeout(180)
async def test_what_is_sent_of_a_backlog_between_two_looks_at_the_sockets_is_bounded(
    start_broker, replay
):
    broker = await start_broker(store=StoreSettings(preallocate_step=0))
    target = Target(port=broker.address.port, pid=os.getpid())
    loop = asyncio.get_running_loop()
    steps: list[int] = []

    def sent():
        groups = broker.parts.counters.groups.items()
        return sum(counts.get_bytes for (topic, _), counts in groups if topic == OLD.topic)

    before = 0

    def look():
        """Once in every step of the loop."""
        nonlocal before
        now = sent()
        steps.append(now - before)
        before = now
        if not done.done():
            loop.call_soon(look)

    async with asyncio.timeout(DEADLINE):
        await asyncio.to_thread(_fill, replay, target)
        done = asyncio.ensure_future(
            asyncio.to_thread(_replay, replay, target, in_flight=64, count=2000)
        )
        loop.call_soon(look)
        read = (await done).bytes

    largest_answer = broker.parts.settings.store.read.memory_bytes + BODY + 1024
    assert read > BACKLOG
    # The turn of those who waited, that of what a socket brought, and the answer that ends each.
    assert max(steps) <= 2 * (broker.parts.settings.pull.step_bytes + largest_answer)


def _fill(generator: Generator, target: Target) -> None:
    count = BACKLOG // (BODY * OLD.per_request)
    wish = Drive(target=target, requests=OLD, connections=1, in_flight=8, count=count)
    done = generator.ask(wish)
    assert isinstance(done, Driven)
    assert not done.refused, done.refusal


def _replay(
    generator: Generator,
    target: Target,
    *,
    in_flight: int = 8,
    seconds: float = 0.0,
    count: int = 0,
) -> Driven:
    """The whole backlog, over and over, as fast as it comes, with pulls asked for ahead."""
    pulls = Pulls(topic=OLD.topic, queues=1, per_request=32, messages=BACKLOG // BODY)
    wish = Drive(
        target=target,
        requests=pulls,
        connections=1,
        in_flight=in_flight,
        seconds=seconds,
        count=count,
    )
    done = generator.ask(wish)
    assert isinstance(done, Driven)
    assert not done.refused, done.refusal
    return done
