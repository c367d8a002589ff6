"""What brokers answer to a pull, and what follows from it.

The broker's next offset is taken in every case, so that stretches which the filter left out move
progress on. What else happens is a table: one for consumers that are pushed to, one for those that
the application polls, which own their position and are merely moved.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from orbitmq.client.errors import ClientError
from orbitmq.wire.codes import ForbiddenType, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.pull import PullMessageResponse


class PullStatus(enum.Enum):
    """What came of a pull that was served."""

    __hash__ = object.__hash__  # each is one object; an enumeration's own is slow

    FOUND = ResponseCode.SUCCESS
    NO_NEW_MESSAGE = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MESSAGE = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = ResponseCode.PULL_OFFSET_MOVED


class NextStep(enum.Enum):
    """What a served pull leads to."""

    __hash__ = object.__hash__

    CONSUME_AND_PULL = enum.auto()
    #: There was nothing for us up to the next offset.
    PASS_AND_PULL = enum.auto()
    #: Give the queue up, store the offset that the broker names, and begin anew from it.
    DROP_AND_CORRECT = enum.auto()
    #: Go on from the offset that the broker names.
    MOVE_AND_PULL = enum.auto()


#: What a pull's outcome does to the pull loop of a consumer that is pushed to.
AFTER_PULL: Mapping[PullStatus, NextStep] = MappingProxyType(
    {
        PullStatus.FOUND: NextStep.CONSUME_AND_PULL,
        PullStatus.NO_NEW_MESSAGE: NextStep.PASS_AND_PULL,
        PullStatus.NO_MATCHED_MESSAGE: NextStep.PASS_AND_PULL,
        PullStatus.OFFSET_ILLEGAL: NextStep.DROP_AND_CORRECT,
    }
)

#: The same for a consumer that the application polls: its position is its own.
AFTER_POLLED_PULL: Mapping[PullStatus, NextStep] = MappingProxyType(
    {**AFTER_PULL, PullStatus.OFFSET_ILLEGAL: NextStep.MOVE_AND_PULL}
)

#: Refusals that the next heartbeat mends: the broker does not know the subscription (any more), or
#: knows an older one.
MENDED_BY_HEARTBEAT = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)

#: How brokers before 5.0, which do not send the type, begin to say that reading is off.
_FORBIDDEN_WORDS: Mapping[str, ForbiddenType] = MappingProxyType(
    {
        "subscription group no permission": ForbiddenType.GROUP,
        "the topic[": ForbiddenType.TOPIC,
        "the broker[": ForbiddenType.BROKER,
        "the consumer group[": ForbiddenType.BROADCASTING,
    }
)

_STATUSES: Mapping[int, PullStatus] = {int(status.value): status for status in PullStatus}

#: How a broker says that the group's progress was set by an administrator.
_RESET = "OFFSET_RESET"


class AnswerUnusable(ClientError):
    """A broker answered a pull with something that this client cannot take apart."""


class Pulled(msgspec.Struct, eq=False, gc=False):
    """The answer to a pull that was served."""

    status: PullStatus
    #: The offset that was asked for.
    offset: int
    next_offset: int
    min_offset: int
    max_offset: int
    #: The id of the broker, among those of one name, to ask next.
    suggested_broker: int
    #: Records, one after the other; empty unless messages were found.
    body: Bytes
    #: Whether an administrator has set the progress of the group.
    is_reset: bool


def forbidden_type(answer: Command) -> ForbiddenType | None:
    """What somebody has switched off, if that is why a pull was refused."""
    if answer.code != ResponseCode.NO_PERMISSION:
        return None
    sent = answer.ext_fields.get("forbiddenType", "")
    if sent.isdecimal() and int(sent) in set(ForbiddenType):
        return ForbiddenType(int(sent))
    said = answer.remark or ""
    return next((kind for words, kind in _FORBIDDEN_WORDS.items() if said.startswith(words)), None)


def read_pulled(answer: Command, offset: int) -> Pulled | None:
    """What a broker found from `offset` on; None when it refused.

    Raises `HeaderError` or `AnswerUnusable` when the answer makes no sense.
    """
    status = _STATUSES.get(answer.code)
    if status is None:
        return None
    header = answer.header(PullMessageResponse)
    if header.offset_delta:
        raise AnswerUnusable(
            f"the broker serves a static topic (offsets are {header.offset_delta} off), which this "
            "client does not know"
        )
    return Pulled(
        status,
        offset,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        header.suggest_which_broker_id,
        answer.body if status is PullStatus.FOUND else b"",
        status is PullStatus.OFFSET_ILLEGAL and answer.remark == _RESET,
    )
