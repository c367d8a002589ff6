"""Names of topics and groups: what is allowed, and what a name by itself means."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from orbitmq.errors import SettingError

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
#: The template of topics that are made by sending to them.
AUTO_CREATE_TOPIC: Final = "TBW102"

#: Belong to the system on every broker.
SYSTEM_TOPICS: Final = frozenset(
    {
        AUTO_CREATE_TOPIC,
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    }
)
#: Of these, those that clients send to.
OPEN_SYSTEM_TOPICS: Final = frozenset({"BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"})
SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
#: A group that every broker has and nobody consumes with: who only looks needs no other.
TOOLS_GROUP: Final = "TOOLS_CONSUMER"

LONGEST_TOPIC: Final = 127
#: Retry and dead-letter topics carry a group's name behind their prefix.
LONGEST_DERIVED_TOPIC: Final = 255
LONGEST_GROUP: Final = 120

_allowed = re.compile(r"[%|a-zA-Z0-9_-]+").fullmatch


def retry_topic(group: str) -> str:
    """Where a group's failed messages come again."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Where a group's messages end that failed too often."""
    return DEAD_LETTER_PREFIX + group


def is_retry_topic(topic: str) -> bool:
    return topic.startswith(RETRY_PREFIX)


def is_system_topic(topic: str) -> bool:
    """Whether a topic belongs to the system rather than to an application."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    """Whether a group belongs to the system rather than to an application."""
    return group.startswith(SYSTEM_GROUP_PREFIX)


def check_topic(topic: str) -> str:
    """The name again; raises `SettingError` when no topic may have it."""
    if problem := topic_problem(topic):
        raise SettingError(problem)
    return topic


def check_group(group: str) -> str:
    """The name again; raises `SettingError` when no group may have it."""
    if problem := _problem("group", group, LONGEST_GROUP):
        raise SettingError(problem)
    return group


def topic_problem(topic: object) -> str | None:
    """What is wrong with a topic's name; None when nothing is."""
    derived = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return _problem("topic", topic, LONGEST_DERIVED_TOPIC if derived else LONGEST_TOPIC)


def sending_problem(topic: object) -> str | None:
    """Why no application can send to a topic; None when it can."""
    return _sending_problem(topic) if isinstance(topic, str) else topic_problem(topic)


@lru_cache(1024)  # every message names its topic, and they name the same few
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
    if not name:
        return f"a {kind} must have a name, got an empty text"
    if len(name) > longest:
        return f"a {kind} can have {longest} characters, got {len(name)}: {name[:40]!r}..."
    if not _allowed(name):
        return f"a {kind} may consist of letters, digits and any of % | _ -, got {name!r}"
    return None
