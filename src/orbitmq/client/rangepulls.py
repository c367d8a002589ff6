"""Pull requests, of which only the place and the number of messages differ.

A reader makes one for every few messages. Encoding each by itself would cost as much as decoding
the messages that it brings; so one is encoded, with marks in the place of what differs, and the
rest is filled in. The bytes are those of the ordinary encoder. Signed requests differ as a whole
and are encoded one by one.
"""

from __future__ import annotations

import struct
from typing import Final

from orbitmq.client.queue import Queue
from orbitmq.client.ranges import RangeFilter
from orbitmq.wire.acl import Credentials, sign
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, encode_command, encode_header
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest

_BROUGHT_SUBSCRIPTION: Final = int(PullFlag.SUBSCRIPTION)
_PULL: Final = int(RequestCode.PULL_MESSAGE)
#: What one answer may have. OrbitMQ's brokers then give more messages at a time than they usually
#: do; Apache's have limits of their own, whatever is asked (`maxTransferBytesOnMessageInMemory`).
ANSWER_BYTES: Final = 1024 * 1024
_pack_prefix = struct.Struct(">iI").pack

#: Stand for what differs until it is filled in. No name or expression is likely to have them; one
#: that does is found when the template is made.
_OFFSET_MARK: Final = 7_304_196_113_405_128
_COUNT_MARK: Final = 1_870_352_149
_OPAQUE_MARK: Final = 1_970_352_151


class Pulls:
    """Makes the pulls of one group with one filter."""

    def __init__(
        self,
        group: str,
        wanted: RangeFilter,
        credentials: Credentials | None,
        *,
        keeps_resets: bool = False,
    ) -> None:
        self._group = group
        self._wanted = wanted
        self._credentials = credentials
        self._keep_reset = keeps_resets or None
        self._templates: dict[Queue, bytes | None] = {}

    def encoded(self, queue: Queue, offset: int, count: int, opaque: int) -> bytes:
        """A pull of at most `count` messages from `offset` on."""
        if queue not in self._templates:
            self._templates[queue] = self._template(queue)
        template = self._templates[queue]
        if template is None:
            request = self._request(queue, offset, count, opaque)
            if self._credentials is not None:
                request = sign(request, self._credentials)
            return encode_command(request)
        # In the order in which they stand in the header.
        header = template % (offset, count, opaque)
        size = len(header)
        return _pack_prefix(4 + size, size) + header

    def _template(self, queue: Queue) -> bytes | None:
        if self._credentials is not None:
            return None
        request = self._request(queue, _OFFSET_MARK, _COUNT_MARK, _OPAQUE_MARK)
        text = encode_header(request).replace(b"%", b"%%")
        marks = [b"%d" % mark for mark in (_OFFSET_MARK, _COUNT_MARK, _OPAQUE_MARK)]
        places = [text.find(mark) for mark in marks]
        if places != sorted(places) or any(text.count(mark) != 1 for mark in marks):
            return None
        for mark in marks:
            text = text.replace(mark, b"%d")
        return text

    def _request(self, queue: Queue, offset: int, count: int, opaque: int) -> Command:
        header = PullMessageRequest(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.id,
            queue_offset=offset,
            max_msg_nums=count,
            sys_flag=_BROUGHT_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=0,
            subscription=self._wanted.expression,
            expression_type=self._wanted.kind,
            max_msg_bytes=ANSWER_BYTES,
            keep_reset=self._keep_reset,
        )
        return Command.request(_PULL, header, opaque=opaque)
