"""Requests, encoded before anything is measured. No two of them are the same."""

from __future__ import annotations

from functools import lru_cache

from benchmarks.load.asking import Pulls, Requests, Sends
from benchmarks.workload import START_MS, Message, messages
from orbitmq.message.stored import encode_batch
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.headers import PullFlag, PullMessageRequest, SendMessageRequest

_DIFFERENT = 1024
#: What brokers add to a message themselves, and producers do not send.
_CLUSTER = b"CLUSTER\x01DefaultCluster\x02"
GROUP = "bench-readers"


@lru_cache(maxsize=16)
def frames_of(requests: Requests) -> list[bytes]:
    if isinstance(requests, Pulls):
        return _pulls(requests)
    return _sends(requests) if requests.per_request == 1 else _batches(requests)


def _sends(wanted: Sends) -> list[bytes]:
    return [
        _send(wanted, number, _properties(message).decode(), message.body)
        for number, message in enumerate(messages(_DIFFERENT, wanted.body_size))
    ]


def _batches(wanted: Sends) -> list[bytes]:
    size = wanted.per_request
    made = messages(_DIFFERENT * 2, wanted.body_size)
    return [
        _send(
            wanted,
            number,
            f"UNIQ_KEY\x01{number:032X}\x02WAIT\x01true\x02",
            encode_batch(
                [(each.body, 0, _properties(each)) for each in made[first : first + size]]
            ),
            is_batch=True,
        )
        for number, first in enumerate(range(0, len(made), size))
    ]


def _properties(message: Message) -> bytes:
    return message.properties.replace(_CLUSTER, b"")


def _send(
    wanted: Sends, number: int, properties: str, body: bytes, *, is_batch: bool = False
) -> bytes:
    header = SendMessageRequest(
        producer_group="bench-writers",
        topic=wanted.topic,
        default_topic="TBW102",
        default_topic_queue_nums=wanted.queues,
        queue_id=number % wanted.queues,
        sys_flag=0,
        born_timestamp=START_MS + number,
        flag=0,
        properties=properties,
        reconsume_times=0,
        unit_mode=False,
        max_reconsume_times=0,
        batch=is_batch,
        broker_name="broker-a",
    )
    code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
    return encode_command(Command.request(code, header, opaque=number + 1, body=body))


def _pulls(wanted: Pulls) -> list[bytes]:
    last = max(1, wanted.messages - wanted.per_request)
    return [
        pull(
            wanted.topic,
            number % wanted.queues,
            number // wanted.queues * wanted.per_request % last,
            wanted.per_request,
            number + 1,
        )
        for number in range(_DIFFERENT)
    ]


def pull(
    topic: str, queue_id: int, offset: int, most: int, opaque: int, *, hold_ms: int = 0
) -> bytes:
    """A pull that brings its subscription with it."""
    flags = PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if hold_ms else PullFlag(0))
    header = PullMessageRequest(
        consumer_group=GROUP,
        topic=topic,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=most,
        sys_flag=int(flags),
        commit_offset=0,
        suspend_timeout_millis=hold_ms,
        sub_version=0,
        subscription="*",
        expression_type="TAG",
    )
    return encode_command(Command.request(RequestCode.PULL_MESSAGE, header, opaque=opaque))
