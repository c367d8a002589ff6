"""Bytes of a message, and what they mean. No I/O, no clock of its own, no threads.

Everything here works in a base install; `orbitmq.message.scan` needs numpy, and
`orbitmq.message.arrow` numpy and pyarrow, so they are imported on their own.
"""

from orbitmq.message.ids import (
    OffsetId,
    UniqueId,
    UniqueIds,
    decode_offset_id,
    decode_unique_id,
    encode_offset_id,
)
from orbitmq.message.properties import decode_properties, encode_properties, property_value
from orbitmq.message.record import (
    BatchInvalid,
    BodyCorrupt,
    BodyTooLarge,
    CodecMissing,
    CompressionFailed,
    MessageError,
    MessageIdInvalid,
    PropertiesRefused,
    RecordInvalid,
    RecordRefused,
    tag_code,
)
from orbitmq.message.stored import (
    BatchElement,
    StoredMessage,
    decode_message,
    decode_messages,
    encode_batch,
    split_batch,
)

__all__ = [  # noqa: RUF022  grouped by subject
    # Stored messages
    "StoredMessage",
    "decode_message",
    "decode_messages",
    # Their parts
    "decode_properties",
    "encode_properties",
    "property_value",
    "tag_code",
    # Batches
    "BatchElement",
    "encode_batch",
    "split_batch",
    # Ids
    "OffsetId",
    "UniqueId",
    "UniqueIds",
    "decode_offset_id",
    "decode_unique_id",
    "encode_offset_id",
    # Errors
    "BatchInvalid",
    "BodyCorrupt",
    "BodyTooLarge",
    "CodecMissing",
    "CompressionFailed",
    "MessageError",
    "MessageIdInvalid",
    "PropertiesRefused",
    "RecordInvalid",
    "RecordRefused",
]
