"""Many records at once: the same verdicts as one by one."""

from __future__ import annotations

import mmap
import tempfile
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message import scan
from orbitmq.message.record import RecordFault, check_record, end_of_file_record
from orbitmq.message.scan import ScanResult, scan_blocks, scan_records
from orbitmq.message.stored import decode_messages
from tests.support.message import (
    CRAFTED_DAMAGE,
    VECTOR_RECORD,
    mutations,
    plain_message,
    plain_pull,
    records,
    with_bytes,
)

if TYPE_CHECKING:
    pass


def one_by_one(
    buffer: bytes, *, check_crc: bool
) -> tuple[list[int], list[int], int, RecordFault | None]:
    """The model: each record judged alone, as `check_record` does."""
    starts: list[int] = []
    sizes: list[int] = []
    at = 0
    while at < len(buffer):
        verdict = check_record(buffer, at, len(buffer), check_crc=check_crc)
        if isinstance(verdict, RecordFault):
            return starts, sizes, at, verdict
        starts.append(at)
        sizes.append(verdict)
        at += verdict
    return starts, sizes, at, None


def verdict_of(found: ScanResult) -> tuple[list[int], list[int], int, RecordFault | None]:
    records = found.records
    return records.starts.tolist(), records.sizes.tolist(), found.stopped_at, found.fault


@pytest.fixture(params=[(3, 1), (8192, 512)], ids=["small blocks", "usual blocks"])
def _block_sizes(request):
    """Blocks and steps so small that their seams lie everywhere, and the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BLOCK_RECORDS", request.param[0])
        patch.setattr(scan, "_STEPS", request.param[1])
        patch.setattr(scan, "_FIRST_GUESS", min(2, request.param[0]))
        yield


@pytest.mark.usefixtures("_block_sizes")
class TestAgreement:
    """The scan and the one-by-one check, over everything hypothesis can think of."""

    @given(
        buffer=st.lists(st.one_of(records(), st.just(plain_message().encode())), max_size=8).map(
            b"".join
        ),
        check_crc=st.booleans(),
    )
    def test_on_valid_records(self, buffer, *, check_crc):
        found = scan_records(buffer, check_crc=check_crc)

        assert verdict_of(found) == one_by_one(buffer, check_crc=check_crc)
        assert found.fault is None

    @given(
        buffer=mutations(
            st.lists(st.one_of(records(), st.just(plain_message().encode())), max_size=6).map(
                b"".join
            )
        ),
        tail=st.sampled_from([b"", bytes(120), end_of_file_record(500) + bytes(90)]),
        check_crc=st.booleans(),
    )
    def test_on_damaged_records(self, buffer, tail, *, check_crc):
        found = scan_records(memoryview(buffer + tail), check_crc=check_crc)

        assert verdict_of(found) == one_by_one(buffer + tail, check_crc=check_crc)


@given(buffer=st.lists(records(), max_size=6).map(b"".join))
def test_fields_equal_those_of_the_decoded_messages(buffer):
    found = scan_records(buffer).records
    messages = decode_messages(buffer)

    assert found.queue_ids.tolist() == [m.queue_id for m in messages]
    assert found.queue_offsets.tolist() == [m.queue_offset for m in messages]
    assert found.physical_offsets.tolist() == [m.physical_offset for m in messages]
    assert found.sys_flags.tolist() == [m.sys_flag for m in messages]
    assert found.flags.tolist() == [m.flag for m in messages]
    assert found.magics.tolist() == [m.magic for m in messages]
    assert found.crcs.tolist() == [m.stored_crc for m in messages]
    assert found.born_ms.tolist() == [m.born_ms for m in messages]
    assert found.store_ms.tolist() == [m.store_ms for m in messages]
    assert found.reconsume_times.tolist() == [m.reconsume_times for m in messages]
    for row, message in enumerate(messages):
        body_at, topic_at = found.body_at[row], found.topic_at[row]
        topic_end = topic_at + found.topic_sizes[row]
        assert buffer[body_at : body_at + found.body_sizes[row]] == message.stored_body
        assert message.topic_field.endswith(buffer[topic_at:topic_end])
        assert buffer[topic_at:topic_end].decode() == message.topic
        assert buffer[found.properties_at[row] : found.ends[row]] == message.raw_properties


@pytest.mark.parametrize(
    ("tail", "fault"),
    [
        (b"", None),
        (bytes(5), RecordFault.CUT_SHORT),
        (bytes(4000), RecordFault.EMPTY),
        (end_of_file_record(4000) + bytes(3992), RecordFault.END_OF_FILE),
        (plain_message().encode()[:-1], RecordFault.CUT_SHORT),
        (with_bytes(plain_message().encode(), 88, b"H"), RecordFault.BAD_CRC),
    ],
)
def test_the_scan_tells_where_and_why_it_stopped(tail, fault):
    good = plain_pull(1000)

    found = scan_records(good + tail)

    assert (len(found.records), found.stopped_at, found.fault) == (1000, len(good), fault)


@pytest.mark.parametrize("damaged", CRAFTED_DAMAGE.values(), ids=CRAFTED_DAMAGE.keys())
@pytest.mark.parametrize("after", [b"", plain_message().encode() * 3], ids=["at the end", "before"])
def test_crafted_damage_stops_the_scan_as_the_check_says(damaged, after):
    buffer = VECTOR_RECORD + damaged + after

    found = scan_records(buffer, check_crc=False)

    assert verdict_of(found) == one_by_one(buffer, check_crc=False)
    assert found.stopped_at == len(VECTOR_RECORD)


def test_the_checksum_of_an_empty_body_does_not_matter():
    record = with_bytes(plain_message(body=b"").encode(), 8, b"\x12\x34\x56\x78")

    found = scan_records(record * 3)

    assert (len(found.records), found.fault) == (3, None)


@pytest.mark.parametrize("size", [10, 5000], ids=["small bodies", "large bodies"])
def test_checksums_are_looked_at_whatever_the_bytes_lie_in(size):
    pull = plain_pull(20, lambda n: bytes([n]) * size)
    end = len(plain_message(0, body=bytes(size)).encode())
    damaged = with_bytes(pull, 10 * end + 8, b"\x12\x34\x56\x78")
    longer = b"before" + damaged + b"after"
    buffers = (
        damaged,
        bytearray(damaged),
        memoryview(bytearray(damaged)),
        memoryview(longer)[6:-5],
        memoryview(bytearray(longer))[6:-5],
    )

    for buffer in buffers:
        found = scan_records(buffer)
        assert verdict_of(found) == one_by_one(damaged, check_crc=True)
        assert len(found.records) == 10


def test_small_bodies_are_cut_from_what_holds_them_and_not_from_a_view_of_it(monkeypatch):
    kinds: set[type] = set()

    def noting(body):
        kinds.add(type(body))
        return zlib.crc32(body)

    monkeypatch.setattr(scan, "crc32", noting)
    pull = plain_pull(20, lambda n: b"%d" % n)

    assert len(scan_records(memoryview(bytearray(pull))).records) == 20
    assert kinds == {bytearray}


def test_many_blocks_together_hold_every_record_once():
    count = 3 * scan.BLOCK_RECORDS + 17
    pull = plain_message(0).encode() * 40 + plain_pull(count, lambda n: b"x" * (n % 7))

    blocks = list(scan_blocks(pull, check_crc=False))

    assert len(blocks) > 3
    assert all(block.fault is None for block in blocks)
    starts = np.concatenate([block.records.starts for block in blocks])
    assert starts.tolist() == one_by_one(pull, check_crc=False)[0]


def test_sizes_inside_a_body_do_not_mislead_the_guess():
    # Records of one size, then one whose body repeats that size where the next would begin.
    size = len(plain_message(0, body=b"body").encode())
    trap = (size.to_bytes(4, "big") * size)[: 3 * size]
    pull = plain_message(0, body=b"body").encode() * 100 + plain_message(1, body=trap).encode()

    assert verdict_of(scan_records(pull)) == one_by_one(pull, check_crc=True)


@pytest.mark.parametrize("trap_size", [0, 91, 200, -5])
def test_magic_codes_inside_bodies_do_not_mislead_the_search(trap_size):
    # Small records of many sizes, so that their magic codes are searched for.
    trap = trap_size.to_bytes(4, "big", signed=True) + VECTOR_RECORD[4:8] + b"\xda\xa3" * 40
    bodies = [b"x" * (n % 11) if n % 700 != 699 else trap for n in range(5000)]
    pull = plain_pull(len(bodies), lambda n: bodies[n])
    damaged = with_bytes(pull, len(pull) * 2 // 3, b"\0" * 200)

    assert verdict_of(scan_records(pull)) == one_by_one(pull, check_crc=True)
    assert len(scan_records(pull).records) == len(bodies)
    assert verdict_of(scan_records(damaged)) == one_by_one(damaged, check_crc=True)


def test_a_part_of_a_buffer_can_be_scanned():
    first, second, third = (plain_message(n).encode() for n in range(3))
    buffer = first + second + third

    found = scan_records(buffer, start=len(first), end=len(first) + len(second) + 10)

    assert found.records.queue_offsets.tolist() == [1]
    assert found.stopped_at == len(first) + len(second)
    assert found.fault is RecordFault.CUT_SHORT


def test_a_mapped_file_is_scanned_in_place_and_can_be_closed_afterwards():
    pull = plain_pull(200)
    with tempfile.TemporaryFile() as file:
        file.write(pull + bytes(1 << 16))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with memoryview(mapped) as view:
            found = scan_records(view)
        mapped.close()

    assert len(found.records) == 200
    assert (found.stopped_at, found.fault) == (len(pull), RecordFault.EMPTY)


def test_nothing_is_scanned_in_an_empty_buffer():
    found = scan_records(b"")

    assert (len(found.records), found.stopped_at, found.fault) == (0, 0, None)
