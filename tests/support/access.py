"""What every request needs: the permissions that the tests of access expect."""

from __future__ import annotations

from orbitmq.broker.access import Grant, Kind, Need
from orbitmq.message.ids import decode_offset_id
from orbitmq.wire import bodies, headers
from orbitmq.wire.command import Command, Credentials
from orbitmq.wire.javajson import encode_body
from tests.support.broker import pull_header, send_header


def account(access_key: str, secret_key: str) -> Credentials:
    return Credentials(access_key=access_key, secret_key=secret_key)


def listed(credentials: Credentials, rights: str = "") -> str:
    """An account in a file of accounts."""
    return (
        f'[[accounts]]\naccessKey = "{credentials.access_key}"\n'
        f'secretKey = "{credentials.secret_key}"\n{rights}\n'
    )


def wanting(topic: str) -> bodies.SubscriptionData:
    return bodies.SubscriptionData(topic=topic, sub_string="*", sub_version=1)


def place_of(stored: headers.SendMessageResponse) -> int:
    return decode_offset_id(stored.msg_id).offset


def request(code: int, header: headers.Header | None = None, body: bytes = b"") -> Command:
    return Command.request(code, header, opaque=1, body=body)


PUB_T = Need(Kind.TOPIC, "t", Grant.PUB)
SUB_T = Need(Kind.TOPIC, "t", Grant.SUB)
SUB_U = Need(Kind.TOPIC, "u", Grant.SUB)
SUB_G = Need(Kind.GROUP, "g", Grant.SUB)
SUB_H = Need(Kind.GROUP, "h", Grant.SUB)

#: Messages of other places in the log are not there.
LOG = {7: "t", 8: "%RETRY%g", 9: "u"}

_BEAT = bodies.HeartbeatData(
    client_id="c",
    consumer_data_set=(
        bodies.ConsumerData(
            group_name="g",
            subscription_data_set=(wanting("t"), wanting("%RETRY%g"), wanting("%RETRY%g_t")),
        ),
        bodies.ConsumerData(group_name="h", subscription_data_set=(wanting("u"),)),
    ),
    producer_data_set=(bodies.ProducerData(group_name="free"),),
)
_LOCK = bodies.LockBatch(
    client_id="c",
    consumer_group="g",
    mq_set=tuple(
        bodies.MessageQueue(broker_name="b", queue_id=0, topic=topic)
        for topic in ("t", "t", "%RETRY%g")
    ),
)
_CHECK = bodies.CheckClientRequest(client_id="c", group="g", subscription_data=wanting("t"))
_ASSIGNMENT = bodies.QueryAssignment(
    client_id="c", consumer_group="g", topic="t", strategy_name="AVG"
)


def _end(topic: str | None, offset: int) -> headers.EndTransactionRequest:
    return headers.EndTransactionRequest(
        producer_group="p",
        tran_state_table_offset=0,
        commit_log_offset=offset,
        commit_or_rollback=8,
        msg_id="m",
        topic=topic,
    )


REQUESTS: list[tuple[Command, set[Need]]] = [
    *((request(code, send_header("t")), {PUB_T}) for code in (10, 310, 320, 324, 325)),
    *((request(code, send_header("%RETRY%h")), {SUB_H}) for code in (10, 310, 320)),
    (request(370, headers.RecallMessageRequest(topic="t", recall_handle="x")), {PUB_T}),
    (request(37, _end("t", 7)), {PUB_T}),
    *((request(code, pull_header("t", consumer_group="g")), {SUB_T, SUB_G}) for code in (11, 361)),
    (request(11, pull_header("%RETRY%g", consumer_group="g")), {SUB_G}),
    (request(11, pull_header("%RETRY%h", consumer_group="g")), {SUB_G, SUB_H}),
    (
        request(14, headers.QueryConsumerOffsetRequest(consumer_group="g", topic="t", queue_id=0)),
        {SUB_T, SUB_G},
    ),
    (
        request(
            15,
            headers.UpdateConsumerOffsetRequest(
                consumer_group="g", topic="t", queue_id=0, commit_offset=1
            ),
        ),
        {SUB_T, SUB_G},
    ),
    (
        request(36, headers.ConsumerSendBackRequest(offset=7, group="g", delay_level=0)),
        {SUB_G, SUB_T},
    ),
    (request(36, headers.ConsumerSendBackRequest(offset=8, group="g", delay_level=0)), {SUB_G}),
    (request(41, body=encode_body(_LOCK)), {SUB_G, SUB_T}),
    (request(42, body=encode_body(_LOCK)), {SUB_G, SUB_T}),
    (request(29, headers.SearchOffsetRequest(topic="t", queue_id=0, timestamp=0)), {SUB_T}),
    (request(30, headers.GetMaxOffsetRequest(topic="t", queue_id=0)), {SUB_T}),
    (request(31, headers.GetMinOffsetRequest(topic="t", queue_id=0)), {SUB_T}),
    (request(32, headers.GetEarliestStoreTimeRequest(topic="t", queue_id=0)), {SUB_T}),
    (
        request(
            12,
            headers.QueryMessageRequest(
                topic="t", key="k", max_num=1, begin_timestamp=0, end_timestamp=1
            ),
        ),
        {SUB_T},
    ),
    (request(34, body=encode_body(_BEAT)), {SUB_G, SUB_T, SUB_H, SUB_U}),
    (request(35, headers.UnregisterClientRequest(client_id="c", consumer_group="g")), {SUB_G}),
    (request(38, headers.GetConsumerListRequest(consumer_group="g")), {SUB_G}),
    (request(46, body=encode_body(_CHECK)), {SUB_G, SUB_T}),
    (request(400, body=encode_body(_ASSIGNMENT)), {SUB_G, SUB_T}),
    (
        request(307, headers.GetConsumerRunningInfoRequest(consumer_group="g", client_id="c")),
        {SUB_G},
    ),
]

#: Those that need to look into the log, which is empty for a client without permissions.
LOOKING: list[tuple[Command, set[Need]]] = [
    (request(37, _end(None, 7)), {PUB_T}),
    (request(37, _end("u", 7)), {PUB_T, Need(Kind.TOPIC, "u", Grant.PUB)}),
    (request(37, _end(None, 100)), set()),
    (request(33, headers.ViewMessageRequest(offset=9, topic="t")), {SUB_U}),
    (request(33, headers.ViewMessageRequest(offset=8)), {SUB_G}),
    (request(33, headers.ViewMessageRequest(offset=100)), set()),
    (request(36, headers.ConsumerSendBackRequest(offset=100, group="g", delay_level=0)), {SUB_G}),
    (request(35, headers.UnregisterClientRequest(client_id="c", producer_group="p")), set()),
]
