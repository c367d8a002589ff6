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

from orbitmq.client.names import TOOLS_GROUP
from orbitmq.client.queue import Queue
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.ranges import RangeFilter
from orbitmq.spark.access import ACCESS_OPTIONS, access_options
from orbitmq.spark.errors import OptionRefused, OptionUnknown, TopicsNotNamed
from orbitmq.spark.offsets import (
    LATEST,
    AtOffsets,
    Earliest,
    GroupProgress,
    Latest,
    Place,
    assign_option,
)
from orbitmq.spark.optionparts import (
    allowed_group,
    allowed_topic,
    batch_limits,
    check_order,
    check_values,
    end_place,
    names_in,
    offset_bounds,
    range_filter,
    route_life,
    start_place,
)
from orbitmq.spark.optiontext import OptionTexts, json_object

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
#: What others call an option of ours: Spark's Kafka source, and clients of RocketMQ.
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
#: How much two names have in common, from 0 to 1, before one is taken for a slip of the other.
_ALIKE: Final = 0.6
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

    def names(self, topic: str) -> bool:
        """Whether the topic is one of these, be it there at present or not."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or any(queue.topic == topic for queue in self.queues)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What both kinds of reading share."""

    access: RangeAccess
    subscription: Subscription
    #: The name under which brokers are asked.
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
    create_topic: bool = False  #: whether rows may go to a topic that does not exist
    producer_group: str = DEFAULT_PRODUCER
    timeout: float = 30.0  #: seconds for which a frame of messages is tried
    frame_bytes: int = 256 * 1024  #: messages that are sent together
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
    """The options as texts; refuses names that nobody knows, and bad values.

    A value that no query could use is refused also where the option has no effect: whoever gave it
    believes that it has one.
    """
    texts = OptionTexts(options)
    here = {name.lower() for name in known}
    ours = {name.lower(): name for name in (*known, *_READ, *_STREAM, *_BATCH, *_WRITE)}
    for given in sorted(texts.names() - ours.keys() - _SPARKS):
        # Passed over, it would silently do nothing. Spark's own, for itself, begin like that.
        if not given.startswith("__"):
            close = difflib.get_close_matches(given, ours, n=1, cutoff=_ALIKE)
            meant = _ELSEWHERE.get(given) or next((ours[name] for name in close), None)
            raise OptionUnknown(given, meant, known)
    check_values(texts)
    for option in (ours[given] for given in sorted(texts.names() & ours.keys() - here)):
        # Passed over, a stream would read what somebody has taken care to leave out.
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
    texts: OptionTexts, environment: Mapping[str, str] | None, start: Place
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
    """What a read without a group calls itself.

    Brokers make a group of every name that pulls, and keep it for good. So nobody's reads go by a
    name that all of them have from the start. Only who asks for a name, because accounts are
    allowed groups by their prefix, gets one; the same for the same subscription.
    """
    prefix = texts.get("groupPrefix")
    if prefix is None:
        return TOOLS_GROUP
    digest = hashlib.sha256(subscription.text.encode()).hexdigest()[:12]
    return allowed_group("groupPrefix", f"{prefix}-{digest}")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
