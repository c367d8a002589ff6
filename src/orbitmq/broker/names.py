"""Names of topics and groups: what is allowed, and what a name by itself means."""

from __future__ import annotations

import re
from typing import Final

from orbitmq.broker.errors import Refused
from orbitmq.wire.codes import ResponseCode

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"

#: The template of topics that are made by sending to them.
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

#: Belong to the system on every broker; administration keeps its hands off them.
SYSTEM_TOPICS: Final = frozenset(
    {
        AUTO_CREATE_TOPIC,
        SCHEDULE_TOPIC,
        BENCHMARK_TOPIC,
        HALF_TOPIC,
        TRACE_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
        CHECKPOINT_TOPIC,
    }
)

#: Written by the broker itself; a producer that sends there would forge its state.
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

LONGEST_TOPIC: Final = 127
#: Retry and dead-letter topics carry a group's name, and sometimes a topic's, behind their prefix.
LONGEST_DERIVED_TOPIC: Final = 255
LONGEST_GROUP: Final = 120

#: Of a name that somebody else has chosen, this much is shown; more than any name may have.
_SHOWN: Final = 512

_allowed = re.compile(r"[%|a-zA-Z0-9_-]+").fullmatch


def retry_topic(group: str) -> str:
    """Where a group's failed messages come again."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Where a group's messages end that failed too often."""
    return DEAD_LETTER_PREFIX + group


def group_of_retry_topic(topic: str) -> str | None:
    """The group whose retry topic this is."""
    return topic[len(RETRY_PREFIX) :] if topic.startswith(RETRY_PREFIX) else None


def check_topic(topic: str) -> None:
    """Refuse a name that no topic may have."""
    problem = topic_problem(topic)
    if problem is not None:
        raise Refused(ResponseCode.INVALID_PARAMETER, problem)


def check_group(group: str) -> None:
    """Refuse a name that no group may have."""
    problem = group_problem(group)
    if problem is not None:
        raise Refused(ResponseCode.INVALID_PARAMETER, problem)


def topic_problem(topic: str) -> str | None:
    """What is wrong with a topic's name; None when nothing is."""
    is_derived = topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return _problem("topic", topic, LONGEST_DERIVED_TOPIC if is_derived else LONGEST_TOPIC)


def group_problem(group: str) -> str | None:
    """What is wrong with a group's name; None when nothing is."""
    return _problem("group", group, LONGEST_GROUP)


def shown(name: str, most: int = _SHOWN) -> str:
    """A name that somebody else has chosen, for a text: not too long, and always of one line."""
    return repr(name[:most])[1:-1]


def _problem(what: str, name: str, longest: int) -> str | None:
    if not name or name.isspace():
        return f"the specified {what} is blank"
    if _allowed(name) is None:
        return (
            f"the specified {what} {name[:longest]!r} contains illegal characters; "
            "allowed are letters, digits and % | _ -"
        )
    if len(name) > longest:
        return f"the specified {what} {name[:_SHOWN]!r} is longer than {longest} characters"
    return None
