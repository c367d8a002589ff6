"""Rows as messages, without Spark."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.settings import BrokerSettings
from orbitmq.javahash import java_hash
from orbitmq.message.columns import text_of
from orbitmq.message.properties import decode_properties
from orbitmq.message.stored import BatchElement, split_batch
from orbitmq.spark import internals
from orbitmq.spark.options import write_options
from orbitmq.spark.write import (
    Origin,
    PartitionWritten,
    RowReader,
    RowRefused,
    Written,
    write_partition,
)
from orbitmq.testing.cluster import EmbeddedCluster

ORIGIN = Origin("query/3", 2)


def messages(rows: list[dict[str, Any]], *, topic: str | None = "orders") -> list[Any]:
    return list(RowReader(topic, ORIGIN).messages(pa.RecordBatch.from_pylist(rows)))


def only(row: dict[str, Any], *, topic: str | None = "orders") -> Written:
    (found,) = messages([row], topic=topic)
    assert isinstance(found, Written), found
    return found


def test_a_row_is_a_message():
    found = only(
        {
            "body": b"42",
            "tags": "paid",
            "keys": ["o-1", "c-7"],
            "properties": {"shop": "Köln", "UNIQ_KEY": "of another", "DELAY": "3"},
            "queueId": 3,
            "orderingKey": "c-7",
            "flag": 9,
        }
    )

    assert (found.topic, found.queue, found.key, found.is_delayed) == ("orders", 3, "c-7", False)
    assert (found.element.body, found.element.flag) == (b"42", 9)
    # Names of the system that came with a message that was read are set anew.
    assert decode_properties(found.element.properties) == {
        "shop": "Köln",
        "TAGS": "paid",
        "KEYS": "o-1 c-7",
        "__SHARDINGKEY": "c-7",
        "UNIQ_KEY": found.unique_id,
    }


def test_columns_may_be_null():
    nothing = dict.fromkeys(
        ("topic", "tags", "keys", "properties", "queueId", "orderingKey", "delayLevel", "deliverAt")
    )

    found = only({"body": "text", **nothing})

    assert (found.element.body, found.queue, found.key) == (b"text", None, None)
    assert list(decode_properties(found.element.properties)) == ["UNIQ_KEY"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"body": None}, "message.body must not be empty"),
        ({"body": b""}, "message.body must not be empty"),
        ({"body": b"x", "tags": "a\x01b"}, "message.tags must not contain"),
        ({"body": b"x", "tags": "a||b"}, "message.tags is 'a||b', but a message has one tag"),
        ({"body": b"x", "keys": "  "}, None),
        ({"body": b"x", "keys": ["a b"]}, "message.keys are separated by spaces"),
        ({"body": b"x", "queueId": -1}, "message.queueId must be 0 or more, got -1"),
        ({"body": b"x", "properties": {"a": "b\x02"}}, "must not contain"),
        ({"body": b"x", "properties": {"a": "b" * 40_000}}, "the properties take"),
        (
            {"body": b"x", "delayLevel": 1, "deliverAt": datetime(2030, 1, 1, tzinfo=UTC)},
            "deliver_at cannot be given together with delay_level",
        ),
    ],
)
def test_a_row_that_is_no_message_is_refused_and_the_next_is_read(row, words):
    first, second = messages([row, {"body": b"good"}])

    if words is None:
        assert isinstance(first, Written)
    else:
        assert isinstance(first, RowRefused)
        assert words in str(first)
        assert first.row == 0
    assert isinstance(second, Written)
    assert second.unique_id == ORIGIN.ids.of(1, "orders", BatchElement(b"good", 0, b""))


texts = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.text(st.sampled_from("ab \x01\x02\t\nKö\u3000"), max_size=6),
    st.sampled_from(["x" * 2000, "a||b"]),
)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "body": st.one_of(st.none(), st.binary(max_size=5)),
                "tags": texts,
                "keys": texts,
                "orderingKey": texts,
                "queueId": st.one_of(st.none(), st.integers(-3, 5)),
                "delayLevel": st.one_of(st.none(), st.none(), st.integers(0, 3)),
                "brokerName": st.sampled_from([None, "broker-a"]),
                "identity": st.sampled_from([None, "", "o-1"]),
            }
        ),
        min_size=1,
        max_size=10,
    ),
    chosen=st.sets(
        st.sampled_from(
            ["tags", "keys", "orderingKey", "queueId", "delayLevel", "brokerName", "identity"]
        )
    ),
)
def test_rows_that_are_read_together_are_what_each_is_alone(rows, chosen):
    """The quick way and the rule."""
    types = {"body": pa.binary(), "queueId": pa.int32(), "delayLevel": pa.int32()}
    names = ["body", *sorted(chosen)]
    schema = pa.schema([(name, types.get(name, pa.string())) for name in names])
    batch = pa.RecordBatch.from_pylist(
        [{name: row[name] for name in names} for row in rows], schema=schema
    )
    # With a column of properties, each row is checked by itself.
    empty = pa.array([[]] * len(rows), pa.map_(pa.string(), pa.string()))

    quick = list(RowReader("orders", ORIGIN).messages(batch))
    single = list(RowReader("orders", ORIGIN).messages(batch.append_column("properties", empty)))

    for found, alone in zip(quick, single, strict=True):
        if isinstance(alone, RowRefused):
            assert str(found) == str(alone)
        else:
            assert isinstance(found, Written)
            assert [each or None for each in found] == [each or None for each in alone]
    together = RowReader("orders", ORIGIN).plain_rows(batch, 1 << 20)
    if together is not None:
        written = [each for each in quick if isinstance(each, Written)]
        assert split_batch(together.encoded.data) == [each.element for each in written]
        assert text_of(together.ids).to_pylist() == [each.unique_id for each in written]


NO_TEXT = b"\xff\xfe"


def texts_of(*values: bytes) -> pa.StringArray:
    """A column as Spark makes it of bytes: it does not look whether they are a text."""
    return pa.array(values, pa.binary()).view(pa.string())


def test_rows_that_need_no_check_are_sent_together_up_to_a_size():
    bodies = [b"%d" % number for number in range(1000)]
    tags = [None if number % 3 else f"t{number}" for number in range(1000)]
    batch = pa.RecordBatch.from_pydict({"body": bodies, "tag": tags})
    reader, alone = (RowReader("orders", ORIGIN) for _ in range(2))
    for first in (0, 1000):
        together = reader.plain_rows(batch, 1000)

        singles = [each for each in alone.messages(batch) if isinstance(each, Written)]
        assert together is not None
        assert together.ids[0].tobytes().decode() == singles[0].unique_id
        assert split_batch(together.encoded.data) == [each.element for each in singles]
        assert first == 0 or singles[0].unique_id == ORIGIN.ids.of(
            1000, "orders", BatchElement(b"0", 0, b"TAGS\x01t0\x02")
        )

    assert reader.plain_rows(batch, 60) is None
    placed = batch.append_column("queueId", pa.array([1] * 1000))
    assert reader.plain_rows(placed, 1000) is None
    assert RowReader(None, ORIGIN).plain_rows(batch, 1000) is None


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        (
            "deliverAt",
            pa.array([None, 253_402_300_800_000_000, None], pa.timestamp("us", "UTC")),
            "column deliverAt is beyond the years 1 to 9999",
        ),
        (
            "deliverAt",
            pa.array([None, -62_135_596_800_000_001, None], pa.timestamp("us", "UTC")),
            "column deliverAt is beyond the years 1 to 9999",
        ),
        ("tags", texts_of(b"a", NO_TEXT, b"b"), "column tags is no text in UTF-8"),
        ("identity", texts_of(b"a", NO_TEXT, b"b"), "column identity is no text in UTF-8"),
        ("orderingKey", texts_of(b"a", NO_TEXT, b"b"), "column orderingKey is no text in UTF-8"),
        (
            "properties",
            pa.MapArray.from_arrays(
                pa.array([0, 0, 1, 1], pa.int32()), texts_of(b"shop"), texts_of(NO_TEXT)
            ),
            "column properties is no text in UTF-8",
        ),
    ],
)
def test_a_value_that_python_has_not_is_refused_with_its_row_and_column(column, values, said):
    batch = pa.RecordBatch.from_arrays([pa.array([b"x"] * 3), values], names=["body", column])
    reader = RowReader("orders", ORIGIN)

    assert len(list(reader.messages(batch))) == 3
    first, second, third = reader.messages(batch)

    assert isinstance(first, Written)
    assert isinstance(second, RowRefused)
    assert isinstance(third, Written)
    assert (second.row, second.problem) == (4, said)


contents = st.builds(BatchElement, st.binary(max_size=4), st.integers(0, 2), st.binary(max_size=4))


@given(
    origins=st.lists(
        st.tuples(st.text(max_size=20), st.integers(0, 10**6)), unique=True, max_size=8
    ),
    rows=st.lists(st.integers(0, 2**40), unique=True, max_size=8),
    written=st.lists(
        st.tuples(st.sampled_from(["orders", "invoices"]), contents), unique=True, max_size=8
    ),
)
def test_ids_are_unique_and_the_same_again(origins, rows, written):
    places = [(origin, row, *each) for origin in origins for row in rows for each in written]

    ids = [Origin(*origin).ids.of(row, topic, content) for origin, row, topic, content in places]

    assert len(set(ids)) == len(ids)
    again = [Origin(*origin).ids.of(row, topic, content) for origin, row, topic, content in places]
    assert ids == again
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)
    # Where other clients write the time.
    assert all(each[20:28] == "00000000" for each in ids)


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=2), min_size=2, max_size=12),
    cuts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    turn=st.integers(0, 11),
)
def test_however_a_batch_is_repeated_different_messages_have_different_ids(bodies, cuts, turn):
    """A repeated batch may come in other partitions and in another order."""
    seen: dict[str, bytes] = {}
    for partitions, rows in zip(cuts, (bodies, bodies[turn:] + bodies[:turn]), strict=True):
        ids = set()
        for partition in range(partitions):
            share = [{"body": body} for body in rows[partition::partitions]]
            if not share:
                continue
            reader = RowReader("orders", Origin("query/3", partition))
            for found in reader.messages(pa.RecordBatch.from_pylist(share)):
                assert isinstance(found, Written)
                body = bytes(found.element.body)
                assert seen.setdefault(found.unique_id, body) == body
                ids.add(found.unique_id)
        assert len(ids) == len(bodies)  # nor do equal rows become one


def test_a_row_may_say_what_its_id_is_made_of():
    rows = [{"body": b"a", "identity": "o-1"}, {"body": b"b", "identity": "o-2"}]

    here = [each.unique_id for each in messages(rows)]
    reader = RowReader("orders", Origin("another query/9", 7))
    there = list(reader.messages(pa.RecordBatch.from_pylist(rows[::-1])))

    assert here[0] != here[1]
    assert [each.unique_id for each in there if isinstance(each, Written)] == here[::-1]
    assert messages(rows[:1], topic="invoices")[0].unique_id != here[0]
    # It is no property of the message.
    assert only(rows[0]).element.properties == f"UNIQ_KEY\x01{here[0]}\x02".encode()


# ---- writing to brokers


MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def kept():
    """Tests in one process share what a worker keeps; producers end with their clusters here."""
    yield
    internals.writers.clear()


def write(
    cluster: EmbeddedCluster, rows: list[dict[str, Any]], *, origin: str = "query/1", **options: str
) -> PartitionWritten:
    texts = {"nameServer": cluster.name_server, **options}
    batch = pa.RecordBatch.from_pylist(rows)
    return write_partition(iter([batch]), write_options(texts, {}), Origin(origin, 0))


def sizes(cluster: EmbeddedCluster, topic: str) -> list[int]:
    found = sorted(cluster.messages(topic), key=lambda each: each.queue_offset)
    return [len(each.body) for each in found]


def places(cluster: EmbeddedCluster, topic: str, queues: int) -> dict[tuple[int, int], int]:
    """How many messages there are, by broker and queue."""

    def counts() -> dict[tuple[int, int], int]:
        return {
            (number, queue): broker.parts.store.max_offset(topic, queue)
            for number, broker in enumerate(cluster.brokers)
            for queue in range(queues)
        }

    return cluster.call(counts)


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param([4 * MIB], id="as large as a message may be"),
        pytest.param([200] * 900 + [4_100_000], id="large after small ones"),
        pytest.param([7, 4 * MIB, 8, 9, 300_000, 10], id="in the order of the rows"),
    ],
)
def test_every_row_that_may_be_sent_is_sent(cluster, topic, wanted):
    rows = [{"body": b"x" * size, "queueId": 1} for size in wanted]

    count = write(cluster, rows, topic=topic)

    assert count == PartitionWritten(0, len(wanted), 0)
    assert sizes(cluster, topic) == wanted


def small(settings: BrokerSettings) -> BrokerSettings:
    return dataclasses.replace(
        settings, send=dataclasses.replace(settings.send, max_message_size=10_000)
    )


def test_rows_of_a_key_go_to_its_queue_in_their_order_and_others_to_all_queues():
    rows = [
        {"body": f"{number}", "orderingKey": [None, "", "a", "b", "c"][number % 5]}
        for number in range(5000)
    ]
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=4)
        written = write(cluster, rows, topic="orders", sendBatchBytes="10000")

        found = cluster.messages("orders")

    assert (written.sent, len(found)) == (5000, 5000)
    numbers: dict[str, list[tuple[int, int]]] = {}
    queues: dict[str, set[int]] = {}
    for message in found:
        key = message.get_property("__SHARDINGKEY") or ""
        queues.setdefault(key, set()).add(message.queue_id)
        numbers.setdefault(key, []).append((message.queue_offset, int(message.body)))
    assert len(queues.pop("")) == 4
    assert queues == {key: {abs(java_hash(key)) % 4} for key in "abc"}
    for key in "abc":
        in_order = [number for _, number in sorted(numbers[key])]
        assert in_order == sorted(in_order)


def test_a_row_that_the_broker_refuses_is_named_or_left_out_and_no_other():
    """Only the broker knows what it takes; a batch of small rows may be too much for it too."""
    wanted = [3000] * 4 + [10_000, 10_001, 3001, 20_000] + [3002] * 9
    rows = [{"body": b"x" * size} for size in wanted]
    with EmbeddedCluster(adjust=small) as cluster:
        cluster.create_topic("orders", queues=1)

        with pytest.raises(RowRefused, match=r"row 5 of the partition .*limit 10000B.*badRows"):
            write(cluster, rows, topic="orders")
        cluster.create_topic("good", queues=1)
        count = write(cluster, rows, topic="good", badRows="skip")

        assert count == PartitionWritten(0, len(wanted) - 2, 2)
        assert sizes(cluster, "good") == [size for size in wanted if size <= 10_000]


def test_messages_that_were_read_go_to_the_queues_that_they_were_in():
    rows = [
        {"body": b"%d" % number, "brokerName": broker, "queueId": queue}
        for number, (broker, queue) in enumerate(
            [("broker-a", 0), ("broker-a", 1), ("broker-b", 0), ("broker-b", 1)] * 10
        )
    ]
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("same", queues=2)
        cluster.create_topic("smaller", queues=1)

        write(cluster, rows, topic="same")
        write(cluster, rows, topic="smaller")

        assert places(cluster, "same", 2) == {(0, 0): 10, (0, 1): 10, (1, 0): 10, (1, 1): 10}
        # No queue 1 here: what was in it stays together, in its order.
        found = [(each.queue_offset, int(each.body)) for each in cluster.messages("smaller")]
        assert sorted(number for _, number in found) == list(range(40))
        assert all(count % 10 == 0 for count in places(cluster, "smaller", 1).values())
        numbers = [number for _, number in found]
        for queue in range(4):
            theirs = [number for number in numbers if number % 4 == queue]
            assert theirs == sorted(theirs)


def test_without_the_name_of_a_broker_queues_are_counted_through():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)

        write(cluster, [{"body": b"x", "queueId": number} for number in (0, 3, 3)], topic="orders")

        assert places(cluster, "orders", 2) == {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 2}


def test_writes_of_many_groups_leave_few_producers_behind(cluster, topic):
    before = threading.active_count()

    for number in range(12):
        write(cluster, [{"body": b"x"}], topic=topic, producerGroup=f"group-{number}")

    assert threading.active_count() - before <= 4
    assert len(cluster.messages(topic)) == 12
