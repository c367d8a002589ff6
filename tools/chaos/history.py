"""What happened, as every process saw it: lines in a file of its own, merged afterwards.

A line is written with one system call before the act that it announces, or right after the one that
it reports, so that `kill -9` leaves at most an act without its report: a send of which nobody knows
the outcome, a handler that had begun. Times are of the clock that all processes of a machine share
and nobody sets.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec


class Value(NamedTuple):
    """What is sent: it says itself who sent it, as the how-manieth, and with which key."""

    producer: str
    sequence: int
    key: str

    def __str__(self) -> str:
        return f"{self.producer}/{self.sequence}/{self.key}"


class BodyCorrupt(ValueError):
    """A body that no producer of ours has made."""


def parse_value(text: str) -> Value:
    """The value of its text. Raises `BodyCorrupt`."""
    try:
        producer, sequence, key = text.split("/")
        return Value(producer, int(sequence), key)
    except ValueError as error:
        raise BodyCorrupt(f"{text[:80]!r} is no value") from error


def body_of(value: Value, size: int = 0) -> bytes:
    """A body that cannot be changed unnoticed: the value, and a filling that follows from it."""
    head = f"{value}|".encode()
    if size <= len(head):
        return head
    digest = hashlib.blake2b(head, digest_size=32).digest()
    return (head + digest * (size // len(digest) + 1))[:size]


def value_of(body: bytes) -> Value:
    """The value in a body. Raises `BodyCorrupt`."""
    head, bar, _ = body.partition(b"|")
    try:
        value = parse_value(head.decode())
    except UnicodeDecodeError as error:
        raise BodyCorrupt(f"{head[:80]!r} is no value") from error
    if not bar or body_of(value, len(body)) != body:
        raise BodyCorrupt(f"the body of {value} was changed")
    return value


class Invoked(msgspec.Struct, frozen=True, gc=False, tag="invoke", tag_field="is"):
    """A send begins."""

    at: float
    value: str


class Acked(msgspec.Struct, frozen=True, gc=False, tag="ack", tag_field="is"):
    """The broker has said where it stored it."""

    at: float
    value: str
    queue: str
    offset: int


class Refused(msgspec.Struct, frozen=True, gc=False, tag="refuse", tag_field="is"):
    """The broker has said no, to the only attempt: it must never be seen."""

    at: float
    value: str
    reason: str


class Unknown(msgspec.Struct, frozen=True, gc=False, tag="unknown", tag_field="is"):
    """The send failed, and nobody knows whether it was stored."""

    at: float
    value: str
    reason: str


class Entered(msgspec.Struct, frozen=True, gc=False, tag="enter", tag_field="is"):
    """A handler begins with a message."""

    at: float
    group: str
    reader: str
    queue: str
    offset: int
    value: str


class Read(msgspec.Struct, frozen=True, gc=False, tag="read", tag_field="is"):
    """A reader has done with a message."""

    at: float
    group: str
    reader: str
    queue: str
    offset: int
    value: str


class Corrupt(msgspec.Struct, frozen=True, gc=False, tag="corrupt", tag_field="is"):
    """A reader got a body that nobody has sent."""

    at: float
    reader: str
    queue: str
    offset: int
    reason: str


class Assigned(msgspec.Struct, frozen=True, gc=False, tag="assign", tag_field="is"):
    """The queues of a reader are these, from now on."""

    at: float
    group: str
    reader: str
    queues: tuple[str, ...]


class Fault(msgspec.Struct, frozen=True, gc=False, tag="fault", tag_field="is"):
    """The nemesis has begun something, or mended it."""

    at: float
    what: str
    target: str
    is_over: bool


Event: TypeAlias = Invoked | Acked | Refused | Unknown | Entered | Read | Corrupt | Assigned | Fault

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def now() -> float:
    """Seconds, the same for all processes of this machine."""
    return time.monotonic()


class Recorder:
    """Writes the history of one process; may be used by all its threads."""

    def __init__(self, path: Path) -> None:
        # Lines in this mode are written whole, one after the other.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        os.write(self._file, _encoder.encode(event) + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Histories:
    """Reads the histories of all processes, and when asked again only what came since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        """All events of all processes so far, in the order of their times."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                fresh = file.read()
            # The last line may be cut off when the disk was full.
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self._events += _decoder.decode_lines(whole)
            self._read[path] = self._read.get(path, 0) + len(whole)
        self._events.sort(key=lambda event: event.at)
        return self._events.copy()
