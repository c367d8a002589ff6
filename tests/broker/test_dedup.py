"""De-duplication: a topic stores one message with an id, whatever happens in between."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from dataclasses import replace
from typing import Any

import pytest

from orbitmq.broker.metrics import Metrics
from orbitmq.broker.settings import DedupSettings
from orbitmq.clock import SystemClock
from orbitmq.message.properties import encode_properties
from orbitmq.message.stored import encode_batch
from orbitmq.store.settings import FlushPolicy
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import SendMessageResponse, TopicRequest
from tests.support.broker import SMALL_STORE, RawClient, until
from tests.support.replication import SERVING, slave_of, until_copied
from tests.support.slowdisk import GatedFiles
from tests.support.store import FailingFiles

pytestmark = pytest.mark.feature("S6")


def with_id(dedup_id: str, **more: str) -> dict[str, str]:
    return {"__DEDUP_ID": dedup_id, "UNIQ_KEY": f"U{dedup_id}", **more}


async def put(
    client: RawClient, dedup_id: str, topic: str = "orders", **more: Any
) -> SendMessageResponse:
    return await client.stored(topic, properties=with_id(dedup_id), **more)


async def put_batch(client: RawClient, ids: list[str], queue_id: int = 0) -> SendMessageResponse:
    elements = [
        (b"%d" % place, 0, encode_properties(with_id(each) if each else {"KEYS": "k"}))
        for place, each in enumerate(ids)
    ]
    return await client.stored(
        "orders",
        encode_batch(elements),
        queue_id=queue_id,
        code=RequestCode.SEND_BATCH_MESSAGE,
        batch=True,
        properties={"UNIQ_KEY": "BATCH"},
    )


def ends(broker, topic="orders") -> int:
    return sum(each.max_offset for each in broker.parts.store.queues() if each.topic == topic)


class Watch(SystemClock):
    """The time of day, which tests move."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


async def test_a_message_whose_id_is_known_is_answered_with_the_first_copy(broker, client):
    first = await put(client, "a", queue_id=2)
    copy = await put(client, "a", queue_id=3)
    elsewhere = await put(client, "a", topic="bills")
    other = await put(client, "b")

    assert first.duplicates is None
    assert copy.duplicates == "0:2:0:Ua"
    assert (copy.msg_id, copy.queue_id, copy.queue_offset, copy.transaction_id) == (
        first.msg_id,
        2,
        0,
        "Ua",
    )
    assert elsewhere.duplicates is None
    assert other.duplicates is None
    assert ends(broker) == 2


@pytest.mark.parametrize("count", [6, 200])
async def test_of_a_batch_the_new_messages_are_stored(broker, client, count):
    new = [f"n{number}" for number in range(count)]
    whole = await put_batch(client, new, queue_id=1)
    mixed = await put_batch(client, ["x", new[4], "", "x", "y"], queue_id=2)
    again = await put_batch(client, new, queue_id=3)

    assert whole.duplicates is None
    assert (whole.queue_id, whole.queue_offset) == (1, 0)
    assert mixed.duplicates == "1:1:4:Un4,3:2:0:Ux"
    ids = mixed.msg_id.split(",")
    assert ids[1] == whole.msg_id.split(",")[4]
    assert ids[3] == ids[0]
    assert again.msg_id == whole.msg_id
    assert again.duplicates == ",".join(f"{each}:1:{each}:Un{each}" for each in range(count))
    assert ends(broker) == count + 3


async def test_the_property_may_stand_anywhere_and_only_the_whole_property_counts(broker, client):
    for raw in ("__DEDUP_ID\x01a\x02", "KEYS\x01k\x02__DEDUP_ID\x01a\x02", "__DEDUP_ID\x01a"):
        await client.stored("orders", properties=raw)
    for raw in ("X__DEDUP_ID\x01a\x02", "KEYS\x01__DEDUP_ID\x01a\x02"):
        assert (await client.stored("orders", properties=raw)).duplicates is None
    body = encode_batch([(b"__DEDUP_ID\x01a\x02", 0, b"__DEDUP_ID\x01b\x02")] * 100)
    batch = await client.stored(
        "orders", body, code=RequestCode.SEND_BATCH_MESSAGE, batch=True, properties=""
    )

    assert batch.duplicates is not None
    assert ends(broker) == 4


async def test_a_copy_is_answered_after_the_flush_of_the_first_one(start_broker, open_client):
    disk = GatedFiles()
    store = replace(SMALL_STORE, flush=replace(SMALL_STORE.flush, policy=FlushPolicy.SYNC))
    broker = await start_broker(store=store, parts={"files": disk})
    one, other = await open_client(broker), await open_client(broker)
    await put(one, "before")

    disk.gate.clear()
    first = asyncio.create_task(put(one, "a"))
    await until(lambda: disk.waiting)
    copy = asyncio.create_task(put(other, "a"))
    await until(lambda: broker.parts.dedup.dropped["orders"])
    await asyncio.sleep(0)
    waited = not first.done() and not copy.done()
    disk.gate.set()
    found, again = await asyncio.gather(first, copy)

    assert waited
    assert again.msg_id == found.msg_id
    assert ends(broker) == 2


async def test_an_id_is_not_known_if_its_message_was_not_stored(start_broker, open_client):
    disk = FailingFiles()
    broker = await start_broker(parts={"files": disk})
    client = await open_client(broker)
    await put(client, "before")

    works = disk.before
    disk.fail("pwrite", errno.ENOSPC)
    refused = await client.send("orders", properties=with_id("a"))
    disk.before = works
    stored = await put(client, "a")

    assert refused.code != ResponseCode.SUCCESS
    assert stored.duplicates is None
    assert broker.parts.dedup.remembered == 2


@pytest.mark.parametrize("seed", range(4))
async def test_ids_survive_kills_and_stops(start_broker, open_client, crash, tmp_path, seed):
    """Sends, batches, kills, stops, and lost files of ids, in any order."""
    chance = random.Random(seed)
    broker = await start_broker()
    client = await open_client(broker)
    await put(client, "first", queue_id=3)  # so that a topic found in the store has four queues
    known = {"first"}
    for _ in range(60):
        match chance.choice(("send", "send", "batch", "batch", "kill", "stop", "lose")):
            case "send":
                dedup_id = f"i{chance.randrange(40)}"
                answer = await put(client, dedup_id, queue_id=chance.randrange(4))
                assert (answer.duplicates is not None) == (dedup_id in known)
                known.add(dedup_id)
            case "batch":
                ids = [f"i{chance.randrange(400)}" for _ in range(chance.choice((5, 100)))]
                answer = await put_batch(client, ids, queue_id=chance.randrange(4))
                told = (answer.duplicates or "").split(",")
                assert len(ids) - len(set(ids) - known) == len(list(filter(None, told)))
                known |= set(ids)
            case how:
                if how == "kill":
                    await crash(broker)
                else:
                    await broker.stop()
                if how == "lose":
                    shutil.rmtree(tmp_path / "broker" / "dedup", ignore_errors=True)
                broker = await start_broker()
                client = await open_client(broker)
    assert ends(broker) == broker.parts.dedup.remembered == len(known)


async def test_the_window_is_bounded_by_time_and_by_count(start_broker, open_client):
    clock = Watch()
    dedup = DedupSettings(window=60, topic_ids=10, ids=15)
    broker = await start_broker(dedup=dedup, parts={"clock": clock})
    client = await open_client(broker)

    for number in range(12):
        await put(client, f"n{number}")
    by_count = [(await put(client, each)).duplicates is None for each in ("n11", "n0")]
    await put(client, "b", topic="bills")
    clock.ahead = 61
    by_time = [
        (await put(client, each, topic=topic)).duplicates is None
        for each, topic in (("n11", "orders"), ("b", "bills"))
    ]
    await put_batch(client, [f"m{number}" for number in range(100)])

    assert by_count == [False, True]
    assert by_time == [True, True]
    assert broker.parts.dedup.remembered <= 15


@pytest.mark.parametrize(
    "delay", [{"DELAY": "3"}, {"TIMER_DELAY_SEC": "3600"}], ids=["level", "time"]
)
async def test_a_delayed_message_is_parked_once(start_broker, open_client, crash, delay):
    broker = await start_broker()
    client = await open_client(broker)
    properties = with_id("a", **delay)

    first = await client.stored("orders", queue_id=2, properties=properties)
    copy = await client.stored("orders", queue_id=3, properties=properties)
    await crash(broker)
    client = await open_client(await start_broker())
    later = await client.stored("orders", queue_id=1, properties=properties)

    assert copy.duplicates == later.duplicates == f"0:2:{first.queue_offset}:Ua"
    assert (copy.msg_id, copy.recall_handle) == (first.msg_id, first.recall_handle)
    # The port is another one now.
    assert later.msg_id[16:] == first.msg_id[16:]
    assert later.recall_handle == first.recall_handle


async def test_a_transaction_takes_no_id(client):
    answer = await client.send("orders", properties=with_id("a", TRAN_MSG="true", PGROUP="p"))

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "transaction cannot have the property __DEDUP_ID" in (answer.remark or "")


async def test_copies_for_another_attempt_are_no_duplicates(broker, client):
    """They keep the properties of their message, and a message may fail again."""
    await client.heartbeat("c1")

    for _ in range(2):
        await put(client, "a", topic="%RETRY%billing")

    assert ends(broker, "%RETRY%billing") == 2


async def test_a_deleted_topic_and_a_broker_without_windows_know_no_ids(
    start_broker, open_client, broker, client
):
    await put(client, "a")
    header = TopicRequest(topic="orders")
    await client.connection.request(RequestCode.DELETE_TOPIC_IN_BROKER, header)
    anew = await put(client, "a")
    off = await start_broker(root="off", dedup=DedupSettings(enabled=False))
    other = await open_client(off)
    twice = [(await put(other, "a")).duplicates for _ in range(2)]

    assert anew.duplicates is None
    assert twice == [None, None]
    assert "dedupWindow" not in (await other.heartbeat("c1")).ext_fields


async def test_ids_of_a_deleted_topic_are_unknown_after_a_crash(start_broker, open_client, crash):
    broker = await start_broker()
    client = await open_client(broker)
    await put(client, "a")
    header = TopicRequest(topic="orders")
    await client.connection.request(RequestCode.DELETE_TOPIC_IN_BROKER, header)
    await crash(broker)  # before ids were saved, so that they are read from the log
    broker = await start_broker()

    anew = await put(await open_client(broker), "a")

    assert anew.duplicates is None
    assert ends(broker) == 1


@pytest.mark.parametrize("position", ["0", "1000000"], ids=["old", "beyond the end"])
async def test_ids_are_complete_whatever_the_saved_position(
    start_broker, open_client, crash, tmp_path, position
):
    """It is old after a crash in a save; the end of the log may be lost with the power."""
    changes: dict[str, Any] = {"dedup": DedupSettings(window=60), "parts": {"clock": Watch()}}
    broker = await start_broker(**changes)
    client = await open_client(broker)
    await put_batch(client, [f"n{number}" for number in range(10)])
    await broker.stop()
    (tmp_path / "broker" / "dedup" / ".position").write_text(position)
    changes["parts"]["clock"].ahead = 61
    broker = await start_broker(**changes)
    await put(await open_client(broker), "a")
    await (crash(broker) if position != "0" else broker.stop())

    again = await put(await open_client(await start_broker(**changes)), "a")

    assert again.duplicates is not None


async def test_an_id_that_was_stored_again_is_known_from_then_on(start_broker, open_client):
    clock = Watch()
    store = replace(SMALL_STORE, file_size=1 << 20)
    store = replace(store, retention=replace(store.retention, max_bytes=1 << 20, files_per_run=9))
    changes: dict[str, Any] = {"store": store, "parts": {"clock": clock}}
    few, many = (DedupSettings(window=60, ids=ids) for ids in (2, 1000))
    broker = await start_broker(dedup=few, **changes)
    client = await open_client(broker)
    for dedup_id in ("x", "b", "c", "x", "d", "x", "a"):  # "x" is in a second several times
        await put(client, dedup_id)
    await broker.stop()
    broker = await start_broker(dedup=many, **changes)
    client = await open_client(broker)
    while not broker.parts.store.mirroring.start:  # until the first copies are deleted
        await client.stored("bills", bytes(100_000))
        broker.parts.store.clean()
    clock.ahead = 40
    anew = await put(client, "a")
    clock.ahead = 62
    told = [(await put(client, dedup_id)).duplicates is None for dedup_id in ("b", "a", "x")]

    assert anew.duplicates is None
    assert told == [True, False, True]


async def test_the_log_tells_the_ids_as_the_sends_did(start_broker, open_client, crash):
    broker = await start_broker()
    client = await open_client(broker)
    sends = (
        (b"__DEDUP_ID\x01in a body", "__DEDUP_ID\x01a\x02"),
        (b"two", "__DEDUP_ID\x01b\x02__DEDUP_ID\x01c\x02"),
    )
    # As Java encodes properties: nothing is behind the last one.
    batch = encode_batch([(b"b", 0, b"__DEDUP_ID\x01n%d" % number) for number in range(2)])
    answers = []
    for _ in range(2):
        for body, raw in sends:
            answers.append(await client.stored("orders", body, properties=raw))
        code = RequestCode.SEND_BATCH_MESSAGE
        answers.append(await client.stored("orders", batch, code=code, batch=True, properties=""))
        await crash(broker)
        broker = await start_broker()
        client = await open_client(broker)

    # The port is another one in the second life.
    assert [each.duplicates for each in answers[:3]] == [None] * 3
    assert None not in [each.duplicates for each in answers[3:]]
    assert ends(broker) == 4


async def test_a_slave_that_becomes_the_master_knows_the_ids(start_broker, open_client):
    master = await start_broker(root="master", replication=SERVING)
    client = await open_client(master)
    slave = await start_broker(root="slave", **slave_of(master))
    await put_batch(client, [f"n{number}" for number in range(100)])
    await put(client, "a", queue_id=2)
    await until_copied(master, slave)
    await until(lambda: slave.parts.dedup.remembered == 101)
    await slave.stop()

    promoted = await start_broker(root="slave")
    copy = await put(await open_client(promoted), "a")

    assert copy.duplicates == "0:2:0:Ua"
    assert ends(promoted) == 101


async def test_what_is_remembered_and_dropped_is_counted(broker, client):
    for _ in range(3):
        await put(client, "a")

    text = b"".join(await Metrics(broker.parts).text()).decode()
    assert _value(text, "orbitmq_sends_deduplicated_total") == 2
    assert _value(text, "orbitmq_dedup_ids") == 1


def _value(text: str, name: str) -> float:
    [line] = [each for each in text.splitlines() if each.startswith(name + "{")]
    return float(line.rpartition(" ")[2])
