"""What the methods that send are given, the same for all of them.

send(Message("orders", b"...", tags="paid"))
send("orders", b"...", tags="paid")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypedDict, cast

import msgspec

from orbitmq.client.durations import Duration, Instant, seconds
from orbitmq.client.errors import MessageRefused, SettingError
from orbitmq.client.message import Message
from orbitmq.client.producer.queuechoice import Selector, by_key, by_sharding_key
from orbitmq.client.queue import Queue

Body: TypeAlias = bytes | bytearray | memoryview | str


class MessageFields(TypedDict, total=False):
    """The fields of a message that is not given as a `Message`."""

    tags: str | None
    keys: str | Iterable[str]
    properties: Mapping[str, str]
    flag: int
    delay_level: int
    delay: Duration | None
    deliver_at: Instant | None
    sharding_key: str | None
    wait_stored: bool


class SendOptions(MessageFields, total=False):
    """Where a message goes and how long that may take, and the fields of the message."""

    queue: Queue | None  #: to this queue only
    key: str | int | None  #: to the queue of this key: the same key, the same queue
    selector: Selector | None  #: to the queue that this function picks
    timeout: Duration | None  #: for the whole call; None: as the producer's settings say


class Call(msgspec.Struct, frozen=True, eq=False):
    """The arguments of one call, understood."""

    message: Message
    queue: Queue | None
    select: Selector | None
    timeout: float


def understand(
    message: Message | str, body: Body | None, options: SendOptions, default_timeout: float
) -> Call:
    """The arguments of a call. Raises `MessageRefused` or `SettingError`."""
    rest = cast("dict[str, Any]", {**options})
    queue = rest.pop("queue", None)
    key = rest.pop("key", None)
    select = rest.pop("selector", None)
    timeout = rest.pop("timeout", None)
    if isinstance(message, Message):
        if body is not None or rest:
            names = ", ".join(["body"] * (body is not None) + sorted(rest))
            raise MessageRefused(names, "cannot be given beside a whole Message; change that one")
    elif body is None:
        raise MessageRefused("body", "is missing; give a Message, or a topic and a body")
    else:
        message = Message(message, body, **rest)
    if sum(wish is not None for wish in (queue, key, select)) > 1:
        raise SettingError("queue, key and selector exclude each other: give one of them")
    if key is not None:
        select = by_key(key)
    elif queue is None and select is None and message.sharding_key is not None:
        select = by_sharding_key
    return Call(message, queue, select, _timeout(timeout, default_timeout))


def _timeout(given: Duration | None, default: float) -> float:
    if given is None:
        return default
    timeout = seconds(given, "timeout")
    if timeout <= 0:
        raise SettingError(f"timeout must be positive, got {given!r}")
    return timeout
