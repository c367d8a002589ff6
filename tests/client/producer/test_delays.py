"""Messages for later: by level, by time, and taken back."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import cast

import pytest

from orbitmq.client.engine import Engine
from orbitmq.client.errors import RecallHandleInvalid, RecallUnsupported, TimesUnsupported
from orbitmq.client.heartbeats import BrokerVersions
from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.request import decode_recall_handle
from orbitmq.client.routes import MASTER
from orbitmq.errors import SendFailed
from orbitmq.remoting.settings import Address
from orbitmq.wire.codes import Release, ordinal_of
from tests.support.client import quick_settings
from tests.support.producing import scripted_cluster
from tests.support.remoting import DEADLINE, until
from tests.support.tries import TRIES

BROKER_COUNT = 2


@pytest.mark.feature("K5")
async def test_each_of_the_eighteen_levels_has_its_delay(cluster, producer):
    minutes = [60.0 * count for count in (*range(1, 11), 20, 30, 60, 120)]
    real_time = asyncio.get_running_loop().time
    began, moved, early = real_time(), 0.0, list[int]()
    for level in range(1, 19):
        await producer.send("orders", b"%d" % level, delay_level=level)

    for level, delay in enumerate([1.0, 5.0, 10.0, 30.0, *minutes], start=1):
        # Half a second before it is due, of which real time takes its part.
        ahead = max(0.0, delay - 0.5 - moved - (real_time() - began))
        cluster.advance(ahead)
        moved += ahead
        there = len(cluster.messages("orders"))
        if moved + real_time() - began < delay:
            assert there == level - 1
            early.append(level)
        cluster.advance(0.5)
        moved += 0.5
        wanted = level
        await until(lambda wanted=wanted: len(cluster.messages("orders")) == wanted)  # type: ignore[misc]

    arrived = [int(message.body) for message in cluster.messages("orders")]
    assert arrived == list(range(1, 19))
    assert early, "all levels were looked at too late to see that they are not early"


@pytest.mark.feature("K5")
async def test_a_message_for_any_time_comes_at_that_time(cluster, producer):
    """Of several the most punctual one counts: the machine may be busy with something else."""
    due: dict[str, float] = {}
    for _ in range(TRIES):
        for number in range(10):
            at = cluster.clock.now() + 0.3 + 0.037 * number
            due[(await producer.send("orders", b"x", deliver_at=at)).msg_id] = at
        await until(lambda: len(cluster.messages("orders")) == len(due))
        late = [each.stored_at - due[each.msg_id] for each in cluster.messages("orders")]
        if min(late) < 0.1:
            break

    assert min(late) > -0.001
    assert min(late) < 0.1


@pytest.mark.feature("K5")
async def test_a_message_can_be_taken_back_before_it_is_due(cluster, producer):
    kept = await producer.send("orders", b"kept", delay=100)
    dropped = await producer.send(
        Message("orders", b"dropped", deliver_at=cluster.clock.now() + 50)
    )
    assert dropped.recall_handle is not None
    handle = decode_recall_handle(dropped.recall_handle)
    assert (handle.topic, handle.broker) == ("orders", dropped.queue.broker)
    assert handle.unique_id == dropped.msg_id

    recalled = await producer.recall("orders", dropped.recall_handle)

    assert recalled == dropped.msg_id
    cluster.advance(101)
    await until(lambda: len(cluster.messages("orders")) == 1)
    assert cluster.messages("orders")[0].unique_id == kept.msg_id


@pytest.mark.parametrize("handle", [None, "", "x", "!!!", "djEgYQ==", "djIgYSBiIDEgYw=="])
async def test_what_is_no_handle_is_refused_here(producer, handle):
    with pytest.raises(RecallHandleInvalid, match=r"is no recall handle.*`delay_level`"):
        await producer.recall("orders", handle)


OLD = ordinal_of(Release(4, 9, 7))


@pytest.mark.parametrize("wish", [{"delay": 60.0}, {"deliver_at": 2_000_000_000.0}])
async def test_a_broker_of_the_old_line_gets_nothing_for_later(wish):
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        cluster.brokers["a"].version = OLD
        (name,) = wish

        with pytest.raises(TimesUnsupported, match=r"4\.9\.7.* delay_level") as raised:
            await producer.send("orders", b"x", **wish)
        with pytest.raises(TimesUnsupported):
            await (await producer.submit("orders", b"x", **wish))
        with pytest.raises(TimesUnsupported):
            await producer.send_one_way("orders", b"x", **wish)
        with pytest.raises(TimesUnsupported):
            await producer.request("orders", b"x", **wish)
        await producer.send("orders", b"now")
        await producer.send("orders", b"level", delay_level=3)

    assert (raised.value.field, raised.value.broker) == (name, "a")
    assert [sent.body for sent in cluster.sent] == [b"now", b"level"]


@pytest.mark.parametrize("face", ["async", "blocking"])
async def test_in_a_cluster_of_both_lines_messages_for_later_go_to_brokers_that_keep_them(face):
    async with scripted_cluster("a", "b") as cluster:
        cluster.brokers["a"].version = OLD
        client = quick_settings(cluster.name_server.address)

        def use():
            with Producer("svc", client=client) as producer:
                for _ in range(4):
                    producer.send("orders", b"later", delay=60)
                    producer.submit("orders", b"later", delay=60).result(30)
                    producer.send_one_way("orders", b"later", delay=60)
                queue = next(each for each in producer.queues("orders") if each.broker == "a")
                with pytest.raises(TimesUnsupported):
                    producer.send("orders", b"bound", delay=60, queue=queue)

        async def use_async():
            async with cluster.producer() as producer:
                for _ in range(4):
                    await producer.send("orders", b"later", delay=60)
                    await (await producer.submit("orders", b"later", delay=60))
                    await producer.send_one_way("orders", b"later", delay=60)
                with pytest.raises(TimesUnsupported):
                    await producer.send(
                        "orders", b"bound", delay=60, selector=lambda queues, message: queues[0]
                    )

        await (use_async() if face == "async" else asyncio.to_thread(use))
        await until(lambda: len(cluster.sent) == 12)

    assert {(sent.broker, sent.body) for sent in cluster.sent} == {("b", b"later")}


@pytest.mark.parametrize("is_new", [True, False])
def test_what_a_slave_can_do_says_nothing_about_its_master(is_new):
    new = ordinal_of(Release(5, 3, 0))
    master, slave = Address("127.0.0.1", 1), Address("127.0.0.1", 2)
    routes = SimpleNamespace(brokers={"a": {MASTER: master, 1: slave}})
    said = {master: new if is_new else OLD, slave: OLD if is_new else new}
    engine = SimpleNamespace(routes=routes, broker_versions=said)

    assert BrokerVersions(cast("Engine", engine)).keeps_times("a") is is_new


async def test_a_broker_that_does_not_say_its_version_gets_nothing_for_later():
    patient = SendSettings(timeout=1.0)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=patient) as producer:
        cluster.brokers["a"].is_mute = True

        with pytest.raises(SendFailed, match="its version is unknown"):
            await producer.send("orders", b"x", delay=60)
        await producer.send("orders", b"now", timeout=DEADLINE)

    assert [sent.body for sent in cluster.sent] == [b"now"]


async def test_a_broker_that_takes_nothing_back_is_named():
    handle = base64.urlsafe_b64encode(b"v1 orders a 1700000000000 7F0000010000").decode()
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        with pytest.raises(RecallUnsupported, match=r"'a'.*takes no messages back"):
            await producer.recall("orders", handle)
