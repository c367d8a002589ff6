"""Records that Apache's brokers wrote: every byte of them is understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbitmq.message.arrow import messages_to_arrow
from orbitmq.message.scan import scan_records
from orbitmq.message.stored import decode_messages
from tests.support.message import expected_row, rows_of

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "recordings").glob("*.records"))


def test_there_are_recordings():
    assert RECORDINGS


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_messages_are_decoded_and_encoded_to_the_same_bytes(path):
    recorded = path.read_bytes()

    messages = decode_messages(recorded)

    assert messages
    assert b"".join(message.encode() for message in messages) == recorded
    for message in messages:
        message.verify()
        assert message.topic
        assert message.properties


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_columns_of_recorded_messages_say_what_the_objects_say(path):
    recorded = path.read_bytes()

    batch = messages_to_arrow(recorded, broker_name="broker-a")

    assert rows_of(batch) == [expected_row(m, "broker-a") for m in decode_messages(recorded)]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_messages_are_valid_to_the_scan(path):
    recorded = path.read_bytes()

    found = scan_records(recorded)

    assert (found.stopped_at, found.fault) == (len(recorded), None)
    assert len(found.records) == len(decode_messages(recorded))
