"""Messages as objects and as columns, from the bytes that a pull returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.runner import Bench, Prepare, Scale, Work
from benchmarks.workload import records
from orbitmq.message.arrow import messages_to_arrow
from orbitmq.message.stored import StoredMessage, decode_messages

#: What a small service asks for at a time, and what Spark joins.
_PULL, _CHUNK = 32, 4096


def _header_of_413_bytes() -> bytes:
    """A send request's header, as long as the one that the targets are stated for."""
    header = {
        "code": 310,
        "extFields": {
            "a": "billing-service",
            "b": "orders",
            "c": "TBW102",
            "d": "4",
            "e": "1",
            "f": "0",
            "g": "1700000000000",
            "h": "0",
            "i": "KEYS\x01order-123\x02TAGS\x01paid\x02WAIT\x01true\x02"
            "UNIQ_KEY\x01C0A80301000018B4AAC24F1C5D530000\x02",
            "j": "0",
            "k": "false",
            "l": "0",
            "m": "false",
        },
        "flag": 0,
        "language": "JAVA",
        "opaque": 4711,
        "remark": "",
        "serializeTypeCurrentRPC": "JSON",
        "version": 435,
    }
    header["remark"] = "r" * (413 - len(_compact(header)))
    assert len(_compact(header)) == 413
    return _compact(header)


def _compact(header: object) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _read_all(message: StoredMessage) -> None:
    """What an ordinary listener looks at."""
    _ = message.topic, message.queue_offset, message.stored_at
    _ = message.properties, message.body


def _objects(body_size: int, count: int, *, eager: bool) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        pull = b"".join(records(count, body_size, topics=4))
        header = _header_of_413_bytes()

        def lazy() -> int:
            return sum(1 for message in decode_messages(pull) if message.queue_offset >= 0)

        def complete() -> int:
            found = decode_messages(pull)
            for message in found:
                _read_all(message)
            return len(found)

        def floor() -> int:
            for _ in range(count):
                json.loads(header)
            return count

        yield (complete if eager else lazy), floor

    return prepare


def _columns(body_size: int, names: Sequence[str] | None) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        pull = b"".join(records(_CHUNK, body_size, topics=4))

        def candidate() -> int:
            return int(messages_to_arrow(pull, broker_name="broker-a", columns=names).num_rows)

        def floor() -> int:
            found = decode_messages(pull)
            for message in found:
                _read_all(message)
            return len(found)

        yield candidate, floor

    return prepare


_THREE_KEYS = ("body", "tags", "keys", "msgId")

BENCHES = (
    Bench(
        name="objects, properties and body left alone, 1 KiB bodies",
        room="message",
        unit="messages/s",
        compared_with="json.loads of a header of 413 bytes",
        prepare=_objects(1024, _PULL, eager=False),
        target=3.0,
    ),
    Bench(
        name="objects, everything read, 1 KiB bodies",
        room="message",
        unit="messages/s",
        compared_with="json.loads of a header of 413 bytes",
        prepare=_objects(1024, _PULL, eager=True),
        target=1.2,
    ),
    Bench(
        name="objects, everything read, 100 B bodies",
        room="message",
        unit="messages/s",
        compared_with="json.loads of a header of 413 bytes",
        prepare=_objects(100, _PULL, eager=True),
        target=1.2,
    ),
    Bench(
        name="Arrow: body and three properties, 100 B bodies",
        room="message",
        unit="messages/s",
        compared_with="objects, everything read",
        prepare=_columns(100, _THREE_KEYS),
        target=3.0,
    ),
    Bench(
        name="Arrow: body and three properties, 1 KiB bodies",
        room="message",
        unit="messages/s",
        compared_with="objects, everything read",
        prepare=_columns(1024, _THREE_KEYS),
        target=3.0,
    ),
    Bench(
        name="Arrow: all 13 columns, 1 KiB bodies",
        room="message",
        unit="messages/s",
        compared_with="objects, everything read",
        prepare=_columns(1024, None),
    ),
)
