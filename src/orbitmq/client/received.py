"""A message as a consumer gets it: a stored record, and where it was pulled from.

Made by the hundred thousand a second, so that making one only remembers what it was given; all
else is found when it is asked for, in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

import msgspec

from orbitmq.client.errors import BodyUnreadable
from orbitmq.client.names import RETRY_PREFIX
from orbitmq.client.namespaces import unwrap
from orbitmq.client.queue import Queue
from orbitmq.message.stored import StoredMessage
from orbitmq.message.wellknown import ORIGIN_MESSAGE_ID, RETRY_TOPIC, TRANSACTION_ID, UNIQ_KEY

T = TypeVar("T")


class _Received(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a message is made of."""

    #: The record as the broker keeps it.
    stored: StoredMessage
    #: Where it was pulled from, as brokers know it: for a retry, a queue of the retry topic.
    queue: Queue
    #: The consumer group, if it was pulled by one.
    group: str | None = None
    #: Counts instead of the stored number, if given: orderly retries are not stored.
    reconsume_times: int | None = None
    #: What the consumer does not see of names.
    namespace: str | None = None


#: The field of that name, which a message itself hides behind what follows from it.
_given_times = cast("Callable[[_Received], int | None]", _Received.reconsume_times.__get__)  # type: ignore[union-attr]  # of the class it is a descriptor


class ReceivedMessage(_Received, frozen=True, eq=False, gc=False):
    """One message of a queue. Read-only; may be used from any thread and pickled.

    Never shown with its body, which would end up in logs.
    """

    def with_reconsume_times(self, times: int) -> ReceivedMessage:
        """The same message, delivered again for the `times`-th time."""
        return ReceivedMessage(self.stored, self.queue, self.group, times, self.namespace)

    # ---- what the producer said

    @property
    def topic(self) -> str:
        """The topic that it was sent to; for a retry, too: see `queue` for the retry topic."""
        topic = self.stored.topic
        if topic.startswith(RETRY_PREFIX):
            topic = self.stored.get_property(RETRY_TOPIC) or topic
        return unwrap(self.namespace, topic) if self.namespace else topic

    @property
    def body(self) -> bytes:
        """The body, checked and expanded; raises `MessageError` when it is damaged."""
        return self.stored.body

    def text(self, encoding: str = "utf-8") -> str:
        """The body as text; raises `BodyUnreadable`."""
        try:
            return self.body.decode(encoding)
        except (UnicodeDecodeError, LookupError) as error:
            raise self._unreadable(f"{encoding} text", error) from error

    @overload
    def json(self) -> Any: ...

    @overload
    def json(self, kind: type[T]) -> T: ...

    def json(self, kind: Any = Any) -> Any:
        """The body as JSON, checked against a type if one is given; raises `BodyUnreadable`."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            wanted = "JSON" if kind is Any else f"JSON of {getattr(kind, '__name__', kind)}"
            raise self._unreadable(wanted, error) from error

    def _unreadable(self, wanted: str, error: Exception) -> BodyUnreadable:
        return BodyUnreadable(self.msg_id, self.queue, self.queue_offset, wanted, str(error))

    @property
    def tags(self) -> str | None:
        return self.stored.tags

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys."""
        keys = self.stored.keys
        return tuple(keys.split()) if keys else ()

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, the system's as well; read-only."""
        return self.stored.properties

    @overload
    def get(self, name: str) -> str | None: ...

    @overload
    def get(self, name: str, default: T) -> str | T: ...

    def get(self, name: str, default: Any = None) -> Any:
        """One property, or `default`."""
        value = self.stored.get_property(name)
        return default if value is None else value

    @property
    def flag(self) -> int:
        """The application's own number."""
        return self.stored.flag

    @property
    def born_at(self) -> float:
        """When it was sent, in seconds since the epoch by the producer's clock."""
        return self.stored.born_at

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction that it was sent in."""
        return self.stored.get_property(TRANSACTION_ID) or (
            self.stored.get_property(UNIQ_KEY) if self.stored.prepared_offset else None
        )

    # ---- which message it is

    @property
    def msg_id(self) -> str:
        """The unique id, or the offset id of a message without one."""
        return self.stored.msg_id

    @property
    def unique_id(self) -> str | None:
        """The id that the producer gave it; the same through all retries."""
        return self.stored.unique_id

    @property
    def offset_id(self) -> str:
        """Where this copy of it is stored."""
        return self.stored.offset_id

    @property
    def origin_id(self) -> str:
        """The offset id of the first copy of a retried message; of any other, its own."""
        return self.stored.get_property(ORIGIN_MESSAGE_ID) or self.stored.offset_id

    # ---- where it is and how often it was tried

    @property
    def queue_offset(self) -> int:
        return self.stored.queue_offset

    @property
    def stored_at(self) -> float:
        """When it was stored, in seconds since the epoch by the broker's clock."""
        return self.stored.stored_at

    @property
    def size(self) -> int:
        """Bytes of the stored record."""
        return self.stored.size

    @property  # type: ignore[misc]  # in the place of the field, on purpose
    def reconsume_times(self) -> int:
        """How often it was tried before."""
        times = _given_times(self)
        return self.stored.reconsume_times if times is None else times

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1 on."""
        return self.reconsume_times + 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReceivedMessage):
            return NotImplemented
        return (
            self.queue == other.queue
            and self.reconsume_times == other.reconsume_times
            and self.stored == other.stored
        )

    def __hash__(self) -> int:
        return hash((self.queue, self.stored.queue_offset))

    def __repr__(self) -> str:
        return f"ReceivedMessage({', '.join(f'{n}={v!r}' for n, v in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Without it, structs show all of their fields to whoever asks for this.
        return [
            ("topic", self.topic),
            ("queue", str(self.queue)),
            ("queue_offset", self.queue_offset),
            ("msg_id", self.msg_id),
            ("reconsume_times", self.reconsume_times),
        ]

    def __reduce__(self) -> tuple[Callable[..., ReceivedMessage], tuple[object, ...]]:
        values = (self.stored, self.queue, self.group, _given_times(self), self.namespace)
        return ReceivedMessage, values
