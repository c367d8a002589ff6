"""Positions in queues as Spark keeps them, and how a query says where to begin and to end.

Spark takes offsets for JSON text and compares the text. The same positions must therefore always
give the same text, so topics and queues are written in one order:

    {"orders": {"broker-a:0": 17, "broker-a:1": 4, "broker-b:0": 9}}

Tools read this text, too: every key is a topic, and has queues with numbers. What else has to be
remembered is therefore in one more key, which has no queues, and is the name of no topic:

    {"orders": {"broker-a:0": 17}, "{\\"marks\\":{\\"orders\\":{\\"broker-a:0\\":[16,17…]}}}": {}}

- `marks`: messages that the stream has passed, and when they were stored. They tell whether a queue
  is still the one that the positions are about.
- `begins`: where the batch with this end begins queues that its start has not. Spark asks for the
  initial offset again when the very first batch is repeated after a crash, and logs only where that
  batch ends; by then time may have moved the place, or somebody has given another. `here` is a
  batch without rows, which ends where the stream begins.
- `again`: where the batch goes back to in queues that are not the same any more.

The initial offset of a stream names the place where it begins instead: `{"starting": "latest"}`.
Ends without `begins` are from versions that did not say; from then on it is for the options and for
beginnings of queues to tell. Other old ones have it as `"begins at"`, beside the topics.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from orbitmq.client.queue import Queue
from orbitmq.spark.errors import OptionRefused, SourceError
from orbitmq.spark.optiontext import instant

#: In JSON, for "wherever the queue begins" and "wherever it ends".
EARLIEST: Final = -2
LATEST: Final = -1

Positions: TypeAlias = Mapping[Queue, int]
Json: TypeAlias = dict[str, Any]

_STARTING: Final = "starting"
_HERE: Final = "here"
_OLD_BEGINS: Final = "begins at"


class Mark(NamedTuple):
    """A message that a stream has passed: its offset, and when its broker stored it, in ms."""

    offset: int
    stored_ms: int


class OnNoMatch(enum.Enum):
    """What a time stands for that no message is young enough for."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Earliest:
    """Wherever each queue begins."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Wherever each queue ends."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Where the group stands at the broker; the earliest message where it stands nowhere."""


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for every queue."""

    offsets: Positions
    option: str


@dataclass(frozen=True, slots=True)
class AtTimes:
    """The first message that was stored at a time or later, in seconds since the epoch."""

    option: str
    on_no_match: OnNoMatch
    #: For every queue, or for those that `times` does not name.
    time: float | None = None
    times: Mapping[Queue, float] = field(default_factory=dict)


Place: TypeAlias = Earliest | Latest | GroupProgress | AtOffsets | AtTimes


def starting(place: Place) -> Json:
    """The initial offset of a stream that begins at a place: it stands for the place itself."""
    match place:
        case Latest():
            return {_STARTING: "latest"}
        case GroupProgress():
            return {_STARTING: "group"}
        case AtTimes():
            return {_STARTING: "timestamp"}
        case _:
            return {_STARTING: "offsets"}


def is_starting(offset: Json) -> bool:
    """Whether an offset of a stream is one that `starting` made."""
    return isinstance(offset.get(_STARTING), str)


def to_json(
    positions: Positions,
    *,
    marks: Mapping[Queue, Mark] | None = None,
    begins: Positions | None = None,
    again: Positions | None = None,
) -> Json:
    """Positions as Spark logs them, and what the source has to remember with them."""
    return _noted(
        _by_topic(positions),
        marks=_by_topic(marks or {}),
        begins=_by_topic(begins or {}),
        again=_by_topic(again or {}),
    )


def begun_here(positions: Positions, *, marks: Mapping[Queue, Mark] | None = None) -> Json:
    """The end of a first batch that takes nothing: the stream begins there."""
    return _noted(_by_topic(positions), marks=_by_topic(marks or {}), begins=_HERE)


def stream_begin(end: Json) -> dict[Queue, int] | None:
    """Where the stream began whose first batch has this end; None if that was not said."""
    begins = _note(end).get("begins")
    if begins is None:
        return None
    return from_json(end if begins == _HERE else begins)


def queue_begins(end: Json) -> dict[Queue, int]:
    """Where queues begin that are new in the batch with this end, as far as that was said."""
    begins = _note(end).get("begins")
    return {} if begins is None or begins == _HERE else from_json(begins)


def begun_again(end: Json) -> dict[Queue, int]:
    """Where the batch with this end goes back to, whatever its start says."""
    return from_json(_note(end).get("again", {}))


def marks_in(offset: Json) -> dict[Queue, Mark]:
    """The marks of queues that have some; none in the initial offset, and in those of old."""
    marks = _note(offset).get("marks", {})
    return {
        named_queue(topic, name): Mark(*mark)
        for topic, queues in marks.items()
        for name, mark in queues.items()
    }


def from_json(offset: Json) -> dict[Queue, int]:
    """Positions from Spark's log."""
    try:
        return {
            named_queue(topic, name): int(position)
            for topic, positions in offset.items()
            if topic != _OLD_BEGINS
            for name, position in positions.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise SourceError(
            f"the checkpoint has an offset that this source did not write: {offset!r}; use a "
            "checkpointLocation of its own for each query"
        ) from error


def _by_topic(values: Mapping[Queue, Any]) -> Json:
    found: Json = {}
    for queue in sorted(values):
        found.setdefault(queue.topic, {})[queue_name(queue)] = values[queue]
    return found


def _noted(positions: Json, **notes: Json | str) -> Json:
    note = {name: value for name, value in notes.items() if value}
    return positions | {json.dumps(note, separators=(",", ":")): {}} if note else positions


def _note(offset: Json) -> Json:
    if _OLD_BEGINS in offset:
        return {"begins": offset[_OLD_BEGINS]}
    text = next((key for key in offset if key.startswith("{")), "{}")
    note: Json = json.loads(text)
    return note


def queue_name(queue: Queue) -> str:
    """`broker:id`, the name of a queue within its topic."""
    return f"{queue.broker}:{queue.id}"


def named_queue(topic: str, name: str) -> Queue:
    """The queue of such a name. Raises `ValueError`."""
    broker, colon, number = name.rpartition(":")
    if not colon or not broker or not (number.isascii() and number.isdigit()):
        raise ValueError(f"a queue is named broker:id, as in broker-a:0, got {name!r}")
    return Queue(topic, broker, int(number))


# ---- from options


def offsets_option(option: str, given: Json, *, least: int) -> AtOffsets:
    """`{"topic": {"broker-a:0": 17, ...}}`; numbers below 0 have their special meanings."""
    allowed = f'{{"topic": {{"broker-a:0": offset, ...}}, ...}} with offsets from {least} up'
    offsets: dict[Queue, int] = {}
    for queue, value in _by_queue(option, given, allowed):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionRefused(option, str(given), allowed)
        offsets[queue] = value
    return AtOffsets(offsets, option)


def times_option(option: str, given: Json, on_no_match: OnNoMatch) -> AtTimes:
    """`{"topic": {"broker-a:0": milliseconds or ISO time, ...}}`."""
    allowed = '{"topic": {"broker-a:0": milliseconds or ISO time, ...}, ...}'
    times = {queue: instant(option, value) for queue, value in _by_queue(option, given, allowed)}
    return AtTimes(option, on_no_match, times=times)


def assign_option(option: str, given: Json) -> tuple[Queue, ...]:
    """`{"topic": ["broker-a:0", ...]}`."""
    allowed = '{"topic": ["broker-a:0", ...], ...} with at least one queue'
    found: set[Queue] = set()
    for topic, names in given.items():
        if not isinstance(names, list):
            raise OptionRefused(option, str(given), allowed)
        found.update(_named(option, given, allowed, topic, name) for name in names)
    if not found:
        raise OptionRefused(option, str(given), allowed)
    return tuple(sorted(found))


def _by_queue(option: str, given: Json, allowed: str) -> Iterable[tuple[Queue, Any]]:
    for topic, values in given.items():
        if not isinstance(values, dict):
            raise OptionRefused(option, str(given), allowed)
        for name, value in values.items():
            yield _named(option, given, allowed, topic, name), value


def _named(option: str, given: Json, allowed: str, topic: str, name: object) -> Queue:
    try:
        return named_queue(topic, str(name))
    except ValueError as error:
        raise OptionRefused(option, str(given), f"{allowed} ({error})") from None
