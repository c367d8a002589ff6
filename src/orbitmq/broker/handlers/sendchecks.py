"""What a send has to pass, in the order of Apache's broker.

Which of two possible refusals a client gets decides what it does next, so the order counts: the
numbers are those of the checks there. What is raised is `broker.errors.Refused`.
"""

from __future__ import annotations

from orbitmq.broker import names
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.parts import Parts
from orbitmq.broker.permissions import may_write
from orbitmq.broker.retries import PUT_OFF, given_up_properties
from orbitmq.message.properties import property_value, remove_properties, replace_property
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.message.sysflag import INNER_BATCH
from orbitmq.message.wellknown import DELAY, INNER_NUM, RETRY_TOPIC
from orbitmq.wire.bodies.topics import TopicConfig
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.send import SendMessageRequest
from orbitmq.wire.versions import Gate

OVERLOADED = "[OVERLOAD]system busy, start flow control for a while"

_RETRY = names.RETRY_PREFIX
#: Bytes of properties that every message gets beside the names of region and cluster, and a dead
#: one: a level, and a unique id if it has none.
_NOTED_LATER = 128


class SendChecks:
    """Lets sends pass, or says why not."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def config(self, request: Command, header: SendMessageRequest) -> TopicConfig:
        """The topic, which may be made now: checks 0 to 7."""
        topic = header.topic
        settings = self._parts.settings
        if settings.is_slave:
            raise SystemBusy
        if not request.body:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"a message to topic {topic!r} without a body is not stored; send at least a byte",
            )
        accept_from = settings.send.accept_from
        if accept_from > self._parts.clock.now():
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"broker unable to service, until {accept_from:.3f} (seconds since the epoch)",
            )
        if not may_write(settings.permission) and self._parts.topics.is_order(topic):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._parts.address}] sending message is forbidden: it may not be "
                "written now; send to another broker of the topic",
            )
        self._parts.topics.check_for_send(topic)
        return self._parts.topics.for_send(
            topic,
            template=header.default_topic,
            queues=header.default_topic_queue_nums,
            unit_mode=bool(header.unit_mode),
            now=self._parts.clock.now(),
        )

    def queue(self, header: SendMessageRequest, config: TopicConfig) -> int:
        """The queue that was asked for, or any: checks 8 and 9."""
        queue_id = header.queue_id
        if queue_id >= config.write_queue_nums and queue_id >= config.read_queue_nums:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{queue_id}] is illegal, topic {config.topic_name!r} has "
                f"{max(config.write_queue_nums, config.read_queue_nums)} queues",
            )
        if queue_id >= 0:
            return queue_id
        if not config.write_queue_nums:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"topic {config.topic_name!r} has no queue that can be written; update the topic",
            )
        return int(self._parts.chance.random() * config.write_queue_nums)

    def retried(
        self, request: Command, header: SendMessageRequest, queue_id: int, properties: str
    ) -> tuple[str, int, str]:
        """Where a message to a retry topic goes: there, or to the dead letters; 10 and 11."""
        parts = self._parts
        now = parts.clock.now()
        name = header.topic[len(_RETRY) :]
        group = parts.groups.require(name, now=now)
        most = group.retry_max_times
        if request.version >= Gate.MAX_RECONSUME_TIMES and header.max_reconsume_times is not None:
            most = header.max_reconsume_times
        is_dead = (header.reconsume_times or 0) > most
        is_put_off = property_value(properties, PUT_OFF) is not None
        if is_put_off:
            properties = remove_properties(properties, (PUT_OFF,))
        # A group with order locks consumes in order, and its clients come here only to give up.
        is_given_up = not is_put_off and parts.locks.group_has_lock(name, parts.clock.monotonic())
        if is_dead or is_given_up:
            config = parts.topics.ensure_dead_letter(name, now=now)
            reason = "its attempts are used up" if is_dead else "its consumer, in order, gave it up"
            settings = parts.settings
            named = (settings.send.region + settings.cluster).encode()
            room = MAX_PROPERTIES - _NOTED_LATER - len(named)
            properties = given_up_properties(properties, reason, limit=room)
            return config.topic_name, 0, replace_property(properties, DELAY, "-1")
        return header.topic, queue_id, properties

    def count_dead(self, header: SendMessageRequest, properties: str) -> None:
        """A message to a retry topic has become a dead letter."""
        origin = property_value(properties, RETRY_TOPIC) or header.topic
        # Anybody can make up an origin, and every new one would be counted by itself.
        counted = origin if origin in self._parts.topics else header.topic
        self._parts.counters.group(counted, header.topic[len(_RETRY) :]).dead_letters += 1

    def kind(self, header: SendMessageRequest, properties: str) -> None:
        """What a message must not be: 19."""
        if header.sys_flag & INNER_BATCH or property_value(properties, INNER_NUM) is not None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "a batch inside one message is not supported; send it with the batch flag",
            )

    def busy(self) -> Refused:
        """Why nothing is taken while too much waits for the disk."""
        self._parts.counters.busy_puts += 1
        return Refused(ResponseCode.SYSTEM_BUSY, OVERLOADED)

    def too_large(self, body: int, properties: int) -> Refused:
        """Why a message is refused whose body or properties have too many bytes."""
        most = self._parts.settings.send.max_message_size
        return Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. msg body "
            f"length limit {most}B, msg properties length limit 32KB; "
            f"this one has a body of {body} and properties of {properties} bytes",
        )
