"""Answers to pulls: what a read's outcome is called on the wire, and the bytes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from orbitmq.store.reading import ReadResult, ReadStatus
from orbitmq.wire.codes import ResponseCode, Serialization
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.frame import Bytes, frame_head, pack_prefix
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
_JSON_MARK = int(_JSON) << 24
#: A body of so many bytes fits into a frame, whatever its header.
_SURE_BYTES = 1024 * 1024
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
            fields = PullMessageResponse(**dict(zip(_VARYING, place, strict=True)))
            body = b"".join(result.pieces)
            return command_pieces(request.answer(code, fields, remark=remark, body=body))
        template = self._templates.get((code, remark))
        if template is None:
            template = self._templates[code, remark] = AnswerTemplate(
                PullMessageResponse, _VARYING, code=code, remark=remark
            )
        body_size = result.size
        # Not through `head`, as these are all numbers: it would take half as long again.
        header = template.text % (*place, request.opaque)
        size = len(header)
        if body_size <= _SURE_BYTES:
            head = pack_prefix(4 + size + body_size, _JSON_MARK | size) + header
        else:
            head = frame_head(int(_JSON), header, body_size)
        if not body_size:
            return [head]
        if self.by_heap:
            return [head, b"".join(result.pieces)]
        return [head, *result.pieces] if result.count == 1 else few(head, result)


def few(head: bytes, result: ReadResult) -> list[Bytes]:
    """An answer with the messages of a read, in pieces that are worth a place in a vector each.

    Neighbours in the log come as one piece already. Those of a busy log are short and many, and one
    join costs less than handing them on one by one; but not into more than the allocator
    gives without mapping new memory.
    """
    pieces, size = result.pieces, result.size
    count = len(pieces)
    if count <= _FEW_PIECES or size >= count * _LONG_PIECE:
        return [head, *pieces]
    if size <= _BLOCK:
        return [b"".join((head, *pieces))]
    step = max(1, count * _BLOCK // size)
    return [head, *(b"".join(pieces[at : at + step]) for at in range(0, count, step))]
