"""Frames and commands: what a connection costs before anything is done with its messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle

from benchmarks.runner import Bench, Scale, Work
from benchmarks.workload import START_MS, messages
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import AnswerTemplate, Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import SendMessageRequest, SendMessageResponse

#: Requests in one read of a busy connection.
_PER_READ = 16


def _send_requests(body_size: int) -> list[Command]:
    return [
        Command.request(
            RequestCode.SEND_MESSAGE_V2,
            SendMessageRequest(
                producer_group="billing-service",
                topic=message.topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=message.queue_id,
                sys_flag=0,
                born_timestamp=START_MS + number,
                flag=0,
                properties=message.properties.decode(),
                reconsume_times=0,
                unit_mode=False,
                max_reconsume_times=0,
                batch=False,
                broker_name="broker-a",
            ),
            opaque=number,
            body=message.body,
        )
        for number, message in enumerate(messages(256, body_size))
    ]


def _reads(body_size: int) -> list[bytes]:
    frames = [encode_command(request) for request in _send_requests(body_size)]
    return [
        b"".join(frames[first : first + _PER_READ]) for first in range(0, len(frames), _PER_READ)
    ]


@contextmanager
def _decode(_: Scale) -> Iterator[tuple[Work, Work]]:
    reads = _reads(1024)
    headers = [[frame.header for frame in FrameReader().feed(read)] for read in reads]
    next_read, next_headers = cycle(reads), cycle(headers)
    reader = FrameReader()

    def candidate() -> int:
        for frame in reader.feed(next(next_read)):
            decode_command(frame).header(SendMessageRequest)
        return _PER_READ

    def floor() -> int:
        for header in next(next_headers):
            json.loads(header)
        return _PER_READ

    yield candidate, floor


@contextmanager
def _encode_answer(_: Scale, *, by_template: bool) -> Iterator[tuple[Work, Work]]:
    requests = _send_requests(0)
    answers = [
        SendMessageResponse(
            msg_id=f"C0A803010002A9F{number:017X}",
            queue_id=number % 4,
            queue_offset=number,
            region="DefaultRegion",
            trace_on=True,
        )
        for number in range(len(requests))
    ]
    plain = [
        {
            "code": 0,
            "extFields": {
                "msgId": answer.msg_id,
                "queueId": str(answer.queue_id),
                "queueOffset": str(answer.queue_offset),
                "MSG_REGION": "DefaultRegion",
                "TRACE_ON": "true",
            },
            "flag": 1,
            "language": "PYTHON",
            "opaque": request.opaque,
            "serializeTypeCurrentRPC": "JSON",
            "version": 0,
        }
        for request, answer in zip(requests, answers, strict=True)
    ]

    template = AnswerTemplate(
        SendMessageResponse,
        ("msg_id", "queue_id", "queue_offset"),
        constant={"region": "DefaultRegion", "trace_on": True},
    )
    filled = [
        (request.opaque, answer.msg_id, answer.queue_id, answer.queue_offset)
        for request, answer in zip(requests, answers, strict=True)
    ]

    def ordinary() -> int:
        for request, answer in zip(requests, answers, strict=True):
            encode_command(request.answer(0, answer))
        return len(answers)

    def from_template() -> int:
        for values in filled:
            template.head(*values)
        return len(filled)

    def floor() -> int:
        for answer in plain:
            json.dumps(answer).encode()
        return len(plain)

    yield (from_template if by_template else ordinary), floor


@contextmanager
def _split(_: Scale) -> Iterator[tuple[Work, Work]]:
    stream = b"".join(_reads(1024))
    chunks = [stream[first : first + 65536] for first in range(0, len(stream), 65536)]

    def candidate() -> int:
        reader = FrameReader()
        for chunk in chunks:
            reader.feed(chunk)
        return len(stream)

    def floor() -> int:
        for chunk in chunks:
            bytearray(chunk)
        return len(stream)

    yield candidate, floor


@contextmanager
def _large(_: Scale) -> Iterator[tuple[Work, Work]]:
    request = _send_requests(4 * 1024 * 1024 - 4096)[0]
    stream = encode_command(request)
    chunks = [stream[first : first + 65536] for first in range(0, len(stream), 65536)]

    def candidate() -> int:
        reader = FrameReader()
        for chunk in chunks:
            reader.feed(chunk)
        return len(stream)

    def floor() -> int:
        b"".join(chunks)
        return len(stream)

    yield candidate, floor


BENCHES = (
    Bench(
        name="send request: frame to typed header",
        room="wire",
        unit="requests/s",
        compared_with="json.loads of the same headers",
        prepare=_decode,
    ),
    Bench(
        name="send answer: typed header to frame",
        room="wire",
        unit="answers/s",
        compared_with="json.dumps of the same headers",
        prepare=partial(_encode_answer, by_template=False),
    ),
    Bench(
        name="send answer: from the template that the broker uses",
        room="wire",
        unit="answers/s",
        compared_with="json.dumps of the same headers",
        prepare=partial(_encode_answer, by_template=True),
    ),
    Bench(
        name="splitting frames with 1 KiB bodies",
        room="wire",
        unit="GB/s",
        unit_factor=1e-9,
        compared_with="copying the same bytes",
        prepare=_split,
    ),
    Bench(
        name="one 4 MiB frame in 64 KiB reads",
        room="wire",
        unit="GB/s",
        unit_factor=1e-9,
        compared_with="joining the same reads once",
        prepare=_large,
    ),
)
