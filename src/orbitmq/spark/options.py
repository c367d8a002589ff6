"""The options of the `rocketmq` source, checked before anything is asked of a cluster.

Names and meanings follow Spark's Kafka source where the meaning is the same. Options come as texts
and without regard to case. What is wrong is refused on the driver, with the option's name.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orbitmq.client.errors import SettingError
from orbitmq.client.names import check_group, check_topic
from orbitmq.client.queue import Queue
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.ranges import EVERYTHING, RangeFilter
from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.tags import parse_tags
from orbitmq.spark.access import ACCESS_OPTIONS, access_options
from orbitmq.spark.errors import OptionRefused
from orbitmq.spark.offsets import (
    EARLIEST,
    LATEST,
    AtOffsets,
    AtTimes,
    Earliest,
    GroupProgress,
    Latest,
    OnNoMatch,
    Place,
    assign_option,
    offsets_option,
    times_option,
)
from orbitmq.spark.optiontext import OptionTexts, json_object

log = logging.getLogger(__name__)

DEFAULT_PREFIX: Final = "spark-rocketmq"

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
_WRITE: Final = ("topic", "producerGroup", "sendTimeoutMs", "sendBatchBytes", "badRows")
#: Given by Spark itself, or for it.
_SPARKS: Final = frozenset({"path", "paths", "checkpointlocation", "queryname", "outputmode"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The topics of a query: named, by a pattern, or as single queues."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    queues: tuple[Queue, ...] = ()

    @property
    def text(self) -> str:
        """The same in one line."""
        if self.pattern is not None:
            return f"pattern {self.pattern}"
        return ",".join(self.topics) if self.topics else ",".join(map(str, self.queues))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What both kinds of reading share."""

    access: RangeAccess
    subscription: Subscription
    group: str
    #: Whether the user named the group, so that its progress means something.
    has_own_group: bool
    wanted: RangeFilter
    start: Place
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_records: int | None = None
    pull_size: int = 2048  #: messages asked for at a time; brokers have limits of their own
    offset_retries: int = 3
    offset_pause: float = 0.01
    route_life: float = 30.0  #: seconds for which a route is believed: new queues show by then


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """A batch read: where it ends, and what it is restricted to."""

    read: ReadOptions
    end: Place
    #: Names `broker:id`, or plain ids that mean that queue of every broker; empty: all queues.
    only_queues: tuple[str, ...] = ()
    from_offset: int | None = None
    to_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """A stream: how much one batch takes, and whether the broker is told of progress."""

    read: ReadOptions
    commit_progress: bool
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay: float = 900.0
    #: While this file exists no batch begins: how a runner lets a stream come to rest.
    drain_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """A write."""

    access: RangeAccess
    topic: str | None = None
    producer_group: str = DEFAULT_PREFIX
    timeout: float = 30.0  #: seconds for which a frame of messages is tried
    frame_bytes: int = 256 * 1024  #: messages that are sent together
    skip_bad_rows: bool = False


def batch_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> BatchOptions:
    """The options of a batch read. Raises `OptionRefused`."""
    texts = _checked(
        options, ACCESS_OPTIONS + _READ + _BATCH, misplaced=dict.fromkeys(_STREAM, "stream")
    )
    start = _start(texts, default=Earliest())
    if isinstance(start, Latest):
        raise OptionRefused(
            "startingOffsets", "latest", "earliest, group or JSON in a batch read, which ends there"
        )
    if isinstance(start, AtOffsets) and LATEST in start.offsets.values():
        raise OptionRefused(
            "startingOffsets", "-1", "an offset, or -2 for earliest, in a batch read"
        )
    start_at, end_at = texts.count("fromOffset", least=0), texts.count("toOffset", least=0)
    if start_at is not None and end_at is not None and end_at < start_at:
        raise OptionRefused("toOffset", str(end_at), f"at least fromOffset, which is {start_at}")
    return BatchOptions(
        read=_read_options(texts, environment, start),
        end=_end(texts),
        only_queues=_names(texts.get("queues")),
        from_offset=start_at,
        to_offset=end_at,
    )


def stream_options(
    options: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> StreamOptions:
    """The options of a stream. Raises `OptionRefused`."""
    texts = _checked(
        options, ACCESS_OPTIONS + _READ + _STREAM, misplaced=dict.fromkeys(_BATCH, "batch")
    )
    start = _start(texts, default=Latest())
    read = _read_options(texts, environment, start)
    commit = texts.flag("commitProgress", default=read.has_own_group)
    if commit and not read.has_own_group:
        raise OptionRefused("commitProgress", "true", "false without the option 'group'")
    most, least = texts.count("maxOffsetsPerTrigger"), texts.count("minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise OptionRefused(
            "minOffsetsPerTrigger", str(least), f"at most maxOffsetsPerTrigger, which is {most}"
        )
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
    texts = _checked(options, ACCESS_OPTIONS + _WRITE, misplaced={})
    topic = texts.get("topic")
    if topic is not None:
        _allowed_topic("topic", topic)
    group = texts.get("producerGroup") or DEFAULT_PREFIX
    _allowed_group("producerGroup", group)
    return WriteOptions(
        access=access_options(texts, environment, 3.0),
        topic=topic,
        producer_group=group,
        timeout=texts.milliseconds("sendTimeoutMs", 30.0),
        frame_bytes=texts.count("sendBatchBytes") or 256 * 1024,
        skip_bad_rows=texts.choice("badRows", "fail", ("fail", "skip")) == "skip",
    )


def include_properties(options: Mapping[str, str]) -> bool:
    """Whether the schema of a read has a column of properties."""
    return OptionTexts(options).flag("includeProperties", default=True)


# ---- parts


def _checked(
    options: Mapping[str, str], known: tuple[str, ...], *, misplaced: Mapping[str, str]
) -> OptionTexts:
    """The options as texts; refuses what looks like one of ours and is none."""
    texts = OptionTexts(options)
    names = {name.lower(): name for name in known}
    elsewhere = {name.lower(): name for name in (*_READ, *_STREAM, *_BATCH, *_WRITE)}
    for given in sorted(texts.names() - names.keys() - _SPARKS):
        if given in elsewhere:
            kind = misplaced.get(elsewhere[given])
            log.warning(
                "option %s has no effect here%s",
                elsewhere[given],
                f": it is for a {kind} read" if kind else "",
            )
            continue
        # A name that is nearly one of ours is a slip of the pen, and would silently do nothing.
        if close := difflib.get_close_matches(given, names, n=1, cutoff=0.8):
            # Its text is not shown: it may be a secret.
            raise OptionRefused(given, None, f"written {names[close[0]]}")
        log.warning("option %s is not known and has no effect", given)
    return texts


def _read_options(
    texts: OptionTexts, environment: Mapping[str, str] | None, start: Place
) -> ReadOptions:
    subscription = _subscription(texts)
    group = texts.get("group")
    if group is None and isinstance(start, GroupProgress):
        raise OptionRefused("group", None, "given when startingOffsets is group")
    life = texts.get("metadata.cache.ttl.ms")
    return ReadOptions(
        access=access_options(texts, environment, texts.milliseconds("pullTimeoutMs", 3.0)),
        subscription=subscription,
        group=_allowed_group("group", group) if group else _made_group(texts, subscription),
        has_own_group=group is not None,
        wanted=_filter(texts),
        start=start,
        fail_on_data_loss=texts.flag("failOnDataLoss", default=True),
        min_partitions=texts.count("minPartitions"),
        max_records=texts.count("maxRecordsPerPartition"),
        pull_size=texts.count("pullBatchSize") or 2048,
        offset_retries=_or(texts.count("fetchOffset.numRetries", least=0), 3),
        offset_pause=texts.milliseconds("fetchOffset.retryIntervalMs", 0.01),
        route_life=30.0 if life == "-1" else texts.milliseconds("metadata.cache.ttl.ms", 30.0),
    )


def _subscription(texts: OptionTexts) -> Subscription:
    choices = ("subscribe", "subscribePattern", "assign")
    given = [name for name in (*choices, "topic") if texts.get(name) is not None]
    if len(given) != 1:
        raise OptionRefused(
            "subscribe",
            ", ".join(given) if given else None,
            "the only one of subscribe (or topic), subscribePattern and assign",
        )
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
    topics = _names(text)
    if not topics:
        raise OptionRefused(option, text, "topics with commas between them")
    return Subscription(topics=tuple(_allowed_topic(option, topic) for topic in topics))


def _made_group(texts: OptionTexts, subscription: Subscription) -> str:
    """A name for the broker, the same each time: brokers keep every group that they have seen."""
    prefix = texts.get("groupPrefix") or DEFAULT_PREFIX
    digest = hashlib.sha256(subscription.text.encode()).hexdigest()[:12]
    return _allowed_group("groupPrefix", f"{prefix}-{digest}")


def _filter(texts: OptionTexts) -> RangeFilter:
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
    return RangeFilter(expression, kind)


def _start(texts: OptionTexts, *, default: Place) -> Place:
    strategy = OnNoMatch(
        texts.choice("startingOffsetsByTimestampStrategy", "error", ("error", "latest"))
    )
    if (time := texts.time("startingTimestamp")) is not None:
        return AtTimes("startingTimestamp", strategy, time=time)
    if (times := texts.json("startingOffsetsByTimestamp")) is not None:
        return times_option("startingOffsetsByTimestamp", times, strategy)
    text = texts.get("startingOffsets")
    match text and text.lower():
        case None:
            return default
        case "earliest":
            return Earliest()
        case "latest":
            return Latest()
        case "group":
            return GroupProgress()
        case _ if text is not None and text.startswith("{"):
            option = "startingOffsets"
            return offsets_option(option, json_object(option, text), least=EARLIEST)
        case _:
            raise OptionRefused("startingOffsets", text, "earliest, latest, group or JSON")


def _end(texts: OptionTexts) -> Place:
    if (time := texts.time("endingTimestamp")) is not None:
        return AtTimes("endingTimestamp", OnNoMatch.LATEST, time=time)
    if (times := texts.json("endingOffsetsByTimestamp")) is not None:
        return times_option("endingOffsetsByTimestamp", times, OnNoMatch.LATEST)
    text = texts.get("endingOffsets")
    if text is None or text.lower() == "latest":
        return Latest()
    if not text.startswith("{"):
        raise OptionRefused("endingOffsets", text, "latest or JSON")
    return offsets_option("endingOffsets", json_object("endingOffsets", text), least=LATEST)


def _allowed_topic(option: str, topic: str) -> str:
    try:
        return check_topic(topic)
    except SettingError as error:
        raise OptionRefused(option, topic, f"the name of a topic ({error})") from None


def _allowed_group(option: str, group: str) -> str:
    try:
        return check_group(group)
    except SettingError as error:
        raise OptionRefused(option, group, f"the name of a group ({error})") from None


def _names(text: str | None) -> tuple[str, ...]:
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
