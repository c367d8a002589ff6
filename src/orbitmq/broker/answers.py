"""Answers to sends: from templates when they say the usual, through the encoder otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from orbitmq.wire.codes import ResponseCode, Serialization
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.frame import Bytes, frame_head, pack_prefix
from orbitmq.wire.headers.send import SendMessageResponse
from orbitmq.wire.templates import AnswerTemplate

#: Offset in the log, queue, number in the queue, unique id: what nearly every answer says.
Place: TypeAlias = tuple[int, int, int, str]

_JSON = Serialization.JSON
#: Unique ids that are answered by hand have up to so many letters; those of clients have 32.
_USUAL_ID = 64

#: Put outcomes after which the message is stored, and the answer says where.
_STORED = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """What the answer to a batch says."""

    offsets: list[int]  #: in the log, of all its messages
    queue_id: int
    number: int  #: in the queue, of the first message
    unique_id: str | None


class SendAnswers:
    """Makes the answers of one broker to sends."""

    def __init__(self, region: str, store_host: bytes, *, trace_on: bool) -> None:
        #: An offset id, to be filled in with an offset.
        self._offset_id = store_host.hex().upper() + "%016X"
        self._region = region
        self._trace_on = trace_on
        self._extra = {"MSG_REGION": region, "TRACE_ON": "true" if trace_on else "false"}
        constant = {"region": region, "trace_on": trace_on}
        varying = ("msg_id", "queue_id", "queue_offset", "transaction_id")
        self._templates = {
            int(code): AnswerTemplate(
                SendMessageResponse,
                varying,
                constant=constant,
                forms={"msg_id": self._offset_id},
                code=code,
                remark=None if code is ResponseCode.SUCCESS else code.name,
            )
            for code in _STORED
        }
        self._success = self._templates[0].text
        self._batch_success = AnswerTemplate(SendMessageResponse, varying, constant=constant).text
        #: By the size of the header. Numbers have up to 20 letters each.
        longest = len(self._success) + _USUAL_ID + 4 * 20
        self._prefixes = [pack_prefix(4 + size, size) for size in range(longest)]

    def success(self, opaque: int, place: Place) -> bytes:
        """The most frequent answer. By hand it takes half as long as by the template's `head`."""
        at, queue_id, number, unique_id = place
        letters = unique_id.encode()
        if len(letters) > _USUAL_ID or not letters.isalnum():
            return self._templates[0].head(opaque, *place)
        header = self._success % (at, queue_id, number, letters, opaque)
        return self._prefixes[len(header)] + header

    def stored(
        self, code: int, request: Command, place: Place | BatchPlace | SendMessageResponse
    ) -> Sequence[Bytes]:
        """The answer to a send whose message, or messages, are in the log."""
        if isinstance(place, BatchPlace):
            return self._stored_batch(code, request, place)
        if request.serialization is _JSON and isinstance(place, tuple):
            return (self._templates[code].head(request.opaque, *place),)
        header = place if isinstance(place, SendMessageResponse) else self.header(place)
        return self._encoded(code, request, header)

    def _stored_batch(self, code: int, request: Command, place: BatchPlace) -> Sequence[Bytes]:
        offsets, unique_id = place.offsets, place.unique_id or ""
        ids = b",".join([self._offset_id.encode()] * len(offsets)) % tuple(offsets)
        # The encoder would search a thousand letters of ids for what has to be escaped.
        is_usual = code == ResponseCode.SUCCESS and request.serialization is _JSON
        if is_usual and unique_id.isascii() and unique_id.isalnum():
            header = self._batch_success % (
                ids,
                place.queue_id,
                place.number,
                unique_id.encode(),
                request.opaque,
            )
            return (frame_head(int(_JSON), header),)
        fields = SendMessageResponse(
            msg_id=ids.decode(),
            queue_id=place.queue_id,
            queue_offset=place.number,
            transaction_id=place.unique_id,
        )
        return self._encoded(code, request, fields)

    def _encoded(self, code: int, request: Command, header: SendMessageResponse) -> list[Bytes]:
        remark = None if code == ResponseCode.SUCCESS else ResponseCode(code).name
        return command_pieces(request.answer(code, self._marked(header), remark=remark))

    def refused(self, request: Command, code: int, remark: str) -> Command:
        """The answer to a send that was not stored."""
        return request.answer(code, remark=remark, extra=self._extra)

    def header(self, place: Place) -> SendMessageResponse:
        """A place as a header, to add what is not usual."""
        at, queue_id, queue_offset, unique_id = place
        return SendMessageResponse(
            msg_id=self._offset_id % at,
            queue_id=queue_id,
            queue_offset=queue_offset,
            transaction_id=unique_id,
        )

    def _marked(self, header: SendMessageResponse) -> SendMessageResponse:
        return msgspec.structs.replace(header, region=self._region, trace_on=self._trace_on)
