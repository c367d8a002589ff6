"""Sends: what is stored and answered, what is refused in which order, and when it is flushed."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_changes

from orbitmq.broker.broker import Parts
from orbitmq.broker.settings import ReplySettings, SendSettings
from orbitmq.broker.writes import BatchPlace, SendAnswers
from orbitmq.clock import milliseconds
from orbitmq.message.ids import decode_unique_id
from orbitmq.message.properties import encode_properties
from orbitmq.message.record import INNER_BATCH, pack_host
from orbitmq.message.stored import decode_messages, encode_batch
from orbitmq.store.settings import DiskFull, FlushPolicy, StoreFailed, WriteFailed
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode, Serialization
from orbitmq.wire.command import Command, command_pieces, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import PushReplyRequest, SendMessageResponse
from tests.support.broker import GROUP, SMALL_STORE, bodies_in, messages_in, send_header, until
from tests.support.delivery import AskedProducer, hand_broker, send_back
from tests.support.slowdisk import GatedFiles
from tests.support.store import FailingFiles

CODES = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2)

#: A name that comes last among those allowed.
LONGEST_TOPIC = "t" * 127


# What is stored and answered.


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("serialization", list(Serialization))
async def test_a_message_is_stored_and_its_place_is_answered(broker, client, code, serialization):
    properties = {"TAGS": "TagA", "UNIQ_KEY": "7F00000100001234", "colour": "grün"}

    answer = await client.connection.request(
        code,
        send_header("orders", 2, properties, flag=7, reconsume_times=3),
        body=b"payload",
        serialization=serialization,
    )

    place = answer.header(SendMessageResponse)
    assert answer.code == ResponseCode.SUCCESS
    assert answer.serialization is serialization
    assert (place.queue_id, place.queue_offset) == (2, 0)
    assert place.transaction_id == "7F00000100001234"
    assert (place.region, place.trace_on) == ("DefaultRegion", True)
    [message] = messages_in(await client.pull("orders", 2))
    assert bytes(message.body) == b"payload"
    assert (message.flag, message.reconsume_times, message.sys_flag) == (7, 3, 0)
    assert message.born_ms == 1_700_000_000_000
    assert message.born_host == tuple(client.connection.local)
    assert message.store_host == tuple(broker.address)
    assert place.msg_id == message.offset_id
    assert dict(message.properties) == properties | {
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }


async def test_every_answer_has_strings_for_values(client):
    """A C++ client takes a number for 0, and dies without `extFields`."""
    answers = [await client.send("orders"), await client.send("no topic")]

    for answer in answers:
        assert answer.has_ext_fields
        assert all(isinstance(value, str) for value in answer.ext_fields.values())
        assert answer.ext_fields["MSG_REGION"] == "DefaultRegion"
        assert answer.ext_fields["TRACE_ON"] == "true"


@pytest.mark.parametrize(
    ("properties", "stored"),
    [
        ("TAGS\x01a", {"TAGS": "a"}),
        ("TAGS\x01old\x02TAGS\x01a\x02", {"TAGS": "a"}),
        ("POP_CK\x010 1 2\x02KEYS\x01k\x02", {"POP_CK": None, "KEYS": "k"}),
        *(
            (f"UNIQ_KEY\x01{text}\x02", {"UNIQ_KEY": text})
            for text in ("plain42", 'qu"oted\\', "ünïcode", "²³", "a,b c")
        ),
    ],
)
async def test_properties_are_stored_as_they_are_without_those_of_pop(client, properties, stored):
    place = await client.stored("orders", properties=properties)

    [message] = messages_in(await client.pull("orders"))
    assert {name: message.properties.get(name) for name in stored} == stored
    assert message.properties["CLUSTER"] == "DefaultCluster"
    assert place.transaction_id == message.properties["UNIQ_KEY"]


@pytest.mark.parametrize(
    "properties",
    [None, "", "TAGS\x01a\x02", "KEYS\x01UNIQ_KEY\x02", "XUNIQ_KEY\x01no\x02", "UNIQ_KEY\x01\x02"],
)
async def test_a_message_without_a_unique_id_is_given_one(client, properties):
    place = await client.stored("orders", properties=properties)

    [message] = messages_in(await client.pull("orders"))
    assert place.transaction_id is not None
    assert message.properties["UNIQ_KEY"] == place.transaction_id
    assert decode_unique_id(place.transaction_id).address == "127.0.0.1"


@pytest.mark.parametrize(("topic", "end"), [("orders", 1), ("no topic", 0)])
async def test_a_one_way_send_is_not_answered(broker, client, topic, end):
    client.connection.notify(RequestCode.SEND_MESSAGE_V2, send_header(topic), body=b"quiet")

    # An answer would come before this one.
    assert await client.max_offset("orders") == 0
    await until(lambda: broker.parts.store.max_offset("orders", 0) == end)
    assert broker.parts.counters.failed_puts == 1 - end


@pytest.mark.parametrize(
    ("topic", "settings", "queue_id"),
    [
        ({}, {}, 3),
        # As with Apache's broker: clients are not routed there, and what comes is kept.
        ({"perm": 4}, {}, 3),
        ({"read_queue_nums": 8, "write_queue_nums": 2}, {}, 7),
        ({}, {"permission": 4}, 3),
        ({"attributes": {"cleanup.policy": "COMPACTION"}}, {}, 0),
        (None, {}, 3),
    ],
    ids=["usual", "not writable", "read only queue", "broker not writable", "compacted", "new"],
)
async def test_a_send_is_accepted_where_apache_accepts_it(
    start_broker, open_client, topic, settings, queue_id
):
    broker = await start_broker(**settings)
    if topic is not None:
        queues = {"read_queue_nums": 4, "write_queue_nums": 4}
        config = TopicConfig(topic_name="orders", **(queues | topic))
        broker.parts.topics.ensure(config, now=0.0)
    client = await open_client(broker)

    place = await client.stored("orders", b"kept", queue_id=queue_id)

    assert place.queue_id == queue_id
    assert bodies_in(await client.pull("orders", queue_id)) == [b"kept"]


# What is refused.


@dataclass(frozen=True)
class Case:
    """A send that is refused."""

    name: str
    code: ResponseCode
    remark: str
    send: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Parts], None] = lambda _: None


def _make(parts: Parts, topic: str, **fields: Any) -> None:
    parts.topics.update(TopicConfig(topic_name=topic, **fields), now=0.0)


def _order_topic(parts: Parts) -> None:
    _make(parts, "ordered", order=True, perm=6)


#: By the number of the check in Apache's broker, in the order in which they are made.
CASES = (
    Case("0 slave", ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]", settings={"broker_id": 1}),
    Case("1 no body", ResponseCode.SYSTEM_ERROR, "without a body", {"body": b""}),
    Case(
        "3 not accepting yet",
        ResponseCode.SYSTEM_ERROR,
        "broker unable to service",
        settings={"send": SendSettings(accept_from=4e9)},
    ),
    Case(
        "4 not writable, order topic",
        ResponseCode.NO_PERMISSION,
        "sending message is forbidden",
        {"topic": "ordered"},
        {"permission": 4},
        _order_topic,
    ),
    Case("5 blank topic", ResponseCode.INVALID_PARAMETER, "must have a name", {"topic": " "}),
    Case("5 bad topic", ResponseCode.INVALID_PARAMETER, "illegal characters", {"topic": "a b"}),
    Case("5 long topic", ResponseCode.INVALID_PARAMETER, "can have 127", {"topic": "t" * 128}),
    Case("6 ours", ResponseCode.NO_PERMISSION, "not allowed", {"topic": "SCHEDULE_TOPIC_XXXX"}),
    Case("6 ours too", ResponseCode.NO_PERMISSION, "not allowed", {"topic": "SELF_TEST_TOPIC"}),
    Case(
        "7 unknown, no auto-creation",
        ResponseCode.TOPIC_NOT_EXIST,
        "does not exist",
        settings={"auto_create_topic": False},
    ),
    Case(
        "7 unknown, template without inheritance",
        ResponseCode.TOPIC_NOT_EXIST,
        "'BenchmarkTest'",
        {"default_topic": "BenchmarkTest"},
    ),
    Case(
        "9 no queue to write",
        ResponseCode.SYSTEM_ERROR,
        "no queue that can be written",
        {"topic": "readonly", "queue_id": -1},
        prepare=lambda parts: _make(parts, "readonly", read_queue_nums=4, write_queue_nums=0),
    ),
    Case("8 queue", ResponseCode.INVALID_PARAMETER, "queueId[4] is illegal", {"queue_id": 4}),
    Case(
        "10 no group",
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "subscription group [nobody] does not exist",
        {"topic": "%RETRY%nobody"},
        {"auto_create_group": False},
    ),
    Case(
        "19 inner batch by flag",
        ResponseCode.MESSAGE_ILLEGAL,
        "batch inside one message",
        {"sys_flag": INNER_BATCH},
    ),
    Case(
        "19 inner batch by property",
        ResponseCode.MESSAGE_ILLEGAL,
        "batch inside one message",
        {"properties": {"INNER_NUM": "3"}},
    ),
    Case(
        "21 body",
        ResponseCode.MESSAGE_ILLEGAL,
        "msg body length limit 100B",
        {"body": b"x" * 101},
        {"send": SendSettings(max_message_size=100)},
    ),
    Case(
        "21 properties",
        ResponseCode.MESSAGE_ILLEGAL,
        "properties length limit 32KB",
        {"properties": "k\x01" + "v" * 32767},
    ),
)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_send_is_refused_with_the_code_of_its_check(start_broker, open_client, case, code):
    broker = await start_broker(**case.settings)
    case.prepare(broker.parts)
    client = await open_client(broker)

    answer = await client.send(**({"topic": "orders"} | case.send), code=code)

    assert (answer.code, answer.remark) == (case.code, answer.remark)
    assert case.remark in (answer.remark or "")
    assert broker.parts.store.statistics().log_end == 0


async def test_the_longest_topic_and_the_largest_body_are_taken(start_broker, open_client):
    client = await open_client(await start_broker(send=SendSettings(max_message_size=100_000)))

    answer = await client.send(LONGEST_TOPIC, b"x" * 100_000)

    assert answer.code == ResponseCode.SUCCESS
    assert bodies_in(await client.pull(LONGEST_TOPIC)) == [b"x" * 100_000]


# Retries and dead letters.


@pytest.mark.parametrize(
    ("fields", "group", "version", "is_dead"),
    [
        ({"reconsume_times": 17}, {}, 479, True),
        ({"reconsume_times": 16}, {}, 479, False),
        ({"reconsume_times": 3}, {"retry_max_times": 2}, 479, True),
        ({"reconsume_times": 3, "max_reconsume_times": 3}, {"retry_max_times": 2}, 479, False),
        ({"reconsume_times": 4, "max_reconsume_times": 3}, {"retry_max_times": 20}, 479, True),
        # `maxReconsumeTimes` counts from version 3.4.9 on.
        ({"reconsume_times": 5, "max_reconsume_times": 1}, {}, 121, True),
        ({"reconsume_times": 5, "max_reconsume_times": 1}, {}, 120, False),
    ],
)
async def test_a_message_that_failed_too_often_becomes_a_dead_letter(
    broker, open_client, fields, group, version, is_dead
):
    client = await open_client(broker, lambda request: with_changes(request, version=version))
    broker.parts.groups.update(SubscriptionGroupConfig(group_name="billing", **group), now=0.0)
    broker.parts.topics.ensure_retry("billing", 4, now=0.0)

    place = await client.stored("%RETRY%billing", b"bad", queue_id=2, **fields)

    store = broker.parts.store
    assert store.max_offset("%DLQ%billing", 0) == int(is_dead)
    assert store.max_offset("%RETRY%billing", 2) == int(not is_dead)
    assert place.queue_id == 2
    if is_dead:
        [message] = messages_in(await client.pull("%DLQ%billing"))
        assert message.topic == "%DLQ%billing"
        assert bytes(message.body) == b"bad"


# When the store cannot.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskFull("full"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (WriteFailed("bad"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (StoreFailed("broken"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (RuntimeError("a bug"), ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_a_write_that_fails_is_answered_to_all_its_senders(
    broker, client, monkeypatch, error, code
):
    store = broker.parts.store

    def refuse():
        store.discard()
        raise error

    monkeypatch.setattr(store, "write", refuse)
    answers = await asyncio.gather(*(client.send("orders") for _ in range(5)))
    monkeypatch.undo()

    assert {answer.code for answer in answers} == {code}
    assert all(str(error) in (answer.remark or "") for answer in answers)
    assert await client.max_offset("orders") == 0
    assert (await client.stored("orders", b"again")).queue_offset == 0


async def test_a_full_disk_refuses_sends_and_serves_readers(start_broker, open_client):
    disk = FailingFiles()
    broker = await start_broker(parts={"files": disk})
    client = await open_client(broker)
    await client.stored("orders", b"before")
    disk.ratio = 0.99
    broker.parts.store.clean()

    answers = await asyncio.gather(*(client.send("orders") for _ in range(3)))
    found = await client.pull("orders")
    disk.ratio = 0.1
    broker.parts.store.clean()

    assert {answer.code for answer in answers} == {ResponseCode.SERVICE_NOT_AVAILABLE}
    assert "99 percent full" in (answers[0].remark or "")
    assert bodies_in(found) == [b"before"]
    assert (await client.stored("orders")).queue_offset == 1


THREE = [(b"one", 1, b""), (b"two", 2, encode_properties({"TAGS": "b"})), (b"three", 3, b"")]


@pytest.mark.parametrize(
    "code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE]
)
async def test_a_batch_is_stored_as_single_messages_side_by_side(client, code):
    await client.stored("orders", b"before", queue_id=1)

    answer = await client.send(
        "orders",
        encode_batch(THREE),
        queue_id=1,
        code=code,
        batch=True,
        properties={"UNIQ_KEY": "BATCH1"},
        reconsume_times=2,
    )

    place = answer.header(SendMessageResponse)
    messages = messages_in(await client.pull("orders", 1, 1))
    assert answer.code == ResponseCode.SUCCESS
    assert (place.queue_id, place.queue_offset, place.transaction_id) == (1, 1, "BATCH1")
    assert [bytes(message.body) for message in messages] == [b"one", b"two", b"three"]
    assert [message.queue_offset for message in messages] == [1, 2, 3]
    assert [message.flag for message in messages] == [1, 2, 3]
    assert [message.tags for message in messages] == [None, "b", None]
    assert {message.reconsume_times for message in messages} == {2}
    assert place.msg_id.split(",") == [message.offset_id for message in messages]
    assert [dict(message.properties) for message in messages] == [{}, {"TAGS": "b"}, {}]


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"m": "true"}, 3), ({"m": "1"}, 3), ({"m": "false"}, 1), ({"m": "0"}, 1), ({}, 1)],
)
async def test_a_batch_is_recognised_by_its_field_alone(client, fields, count):
    """C++ clients send `1`, which Apache's broker does not understand."""
    letters = {"a": "makers", "b": "orders", "c": "TBW102", "d": "4", "e": "0"}
    letters |= {"f": "0", "g": "1700000000000", "h": "0"}

    answer = await client.connection.request(
        RequestCode.SEND_BATCH_MESSAGE, body=encode_batch(THREE), extra=letters | fields
    )

    assert answer.code == ResponseCode.SUCCESS
    assert await client.max_offset("orders") == count


@pytest.mark.parametrize(
    ("topic", "body", "code", "remark"),
    [
        (
            "%RETRY%billing",
            encode_batch(THREE),
            ResponseCode.MESSAGE_ILLEGAL,
            "retry group billing",
        ),
        ("%DLQ%" + "g" * 123, encode_batch(THREE), ResponseCode.MESSAGE_ILLEGAL, "too long 128"),
        ("orders", b"no batch", ResponseCode.MESSAGE_ILLEGAL, "no batch element at byte 0"),
        ("orders", encode_batch(THREE)[:-1], ResponseCode.MESSAGE_ILLEGAL, "no batch element"),
        ("orders", b"", ResponseCode.SYSTEM_ERROR, "without a body"),
        ("no topic", encode_batch(THREE), ResponseCode.INVALID_PARAMETER, "illegal characters"),
    ],
)
async def test_a_batch_that_cannot_be_stored_is_refused_as_a_whole(
    broker, client, topic, body, code, remark
):
    answer = await client.send(topic, body, batch=True)

    assert answer.code == code
    assert remark in (answer.remark or "")
    assert broker.parts.store.statistics().log_end == 0


ANSWERS = SendAnswers("DefaultRegion", pack_host("127.0.0.1", 10911), trace_on=True)

int31 = st.integers(0, 2**31 - 1)
int63 = st.integers(0, 2**63 - 1)
unique_ids = st.text("0123456789ABCDEF", min_size=1) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1
)


@given(opaque=int31, at=int63, queue_id=int31, number=int63, unique_id=unique_ids)
def test_the_quick_way_the_template_and_the_encoder_say_the_same(
    opaque, at, queue_id, number, unique_id
):
    place = (at, queue_id, number, unique_id)

    quick = ANSWERS.success(opaque, place)
    told = []
    for serialization in Serialization:
        request = Command.request(
            RequestCode.SEND_MESSAGE_V2, opaque=opaque, serialization=serialization
        )
        told.append(b"".join(ANSWERS.stored(0, request, place)))

    assert told[Serialization.JSON] == quick
    for frame in FrameReader().feed(b"".join((quick, *told))):
        answer = decode_command(frame)
        assert (answer.code, answer.opaque, answer.is_response) == (0, opaque, True)
        assert answer.header(SendMessageResponse) == SendMessageResponse(
            msg_id=f"7F00000100002A9F{at:016X}",
            queue_id=queue_id,
            queue_offset=number,
            transaction_id=unique_id,
            region="DefaultRegion",
            trace_on=True,
        )


@given(
    opaque=int31,
    offsets=st.lists(int63, min_size=1),
    queue_id=int31,
    number=int63,
    unique_id=st.none() | unique_ids,
)
def test_the_answer_to_a_batch_names_all_its_messages_whichever_way_it_is_made(
    opaque, offsets, queue_id, number, unique_id
):
    place = BatchPlace(offsets, queue_id, number, unique_id)
    wanted = SendMessageResponse(
        msg_id=",".join(f"7F00000100002A9F{at:016X}" for at in offsets),
        queue_id=queue_id,
        queue_offset=number,
        transaction_id=unique_id,
        region="DefaultRegion",
        trace_on=True,
    )

    for serialization in Serialization:
        request = Command.request(
            RequestCode.SEND_BATCH_MESSAGE, opaque=opaque, serialization=serialization
        )
        told = b"".join(ANSWERS.stored(0, request, place))

        assert told == b"".join(command_pieces(request.answer(0, wanted)))


REPLIES = "DefaultCluster_REPLY_TOPIC"
PROPERTIES = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": "asker@1", "MSG_TYPE": "reply"}


@pytest.fixture
async def served(tmp_path):
    async with hand_broker(tmp_path) as served:
        yield served


@pytest.fixture
async def asker(served):
    asker = await AskedProducer.join(served[0].broker, "asker@1")
    yield asker
    await asker.close()


@pytest.mark.parametrize(
    "code", [RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2]
)
async def test_a_reply_is_pushed_to_the_client_that_asked_and_stored(served, asker, code):
    broker, client = served

    answer = await client.send(REPLIES, b"42", properties=PROPERTIES, code=code, flag=5)
    pushed = asker.replies[0]
    header = pushed.header(PushReplyRequest)
    stored = broker.messages(REPLIES)[0]

    assert answer.code == ResponseCode.SUCCESS
    assert bytes(pushed.body) == stored.body == b"42"
    assert header.topic == REPLIES
    assert header.flag == 5
    assert "CORRELATION_ID\x01c1" in (header.properties or "")
    assert "PUSH_REPLY_TIME\x01" in (header.properties or "")
    assert header.born_host == str(client.connection.local)
    assert header.store_host == str(broker.broker.address)
    assert header.store_timestamp == milliseconds(broker.clock.now())
    assert answer.header(SendMessageResponse).msg_id == stored.offset_id
    assert answer.ext_fields["MSG_REGION"] == "DefaultRegion"
    assert stored.properties == PROPERTIES


@pytest.mark.parametrize(
    ("properties", "reply_code", "text"),
    [
        ({"CORRELATION_ID": "c1"}, 0, "REPLY_TO_CLIENT"),
        (PROPERTIES | {"REPLY_TO_CLIENT": "nobody@1"}, 0, "nobody@1"),
        (PROPERTIES, 1, "as the test says"),
        (PROPERTIES, None, "asker@1 fail"),
    ],
    ids=["no client", "unknown client", "refused", "not answered"],
)
async def test_a_reply_that_does_not_arrive_is_stored_and_reported(
    tmp_path, properties, reply_code, text
):
    settings = ReplySettings(push_timeout=0.05 if reply_code is None else 30.0)
    async with hand_broker(tmp_path, replies=settings) as (broker, client):
        asker = await AskedProducer.join(broker.broker, "asker@1")
        asker.reply_code = reply_code

        answer = await client.send(
            REPLIES, b"42", properties=properties, code=RequestCode.SEND_REPLY_MESSAGE_V2
        )
        await asker.close()

        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert text in (answer.remark or "")
        assert broker.bodies(REPLIES) == [b"42"]


@pytest.mark.parametrize(
    ("fields", "changes", "code"),
    [
        ({"topic": "bad topic"}, {}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, {}, ResponseCode.NO_PERMISSION),
        ({"queue_id": 9}, {}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "unknown"}, {"auto_create_topic": False}, ResponseCode.TOPIC_NOT_EXIST),
        ({}, {"broker_id": 1}, ResponseCode.NO_PERMISSION),
        # It need not be stored.
        ({}, {"replies": ReplySettings(store=False)}, ResponseCode.SUCCESS),
    ],
)
async def test_the_checks_of_a_send_come_before_a_reply_is_pushed(tmp_path, fields, changes, code):
    async with hand_broker(tmp_path, **changes) as (broker, client):
        asker = await AskedProducer.join(broker.broker, "asker@1")
        arguments: dict[str, Any] = {"topic": REPLIES} | fields

        answer = await client.send(
            body=b"42", properties=PROPERTIES, code=RequestCode.SEND_REPLY_MESSAGE_V2, **arguments
        )
        await asker.close()

        assert answer.code == code
        assert len(asker.replies) == (code == ResponseCode.SUCCESS)
        assert broker.messages(REPLIES) == []


# Synchronous flushing.

SYNC_STORE = replace(SMALL_STORE, flush=replace(SMALL_STORE.flush, policy=FlushPolicy.SYNC))


@pytest.fixture
async def disk():
    files = GatedFiles()
    yield files
    files.error = None
    files.gate.set()


@pytest.fixture
async def start(disk, start_broker):
    async def start_one(**send):
        return await start_broker(
            store=SYNC_STORE, send=SendSettings(**send), parts={"files": disk}
        )

    yield start_one
    # Before the broker is stopped, which flushes.
    disk.gate.set()


async def test_a_send_is_answered_when_its_message_is_on_the_disk(start, open_client, disk):
    broker = await start()
    client = await open_client(broker)
    disk.gate.clear()

    sending = asyncio.ensure_future(client.stored("orders"))
    await until(lambda: disk.waiting)
    # Nobody sees it either, before it is safe.
    assert await client.max_offset("orders") == 0
    assert not sending.done()
    disk.gate.set()

    assert (await sending).queue_offset == 0
    assert bodies_in(await client.pull("orders")) == [b"hello"]


@pytest.mark.parametrize(
    ("level", "topic"), [(3, "SCHEDULE_TOPIC_XXXX"), (-1, f"%DLQ%{GROUP}")], ids=["retry", "dead"]
)
async def test_a_message_is_taken_back_when_its_copy_is_on_the_disk(
    start, open_client, disk, level, topic
):
    """The consumer forgets it then: a copy that the power takes would be lost for good."""
    broker = await start()
    client = await open_client(broker)
    await client.stored("orders", b"bad")
    (message,) = decode_messages((await client.pull("orders")).body)
    disk.gate.clear()

    returning = asyncio.ensure_future(send_back(client, message, level=level))
    await until(lambda: disk.waiting)
    # Answers of a connection that did not wait would have come before this one.
    await client.max_offset("orders")
    assert not returning.done()
    disk.gate.set()

    assert (await returning).code == ResponseCode.SUCCESS
    copies = [broker.parts.store.max_offset(topic, queue) for queue in range(4)]
    assert sum(copies) == 1


async def test_a_send_whose_flush_takes_too_long_is_answered_stored_but_not_flushed(
    start, open_client, disk
):
    broker = await start(flush_timeout=0.05)
    client = await open_client(broker)
    disk.gate.clear()

    answer = await client.send("orders", queue_id=3, properties={"UNIQ_KEY": "K1"})
    disk.gate.set()

    place = answer.header(SendMessageResponse)
    assert answer.code == ResponseCode.FLUSH_DISK_TIMEOUT
    assert (place.queue_id, place.queue_offset, place.transaction_id) == (3, 0, "K1")
    assert place.region == "DefaultRegion"
    await until(lambda: broker.parts.store.max_offset("orders", 3) == 1)
    # A disk that is slow today may be too slow for the next one as well.
    then = (await client.send("orders", queue_id=3)).header(SendMessageResponse)
    assert then.queue_offset == 1


@pytest.mark.parametrize(
    ("wait", "is_patient"), [("false", False), ("no", False), ("true", True), ("TRUE", True)]
)
async def test_a_message_may_say_that_it_does_not_wait(start, open_client, disk, wait, is_patient):
    broker = await start(flush_timeout=0.05)
    client = await open_client(broker)
    disk.gate.clear()

    answer = await client.send("orders", properties={"WAIT": wait})

    expected = ResponseCode.FLUSH_DISK_TIMEOUT if is_patient else ResponseCode.SUCCESS
    assert answer.code == expected


async def test_a_flush_that_fails_is_answered_to_its_senders_and_ends_all_writing(
    start, open_client, disk
):
    broker = await start()
    client = await open_client(broker)
    await client.stored("orders", b"safe")
    disk.error = OSError(errno.EIO, "injected")

    answers = await asyncio.gather(*(client.send("orders") for _ in range(3)))
    later = await client.send("orders")

    assert {answer.code for answer in answers} == {ResponseCode.SERVICE_NOT_AVAILABLE}
    assert later.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert bodies_in(await client.pull("orders")) == [b"safe"]


async def test_too_many_waiting_sends_make_the_broker_busy_until_the_disk_has_caught_up(
    start, open_client, disk
):
    broker = await start(waiting_messages=8)
    client = await open_client(broker)
    disk.gate.clear()
    waiting = [asyncio.ensure_future(client.stored("orders")) for _ in range(8)]
    await until(lambda: broker.parts.writes.is_busy)

    refused = await client.send("orders")
    batch = await client.send("orders", batch=True)
    disk.gate.set()
    await asyncio.gather(*waiting)

    assert refused.code == batch.code == ResponseCode.SYSTEM_BUSY
    assert (refused.remark or "").startswith("[OVERLOAD]system busy")
    assert (await client.send("orders")).code == ResponseCode.SUCCESS
    assert broker.parts.counters.busy_puts == 2


async def test_a_stop_answers_sends_that_wait_for_the_disk(start, open_client, disk):
    broker = await start()
    client = await open_client(broker)
    disk.gate.clear()
    waiting = asyncio.ensure_future(client.stored("orders"))
    await until(lambda: disk.waiting)

    stopping = asyncio.ensure_future(broker.stop())
    disk.gate.set()
    await stopping

    assert (await waiting).queue_offset == 0
