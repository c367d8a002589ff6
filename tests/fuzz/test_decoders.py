"""What is read from bytes by functions alone: frames, stored messages, batches, SQL filters.

There is a declared error for everything that is wrong, and no reader takes what another refuses:
messages are cut out of a pull one by one, and all at once for Spark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from orbitmq.errors import OrbitError
from orbitmq.filter.sql import compile_sql
from orbitmq.message import stored
from orbitmq.message.arrow import BadBody, messages_to_arrow
from orbitmq.message.properties import encode_properties
from orbitmq.message.scan import scan_records
from orbitmq.wire.codes import WireError
from orbitmq.wire.command import decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from tests.support.fuzzing import fuzz_seed, note_inputs, rounds
from tests.support.mutations import EDGES, ODD_TEXTS, Corpus

SEED = fuzz_seed(7)
FRAMES = rounds(1000)
RECORDS = rounds(400)
FILTERS = rounds(800)


@pytest.mark.timeout(1200)
def test_a_stream_of_frames_is_read_the_same_however_it_is_cut():
    corpus, chance = Corpus(), random.Random(SEED)
    outcomes = {True: 0, False: 0}
    for _ in range(FRAMES):
        stream = corpus.mutated(chance)
        cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(3))

        whole, is_refused = commands_of([stream])
        pieces, is_refused_later = commands_of(
            [stream[a:b] for a, b in zip((0, *cuts), (*cuts, len(stream)), strict=True)]
        )

        assert is_refused == is_refused_later, stream
        # What came with the mistake may be lost with it.
        assert whole == (pieces[: len(whole)] if is_refused else pieces), stream
        outcomes[is_refused] += 1
    assert all(outcomes.values()), outcomes
    note_inputs(FRAMES)


def commands_of(pieces: Sequence[bytes]) -> tuple[list[bytes], bool]:
    """What is understood of a stream up to the first mistake, and whether there is one."""
    reader = FrameReader()
    found: list[bytes] = []
    for piece in pieces:
        try:
            for frame in reader.feed(piece):
                found.append(encode_command(decode_command(frame)))
        except WireError as error:
            told(error)
            return found, True
    return found, False


@pytest.mark.timeout(1200)
def test_a_pull_with_something_wrong_in_it_is_refused_by_every_reader_or_by_none():
    chance = random.Random(SEED)
    outcomes = {True: 0, False: 0}
    for _ in range(RECORDS):
        pulled = spoilt(b"".join(record(chance) for _ in range(chance.randint(1, 5))), chance)

        try:
            bodies = [message.stored_body for message in stored.decode_messages(pulled)]
        except OrbitError:
            bodies = None
        scanned = scan_records(pulled, check_crc=False)

        if bodies is None:
            assert scanned.stopped_at < len(pulled), pulled
        else:
            assert len(scanned.records) == len(bodies), pulled
            assert_columns(pulled, bodies)
        outcomes[bodies is None] += 1
    assert all(outcomes.values()), outcomes
    note_inputs(RECORDS)


def assert_columns(pulled: bytes, bodies: Sequence[bytes]) -> None:
    try:
        batch = messages_to_arrow(
            pulled, broker_name="b", bad_body=BadBody.NULL, check_crc=False, max_body=1 << 20
        )
    except OrbitError:
        return  # of a topic or a property that is no text, which one by one is found when asked for
    assert batch.num_rows == len(bodies), pulled


def record(chance: random.Random) -> bytes:
    properties = {"TAGS": "A", "KEYS": chance.choice(("k", *ODD_TEXTS))[:50].replace("\x02", "")}
    encoded = encode_properties(
        {name: value.replace("\x01", "") for name, value in properties.items()}
    )
    return stored.StoredMessage.build(
        topic=chance.choice(("orders", "T", "x" * 100)),
        stored_body=chance.randbytes(chance.choice((0, 1, 60, 300))),
        store_ms=chance.randrange(1 << 41),
        properties=encoded,
    ).encode()


def spoilt(data: bytes, chance: random.Random) -> bytes:
    """Some bytes of it changed, cut out, doubled; or left as they are."""
    raw = bytearray(data)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        at = chance.randrange(len(raw)) if raw else 0
        match chance.randrange(6):
            case 0:
                raw[at : at + 1] = bytes((chance.randrange(256),))
            case 1:
                raw[at : at + 4] = (chance.choice(EDGES) & 0xFFFFFFFF).to_bytes(4, "big")
            case 2:
                del raw[at:]
            case 3:
                del raw[at : at + chance.randint(1, 8)]
            case 4:
                raw[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                raw += raw[at : at + 100]
    return bytes(raw)


@pytest.mark.timeout(1200)
def test_a_batch_is_split_or_refused():
    chance = random.Random(SEED)
    outcomes = {True: 0, False: 0}
    for _ in range(RECORDS):
        elements = [
            stored.BatchElement(
                body=chance.randbytes(chance.choice((0, 5, 90))), flag=0, properties=b""
            )
            for _ in range(chance.randint(1, 4))
        ]
        batch = spoilt(stored.encode_batch(elements), chance)
        outcomes[is_taken(partial(stored.split_batch, batch))] += 1
    assert all(outcomes.values()), outcomes
    note_inputs(RECORDS)


WORDS = (
    *("a", "b", "price", "AND", "OR", "NOT", "(", ")", "=", "<>", ">", "<=", "IN", "BETWEEN"),
    *("IS", "NULL", "TRUE", "FALSE", "CONTAINS", "STARTSWITH", "'x'", "'it''s'", "1", "-2", "3.5"),
    *(",", "1E3", "9223372036854775807", "0x1F", "'", '"', "--", "/*", ";", "\n"),
)
PROPERTIES = {"a": "10", "b": "true", "price": "-2.5E0"}


@pytest.mark.timeout(1200)
def test_a_filter_is_compiled_or_refused_and_what_is_compiled_has_an_answer():
    chance = random.Random(SEED)
    outcomes = {True: 0, False: 0}
    for _ in range(FILTERS):
        words = [chance.choice(WORDS) for _ in range(chance.choice((1, 3, 3, 3, 5, 7, 12)))]
        if chance.random() < 0.05:
            words.insert(chance.randrange(len(words) + 1), chance.choice(ODD_TEXTS)[:500])
        text = chance.choice((" ", " ", "")).join(words)

        outcomes[is_taken(partial(judge, text, lenient=chance.random() < 0.3))] += 1
    assert all(outcomes.values()), outcomes
    note_inputs(FILTERS)


def judge(text: str, *, lenient: bool) -> bool:
    return compile_sql(text, lenient=lenient).accepts_properties(PROPERTIES)


def is_taken(use: Callable[[], object]) -> bool:
    """Whether it is understood; what is not is refused with words."""
    try:
        use()
    except OrbitError as error:
        told(error)
        return False
    return True


def told(error: OrbitError) -> None:
    if not str(error):
        pytest.fail(f"{type(error).__name__} without a word")
