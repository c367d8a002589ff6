"""Frames captured from Apache's Java client and broker, byte by byte.

A `.frames` file is what went over one direction of a connection.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orbitmq.wire import bodies
from orbitmq.wire.codes import Language
from orbitmq.wire.command import decode_command, encode_command, to_frame
from orbitmq.wire.frame import FrameReader, encode_frame
from orbitmq.wire.javajson import Body, decode_body, encode_body

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"


def captures() -> list[Path]:
    return sorted(RECORDINGS.glob("**/*.frames"))


@pytest.mark.feature("J1")
def test_captured_frames_decode_and_those_of_java_encode_to_the_same_bytes():
    files = captures()
    assert files, f"{RECORDINGS.name} holds no captures"

    java_frames = 0
    for file in files:
        stream = file.read_bytes()
        reader = FrameReader()
        frames = reader.feed(stream)

        assert b"".join(map(encode_frame, frames)) == stream, file.name
        for number, frame in enumerate(frames):
            command = decode_command(frame)
            # Through the map of fields, so that nothing is merely passed on.
            again = (
                command.with_fields(dict(command.ext_fields))
                if (command.has_ext_fields)
                else command
            )
            # Java writes a `%` in a remark as it is; we write words.
            if command.language is Language.JAVA and "%" not in (command.remark or ""):
                java_frames += 1
                assert to_frame(again).header == frame.header, f"{file.name}, frame {number}"
                assert encode_command(again) == encode_frame(frame), f"{file.name}, frame {number}"
    assert java_frames > 0


#: Bodies by the way they begin; opaques come twice in a file, so answers cannot tell by request.
SHAPES: dict[bytes, type[Body]] = {
    b'{"brokerDatas":': bodies.TopicRouteData,
    b'{"brokerAddrTable":': bodies.ClusterInfo,
    b'{"clientID":': bodies.HeartbeatData,
    b'{"connectionSet":': bodies.ConsumerConnection,
    b'{"consumeTimeSpanSet":': bodies.ConsumeTimeSpans,
    b'{"consumeTps":': bodies.ConsumeStats,
    b'{"consumerIdList":': bodies.ConsumerList,
    b'{"filterServerList":': bodies.RegisterBroker,
    b'{"groupList":': bodies.GroupList,
    b'{"lockOKMQSet":': bodies.LockedQueues,
    b'{"mqPopTable":': bodies.ConsumerRunningInfo,
    b'{"mqTable":': bodies.ConsumerRunningInfo,
    b'{"offsetTable":{{': bodies.TopicStats,
    b'{"table":': bodies.KVTable,
    b'{"topicList":': bodies.TopicList,
}


def test_captured_bodies_decode_and_those_of_5_x_encode_to_the_same_bytes():
    seen: set[tuple[str, type[Body]]] = set()
    keys: set[bytes] = set()

    for file in captures():
        for frame in FrameReader().feed(file.read_bytes()):
            text = bytes(frame.body)
            kind = next((kind for start, kind in SHAPES.items() if text.startswith(start)), None)
            if kind is None:
                continue
            body = decode_body(kind, text)
            written = {encode_body(body), encode_body(body, bare_integer_keys=True)}
            version = file.name.split(".")[0]
            seen.add((version, kind))
            keys |= {key for key in (b"{0:", b'{"0":') if key in text}

            # Older peers leave out fields that 5.x added, so only their meaning can be compared.
            if version == "5":
                assert text in written, file.name
            assert all(decode_body(kind, again) == body for again in written), file.name

    assert {(version, kind) for version in "45" for kind in SHAPES.values()} <= seen
    assert keys == {b"{0:", b'{"0":'}
