"""What a group's progress is after the broker's process was killed, stopped, or found a torn file.

Intervals are short, and nothing is said about how fast anything is: what has to be on the disk is
waited for in the file.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import parse_address
from tests.support.broker import RawClient
from tests.support.brokerlives import BrokerLives
from tests.support.client import quick_settings
from tests.support.consuming import until
from tests.support.polling import BY_HAND

TOPIC = "orders"
GROUP = "billing"
QUEUE = Queue(TOPIC, "broker-a", 0)
PLACE = f"{TOPIC}@{GROUP}"


@pytest.mark.feature("H1")
@pytest.mark.feature("H2")
@pytest.mark.feature("H3")
@pytest.mark.feature("H4")
async def test_progress_counts_at_once_and_outlives_a_kill_a_stop_and_a_torn_file(tmp_path):
    interval = "broker.progress.save_interval=0.2"
    async with (
        BrokerLives(tmp_path / "data", interval) as broker,
        BrokerLives(tmp_path / "twin", interval) as twin,
    ):
        file = broker.progress_file
        await broker.begin()
        await fill(broker, 30)

        # A report counts at once, and a lower one does not, unless it is a reset.
        await commit(broker, 9)
        assert await committed(broker) == 9
        await report_late(broker, 3)
        assert await committed(broker) == 9
        await until(lambda: "commit of a lower offset refused" in broker.errors)
        async with AsyncAdmin(name_server=broker.name_server) as admin:
            assert (await admin.progress.reset(GROUP, TOPIC, ResetTo.offset(5))).is_effective
        assert await committed(broker) == 5

        # Killed: what is lost is younger than one interval.
        await commit(broker, 7)
        await until(lambda: saved(file) == {"0": 7})
        await commit(broker, 8)
        await broker.end(signal.SIGKILL)
        as_apache_writes_it(file)
        await broker.begin()
        after_kill = await committed(broker)

        # Stopped: nothing is lost.
        assert after_kill in (7, 8)
        await commit(broker, 19)
        await until(lambda: saved(file) == {"0": 19})
        await commit(broker, 20)
        assert await broker.end(signal.SIGTERM) == 0
        document = json.loads(file.read_text())

        # Torn: the file before it counts, and what is left of it is kept.
        shutil.copytree(broker.data, twin.data)
        before = saved(file.with_name("consumerOffset.json.bak"))
        torn = file.read_bytes()[: file.stat().st_size // 2]
        file.write_bytes(torn)
        begun = await asyncio.gather(broker.begin(), twin.begin(), return_exceptions=True)
        assert not any(begun), begun
        after_stop, after_tear = await committed(twin), await committed(broker)
        await until(lambda: file.name in broker.errors)

    assert after_stop == 20
    assert set(document) >= {"dataVersion", "offsetTable"}
    assert document["offsetTable"][PLACE] == {"0": 20}
    assert before in ({"0": 19}, {"0": 20})
    assert {"0": after_tear} == before
    assert [each.read_bytes() for each in file.parent.glob(f"{file.name}.damaged-*")] == [torn]


async def fill(broker: BrokerLives, count: int) -> None:
    async with (
        AsyncAdmin(name_server=broker.name_server) as admin,
        AsyncProducer(name_server=broker.name_server) as producer,
    ):
        await admin.topics.create(TOPIC, queues=1, exist_ok=True)
        await admin.groups.create(GROUP)  # on the disk when this returns
        for number in range(count):
            await producer.send(TOPIC, str(number))


async def commit(broker: BrokerLives, offset: int) -> None:
    """Have a member of the group report so much."""
    async with AsyncPullConsumer(
        GROUP, name_server=broker.name_server, polling=BY_HAND, consume_from="first"
    ) as consumer:
        await consumer.assign([QUEUE])
        assert await consumer.commit({QUEUE: offset}) == {QUEUE: offset}


async def report_late(broker: BrokerLives, offset: int) -> None:
    """Report as a client of Apache's does who was a member once: it hears nothing of the answer."""
    connection = await connect(parse_address(broker.address), owner=Dispatcher({}))
    straggler = RawClient(connection, notices=[])
    straggler.report_one_way(TOPIC, offset)
    await straggler.query(TOPIC)  # answered after it was heard
    await straggler.close()


async def committed(broker: BrokerLives) -> int:
    """How far the group is, as a tool sees it."""
    async with AsyncAdmin(name_server=broker.name_server) as admin:
        found = await admin.groups.progress(GROUP, topic=TOPIC)
    (place,) = found.queues
    assert place.queue == QUEUE
    return place.consumer_offset


def saved(file: Path) -> Any:
    """The group's entry in a file."""
    try:
        text = file.read_text()
    except FileNotFoundError:  # for the moment between two renames
        return None
    quoted = re.sub(r"([{,])(\d+):", r'\1"\2":', text)
    return json.loads(quoted)["offsetTable"].get(PLACE)


def as_apache_writes_it(file: Path) -> None:
    """Give a file the bare integer keys of Apache's, and leave nothing to fall back on."""
    bare = re.sub(r'"(\d+)":', r"\1:", file.read_text())
    assert bare != file.read_text()
    file.write_text(bare)
    file.with_name(f"{file.name}.bak").unlink(missing_ok=True)


async def test_a_consumer_begins_again_at_the_committed_offset_of_a_broker_that_lost_messages(
    tmp_path,
):
    seen: list[tuple[int, str]] = []
    async with BrokerLives(tmp_path / "data") as broker, BrokerLives(tmp_path / "twin") as twin:
        await broker.begin()
        await fill(broker, 6)
        await commit(broker, 4)
        assert await broker.end(signal.SIGTERM) == 0
        shutil.copytree(broker.data, twin.data)
        await broker.begin()
        consumer = AsyncConsumer(GROUP, client=quick_settings(broker.name_server))
        consumer.on(TOPIC)(lambda each: seen.append((each.queue_offset, each.text())))
        async with consumer:
            await fill(broker, 4)
            await until(lambda: consumer.positions().get(QUEUE) == 10)
            seen.clear()

            # It loses what was stored since, and gets another message before it is heard of.
            await twin.begin()
            await fill(twin, 1)
            assert await twin.end(signal.SIGTERM) == 0
            await broker.end(signal.SIGKILL)
            shutil.rmtree(broker.data)
            shutil.copytree(twin.data, broker.data)
            await broker.begin()
            await until(lambda: (6, "0") in seen)

    assert seen[0] == (4, "4")
