"""How much a peer may ask us to hold. One frozen value, checked before any memory is taken."""

from __future__ import annotations

from dataclasses import dataclass, fields

from orbitmq.wire.errors import LimitError

#: The header length shares its word with the type byte, so 24 bits are all there is.
LARGEST_HEADER = 0xFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Upper bounds for what is read from a connection.

    Apache's decoder knows only the first. A peer that stays within these limits can make us hold
    a small multiple of the bytes that it really sent, and never more because of what it announced.
    """

    #: Bytes of one frame after its length word; Apache's default for both sides.
    frame: int = 16 * 1024 * 1024
    #: Bytes of one header. The longest honest one answers a batch send: 33 bytes for every message.
    header: int = 4 * 1024 * 1024
    #: Entries of `extFields`. The widest header declared by Apache has under thirty.
    ext_fields: int = 1024
    #: Bytes of one key of `extFields`.
    ext_key: int = 1024
    #: Bytes of one value of `extFields`, and of a remark.
    ext_value: int = 4 * 1024 * 1024
    #: Values (objects, arrays, scalars) in one body that takes the tolerant way.
    body_values: int = 1_000_000
    #: Arrays and objects inside each other in a body that takes the tolerant way.
    body_depth: int = 64
    #: Bytes that a compressed body may grow to.
    inflated: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value < 1:
                raise LimitError(f"limit {setting.name!r} must be positive, got {value}")
        if self.header > LARGEST_HEADER:
            raise LimitError(f"limit 'header' must be at most {LARGEST_HEADER}, got {self.header}")
        if self.frame > 0x7FFFFFFF:
            raise LimitError(f"limit 'frame' must fit 31 bits, got {self.frame}")


DEFAULT_LIMITS = WireLimits()
