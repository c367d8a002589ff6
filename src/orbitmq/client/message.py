"""Messages: to be sent, checked when they are created, and received. Both are immutable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from orbitmq.arguments import allowed_names, check_known, warn_deprecated
from orbitmq.client.routes import Queue
from orbitmq.client.serialization import Serializing, encoded_body, from_plain
from orbitmq.clock import milliseconds_up
from orbitmq.errors import BodyUnreadable, MessageRefused, SettingError
from orbitmq.message.properties import (
    DEDUP_ID,
    DELAY,
    ITEM_END,
    KEYS,
    NAME_END,
    ORIGIN_MESSAGE_ID,
    RESERVED,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    TIMER_DELAY_MS,
    TIMER_DELIVER_MS,
    TRANSACTION_ID,
    UNIQ_KEY,
    WAIT,
)
from orbitmq.message.stored import StoredMessage
from orbitmq.names import RETRY_PREFIX, sending_problem, unwrap
from orbitmq.parsing import Duration, Instant, epoch, seconds

_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})
_INT32: Final = range(-(2**31), 2**31)
#: The brokers' table has 18 levels; a broker can be configured with more. A broker delivers levels
#: above its last one like its last one.
_LEVELS: Final = range(2**15)
LONGEST_DEDUP_ID: Final = 255


class FormerFields(TypedDict, total=False):
    """Deprecated names."""

    sharding_key: str | None  #: `ordering_key`


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """A message to send.

    At most one of `delay_level`, `delay` and `deliver_at` is given. `dataclasses.replace` makes a
    changed copy.
    """

    topic: str
    body: bytes = field(repr=False)
    #: The tag, by which consumers filter.
    tags: str | None
    #: Business keys, by which the message can be found.
    keys: tuple[str, ...]
    #: The application's properties; those of the system have fields here.
    properties: Mapping[str, str] = field(hash=False)
    #: A number for the application's use.
    flag: int
    #: 1 and up: a level of the brokers' table of delays (1 s 5 s 10 s 30 s 1 min ...); 0: none. The
    #: table has 18 levels by default. A broker treats levels above its last one as its last one.
    delay_level: int
    #: Seconds between its arrival at the broker and its delivery.
    delay: float | None
    #: When it is delivered, in seconds since the epoch.
    deliver_at: float | None
    #: Messages with the same key go to the same queue and stay in order.
    ordering_key: str | None
    #: False: the broker's answer does not wait for the disk or for slaves.
    wait_stored: bool
    #: An OrbitMQ broker stores one message of the topic with this id, for as long as it remembers
    #: it (a day by default). The result of a copy names the first one. Apache's ignore it.
    dedup_id: str | None

    def __init__(
        self,
        topic: str,
        body: object = None,
        *,
        json: object = None,
        serializer: Serializing = None,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NO_PROPERTIES,
        flag: int = 0,
        delay_level: int = 0,
        delay: Duration | None = None,
        deliver_at: Instant | None = None,
        ordering_key: str | int | None = None,
        wait_stored: bool = True,
        dedup_id: str | None = None,
        tag: str | None = None,
        **former: Unpack[FormerFields],
    ) -> None:
        """Bytes and texts are bodies; other values are encoded as JSON, immediately.

        `serializer` replaces this encoding. `json` is always encoded as JSON, also texts, numbers
        and truth values. Raises `MessageRefused`, which names the field and what is allowed. `tag`
        is another name of `tags`.
        """
        if former:
            ordering_key = _former_ordering_key(ordering_key, former)
        if tag is not None:
            tags = _one_tag(tag, tags)
        if problem := sending_problem(topic):
            raise MessageRefused("topic", f"is refused: {problem}")
        _put_topic(self, topic)
        if not (type(body) is bytes and body) or json is not None:
            body = _body(body, json, serializer)
        _put_body(self, body)
        _put_tags(self, None if tags is None else _tag(tags))
        _put_keys(self, _keys(keys) if keys else ())
        _put_properties(self, _properties(properties) if properties else _NO_PROPERTIES)
        _put_flag(self, 0 if type(flag) is int and not flag else _whole("flag", flag, _INT32))
        _put_delay_level(
            self,
            0
            if type(delay_level) is int and not delay_level
            else _whole("delay_level", delay_level, _LEVELS),
        )
        _put_delay(self, None if delay is None else _delay(delay))
        _put_deliver_at(self, None if deliver_at is None else _deliver_at(deliver_at))
        _put_ordering_key(self, None if ordering_key is None else _ordering_key(ordering_key))
        _put_wait_stored(self, bool(wait_stored))
        _put_dedup_id(self, None if dedup_id is None else _dedup_id(dedup_id))
        if delay_level or delay is not None or deliver_at is not None:
            self._check_one_delay()

    @property
    def sharding_key(self) -> str | None:
        """Deprecated: `ordering_key`."""
        warn_deprecated("Message.sharding_key", "ordering_key")
        return self.ordering_key

    def all_properties(self) -> dict[str, str]:
        """A new dictionary of all properties: the application's and the system's."""
        found = dict(self.properties) if self.properties else {}
        if self.tags is not None:
            found[TAGS] = self.tags
        if self.keys:
            found[KEYS] = " ".join(self.keys)
        if self.ordering_key is not None:
            found[SHARDING_KEY] = self.ordering_key
        if self.delay_level:
            found[DELAY] = str(self.delay_level)
        elif self.delay is not None:
            found[TIMER_DELAY_MS] = str(milliseconds_up(self.delay))
        elif self.deliver_at is not None:
            found[TIMER_DELIVER_MS] = str(milliseconds_up(self.deliver_at))
        if not self.wait_stored:
            found[WAIT] = "false"
        if self.dedup_id is not None:
            found[DEDUP_ID] = self.dedup_id
        return found

    def __reduce__(self) -> tuple[Callable[[dict[str, object]], Message], tuple[object]]:
        # The read-only view of the properties cannot be pickled; a dictionary can.
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["properties"] = dict(self.properties)
        return _unpickle, (values,)

    def _check_one_delay(self) -> None:
        given = [
            name
            for name, is_given in (
                ("delay_level", self.delay_level != 0),
                ("delay", self.delay is not None),
                ("deliver_at", self.deliver_at is not None),
            )
            if is_given
        ]
        if len(given) > 1:
            raise MessageRefused(given[1], f"cannot be given together with {given[0]}; choose one")


# The class is frozen for all other code. Setting its slots directly takes half the time of
# `object.__setattr__`, which would be a third of the cost of a message.
(
    _put_topic,
    _put_body,
    _put_tags,
    _put_keys,
    _put_properties,
    _put_flag,
    _put_delay_level,
    _put_delay,
    _put_deliver_at,
    _put_ordering_key,
    _put_wait_stored,
    _put_dedup_id,
) = [getattr(Message, each.name).__set__ for each in fields(Message)]


def _former_ordering_key(ordering_key: str | int | None, former: FormerFields) -> str | int | None:
    check_known(former, (*allowed_names(Message.__init__), "sharding_key"))
    warn_deprecated("sharding_key=", "ordering_key=")
    return former["sharding_key"] if ordering_key is None else ordering_key


def _ordering_key(key: str | int) -> str:
    """Numbers are written as text, because other clients have texts only."""
    return _text("ordering_key", str(key) if type(key) is int else key)


def _dedup_id(dedup_id: str) -> str:
    if len(_text("dedup_id", dedup_id)) > LONGEST_DEDUP_ID:
        raise MessageRefused(
            "dedup_id",
            f"has {len(dedup_id)} characters and may have {LONGEST_DEDUP_ID}; take a digest of it",
        )
    return dedup_id


def _one_tag(tag: str, tags: str | None) -> str:
    if tags is not None:
        raise MessageRefused("tag", "is another name of tags; give one of them")
    return tag


def _tag(tag: str) -> str:
    if "||" in (text := _text("tags", tag)):
        raise MessageRefused(
            "tags",
            f"is {tag!r}, but a message has one tag: || is for consumers that want one of several; "
            "give one tag, and further ones as properties",
        )
    return text


def _unpickle(values: dict[str, Any]) -> Message:
    return Message(**values)


def _body(body: object, json: object, serializer: Serializing) -> bytes:
    for value in (body, json):
        if isinstance(value, Message | _Received):
            raise MessageRefused(
                "body", "is a whole message; give its body, or a changed copy instead of the topic"
            )
    return encoded_body(body, json, serializer)


def _keys(keys: object) -> tuple[str, ...]:
    if isinstance(keys, str):
        return tuple([_text("keys", key) for key in keys.split()])
    if not isinstance(keys, Iterable):
        raise MessageRefused("keys", f"must be texts, got {keys!r}")
    found = tuple(keys)
    for key in found:
        if _text("keys", key).split() != [key]:
            raise MessageRefused("keys", f"are separated by spaces, none may have one, got {key!r}")
    return found


def _properties(properties: object) -> Mapping[str, str]:
    if type(properties) is not dict and not isinstance(properties, Mapping):
        raise MessageRefused("properties", f"must be texts by name, got {properties!r}")
    for name, value in properties.items():
        if name in RESERVED:
            raise MessageRefused(
                f"properties[{name!r}]", "is a name of the system; choose another one"
            )
        # The common case, with nothing to check.
        if not (type(name) is str and name.isidentifier() and name.isascii()):
            _text(f"properties[{name!r}], its name,", name)
        if not (type(value) is str and value.isascii() and value.isprintable() and value.strip()):
            _text(f"properties[{name!r}]", value)
    return MappingProxyType(dict(properties))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or value.isspace():
        raise MessageRefused(name, f"must be a text that is not blank, got {value!r}")
    if NAME_END in value or ITEM_END in value:
        raise MessageRefused(
            name, f"must not contain the characters 1 and 2, which separate properties: {value!r}"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise MessageRefused(name, f"is a text that has no bytes: {error}") from error
    return value


def _whole(name: str, value: object, allowed: range) -> int:
    if type(value) is int and value in allowed:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise MessageRefused(
            name, f"must be a whole number from {allowed[0]} to {allowed[-1]}, got {value!r}"
        )
    return value


def _delay(delay: Duration) -> float:
    try:
        value = seconds(delay)
    except SettingError as error:
        raise MessageRefused("delay", f"must be seconds or a timedelta, got {delay!r}") from error
    if value <= 0:
        raise MessageRefused("delay", f"must be positive, got {delay!r}")
    return value


def _deliver_at(deliver_at: Instant) -> float:
    try:
        value = epoch(deliver_at)
    except SettingError as error:
        raise MessageRefused(
            "deliver_at", f"must be seconds since the epoch or a datetime, got {deliver_at!r}"
        ) from error
    if value <= 0:
        raise MessageRefused("deliver_at", f"must be after 1970, got {deliver_at!r}")
    return value


# ---- received messages
#
# Created by the hundred thousand a second, so the constructor only stores its arguments. Everything
# else is decoded from the record at the first access.


T = TypeVar("T")


class _Received(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The fields of a received message."""

    #: The record as the broker stores it.
    stored: StoredMessage
    #: The queue that it was pulled from, as brokers know it: for a retry, one of the retry topic.
    queue: Queue
    #: The consumer group, if it was pulled by one.
    group: str | None = None
    #: Replaces the stored number, if given: ordered retries are not stored.
    reconsume_times: int | None = None
    #: The prefix of names that the consumer does not see.
    namespace: str | None = None


#: The field, which the property of the same name hides.
_given_times = cast("Callable[[_Received], int | None]", _Received.reconsume_times.__get__)  # type: ignore[union-attr]  # of the class it is a descriptor


class ReceivedMessage(_Received, frozen=True, eq=False, gc=False):
    """One message of a queue. Read-only; may be used from any thread and pickled.

    Never shown with its body, which would end up in logs.
    """

    def with_reconsume_times(self, times: int) -> ReceivedMessage:
        """The same message, delivered again for the `times`-th time."""
        return ReceivedMessage(self.stored, self.queue, self.group, times, self.namespace)

    # ---- what the producer set

    @property
    def topic(self) -> str:
        """The original topic, also of a retry; `queue` has the retry topic."""
        topic = self.stored.topic
        if topic.startswith(RETRY_PREFIX):
            topic = self.stored.get_property(RETRY_TOPIC) or topic
        return unwrap(self.namespace, topic) if self.namespace else topic

    @property
    def body(self) -> bytes:
        """The body, verified and decompressed; raises `MessageError` when it is damaged."""
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
        """The body as JSON, checked against a type if given; raises `BodyUnreadable`."""
        try:
            return msgspec.json.decode(self.body, type=kind, dec_hook=from_plain)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            wanted = "JSON" if kind is Any else f"JSON of {getattr(kind, '__name__', kind)}"
            raise self._unreadable(wanted, error) from error

    def _unreadable(self, wanted: str, error: Exception) -> BodyUnreadable:
        return BodyUnreadable(self.msg_id, self.queue, self.queue_offset, wanted, str(error))

    @property
    def tags(self) -> str | None:
        return self.stored.tags

    @property
    def ordering_key(self) -> str | None:
        """Messages with the same key are in the same queue, in order."""
        return self.stored.get_property(SHARDING_KEY)

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys."""
        keys = self.stored.keys
        return tuple(keys.split()) if keys else ()

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, including the system's; read-only."""
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
        """The number for the application's use."""
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

    # ---- ids

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

    # ---- place and attempts

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

    @property  # type: ignore[misc]  # replaces the field, on purpose
    def reconsume_times(self) -> int:
        """The number of earlier attempts."""
        times = _given_times(self)
        return self.stored.reconsume_times if times is None else times

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
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
        # Without it, structs show all of their fields.
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
