"""Commands to bytes and back, in both serializations."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from orbitmq.wire import codes, headers
from orbitmq.wire.command import Command, command_pieces, decode_command, encode_command
from orbitmq.wire.frame import Frame, FrameReader
from orbitmq.wire.javajson import object_of_strings, quoted
from tests.support.wire import EXCHANGES, texts

DATA = Path(__file__).parent / "data"

JSON_PULL = (
    b'{"code":11,"extFields":{"queueId":"1","topic":"T","queueOffset":"2","consumerGroup":"g"},'
    b'"flag":0,"language":"JAVA","opaque":7,"serializeTypeCurrentRPC":"JSON","version":475}'
)
BINARY_PULL = bytes.fromhex(
    "00000059 01000055 000b 00 01db 00000007 00000000 00000000 00000040"
    "0007 71756575654964 00000001 31"
    "0005 746f706963 00000001 54"
    "000b 71756575654f6666736574 00000001 32"
    "000d 636f6e73756d657247726f7570 00000001 67"
)
PULL_FIELDS = {"queueId": "1", "topic": "T", "queueOffset": "2", "consumerGroup": "g"}

int32 = st.integers(-(2**31), 2**31 - 1)
int16 = st.integers(-(2**15), 2**15 - 1)
commands = st.builds(
    Command,
    int16,
    int32,
    int32,
    st.sampled_from(codes.Language),
    int16,
    # Without the sign that answers put into words.
    st.none()
    | st.text(st.characters(codec="utf-8", exclude_characters="%"), min_size=1, max_size=20),
    st.binary(max_size=30),
    st.sampled_from(codes.Serialization),
    st.none(),
    st.none() | st.dictionaries(texts, texts, min_size=1, max_size=4),
)


def received(data: bytes) -> Command:
    (frame,) = FrameReader().feed(data)
    return decode_command(frame)


def json_command(header: bytes) -> Command:
    return decode_command(Frame(0, header))


@pytest.mark.parametrize("frame", [Frame(0, JSON_PULL, b"x" * 50), Frame(1, BINARY_PULL[8:], b"")])
def test_a_received_command_says_how_many_bytes_it_keeps(frame):
    command = decode_command(frame)

    kept = command.kept_bytes - len(frame.body)

    assert 40 < kept <= len(frame.header)
    assert Command.request(11, opaque=1, body=b"x" * 7).kept_bytes == 7


@pytest.mark.parametrize("data", [bytes.fromhex("000000b2000000ae") + JSON_PULL, BINARY_PULL])
def test_a_pull_of_a_java_client_reads_and_writes_to_the_byte(data):
    command = received(data)

    assert (command.code, command.opaque, command.flag) == (codes.RequestCode.PULL_MESSAGE, 7, 0)
    assert (command.language, command.version) == (codes.Language.JAVA, 475)
    assert dict(command.ext_fields) == PULL_FIELDS
    assert not command.is_response
    assert encode_command(command) == data


send_fields = st.fixed_dictionaries(
    dict.fromkeys("abc", texts),
    optional={
        **{name: st.integers(-3, 1 << 33).map(str) | texts for name in "defghjl"},
        **dict.fromkeys("in", texts),
        **{name: st.sampled_from(["true", "false", "", "1", None]) for name in "km"},
        "AccessKey": texts,
    },
)
whole_sends = st.fixed_dictionaries(
    {name: st.just(value) for name, value in zip("abcdefgh", "gtT40010", strict=True)},
    optional={"i": texts, "j": st.just("3"), "m": st.just("true"), "AccessKey": texts},
)
outer = st.fixed_dictionaries(
    {"opaque": st.integers(0, 9)},
    optional={
        "code": st.sampled_from([310, 11]),
        "flag": st.integers(0, 3),
        "language": st.sampled_from(["JAVA", "GO", "?", 1, None]),
        "version": st.integers(0, 500),
        "remark": texts | st.none(),
        "extFields": st.none() | send_fields | whole_sends,
    },
)


@given(fields=send_fields | whole_sends, rest=outer)
def test_a_send_is_read_in_one_go_to_the_same_end(fields, rest):
    """A blank before the code is enough for the ordinary way."""
    text = f'"code":310,"extFields":{json.dumps(fields)},{json.dumps(rest)[1:]}'.encode()

    quick = decode_command(Frame(0, b"{" + text, b"body"))
    usual = decode_command(Frame(0, b"{ " + text, b"body"))

    assert _read(quick, headers.SendMessageRequest) == _read(usual, headers.SendMessageRequest)
    assert quick.with_fields({"b": "x"}) == usual.with_fields({"b": "x"})


pull_numbers = ("queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset", "subVersion")
whole_pulls = st.fixed_dictionaries(
    {
        **dict.fromkeys(("consumerGroup", "topic"), texts),
        **{name: st.integers(-3, 1 << 30).map(str) for name in pull_numbers},
        "suspendTimeoutMillis": st.just("15000"),
    },
    optional={
        **dict.fromkeys(("subscription", "expressionType", "bname", "AccessKey"), texts),
        "maxMsgBytes": st.integers(-3, 1 << 33).map(str) | st.integers(0, 9) | texts,
        "lo": st.sampled_from(["true", "false", "", None]),
    },
)
pull_fields = st.dictionaries(
    st.sampled_from((*pull_numbers, "topic", "consumerGroup")), texts | st.none(), max_size=9
)


@given(fields=pull_fields | whole_pulls, rest=outer)
def test_a_pull_is_read_in_one_go_to_the_same_end(fields, rest):
    text = f'"code":11,"extFields":{json.dumps(fields)},{json.dumps(rest)[1:]}'.encode()

    quick = decode_command(Frame(0, b"{" + text, b"body"))
    usual = decode_command(Frame(0, b"{ " + text, b"body"))

    assert _read(quick, headers.PullMessageRequest) == _read(usual, headers.PullMessageRequest)
    assert quick.with_fields({"topic": "x"}) == usual.with_fields({"topic": "x"})


def _read(command: Command, kind: type[headers.Header]) -> tuple[object, ...]:
    """What somebody can know of a command: its header first, which must not need the map."""
    try:
        header: object = to_builtins(command.header(kind))
        other: object = to_builtins(command.header(headers.NoFields))
        fields: object = dict(command.ext_fields)
    except codes.HeaderError as error:
        return command.code, command.opaque, str(error)
    return command, header, other, fields


def test_an_answer_without_fields_has_no_map_of_them():
    header = (
        b'{"code":0,"flag":1,"language":"JAVA","opaque":7,'
        b'"serializeTypeCurrentRPC":"JSON","version":0}'
    )

    command = json_command(header)

    assert command.is_response
    assert dict(command.ext_fields) == {}
    assert not command.has_ext_fields
    assert encode_command(command)[8:] == header


def test_an_empty_map_of_fields_stays_one():
    header = (
        b'{"code":0,"extFields":{},"flag":1,"language":"JAVA","opaque":7,'
        b'"remark":"a\\nb","serializeTypeCurrentRPC":"JSON","version":409}'
    )

    assert encode_command(json_command(header))[8:] == header


@given(commands)
def test_commands_come_back_as_they_were(command):
    data = encode_command(command)

    again = received(data)

    assert again == command
    assert encode_command(again) == data
    assert b"".join(command_pieces(command)) == data


def test_strings_are_escaped_as_fastjson_escapes_them():
    written = (DATA / "fastjson-escapes.json").read_bytes()
    command = json_command(written)

    fields = object_of_strings(command.ext_fields)

    assert len(command.ext_fields["k"]) > 0x180
    assert b'"extFields":' + fields + b',"remark":' + quoted(command.remark or "") in written


@given(st.text(st.characters(), max_size=30))
def test_every_text_has_a_json_form_that_reads_back(text):
    expected = text.encode("utf-8", "replace").decode()

    assert json.loads(quoted(text)) == expected
    assert json.loads(object_of_strings({text: text})) == {expected: expected}


#: What peers send that differs from what Java writes, and what it means.
TOLERATED: dict[str, tuple[bytes, dict[str, object]]] = {
    "numbers and booleans as fields": (
        b'{"code":11,"opaque":1,"extFields":{"a":1,"b":true,"c":"x","d":false,"e":-2}}',
        {"ext_fields": {"a": "1", "b": "true", "c": "x", "d": "false", "e": "-2"}},
    ),
    "a null field": (b'{"code":11,"extFields":{"a":null,"b":"x"}}', {"ext_fields": {"b": "x"}}),
    "null fields": (b'{"code":11,"extFields":null}', {"ext_fields": {}, "has_ext_fields": False}),
    "an unknown language": (b'{"code":11,"language":"COBOL"}', {"language": codes.Language.OTHER}),
    "a language by number": (b'{"code":11,"language":9}', {"language": codes.Language.GO}),
    "a quoted code": (b'{"code":"11","version":"63"}', {"code": 11, "version": 63}),
    "no version, flag or opaque": (b'{"code":11}', {"version": 0, "flag": 0, "opaque": 0}),
    "unknown keys": (b'{"code":11,"suspended":false,"x":{"y":[1]}}', {"code": 11}),
    "a newline at the end": (b'{"code":11,"remark":""}\n', {"code": 11, "remark": ""}),
    "a lone surrogate": (
        b'{"code":11,"remark":"a\\ud800b","extFields":{"k":"\\udc00"}}',
        {"remark": "a?b", "ext_fields": {"k": "?"}},
    ),
    "the word null": (
        b'{"code":11,"remark":"null","extFields":{"a":"null"}}',
        {"remark": "null", "ext_fields": {"a": "null"}},
    ),
}


@pytest.mark.parametrize("habit", TOLERATED)
def test_habits_of_other_peers_are_understood(habit):
    header, expected = TOLERATED[habit]

    command = json_command(header)

    for name, value in expected.items():
        assert getattr(command, name) == value


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"11",
        b'{"code":"x"}',
        b'{"code":2147483648}',
        b"\xff{}",
        b'{"code":1,"extFields":' + b"[" * 100000,
        b'{"code":1,"extFields":[1]}x',
        b'{"code":1,"remark":"\xff"}',
        b'{"code":1,"opaque":{}}',
    ],
)
def test_a_header_that_is_no_command_closes_the_connection(header):
    with pytest.raises(codes.FrameError):
        json_command(header)


@pytest.mark.parametrize("fields", [b"[1]", b"5", b'"x"', b'{"a":[1]}', b'{"a":{"b":1}}'])
def test_fields_that_are_no_map_of_strings_fail_the_request_only(fields):
    command = json_command(b'{"code":11,"opaque":5,"extFields":' + fields + b"}")

    assert command.opaque == 5
    with pytest.raises(codes.HeaderError, match="extFields"):
        dict(command.ext_fields)
    with pytest.raises(codes.HeaderError):
        command.header(headers.PullMessageRequest)


def test_more_fields_than_any_header_has_fail_the_request():
    fields = json.dumps({f"k{number}": "v" for number in range(1025)}).encode()

    with pytest.raises(codes.HeaderError, match="1024 are allowed"):
        dict(json_command(b'{"code":11,"extFields":' + fields + b"}").ext_fields)


@pytest.mark.parametrize("serialization", codes.Serialization)
@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        (codes.WireLimits(ext_fields=2), {"a": "1", "b": "2", "c": "3"}),
        (codes.WireLimits(ext_key=5), {"abcdef": "1"}),
        (codes.WireLimits(ext_value=5), {"a": "123456"}),
    ],
)
def test_limits_of_the_connection_hold_for_the_fields(limits, fields, serialization):
    sent = Command.request(11, opaque=1, extra=fields, serialization=serialization)
    (frame,) = FrameReader(limits).feed(encode_command(sent))

    assert dict(decode_command(frame).ext_fields) == fields
    with pytest.raises(codes.HeaderError, match="extFields"):
        dict(decode_command(frame, limits).ext_fields)


FIXED = bytes.fromhex("000b 00 01db 00000007 00000000")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        FIXED,
        FIXED + bytes.fromhex("00000000"),
        FIXED + bytes.fromhex("7fffffff 00000000"),
        FIXED + bytes.fromhex("ffffffff 00000000"),
        FIXED + bytes.fromhex("00000001 ff 00000000"),
        FIXED + bytes.fromhex("00000000 7fffffff"),
        FIXED + bytes.fromhex("00000000 00000000 00"),
    ],
)
def test_a_binary_header_with_wrong_lengths_closes_the_connection(header):
    with pytest.raises(codes.FrameError):
        decode_command(Frame(1, header))


@pytest.mark.parametrize(
    ("packed", "complaint"),
    [
        ("00", "within a length"),
        ("0001 61 0000", "within a length"),
        ("ffff 61 00000000", "name may have 1024 bytes, got -1"),
        ("0001 61 7fffffff", "may have 4194304 bytes"),
        ("0001 61 ffffffff", "got -1"),
        ("0001 61 00000002 62", "a field of 2 bytes with 1 left"),
        ("0001 ff 00000001 62", "not UTF-8"),
    ],
)
def test_binary_fields_with_wrong_lengths_fail_the_request(packed, complaint):
    fields = bytes.fromhex(packed)
    header = FIXED + bytes(4) + len(fields).to_bytes(4, "big") + fields
    command = decode_command(Frame(1, header))

    with pytest.raises(codes.HeaderError, match=complaint):
        dict(command.ext_fields)


def test_an_empty_text_survives_the_binary_form():
    fields = {"clientID": "c", "producerGroup": ""}
    command = received(
        encode_command(Command(35, 1, serialization=codes.Serialization.ROCKETMQ, _fields=fields))
    )

    header = command.header(headers.UnregisterClientRequest)

    assert dict(command.ext_fields) == fields
    assert header.producer_group == ""


def test_a_code_beyond_16_bits_cannot_be_sent_in_the_binary_form():
    pop = Command(codes.RequestCode.POP_MESSAGE, 1, serialization=codes.Serialization.ROCKETMQ)

    with pytest.raises(codes.EncodeError, match="200050"):
        encode_command(pop)


@pytest.mark.parametrize("serialization", codes.Serialization)
def test_an_answer_echoes_opaque_and_serialization(serialization):
    request = Command.request(310, opaque=77, serialization=serialization)

    answer = request.answer(
        codes.ResponseCode.SUCCESS,
        headers.SendMessageResponse(msg_id="ID", queue_id=3, queue_offset=5, trace_on=True),
        remark="fine",
    )

    assert (answer.opaque, answer.serialization) == (77, serialization)
    assert answer.flag == codes.Flag.RESPONSE
    assert dict(answer.ext_fields) == {
        "msgId": "ID",
        "queueId": "3",
        "queueOffset": "5",
        "TRACE_ON": "true",
    }
    assert received(encode_command(answer)) == answer


@pytest.mark.parametrize("serialization", codes.Serialization)
@pytest.mark.parametrize(
    ("remark", "said"),
    [
        ("topic[%RETRY%billing] not exist", "topic[RETRY of billing] not exist"),
        ("'%DLQ%billing' is full", "'DLQ of billing' is full"),
        ("topic 50%off", "topic 50(percent)off"),
        ("no consumer for %s%n%%RETRY%", "no consumer for (percent)s(percent)n(percent)RETRY of "),
        ("%DL%RETRY%Q%", "(percent)DLRETRY of Q(percent)"),
    ],
)
def test_the_remark_of_an_answer_is_no_format_for_printf(serialization, remark, said):
    request = Command.request(14, opaque=77, serialization=serialization)

    answer = received(
        encode_command(request.answer(codes.ResponseCode.SYSTEM_ERROR, remark=remark))
    )

    assert answer.remark == said
    assert "%" not in said


SEND = Command.request(
    codes.RequestCode.SEND_MESSAGE_V2,
    headers.SendMessageRequest(
        producer_group="p",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=1,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="TAGS\x01a\x02",
    ),
    opaque=9,
    body=b"body",
)
SAMPLES = [
    encode_command(SEND),
    encode_command(
        Command.request(
            310,
            SEND.header(headers.SendMessageRequest),
            opaque=9,
            serialization=codes.Serialization(1),
        )
    ),
    bytes.fromhex("000000b2000000ae") + JSON_PULL,
    BINARY_PULL,
]


@settings(max_examples=600)
@given(
    st.sampled_from(SAMPLES),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.sampled_from("=+-")),
        min_size=1,
        max_size=8,
    ),
)
def test_mutated_frames_raise_only_declared_errors_and_hold_little(sample, changes):
    data = bytearray(sample)
    for where, byte, change in changes:
        at = int(where * len(data))
        match change:
            case "=":
                data[at : at + 1] = bytes([byte])
            case "+":
                data[at:at] = bytes([byte])
            case _:
                del data[at : at + 1]
        if not data:
            return

    tracemalloc.start()
    try:
        for frame in FrameReader().feed(bytes(data)):
            command = decode_command(frame)
            command.header(EXCHANGES[310].request)
            command.header(headers.PullMessageRequest)
            encode_command(command)
    except codes.WireError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert peak < 2 * 1024 * 1024
