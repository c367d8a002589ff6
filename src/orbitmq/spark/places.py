"""Which queues a query reads, and which offsets the places stand for that it names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from orbitmq.client.queue import Queue
from orbitmq.client.rangecluster import Bounds, RangeCluster, Routed
from orbitmq.client.ranges import OffsetsGone, QueueRange
from orbitmq.errors import OrbitError
from orbitmq.spark.errors import DataLost, OptionRefused, SourceError
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
    Positions,
)
from orbitmq.spark.options import Subscription

log = logging.getLogger(__name__)

#: How many queues an error names.
_SHOWN = 10
#: What a warning says of a queue that ends before it is to be read.
_PASSED_OVER = (
    "nothing of it is read in this batch, and a stream goes on at its present end; if the queue "
    "was made anew, which cannot be seen here, read what it holds with a new checkpointLocation, "
    "or with startingOffsets for that queue"
)


def subscribed(
    cluster: RangeCluster, subscription: Subscription, *, refresh: bool = False
) -> Routed:
    """The queues that a subscription means now, and what is wrong with topics of it."""
    if subscription.pattern is not None:
        return cluster.routed(cluster.topics(subscription.pattern), refresh=refresh)
    if subscription.topics:
        return cluster.routed(subscription.topics, refresh=refresh)
    return _assigned(cluster, subscription.queues, refresh=refresh)


def _assigned(cluster: RangeCluster, queues: tuple[Queue, ...], *, refresh: bool) -> Routed:
    found = cluster.routed(sorted({queue.topic for queue in queues}), refresh=refresh)
    existing = set(found.queues)
    failures: dict[str, OrbitError] = dict(found.failures)
    for queue in queues:
        if queue not in existing and queue.topic not in failures:
            missing = [each for each in queues if each not in existing]
            failures[queue.topic] = OptionRefused(
                "assign", _shown(missing), f"queues that exist: {_shown(found.queues)}"
            )
    return Routed(tuple(queue for queue in queues if queue in existing), failures)


def resolve(
    place: Place,
    queues: Iterable[Queue],
    cluster: RangeCluster,
    *,
    seen: Mapping[Queue, Bounds] | None = None,
) -> dict[Queue, int]:
    """The offset that a place stands for in each of the queues. Raises what the cluster raises.

    A queue ends where it ended at the first look, which is `seen` if there was one before: what is
    stored while more is asked is not passed over.
    """
    queues = tuple(queues)
    match place:
        case Earliest():
            return {queue: each.low for queue, each in cluster.bounds(queues).or_raise().items()}
        case Latest():
            return _ends(queues, cluster, seen)
        case GroupProgress():
            known = cluster.progress(queues).or_raise()
            without = [queue for queue, offset in known.items() if offset is None]
            found = {queue: offset for queue, offset in known.items() if offset is not None}
            return found | resolve(Earliest(), without, cluster)
        case AtOffsets(offsets, option):
            return _at_offsets(offsets, option, queues, cluster, seen)
        case AtTimes():
            return _at_times(place, queues, cluster, seen)


def _ends(
    queues: Iterable[Queue], cluster: RangeCluster, seen: Mapping[Queue, Bounds] | None
) -> dict[Queue, int]:
    known = {queue: seen[queue].high for queue in queues if queue in seen} if seen else {}
    return known | cluster.ends(queue for queue in queues if queue not in known).or_raise()


def placed(positions: Positions, bounds: Mapping[Queue, Bounds], *, fail: bool) -> dict[Queue, int]:
    """Where queues are read on from; raises `DataLost` with `fail` if that is not there.

    Without, a queue that ends before its position is read on from where it ends now. Whether it
    lost its end, lags behind its log after a crash or was made anew cannot be told from here; to
    go back could read again what took days to read. What is gone from the beginning is left out by
    `available`. A queue of unknown bounds stays where it is.
    """
    found = dict(positions)
    problems: list[str] = []
    for queue, at in sorted(positions.items()):
        if queue not in bounds or bounds[queue].low <= at <= bounds[queue].high:
            continue
        low, high = bounds[queue].low, bounds[queue].high
        problem = f"{queue} is to be read from offset {at} on and has {low} to {high}"
        problems.append(problem)
        if at > high:
            found[queue] = high
            if not fail:
                log.warning("%s; %s", problem, _PASSED_OVER)
    if problems and fail:
        raise DataLost(problems)
    return found


def available(
    wanted: Iterable[QueueRange], bounds: Mapping[Queue, Bounds], *, fail: bool
) -> list[QueueRange]:
    """The ranges as far as they are there; raises `DataLost` with `fail` if one is not wholly.

    A queue of unknown bounds is taken as it is: whoever reads it finds out.
    """
    found: list[QueueRange] = []
    problems: list[str] = []
    for each in wanted:
        if each.queue not in bounds or not len(each):
            found.append(each)
            continue
        low, high = bounds[each.queue].low, bounds[each.queue].high
        if each.start < low or each.end > high:
            problems.append(str(OffsetsGone(each, low, high)))
        start = min(max(each.start, low), high)
        found.append(QueueRange(each.queue, start, max(start, min(each.end, high))))
    if problems and fail:
        raise DataLost(problems)
    for problem in problems:
        log.warning("messages are gone and left out: %s", problem)
    return found


def _at_offsets(
    offsets: Positions,
    option: str,
    queues: tuple[Queue, ...],
    cluster: RangeCluster,
    seen: Mapping[Queue, Bounds] | None,
) -> dict[Queue, int]:
    if missing := sorted(set(queues) - offsets.keys()):
        raise OptionRefused(
            option,
            f"no offset for {_shown(missing)}",
            "an offset for every queue that is read (-2: earliest, -1: latest)",
        )
    if unknown := sorted(offsets.keys() - set(queues)):
        raise OptionRefused(option, _shown(unknown), f"offsets of queues that are read: {queues}")
    earliest = [queue for queue in queues if offsets[queue] == EARLIEST]
    latest = [queue for queue in queues if offsets[queue] == LATEST]
    found = dict(offsets) | resolve(Earliest(), earliest, cluster)
    return found | _ends(latest, cluster, seen)


def _at_times(
    place: AtTimes,
    queues: tuple[Queue, ...],
    cluster: RangeCluster,
    seen: Mapping[Queue, Bounds] | None,
) -> dict[Queue, int]:
    times: dict[Queue, float] = dict(place.times)
    if place.time is not None:
        times = dict.fromkeys(queues, place.time) | times
    if missing := sorted(set(queues) - times.keys()):
        raise OptionRefused(
            place.option, f"no time for {_shown(missing)}", "a time for every queue that is read"
        )
    times = {queue: times[queue] for queue in queues}
    is_error = place.on_no_match is OnNoMatch.ERROR
    # Asked before the search: a message that is stored during both is behind that end.
    ends = {} if is_error else _ends(queues, cluster, seen)
    known = cluster.at_times(times).or_raise()
    without = [queue for queue, offset in known.items() if offset is None]
    if without and is_error:
        raise SourceError(
            f"no message of {_shown(without)} was stored at or after "
            f"{datetime.fromtimestamp(times[without[0]], UTC).isoformat()}, as {place.option} "
            "wants it; set startingOffsetsByTimestampStrategy to latest to begin at the end there"
        )
    return {queue: ends[queue] if at is None else at for queue, at in known.items()}


def _shown(queues: Iterable[Queue]) -> str:
    names = [str(queue) for queue in queues]
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
