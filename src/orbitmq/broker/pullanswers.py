"""Answers to pulls: what a read's outcome is called on the wire, and the bytes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from orbitmq.store.reading import ReadResult, ReadStatus
from orbitmq.wire.codes import ResponseCode, Serialization
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.pull import PullMessageResponse
from orbitmq.wire.templates import AnswerTemplate

FOUND = int(ResponseCode.SUCCESS)
NOT_FOUND = int(ResponseCode.PULL_NOT_FOUND)
RETRY = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
MOVED = int(ResponseCode.PULL_OFFSET_MOVED)

#: What a read's outcome is answered with.
CODES: Mapping[ReadStatus, int] = {
    ReadStatus.FOUND: FOUND,
    ReadStatus.NO_MATCHED_MESSAGE: RETRY,
    ReadStatus.MESSAGE_WAS_REMOVING: RETRY,
    ReadStatus.OFFSET_FOUND_NULL: NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: MOVED,
    ReadStatus.OFFSET_TOO_SMALL: MOVED,
    # For a pull from 0. One from elsewhere is sent to 0: its topic was deleted and made again.
    ReadStatus.NO_MESSAGE_IN_QUEUE: NOT_FOUND,
    ReadStatus.NO_MATCHED_LOGIC_QUEUE: NOT_FOUND,
}
EMPTY_QUEUE = frozenset({ReadStatus.NO_MESSAGE_IN_QUEUE, ReadStatus.NO_MATCHED_LOGIC_QUEUE})


#: Suggested broker, next offset, lowest, end, flags of the topic and of the group.
Place: TypeAlias = tuple[int, int, int, int, int, int]

_VARYING = (
    "suggest_which_broker_id",
    "next_begin_offset",
    "min_offset",
    "max_offset",
    "topic_sys_flag",
    "group_sys_flag",
)
_JSON = Serialization.JSON
_FEW_PIECES = 3
_LONG_PIECE = 16 * 1024
_BLOCK = 96 * 1024


class PullAnswers:
    """Makes answers to pulls, each kind from a template of its own."""

    def __init__(self) -> None:
        #: Whether messages are copied before they go to a socket.
        self.by_heap = False
        self._templates: dict[tuple[int, str], AnswerTemplate[PullMessageResponse]] = {}

    def make(
        self, request: Command, code: int, remark: str, place: Place, result: ReadResult
    ) -> list[Bytes]:
        """The pieces of an answer; the messages among them lie where they were read."""
        if request.serialization is not _JSON:
            header = PullMessageResponse(**dict(zip(_VARYING, place, strict=True)))
            body = b"".join(result.pieces)
            return command_pieces(request.answer(code, header, remark=remark, body=body))
        template = self._templates.get((code, remark))
        if template is None:
            template = self._templates[code, remark] = AnswerTemplate(
                PullMessageResponse, _VARYING, code=code, remark=remark
            )
        head = template.head(request.opaque, *place, body_size=result.size)
        if self.by_heap and result.size:
            return [head, b"".join(result.pieces)]
        return [head, *few(result)]


def few(result: ReadResult) -> Sequence[Bytes]:
    """The messages that a read found, in pieces that are worth a place in a vector each.

    Neighbours in the log come as one piece already. Those of a busy log are short and many, and one
    join costs less than handing them on one by one; but not into more than the allocator
    gives without mapping new memory.
    """
    pieces = result.pieces
    count = len(pieces)
    if count <= _FEW_PIECES or result.size >= count * _LONG_PIECE:
        return pieces
    if result.size <= _BLOCK:
        return [b"".join(pieces)]
    step = max(1, count * _BLOCK // result.size)
    return [b"".join(pieces[at : at + step]) for at in range(0, count, step)]
