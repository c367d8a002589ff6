"""A message made ready to be sent: with its id, its property string and its body as stored.

A draft is made once for a call and used for every attempt, so that a message that is sent again has
the same id: consumers that look for duplicates find them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from orbitmq.client.errors import MessageRefused
from orbitmq.client.message import Message
from orbitmq.client.names import RETRY_PREFIX
from orbitmq.client.namespaces import wrap_topic
from orbitmq.client.producer.settings import SendSettings
from orbitmq.message.compression import compress_body
from orbitmq.message.ids import UniqueIds
from orbitmq.message.properties import ITEM_END, NAME_END
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.message.sysflag import COMPRESSED, COMPRESSION_TYPE_MASK
from orbitmq.message.wellknown import (
    INSTANCE_ID,
    MAX_RECONSUME_TIMES,
    RECONSUME_TIME,
    UNIQ_KEY,
)
from orbitmq.wire.codes import RequestCode

_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
#: Bytes of properties that a message may have when it is sent. A record has room for a few more:
#: brokers note their region and cluster in it, and where a message belongs that waits for its time.
LONGEST_PROPERTIES: Final = MAX_PROPERTIES - 512


class Draft(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one call sends."""

    #: As brokers know it.
    topic: str
    #: As it will be stored: maybe compressed.
    body: bytes
    properties: str
    unique_id: str
    flag: int = 0
    sys_flag: int = 0
    code: int = _SEND
    is_batch: bool = False
    #: What the application gave; None for what is only passed on.
    message: Message | None = None
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    #: What names the time of delivery (`delay`, `deliver_at`), if it is any time of the future:
    #: not every broker can do that.
    wish: str | None = None


class Drafting:
    """Makes drafts by the rules of one producer. May be used by several threads at a time."""

    __slots__ = ("_ids", "_largest_plain", "_namespace", "_settings")

    def __init__(self, settings: SendSettings, ids: UniqueIds, namespace: str | None) -> None:
        self._settings = settings
        self._ids = ids
        self._namespace = namespace
        #: Bodies up to this size are neither refused nor compressed.
        self._largest_plain = settings.max_message_size
        if 0 < settings.compress_from <= self._largest_plain:
            self._largest_plain = settings.compress_from - 1

    def draft(
        self,
        message: Message,
        *,
        code: int = _SEND,
        sys_flag: int = 0,
        extra: Mapping[str, str] | None = None,
    ) -> Draft:
        """A message of the application; `extra` are properties of the system.

        Raises `MessageRefused` for what a broker would refuse or cut.
        """
        properties = message.all_properties()
        if extra:
            properties.update(extra)
        body, compression = message.body, 0
        if len(body) > self._largest_plain:
            body, compression = self._stored(body)
        properties[UNIQ_KEY] = unique_id = self._ids()
        topic = message.topic
        return Draft(
            topic if self._namespace is None else wrap_topic(self._namespace, topic),
            body,
            self.property_string(properties),
            unique_id,
            message.flag,
            sys_flag | compression,
            code,
            message=message,
            wish=None if message.delay is message.deliver_at is None else _wish(message),
        )

    def passed_on(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
        code: int = _SEND,
    ) -> Draft:
        """A message that exists already, to another topic: its body and id stay as they are."""
        self._check_size(body)
        kept = dict(properties)
        unique_id = kept.setdefault(UNIQ_KEY, "") or self._ids()
        kept[UNIQ_KEY] = unique_id
        reconsume_times, limit = 0, None
        if topic.startswith(RETRY_PREFIX):
            # Brokers want the two as fields of a send to a retry topic, not as properties.
            reconsume_times = int(kept.pop(RECONSUME_TIME, "0"))
            limit = kept.pop(MAX_RECONSUME_TIMES, None)
        return Draft(
            topic,
            body,
            self.property_string(kept),
            unique_id,
            flag=flag,
            sys_flag=sys_flag & (COMPRESSED | COMPRESSION_TYPE_MASK),
            code=code,
            reconsume_times=reconsume_times,
            max_reconsume_times=None if limit is None else int(limit),
        )

    def element_properties(self, message: Message) -> tuple[str, bytes]:
        """The id and the properties of a message in a batch."""
        properties = message.all_properties()
        properties[UNIQ_KEY] = unique_id = self._ids()
        return unique_id, self.property_string(properties).encode("utf-8", "replace")

    def new_id(self) -> str:
        return self._ids()

    def wire_topic(self, topic: str) -> str:
        """The topic as brokers know it."""
        return topic if self._namespace is None else wrap_topic(self._namespace, topic)

    def property_string(self, properties: dict[str, str]) -> str:
        """Properties as they travel; refuses more than a broker can store."""
        if self._namespace is not None:
            properties[INSTANCE_ID] = self._namespace
        text = "".join(
            [f"{name}{NAME_END}{value}{ITEM_END}" for name, value in properties.items() if value]
        )
        # A character takes four bytes at most.
        if len(text) * 4 > LONGEST_PROPERTIES:
            size = len(text.encode("utf-8", "replace"))
            if size > LONGEST_PROPERTIES:
                raise MessageRefused(
                    "properties",
                    f"take {size} bytes together with tags, keys and ids, and may take "
                    f"{LONGEST_PROPERTIES}",
                )
        return text

    def _stored(self, body: bytes) -> tuple[bytes, int]:
        """The body as it is stored, and the system flag that says how."""
        settings = self._settings
        self._check_size(body)
        compression = int(settings.compression)
        compressed = compress_body(body, compression, level=settings.compression_level)
        # Java keeps the compressed form even where it is the longer one.
        if len(compressed) >= len(body):
            return body, 0
        return compressed, COMPRESSED | compression

    def _check_size(self, body: bytes) -> None:
        limit = self._settings.max_message_size
        if len(body) > limit:
            raise MessageRefused(
                "body",
                f"has {len(body)} bytes and may have {limit}; brokers have a limit of their own "
                "(maxMessageSize), raise both or send less",
            )


def _wish(message: Message) -> str:
    return "deliver_at" if message.delay is None else "delay"
