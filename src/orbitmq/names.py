"""Names of topics and groups: what is allowed, what a name means, namespaces, similar names.

A namespace is a prefix: `orders` of namespace `shop` is the topic `shop%orders` at every broker.
Retry and dead-letter topics keep their own prefix in front (`%RETRY%shop%billing`), because brokers
recognise them by it. System names get no namespace, and no name gets it twice.
"""

from __future__ import annotations

import difflib
import heapq
import operator
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import takewhile
from typing import Final

from orbitmq.errors import SettingError

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
NAMESPACE_SEPARATOR: Final = "%"

#: The template of topics that are created by the first send.
AUTO_CREATE_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"

#: The broker writes its own records here; producers may not.
NOT_FOR_PRODUCERS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)
#: System topics that clients may send to.
OPEN_SYSTEM_TOPICS: Final = frozenset({BENCHMARK_TOPIC, TRACE_TOPIC})
#: System topics of every broker; administration may not change them.
SYSTEM_TOPICS: Final = (
    NOT_FOR_PRODUCERS | OPEN_SYSTEM_TOPICS | {AUTO_CREATE_TOPIC, CHECKPOINT_TOPIC}
)
#: A group that exists at every broker and that no consumer joins; used for reads by tools.
TOOLS_GROUP: Final = "TOOLS_CONSUMER"
#: Groups of tools that exist at every broker; those of brokers have `SYSTEM_GROUP_PREFIX`.
SYSTEM_GROUPS: Final = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)

LONGEST_TOPIC: Final = 127
#: Retry and dead-letter topics contain a group's name, and sometimes a topic's, after the prefix.
LONGEST_DERIVED_TOPIC: Final = 255
LONGEST_GROUP: Final = 120

#: Characters of a peer's name that texts show; more than any valid name has.
_SHOWN: Final = 512

#: Two names are similar from this ratio on (0 to 1).
_SIMILAR: Final = 0.75
#: Names whose lengths differ by more than this ratio never reach `_SIMILAR`.
_SHORTER: Final = _SIMILAR / (2 - _SIMILAR)
#: Comparing two names takes 0.1 ms, so only the likeliest of a cluster's topics are compared.
_COMPARED: Final = 100

_allowed = re.compile(r"[%|a-zA-Z0-9_-]+").fullmatch


def retry_topic(group: str) -> str:
    """The topic that delivers a group's failed messages again."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """The topic of a group's messages that failed too often."""
    return DEAD_LETTER_PREFIX + group


def group_of_retry_topic(topic: str) -> str | None:
    """The group whose retry topic this is."""
    return topic[len(RETRY_PREFIX) :] if topic.startswith(RETRY_PREFIX) else None


def is_retry_topic(topic: str) -> bool:
    return topic.startswith(RETRY_PREFIX)


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    return group.startswith(SYSTEM_GROUP_PREFIX)


# What is allowed.


def check_topic(topic: str) -> str:
    """The name again; raises `SettingError` when it is not allowed for a topic."""
    if problem := topic_problem(topic):
        raise SettingError(problem)
    return topic


def check_group(group: str) -> str:
    """The name again; raises `SettingError` when it is not allowed for a group."""
    if problem := group_problem(group):
        raise SettingError(problem)
    return group


def topic_problem(topic: object) -> str | None:
    """Why the name is not allowed for a topic; None when it is."""
    is_derived = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return _problem("topic", topic, LONGEST_DERIVED_TOPIC if is_derived else LONGEST_TOPIC)


def group_problem(group: object) -> str | None:
    """Why the name is not allowed for a group; None when it is."""
    return _problem("group", group, LONGEST_GROUP)


def sending_problem(topic: object) -> str | None:
    """Why applications cannot send to a topic; None when they can."""
    return _sending_problem(topic) if isinstance(topic, str) else topic_problem(topic)


@lru_cache(1024)  # every message names its topic, and there are few
def _sending_problem(topic: str) -> str | None:
    if problem := topic_problem(topic):
        return problem
    if topic not in OPEN_SYSTEM_TOPICS and is_system_topic(topic):
        return (
            f"{topic!r} belongs to the brokers, which keep their own records in it; send to a "
            "topic of your own"
        )
    return None


def _problem(kind: str, name: object, longest: int) -> str | None:
    if not isinstance(name, str):
        return f"a {kind} must be a text, got {name!r}"
    return _text_problem(kind, name, longest)


@lru_cache(1024)
def _text_problem(kind: str, name: str, longest: int) -> str | None:
    if not name or name.isspace():
        return f"a {kind} must have a name, got {name[:_SHOWN]!r}"
    if len(name) > longest:
        return f"a {kind} can have {longest} characters, got {len(name)}: {name[:40]!r}..."
    if not _allowed(name):
        return (
            f"a {kind} may consist of letters, digits and any of % | _ -; {name!r} contains "
            "illegal characters"
        )
    return None


def shown(name: str, most: int = _SHOWN) -> str:
    """A name from a peer as texts show it: on one line, and of limited length."""
    return repr(name[:most])[1:-1]


# Namespaces.


def wrap_topic(namespace: str | None, topic: str) -> str:
    """The topic's name at the brokers."""
    if not namespace or is_system_topic(topic):
        return topic
    return _wrapped(namespace, topic)


def wrap_group(namespace: str | None, group: str) -> str:
    """The group's name at the brokers."""
    if not namespace or is_system_group(group):
        return group
    return _wrapped(namespace, group)


def unwrap(namespace: str | None, name: str) -> str:
    """The name of a topic or group in the application."""
    if not namespace:
        return name
    prefix, rest = _split_prefix(name)
    return prefix + rest.removeprefix(namespace + NAMESPACE_SEPARATOR)


def _wrapped(namespace: str, name: str) -> str:
    prefix, rest = _split_prefix(name)
    front = namespace + NAMESPACE_SEPARATOR
    return name if rest.startswith(front) else prefix + front + rest


def _split_prefix(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


# Similar names, for hints in errors.


def is_application_topic(topic: str) -> bool:
    """Whether an application created the topic for its own messages."""
    return not topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) and not is_system_topic(topic)


def most_similar(topic: str, known: Iterable[str]) -> str | None:
    """The known application topic of the same namespace that is most similar to `topic`, if any."""
    space, _, name = topic.rpartition(NAMESPACE_SEPARATOR)
    likely = []
    for each in known:
        other_space, _, other = each.rpartition(NAMESPACE_SEPARATOR)
        if (
            other_space == space
            and other != name
            and is_application_topic(each)
            and len(other) >= _SHORTER * len(name)
            and len(name) >= _SHORTER * len(other)
        ):
            likely.append(other)
    nearest = heapq.nlargest(_COMPARED, likely, key=lambda other: _common_ends(other, name))
    close = difflib.get_close_matches(name, nearest, 1, _SIMILAR)
    return topic[: len(topic) - len(name)] + close[0] if close else None


def _common_ends(one: str, other: str) -> int:
    """The number of equal characters from the start, plus those from the end."""
    return _common(one, other) + _common(reversed(one), reversed(other))


def _common(one: Iterable[str], other: Iterable[str]) -> int:
    return sum(1 for _ in takewhile(bool, map(operator.eq, one, other)))
