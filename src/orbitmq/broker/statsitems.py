"""Counts over the last minute, hour and day, under RocketMQ's names (VIEW_BROKER_STATS_DATA).

TOPIC_PUT_NUMS  TOPIC_PUT_SIZE                    by topic
GROUP_GET_NUMS  GROUP_GET_SIZE  SNDBCK_PUT_NUMS   by topic@group
BROKER_PUT_NUMS  BROKER_GET_NUMS                  by cluster, and the same without the system's
                                                  own topics: ..._WITHOUT_SYSTEM_TOPIC
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orbitmq.broker.rates import Amounts, Key, Rates, Recent
from orbitmq.broker.topics import TopicTable
from orbitmq.wire.bodies.stats import BrokerStatsData, BrokerStatsItem

_WITHOUT_SYSTEM = "_WITHOUT_SYSTEM_TOPIC"

#: Which of the amounts of a key is meant.
_MESSAGES, _BYTES, _REQUESTS, _SENT_BACK = range(4)
_OF_TOPICS: Mapping[str, int] = {"TOPIC_PUT_NUMS": _MESSAGES, "TOPIC_PUT_SIZE": _BYTES}
_OF_GROUPS: Mapping[str, int] = {
    "GROUP_GET_NUMS": _MESSAGES,
    "GROUP_GET_SIZE": _BYTES,
    "SNDBCK_PUT_NUMS": _SENT_BACK,
}


def stats_data(
    name: str, key: str, rates: Rates, cluster: str, topics: TopicTable
) -> BrokerStatsData | None:
    """The count `name` of `key`; None when nothing was ever counted under it."""
    if name in _OF_TOPICS:
        return _of_keys(rates, (key,), _OF_TOPICS[name])
    if name in _OF_GROUPS:
        topic, _, group = key.partition("@")
        return _of_keys(rates, ((topic, group),), _OF_GROUPS[name])
    plain = name.removesuffix(_WITHOUT_SYSTEM)
    if plain not in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS") or key != cluster:
        return None
    keys: Iterable[Key] = rates.topics() if plain == "BROKER_PUT_NUMS" else rates.groups()
    if plain != name:
        keys = [key for key in keys if not topics.is_system(_topic_of(key))]
    return _of_keys(rates, keys, _MESSAGES) or BrokerStatsData()


def _topic_of(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _of_keys(rates: Rates, keys: Iterable[Key], which: int) -> BrokerStatsData | None:
    """One count of all keys together."""
    together: list[tuple[Recent, Recent, Recent]] = [
        found for key in keys if (found := rates.recent(key)) is not None
    ]
    if not together:
        return None
    minute, hour, day = (_item(spans, which) for spans in zip(*together, strict=True))
    return BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)


def _item(spans: tuple[Recent, ...], which: int) -> BrokerStatsItem:
    amounts: list[Amounts] = [span.amounts for span in spans]
    total = sum(each[which] for each in amounts)
    times = total if which == _SENT_BACK else sum(each[_REQUESTS] for each in amounts)
    return BrokerStatsItem(
        sum=total,
        tps=total / max(span.seconds for span in spans),
        avgpt=total / times if times else 0.0,
    )
