"""The options of the `rocketmq` source, the JSON of stream offsets, and the source's errors.

Options are checked on the driver before a cluster is asked, and errors name the option. Names and
meanings follow Spark's Kafka source where the meaning is the same. Names ignore case.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from orbitmq.client.ranges.connections import (
    EVERYTHING,
    ClientTls,
    Credentials,
    RangeAccess,
    RangeFilter,
)
from orbitmq.client.routes import Queue
from orbitmq.client.settings import split_name_servers
from orbitmq.errors import InvalidFilter, NoRoute, OrbitError, SettingError, install_command
from orbitmq.filter import SQL92, UnknownFilterType, compile_filter
from orbitmq.filter.tags import parse_tags
from orbitmq.names import TOOLS_GROUP, check_group, check_topic
from orbitmq.parsing import NotAllowed, age_of, duration_of, instant_of, position, whole_of
from orbitmq.spark.internals import WorkerFailed

log = logging.getLogger(__name__)

G = TypeVar("G")
T = TypeVar("T")

#: Makes a value of an option's name and text; raises `OptionRefused`.
Reader: TypeAlias = Callable[[str, str], Any]

# Values of options


class OptionTexts:
    """The options of one query as values; names ignore case, errors name the option."""

    def __init__(self, options: Mapping[str, str], table: Mapping[str, Option]) -> None:
        self._texts = {name.lower(): text for name, text in options.items()}
        self._table = table

    def names(self) -> frozenset[str]:
        """The given names, in lower case."""
        return frozenset(self._texts)

    def get(self, option: str) -> str | None:
        """The text of an option; None when it is missing or empty."""
        text = self._texts.get(option.lower())
        return text.strip() or None if text is not None else None

    def body_options(self) -> BodyOptions | None:
        """How bodies become columns. Raises `OptionRefused`."""
        return body_options(self._texts)

    def value(self, option: str) -> Any:
        """The value of an option, or its default. Raises `OptionRefused`."""
        text, declared = self.get(option), self._table[option]
        return declared.default if text is None else declared.read(option, text)


def _text(_option: str, text: str) -> str:
    return text


def _one_of(*allowed: str) -> Reader:
    def read(option: str, text: str) -> str:
        for each in allowed:
            if each.lower() == text.lower():
                return each
        raise OptionRefused(option, text, f"one of {', '.join(allowed)}")

    return read


def _flag(option: str, text: str) -> bool:
    return bool(_one_of("true", "false")(option, text) == "true")


def _whole(least: int) -> Reader:
    return lambda option, text: _converted(option, text, lambda given: whole_of(given, least=least))


#: Spark's units of sizes.
_SIZES: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bytes(option: str, text: str) -> int:
    """A number of bytes like `67108864` or `64m`."""
    found = re.fullmatch(r"([0-9]{1,12})\s*([kmgt]?)b?", text.lower())
    size = 0 if found is None else int(found[1]) * _SIZES[found[2]]
    if size < 1:
        raise OptionRefused(option, text, "bytes from 1 up, such as 67108864 or 64m")
    return size


def _milliseconds(option: str, text: str) -> float:
    """A number of milliseconds, in seconds."""
    return float(_whole(1)(option, text) / 1000)


def _route_life(option: str, text: str) -> float:
    """As `_milliseconds`; -1 means the default, as in Kafka."""
    return _ROUTE_LIFE if text == "-1" else _milliseconds(option, text)


def _duration(option: str, text: str) -> float:
    """A duration like `15m`, in seconds."""
    return _converted(option, text, duration_of)


class GivenTime(NamedTuple):
    """A time of an option, in seconds since the epoch."""

    time: float
    #: Whether the option counts back from the start of the query.
    is_relative: bool


def _instant(option: str, text: str) -> GivenTime:
    if (age := age_of(text)) is not None:
        return GivenTime(max(0.0, time.time() - age), is_relative=True)
    try:
        return GivenTime(instant_of(text), is_relative=False)
    except NotAllowed as error:
        raise OptionRefused(option, text, f"{error.allowed}, or an age such as -1h") from None


def _folder_or_uri(_option: str, text: str) -> str:
    """Absolute, because tasks may run in other folders."""
    return text if "://" in text else str(Path(text).expanduser().absolute())


def _names(_option: str, text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def _topics(option: str, text: str) -> tuple[str, ...]:
    topics = _names(option, text)
    if not topics:
        raise OptionRefused(option, text, "topics with commas between them")
    return tuple(_topic(option, topic) for topic in topics)


def _topic(option: str, text: str) -> str:
    try:
        return check_topic(text)
    except SettingError as error:
        raise OptionRefused(option, text, f"the name of a topic ({error})") from None


def _pattern(option: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise OptionRefused(option, text, f"a regular expression ({error})") from None
    return text


def _group(option: str, text: str) -> str:
    try:
        return check_group(text)
    except SettingError as error:
        raise OptionRefused(option, text, f"the name of a group ({error})") from None


def _converted(option: str, given: G, convert: Callable[[G], T]) -> T:
    try:
        return convert(given)
    except NotAllowed as error:
        raise OptionRefused(option, str(given), error.allowed) from None


def _json_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object without duplicate names."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise OptionRefused(option, text, "a JSON object with every name once")
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise OptionRefused(option, text, f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise OptionRefused(option, text, "a JSON object")
    return value


# The start and the end of a query

#: In JSON, for the start and the end of a queue.
EARLIEST: Final = -2
LATEST: Final = -1

Positions: TypeAlias = Mapping[Queue, int]
Json: TypeAlias = dict[str, Any]


class OnNoMatch(enum.Enum):
    """The meaning of a time that is later than all messages."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Earliest:
    """The start of each queue."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The end of each queue."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The group's offset at the broker, or the earliest message without one."""


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for every queue."""

    offsets: Positions
    option: str


@dataclass(frozen=True, slots=True)
class AtOffset:
    """One offset for all queues, within the bounds of each."""

    offset: int


@dataclass(frozen=True, slots=True)
class BeforeEnd:
    """So many messages before the end of each queue, or its start."""

    count: int


@dataclass(frozen=True, slots=True)
class AtTimes:
    """The first message stored at a time (seconds since the epoch) or later."""

    option: str
    on_no_match: OnNoMatch
    #: For queues that are not in `times`.
    time: float | None = None
    #: Whether `time` was counted back from the start of the process, and differs in the next.
    is_relative: bool = False
    times: Mapping[Queue, float] = field(default_factory=dict)


OffsetSpec: TypeAlias = (
    Earliest | Latest | GroupProgress | AtOffset | BeforeEnd | AtOffsets | AtTimes
)


def _place(least: int, **words: OffsetSpec) -> Reader:
    """A position by word, time or offset; or offsets by queue from `least` up, as JSON."""

    def read(option: str, text: str) -> OffsetSpec:
        if text.lower() in words:
            return words[text.lower()]
        if text.startswith("{"):
            return AtOffsets(_offsets(option, text, least), option)
        if _COUNT_BACK.fullmatch(text):
            if text in ("-1", "-2"):
                # In JSON these are the end and the start.
                raise OptionRefused(option, text, f"{', '.join(words)}, or -3 and below")
            return BeforeEnd(-int(text))
        try:
            found = position(text, option)
        except SettingError:
            found = None
        if found is not None and found.time is not None:
            is_relative = age_of(text) is not None
            return AtTimes(option, OnNoMatch.LATEST, max(0.0, found.time), is_relative)
        if found is not None and found.offset is not None:
            return AtOffset(found.offset)
        if found is not None and found.place.value in words:
            return words[found.place.value]
        named = ", ".join(words)
        allowed = (
            f"{named}, a time such as 2026-11-18T09:00 or -10m, an offset, so many messages before "
            "the end such as -1000, or JSON"
        )
        raise OptionRefused(option, text, allowed)

    return read


#: Fewer digits than the largest offset has.
_COUNT_BACK: Final = re.compile(r"-[0-9]{1,18}")


def _offsets(option: str, text: str, least: int) -> dict[Queue, int]:
    """`{"topic": {"broker-a:0": 17, ...}}`."""
    allowed = f'{{"topic": {{"broker-a:0": offset, ...}}, ...}} with offsets from {least} up'
    offsets: dict[Queue, int] = {}
    for queue, value in _by_queue(option, text, allowed):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionRefused(option, text, allowed)
        offsets[queue] = value
    return offsets


def _times(option: str, text: str) -> dict[Queue, float]:
    """`{"topic": {"broker-a:0": milliseconds or ISO time, ...}}`."""
    allowed = '{"topic": {"broker-a:0": milliseconds or ISO time, ...}, ...}'
    return {
        queue: _converted(option, value, instant_of)
        for queue, value in _by_queue(option, text, allowed)
    }


def _assign(option: str, text: str) -> tuple[Queue, ...]:
    """`{"topic": ["broker-a:0", ...]}`."""
    allowed = '{"topic": ["broker-a:0", ...], ...} with at least one queue'
    found: set[Queue] = set()
    for topic, names in _json_object(option, text).items():
        if not isinstance(names, list):
            raise OptionRefused(option, text, allowed)
        found.update(_named(option, text, allowed, topic, name) for name in names)
    if not found:
        raise OptionRefused(option, text, allowed)
    return tuple(sorted(found))


def _by_queue(option: str, text: str, allowed: str) -> Iterable[tuple[Queue, Any]]:
    for topic, values in _json_object(option, text).items():
        if not isinstance(values, dict):
            raise OptionRefused(option, text, allowed)
        for name, value in values.items():
            yield _named(option, text, allowed, topic, name), value


def _named(option: str, text: str, allowed: str, topic: str, name: object) -> Queue:
    try:
        return named_queue(topic, str(name))
    except ValueError as error:
        raise OptionRefused(option, text, f"{allowed} ({error})") from None


# The table of options


class Option(NamedTuple):
    """How the text of an option becomes a value, and the value without a text."""

    read: Reader = _text
    default: Any = None


_ROUTE_LIFE: Final = 30.0

#: Access to the cluster.
ACCESS_OPTIONS: Final[Mapping[str, Option]] = {
    "nameServer": Option(),
    "accessKey": Option(),
    "secretKey": Option(),
    "securityToken": Option(),
    "tls.enabled": Option(_flag),
    "tls.authority": Option(),
    "tls.certificate": Option(),
    "tls.key": Option(),
    "tls.keyPassword": Option(),
    "tls.verify": Option(_flag, True),
    "tls.verifyHost": Option(_flag, True),
}
READ_OPTIONS: Final[Mapping[str, Option]] = {
    "subscribe": Option(_topics),
    "topic": Option(_topics),
    "subscribePattern": Option(_pattern),
    "assign": Option(_assign),
    "group": Option(_group),
    "groupPrefix": Option(_group),
    "subExpression": Option(default=EVERYTHING),
    "subExpressionType": Option(_one_of("TAG", "SQL92"), "TAG"),
    "startingOffsets": Option(
        _place(EARLIEST, earliest=Earliest(), latest=Latest(), group=GroupProgress())
    ),
    "archive": Option(_folder_or_uri),
    "startingTimestamp": Option(_instant),
    "startingOffsetsByTimestamp": Option(_times),
    "startingOffsetsByTimestampStrategy": Option(_one_of("error", "latest"), "error"),
    "failOnDataLoss": Option(_flag, True),
    "minPartitions": Option(_whole(1)),
    "maxRecordsPerPartition": Option(_whole(1)),
    "includeProperties": Option(_flag, True),
    "bodyFormat": Option(_one_of("json", "avro", "protobuf", "text", "variant")),
    "bodySchema": Option(),
    "badBodies": Option(_one_of("fail", "null", "corrupt"), "corrupt"),
    "includeBody": Option(_flag),
    "pullBatchSize": Option(_whole(1), 2048),
    "pullTimeoutMs": Option(_milliseconds, 3.0),
    "fetchOffset.numRetries": Option(_whole(0), 3),
    "fetchOffset.retryIntervalMs": Option(_milliseconds, 0.01),
    "metadata.cache.ttl.ms": Option(_route_life, _ROUTE_LIFE),
}
STREAM_OPTIONS: Final[Mapping[str, Option]] = {
    "commitProgress": Option(_flag),
    "maxOffsetsPerTrigger": Option(_whole(1)),
    "maxBytesPerTrigger": Option(_bytes),
    "minRowsPerTopic": Option(_whole(1)),
    "minOffsetsPerTrigger": Option(_whole(1)),
    "maxTriggerDelay": Option(_duration, 900.0),
    "drainFile": Option(),
}
BATCH_OPTIONS: Final[Mapping[str, Option]] = {
    "endingOffsets": Option(_place(LATEST, latest=Latest())),
    "endingTimestamp": Option(_instant),
    "endingOffsetsByTimestamp": Option(_times),
    "queues": Option(_names, ()),
    "fromOffset": Option(_whole(0)),
    "toOffset": Option(_whole(0)),
}
WRITE_OPTIONS: Final[Mapping[str, Option]] = {
    "topic": Option(_topic),
    "createTopic": Option(_flag, False),
    "producerGroup": Option(_group, "spark-rocketmq"),
    "sendTimeoutMs": Option(_milliseconds, 30.0),
    "sendBatchBytes": Option(_whole(1), 256 * 1024),
    "badRows": Option(_one_of("fail", "skip"), "fail"),
    "exactlyOnce": Option(_flag),
    "bodyFormat": Option(_one_of("json", "avro", "protobuf", "text", "variant")),
    "bodySchema": Option(),
}
_PURPOSES: Final = {
    "a stream": STREAM_OPTIONS,
    "a batch read": BATCH_OPTIONS,
    "a read": READ_OPTIONS,
    "a write": WRITE_OPTIONS,
}
_OF_BATCHES: Final = {**ACCESS_OPTIONS, **READ_OPTIONS, **BATCH_OPTIONS}
_OF_STREAMS: Final = {**ACCESS_OPTIONS, **READ_OPTIONS, **STREAM_OPTIONS}
_OF_WRITES: Final = {**ACCESS_OPTIONS, **WRITE_OPTIONS}
_ALL: Final = {**_OF_WRITES, **_OF_BATCHES, **_OF_STREAMS}
#: Names of options in Spark's Kafka source and in clients of RocketMQ.
_ELSEWHERE: Final = {
    "kafka.bootstrap.servers": "nameServer",
    "bootstrap.servers": "nameServer",
    "kafka.group.id": "group",
    "group.id": "group",
    "namesrvaddr": "nameServer",
    "consumergroup": "group",
    "tag": "subExpression",
    "tags": "subExpression",
}
#: The similarity of two names, from 0 to 1, from which one is suggested for the other.
_ALIKE: Final = 0.6
#: Options of Spark itself.
_SPARKS: Final = frozenset({"path", "paths", "checkpointlocation", "queryname", "outputmode"})


def _checked(options: Mapping[str, str], known: Mapping[str, Option]) -> OptionTexts:
    """The options of a query; refuses unknown names, and bad values even without effect."""
    texts = OptionTexts(options, {**_ALL, **known})
    ours = {name.lower(): name for name in (*known, *_ALL)}
    for given in sorted(texts.names() - ours.keys() - _SPARKS):
        # Spark's internal options start with two underscores.
        if not given.startswith("__"):
            close = difflib.get_close_matches(given, ours, n=1, cutoff=_ALIKE)
            meant = _ELSEWHERE.get(given) or next((ours[name] for name in close), None)
            raise OptionUnknown(given, meant, known)
    given_here = [ours[given] for given in sorted(texts.names() & ours.keys())]
    for option in given_here:
        texts.value(option)
    _range_filter(texts)
    _check_order(texts, "fromOffset", "toOffset")
    _check_order(texts, "minOffsetsPerTrigger", "maxOffsetsPerTrigger")
    _check_order(texts, "minRowsPerTopic", "maxOffsetsPerTrigger")
    for option in given_here:
        if option in known:
            continue
        # Ignored, the stream would read messages that the user wanted to exclude.
        if option in BATCH_OPTIONS and known is _OF_STREAMS and (text := texts.get(option)):
            raise OptionRefused(option, text, "left out of a stream: it is for batch reads")
        purpose = next(kind for kind, found in _PURPOSES.items() if option in found)
        log.warning("option %s has no effect here: it is for %s", option, purpose)
    return texts


def _check_order(texts: OptionTexts, low: str, high: str) -> None:
    least, most = texts.value(low), texts.value(high)
    if least is not None and most is not None and least > most:
        raise OptionRefused(low, str(least), f"at most {high}, which is {most}")


# The options of a query


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The topics of a query: by name, by pattern, or as single queues."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    queues: tuple[Queue, ...] = ()

    @property
    def text(self) -> str:
        """The subscription in one line."""
        if self.pattern is not None:
            return f"pattern {self.pattern}"
        return ",".join(self.topics) if self.topics else ",".join(map(str, self.queues))

    def names(self, topic: str) -> bool:
        """Whether the subscription includes a topic, existing or not."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or any(queue.topic == topic for queue in self.queues)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of batch reads and streams."""

    access: RangeAccess
    subscription: Subscription
    #: The group of the pulls.
    group: str
    #: Whether the user named the group, so that its offsets matter.
    has_own_group: bool
    wanted: RangeFilter
    body: BodyOptions | None
    #: The place of an archive that has what brokers have deleted.
    archive: str | None
    start: OffsetSpec
    fail_on_data_loss: bool
    min_partitions: int | None
    max_records: int | None
    pull_size: int  #: messages in one pull; brokers have limits of their own
    offset_retries: int
    offset_pause: float
    route_life: float  #: seconds for which a route is used; new queues are found by then


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options of a batch read."""

    read: ReadOptions
    end: OffsetSpec
    #: `broker:id`, or an id that means this queue of every broker; empty: all queues.
    only_queues: tuple[str, ...]
    from_offset: int | None
    to_offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of a stream."""

    read: ReadOptions
    commit_progress: bool
    max_offsets: int | None
    #: Of stored messages in a batch, as estimated.
    max_bytes: int | None
    #: Messages of each topic in a limited batch, before the rest is divided.
    min_rows: int
    min_offsets: int | None
    max_delay: float
    #: While this file exists no batch starts, so that a runner can stop the stream.
    drain_file: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of a write."""

    access: RangeAccess
    topic: str | None
    create_topic: bool  #: whether rows may create their topic
    producer_group: str
    timeout: float  #: seconds for which a frame is tried
    frame_bytes: int  #: of messages that are sent together
    body: BodyOptions | None  #: how bodies are made of values
    skip_bad_rows: bool
    #: Whether brokers drop a row that they have already; None: a stream's rows, if they can.
    exactly_once: bool | None = None


def batch_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> BatchOptions:
    """The options of a batch read. Raises `OptionRefused`."""
    texts = _checked(options, _OF_BATCHES)
    strategy = OnNoMatch(texts.value("startingOffsetsByTimestampStrategy"))
    start = _chosen_place(texts, "starting", strategy, Earliest())
    end = _chosen_place(texts, "ending", OnNoMatch.LATEST, Latest())
    if isinstance(start, Latest):
        raise OptionRefused(
            "startingOffsets", "latest", "earliest, group or JSON in a batch read, which ends there"
        )
    if isinstance(start, AtOffsets) and LATEST in start.offsets.values():
        raise OptionRefused(
            "startingOffsets", "-1", "an offset, or -2 for earliest, in a batch read"
        )
    if isinstance(start, AtOffsets) and isinstance(end, AtOffsets):
        for queue, at in start.offsets.items():
            to = end.offsets.get(queue, LATEST)
            if 0 <= to < at:
                raise OptionRefused(
                    end.option, f"{to} for {queue}", f"at least {start.option}, which is {at} there"
                )
    return BatchOptions(
        read=_read_options(texts, environment, start),
        end=end,
        only_queues=texts.value("queues"),
        from_offset=texts.value("fromOffset"),
        to_offset=texts.value("toOffset"),
    )


def stream_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> StreamOptions:
    """The options of a stream. Raises `OptionRefused`."""
    texts = _checked(options, _OF_STREAMS)
    strategy = OnNoMatch(texts.value("startingOffsetsByTimestampStrategy"))
    read = _read_options(texts, environment, _chosen_place(texts, "starting", strategy, Latest()))
    commit = texts.value("commitProgress")
    if commit and not read.has_own_group:
        raise OptionRefused("commitProgress", "true", "false without the option 'group'")
    drain_file = texts.value("drainFile")
    return StreamOptions(
        read=read,
        commit_progress=read.has_own_group if commit is None else commit,
        max_offsets=texts.value("maxOffsetsPerTrigger"),
        max_bytes=texts.value("maxBytesPerTrigger"),
        min_rows=texts.value("minRowsPerTopic") or 0,
        min_offsets=texts.value("minOffsetsPerTrigger"),
        max_delay=texts.value("maxTriggerDelay"),
        drain_file=None if drain_file is None else Path(drain_file),
    )


def write_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> WriteOptions:
    """The options of a write. Raises `OptionRefused`."""
    texts = _checked(options, _OF_WRITES)
    return WriteOptions(
        access=_access(texts, environment, 3.0),
        topic=texts.value("topic"),
        create_topic=texts.value("createTopic"),
        producer_group=texts.value("producerGroup"),
        timeout=texts.value("sendTimeoutMs"),
        frame_bytes=texts.value("sendBatchBytes"),
        body=texts.body_options(),
        skip_bad_rows=texts.value("badRows") == "skip",
        exactly_once=texts.value("exactlyOnce"),
    )


def include_properties(options: Mapping[str, str]) -> bool:
    """Whether the schema of a read has a column of properties."""
    return bool(OptionTexts(options, READ_OPTIONS).value("includeProperties"))


def _read_options(
    texts: OptionTexts, environment: Mapping[str, str] | None, start: OffsetSpec
) -> ReadOptions:
    subscription = _subscription(texts)
    group = texts.value("group")
    if group is None and isinstance(start, GroupProgress):
        raise OptionRefused("group", None, "given when startingOffsets is group")
    return ReadOptions(
        access=_access(texts, environment, texts.value("pullTimeoutMs")),
        subscription=subscription,
        group=group or _unnamed_group(texts, subscription),
        has_own_group=group is not None,
        wanted=_range_filter(texts),
        body=texts.body_options(),
        archive=texts.value("archive"),
        start=start,
        fail_on_data_loss=texts.value("failOnDataLoss"),
        min_partitions=texts.value("minPartitions"),
        max_records=texts.value("maxRecordsPerPartition"),
        pull_size=texts.value("pullBatchSize"),
        offset_retries=texts.value("fetchOffset.numRetries"),
        offset_pause=texts.value("fetchOffset.retryIntervalMs"),
        route_life=texts.value("metadata.cache.ttl.ms"),
    )


def _chosen_place(
    texts: OptionTexts, side: str, on_no_match: OnNoMatch, default: OffsetSpec
) -> OffsetSpec:
    """The start or end: a time for all queues wins over times, and these over offsets."""
    given: GivenTime | None = texts.value(f"{side}Timestamp")
    times = texts.value(f"{side}OffsetsByTimestamp")
    if given is not None:
        if given.is_relative and texts.get("startingOffsetsByTimestampStrategy") is None:
            # Within the last hour, a queue may well have nothing.
            on_no_match = OnNoMatch.LATEST
        return AtTimes(f"{side}Timestamp", on_no_match, given.time, given.is_relative)
    if times is not None:
        return AtTimes(f"{side}OffsetsByTimestamp", on_no_match, times=times)
    found: OffsetSpec | None = texts.value(f"{side}Offsets")
    return default if found is None else found


def _subscription(texts: OptionTexts) -> Subscription:
    given = [
        name
        for name in ("subscribe", "subscribePattern", "assign", "topic")
        if texts.get(name) is not None
    ]
    if len(given) != 1:
        raise TopicsNotNamed(given)
    (option,) = given
    match option:
        case "assign":
            return Subscription(queues=texts.value(option))
        case "subscribePattern":
            return Subscription(pattern=texts.value(option))
        case _:
            return Subscription(topics=texts.value(option))


def _unnamed_group(texts: OptionTexts, subscription: Subscription) -> str:
    """The group of a read that names none: the brokers' own tools group.

    Brokers keep every group that ever pulled, so reads do not make groups of their own. With
    `groupPrefix`, for accounts with permissions by prefix, it is a name made of the subscription.
    """
    prefix = texts.value("groupPrefix")
    if prefix is None:
        return TOOLS_GROUP
    digest = hashlib.sha256(subscription.text.encode()).hexdigest()[:12]
    return _group("groupPrefix", f"{prefix}-{digest}")


def _range_filter(texts: OptionTexts) -> RangeFilter:
    option = "subExpression"
    kind, expression = texts.value("subExpressionType"), texts.value(option)
    if kind == "TAG":
        try:
            parse_tags(expression)
        except InvalidFilter as error:
            raise OptionRefused(option, expression, f"tags, as in a || b ({error})") from None
    elif expression == EVERYTHING:
        raise OptionRefused(option, expression, "a condition, with SQL92")
    else:
        # Without the parser, the brokers check the condition.
        with suppress(UnknownFilterType):
            try:
                compile_filter(expression, SQL92)
            except InvalidFilter as error:
                raise OptionRefused(option, expression, f"a condition in SQL92 ({error})") from None
    return RangeFilter(expression, kind)


# Bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOptions:
    """How bodies are decoded to the column `value`, or encoded from it."""

    #: json, avro, protobuf, text or variant.
    form: str
    #: The DDL or JSON of a schema.
    schema: str | None = None
    #: Of Protobuf: the set of files, and the full name of the message type.
    descriptor: bytes = b""
    message: str = ""
    #: fail, null or corrupt.
    bad: str = "corrupt"
    #: Whether there is a column `body` as well.
    has_body: bool = False


def body_options(options: Mapping[str, str]) -> BodyOptions | None:
    """How bodies become columns; None: they stay bytes. Raises `OptionRefused`."""
    texts = OptionTexts(options, READ_OPTIONS)
    form: str | None = texts.value("bodyFormat")
    if form is None:
        for name in ("bodySchema", "badBodies"):
            if (text := texts.get(name)) is not None:
                raise OptionRefused(name, text, "given with the option bodyFormat")
        return None
    schema, descriptor, message = texts.get("bodySchema"), b"", ""
    match form:
        case "text" | "variant" if schema is not None:
            raise OptionRefused("bodySchema", schema, f"left out with bodyFormat {form}")
        case "avro":
            if schema is None:
                raise OptionRefused("bodySchema", None, "an Avro schema in JSON, or a file of one")
            if schema[:1] not in ("{", "[", '"'):
                schema = _file("bodySchema", schema).decode(errors="replace")
        case "protobuf":
            path, _, message = (schema or "").rpartition("#")
            if not path or not message:
                allowed = "a file that protoc --include_imports -o FILE makes, and the full name "
                allowed += "of a message type, as in orders.desc#shop.Order"
                raise OptionRefused("bodySchema", schema, allowed)
            descriptor = _file("bodySchema", path)
    return BodyOptions(
        form=form,
        schema=schema,
        descriptor=descriptor,
        message=message,
        bad=texts.value("badBodies"),
        has_body=texts.value("includeBody") is True,
    )


def _file(option: str, path: str) -> bytes:
    """A file on the driver; tasks get its content."""
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        raise OptionRefused(option, path, f"a file that can be read ({error})") from None


# Access to the cluster. Secrets are better kept in the environment of the driver: Spark keeps
# options in its plans and hides only names that look like secrets. Certificate and key files are
# not sent to executors, which need them at the same path.

#: The variables that replace missing options, as in the `orbitmq` command.
_VARIABLES: Final = {
    "nameServer": "ORBITMQ_NAME_SERVER",
    "accessKey": "ORBITMQ_ACCESS_KEY",
    "secretKey": "ORBITMQ_SECRET_KEY",
    "securityToken": "ORBITMQ_SECURITY_TOKEN",
    "tls.enabled": "ORBITMQ_TLS",
    "tls.authority": "ORBITMQ_TLS_CA",
    "tls.certificate": "ORBITMQ_TLS_CERTIFICATE",
    "tls.key": "ORBITMQ_TLS_KEY",
    "tls.keyPassword": "ORBITMQ_TLS_KEY_PASSWORD",
}


def access_to(name_server: str, timeout: float) -> RangeAccess:
    """Access to a cluster, with the rest from the environment. Raises `OptionRefused`."""
    return _access(OptionTexts({"nameServer": name_server}, ACCESS_OPTIONS), None, timeout)


def _access(
    texts: OptionTexts, environment: Mapping[str, str] | None, timeout: float
) -> RangeAccess:
    variables = os.environ if environment is None else environment

    def given(option: str) -> str | None:
        return texts.get(option) or variables.get(_VARIABLES[option]) or None

    name_server = given("nameServer")
    try:
        name_servers = split_name_servers(name_server or "")
    except SettingError as error:
        raise OptionRefused("nameServer", name_server, f"host:port ({error})") from None
    if not name_servers:
        raise OptionRefused("nameServer", name_server, "host:port, several with ; between them")
    access_key, secret_key = given("accessKey"), given("secretKey")
    if (access_key is None) != (secret_key is None):
        missing = "secretKey" if secret_key is None else "accessKey"
        raise OptionRefused(missing, None, "given with the other of accessKey and secretKey")
    credentials = None
    if access_key is not None and secret_key is not None:
        credentials = Credentials(
            access_key=access_key, secret_key=secret_key, security_token=given("securityToken")
        )
    return RangeAccess(
        name_servers=name_servers,
        credentials=credentials,
        tls=_tls(texts, given),
        timeout=timeout,
    )


def _tls(texts: OptionTexts, given: Callable[[str], str | None]) -> ClientTls | None:
    is_wanted = texts.value("tls.enabled")
    if is_wanted is None:
        is_on = (given("tls.enabled") or "").lower() in ("1", "true", "yes", "on")
        is_named = any(name.startswith("tls.") for name in texts.names())
        is_wanted = is_on or is_named or given("tls.authority") is not None
    if not is_wanted:
        return None
    certificate, key = given("tls.certificate"), given("tls.key")
    if key is not None and certificate is None:
        raise OptionRefused("tls.certificate", None, "given with tls.key")
    authority = given("tls.authority")
    return ClientTls(
        authority=None if authority is None else Path(authority),
        verify=texts.value("tls.verify"),
        verify_host=texts.value("tls.verifyHost"),
        certificate=None if certificate is None else Path(certificate),
        key=None if key is None else Path(key),
        key_password=given("tls.keyPassword"),
    )


# Offsets of streams as JSON. Spark compares offsets as text, so topics and queues are written in
# one order. Notes (`marks`, `begins`, `again`) have one more key. The format is described in
# docs/internals/spark-progress.md.

_STARTING: Final = "starting"
_HERE: Final = "here"
_OLD_BEGINS: Final = "begins at"


class Mark(NamedTuple):
    """The last message read of a queue: its offset and its store time in ms."""

    offset: int
    stored_ms: int


def starting(place: OffsetSpec) -> Json:
    """The initial offset of a stream, which names its start."""
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
    """Whether an offset was made by `starting`."""
    return isinstance(offset.get(_STARTING), str)


def to_json(
    positions: Positions,
    *,
    marks: Mapping[Queue, Mark] | None = None,
    begins: Positions | None = None,
    again: Positions | None = None,
    since_ms: int | None = None,
) -> Json:
    """Positions and notes as Spark logs them.

    `since_ms` is the time at which a stream with a relative start began.
    """
    return _noted(
        _by_topic(positions),
        marks=_by_topic(marks or {}),
        begins=_by_topic(begins or {}),
        again=_by_topic(again or {}),
        since=since_ms,
    )


def starts_here(
    positions: Positions,
    *,
    marks: Mapping[Queue, Mark] | None = None,
    since_ms: int | None = None,
) -> Json:
    """The end of a first batch that takes nothing: the stream starts there."""
    return _noted(_by_topic(positions), marks=_by_topic(marks or {}), begins=_HERE, since=since_ms)


def since_in(offset: Json) -> int | None:
    """The time in ms at which the stream with this offset began, if the offset has it."""
    since = _note(offset).get("since")
    return since if isinstance(since, int) else None


def stream_start(end: Json) -> dict[Queue, int] | None:
    """The start of the stream whose first batch has this end; None if the end does not say it."""
    begins = _note(end).get("begins")
    if begins is None:
        return None
    return from_json(end if begins == _HERE else begins)


def new_queue_starts(end: Json) -> dict[Queue, int]:
    """The starts of queues that are new in the batch with this end, as far as it says them."""
    begins = _note(end).get("begins")
    return {} if begins is None or begins == _HERE else from_json(begins)


def reread_from(end: Json) -> dict[Queue, int]:
    """The offsets from which the batch with this end reads changed queues again."""
    return from_json(_note(end).get("again", {}))


def marks_in(offset: Json) -> dict[Queue, Mark]:
    """The marks in an offset; none in the initial offset and in those of old versions."""
    try:
        return {
            named_queue(topic, name): Mark(*map(int, mark))
            for topic, queues in _note(offset).get("marks", {}).items()
            for name, mark in queues.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise _foreign(offset) from error


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
        raise _foreign(offset) from error


def _foreign(offset: object) -> SourceError:
    return SourceError(
        "the checkpoint has an offset, in the last or the last but one file of its folder "
        f"'offsets', that this source did not write: {offset!r}; use a checkpointLocation of its "
        "own for each query"
    )


def _by_topic(values: Mapping[Queue, Any]) -> Json:
    found: Json = {}
    for queue in sorted(values):
        found.setdefault(queue.topic, {})[queue_name(queue)] = values[queue]
    return found


def _noted(positions: Json, **notes: Json | str | int | None) -> Json:
    note = {name: value for name, value in notes.items() if value}
    return positions | {json.dumps(note, separators=(",", ":")): {}} if note else positions


def _note(offset: Json) -> Json:
    if _OLD_BEGINS in offset:
        return {"begins": offset[_OLD_BEGINS]}
    text = next((key for key in offset if key.startswith("{")), "{}")
    try:
        note = json.loads(text)
    except ValueError as error:
        raise _foreign(offset) from error
    if not isinstance(note, dict):
        raise _foreign(offset)
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


# Errors

#: Characters of a cause that are shown.
_LONGEST: Final = 1000
_FROM_OURS: Final = f"{WorkerFailed.__module__}.{WorkerFailed.__name__}: "


def cause_of(said: str) -> str:
    """The cause in Spark's text about a failed job or query, in one line.

    For an error of Python it is the line below the frames of the last traceback. Without any, as
    when a worker is gone, it is the JVM's error, below the line that names the call.
    """
    _, found, below = said.rpartition("Traceback (most recent call last):\n")
    if found:
        lines = [line for line in below.splitlines() if line[:1].strip()]
        if lines:
            # The prefix of `cause_first`.
            return lines[0].removeprefix(_FROM_OURS)[:_LONGEST]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    of_java = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return next(iter(of_java + lines), said)[:_LONGEST]


#: How many queues, topics or problems an error names.
_NAMED: Final = 10


def some_of(things: Iterable[object], separator: str = ", ", noun: str = "") -> str:
    """The first of several things as text, and how many there are besides."""
    texts = list(map(str, things))
    if len(texts) <= _NAMED:
        return separator.join(texts)
    more = f"and {len(texts) - _NAMED} more{noun}"
    return separator.join(texts[:_NAMED]) + f"{separator.rstrip() if noun else ''} {more}"


class SourceError(OrbitError):
    """An error of a query on the `rocketmq` source that its author can correct."""


class NoSpark(OrbitError):
    """PySpark is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "a Spark session needs pyspark, which is not installed; "
            f"{install_command('spark')}, or with a Java: {install_command('spark-local')}"
        )


class OptionRefused(SourceError):
    """An option with a wrong value."""

    def __init__(self, option: str, value: str | None, allowed: str) -> None:
        self.option = option
        self.value = value
        self.allowed = allowed
        got = "it is missing" if value is None else f"got {value!r}"
        super().__init__(f"option {option!r} must be {allowed}; {got}")


class OptionUnknown(OptionRefused):
    """An unknown option. Its value is not shown: it may be a secret."""

    def __init__(self, option: str, meant: str | None, known: Iterable[str]) -> None:
        #: The name that was probably meant.
        self.meant = meant
        self.known = tuple(known)
        self.option = option
        self.value = None
        self.allowed = f"one of {', '.join(self.known)}"
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(self.known)}"
        SourceError.__init__(self, f"unknown option {option!r}; {hint}")


class OptionsNotPassed(SourceError):
    """Spark does not pass a table the options that it was created with."""

    REMEDY = (
        "Spark passes a table that declares columns none of its OPTIONS; say CREATE TABLE name "
        "USING rocketmq OPTIONS (nameServer '...', topic '...') without columns, or with columns "
        "CREATE TEMPORARY VIEW"
    )

    def __init__(self, problem: str | None = None) -> None:
        """`problem` is the error caused by the missing options."""
        self.problem = problem
        super().__init__(self.REMEDY if problem is None else f"{problem}. ({self.REMEDY}.)")


class TopicMissing(SourceError):
    """The topic of rows does not exist; sending would create it, even with a mistyped name."""

    def __init__(self, missing: NoRoute) -> None:
        self.missing = missing
        super().__init__(f"{missing}, or set the option createTopic to true")


class TopicsNotNamed(OptionRefused):
    """A read names no topics, or in more than one way."""

    WAYS = "subscribe (or topic), subscribePattern and assign"

    def __init__(self, given: Iterable[str]) -> None:
        self.given = tuple(given)
        self.option = "subscribe"
        self.value = ", ".join(self.given) or None
        self.allowed = f"the only one of {self.WAYS}"
        got = f"{' and '.join(self.given)} are given" if self.given else "none is given"
        SourceError.__init__(
            self, f"say which topics to read, with one of the options {self.WAYS}; {got}"
        )


class SchemaRefused(SourceError):
    """A schema that cannot be read or written."""


class UnnamedReadRefused(SourceError):
    """The account lacks the permission for the group of reads that name none."""

    def __init__(self, group: str, refusal: str) -> None:
        self.group = group
        self.refusal = refusal
        super().__init__(
            f"a read without option 'group' pulls as group {group}, for which this account has no "
            f"permission: {refusal}; set option 'group' to one that it may use, or 'groupPrefix' "
            f"to the prefix of those, or allow the account SUB on {group}"
        )


class CheckpointOfOtherTopics(SourceError):
    """The checkpoint belongs to another query: it has none of the topics that this query reads."""

    def __init__(self, topics: Iterable[str], subscription: str) -> None:
        self.topics = tuple(topics)
        #: The topics that this query reads.
        self.subscription = subscription
        noun = "topic" if len(self.topics) == 1 else "topics"
        super().__init__(
            f"the checkpoint belongs to a query on {noun} {some_of(self.topics)}, and this query "
            f"reads {subscription}; give this query a checkpointLocation of its own"
        )


class DataLost(SourceError):
    """Messages that the query has to read no longer exist."""

    REMEDIES = (
        "either set failOnDataLoss to false, which leaves out what is gone, reads a queue that was "
        "created again from its start, and goes on at the present end of a queue that ends before "
        "the wanted offset and is not known to be another one (it lost its end, or a checkpoint of "
        "an older version does not tell); or start with a new checkpointLocation and "
        "startingOffsets=earliest, which reads all that exists; and have the broker keep "
        "messages longer than the query may lag (fileReservedTime)"
    )

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        shown = some_of(self.problems, "; ", " queues")
        super().__init__(f"messages are gone: {shown}. What to do: {self.REMEDIES}")
