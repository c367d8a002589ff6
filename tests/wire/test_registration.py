"""The compressed form of a broker's registration."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.wire import bodies
from orbitmq.wire.codes import OUR_VERSION, BodyError, Gate, WireLimits

REGISTRATION = bodies.RegisterBroker(
    filter_server_list=("f",),
    topic_config_serialize_wrapper=bodies.TopicConfigTable(
        data_version=bodies.DataVersion(counter=3, timestamp=9),
        topic_config_table={
            "T": bodies.TopicConfig(
                topic_name="T",
                read_queue_nums=4,
                write_queue_nums=8,
                perm=6,
                attributes={"message.type": "FIFO and more"},
            ),
            "U": bodies.TopicConfig(topic_name="U"),
        },
        topic_queue_mapping_info_map={"S": bodies.QueueMappingInfo(topic="S", curr_id_map={0: 1})},
    ),
)


def test_a_compressed_registration_comes_back_as_it_was():
    compressed = bodies.compress_registration(REGISTRATION)

    assert bodies.decompress_registration(compressed, OUR_VERSION) == REGISTRATION
    assert bodies.body_crc32(compressed) == zlib.crc32(compressed) & 0x7FFFFFFF


def sized(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def test_a_registration_of_an_old_broker_has_neither_attributes_nor_mappings():
    plain = sized(b'{"counter":1,"timestamp":2}') + (1).to_bytes(4, "big")
    plain += sized(b"T 4 8 6 SINGLE_TAG", b"[]")

    table = bodies.decompress_registration(
        zlib.compress(plain), Gate.QUEUE_MAPPINGS - 1
    ).topic_config_serialize_wrapper

    assert table.data_version == bodies.DataVersion(counter=1, timestamp=2)
    assert table.topic_config_table == {
        "T": bodies.TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=8)
    }
    assert table.topic_queue_mapping_info_map == {}


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        (b"", "ends within a length"),
        ((2**31 - 1).to_bytes(4, "big"), "2147483647 bytes announced, 0 left"),
        (b"\xff\xff\xff\xff", "-1 bytes announced"),
        (sized(b"{}") + b"\xff\xff\xff\xff", "a count of -1"),
        (sized(b"{}") + (2**31 - 1).to_bytes(4, "big"), "ends within a length"),
        (sized(b"{}") + (1).to_bytes(4, "big") + sized(b"T 4"), "a topic that cannot be read"),
        (
            sized(b"{}") + (1).to_bytes(4, "big") + sized(b"T 4 8 99999999999 SINGLE_TAG"),
            "a topic that cannot be read",
        ),
        (sized(b"{}") + bytes(4) + sized(b"{}"), "filter servers"),
        (sized(b"x"), "not JSON"),
    ],
)
def test_a_compressed_registration_with_wrong_content_is_refused(plain, problem):
    with pytest.raises(BodyError, match=problem):
        bodies.decompress_registration(zlib.compress(plain), OUR_VERSION)


def test_a_registration_may_not_inflate_beyond_the_limit():
    bomb = zlib.compress(bytes(200_000), 9)

    assert len(bomb) < 1000
    with pytest.raises(BodyError, match="of more than 1000 bytes"):
        bodies.decompress_registration(bomb, OUR_VERSION, WireLimits(inflated=1000))


@given(st.floats(0, 1, exclude_max=True), st.binary(max_size=3))
def test_a_mutated_registration_raises_only_declared_errors(where, change):
    plain = zlib.decompress(bodies.compress_registration(REGISTRATION))
    at = int(where * len(plain))
    try:
        registration = bodies.decompress_registration(
            zlib.compress(plain[:at] + change + plain[at + 1 :], 1), OUR_VERSION
        )
    except BodyError:
        return

    # What is still a registration can be sent on.
    again = bodies.decompress_registration(bodies.compress_registration(registration), OUR_VERSION)
    assert again == registration


@given(st.binary(max_size=30))
def test_what_is_not_compressed_is_refused(data):
    with pytest.raises(BodyError):
        bodies.decompress_registration(data, OUR_VERSION)
