"""What a broker of ours has counted, asked over its own protocol."""

from __future__ import annotations

import socket

from benchmarks.load.asking import Target
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import Frame, FrameReader
from orbitmq.wire.javajson import decode_body

_DEADLINE = 30.0
_READ = 64 * 1024


def flushes(target: Target) -> int:
    """How often it has brought its log to the disk."""
    request = Command.request(RequestCode.GET_BROKER_RUNTIME_INFO, opaque=1)
    with socket.create_connection(("127.0.0.1", target.port), _DEADLINE) as line:
        line.sendall(encode_command(request))
        answer = decode_command(_frame(line))
    return int(decode_body(KVTable, answer.body).table["storeFlushes"])


def _frame(line: socket.socket) -> Frame:
    reader = FrameReader()
    while data := line.recv(_READ):
        if frames := reader.feed(data):
            return frames[0]
    raise ConnectionError("the broker has closed the connection")
