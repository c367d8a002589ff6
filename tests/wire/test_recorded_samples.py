"""One frame of each kind that real clients and Apache's broker exchanged.

`data/recorded-frames.jsonl` is a reduced recording (C++ 1.x and 2.1 and Java clients against Apache
RocketMQ 4.9.8): the decoded values of one frame for each client, kind and code. The frames are
built again from those values with the standard library, so that nothing under test made them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orbitmq.wire import bodies
from orbitmq.wire.codes import Language
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import lettered
from orbitmq.wire.javajson import Body, decode_body
from tests.support.wire import EXCHANGES, Exchange

Row = dict[str, Any]
ROWS: list[Row] = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "recorded-frames.jsonl").read_text().splitlines()
]
BODIES: dict[tuple[str, int], type[Body]] = {
    ("request", 34): bodies.HeartbeatData,
    ("request", 41): bodies.LockBatch,
    ("request", 42): bodies.LockBatch,
    ("request", 46): bodies.CheckClientRequest,
    ("reply", 38): bodies.ConsumerList,
    ("reply", 41): bodies.LockedQueues,
    ("reply", 105): bodies.TopicRouteData,
}


def asked(row: Row) -> int:
    """The code of the request that a frame is, or answers."""
    return int(row["code"] if row["kind"] == "request" else row["to"])


def name(row: Row) -> str:
    return f"{row['client']}-{row['kind']}-{asked(row)}-{row['code']}-{row['serialization']}"


def frame_of(row: Row) -> bytes:
    """The bytes of a frame with the recorded values."""
    fields = row["ext"]
    if row["serialization"] == "ROCKETMQ":
        packed = b"".join(
            struct.pack(">h", len(key.encode()))
            + key.encode()
            + struct.pack(">i", len(value.encode()))
            + value.encode()
            for key, value in (fields or {}).items()
        )
        remark = (row["remark"] or "").encode()
        language = [language.name for language in Language].index(row["language"])
        fixed = (row["code"], language, row["version"], row["opaque"], row["flag"], len(remark))
        header = struct.pack(">hbhiii", *fixed) + remark + struct.pack(">i", len(packed)) + packed
    else:
        outer = {key: row[key] for key in ("code", "flag", "language", "opaque", "version")}
        outer |= {} if fields is None else {"extFields": fields}
        outer |= {} if row["remark"] is None else {"remark": row["remark"]}
        header = json.dumps(outer).encode() + (b"\n" if row["language"] == "CPP" else b"")
    body: bytes = row.get("body", "").encode()
    kind = 1 << 24 if row["serialization"] == "ROCKETMQ" else 0
    return struct.pack(">iI", 4 + len(header) + len(body), kind | len(header)) + header + body


def read(row: Row) -> Command:
    (frame,) = FrameReader().feed(frame_of(row))
    return decode_command(frame)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_recorded_frame_is_read_with_the_values_that_were_sent(row):
    command = read(row)

    assert command.code == row["code"]
    assert command.opaque == row["opaque"]
    assert command.flag == row["flag"]
    assert command.version == row["version"]
    assert command.language.name == row["language"]
    assert (command.remark or "") == (row["remark"] or "")
    assert dict(command.ext_fields) == {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in (row["ext"] or {}).items()
    }


#: Answers that only say what went wrong have an empty map of fields, or none.
TYPED = [row for row in ROWS if row["kind"] == "request" or row["ext"]]


@pytest.mark.parametrize("row", TYPED, ids=name)
def test_a_recorded_frame_fits_the_header_of_its_code(row):
    exchange = EXCHANGES.get(asked(row), Exchange())
    is_request = row["kind"] == "request"

    kind = exchange.request if is_request else exchange.response
    header = read(row).header(kind)

    names = lettered(kind) if is_request and asked(row) in (310, 320) else kind
    for field in msgspec.structs.fields(names):
        sent = (row["ext"] or {}).get(field.encode_name)
        value = getattr(header, field.name)
        if sent is None:
            assert value == (None if field.required else field.default)
        elif isinstance(value, bool):
            assert value == (str(sent).lower() in ("true", "1"))
        elif value is None:
            assert sent == ""
        else:
            assert str(value) == str(sent)


@pytest.mark.parametrize("row", [row for row in ROWS if "body" in row], ids=name)
def test_a_recorded_body_fits_the_declaration_of_its_code(row):
    command = read(row)

    body = decode_body(BODIES[row["kind"], asked(row)], command.body)

    text = row["body"]
    if isinstance(body, bodies.HeartbeatData):
        assert f'"{body.client_id}"' in text
        assert len(body.consumer_data_set) + len(body.producer_data_set) == text.count(
            '"groupName"'
        )
        topics = [s.topic for c in body.consumer_data_set for s in c.subscription_data_set]
        assert all(f'"topic":"{topic}"' in text for topic in topics)
    elif isinstance(body, bodies.TopicRouteData):
        assert [data.broker_addrs for data in body.broker_datas] == [{0: "127.0.0.1:10911"}]
        assert body.queue_datas[0].broker_name == "broker-a"
    elif isinstance(body, bodies.LockBatch):
        assert len(body.mq_set) == text.count('"queueId"') > 0
    elif isinstance(body, bodies.LockedQueues):
        assert len(body.lock_ok_mq_set) == text.count('"queueId"') > 0
    elif isinstance(body, bodies.ConsumerList):
        assert json.loads(text)["consumerIdList"] == list(body.consumer_id_list)
    else:
        assert isinstance(body, bodies.CheckClientRequest)
        assert body.subscription_data is not None
        assert body.subscription_data.expression_type == "SQL92"


def test_the_sample_holds_every_family_of_clients_and_both_serializations():
    assert {row["client"] for row in ROWS} == {
        "cpp044",
        "cpp210",
        "cpprc2",
        "java-json",
        "java-binary",
    }
    assert {row["serialization"] for row in ROWS} == {"JSON", "ROCKETMQ"}
