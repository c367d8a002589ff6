"""Large batches, which are laid out as a whole: nothing may tell them from their messages alone."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.message.batchrecords import LARGE, BatchColumns, batch_columns
from orbitmq.message.record import BatchInvalid, pack_host
from orbitmq.message.stored import batch_fields, encode_batch
from orbitmq.store.append import single_arrivals
from orbitmq.store.queues import SCHEDULE_TOPIC
from orbitmq.store.settings import FlushPolicy, MessageTooLarge, WriteFailed
from orbitmq.store.store import Store
from tests.support.message import INT32, any_properties, mutations, plain_properties
from tests.support.store import (
    BORN_HOST,
    SMALL,
    FailingFiles,
    HandClock,
    QuickFiles,
    bodies,
    messages_of,
    put,
    with_policy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orbitmq.message.record import Buffer
    from orbitmq.store.append import Arrival, Arrivals

ROOMY = replace(SMALL, file_size=1 << 20, queue_file_entries=300)

Element = tuple[bytes, int, bytes]

usual = st.tuples(st.binary(max_size=40), INT32, plain_properties)
odd = st.tuples(st.binary(max_size=40), INT32, any_properties)


def repeated(elements: list[Element]) -> list[Element]:
    """As many as a large batch has, of all these."""
    times = -(-LARGE // len(elements))
    return elements * times


large = st.one_of(
    st.lists(usual, min_size=1, max_size=12).map(repeated),
    st.lists(st.one_of(usual, odd), min_size=1, max_size=12).map(repeated),
)


def laid_out(batch: bytes) -> BatchColumns:
    columns = batch_columns(batch)
    assert columns is not None
    return columns


def ordinary(count: int = LARGE) -> list[Element]:
    return [
        (b"body %d" % n, n, b"KEYS\x01k%d\x02TAGS\x01%s\x02" % (n, b"ab"[n % 2 :]))
        for n in range(count)
    ]


class Outcome:
    """What a store made of batches: everything that can be seen of it."""

    def __init__(
        self,
        batches: Sequence[Sequence[tuple[Buffer, int, bytes]] | BatchColumns],
        *,
        topic: str = "T",
        born_host: bytes = BORN_HOST,
        sys_flag: int = 0,
    ) -> None:
        announced: list[Arrivals] = []
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "store"
            store = Store(root, ROOMY, clock=HandClock(), files=QuickFiles(), background=False)
            store.on_arrival(announced.extend)
            put(store, topic, 2, b"before")
            self.places = []
            for batch in batches:
                offsets, first = store.append_batch(topic, 2, batch, 5, born_host, sys_flag, 3)
                self.places.append(([int(each) for each in offsets], first))
            store.write()
            singles = [single for each in announced for single in single_arrivals(each)]
            self.arrivals = [(a[0].topic, a[0].queue_id, *a[1:]) for a in singles]
            store.tick()
            store.close()
            self.files = {
                str(path.relative_to(root)): path.read_bytes()
                for part in ("commitlog", "consumequeue", "index")
                for path in sorted((root / part).rglob("*"))
                if path.is_file()
            }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@settings(max_examples=60, deadline=None)
@given(
    elements=large,
    topic=st.sampled_from(["T", "t" * 127, "t" * 128, SCHEDULE_TOPIC]),
    host=st.sampled_from([BORN_HOST, pack_host("fe80::1", 7)]),
    sys_flag=st.sampled_from([0, 1]),
)
def test_files_offsets_and_arrivals_are_those_of_messages_taken_one_by_one(
    elements, topic, host, sys_flag
):
    batch = encode_batch(elements)
    columns = batch_columns(batch)
    fields = batch_fields(batch)

    assert columns is None or not any(0 in properties for _, _, properties in elements)
    as_a_whole = Outcome([columns or fields] * 2, topic=topic, born_host=host, sys_flag=sys_flag)
    one_by_one = Outcome([fields] * 2, topic=topic, born_host=host, sys_flag=sys_flag)

    assert as_a_whole == one_by_one


@settings(max_examples=200, deadline=None)
@given(batch=mutations(st.lists(usual, min_size=1, max_size=4).map(repeated).map(encode_batch)))
def test_a_mutated_batch_is_taken_as_a_whole_only_if_it_is_one(batch):
    columns = batch_columns(batch)
    if columns is None:
        return

    assert [
        (bytes(body), flag, tail[2:])
        for body, flag, tail in zip(
            columns.bodies, columns.flags.tolist(), columns.tails, strict=True
        )
    ] == batch_fields(batch)


@pytest.mark.parametrize(
    ("elements", "is_large"),
    [
        (ordinary(LARGE - 1), False),
        (ordinary(LARGE), True),
        ([(b"", 0, b"")] * LARGE, True),
        ([(bytes(20_000), 0, b"k\x01v\x02")] * LARGE, True),
        ([(b"a", 0, b"k\x01\0\x02"), *ordinary()], False),
    ],
)
def test_small_batches_and_zeros_in_properties_are_taken_one_by_one(elements, is_large):
    columns = batch_columns(encode_batch(elements))

    assert (columns is not None) is is_large
    if columns is not None:
        assert [bytes(body) for body in columns.bodies] == [body for body, _, _ in elements]


def test_one_bad_element_among_a_thousand_leaves_the_whole_batch_to_be_refused():
    batch = encode_batch(ordinary(1000))
    place = len(encode_batch(ordinary(700)))
    spoilt = batch[: place + 16] + b"\xff" + batch[place + 17 :]

    assert batch_columns(spoilt) is None
    with pytest.raises(BatchInvalid, match=f"at byte {place}: a body of -"):
        batch_fields(spoilt)


def test_one_message_that_is_too_large_refuses_the_batch(open_store):
    store = open_store(replace(ROOMY, max_record=1000))
    elements = [*ordinary(100), (bytes(1000), 0, b"")]

    with pytest.raises(MessageTooLarge, match="1000 bytes are allowed"):
        store.append_batch("T", 0, laid_out(encode_batch(elements)), 5, BORN_HOST)
    store.append_batch("T", 0, laid_out(encode_batch(ordinary())), 5, BORN_HOST)
    store.write()

    assert bodies(store, "T", 0) == [body for body, _, _ in ordinary()]


def test_a_batch_that_does_not_fit_goes_whole_into_the_next_file(open_store):
    store = open_store(replace(SMALL, file_size=16_384))
    put(store, "T", 0, bytes(9000))

    offsets, first = store.append_batch("T", 0, laid_out(encode_batch(ordinary())), 5, BORN_HOST)
    store.write()

    assert (offsets[0], first) == (16_384, 1)
    assert bodies(store, "T", 0)[1:] == [body for body, _, _ in ordinary()]


def fail_once() -> Callable[[str, int], int | None]:
    """The first write stops half-way, the next one fails, and everything after that works."""
    outcomes = iter(("stops", "fails"))

    def before(call: str, _: int) -> int | None:
        outcome = next(outcomes, None) if call == "pwrite" else None
        if outcome == "fails":
            raise OSError(errno.EIO, "injected")
        return 1000 if outcome else None

    return before


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_not_written_leaves_nothing_behind(open_store, fails):
    files = FailingFiles()
    store = open_store(ROOMY, files=files)
    put(store, "T", 0, b"kept")
    store.write()

    store.append_batch("T", 0, laid_out(encode_batch(ordinary())), 5, BORN_HOST)
    store.append_batch("new", 0, laid_out(encode_batch(ordinary())), 5, BORN_HOST)
    if fails:
        files.before = fail_once()
        with pytest.raises(WriteFailed):
            store.write()
    else:
        store.discard()

    assert {state.topic for state in store.queues()} == {"T"}
    offsets, first = store.append_batch("T", 0, laid_out(encode_batch(ordinary())), 5, BORN_HOST)
    store.write()
    assert (first, len(offsets)) == (1, LARGE)
    assert bodies(store, "T", 0) == [b"kept", *(body for body, _, _ in ordinary())]


def test_a_synchronous_store_shows_a_batch_when_it_is_on_the_disk(open_store):
    store = open_store(with_policy(ROOMY, FlushPolicy.SYNC))
    announced: list[Arrival] = []
    store.on_arrival(
        lambda found: announced.extend(a for each in found for a in single_arrivals(each))
    )
    store.append_batch("T", 0, laid_out(encode_batch(ordinary())), 5, BORN_HOST)
    end = store.write()

    assert (store.max_offset("T", 0), announced) == (0, [])
    assert store.wait_flushed(end, 10)
    assert store.max_offset("T", 0) == LARGE
    assert [number for _, number, _, _, _ in announced] == list(range(LARGE))


def test_recovery_finds_a_batch_and_derives_the_same_entries(open_store):
    store = open_store(ROOMY)
    put(store, "T", 0, b"before")
    store.append_batch("T", 0, laid_out(encode_batch(ordinary(200))), 5, BORN_HOST)
    store.write()
    before = store.queue_entries("T", 0, 0, 201)
    store.abandon()

    again = open_store(ROOMY)

    assert not again.recovery.was_clean
    assert again.queue_entries("T", 0, 0, 201) == before


WRITER = """
import sys
from pathlib import Path
from orbitmq.message.batchrecords import batch_columns
from orbitmq.message.stored import encode_batch
from orbitmq.store.store import Store
from tests.support.store import BORN_HOST
from tests.store.test_large_batches import ROOMY

store = Store(Path(sys.argv[1]), ROOMY)
for first in range(0, 1_000_000, 256):
    batch = encode_batch((b"%d" % n, 0, b"TAGS\\x01A\\x02") for n in range(first, first + 256))
    store.append_batch("T", 0, batch_columns(batch), 5, BORN_HOST)
    store.write()
    print(first + 256, flush=True)
"""


def test_a_kill_in_the_middle_of_batches_loses_no_written_one(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as writer:
        assert writer.stdout is not None
        for _ in range(40):
            written = int(writer.stdout.readline())
        writer.kill()
        written = max([written, *(int(line) for line in writer.stdout if line.endswith("\n"))])

    store = Store(tmp_path / "store", ROOMY, background=False)
    try:
        found: list[bytes] = []
        while len(found) < store.max_offset("T", 0):
            found += [each.body for each in messages_of(store.read("T", 0, len(found), 1000))]
        entries = store.queue_entries("T", 0, 0, len(found)) or []
    finally:
        store.close()

    assert not store.recovery.was_clean
    assert len(found) >= written >= 40 * 256
    assert found == [b"%d" % number for number in range(len(found))]
    assert {code for _, _, code in entries} == {ord("A")}
