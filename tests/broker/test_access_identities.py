"""What a broker with accounts sends on its own goes only to clients that may have it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orbitmq.broker.access import REMEMBERED, SILENCE, Reason
from orbitmq.broker.settings import AccessSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, sign
from orbitmq.wire.headers import ConsumeDirectlyRequest, UnregisterClientRequest
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.access import account, listed, wanting
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.delivery import AskedProducer, HandBroker, hand_broker, record_of, send_half

DENIED = int(ResponseCode.NO_PERMISSION)
MAKER = account("maker-key", "maker-s3cr3t")
OTHER = account("other-key", "other-s3cr3t")
TAKER = account("taker-key", "taker-s3cr3t")
RIVAL = account("rival-key", "rival-s3cr3t")
ADMIN = account("admin-key", "admin-s3cr3t")
REPLIES = "DefaultCluster_REPLY_TOPIC"
#: The id of a client that is named by its address alone.
CONTAINER = "172.17.0.2@DEFAULT"
#: Every Java client has this producer, whatever else it does.
INNER = "CLIENT_INNER_PRODUCER"


TAKES = f'topicPerms = ["orders=SUB"]\ngroupPerms = ["{GROUP}=SUB"]'
ACCOUNTS = {
    "maker": listed(MAKER, f'topicPerms = ["orders=PUB", "{REPLIES}=PUB"]'),
    "other": listed(OTHER),
    "taker": listed(TAKER, TAKES),
    "rival": listed(RIVAL, TAKES),
    "admin": listed(ADMIN, "admin = true"),
}


@dataclass
class Guarded:
    """A broker with accounts, and its clients."""

    broker: HandBroker
    accounts: Path
    _clients: list[RawClient] = field(default_factory=list)

    async def producer(self, who: Credentials, client_id: str, group: str = "makers"):
        producer = await AskedProducer.join(
            self.broker.broker, client_id, group, lambda command: sign(command, who)
        )
        self._clients.append(producer)
        return producer

    async def client(self, who: Credentials) -> RawClient:
        client = await RawClient.open(self.broker.broker, lambda command: sign(command, who))
        self._clients.append(client)
        return client

    async def consumer(self, who: Credentials, client_id: str) -> tuple[RawClient, list[Command]]:
        """A member of the group, and the requests that it gets."""
        received: list[Command] = []

        def answer(_: Connection, request: Command) -> Command:
            received.append(request)
            return request.answer(0)

        codes = (
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
        )
        connection = await connect(
            self.broker.broker.address,
            owner=Dispatcher(dict.fromkeys(codes, answer)),
            prepare=lambda command: sign(command, who),
        )
        client = RawClient(connection, received)
        self._clients.append(client)
        assert (await client.heartbeat(client_id, wanting("orders"))).code == 0
        return client, received

    def change(self, **accounts: str) -> None:
        """Replace accounts; an empty text removes one."""
        self.accounts.write_text("".join((ACCOUNTS | accounts).values()))
        self.broker.parts.access.refresh()

    async def leave(self, client: RawClient, group: str = "makers") -> None:
        await client.close()
        await until(lambda: not self.broker.parts.producers.is_online(group))

    def check_transactions(self) -> None:
        """Have the broker ask about transactions that were left open."""
        self.broker.clock.advance(60.0)
        self.broker.parts.transactions.step(self.broker.clock.now())
        self.broker.parts.writes.finish()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture
async def guarded(tmp_path):
    file = tmp_path / "accounts.toml"
    file.write_text("".join(ACCOUNTS.values()))
    settings = AccessSettings(accounts=file)
    async with hand_broker(tmp_path / "broker", access=settings) as (broker, _):
        guarded = Guarded(broker, file)
        yield guarded
        await guarded.close()


# Transactions.


async def asked(producer: AskedProducer, client_id: str) -> list[bytes]:
    """The bodies that a producer was asked about; they come before the answer to its heartbeat."""
    await producer.heartbeat(client_id, producers=("makers",))
    return [record_of(question).body for question in producer.questions]


async def test_only_a_producer_that_may_publish_is_asked_about_half_messages(guarded):
    spies = [await guarded.producer(OTHER, f"spy@{number}") for number in range(3)]
    maker = await guarded.producer(MAKER, "maker@1")
    for number in range(4):
        await send_half(maker, "orders", b"%d" % number, guarded.broker)

    guarded.check_transactions()

    assert await asked(maker, "maker@1") == [b"0", b"1", b"2", b"3"]
    assert [await asked(spy, f"spy@{number}") for number, spy in enumerate(spies)] == [[], [], []]


@pytest.mark.parametrize("cause", ["right withdrawn", "account changed"])
async def test_a_producer_that_may_no_longer_publish_is_not_asked(guarded, caplog, cause):
    who = [MAKER]
    producer = await AskedProducer.join(
        guarded.broker.broker, "maker@1", prepare=lambda command: sign(command, who[0])
    )
    await send_half(producer, "orders", b"card number", guarded.broker)

    if cause == "right withdrawn":
        guarded.change(maker=listed(MAKER))
    else:
        who[0] = OTHER
        await producer.heartbeat("maker@1", producers=("makers",))
    guarded.check_transactions()

    assert await asked(producer, "maker@1") == []
    assert "no producer to ask about a transaction" in caplog.text
    assert "are connected, but none of them may publish to the topic" in caplog.text
    await producer.close()


# Client ids.


@pytest.mark.parametrize("end", ["closed", "silent", "removed"])
async def test_a_client_id_is_refused_to_another_account_in_its_group_while_it_is_in_use(
    guarded, end
):
    taker, _ = await guarded.consumer(TAKER, CONTAINER)
    rival = await guarded.client(RIVAL)

    refused = await rival.heartbeat(CONTAINER, wanting("orders"))
    members = len(guarded.broker.parts.consumers.members(GROUP))
    if end == "closed":
        await taker.close()
        await until(lambda: not guarded.broker.parts.consumers.is_online(GROUP))
    elif end == "silent":
        guarded.broker.clock.advance(SILENCE + 0.1)
    else:
        guarded.change(taker="")
    afterwards = await rival.heartbeat(CONTAINER, wanting("orders"))

    assert (refused.code, afterwards.code, members) == (DENIED, 0, 1)
    assert f"client id '{CONTAINER}' is in use by another account in the same group" in (
        refused.remark or ""
    )
    assert guarded.broker.parts.access.refused[Reason.CLIENT_TAKEN] == 1


async def test_a_client_id_may_be_used_in_other_groups_and_over_other_connections(guarded):
    clients = [await guarded.client(each) for each in (TAKER, MAKER, OTHER, MAKER)]
    subscriptions = ((wanting("orders"),), (), (), ())
    groups = ((INNER,), (INNER, "makers"), (INNER, "others"), (INNER, "makers"))

    answers = [
        await client.heartbeat(CONTAINER, *subscription, producers=names)
        for client, subscription, names in zip(clients, subscriptions, groups, strict=True)
    ]

    assert [each.code for each in answers] == [0, 0, 0, 0], answers


# Replies.


async def reply(client: RawClient) -> Command:
    properties = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": CONTAINER}
    code = RequestCode.SEND_REPLY_MESSAGE_V2
    return await client.send(REPLIES, b"42", properties=properties, code=code)


def replies_to(client: AskedProducer) -> list[bytes]:
    return [bytes(each.body) for each in client.replies]


@pytest.mark.parametrize("spy_comes_first", [True, False])
async def test_of_two_accounts_with_a_client_id_the_replier_s_own_gets_the_reply(
    guarded, spy_comes_first
):
    spy = await guarded.producer(OTHER, CONTAINER, "spies") if spy_comes_first else None
    asker = await guarded.producer(MAKER, CONTAINER)
    spy = spy or await guarded.producer(OTHER, CONTAINER, "spies")

    answer = await reply(await guarded.client(MAKER))

    assert answer.code == 0, answer.remark
    assert (replies_to(asker), replies_to(spy)) == ([b"42"], [])


async def test_a_reply_is_refused_until_only_one_account_has_used_the_client_id_for_a_while(
    guarded,
):
    asker = await guarded.producer(MAKER, CONTAINER)
    spy = await guarded.producer(OTHER, CONTAINER, "spies")
    replier = await guarded.client(ADMIN)

    both_there = await reply(replier)
    await guarded.leave(spy, "spies")
    one_gone = await reply(replier)
    guarded.broker.clock.advance(REMEMBERED)
    long_gone = await reply(replier)

    for refused in (both_there, one_gone):
        assert "several accounts use this client id" in (refused.remark or "")
    assert long_gone.code == 0, long_gone.remark
    assert (replies_to(asker), replies_to(spy)) == ([b"42"], [])


@pytest.mark.parametrize("way", ["successor", "account changed", "unregistered"])
async def test_a_reply_does_not_reach_the_account_that_took_over_a_client_id(guarded, way):
    who = [MAKER]
    asker = await AskedProducer.join(
        guarded.broker.broker, CONTAINER, prepare=lambda command: sign(command, who[0])
    )
    if way == "successor":
        await guarded.leave(asker)
        taker = await guarded.producer(OTHER, CONTAINER)
    elif way == "unregistered":
        goodbye = UnregisterClientRequest(client_id=CONTAINER, producer_group="makers")
        await asker.connection.request(RequestCode.UNREGISTER_CLIENT, goodbye)
        taker = await guarded.producer(OTHER, CONTAINER, "spies")
    else:
        who[0] = OTHER
        taker = asker
        await asker.heartbeat(CONTAINER, producers=("makers",))

    answer = await reply(await guarded.client(ADMIN))
    await asker.close()

    assert answer.code != 0
    assert replies_to(taker) == []


# Pulls.


async def begin_pull(guarded: Guarded, client: RawClient) -> asyncio.Task[Command]:
    parts = guarded.broker.parts
    parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    before = len(parts.held)
    waiting = asyncio.ensure_future(client.pull("orders", hold=100.0))
    await until(lambda: len(parts.held) == before + 1)
    return waiting


@pytest.mark.parametrize(
    "taker",
    [
        "",
        listed(TAKER),
        listed(TAKER, 'topicPerms = ["orders=PUB"]'),
        listed(account("taker-key", "another-s3cr3t"), TAKES),
    ],
    ids=["removed", "no rights", "other rights", "another secret"],
)
async def test_a_held_pull_that_is_no_longer_allowed_is_refused_and_others_stay(guarded, taker):
    waiting = await begin_pull(guarded, await guarded.client(TAKER))
    other = await begin_pull(guarded, await guarded.client(RIVAL))
    maker = await guarded.client(MAKER)

    guarded.change(taker=taker)
    answer = await asyncio.wait_for(waiting, 30)
    was_woken = other.done()
    await maker.stored("orders", b"secret")

    assert (answer.code, bodies_in(answer)) == (DENIED, [])
    assert not was_woken
    assert bodies_in(await asyncio.wait_for(other, 30)) == [b"secret"]
    assert sum(guarded.broker.parts.access.refused.values()) == 1


# Members of groups.


async def test_a_member_without_rights_is_neither_notified_nor_asked(guarded):
    maker, admin = await guarded.client(MAKER), await guarded.client(ADMIN)
    place = await maker.stored("orders", b"secret")
    taker, of_taker = await guarded.consumer(TAKER, "taker@1")
    _, of_rival = await guarded.consumer(RIVAL, "rival@1")
    await until(lambda: len(of_taker) == 2)
    of_taker.clear()
    of_rival.clear()

    guarded.change(taker=listed(TAKER))
    await guarded.consumer(RIVAL, "rival@2")
    answers = [
        await admin.connection.request(
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            ConsumeDirectlyRequest(consumer_group=GROUP, client_id=who, msg_id=place.msg_id),
        )
        for who in ("taker@1", "rival@1")
    ]
    await taker.heartbeat("taker@1", producers=("any",))

    assert [answer.code for answer in answers] == [ResponseCode.SYSTEM_ERROR, ResponseCode.SUCCESS]
    assert "<taker@1> not online" in (answers[0].remark or "")
    assert of_taker == []
    assert [each.code for each in of_rival] == [40, RequestCode.CONSUME_MESSAGE_DIRECTLY]


async def test_the_locks_of_a_client_are_not_released_by_another_account(guarded):
    taker, _ = await guarded.consumer(TAKER, "taker@1")
    rival, _ = await guarded.consumer(RIVAL, "rival@1")
    guarded.broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    queue = MessageQueue(broker_name="broker-a", queue_id=0, topic="orders")

    def batch(client_id):
        body = LockBatch(client_id=client_id, consumer_group=GROUP, mq_set=(queue,))
        return encode_body(body)

    locked = await taker.connection.request(RequestCode.LOCK_BATCH_MQ, body=batch("taker@1"))
    stolen = await rival.connection.request(RequestCode.UNLOCK_BATCH_MQ, body=batch("taker@1"))
    tried = await rival.connection.request(RequestCode.LOCK_BATCH_MQ, body=batch("rival@1"))

    assert decode_body(LockedQueues, locked.body).lock_ok_mq_set == (queue,)
    assert stolen.code == DENIED
    assert decode_body(LockedQueues, tried.body).lock_ok_mq_set == ()
