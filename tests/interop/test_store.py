"""A store folder passes between OrbitMQ and Apache's broker in both directions.

What one side wrote, the other serves in full: bodies, properties, queue offsets, lookups by key
and by offset id. Apache's view is its own client's, through its own broker.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from orbitmq.message import decode_messages, decode_properties, encode_properties, record
from orbitmq.message.stored import compress_body
from orbitmq.store.settings import IndexSettings, StoreSettings
from orbitmq.store.store import Store
from tests.interop.apache import BROKER_SETTINGS, Broker, Driver, NameServer, free_port
from tests.support.store import lookup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orbitmq.message import StoredMessage

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

FILE_SIZE = 64 * 1024
#: The same shape of files on both sides; a few dozen messages fill a log file.
SAME_FILES = {"mappedFileSizeCommitLog": FILE_SIZE}
SETTINGS = StoreSettings(
    file_size=FILE_SIZE,
    max_record=32 * 1024,
    preallocate_step=0,
    queue_file_entries=int(str(BROKER_SETTINGS["mappedFileSizeConsumeQueue"])) // 20,
    index_file=IndexSettings(
        slots=int(str(BROKER_SETTINGS["maxHashSlotNum"])),
        entries=int(str(BROKER_SETTINGS["maxIndexNum"])),
    ),
    delay_levels=tuple(float(level) for level in range(1, 19)),
)
BORN_HOST = record.pack_host("127.0.0.1", 4711)
BORN = 1_700_000_000_000
TOPICS = {"Orders": 3, "Payments": 1, "Later": 2}
SCHEDULE = "SCHEDULE_TOPIC_XXXX"

#: Put there by the client on reading.
NOT_STORED = frozenset({"MIN_OFFSET", "MAX_OFFSET"})


@dataclass(frozen=True, slots=True)
class View:
    """A message as either side shows it.

    The flag of compressed bodies is left out: the 5.x client clears it as it expands a body.
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    flag: int
    born_ms: int
    store_ms: int
    born_host: str
    store_host: str
    reconsume_times: int
    properties: tuple[tuple[str, str], ...]
    body: bytes


class Given(NamedTuple):
    """What of a message was handed to our store; the rest is the store's to decide."""

    topic: str
    queue_id: int
    flag: int
    born_ms: int
    born_host: str
    reconsume_times: int
    properties: tuple[tuple[str, str], ...]
    body: bytes


def what_was_given(view: View) -> Given:
    return Given(*(getattr(view, name) for name in Given.__annotations__))


def numbered_by_queue(given: list[Given]) -> list[int]:
    """The queue offsets of messages in the order of their queues: each queue counts from 0."""
    sizes = Counter((each.topic, each.queue_id) for each in given)
    return [number for queue in sorted(sizes) for number in range(sizes[queue])]


def seen_by_us(message: StoredMessage) -> View:
    return View(
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.physical_offset,
        message.sys_flag & ~record.COMPRESSED,
        message.flag,
        message.born_ms,
        message.store_ms,
        "{}:{}".format(*message.born_host),
        "{}:{}".format(*message.store_host),
        message.reconsume_times,
        tuple(sorted(message.properties.items())),
        message.body,
    )


def seen_by_apache(line: dict[str, Any]) -> View:
    properties = {n: v for n, v in line["properties"].items() if n not in NOT_STORED}
    return View(
        line["topic"],
        line["queueId"],
        line["queueOffset"],
        line["commitLogOffset"],
        line["sysFlag"] & ~record.COMPRESSED,
        line["flag"],
        line["bornTimestamp"],
        line["storeTimestamp"],
        line["bornHost"],
        line["storeHost"],
        line["reconsumeTimes"],
        tuple(sorted(properties.items())),
        base64.b64decode(line["body"]),
    )


@pytest.fixture
def name_server(release, tmp_path):
    """One that knows no other broker: these have topics and a name that others have as well."""
    with NameServer.running(release, tmp_path / "names") as running:
        yield running


def test_apache_serves_what_we_stored_and_leaves_a_store_that_we_continue(
    release, name_server, tmp_path
):
    root = tmp_path / "store"
    port = free_port(neighbours=(-2, 1))
    with Store(root, SETTINGS, store_host=("127.0.0.1", port)) as store:
        given = fill(store)
        ours = everything(store, "Orders", "Payments")
        ids = list(offset_ids(store, "Orders"))[::20]
    assert len(list((root / "commitlog").iterdir())) >= 3
    write_topics(root, TOPICS)

    with Broker.running(
        release,
        tmp_path / "broker",
        name_server.address,
        store=root,
        port=port,
        settings=SAME_FILES,
    ) as broker:
        driver = Driver(release, tmp_path / "client", name_server.address, broker.address)
        theirs = pulled(driver, "Orders,Payments")
        shared = looked_up(driver, "Orders", "shared")
        single = looked_up(driver, "Orders", "order-7,order-100")
        viewed = [
            seen_by_apache(line)
            for line in driver.run("view", {"topic": "Orders", "ids": ",".join(ids)})
        ]
        due = driver.run("consume", {"topic": "Later", "group": "late", "count": 1})
        driver.run("send", {"topic": "Orders", "count": 60, "size": 2000, "keys": "apache-"})
        in_the_end = pulled(driver, "Orders,Payments,Later")

    assert theirs == ours
    assert sorted(map(what_was_given, theirs), key=repr) == sorted(given, key=repr)
    assert [view.queue_offset for view in theirs] == numbered_by_queue(given)
    assert {view.store_host for view in theirs} == {f"127.0.0.1:{port}"}
    assert shared == [view for view in ours if "shared" in keys_of(view)]
    assert single == [view for view in ours if {"order-7", "order-100"} & keys_of(view)]
    assert sorted(viewed, key=position) == [
        view for view in ours if offset_id_of(view, port) in ids
    ]
    assert [base64.b64decode(line["body"]) for line in due] == [b"parked"]
    assert not (root / "abort").exists()

    with Store(root, SETTINGS, store_host=("127.0.0.1", port)) as store:
        assert store.recovery.was_clean
        assert everything(store, *TOPICS) == in_the_end
        assert [v.body for v in found(store, "Orders", "apache-59")] == [
            v.body for v in in_the_end if "apache-59" in keys_of(v)
        ]
        number = store.append("Orders", 0, b"more", properties_of("more"), BORN, BORN_HOST)[1]
        store.write()
        assert number == 1 + max(
            v.queue_offset for v in in_the_end if (v.topic, v.queue_id) == ("Orders", 0)
        )
    with Store(root, SETTINGS) as store:
        assert [v.body for v in everything(store, "Orders") if v.queue_id == 0][-1] == b"more"


@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_we_serve_what_apache_stored(release, name_server, tmp_path, ending):
    root = tmp_path / "store"
    topics = ("Orders", "Payments", "Sagas")
    port = free_port(neighbours=(-2, 1))
    with Broker.running(
        release,
        tmp_path / "broker",
        name_server.address,
        store=root,
        port=port,
        settings=SAME_FILES,
    ) as broker:
        driver = Driver(release, tmp_path / "client", name_server.address, broker.address)
        driver.run("topic", {"topics": "Orders,Payments,Sagas,Later", "queues": 2})
        sent = driver.run("send", {"topic": "Orders", "count": 80, "size": 1500, "keys": "order-"})
        driver.run("send", {"topic": "Orders", "count": 30, "batch": 10, "tag": "red,blue"})
        for kind in ("ZLIB", "LZ4", "ZSTD"):
            driver.run("send", {"topic": "Payments", "count": 3, "size": 9000, "compression": kind})
        driver.run("transaction", {"topic": "Sagas", "count": 3})
        driver.run("consume", {"topic": "Sagas", "group": "sagas", "count": 2})
        driver.run("send", {"topic": "Later", "delay": 18, "prefix": "late-"})
        theirs = pulled(driver, ",".join(topics))
        if ending == "killed":
            broker.server.kill()

    assert len(theirs) == 80 + 30 + 9 + 2
    assert (root / "abort").exists() == (ending == "killed")
    assert len(list((root / "commitlog").iterdir())) >= 3

    with Store(root, SETTINGS, store_host=("127.0.0.1", port)) as store:
        assert store.recovery.was_clean == (ending == "stopped")
        assert everything(store, *topics) == theirs
        assert compressions(store, "Payments") == {
            record.COMPRESSION_ZLIB: 3,
            record.COMPRESSION_LZ4: 3,
            record.COMPRESSION_ZSTD: 3,
        }
        assert [
            seen_by_us(decode_messages(store.message_by_offset_id(line["offsetMsgId"]))[0]).body
            for line in sent
        ] == [expected_body(i, 1500) for i in range(80)]
        for i in (0, 41, 79):
            assert [v.body for v in found(store, "Orders", f"order-{i}")] == [
                expected_body(i, 1500)
            ]
        assert [v.body for v in found(store, "Orders", sent[5]["msgId"])] == [
            expected_body(5, 1500)
        ]
        (parked,) = everything(store, SCHEDULE)
        assert parked.queue_id == 17
        assert dict(parked.properties)["REAL_TOPIC"] == "Later"
        store.append("Orders", 1, b"ours", properties_of("ours", keys="ours"), BORN, BORN_HOST)
        store.write()
        ours = everything(store, *topics)
    assert len(ours) == len(theirs) + 1

    with Broker.running(
        release,
        tmp_path / "broker",
        name_server.address,
        store=root,
        port=port,
        settings=SAME_FILES,
    ) as broker:
        driver = Driver(release, tmp_path / "client", name_server.address, broker.address)
        assert pulled(driver, ",".join(topics)) == ours
        assert [view.body for view in looked_up(driver, "Orders", "ours")] == [b"ours"]


def fill(store: Store) -> list[Given]:
    """Every kind of message, in several turns; what was given for Orders and Payments."""
    given: list[Given] = []

    def note(
        topic: str,
        queue_id: int,
        body: bytes,
        raw: bytes,
        flag: int = 0,
        late: int = 0,
        times: int = 0,
    ) -> bytes:
        properties = tuple(sorted(decode_properties(raw).items()))
        host = "127.0.0.1:4711"
        given.append(Given(topic, queue_id, flag, BORN + late, host, times, properties, body))
        return raw

    for i in range(250):
        body = bytes((i * j) % 256 for j in range(i * 11 % 1400))
        keys = f"order-{i}" + (" shared" if i % 30 == 0 else "")
        tag = ("red", "blue", "")[i % 3]
        raw = properties_of(f"single-{i}", keys=keys, tag=tag, colour="blau é")
        note("Orders", i % 3, body, raw, flag=i, late=i, times=i % 4)
        store.append("Orders", i % 3, body, raw, BORN + i, BORN_HOST, flag=i, reconsume_times=i % 4)
        if i % 7 == 0:
            store.write()
    for i, kind in enumerate(
        (record.COMPRESSION_ZLIB, record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD)
    ):
        body = b"again and again " * 400
        raw = note("Payments", 0, body, properties_of(f"compressed-{i}"))
        stored = compress_body(body, kind)
        store.append("Payments", 0, stored, raw, BORN, BORN_HOST, sys_flag=record.COMPRESSED | kind)
    elements = []
    for i in range(12):
        body = f"part {i}".encode()
        raw = note("Payments", 0, body, properties_of(f"batch-{i}", tag="batch"), flag=i)
        elements.append((body, i, raw))
    store.append_batch("Payments", 0, elements, BORN, BORN_HOST)
    parked = properties_of("parked", DELAY="1", REAL_TOPIC="Later", REAL_QID="1")
    store.append(SCHEDULE, 0, b"parked", parked, BORN, BORN_HOST)
    store.write()
    return given


def properties_of(name: str, *, keys: str = "", tag: str = "", **others: str) -> bytes:
    properties = {"UNIQ_KEY": unique_id(name), **others}
    if keys:
        properties["KEYS"] = keys
    if tag:
        properties["TAGS"] = tag
    return encode_properties(properties)


def unique_id(name: str) -> str:
    return name.encode().hex().upper().rjust(32, "0")[:32]


def expected_body(number: int, size: int) -> bytes:
    """What the driver puts into its message number `number`."""
    body = f"body-{number}"
    while len(body) < size:
        body += f" and on {len(body) + len(' and on ')}"
    return body.encode()


def everything(store: Store, *topics: str) -> list[View]:
    """All messages of topics, read through their queues."""
    views: list[View] = []
    for queue in store.queues():
        if queue.topic not in topics:
            continue
        at = queue.min_offset
        while at < queue.max_offset:
            result = store.read(queue.topic, queue.queue_id, at)
            assert result.next_offset > at
            at = result.next_offset
            for piece in result.pieces:
                views += [seen_by_us(message) for message in decode_messages(piece)]
    return sorted(views, key=position)


def compressions(store: Store, topic: str) -> Counter[int]:
    """How many messages of a topic are stored with each compression."""
    stored = (
        decode_messages(store.message_at(v.physical_offset))[0] for v in everything(store, topic)
    )
    return Counter(m.sys_flag & record.COMPRESSION_TYPE_MASK for m in stored if m.is_compressed)


def offset_ids(store: Store, topic: str) -> Iterator[str]:
    for view in everything(store, topic):
        yield decode_messages(store.message_at(view.physical_offset))[0].offset_id


def offset_id_of(view: View, port: int) -> str:
    return f"7F000001{port:08X}{view.physical_offset:016X}"


def found(store: Store, topic: str, key: str) -> list[View]:
    return [seen_by_us(decode_messages(each)[0]) for each in lookup(store, topic, key)]


def pulled(driver: Driver, topics: str) -> list[View]:
    return sorted(map(seen_by_apache, driver.run("pull", {"topics": topics})), key=position)


def looked_up(driver: Driver, topic: str, keys: str) -> list[View]:
    lines = driver.run("query-key", {"topic": topic, "keys": keys})
    return sorted(map(seen_by_apache, lines), key=position)


def position(view: View) -> tuple[str, int, int]:
    return view.topic, view.queue_id, view.queue_offset


def keys_of(view: View) -> set[str]:
    return set(dict(view.properties).get("KEYS", "").split())


def write_topics(root: Path, topics: dict[str, int]) -> None:
    table = {
        name: {
            "order": False,
            "perm": 6,
            "readQueueNums": queues,
            "topicFilterType": "SINGLE_TAG",
            "topicName": name,
            "topicSysFlag": 0,
            "writeQueueNums": queues,
        }
        for name, queues in topics.items()
    }
    version = {"counter": 1, "timestamp": BORN}
    (root / "config").mkdir()
    (root / "config" / "topics.json").write_text(
        json.dumps({"dataVersion": version, "topicConfigTable": table})
    )
