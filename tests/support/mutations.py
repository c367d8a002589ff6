"""Recorded frames, changed so that they are wrong in a way that somebody might get wrong.

Some changes treat the bytes as bytes: lengths that lie, bits that flip, ends that are missing.
These mostly end in the frame reader. More of them take a command apart and put it together again
with something else in one place, so that what is wrong reaches the handler behind.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from orbitmq.wire.codes import RequestCode, Serialization, WireError
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader, encode_frame
from tests.support.wire import HEADERS

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"

#: Numbers at which somebody's arithmetic ends.
EDGES = (
    *(0, 1, -1, 7, 31, 32, 127, 255, 256, 65_535, 65_536),
    *(2**24, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63), 10**30),
)

#: Texts that are no number, no name, no expression, or too much of one.
ODD_TEXTS = (
    *("", " ", "null", "true", "-", "0x10", "1e400", "NaN", "\u0661", "1.5", "+7"),
    *("\x00", "\x01\x02", "%", "%RETRY%", "%DLQ%", "%SYS%", "TBW102", "../../etc", "a b"),
    *("\u4e3b\u9898", "\ud83d\ude80".encode("utf-16", "surrogatepass").decode("utf-16"), "\\u0000"),
    *("a || ", "a > ", "(" * 200, "a = 'b", "*", "||", "x" * 300, "x" * 20_000),
    *('{"', "[]", "{}", '{"a":', "0:1", "127.0.0.1:1", "[::1]:2", ":", "@", "a@b@c"),
)

#: A frame that was cut down to this is wrong enough.
_SHORTEST = 16

_CODES = tuple(int(code) for code in RequestCode)

#: Names that mean something to a broker which took other frames of the recordings.
_NAMES = ("Orders", "Orders", "billing", "billing", "127.0.0.1@driver", "TAG", "true", "broker-a")

#: The fields of all headers as they are called on the wire, and whether they are numbers.
_FIELDS = {
    field.encode_name: "int" in str(field.type).lower()
    for kind in HEADERS
    for field in msgspec.structs.fields(kind)
}


class Corpus:
    """What was recorded, frame by frame, in the order of the files."""

    def __init__(self, folder: Path = RECORDINGS) -> None:
        self.conversations: list[list[bytes]] = []
        self._weights: list[int] = []
        for file in sorted(folder.glob("*.frames")):
            frames = FrameReader().feed(file.read_bytes())
            self.conversations.append([encode_frame(frame) for frame in frames])
            # Answers to nothing are soon told apart; requests have much more that can be wrong.
            self._weights.append(8 if "to-server" in file.name else 1)
        assert self.conversations, f"{folder.name} holds no recordings"

    def mutated(self, chance: random.Random) -> bytes:
        """A few frames that were recorded one after the other, and something wrong with them."""
        (conversation,) = chance.choices(self.conversations, self._weights)
        first = chance.randrange(len(conversation))
        frames = conversation[first : first + chance.randint(1, 4)]
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(frames))
            if len(frames[place]) > _SHORTEST:
                frames[place] = chance.choice(_CHANGES)(frames[place], chance)
        stream = b"".join(frames)
        if chance.random() < 0.05:
            other = chance.choice(chance.choice(self.conversations))
            cut = chance.randrange(len(stream) + 1)
            stream = stream[:cut] + other[chance.randrange(len(other)) :]
        return stream


# Changes of bytes.


def _flip_bits(frame: bytes, chance: random.Random) -> bytes:
    raw = bytearray(frame)
    for _ in range(chance.randint(1, 8)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(raw)


def _cut_short(frame: bytes, chance: random.Random) -> bytes:
    return frame[: chance.randrange(1, len(frame))]


def _lie_about_length(frame: bytes, chance: random.Random) -> bytes:
    length = chance.choice((*EDGES, len(frame), len(frame) - 5, len(frame) - 3))
    return struct.pack(">I", length & 0xFFFFFFFF) + frame[4:]


def _lie_about_header(frame: bytes, chance: random.Random) -> bytes:
    word = chance.choice((*EDGES, len(frame) - 8, len(frame) - 7))
    return frame[:4] + struct.pack(">I", word & 0xFFFFFFFF) + frame[8:]


def _overwrite(frame: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(frame))
    return frame[:at] + chance.randbytes(chance.randint(1, 16)) + frame[at + 4 :]


def _repeat_part(frame: bytes, chance: random.Random) -> bytes:
    begin, end = sorted(chance.randrange(4, len(frame) + 1) for _ in range(2))
    return resized(frame[:end] + frame[begin:])


def _edge_for_number(frame: bytes, chance: random.Random) -> bytes:
    """Another number in the text of a header, wherever one stands."""
    digits = [at for at, byte in enumerate(frame) if at >= 8 and 48 <= byte <= 57]
    if not digits:
        return _flip_bits(frame, chance)
    begin = end = chance.choice(digits)
    while end < len(frame) and 48 <= frame[end] <= 57:
        end += 1
    edge = str(chance.choice(EDGES)).encode()
    grown = len(edge) - (end - begin)
    word = int.from_bytes(frame[4:8], "big") + grown
    changed = frame[:4] + struct.pack(">I", word & 0xFFFFFFFF) + frame[8:begin] + edge + frame[end:]
    return resized(changed)


def resized(frame: bytes) -> bytes:
    """The frame with a length that fits what follows it."""
    return struct.pack(">I", len(frame) - 4) + frame[4:]


# Changes of commands.


def _command(frame: bytes) -> Command | None:
    try:
        (found,) = FrameReader().feed(frame)
        return decode_command(found)
    except (WireError, ValueError):
        # An earlier change has made it something else.
        return None


def _of_command(change: Callable[[Command, random.Random], Command]) -> _Change:
    def changed(frame: bytes, chance: random.Random) -> bytes:
        command = _command(frame)
        if command is None:
            return _flip_bits(frame, chance)
        try:
            return encode_command(change(command, chance))
        except WireError:
            # The encoder refuses to say such a thing; the bytes can be spoilt all the same.
            return _flip_bits(frame, chance)

    return changed


def _fields_changed(command: Command, chance: random.Random) -> Command:
    fields = dict(command.ext_fields)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice((*fields, chance.choice(ODD_TEXTS))) if fields else "topic"
        match chance.randrange(4):
            case 0:
                fields.pop(name, None)
            case 1:
                fields[name] = str(chance.choice(EDGES))
            case 2:
                fields[name] = chance.choice(ODD_TEXTS)
            case _:
                fields[name] = chance.choice(tuple(fields.values()) or ("",))
    return command.with_fields(fields)


def _code_changed(command: Command, chance: random.Random) -> Command:
    code = chance.choice(EDGES[:13]) if chance.random() < 0.1 else chance.choice(_CODES)
    changed = msgspec.structs.replace(command, code=code, flag=command.flag & ~1)
    if chance.random() < 0.7:
        # Something for every field that the other request might need.
        changed = changed.with_fields(_any_fields(chance) | dict(command.ext_fields))
    return changed


def _any_fields(chance: random.Random) -> dict[str, str]:
    """A value of the right kind for every field of every header, some of them at an edge."""
    made = {}
    for name, is_number in _FIELDS.items():
        if chance.random() < 0.02:
            made[name] = str(chance.choice((*EDGES, *ODD_TEXTS)))
        elif is_number:
            made[name] = str(chance.randrange(4))
        else:
            made[name] = chance.choice(_NAMES)
    return made


def _flags_changed(command: Command, chance: random.Random) -> Command:
    return msgspec.structs.replace(
        command,
        flag=chance.choice((0, 1, 2, 3, 255)),
        opaque=chance.choice((0, -1, 2**31 - 1, -(2**31), command.opaque)),
        version=chance.choice((0, -1, 317, 373, 2**31 - 1, command.version)),
    )


def _body_changed(command: Command, chance: random.Random) -> Command:
    body = bytes(command.body)
    match chance.randrange(6):
        case 0:
            body = b""
        case 1:
            body = body[: chance.randrange(len(body) + 1)]
        case 2:
            body = chance.randbytes(chance.choice((1, 20, 400)))
        case 3:
            body = chance.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")
        case 4:
            edge = chance.choice(EDGES) & 0xFFFFFFFF
            body = struct.pack(">I", edge) + body[4:]
        case _ if body:
            body = _flip_bits(body, chance)
    return msgspec.structs.replace(command, body=body)


def _said_otherwise(command: Command, chance: random.Random) -> Command:
    """The same in the other serialization."""
    other = chance.choice((Serialization.JSON, Serialization.ROCKETMQ))
    fields = dict(command.ext_fields)
    return msgspec.structs.replace(command, serialization=other).with_fields(fields)


_Change = Callable[[bytes, random.Random], bytes]

_CHANGES: Sequence[_Change] = (
    _flip_bits,
    _cut_short,
    _lie_about_length,
    _lie_about_header,
    _overwrite,
    _repeat_part,
    *(_edge_for_number,) * 3,
    *(_of_command(_fields_changed),) * 6,
    *(_of_command(_code_changed),) * 3,
    *(_of_command(_body_changed),) * 4,
    _of_command(_flags_changed),
    _of_command(_said_otherwise),
)
