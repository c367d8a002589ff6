"""What can be wrong with the bytes of a message, told apart by what the reader would do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from collections.abc import Sequence


class MessageError(OrbitError):
    """Bytes, or values to be turned into bytes, that are not a message."""


class RecordInvalid(MessageError):
    """The bytes at `position` are not a stored message; what follows cannot be found either."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason
        super().__init__(f"no stored message at byte {position}: {reason}")


class RecordRefused(MessageError):
    """A message that the stored layout cannot hold, because a part of it is out of range."""


class BodyCorrupt(MessageError):
    """The record is whole but its body is not the one that was stored; others may be good."""


class CompressionFailed(MessageError):
    """A body that cannot be compressed or expanded as its flags say."""


class BodyTooLarge(CompressionFailed):
    """A compressed body that would expand beyond the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body expands to more than {limit} bytes; raise the limit to read it")


class CodecMissing(CompressionFailed):
    """The library for this compression is not installed; the message itself may be good."""

    def __init__(self, codec: str, extra: str) -> None:
        self.codec = codec
        self.extra = extra
        super().__init__(
            f"{codec} bodies need a library; install it: pip install 'orbitmq[{extra}]'"
        )


class PropertiesRefused(MessageError):
    """Properties that cannot be written: a separator inside, or more bytes than a record takes."""


class BatchInvalid(MessageError):
    """The element at `position` of a batch body is not one; the whole batch is refused."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason
        super().__init__(f"no batch element at byte {position}: {reason}")


class BatchInside(MessageError):
    """The record at `position` holds several messages, where only single ones are wanted."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(f"the record at byte {position} holds a batch; take it apart first")


class MessageIdInvalid(MessageError):
    """A text that is not a message id of the asked kind."""

    def __init__(self, text: str, expected: str) -> None:
        self.text = text
        super().__init__(f"{text[:64]!r} is not {expected}")


class ChunkTooLarge(MessageError):
    """More bytes than one batch of columns can hold; fewer messages at a time will do."""

    def __init__(self, what: str, limit: int) -> None:
        self.limit = limit
        super().__init__(f"{what} take more than {limit} bytes in one batch; give fewer at a time")


class ColumnUnknown(MessageError):
    """A column that messages do not have was asked for."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        super().__init__(f"messages have no column {name!r}; they have {', '.join(known)}")
