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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from orbitmq.client.ranges.connections import (
    EVERYTHING,
    ClientTls,
    Credentials,
    OffsetsGone,
    RangeAccess,
    RangeFilter,
)
from orbitmq.client.routes import Queue
from orbitmq.client.settings import split_name_servers
from orbitmq.errors import InvalidFilter, NoRoute, OrbitError, SettingError
from orbitmq.filter import SQL92, UnknownFilterType, compile_filter
from orbitmq.filter.tags import parse_tags
from orbitmq.names import TOOLS_GROUP, check_group, check_topic
from orbitmq.parsing import NotAllowed, duration_of, instant_of, whole_of
from orbitmq.spark.worker import WorkerFailed


def check_values(texts: OptionTexts) -> None:
    """Refuse values that are wrong in every kind of query."""
    start_place(texts, default=Latest())
    end_place(texts)
    range_filter(texts)
    offset_bounds(texts)
    batch_limits(texts)
    texts.duration("maxTriggerDelay", 0.0)
    texts.choice("badRows", "fail", ("fail", "skip"))
    for option in ("failOnDataLoss", "includeProperties", "commitProgress", "createTopic"):
        texts.flag(option, default=True)
    for option in ("minPartitions", "maxRecordsPerPartition", "pullBatchSize", "sendBatchBytes"):
        texts.count(option)
    for option in ("pullTimeoutMs", "sendTimeoutMs", "fetchOffset.retryIntervalMs"):
        texts.milliseconds(option, 0.0)
    texts.count("fetchOffset.numRetries", least=0)
    route_life(texts)
    for option in ("group", "producerGroup"):
        if (group := texts.get(option)) is not None:
            allowed_group(option, group)


def check_order(start: OffsetSpec, end: OffsetSpec) -> None:
    """Refuse explicit offsets that end before they start."""
    if not isinstance(start, AtOffsets) or not isinstance(end, AtOffsets):
        return
    for queue, at in start.offsets.items():
        to = end.offsets.get(queue, LATEST)
        if 0 <= to < at:
            raise OptionRefused(
                end.option, f"{to} for {queue}", f"at least {start.option}, which is {at} there"
            )


def start_place(texts: OptionTexts, *, default: OffsetSpec) -> OffsetSpec:
    """The start of a query: a time for all queues wins over times, and these over offsets."""
    strategy = OnNoMatch(
        texts.choice("startingOffsetsByTimestampStrategy", "error", ("error", "latest"))
    )
    time, times = texts.time("startingTimestamp"), texts.json("startingOffsetsByTimestamp")
    at_times = times_option("startingOffsetsByTimestamp", times or {}, strategy)
    at_offsets = _starting_offsets(texts.get("startingOffsets"))
    if time is not None:
        return AtTimes("startingTimestamp", strategy, time=time)
    if times is not None:
        return at_times
    return at_offsets or default


def _starting_offsets(text: str | None) -> OffsetSpec | None:
    option = "startingOffsets"
    match text and text.lower():
        case None:
            return None
        case "earliest":
            return Earliest()
        case "latest":
            return Latest()
        case "group":
            return GroupProgress()
        case _ if text is not None and text.startswith("{"):
            return offsets_option(option, json_object(option, text), least=EARLIEST)
        case _:
            raise OptionRefused(option, text, "earliest, latest, group or JSON")


def end_place(texts: OptionTexts) -> OffsetSpec:
    """The end of a batch read, with the same precedence as the start."""
    time, times = texts.time("endingTimestamp"), texts.json("endingOffsetsByTimestamp")
    at_times = times_option("endingOffsetsByTimestamp", times or {}, OnNoMatch.LATEST)
    at_offsets = _ending_offsets(texts.get("endingOffsets"))
    if time is not None:
        return AtTimes("endingTimestamp", OnNoMatch.LATEST, time=time)
    return at_times if times is not None else at_offsets


def _ending_offsets(text: str | None) -> OffsetSpec:
    if text is None or text.lower() == "latest":
        return Latest()
    if not text.startswith("{"):
        raise OptionRefused("endingOffsets", text, "latest or JSON")
    return offsets_option("endingOffsets", json_object("endingOffsets", text), least=LATEST)


def offset_bounds(texts: OptionTexts) -> tuple[int | None, int | None]:
    start, end = texts.count("fromOffset", least=0), texts.count("toOffset", least=0)
    if start is not None and end is not None and end < start:
        raise OptionRefused("toOffset", str(end), f"at least fromOffset, which is {start}")
    return start, end


def batch_limits(texts: OptionTexts) -> tuple[int | None, int | None]:
    """The largest and the smallest number of messages in a batch of a stream."""
    most, least = texts.count("maxOffsetsPerTrigger"), texts.count("minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise OptionRefused(
            "minOffsetsPerTrigger", str(least), f"at most maxOffsetsPerTrigger, which is {most}"
        )
    return most, least


def range_filter(texts: OptionTexts) -> RangeFilter:
    kind = texts.choice("subExpressionType", "TAG", ("TAG", "SQL92"))
    expression = texts.get("subExpression") or EVERYTHING
    if kind == "TAG":
        try:
            parse_tags(expression)
        except InvalidFilter as error:
            raise OptionRefused(
                "subExpression", expression, f"tags, as in a || b ({error})"
            ) from None
    elif expression == EVERYTHING:
        raise OptionRefused("subExpression", expression, "a condition, with SQL92")
    else:
        _check_condition(expression)
    return RangeFilter(expression, kind)


def _check_condition(expression: str) -> None:
    # Without the parser, the brokers check the condition.
    with suppress(UnknownFilterType):
        try:
            compile_filter(expression, SQL92)
        except InvalidFilter as error:
            raise OptionRefused(
                "subExpression", expression, f"a condition in SQL92 ({error})"
            ) from None


def route_life(texts: OptionTexts) -> float:
    """Seconds for which a route is used; -1 means the default, as in Kafka."""
    option = "metadata.cache.ttl.ms"
    return 30.0 if texts.get(option) == "-1" else texts.milliseconds(option, 30.0)


def allowed_topic(option: str, topic: str) -> str:
    try:
        return check_topic(topic)
    except SettingError as error:
        raise OptionRefused(option, topic, f"the name of a topic ({error})") from None


def allowed_group(option: str, group: str) -> str:
    try:
        return check_group(group)
    except SettingError as error:
        raise OptionRefused(option, group, f"the name of a group ({error})") from None


def names_in(text: str | None) -> tuple[str, ...]:
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


# Access to the cluster. Secrets are better kept in the environment of the driver: Spark keeps
# options in its plans and hides only names that look like secrets. Certificate and key files are
# not sent to executors, which need them at the same path.

ACCESS_OPTIONS: Final = (
    "nameServer",
    "accessKey",
    "secretKey",
    "securityToken",
    "tls.enabled",
    "tls.authority",
    "tls.certificate",
    "tls.key",
    "tls.keyPassword",
    "tls.verify",
    "tls.verifyHost",
)
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


def access_options(
    texts: OptionTexts, environment: Mapping[str, str] | None, timeout: float
) -> RangeAccess:
    """Access to the cluster, from options or the environment. Raises `OptionRefused`."""
    variables = os.environ if environment is None else environment

    def given(option: str) -> str | None:
        return texts.get(option) or variables.get(_VARIABLES[option]) or None

    name_server = given("nameServer")
    if name_server is None:
        raise OptionRefused("nameServer", None, "host:port, several with ; between them")
    try:
        name_servers = split_name_servers(name_server)
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
    is_wanted = any(name.startswith("tls.") for name in texts.names())
    is_wanted = is_wanted or given("tls.authority") is not None or _is_on(given("tls.enabled"))
    if not texts.flag("tls.enabled", default=is_wanted):
        return None
    certificate, key = given("tls.certificate"), given("tls.key")
    if key is not None and certificate is None:
        raise OptionRefused("tls.certificate", None, "given with tls.key")
    authority = given("tls.authority")
    return ClientTls(
        authority=None if authority is None else Path(authority),
        verify=texts.flag("tls.verify", default=True),
        verify_host=texts.flag("tls.verifyHost", default=True),
        certificate=None if certificate is None else Path(certificate),
        key=None if key is None else Path(key),
        key_password=given("tls.keyPassword"),
    )


def _is_on(text: str | None) -> bool:
    """Whether a variable is true."""
    return text is not None and text.lower() in ("1", "true", "yes", "on")


log = logging.getLogger(__name__)

DEFAULT_PRODUCER: Final = "spark-rocketmq"

_READ: Final = (
    "subscribe",
    "topic",
    "subscribePattern",
    "assign",
    "group",
    "groupPrefix",
    "subExpression",
    "subExpressionType",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeProperties",
    "pullBatchSize",
    "pullTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "metadata.cache.ttl.ms",
)
_STREAM: Final = (
    "commitProgress",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "drainFile",
)
_BATCH: Final = (
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "queues",
    "fromOffset",
    "toOffset",
)
_WRITE: Final = (
    "topic",
    "createTopic",
    "producerGroup",
    "sendTimeoutMs",
    "sendBatchBytes",
    "badRows",
)
_OF_BATCHES: Final = ACCESS_OPTIONS + _READ + _BATCH
_OF_STREAMS: Final = ACCESS_OPTIONS + _READ + _STREAM
_OF_WRITES: Final = ACCESS_OPTIONS + _WRITE
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
    start: OffsetSpec
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_records: int | None = None
    pull_size: int = 2048  #: messages in one pull; brokers have limits of their own
    offset_retries: int = 3
    offset_pause: float = 0.01
    route_life: float = 30.0  #: seconds for which a route is used; new queues are found by then


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options of a batch read."""

    read: ReadOptions
    end: OffsetSpec
    #: `broker:id`, or an id that means this queue of every broker; empty: all queues.
    only_queues: tuple[str, ...] = ()
    from_offset: int | None = None
    to_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of a stream."""

    read: ReadOptions
    commit_progress: bool
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay: float = 900.0
    #: While this file exists no batch starts, so that a runner can stop the stream.
    drain_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of a write."""

    access: RangeAccess
    topic: str | None = None
    create_topic: bool = False  #: whether rows may create their topic
    producer_group: str = DEFAULT_PRODUCER
    timeout: float = 30.0  #: seconds for which a frame is tried
    frame_bytes: int = 256 * 1024  #: of messages that are sent together
    skip_bad_rows: bool = False


def batch_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> BatchOptions:
    """The options of a batch read. Raises `OptionRefused`."""
    texts = _checked(options, _OF_BATCHES)
    start, end = start_place(texts, default=Earliest()), end_place(texts)
    if isinstance(start, Latest):
        raise OptionRefused(
            "startingOffsets", "latest", "earliest, group or JSON in a batch read, which ends there"
        )
    if isinstance(start, AtOffsets) and LATEST in start.offsets.values():
        raise OptionRefused(
            "startingOffsets", "-1", "an offset, or -2 for earliest, in a batch read"
        )
    check_order(start, end)
    start_at, end_at = offset_bounds(texts)
    return BatchOptions(
        read=_read_options(texts, environment, start),
        end=end,
        only_queues=names_in(texts.get("queues")),
        from_offset=start_at,
        to_offset=end_at,
    )


def stream_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> StreamOptions:
    """The options of a stream. Raises `OptionRefused`."""
    texts = _checked(options, _OF_STREAMS)
    start = start_place(texts, default=Latest())
    read = _read_options(texts, environment, start)
    commit = texts.flag("commitProgress", default=read.has_own_group)
    if commit and not read.has_own_group:
        raise OptionRefused("commitProgress", "true", "false without the option 'group'")
    most, least = batch_limits(texts)
    drain_file = texts.get("drainFile")
    return StreamOptions(
        read=read,
        commit_progress=commit,
        max_offsets=most,
        min_offsets=least,
        max_delay=texts.duration("maxTriggerDelay", 900.0),
        drain_file=None if drain_file is None else Path(drain_file),
    )


def write_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> WriteOptions:
    """The options of a write. Raises `OptionRefused`."""
    texts = _checked(options, _OF_WRITES)
    topic = texts.get("topic")
    if topic is not None:
        allowed_topic("topic", topic)
    group = texts.get("producerGroup") or DEFAULT_PRODUCER
    allowed_group("producerGroup", group)
    return WriteOptions(
        access=access_options(texts, environment, 3.0),
        topic=topic,
        create_topic=texts.flag("createTopic", default=False),
        producer_group=group,
        timeout=texts.milliseconds("sendTimeoutMs", 30.0),
        frame_bytes=texts.count("sendBatchBytes") or 256 * 1024,
        skip_bad_rows=texts.choice("badRows", "fail", ("fail", "skip")) == "skip",
    )


def include_properties(options: Mapping[str, str]) -> bool:
    """Whether the schema of a read has a column of properties."""
    return OptionTexts(options).flag("includeProperties", default=True)


# ---- parts


def _checked(options: Mapping[str, str], known: tuple[str, ...]) -> OptionTexts:
    """The options as texts; refuses unknown names, and bad values even without effect."""
    texts = OptionTexts(options)
    here = {name.lower() for name in known}
    ours = {name.lower(): name for name in (*known, *_READ, *_STREAM, *_BATCH, *_WRITE)}
    for given in sorted(texts.names() - ours.keys() - _SPARKS):
        # Spark's internal options start with two underscores.
        if not given.startswith("__"):
            close = difflib.get_close_matches(given, ours, n=1, cutoff=_ALIKE)
            meant = _ELSEWHERE.get(given) or next((ours[name] for name in close), None)
            raise OptionUnknown(given, meant, known)
    check_values(texts)
    for option in (ours[given] for given in sorted(texts.names() & ours.keys() - here)):
        # Ignored, the stream would read messages that the user wanted to exclude.
        if option in _BATCH and known is _OF_STREAMS and (text := texts.get(option)):
            raise OptionRefused(option, text, "left out of a stream: it is for batch reads")
        log.warning("option %s has no effect here: it is for %s", option, _purpose(option))
    return texts


def _purpose(option: str) -> str:
    kinds = {
        "a stream": _STREAM,
        "a batch read": _BATCH,
        "a read": _READ,
        "a write": _WRITE,
    }
    return next(kind for kind, options in kinds.items() if option in options)


def _read_options(
    texts: OptionTexts, environment: Mapping[str, str] | None, start: OffsetSpec
) -> ReadOptions:
    subscription = _subscription(texts)
    group = texts.get("group")
    if group is None and isinstance(start, GroupProgress):
        raise OptionRefused("group", None, "given when startingOffsets is group")
    return ReadOptions(
        access=access_options(texts, environment, texts.milliseconds("pullTimeoutMs", 3.0)),
        subscription=subscription,
        group=allowed_group("group", group) if group else _unnamed_group(texts, subscription),
        has_own_group=group is not None,
        wanted=range_filter(texts),
        start=start,
        fail_on_data_loss=texts.flag("failOnDataLoss", default=True),
        min_partitions=texts.count("minPartitions"),
        max_records=texts.count("maxRecordsPerPartition"),
        pull_size=texts.count("pullBatchSize") or 2048,
        offset_retries=_or(texts.count("fetchOffset.numRetries", least=0), 3),
        offset_pause=texts.milliseconds("fetchOffset.retryIntervalMs", 0.01),
        route_life=route_life(texts),
    )


def _subscription(texts: OptionTexts) -> Subscription:
    choices = ("subscribe", "subscribePattern", "assign")
    given = [name for name in (*choices, "topic") if texts.get(name) is not None]
    if len(given) != 1:
        raise TopicsNotNamed(given)
    (option,) = given
    text = texts.get(option) or ""
    if option == "assign":
        return Subscription(queues=assign_option(option, json_object(option, text)))
    if option == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise OptionRefused(option, text, f"a regular expression ({error})") from None
        return Subscription(pattern=text)
    topics = names_in(text)
    if not topics:
        raise OptionRefused(option, text, "topics with commas between them")
    return Subscription(topics=tuple(allowed_topic(option, topic) for topic in topics))


def _unnamed_group(texts: OptionTexts, subscription: Subscription) -> str:
    """The group of a read that names none: the brokers' own tools group.

    Brokers keep every group that ever pulled, so reads do not make groups of their own. With
    `groupPrefix`, for accounts with permissions by prefix, it is a name made of the subscription.
    """
    prefix = texts.get("groupPrefix")
    if prefix is None:
        return TOOLS_GROUP
    digest = hashlib.sha256(subscription.text.encode()).hexdigest()[:12]
    return allowed_group("groupPrefix", f"{prefix}-{digest}")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


# Offsets of streams as JSON, and the start and end of a query. Spark compares offsets as text, so
# topics and queues are written in one order. Notes (`marks`, `begins`, `again`) have one more key.
# The format is described in docs/internals/spark-progress.md.

#: In JSON, for the start and the end of a queue.
EARLIEST: Final = -2
LATEST: Final = -1

Positions: TypeAlias = Mapping[Queue, int]
Json: TypeAlias = dict[str, Any]

_STARTING: Final = "starting"
_HERE: Final = "here"
_OLD_BEGINS: Final = "begins at"


class Mark(NamedTuple):
    """The last message read of a queue: its offset and its store time in ms."""

    offset: int
    stored_ms: int


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
class AtTimes:
    """The first message stored at a time (seconds since the epoch) or later."""

    option: str
    on_no_match: OnNoMatch
    #: For queues that are not in `times`.
    time: float | None = None
    times: Mapping[Queue, float] = field(default_factory=dict)


OffsetSpec: TypeAlias = Earliest | Latest | GroupProgress | AtOffsets | AtTimes


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
) -> Json:
    """Positions and notes as Spark logs them."""
    return _noted(
        _by_topic(positions),
        marks=_by_topic(marks or {}),
        begins=_by_topic(begins or {}),
        again=_by_topic(again or {}),
    )


def starts_here(positions: Positions, *, marks: Mapping[Queue, Mark] | None = None) -> Json:
    """The end of a first batch that takes nothing: the stream starts there."""
    return _noted(_by_topic(positions), marks=_by_topic(marks or {}), begins=_HERE)


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


def _noted(positions: Json, **notes: Json | str) -> Json:
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
    times = {
        queue: _converted(option, value, instant_of)
        for queue, value in _by_queue(option, given, allowed)
    }
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


class SourceError(OrbitError):
    """An error of a query on the `rocketmq` source that its author can correct."""


class NoSpark(OrbitError):
    """PySpark is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "a Spark session needs pyspark, which is not installed; pip install 'orbitmq[spark]', "
            "or 'orbitmq[spark-local]' with a Java"
        )


class OptionRefused(SourceError):
    """An option with a wrong value."""

    def __init__(self, option: str, value: str | None, allowed: str) -> None:
        self.option = option
        self.value = value
        self.allowed = allowed
        got = "it is missing" if value is None else f"got {value!r}"
        super().__init__(f"option {option!r} must be {allowed}; {got}")

    def __reduce__(self) -> tuple[type[OptionRefused], tuple[Any, ...]]:
        return type(self), (self.option, self.value, self.allowed)


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

    def __reduce__(self) -> tuple[type[OptionUnknown], tuple[Any, ...]]:
        return type(self), (self.option, self.meant, self.known)


class OptionsNotPassed(SourceError):
    """Spark does not pass a table the options that it was created with."""

    REMEDY = (
        "Spark passes a table that was made by CREATE TABLE none of its OPTIONS; say CREATE "
        "TEMPORARY VIEW name USING rocketmq OPTIONS (...) instead, or in Python spark.read"
        '.format("rocketmq").options(...).load().createOrReplaceTempView("name")'
    )

    def __init__(self, problem: str | None = None) -> None:
        """`problem` is the error caused by the missing options."""
        self.problem = problem
        super().__init__(self.REMEDY if problem is None else f"{problem}. ({self.REMEDY}.)")

    def __reduce__(self) -> tuple[type[OptionsNotPassed], tuple[str | None]]:
        return type(self), (self.problem,)


class TopicMissing(SourceError):
    """The topic of rows does not exist; sending would create it, even with a mistyped name."""

    def __init__(self, missing: NoRoute) -> None:
        self.missing = missing
        super().__init__(f"{missing}, or set the option createTopic to true")

    def __reduce__(self) -> tuple[type[TopicMissing], tuple[NoRoute]]:
        return type(self), (self.missing,)


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

    def __reduce__(self) -> tuple[type[TopicsNotNamed], tuple[tuple[str, ...]]]:
        return type(self), (self.given,)


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

    def __reduce__(self) -> tuple[type[UnnamedReadRefused], tuple[str, str]]:
        return type(self), (self.group, self.refusal)


class CheckpointOfOtherTopics(SourceError):
    """The checkpoint belongs to another query: it has none of the topics that this query reads."""

    def __init__(self, topics: Iterable[str], subscription: str) -> None:
        self.topics = tuple(topics)
        #: The topics that this query reads.
        self.subscription = subscription
        shown = ", ".join(self.topics[:10])
        if len(self.topics) > 10:
            shown += f" and {len(self.topics) - 10} more"
        noun = "topic" if len(self.topics) == 1 else "topics"
        super().__init__(
            f"the checkpoint belongs to a query on {noun} {shown}, and this query reads "
            f"{subscription}; give this query a checkpointLocation of its own"
        )

    def __reduce__(self) -> tuple[type[CheckpointOfOtherTopics], tuple[tuple[str, ...], str]]:
        return type(self), (self.topics, self.subscription)


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
        shown = "; ".join(self.problems[:10])
        if len(self.problems) > 10:
            shown += f"; and {len(self.problems) - 10} more queues"
        super().__init__(f"messages are gone: {shown}. What to do: {self.REMEDIES}")

    @classmethod
    def of(cls, gone: OffsetsGone) -> DataLost:
        return cls([str(gone)])

    def __reduce__(self) -> tuple[type[DataLost], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


G = TypeVar("G")
T = TypeVar("T")


class OptionTexts:
    """The options of one query as values; names ignore case, errors name the option."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._texts = {name.lower(): text for name, text in options.items()}

    def names(self) -> frozenset[str]:
        """The given names, in lower case."""
        return frozenset(self._texts)

    def get(self, option: str) -> str | None:
        """The text of an option; None when it is missing or empty."""
        text = self._texts.get(option.lower())
        return text.strip() or None if text is not None else None

    def choice(self, option: str, default: str, allowed: tuple[str, ...]) -> str:
        text = self.get(option)
        if text is None:
            return default
        for each in allowed:
            if each.lower() == text.lower():
                return each
        raise OptionRefused(option, text, f"one of {', '.join(allowed)}")

    def flag(self, option: str, *, default: bool) -> bool:
        return self.choice(option, str(default).lower(), ("true", "false")) == "true"

    def count(self, option: str, *, least: int = 1) -> int | None:
        """A whole number."""
        text = self.get(option)
        if text is None:
            return None
        return _converted(option, text, lambda given: whole_of(given, least=least))

    def milliseconds(self, option: str, default: float) -> float:
        """A number of milliseconds, in seconds."""
        number = self.count(option)
        return default if number is None else number / 1000

    def duration(self, option: str, default: float) -> float:
        """A duration like `15m`, in seconds."""
        text = self.get(option)
        if text is None:
            return default
        return _converted(option, text, duration_of)

    def time(self, option: str) -> float | None:
        """An instant in seconds since the epoch."""
        text = self.get(option)
        return None if text is None else _converted(option, text, instant_of)

    def json(self, option: str) -> dict[str, Any] | None:
        """A JSON object."""
        text = self.get(option)
        return None if text is None else json_object(option, text)


def _converted(option: str, given: G, convert: Callable[[G], T]) -> T:
    try:
        return convert(given)
    except NotAllowed as error:
        raise OptionRefused(option, str(given), error.allowed) from None


def json_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object without duplicate names."""
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(option, text, pairs))
    except ValueError as error:
        raise OptionRefused(option, text, f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise OptionRefused(option, text, "a JSON object")
    return value


def _once(option: str, text: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise OptionRefused(option, text, "a JSON object with every name once")
    return found
