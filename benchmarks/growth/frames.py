"""The requests of the curves, encoded before anything is measured."""

from __future__ import annotations

import struct
from functools import lru_cache

from benchmarks.growth.asking import Reads, Sends
from benchmarks.workload import START_MS, messages
from orbitmq.wire.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
)
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.headers import (
    CreateTopicRequest,
    GetMaxOffsetRequest,
    HeartbeatRequest,
    PullFlag,
    PullMessageRequest,
    SendMessageRequest,
)
from orbitmq.wire.javajson import encode_body

PER_PULL = 32

#: A reader visits so many places in turn.
PLACES = 1024

#: So many sends differ from each other, and fewer when they are large.
_DIFFERENT = 1024
_MOST_BYTES = 32 << 20
_LEAST = 16
#: What brokers add to a message themselves, and producers do not send.
_CLUSTER = b"CLUSTER\x01DefaultCluster\x02"
_HOLD_MS = 30_000
_READ_AND_WRITE = 6
#: Stands for an offset until there is one.
_OFFSET_MARK = 1_970_352_147
_lengths = struct.Struct(">iI").pack


@lru_cache(maxsize=8)
def send_frames(sends: Sends) -> list[bytes]:
    count = max(_LEAST, min(_DIFFERENT, _MOST_BYTES // sends.body_size))
    return [
        encode_command(
            Command.request(
                RequestCode.SEND_MESSAGE_V2,
                SendMessageRequest(
                    producer_group="growth-writers",
                    topic=sends.topic,
                    default_topic="TBW102",
                    default_topic_queue_nums=sends.queues,
                    queue_id=number % sends.queues,
                    sys_flag=0,
                    born_timestamp=START_MS + number,
                    flag=0,
                    properties=message.properties.replace(_CLUSTER, b"").decode(),
                    reconsume_times=0,
                    unit_mode=False,
                    max_reconsume_times=0,
                    batch=False,
                    broker_name="broker-a",
                ),
                opaque=number + 1,
                body=message.body,
            )
        )
        for number, message in enumerate(messages(count, sends.body_size))
    ]


@lru_cache(maxsize=32)
def read_frames(reads: Reads) -> tuple[list[bytes], list[int]]:
    """Pulls, and the offset that each asks for; the opaque is the place in the list."""
    per_queue = max(1, PLACES // reads.queues)
    # So few are there only when they are so large that an answer holds a few anyway.
    last = max(reads.per_queue - PER_PULL, reads.per_queue // 2)
    # What was stored as one batch is asked for as one.
    spread = [last * step // max(1, per_queue - 1) for step in range(per_queue)]
    offsets = [
        spread[number // reads.queues] // PER_PULL * PER_PULL
        for number in range(per_queue * reads.queues)
    ]
    frames = [
        PullFrame("growth-readers", reads.topic, number % reads.queues, number).at(offset)
        for number, offset in enumerate(offsets)
    ]
    return frames, offsets


class PullFrame:
    """A pull of one queue that may be held, to be filled in with an offset."""

    __slots__ = ("_after", "_before")

    def __init__(self, group: str, topic: str, queue_id: int, opaque: int) -> None:
        header = PullMessageRequest(
            consumer_group=group,
            topic=topic,
            queue_id=queue_id,
            queue_offset=_OFFSET_MARK,
            max_msg_nums=PER_PULL,
            sys_flag=int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND),
            commit_offset=0,
            suspend_timeout_millis=_HOLD_MS,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
        )
        frame = encode_command(Command.request(RequestCode.PULL_MESSAGE, header, opaque=opaque))
        self._before, _, self._after = frame[8:].partition(b"%d" % _OFFSET_MARK)

    def at(self, offset: int) -> bytes:
        header = b"%b%d%b" % (self._before, offset, self._after)
        return _lengths(4 + len(header), len(header)) + header


def heartbeat(client_id: str, group: str, topic: str) -> bytes:
    """A consumer tells that it is there."""
    member = ConsumerData(
        group_name=group,
        consume_type=ConsumeType.CONSUME_PASSIVELY,
        message_model=MessageModel.CLUSTERING,
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        subscription_data_set=(SubscriptionData(topic=topic, sub_string="*", sub_version=1),),
    )
    body = HeartbeatData(client_id=client_id, consumer_data_set=(member,))
    return encode_command(
        Command.request(
            RequestCode.HEART_BEAT, HeartbeatRequest(), opaque=1, body=encode_body(body)
        )
    )


def max_offset(topic: str, queue_id: int) -> bytes:
    header = GetMaxOffsetRequest(topic=topic, queue_id=queue_id)
    return encode_command(Command.request(RequestCode.GET_MAX_OFFSET, header, opaque=1))


def create_topic(topic: str, queues: int) -> bytes:
    header = CreateTopicRequest(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=_READ_AND_WRITE,
        topic_filter_type="SINGLE_TAG",
    )
    return encode_command(Command.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header, opaque=1))
