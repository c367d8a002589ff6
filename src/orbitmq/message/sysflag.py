"""The bits of a stored message's system flag.

The transaction type and the compression type are fields of several bits: compare them under
their mask, never bit by bit (a rollback has both the prepared and the commit bit set).
"""

from __future__ import annotations

from typing import Final

COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2

TRANSACTION_MASK: Final = 0xC
TRANSACTION_NONE: Final = 0x0
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC

BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
HOSTS_V6_MASK: Final = BORN_HOST_V6 | STORE_HOST_V6

#: The body is a batch that the consumer takes apart.
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80
#: Both bits say that a record holds several messages.
BATCH_MASK: Final = NEED_UNWRAP | INNER_BATCH

COMPRESSION_TYPE_MASK: Final = 0x700
#: Written by clients that know one compression only; read as zlib.
COMPRESSION_UNSPECIFIED: Final = 0x000
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300


def transaction_type(sys_flag: int) -> int:
    """One of the `TRANSACTION_*` values."""
    return sys_flag & TRANSACTION_MASK


def with_transaction_type(sys_flag: int, transaction: int) -> int:
    """`sys_flag` with its transaction field replaced."""
    return sys_flag & ~TRANSACTION_MASK | transaction & TRANSACTION_MASK
