"""Messages by which it is seen that a queue still holds what it held.

A broker that lost the end of its log gives the numbers of what it lost to other messages. Then a
position in the queue means something else, which the number does not show. But a log loses only its
end: if one message is still where it was, everything before it is there, too. One look tells.

A landmark is what such a message is known by. Another one at the same place would have to be stored
and made in the same milliseconds, be as long, and have the same checksum of its body.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.consumer.pullanswers import PullStatus, read_pulled
from orbitmq.message.hosts import V4_HOST_SIZE, V6_HOST_SIZE
from orbitmq.message.stored import decode_messages
from orbitmq.message.sysflag import BORN_HOST_V6
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.message.stored import StoredMessage
    from orbitmq.wire.frame import Bytes

_SERVED: Final = frozenset(int(status.value) for status in PullStatus)

#: The size, the checksum, the offset, the system flag and the time of making of a record.
_read_head = struct.Struct(">i4xI8xq8xiq").unpack_from
_read_time = struct.Struct(">q").unpack_from
_BORN_HOST_AT: Final = 48


class Landmark(msgspec.Struct, frozen=True, gc=False):
    """What the message at an offset is known by."""

    offset: int
    size: int
    crc: int
    born_ms: int
    store_ms: int

    @classmethod
    def of(cls, stored: StoredMessage) -> Landmark:
        return cls(
            stored.queue_offset, stored.size, stored.stored_crc, stored.born_ms, stored.store_ms
        )

    @classmethod
    def in_records(cls, records: Bytes, at: int) -> Landmark:
        """Of the message whose record begins at `at`; nothing else of it is read."""
        size, crc, offset, flag, born_ms = _read_head(records, at)
        host = V6_HOST_SIZE if flag & BORN_HOST_V6 else V4_HOST_SIZE
        (store_ms,) = _read_time(records, at + _BORN_HOST_AT + host)
        return cls(offset, size, crc, born_ms, store_ms)


async def landmark_at(engine: Engine, group: str, queue: Queue, offset: int) -> Landmark | None:
    """The landmark that the master has at an offset; None if it has no message there."""
    # Whoever is to go on elsewhere has yet to hear it, and would not from us.
    header = look(group, queue, offset, keep_reset=True)
    answer = await engine.ask(
        engine.routes.master(queue.broker), RequestCode.PULL_MESSAGE, header, accept=_SERVED
    )
    pulled = read_pulled(answer, offset)
    if pulled is None or pulled.status is not PullStatus.FOUND:
        return None
    for message in without_inner_batches(decode_messages(pulled.body), offset):
        return Landmark.of(message) if message.queue_offset == offset else None
    return None


def look(
    group: str, queue: Queue, offset: int, *, keep_reset: bool | None = None
) -> PullMessageRequest:
    """A pull of one message, whatever it is, that moves nothing: who may consume may ask that."""
    return PullMessageRequest(
        consumer_group=group,
        topic=queue.topic,
        broker_name=queue.broker,
        queue_id=queue.id,
        queue_offset=offset,
        max_msg_nums=1,
        sys_flag=int(PullFlag.SUBSCRIPTION),
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription="*",
        expression_type="TAG",
        keep_reset=keep_reset,
    )
