"""What a broker with accounts says on its own goes only to those for whom it is meant."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orbitmq.broker.access import (
    LONGEST_WAIT,
    MOST_OF_ONE,
    REMEMBERED,
    SILENCE,
    TRUSTED,
    Reason,
    Requesters,
)
from orbitmq.broker.settings import AccessSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, sign
from orbitmq.wire.headers import ConsumeDirectlyRequest, GetConsumerRunningInfoRequest
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.access import account, wanting
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.delivery import AskedProducer, HandBroker, hand_broker, record_of, send_half

DENIED = int(ResponseCode.NO_PERMISSION)
MAKER = account("maker-key", "maker-s3cr3t")
OTHER = account("other-key", "other-s3cr3t")
TAKER = account("taker-key", "taker-s3cr3t")
RIVAL = account("rival-key", "rival-s3cr3t")
ADMIN = account("admin-key", "admin-s3cr3t")
REPLIES = "DefaultCluster_REPLY_TOPIC"


def listed(credentials: Credentials, rights: str = "") -> str:
    return (
        f'[[accounts]]\naccessKey = "{credentials.access_key}"\n'
        f'secretKey = "{credentials.secret_key}"\n{rights}\n'
    )


MAKES = f'topicPerms = ["orders=PUB", "{REPLIES}=PUB"]'
TAKES = f'topicPerms = ["orders=SUB"]\ngroupPerms = ["{GROUP}=SUB"]'


@dataclass
class Guarded:
    """A broker with accounts, and whoever came to it."""

    broker: HandBroker
    accounts: Path
    _clients: list[RawClient] = field(default_factory=list)

    async def producer(self, who: Credentials, client_id: str) -> AskedProducer:
        producer = await AskedProducer.join(
            self.broker.broker, client_id, prepare=lambda command: sign(command, who)
        )
        self._clients.append(producer)
        return producer

    async def client(self, who: Credentials) -> RawClient:
        client = await RawClient.open(self.broker.broker, lambda command: sign(command, who))
        self._clients.append(client)
        return client

    async def consumer(self, who: Credentials, client_id: str) -> tuple[RawClient, list[Command]]:
        """A member of the group, and what it is told and asked."""
        told: list[Command] = []

        def answer(_: Connection, request: Command) -> Command:
            told.append(request)
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
        client = RawClient(connection, told)
        self._clients.append(client)
        assert (await client.heartbeat(client_id, wanting("orders"))).code == 0
        return client, told

    def allow(self, *accounts: str) -> None:
        """Have these accounts from now on."""
        self.accounts.write_text("".join(accounts))
        self.broker.parts.access.refresh()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture
async def guarded(tmp_path):
    file = tmp_path / "accounts.toml"
    file.write_text(
        listed(MAKER, MAKES)
        + listed(OTHER)
        + listed(TAKER, TAKES)
        + listed(RIVAL, TAKES)
        + listed(ADMIN, "admin = true")
    )
    async with hand_broker(tmp_path / "broker", access=AccessSettings(accounts=file)) as (
        broker,
        _,
    ):
        guarded = Guarded(broker, file)
        try:
            yield guarded
        finally:
            await guarded.close()


def check(guarded: Guarded) -> None:
    """Let the broker ask about transactions that were left open."""
    broker = guarded.broker
    broker.clock.advance(60.0)
    broker.parts.transactions.step(broker.clock.now())
    broker.parts.writes.finish()


async def told(producer: AskedProducer, client_id: str) -> list[bytes]:
    """The bodies that a producer was asked about; what it is told has come before this answer."""
    await producer.heartbeat(client_id, producers=("makers",))
    return [record_of(question).body for question in producer.questions]


# Transactions.


async def test_only_a_producer_that_may_send_to_the_topic_is_asked_about_its_half_messages(guarded):
    spies = [await guarded.producer(OTHER, f"spy@{number}") for number in range(3)]
    maker = await guarded.producer(MAKER, "maker@1")
    for number in range(4):
        await send_half(maker, "orders", b"%d" % number, guarded.broker)

    check(guarded)

    assert await told(maker, "maker@1") == [b"0", b"1", b"2", b"3"]
    assert [await told(spy, f"spy@{number}") for number, spy in enumerate(spies)] == [[], [], []]


async def test_with_nobody_who_may_be_asked_nobody_is_asked(guarded, caplog):
    spy = await guarded.producer(OTHER, "spy@1")
    await send_half(await guarded.client(MAKER), "orders", b"card number", guarded.broker)

    check(guarded)

    assert await told(spy, "spy@1") == []
    assert "no producer to ask about a transaction" in caplog.text
    assert "are connected, but none of them may publish to the topic" in caplog.text


async def test_a_right_that_was_taken_away_is_gone_before_the_next_question(guarded):
    maker = await guarded.producer(MAKER, "maker@1")
    await send_half(maker, "orders", b"x", guarded.broker)

    guarded.allow(listed(MAKER), listed(ADMIN, "admin = true"))
    check(guarded)

    assert await told(maker, "maker@1") == []


async def test_a_connection_has_the_rights_of_its_last_heartbeat_and_not_of_an_earlier_one(guarded):
    who = [MAKER]
    turncoat = await AskedProducer.join(
        guarded.broker.broker, "maker@1", prepare=lambda command: sign(command, who[0])
    )
    await send_half(turncoat, "orders", b"x", guarded.broker)

    who[0] = OTHER
    await turncoat.heartbeat("maker@1", producers=("makers",))
    check(guarded)

    assert await told(turncoat, "maker@1") == []
    await turncoat.close()


# Client ids.


async def test_the_client_id_of_another_account_is_refused_while_that_is_connected(guarded):
    maker = await guarded.producer(MAKER, "maker@1")
    spy = await guarded.client(OTHER)

    refused = await spy.heartbeat("maker@1", producers=("makers",))
    await maker.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    afterwards = await spy.heartbeat("maker@1", producers=("makers",))

    assert refused.code == DENIED
    assert "client id 'maker@1' is in use by another account in the same group" in (
        refused.remark or ""
    )
    assert guarded.broker.parts.access.refused[Reason.CLIENT_TAKEN] == 1
    assert afterwards.code == 0


async def test_a_client_that_comes_back_over_another_connection_keeps_its_id(guarded):
    await guarded.producer(MAKER, "maker@1")
    again = await guarded.client(MAKER)

    assert (await again.heartbeat("maker@1", producers=("makers",))).code == 0


async def test_a_connection_keeps_no_more_than_its_last_client_id_from_others(guarded):
    squatter = await guarded.client(OTHER)
    for number in range(10):
        await squatter.heartbeat(f"maker@{number}", producers=("makers",))
    maker = await guarded.client(MAKER)

    codes = [(await maker.heartbeat(f"maker@{n}", producers=("makers",))).code for n in range(10)]

    assert codes == [0] * 9 + [DENIED]


async def test_a_reply_goes_to_the_client_that_asked_and_not_to_who_takes_its_name(guarded):
    asker = await guarded.producer(MAKER, "asker@1")
    spy = await guarded.producer(OTHER, "spy@1")
    await spy.heartbeat("asker@1", producers=("makers",))
    replier = await guarded.client(MAKER)

    properties = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": "asker@1"}
    answer = await replier.send(
        REPLIES, b"42", properties=properties, code=RequestCode.SEND_REPLY_MESSAGE_V2
    )

    assert answer.code == 0, answer.remark
    assert [bytes(reply.body) for reply in asker.replies] == [b"42"]
    assert spy.replies == []


#: What a client is called that is called after its address alone.
CONTAINER = "172.17.0.2@DEFAULT"
#: Every Java client is this producer, besides what it is for.
INNER = "CLIENT_INNER_PRODUCER"


async def test_two_accounts_may_use_one_client_id_in_different_groups(guarded):
    taker, maker, other = [await guarded.client(each) for each in (TAKER, MAKER, OTHER)]

    answers = [
        await taker.heartbeat(CONTAINER, wanting("orders"), producers=(INNER,)),
        await maker.heartbeat(CONTAINER, producers=(INNER, "makers")),
        await other.heartbeat(CONTAINER, producers=(INNER, "others")),
    ]

    assert [each.code for each in answers] == [0, 0, 0], answers
    assert guarded.broker.parts.access.refused[Reason.CLIENT_TAKEN] == 0


async def test_two_accounts_may_not_use_one_client_id_in_one_consumer_group(guarded):
    await guarded.consumer(TAKER, CONTAINER)
    rival = await guarded.client(RIVAL)

    refused = await rival.heartbeat(CONTAINER, wanting("orders"))

    assert refused.code == DENIED
    assert len(guarded.broker.parts.consumers.members(GROUP)) == 1


async def test_who_comes_back_with_another_key_need_not_wait_for_a_connection_nobody_closes(
    guarded,
):
    await guarded.consumer(TAKER, CONTAINER)
    rival = await guarded.client(RIVAL)

    guarded.broker.clock.advance(SILENCE)
    still_there = await rival.heartbeat(CONTAINER, wanting("orders"))
    guarded.broker.clock.advance(0.1)
    silent = await rival.heartbeat(CONTAINER, wanting("orders"))

    assert [still_there.code, silent.code] == [DENIED, 0]


async def test_the_client_id_of_an_account_that_is_gone_is_free(guarded):
    await guarded.consumer(TAKER, CONTAINER)
    rival = await guarded.client(RIVAL)

    guarded.allow(listed(RIVAL, TAKES))

    assert (await rival.heartbeat(CONTAINER, wanting("orders"))).code == 0


async def reply(client: RawClient, to: str) -> Command:
    properties = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": to}
    return await client.send(
        REPLIES, b"42", properties=properties, code=RequestCode.SEND_REPLY_MESSAGE_V2
    )


@pytest.mark.parametrize("spy_comes_first", [True, False])
async def test_of_two_accounts_with_one_client_id_the_one_gets_a_reply_whose_account_replies(
    guarded, spy_comes_first
):
    spy = await guarded.producer(OTHER, "spy@1")
    if spy_comes_first:
        await spy.heartbeat(CONTAINER, producers=("spies",))
    asker = await guarded.producer(MAKER, CONTAINER)
    if not spy_comes_first:
        await spy.heartbeat(CONTAINER, producers=("spies",))

    answer = await reply(await guarded.client(MAKER), CONTAINER)

    assert answer.code == 0, answer.remark
    assert [bytes(each.body) for each in asker.replies] == [b"42"]
    assert spy.replies == []


async def test_a_reply_that_could_be_meant_for_either_of_two_accounts_is_given_to_neither(guarded):
    asker = await guarded.producer(MAKER, CONTAINER)
    spy = await guarded.producer(OTHER, "spy@1")
    await spy.heartbeat(CONTAINER, producers=("spies",))
    replier = await guarded.client(ADMIN)

    unclear = await reply(replier, CONTAINER)
    await spy.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("spies"))
    perhaps_too_late = await reply(replier, CONTAINER)
    guarded.broker.clock.advance(REMEMBERED)
    clear = await reply(replier, CONTAINER)

    for refused in (unclear, perhaps_too_late):
        assert refused.code != 0
        assert "several accounts use this client id" in (refused.remark or "")
    assert clear.code == 0, clear.remark
    assert [bytes(each.body) for each in asker.replies] == [b"42"]
    assert spy.replies == []


def asking(client_id: str, number: str = "c1") -> dict[str, str]:
    return {"CORRELATION_ID": number, "REPLY_TO_CLIENT": client_id, "TTL": "3000"}


async def ask(client: RawClient, client_id: str, topic: str = "orders") -> None:
    answer = await client.send(topic, b"6 x 7", properties=asking(client_id))
    assert answer.code == 0, answer.remark


async def test_a_reply_to_who_has_left_does_not_reach_the_account_that_took_over_its_client_id(
    guarded,
):
    asker = await guarded.producer(MAKER, CONTAINER)
    await ask(asker, CONTAINER)
    await asker.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    spy = await guarded.producer(OTHER, CONTAINER)
    guarded.broker.clock.advance(REMEMBERED + 1)
    replier = await guarded.client(ADMIN)

    late = await reply(replier, CONTAINER)
    await spy.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    asker = await guarded.producer(MAKER, CONTAINER)
    guarded.broker.clock.advance(REMEMBERED + 1)
    clear = await reply(replier, CONTAINER)

    assert late.code != 0
    assert "the account that asked is gone" in (late.remark or "")
    assert clear.code == 0, clear.remark
    assert [bytes(each.body) for each in asker.replies] == [b"42"]
    assert spy.replies == []


async def test_a_reply_to_a_request_that_passed_elsewhere_is_not_given_to_a_successor_for_a_while(
    guarded,
):
    asker = await guarded.producer(MAKER, CONTAINER)
    await asker.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    successor = await guarded.producer(OTHER, CONTAINER)
    replier = await guarded.client(ADMIN)

    at_once = await reply(replier, CONTAINER)
    guarded.broker.clock.advance(REMEMBERED)
    later = await reply(replier, CONTAINER)

    assert [at_once.code == 0, later.code == 0] == [False, True]
    assert [bytes(each.body) for each in successor.replies] == [b"42"]


async def test_a_connection_that_changes_its_account_does_not_get_replies_to_the_former(guarded):
    who = [MAKER]
    asker = await AskedProducer.join(
        guarded.broker.broker, CONTAINER, prepare=lambda command: sign(command, who[0])
    )
    try:
        await ask(asker, CONTAINER)
        who[0] = OTHER
        assert (await asker.heartbeat(CONTAINER, producers=("makers",))).code == 0

        answer = await reply(await guarded.client(ADMIN), CONTAINER)
    finally:
        await asker.close()

    assert answer.code != 0
    assert asker.replies == []


# A request that passed another broker, of which somebody who has read it sends a copy to this one.

SENDS_JUNK = 'topicPerms = ["junk=PUB"]'


def let_other_send_junk(guarded: Guarded) -> None:
    guarded.allow(listed(MAKER, MAKES), listed(OTHER, SENDS_JUNK), listed(ADMIN, "admin = true"))


async def test_whoever_copies_anothers_request_does_not_get_the_reply(guarded):
    let_other_send_junk(guarded)
    asker = await guarded.producer(MAKER, CONTAINER)
    spy = await guarded.producer(OTHER, "spy@1")
    await spy.heartbeat(CONTAINER, producers=("spies",))
    await ask(spy, CONTAINER, "junk")

    unclear = await reply(await guarded.client(ADMIN), CONTAINER)
    of_its_own = await reply(await guarded.client(MAKER), CONTAINER)

    assert "several accounts use this client id" in (unclear.remark or "")
    assert of_its_own.code == 0, of_its_own.remark
    assert [bytes(each.body) for each in asker.replies] == [b"42"]
    assert spy.replies == []


async def test_whoever_copies_a_request_and_takes_over_the_client_id_does_not_get_the_reply(
    guarded,
):
    let_other_send_junk(guarded)
    asker = await guarded.producer(MAKER, CONTAINER)
    await asker.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    spy = await guarded.producer(OTHER, CONTAINER)
    await ask(spy, CONTAINER, "junk")

    answer = await reply(await guarded.client(ADMIN), CONTAINER)

    assert "several accounts use this client id" in (answer.remark or "")
    assert spy.replies == []


async def test_whoever_passes_a_request_on_keeps_no_reply_from_the_one_who_asked(guarded):
    let_other_send_junk(guarded)
    asker = await guarded.producer(MAKER, CONTAINER)
    await ask(await guarded.client(OTHER), CONTAINER, "junk")

    answer = await reply(await guarded.client(ADMIN), CONTAINER)

    assert answer.code == 0, answer.remark
    assert [bytes(each.body) for each in asker.replies] == [b"42"]


def asked_by(guarded: Guarded) -> str | None:
    """The account that is known to have asked."""
    properties = "".join(f"{name}\x01{value}\x02" for name, value in asking(CONTAINER).items())
    return guarded.broker.parts.access._requesters.account_of(properties)


@pytest.mark.parametrize(
    "code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE]
)
async def test_a_request_is_remembered_under_whichever_code_it_was_sent(guarded, code):
    asker = await guarded.producer(MAKER, CONTAINER)

    refused = await asker.send("orders", b"", properties=asking(CONTAINER), code=code)
    before = asked_by(guarded)
    taken = await asker.send("orders", b"6 x 7", properties=asking(CONTAINER), code=code)

    assert (refused.code != 0, taken.code) == (True, 0), taken.remark
    assert before is None
    assert asked_by(guarded) == MAKER.access_key


async def test_requests_and_client_ids_of_an_account_are_forgotten_with_it(guarded):
    asker = await guarded.producer(MAKER, CONTAINER)
    await ask(asker, CONTAINER)
    await asker.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    renamed = account("maker-key-2", "maker-s3cr3t")

    guarded.allow(listed(renamed, MAKES), listed(ADMIN, "admin = true"))
    asker = await guarded.producer(renamed, CONTAINER)
    answer = await reply(await guarded.client(ADMIN), CONTAINER)

    assert answer.code == 0, answer.remark
    assert [bytes(each.body) for each in asker.replies] == [b"42"]


async def test_an_account_that_was_gone_when_its_client_left_keeps_no_reply_from_a_successor(
    guarded,
):
    left = await guarded.producer(MAKER, CONTAINER)
    guarded.allow(listed(OTHER), listed(ADMIN, "admin = true"))
    await left.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))
    successor = await guarded.producer(OTHER, CONTAINER)

    answer = await reply(await guarded.client(ADMIN), CONTAINER)

    assert answer.code == 0, answer.remark
    assert [bytes(each.body) for each in successor.replies] == [b"42"]


async def test_a_host_that_needs_no_account_cannot_make_up_accounts_without_end(guarded):
    white = 'globalWhiteRemoteAddresses = ["127.0.0.1"]\n'
    guarded.allow(white, listed(MAKER, MAKES), listed(ADMIN, "admin = true"))
    names = [f"made-up-{number}" for number in range(20)]

    for name in names:
        producer = await guarded.producer(account(name, "whatever"), CONTAINER)
        await ask(producer, CONTAINER)
        await producer.close()
    await until(lambda: not guarded.broker.parts.producers.is_online("makers"))

    access = guarded.broker.parts.access
    assert access._identities.former(CONTAINER) == {TRUSTED}
    assert asked_by(guarded) == TRUSTED


def always(_account: str, _client_id: str) -> bool:
    return True


def numbered(number: int, wait: str = "0") -> str:
    return f"CORRELATION_ID\x01{number}\x02REPLY_TO_CLIENT\x01c\x02TTL\x01{wait}\x02"


def test_an_account_displaces_only_its_own_requests_and_takes_over_nobodys():
    requesters = Requesters(lambda: 0.0)

    requesters.note("first", numbered(0), always)
    for number in range(MOST_OF_ONE + 1):
        requesters.note("second", numbered(number), always)

    assert requesters.account_of(numbered(0)) == "first"
    assert requesters.account_of(numbered(1)) == "second"
    requesters.note("second", numbered(MOST_OF_ONE + 1), always)
    assert requesters.account_of(numbered(1)) is None
    assert requesters.account_of(numbered(2)) == "second"


@pytest.mark.parametrize(
    ("wait", "lasts"),
    [
        ("3000", 3.0),
        ("0", 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("\u0663", 0.0),
        ("-5", 0.0),
        ("9" * 15, LONGEST_WAIT),
        ("9" * 5000, 0.0),
    ],
)
def test_a_request_is_remembered_until_its_asker_waits_no_more_and_a_while_longer(wait, lasts):
    now = [100.0]
    requesters = Requesters(lambda: now[0])
    requesters.note("first", numbered(1, wait), always)

    now[0] += lasts + REMEMBERED - 0.5
    before = requesters.account_of(numbered(1))
    now[0] += 1.0
    after = requesters.account_of(numbered(1))
    requesters.note("second", numbered(1), always)

    assert (before, after) == ("first", None)
    assert requesters.account_of(numbered(1)) == "second"


def test_what_an_account_asked_long_ago_takes_no_room():
    now = [0.0]
    requesters = Requesters(lambda: now[0])
    for number in range(10):
        requesters.note("first", numbered(number), always)

    now[0] += REMEMBERED + 1
    requesters.note("first", numbered(10), always)

    assert [len(own) for own in requesters._of.values()] == [len(requesters._accounts)] == [1]


async def test_a_question_to_one_of_two_with_one_client_id_goes_to_the_account_that_asks(guarded):
    _, told_taker = await guarded.consumer(TAKER, CONTAINER)
    guarded.broker.clock.advance(SILENCE + 1)
    _, told_rival = await guarded.consumer(RIVAL, CONTAINER)
    header = GetConsumerRunningInfoRequest(consumer_group=GROUP, client_id=CONTAINER)

    for who in (TAKER, RIVAL, ADMIN):
        asking = await guarded.client(who)
        answer = await asking.connection.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        assert answer.code == 0, answer.remark

    asked = int(RequestCode.GET_CONSUMER_RUNNING_INFO)
    # The admin has none of his own there: the one that was heard of last is asked.
    counts = [[each.code for each in told].count(asked) for told in (told_taker, told_rival)]
    assert counts == [1, 2]


async def test_the_locks_of_a_client_are_not_given_back_by_another_account(guarded):
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


# Pulls that wait.


async def held_pull(guarded: Guarded, client: RawClient) -> asyncio.Task[Command]:
    parts = guarded.broker.parts
    parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    before = len(parts.held)
    waiting = asyncio.ensure_future(client.pull("orders", hold=100.0))
    await until(lambda: len(parts.held) == before + 1)
    return waiting


@pytest.mark.parametrize("rights", [None, "", 'topicPerms = ["orders=PUB"]'])
async def test_who_loses_a_right_while_it_waits_is_told_so_and_others_go_on_waiting(
    guarded, rights
):
    waiting = await held_pull(guarded, await guarded.client(TAKER))
    other = await held_pull(guarded, await guarded.client(RIVAL))
    maker = await guarded.client(MAKER)

    left = [] if rights is None else [listed(TAKER, rights)]
    guarded.allow(listed(MAKER, MAKES), listed(RIVAL, TAKES), *left)
    answer = await asyncio.wait_for(waiting, 10)
    was_woken = other.done()
    await maker.stored("orders", b"secret")

    assert answer.code == DENIED
    assert bodies_in(answer) == []
    assert not was_woken
    assert bodies_in(await asyncio.wait_for(other, 10)) == [b"secret"]
    assert sum(guarded.broker.parts.access.refused.values()) == 1


async def test_another_secret_ends_the_waiting_of_who_has_the_former_one(guarded):
    waiting = await held_pull(guarded, await guarded.client(TAKER))

    guarded.allow(listed(account("taker-key", "another-s3cr3t"), TAKES))

    assert (await asyncio.wait_for(waiting, 10)).code == DENIED


async def test_a_message_that_arrives_before_everybody_was_checked_again_is_not_given_out(guarded):
    """More wait than are looked at in passing: the last is checked when it is answered."""
    taker, maker = await guarded.client(TAKER), await guarded.client(MAKER)
    parts = guarded.broker.parts
    config = TopicConfig(topic_name="orders", read_queue_nums=200, write_queue_nums=200)
    parts.topics.ensure(config, now=0.0)
    waiting = [asyncio.ensure_future(taker.pull("orders", n, hold=100.0)) for n in range(200)]
    await until(lambda: len(parts.held) == 200)

    guarded.accounts.write_text(listed(MAKER, MAKES))
    # Nobody is told of the change: as if it had not come to the last one's turn yet.
    parts.access._on_change.clear()
    parts.access.refresh()
    await maker.stored("orders", b"secret", queue_id=199)
    answer = await asyncio.wait_for(waiting[199], 10)

    assert answer.code == DENIED
    assert bodies_in(answer) == []
    taker.connection.abort()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_pull_that_waits_for_its_turn_is_checked_again_then(guarded, monkeypatch):
    taker, maker = await guarded.client(TAKER), await guarded.client(MAKER)
    await maker.stored("orders", b"secret")
    pacing = guarded.broker.parts.pacing
    put_off: list[Callable[[], None]] = []
    monkeypatch.setattr(pacing, "must_wait", lambda _: True)
    monkeypatch.setattr(pacing, "later", lambda _, call: put_off.append(call))
    pulling = asyncio.ensure_future(taker.pull("orders"))
    await until(lambda: len(put_off) == 1)
    monkeypatch.undo()

    guarded.allow(listed(MAKER, MAKES))
    put_off[0]()

    assert (await asyncio.wait_for(pulling, 10)).code == DENIED


# Members of groups.


async def test_a_member_without_rights_by_now_is_neither_told_nor_asked_anything(guarded):
    maker, admin = await guarded.client(MAKER), await guarded.client(ADMIN)
    place = await maker.stored("orders", b"secret")
    taker, told_taker = await guarded.consumer(TAKER, "taker@1")
    _, told_rival = await guarded.consumer(RIVAL, "rival@1")
    await until(lambda: len(told_taker) == 2)
    told_taker.clear()
    told_rival.clear()

    guarded.allow(listed(TAKER), listed(RIVAL, TAKES), listed(ADMIN, "admin = true"))
    await guarded.consumer(RIVAL, "rival@2")
    asked = [
        await admin.connection.request(
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            ConsumeDirectlyRequest(consumer_group=GROUP, client_id=who, msg_id=place.msg_id),
        )
        for who in ("taker@1", "rival@1")
    ]
    await taker.heartbeat("taker@1", producers=("any",))

    assert [answer.code for answer in asked] == [ResponseCode.SYSTEM_ERROR, ResponseCode.SUCCESS]
    assert "<taker@1> not online" in (asked[0].remark or "")
    assert told_taker == []
    assert [each.code for each in told_rival] == [40, RequestCode.CONSUME_MESSAGE_DIRECTLY]


async def test_members_of_a_group_may_ask_each_other_what_they_hold_and_others_may_not(guarded):
    await guarded.consumer(TAKER, "taker@1")
    rival, _ = await guarded.consumer(RIVAL, "rival@1")
    spy = await guarded.client(OTHER)
    header = GetConsumerRunningInfoRequest(consumer_group=GROUP, client_id="taker@1")

    answers = [
        await each.connection.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        for each in (rival, spy)
    ]

    assert [answer.code for answer in answers] == [0, DENIED]


async def test_who_comes_from_a_trusted_host_is_asked_without_an_account(tmp_path):
    file = tmp_path / "accounts.toml"
    file.write_text('globalWhiteRemoteAddresses = ["127.0.0.1"]\n')
    async with (
        hand_broker(tmp_path / "broker", access=AccessSettings(accounts=file)) as (broker, _),
        contextlib.AsyncExitStack() as stack,
    ):
        maker = await AskedProducer.join(broker.broker, "maker@1")
        stack.push_async_callback(maker.close)
        await send_half(maker, "orders", b"x", broker)

        check(Guarded(broker, file))

        assert await told(maker, "maker@1") == [b"x"]
