"""`send_arrow` and `send_many`: messages without objects, with the checks and results of others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pyarrow as pa
import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, MessageRefused, NoRoute, SendFailed, SettingError
from orbitmq.message.record import COMPRESSED
from orbitmq.testing import EmbeddedCluster
from orbitmq.wire.codes import ResponseCode
from tests.support.producing import HANG_UP, scripted_cluster
from tests.support.remoting import DEADLINE

ROWS = pa.table(
    {
        "body": pa.array([b"a", b"bb", b"c" * 300, b"d"]),
        "tag": pa.array(["t1", None, "t2", "t 3"]),
        "keys": pa.array(["k1", "k2  k3", None, None]),
        "properties": pa.array(
            [[("country", "DE")], None, [], [("x", "1"), ("y", None), ("z", "ä")]],
            pa.map_(pa.string(), pa.string()),
        ),
        "ordering_key": pa.array(["o-1", "o-2", None, "o-1"]),
        "flag": pa.array([1, None, 2, -3], pa.int32()),
    }
)


async def test_rows_are_stored_as_messages_would_be(cluster):
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        results = await producer.send_arrow("orders", ROWS)

    given = [
        Message("orders", b"a", tags="t1", keys="k1", properties={"country": "DE"}, flag=1),
        Message("orders", b"bb", keys=["k2", "k3"]),
        Message("orders", b"c" * 300, tags="t2", flag=2),
        Message("orders", b"d", tags="t 3", properties={"x": "1", "z": "ä"}, flag=-3),
    ]
    keys = ["o-1", "o-2", None, "o-1"]
    stored = {message.msg_id: message for message in cluster.messages("orders")}
    assert len(stored) == len(results) == 4
    assert results.is_ok
    for message, key, result in zip(given, keys, results, strict=True):
        found = stored[result.msg_id]
        wanted = message.all_properties() | ({} if key is None else {"__SHARDINGKEY": key})
        assert wanted.items() <= found.properties.items()
        assert (found.body, found.flag) == (message.body, message.flag)
        assert (found.queue_id, found.queue_offset) == (result.queue.id, result.queue_offset)
        assert found.offset_id == result.offset_id
    table = results.to_arrow()
    assert table.column("msgId").to_pylist() == [result.msg_id for result in results]
    assert table.column("queueOffset").to_pylist() == [result.queue_offset for result in results]
    assert table.column("queueId").to_pylist() == [result.queue.id for result in results]


async def test_many_bodies_go_to_all_queues_and_each_has_its_place(cluster):
    bodies = [b"%06d" % number for number in range(20_000)]
    settings = SendSettings(batch_bytes=64 * 1024)
    async with AsyncProducer(name_server=cluster.name_server, sending=settings) as producer:
        results = await producer.send_many(
            "orders", bodies, tag="t", keys=[f"k{n % 7}" for n in range(20_000)]
        )

    stored = {(each.queue_id, each.queue_offset): each for each in cluster.messages("orders")}
    assert len(stored) == 20_000
    assert len({queue for queue, _ in stored}) > 1
    for number in (0, 1, 777, 19_999, -1):
        result = results[number]
        found = stored[result.queue.id, result.queue_offset]
        assert (found.body, found.msg_id) == (bodies[number], result.msg_id)
        assert (found.tags, found.keys) == ("t", f"k{range(20_000)[number] % 7}")


@pytest.mark.parametrize("options", [{"queue": Queue("orders", "a", 2)}, {"ordering_key": "o-1"}])
async def test_with_a_queue_or_a_key_all_go_there_in_their_order(options):
    settings = SendSettings(timeout=DEADLINE, batch_bytes=1000)
    bodies = [b"%d" % number for number in range(500)]
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        results = await producer.send_many("orders", bodies, **options)

    assert cluster.bodies == bodies
    assert len({sent.header.queue_id for sent in cluster.sent}) == 1
    assert max(len(sent.body) for sent in cluster.sent) <= 1000
    assert results[3].msg_id == [unique_id for sent in cluster.sent for unique_id in sent.ids][3]


async def test_rows_of_a_key_keep_their_order():
    settings = SendSettings(timeout=DEADLINE, batch_bytes=1000)
    keys = [f"o-{number % 5}" for number in range(500)]
    table = pa.table({"body": [f"{key}:{n}" for n, key in enumerate(keys)], "ordering_key": keys})
    async with (
        scripted_cluster("a", "b") as cluster,
        cluster.producer(sending=settings) as producer,
    ):
        results = await producer.send_arrow("orders", table)
        one = await producer.send("orders", b"x", ordering_key="o-3")

    assert {result.queue for result, key in zip(results, keys, strict=True) if key == "o-3"} == {
        one.queue
    }
    for key in set(keys):
        numbers = [
            int(body.split(b":")[1]) for body in cluster.bodies if body.startswith(key.encode())
        ]
        assert numbers == sorted(numbers)


async def test_a_body_that_is_longer_than_a_frame_goes_alone_and_compressed():
    settings = SendSettings(timeout=DEADLINE, batch_bytes=10_000)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        results = await producer.send_many(
            "orders", [b"1", bytes(50_000), b"3"], keys=["a", "b", "c"]
        )

    (large,) = [sent for sent in cluster.sent if sent.header.sys_flag & COMPRESSED]
    assert not large.header.batch
    assert large.properties["KEYS"] == "b"
    assert large.unique_id == results[1].msg_id


@pytest.mark.parametrize(
    ("columns", "options", "error", "match"),
    [
        ({"tag": ["a"]}, {}, MessageRefused, "body is missing"),
        ({"body": [b"a", b""]}, {}, MessageRefused, r"\[1\]\.body must not be empty"),
        ({"body": [b"a", None]}, {}, MessageRefused, r"\[1\]\.body must not be empty"),
        ({"body": [1]}, {}, MessageRefused, "body must be bytes or texts, its type is int64"),
        ({"body": [b"a"], "color": ["red"]}, {}, MessageRefused, "color is no column of messages"),
        ({"body": [b"a"], "tag": [" "]}, {}, MessageRefused, r"\[0\]\.tag must be a text"),
        ({"body": [b"a"], "tags": ["a||b"]}, {}, MessageRefused, r"\[0\]\.tag .* has one tag"),
        ({"body": [b"a"], "tag": ["a"], "tags": ["a"]}, {}, MessageRefused, "another name of tag"),
        ({"body": [b"a"], "keys": ["a\x01b"]}, {}, MessageRefused, r"\[0\]\.keys must not contain"),
        ({"body": [bytes(2000)]}, {}, MessageRefused, r"body has 2000 bytes and may have 1000"),
        (
            {"body": [b"a"]},
            {"queue": Queue("payments", "a", 0)},
            MessageRefused,
            "the queue is payments",
        ),
        (
            {"body": [b"a"]},
            {"queue": Queue("orders", "a", 0), "ordering_key": 1},
            SettingError,
            "exclude each other",
        ),
    ],
)
async def test_what_cannot_be_sent_is_refused_before_anything_is(columns, options, error, match):
    settings = SendSettings(max_message_size=1000)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        with pytest.raises(error, match=match):
            await producer.send_arrow("orders", pa.table(columns), **options)

    assert cluster.sent == []


async def test_properties_that_no_broker_could_store_are_refused_before_anything_is_sent():
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        keys = ["k"] * 20_000
        keys[15_000] = "x" * 40_000

        with pytest.raises(MessageRefused, match=r"\[15000\]\.properties take 40[0-9]{3} bytes"):
            await producer.send_many("orders", [b"x"] * len(keys), keys=keys)

    assert cluster.sent == []


async def test_properties_of_the_system_are_refused():
    table = pa.table(
        {
            "body": [b"a"],
            "properties": pa.array([[("KEYS", "x")]], pa.map_(pa.string(), pa.string())),
        }
    )
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        with pytest.raises(MessageRefused, match=r"\[0\]\.properties\['KEYS'\] is a name of the"):
            await producer.send_arrow("orders", table)
        with pytest.raises(MessageRefused, match="keys has 1 entries for 2 bodies"):
            await producer.send_many("orders", [b"a", b"b"], keys=["k"])
        with pytest.raises(MessageRefused, match="body must be a list of binary"):
            await producer.send_many("orders", [b"a", 5])
        with pytest.raises(MessageRefused, match=r"body must be a list, one for each .* 'hello'"):
            await producer.send_many("orders", "hello")
        with pytest.raises(MessageRefused, match=r"keys must be a list, one for each .* 'ab'"):
            await producer.send_many("orders", [b"a", b"b"], keys="ab")

    assert cluster.sent == []


@pytest.mark.parametrize("answer", [HANG_UP, ResponseCode.NO_PERMISSION])
async def test_a_failure_says_what_is_stored(answer):
    settings = SendSettings(timeout=DEADLINE, retries=0, batch_messages=1, batch_bytes=1000)
    bodies = [bytes(400) for _ in range(6)]
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        cluster.script = {"a": [0, answer]}

        with pytest.raises(SendFailed, match="2 of 6 messages are stored") as caught:
            await producer.send_many("orders", bodies, ordering_key=1)

    results = caught.value.results
    assert [result is not None for result in results] == [True, True, False, False, False, False]
    if answer != HANG_UP:
        assert isinstance(caught.value.cause, BrokerRefused)


@pytest.mark.parametrize("options", [{}, {"ordering_key": "o-1"}])
@pytest.mark.parametrize("place", [0, 500, 999])
async def test_one_bad_message_among_a_thousand_fails_alone(options, place):
    settings = SendSettings(timeout=DEADLINE, batch_bytes=20_000)
    bodies = [b"%d" % number for number in range(1000)]
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        cluster.refused = {bodies[place]}
        with pytest.raises(SendFailed, match="999 of 1000 messages are stored") as caught:
            await producer.send_many("orders", bodies, **options)
        counted = producer.statistics()

    missing = [number for number, result in enumerate(caught.value.results) if result is None]
    assert missing == [place]
    assert isinstance(caught.value.cause, BrokerRefused)
    assert (counted.sent, counted.failed) == (999, 1)
    del bodies[place]
    assert (cluster.bodies if options else sorted(cluster.bodies, key=int)) == bodies


async def test_frames_that_are_too_large_for_a_broker_are_stored_in_parts():
    def small(settings: BrokerSettings) -> BrokerSettings:
        return replace(settings, send=replace(settings.send, max_message_size=100_000))

    def work() -> list[int]:
        with (
            EmbeddedCluster(adjust=small) as cluster,
            Producer("svc", name_server=cluster.name_server) as producer,
        ):
            cluster.create_topic("orders", queues=4)
            results = producer.send_many("orders", [bytes(2000)] * 1000, ordering_key=1)
            return [result.queue_offset for result in results]

    assert await asyncio.to_thread(work) == list(range(1000))


async def test_nothing_and_no_topic():
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        nothing = await producer.send_many("orders", [])
        with pytest.raises(SendFailed, match="0 of 1 messages are stored") as caught:
            await producer.send_many("nowhere", [b"x"])

    assert (len(nothing), nothing.is_ok, list(nothing), cluster.sent) == (0, True, [], [])
    assert nothing.to_arrow().num_rows == 0
    assert isinstance(caught.value.cause, NoRoute)


async def test_bodies_may_come_from_a_generator():
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        results = await producer.send_many("orders", (each for each in (b"a", b"b")))

    assert (len(results), results.is_ok) == (2, True)


async def test_a_blocking_producer_sends_columns(cluster):
    def work() -> list[bool]:
        with Producer("svc", name_server=cluster.name_server) as producer:
            results = producer.send_many("orders", [b"a", b"b"])
            again = producer.send_arrow("orders", pa.RecordBatch.from_pydict({"body": ["c"]}))
            return [each is not None and each.is_ok for each in (*results, *again)]

    assert await asyncio.to_thread(work) == [True] * 3
