"""Bytes on a connection to commands and back. No I/O, no clock, no threads.

    reader = FrameReader()
    for frame in reader.feed(received):
        command = decode_command(frame)
        if command.code == RequestCode.PULL_MESSAGE:
            pull = command.header(PullMessageRequest)

Headers and bodies are declared by family in `orbitmq.wire.headers` and `orbitmq.wire.bodies`.
"""

from orbitmq.wire.bodies import body_crc32, compress_registration, decompress_registration
from orbitmq.wire.codes import (
    OUR_VERSION,
    BodyError,
    EncodeError,
    Flag,
    FrameError,
    Gate,
    HeaderError,
    Language,
    Release,
    RequestCode,
    ResponseCode,
    Serialization,
    WireError,
    WireLimits,
    ordinal_of,
    release_of,
)
from orbitmq.wire.command import (
    AnswerTemplate,
    Command,
    Credentials,
    access_key_of,
    command_pieces,
    decode_command,
    encode_command,
    is_signed_by,
    sign,
)
from orbitmq.wire.frame import Bytes, Frame, FrameReader, encode_frame, frame_head, frame_pieces
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import Body, decode_body, encode_body

__all__ = [  # noqa: RUF022  # grouped by subject
    # Frames
    "Bytes",
    "Frame",
    "FrameReader",
    "WireLimits",
    "encode_frame",
    "frame_head",
    "frame_pieces",
    # Commands
    "AnswerTemplate",
    "Command",
    "command_pieces",
    "decode_command",
    "encode_command",
    # Headers and bodies
    "Body",
    "Header",
    "body_crc32",
    "compress_registration",
    "decode_body",
    "decompress_registration",
    "encode_body",
    # Access
    "Credentials",
    "access_key_of",
    "is_signed_by",
    "sign",
    # Numbers of the protocol
    "Flag",
    "Gate",
    "Language",
    "OUR_VERSION",
    "Release",
    "RequestCode",
    "ResponseCode",
    "Serialization",
    "ordinal_of",
    "release_of",
    # Errors
    "BodyError",
    "EncodeError",
    "FrameError",
    "HeaderError",
    "WireError",
]
