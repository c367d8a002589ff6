"""Looking single messages up."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.broker import scheduler
from orbitmq.broker.broker import Broker
from orbitmq.broker.handlers import messages
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.wire import bodies, headers
from orbitmq.wire.codes import DEFAULT_LIMITS, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import encode_body
from tests.support.admin import ask, consumer_that, queue, subscription, told
from tests.support.broker import GROUP, RawClient, bodies_in, messages_in, until
from tests.support.store import put

ALWAYS = 2**63 - 1


async def by_key(
    client: RawClient, key: str, *, most: int = 32, end: int = ALWAYS, is_unique: bool | None = None
) -> Command:
    header = headers.QueryMessageRequest(
        topic="orders",
        key=key,
        max_num=most,
        begin_timestamp=0,
        end_timestamp=end,
        is_unique_key=is_unique,
    )
    return await ask(client, RequestCode.QUERY_MESSAGE, header)


async def test_the_answer_says_how_far_the_index_has_come(broker, client):
    await client.stored("orders", properties={"KEYS": "k"})

    header = (await by_key(client, "k")).header(headers.QueryMessageResponse)

    state = broker.parts.store.statistics()
    assert header.index_last_update_phyoffset == state.log_end
    assert header.index_last_update_timestamp == state.indexed_ms > 0


async def test_a_unique_id_finds_its_message_whatever_number_is_asked_for(client):
    sent = await client.stored("orders", b"found")
    assert sent.transaction_id is not None

    answer = await by_key(client, sent.transaction_id, most=0, is_unique=True)

    assert bodies_in(answer) == [b"found"]


async def test_no_message_in_the_time_asked_for_is_not_found(client):
    await client.stored("orders", properties={"KEYS": "k"})

    too_early = await by_key(client, "k", end=1000)
    unknown = await by_key(client, "nothing")

    assert too_early.code == unknown.code == ResponseCode.QUERY_NOT_FOUND
    assert too_early.remark == "can not find message, maybe time range not correct"
    assert int(unknown.ext_fields["indexLastUpdatePhyoffset"]) > 0


async def test_as_many_messages_are_brought_as_fit_into_an_answer_which_says_that_there_are_more(
    broker, client
):
    size = 3 * 1024 * 1024
    for number in range(7):
        await client.stored("orders", b"%d" % number + bytes(size), properties={"KEYS": "large"})
    store = broker.parts.store
    await until(lambda: store.statistics().indexed == store.statistics().log_end)

    answer = await by_key(client, "large")
    older = await by_key(client, "large", most=2)

    assert answer.code == ResponseCode.SUCCESS
    assert [body[:1] for body in bodies_in(answer)] == [b"6", b"5", b"4", b"3", b"2"]
    assert len(answer.body) + size + MIN_RECORD_SIZE > DEFAULT_LIMITS.frame
    assert answer.header(headers.QueryMessageResponse).cut_short is True
    assert (answer.remark or "").startswith("the newest 5 messages are as much as")
    assert older.header(headers.QueryMessageResponse).cut_short is None
    assert older.remark is None


async def test_others_are_served_while_a_key_is_looked_for_among_many_messages(
    broker, client, open_client, monkeypatch
):
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    await client.stored("orders", b"found", properties={"KEYS": "Aa"})
    for _ in range(3000):
        # Has the same hash.
        put(broker.parts.store, "orders", 0, b"x", {"KEYS": "BB"})
    broker.parts.store.write()
    other = await open_client(broker)
    looking = asyncio.ensure_future(by_key(client, "Aa"))
    await asyncio.sleep(0)  # it is sent now

    for _ in range(3):
        await other.stored("payments")

    assert not looking.done()
    async with asyncio.timeout(30):
        assert bodies_in(await looking) == [b"found"]


@pytest.mark.parametrize("offset", [-1, 7, 10**9])
async def test_an_offset_without_a_message_is_refused(client, offset):
    await client.stored("orders")

    answer = await ask(
        client, RequestCode.VIEW_MESSAGE_BY_ID, headers.ViewMessageRequest(offset=offset)
    )

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert (answer.remark or "").startswith(f"can not find message by the offset, {offset}")


INFO = RequestCode.GET_CONSUMER_RUNNING_INFO
DIRECTLY = RequestCode.CONSUME_MESSAGE_DIRECTLY
STATUS = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
ASK_STATUS = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS

RUNNING = bodies.ConsumerRunningInfo(properties={"PROP_CLIENT_VERSION": "V5_3_3"})


class Members:
    """Consumers of a group that answer as they are told to, and remember what they were asked."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._clients: list[RawClient] = []
        self.asked: list[Command] = []

    async def join(
        self, client_id: str, answers: dict[int, Handler], *, version: int | None = None
    ) -> RawClient:
        client = await consumer_that(
            self._broker,
            {code: self._remembering(handler) for code, handler in answers.items()},
            version=version,
        )
        self._clients.append(client)
        await client.heartbeat(client_id, subscription("orders"))
        return client

    def _remembering(self, handler: Handler) -> Handler:
        def handle(connection: Connection, request: Command) -> Result:
            self.asked.append(request)
            result = handler(connection, request)
            assert not asyncio.iscoroutine(result)
            return result

        return handle

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture
async def members(broker):
    members = Members(broker)
    yield members
    await members.close()


def running(_: Connection, request: Command) -> Command:
    return request.answer(0, remark="as the client says", body=encode_body(RUNNING))


def silent(_: Connection, __: Command) -> Result:
    return LATER


def info_of(client_id: str) -> headers.GetConsumerRunningInfoRequest:
    return headers.GetConsumerRunningInfoRequest(
        consumer_group=GROUP, client_id=client_id, jstack_enable=True
    )


async def test_the_state_of_a_consumer_comes_from_the_consumer(client, members):
    await members.join("me", {INFO: running})

    answer = await ask(client, INFO, info_of("me"), extra={"AccessKey": "a", "Signature": "s"})
    body = await told(client, bodies.ConsumerRunningInfo, INFO, info_of("me"))

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, "as the client says")
    assert body == RUNNING
    assert dict(members.asked[0].ext_fields) == {
        "consumerGroup": GROUP,
        "clientId": "me",
        "jstackEnable": "true",
    }


def leave(connection: Connection, _: Command) -> Result:
    connection.close()
    return LATER


@pytest.mark.parametrize(
    ("handler", "joined", "code", "words"),
    [
        (lambda _, request: request.answer(1, remark="no such group here"), {}, 1, "no such group"),
        (silent, {}, ResponseCode.CONSUME_MSG_TIMEOUT, f"consumer <{GROUP}> <me> Timeout"),
        (leave, {}, ResponseCode.SYSTEM_ERROR, f"invoke consumer <{GROUP}> <me> Exception"),
        (running, {"version": 61}, ResponseCode.SYSTEM_ERROR, "too low to finish"),
        (
            running,
            {"client_id": "other"},
            ResponseCode.SYSTEM_ERROR,
            f"The Consumer <{GROUP}> <me> not online",
        ),
    ],
    ids=["refuses", "silent", "leaves", "too old", "not there"],
)
async def test_a_consumer_that_gives_no_state_is_named_with_the_reason(
    client, members, monkeypatch, handler, joined, code, words
):
    monkeypatch.setattr(messages, "CONSUMER_DEADLINE", 0.05)
    await members.join(**({"client_id": "me", "answers": {INFO: handler}} | joined))

    answer = await ask(client, INFO, info_of("me"))

    assert answer.code == code
    assert words in (answer.remark or "")


async def test_a_consumer_is_given_a_message_to_consume(client, members):
    result = bodies.ConsumeDirectlyResult(consume_result=bodies.ConsumeResult.CR_SUCCESS)
    await members.join(
        "me", {DIRECTLY: lambda _, request: request.answer(0, body=encode_body(result))}
    )
    sent = await client.stored("orders", b"again")
    header = headers.ConsumeDirectlyRequest(
        consumer_group=GROUP, client_id="me", msg_id=sent.msg_id, topic="orders"
    )

    body = await told(client, bodies.ConsumeDirectlyResult, DIRECTLY, header)

    (asked,) = members.asked
    assert body == result
    assert [bytes(message.body) for message in messages_in(asked)] == [b"again"]
    assert asked.ext_fields["brokerName"] == "broker-a"
    assert asked.ext_fields["topicSysFlag"] == asked.ext_fields["groupSysFlag"] == "0"


@pytest.mark.parametrize("msg_id", [None, "nonsense", "7F00000100002A9F0000000000ABCDEF"])
async def test_a_message_that_is_not_there_cannot_be_consumed(client, members, msg_id):
    await members.join("me", {DIRECTLY: silent})
    header = headers.ConsumeDirectlyRequest(consumer_group=GROUP, client_id="me", msg_id=msg_id)

    answer = await ask(client, DIRECTLY, header)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "cannot be read" in (answer.remark or "")
    assert members.asked == []


def at(offset: int) -> Handler:
    def answer(_: Connection, request: Command) -> Command:
        body = bodies.ConsumerStatus(message_queue_table={queue("orders"): offset})
        return request.answer(0, body=encode_body(body))

    return answer


async def test_all_members_of_a_group_tell_their_progress(client, members):
    await members.join("one", {STATUS: at(3)})
    await members.join("two", {STATUS: at(5)})
    header = headers.GetConsumerStatusRequest(topic="orders", group=GROUP)

    everybody = await told(client, bodies.ConsumerStatus, ASK_STATUS, header)
    one = await told(
        client,
        bodies.ConsumerStatus,
        ASK_STATUS,
        headers.GetConsumerStatusRequest(topic="orders", group=GROUP, client_addr="one"),
    )

    assert everybody.consumer_table == {"one": {queue("orders"): 3}, "two": {queue("orders"): 5}}
    assert one.consumer_table == {"one": {queue("orders"): 3}}


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, f"No Any Consumer online in the consumer group: [{GROUP}]"),
        (27, "the client does not support this feature"),
    ],
    ids=["no member", "too old"],
)
async def test_progress_that_no_member_can_tell_is_refused(client, members, version, words):
    if version is not None:
        await members.join("me", {STATUS: at(1)}, version=version)

    answer = await ask(
        client, ASK_STATUS, headers.GetConsumerStatusRequest(topic="orders", group=GROUP)
    )

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert (answer.remark or "").startswith(words)
