"""Parts of the options that say one thing together: places, filters, limits.

Each is read on its own, so that a bad one is refused in every kind of query, and errors name it.
"""

from __future__ import annotations

from contextlib import suppress

from orbitmq.client.errors import SettingError
from orbitmq.client.names import check_group, check_topic
from orbitmq.client.ranges import EVERYTHING, RangeFilter
from orbitmq.filter import SQL92, UnknownFilterType, compile_filter
from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.tags import parse_tags
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
    offsets_option,
    times_option,
)
from orbitmq.spark.optiontext import OptionTexts, json_object


def check_values(texts: OptionTexts) -> None:
    """Refuse what no kind of query takes, for each option by itself or with its nearest."""
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


def check_order(start: Place, end: Place) -> None:
    """Offsets that are given must not end before they begin; those of a broker may."""
    if not isinstance(start, AtOffsets) or not isinstance(end, AtOffsets):
        return
    for queue, at in start.offsets.items():
        to = end.offsets.get(queue, LATEST)
        if 0 <= to < at:
            raise OptionRefused(
                end.option, f"{to} for {queue}", f"at least {start.option}, which is {at} there"
            )


def start_place(texts: OptionTexts, *, default: Place) -> Place:
    """Where a query begins: a time for all wins over times, and these over offsets."""
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


def _starting_offsets(text: str | None) -> Place | None:
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


def end_place(texts: OptionTexts) -> Place:
    """Where a batch read ends; the same wins as at its start."""
    time, times = texts.time("endingTimestamp"), texts.json("endingOffsetsByTimestamp")
    at_times = times_option("endingOffsetsByTimestamp", times or {}, OnNoMatch.LATEST)
    at_offsets = _ending_offsets(texts.get("endingOffsets"))
    if time is not None:
        return AtTimes("endingTimestamp", OnNoMatch.LATEST, time=time)
    return at_times if times is not None else at_offsets


def _ending_offsets(text: str | None) -> Place:
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
    """How many messages a batch of a stream has at most, and at least."""
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
    # Where the parser is not installed, brokers judge it, which have one.
    with suppress(UnknownFilterType):
        try:
            compile_filter(expression, SQL92)
        except InvalidFilter as error:
            raise OptionRefused(
                "subExpression", expression, f"a condition in SQL92 ({error})"
            ) from None


def route_life(texts: OptionTexts) -> float:
    """Seconds for which a route is believed; Kafka's way to say "as long as usual" is -1."""
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
