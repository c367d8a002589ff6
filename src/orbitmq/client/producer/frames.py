"""Sends as they go over the wire: one-letter headers (310, 320, 325), most of them templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from orbitmq.client.producer.drafts import Draft
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.queue import Queue
from orbitmq.clock import milliseconds
from orbitmq.remoting.blocking import Encode
from orbitmq.remoting.connection import Connection
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.send import SendMessageRequest
from orbitmq.wire.jsontext import quoted
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits
from orbitmq.wire.requesttemplates import RequestTemplate

#: What differs between sends to the same topic and broker.
_VARYING: Final = ("queue_id", "sys_flag", "born_timestamp", "flag", "properties")
#: Templates kept; a producer with more topics than that makes some of them anew.
_MOST_TEMPLATES: Final = 4096


class SendFrames:
    """Encodes sends of one producer group. May be used by several threads at a time."""

    __slots__ = ("_group", "_limits", "_now", "_settings", "_templates")

    def __init__(
        self,
        group: str,
        settings: SendSettings,
        now: Callable[[], float],
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        """`limits` are those of the connections."""
        self._group = group
        self._settings = settings
        self._now = now
        self._limits = limits
        self._templates: dict[tuple[int, str, str, bool], RequestTemplate[SendMessageRequest]] = {}

    def encoder(self, draft: Draft, queue: Queue, connection: Connection | None = None) -> Encode:
        """What encodes the send, for a connection that prepares requests or for any other."""
        born_ms = milliseconds(self._now())
        if connection is not None and connection.prepares:
            header = self.header(draft, queue, born_ms)

            def prepared(opaque: int) -> Sequence[Bytes]:
                request = Command.request(draft.code, header, opaque=opaque, body=draft.body)
                return connection.encoded(request)

            return prepared
        if draft.reconsume_times or draft.max_reconsume_times is not None:
            template = self._new_template(draft, queue)
        else:
            template = self._template(draft, queue)

        def encode(opaque: int) -> Sequence[Bytes]:
            properties = quoted(draft.properties)
            return template.filled(
                (queue.id, draft.sys_flag, born_ms, draft.flag, properties, opaque), draft.body
            )

        return encode

    def header(self, draft: Draft, queue: Queue, born_ms: int | None = None) -> SendMessageRequest:
        """The same as a header, for requests that are signed or one-way."""
        return SendMessageRequest(
            **self._constant(draft, queue),  # type: ignore[arg-type]  # named as declared
            queue_id=queue.id,
            sys_flag=draft.sys_flag,
            born_timestamp=milliseconds(self._now()) if born_ms is None else born_ms,
            flag=draft.flag,
            properties=draft.properties,
        )

    def _template(self, draft: Draft, queue: Queue) -> RequestTemplate[SendMessageRequest]:
        key = (draft.code, draft.topic, queue.broker, draft.is_batch)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._new_template(draft, queue)
        return template

    def _new_template(self, draft: Draft, queue: Queue) -> RequestTemplate[SendMessageRequest]:
        return RequestTemplate(
            draft.code,
            SendMessageRequest,
            _VARYING,
            constant=self._constant(draft, queue),
            limits=self._limits,
        )

    def _constant(self, draft: Draft, queue: Queue) -> dict[str, object]:
        return {
            "producer_group": self._group,
            "topic": draft.topic,
            "default_topic": self._settings.auto_create_topic,
            "default_topic_queue_nums": self._settings.auto_create_queues,
            "reconsume_times": draft.reconsume_times,
            "unit_mode": False,
            "max_reconsume_times": draft.max_reconsume_times,
            "batch": draft.is_batch,
            "broker_name": queue.broker,
        }
