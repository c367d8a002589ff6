"""Records that hold several messages: brokers of version 5 may store a batch as it was sent.

Such a record occupies as many offsets as it holds messages. Consumers take it apart; the messages
inside share everything with the record besides body, flag and properties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.message.batch import split_batch
from orbitmq.message.stored import StoredMessage
from orbitmq.message.sysflag import BATCH_MASK, COMPRESSED, COMPRESSION_TYPE_MASK

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What the record says of itself and not of the messages in it.
_OF_THE_RECORD = BATCH_MASK | COMPRESSED | COMPRESSION_TYPE_MASK


def without_inner_batches(messages: Sequence[StoredMessage], first: int) -> list[StoredMessage]:
    """The messages one by one, from offset `first` on: a pull may begin inside of a batch.

    Raises `MessageError` when a batch cannot be taken apart.
    """
    singles: list[StoredMessage] = []
    for message in messages:
        if message.sys_flag & BATCH_MASK == BATCH_MASK:
            singles += [each for each in _unwrapped(message) if each.queue_offset >= first]
        else:
            singles.append(message)
    return singles


def _unwrapped(record: StoredMessage) -> list[StoredMessage]:
    return [
        StoredMessage.build(
            topic=record.topic,
            stored_body=bytes(element.body),
            properties=element.properties,
            queue_id=record.queue_id,
            queue_offset=record.queue_offset + place,
            physical_offset=record.physical_offset,
            flag=element.flag,
            sys_flag=record.sys_flag & ~_OF_THE_RECORD,
            born_ms=record.born_ms,
            born_host=record.born_host,
            store_ms=record.store_ms,
            store_host=record.store_host,
            reconsume_times=record.reconsume_times,
            prepared_offset=record.prepared_offset,
        )
        for place, element in enumerate(split_batch(record.body))
    ]
