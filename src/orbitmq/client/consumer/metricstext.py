"""A consumer's statistics in the text format of Prometheus.

Brokers tell how far a group is and how fast it pulls. Only a consumer knows what its handlers made
of the messages; a program serves this text wherever it serves its own metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from orbitmq.client.consumer.statistics import ConsumerStatistics, TopicStatistics


class _Family(NamedTuple):
    name: str
    type: str
    help: str
    read: Callable[[TopicStatistics], float]


_BY_TOPIC: Final = (
    _Family("consumed_total", "counter", "Messages that handlers were done with.",
            lambda topic: topic.consumed),
    _Family("failed_total", "counter", "Messages that handlers failed on.",
            lambda topic: topic.failed),
    _Family("pulled_total", "counter", "Messages fetched.",
            lambda topic: topic.pulled),
    _Family("consumed_per_second", "gauge", "Messages that handlers were done with, last minute.",
            lambda topic: topic.consumed_per_second),
    _Family("failed_per_second", "gauge", "Messages that handlers failed on, last minute.",
            lambda topic: topic.failed_per_second),
    _Family("pulled_per_second", "gauge", "Messages fetched, last minute.",
            lambda topic: topic.pulled_per_second),
    _Family("handler_seconds", "gauge", "Mean time of a handler call, last minute.",
            lambda topic: topic.consume_time),
    _Family("pull_seconds", "gauge", "Mean time from asking for messages to having some.",
            lambda topic: topic.pull_time),
)  # fmt: skip

#: A summary: what so many of all calls took at most in the last minute, and all calls ever.
_CALLS: Final = "handler_call_seconds"
_QUANTILES: Final = (0.5, 0.95, 0.99)

_BY_GROUP: Final = (
    ("sent_back_total", "Failed messages that the broker took back.", "sent_back"),
    ("dead_letters_total", "Messages given up, as far as this consumer knows.", "dead_letters"),
    ("timed_out_total", "Messages whose handler took too long.", "timed_out"),
    ("duplicates_total", "Messages consumed here whose queue was lost meanwhile.", "duplicates"),
)


def metrics_text(group: str, client_id: str, statistics: ConsumerStatistics) -> str:
    """All families, each with the group, the member and, where it has one, the topic."""
    member = {"group": group, "client_id": client_id}
    lines: list[str] = []
    # A family without samples is not told of: before the first pull there are no topics.
    for name, kind, about, read in _BY_TOPIC if statistics.topics else ():
        lines += _head(name, kind, about)
        lines += [
            _sample(name, {**member, "topic": topic}, read(counted))
            for topic, counted in sorted(statistics.topics.items())
        ]
    lines += _calls(member, sorted(statistics.topics.items()))
    for name, about, field in _BY_GROUP:
        lines += _head(name, "counter", about)
        lines.append(_sample(name, member, getattr(statistics, field)))
    lines += _head("troubles", "gauge", "Things that keep messages away now.")
    lines.append(_sample("troubles", member, len(statistics.troubles)))
    lines += _put_off(member, statistics)
    return "\n".join(lines) + "\n"


def _calls(
    member: Mapping[str, str], topics: Sequence[tuple[str, TopicStatistics]]
) -> Iterator[str]:
    called = [(topic, counted) for topic, counted in topics if counted.calls]
    if not called:
        return
    yield from _head(_CALLS, "summary", "Times of handler calls; quantiles are of the last minute.")
    for topic, counted in called:
        labels = {**member, "topic": topic}
        for quantile in _QUANTILES:
            value = counted.consume_times.percentile(quantile)
            if value is not None:
                yield _sample(_CALLS, {**labels, "quantile": str(quantile)}, value)
        yield _sample(f"{_CALLS}_sum", labels, counted.call_seconds)
        yield _sample(f"{_CALLS}_count", labels, counted.calls)
    longest = "handler_call_longest_seconds"
    yield from _head(longest, "gauge", "The longest handler call of the last minute.")
    for topic, counted in called:
        if counted.consume_times.longest is not None:
            yield _sample(longest, {**member, "topic": topic}, counted.consume_times.longest)


def _put_off(member: Mapping[str, str], statistics: ConsumerStatistics) -> Iterator[str]:
    if not statistics.put_off:
        return
    name = "pulls_put_off_total"
    yield from _head(name, "counter", "Pulls that came later, or were odd, by queue and reason.")
    for (queue, reason), count in sorted(statistics.put_off.items()):
        place = {"topic": queue.topic, "broker": queue.broker, "queue": str(queue.id)}
        yield _sample(name, {**member, **place, "reason": reason.value}, count)


def _head(name: str, kind: str, about: str) -> Iterable[str]:
    return (
        f"# HELP orbitmq_consumer_{name} {about}",
        f"# TYPE orbitmq_consumer_{name} {kind}",
    )


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"orbitmq_consumer_{name}{{{told}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
