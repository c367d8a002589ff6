"""What clients may do at a broker that has accounts: nothing but what they are allowed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.access import NEEDS, Access, AccountsUnreadable, Grant, Kind, Need, Reason
from orbitmq.broker.groups import Peer
from orbitmq.broker.settings import AccessSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, Refused
from orbitmq.store.settings import FlushPolicy
from orbitmq.wire.bodies import LockBatch, MessageQueue
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, sign
from orbitmq.wire.headers import (
    ConsumerSendBackRequest,
    CreateTopicRequest,
    EndTransactionRequest,
    GetRouteInfoRequest,
    QueryMessageRequest,
    SendMessageResponse,
    ViewMessageRequest,
)
from orbitmq.wire.javajson import encode_body
from tests.support.access import (
    LOG,
    LOOKING,
    PUB_T,
    REQUESTS,
    SUB_G,
    SUB_H,
    SUB_T,
    SUB_U,
    account,
    place_of,
    wanting,
)
from tests.support.broker import GROUP, SMALL_STORE, RawClient, bodies_in, send_header, until
from tests.support.slowdisk import GatedFiles
from tests.support.store import with_policy

DENIED = int(ResponseCode.NO_PERMISSION)

MAKER = account("maker-key", "maker-s3cr3t")
TAKER = account("taker-key", "taker-s3cr3t")
NOBODY = account("nobody-key", "nobody-s3cr3t")
ADMIN = account("admin-key", "admin-s3cr3t")
IMPOSTOR = account("maker-key", "gu3ss-of-maker")
STRANGER = account("stranger-key", "maker-s3cr3t")

ACCOUNTS = f"""
[[accounts]]
accessKey = "{MAKER.access_key}"
secretKey = "{MAKER.secret_key}"
topicPerms = ["orders=PUB", "timed=PUB"]

[[accounts]]
accessKey = "{TAKER.access_key}"
secretKey = "{TAKER.secret_key}"
topicPerms = ["orders=SUB"]
groupPerms = ["{GROUP}=SUB"]

[[accounts]]
accessKey = "{NOBODY.access_key}"
secretKey = "{NOBODY.secret_key}"

[[accounts]]
accessKey = "{ADMIN.access_key}"
secretKey = "{ADMIN.secret_key}"
admin = true
"""


def write(file: Path, text: str) -> None:
    """Replace a file, so that its readers see all of a text or nothing."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


@pytest.fixture
def accounts(tmp_path):
    file = tmp_path / "accounts.toml"
    file.write_text(ACCOUNTS)
    return file


@pytest.fixture
async def guarded(start_broker, accounts):
    """A broker that asks for credentials."""
    return await start_broker(access=AccessSettings(accounts=accounts))


def signed_by(credentials: Credentials) -> Callable[[Command], Command]:
    return lambda command: sign(command, credentials)


def with_fields(**fields: str) -> Callable[[Command], Command]:
    return lambda command: command.with_fields({**command.ext_fields, **fields})


def tampered(change: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Signs as it should be, and changes the request afterwards."""
    return lambda command: change(sign(command, ADMIN))


async def everything_refused(client: RawClient, codes: Iterable[int]) -> list[int]:
    """The codes that are answered with anything but a refusal."""
    header = send_header("orders")
    answered = []
    for code in codes:
        answer = await client.connection.request(code, header, body=b"{}", timeout=10)
        if answer.code != DENIED:
            answered.append(code)
    return answered


# Who sent it.


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(None, id="no credentials"),
        pytest.param(with_fields(AccessKey="", Signature=""), id="empty ones, as C++ sends"),
        pytest.param(with_fields(AccessKey="admin-key"), id="no signature"),
        pytest.param(with_fields(AccessKey="admin-key", Signature="é"), id="a strange signature"),
        pytest.param(signed_by(IMPOSTOR), id="a wrong secret"),
        pytest.param(signed_by(STRANGER), id="an unknown key"),
        pytest.param(tampered(with_fields(extra="x")), id="a field added after signing"),
        pytest.param(
            tampered(lambda command: msgspec.structs.replace(command, body=b"{} ")),
            id="a body changed after signing",
        ),
    ],
)
async def test_who_is_not_authenticated_can_do_nothing_at_all(guarded, open_client, prepare):
    topics = {config.topic_name for config in guarded.parts.topics}
    client = await open_client(guarded, prepare)

    answered = await everything_refused(client, RequestCode)

    assert answered == []
    assert {config.topic_name for config in guarded.parts.topics} == topics
    assert guarded.parts.store.statistics().log_end == 0


async def test_a_request_without_any_field_is_refused_too(guarded, open_client):
    stranger = await open_client(guarded)

    answer = await stranger.connection.request(RequestCode.GET_ALL_TOPIC_CONFIG)

    assert answer.code == DENIED


async def test_a_one_way_send_without_credentials_stores_nothing(guarded, open_client):
    stranger = await open_client(guarded)

    stranger.connection.notify(RequestCode.SEND_MESSAGE_V2, send_header("orders"), body=b"x")
    await stranger.send("orders")

    assert guarded.parts.store.statistics().log_end == 0
    assert guarded.parts.access.refused[Reason.NO_CREDENTIALS] == 2


async def test_unknown_keys_and_wrong_signatures_are_answered_alike(guarded, open_client):
    impostor = await open_client(guarded, signed_by(IMPOSTOR))
    stranger = await open_client(guarded, signed_by(STRANGER))

    remarks = [(await client.send("orders")).remark or "" for client in (impostor, stranger)]

    assert remarks[0].replace("maker-key", "KEY") == remarks[1].replace("stranger-key", "KEY")
    assert guarded.parts.access.refused[Reason.WRONG_SIGNATURE] == 1
    assert guarded.parts.access.refused[Reason.UNKNOWN_KEY] == 1


@pytest.mark.parametrize("version", [399, 401])
async def test_old_clients_do_not_sign_the_mark_of_unique_keys(guarded, open_client, version):
    def prepare(command):
        return sign(msgspec.structs.replace(command, version=version), TAKER)

    client = await open_client(guarded, prepare)
    header = QueryMessageRequest(
        topic="orders", key="k", max_num=1, begin_timestamp=0, end_timestamp=1, is_unique_key=True
    )

    answer = await client.connection.request(RequestCode.QUERY_MESSAGE, header)

    assert answer.code == ResponseCode.QUERY_NOT_FOUND


# What an account is allowed.


async def test_an_account_without_permissions_can_do_nothing_at_all(guarded, open_client):
    client = await open_client(guarded, signed_by(NOBODY))
    requests = {request.code for request, _ in REQUESTS}

    answered = await everything_refused(client, [code for code in RequestCode if code not in NEEDS])
    for request, _ in REQUESTS:
        answer = await client.connection.request(
            request.code, body=request.body, extra=dict(request.ext_fields), timeout=10
        )
        if answer.code != DENIED:
            answered.append(request.code)

    assert answered == []
    assert requests == NEEDS.keys() - {RequestCode.VIEW_MESSAGE_BY_ID}
    assert guarded.parts.store.statistics().log_end == 0
    assert GROUP not in guarded.parts.groups


async def test_a_producer_may_send_to_its_topics_and_not_read_them(guarded, open_client):
    maker = await open_client(guarded, signed_by(MAKER))

    sent = [await maker.send("orders", code=code, properties="") for code in (10, 310)]
    elsewhere = await maker.send("audit")
    pulled = await maker.pull("orders")
    beat = await maker.heartbeat("m", producers=("makers",))

    assert [answer.code for answer in sent] == [0, 0]
    assert beat.code == 0
    assert elsewhere.code == pulled.code == DENIED
    assert "PUB" in (elsewhere.remark or "")
    assert "'audit'" in (elsewhere.remark or "")
    assert "audit" not in guarded.parts.topics


async def test_a_consumer_may_consume_its_topics_with_its_group(guarded, open_client):
    maker = await open_client(guarded, signed_by(MAKER))
    taker = await open_client(guarded, signed_by(TAKER))
    stored = await maker.stored("orders", b"one")
    queue = MessageQueue(broker_name="broker-a", queue_id=0, topic="orders")
    lock = LockBatch(client_id="t", consumer_group=GROUP, mq_set=(queue,))
    back = ConsumerSendBackRequest(offset=place_of(stored), group=GROUP, delay_level=-1)

    beat = await taker.heartbeat("t", wanting("orders"), wanting(f"%RETRY%{GROUP}"))
    pulled = await taker.pull("orders")
    reported = await taker.report("orders", 1)
    asked = await taker.query("orders")
    locked = await taker.connection.request(RequestCode.LOCK_BATCH_MQ, body=encode_body(lock))
    sent_back = await taker.connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, back)
    retried = await taker.pull(f"%RETRY%{GROUP}")

    assert bodies_in(pulled) == [b"one"]
    assert [answer.code for answer in (beat, reported, asked, locked, sent_back)] == [0] * 5
    assert retried.code != DENIED


@pytest.mark.parametrize("group", ["other", GROUP])
async def test_a_consumer_may_not_use_another_group_or_topic(guarded, open_client, group):
    admin = await open_client(guarded, signed_by(ADMIN))
    taker = await open_client(guarded, signed_by(TAKER))
    await admin.stored("audit", b"secret")
    topic = "audit" if group == GROUP else "orders"

    answers = [
        await taker.heartbeat("t", wanting(topic), group=group),
        await taker.pull(topic, consumer_group=group),
        await taker.pull(topic, consumer_group=group, code=RequestCode.LITE_PULL_MESSAGE),
        await taker.report(topic, 1, consumer_group=group),
        await taker.query(topic, consumer_group=group),
    ]

    assert [answer.code for answer in answers] == [DENIED] * 5
    assert guarded.parts.consumers.groups() == ()
    assert guarded.parts.progress.topics_of(group) == frozenset()


async def test_only_an_admin_may_administer(guarded, open_client):
    admin = await open_client(guarded, signed_by(ADMIN))
    maker = await open_client(guarded, signed_by(MAKER))
    header = CreateTopicRequest(
        topic="fresh",
        default_topic="TBW102",
        read_queue_nums=1,
        write_queue_nums=1,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )

    refused = await maker.connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
    was_made_by_maker = "fresh" in guarded.parts.topics
    made = await admin.connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    assert (refused.code, was_made_by_maker) == (DENIED, False)
    assert "admin" in (refused.remark or "")
    assert made.code == 0
    assert "fresh" in guarded.parts.topics


# Ways around.


async def test_the_retry_topic_of_another_group_is_out_of_reach(guarded, open_client):
    taker = await open_client(guarded, signed_by(TAKER))

    pulled = await taker.pull("%RETRY%other")
    own_group_claimed = await taker.send("%RETRY%other", producer_group=GROUP)
    own = await taker.send(f"%RETRY%{GROUP}")

    assert pulled.code == own_group_claimed.code == DENIED
    assert "'other'" in (own_group_claimed.remark or "")
    assert own.code == 0


async def test_messages_of_others_cannot_be_had_by_their_place_in_the_log(guarded, open_client):
    admin = await open_client(guarded, signed_by(ADMIN))
    taker = await open_client(guarded, signed_by(TAKER))
    foreign = place_of(await admin.stored("audit", b"secret"))
    delayed = place_of(await admin.stored("audit", b"secret", properties={"DELAY": "3"}))
    # As a message looks that was delayed once, or whose sender made that up.
    marked = place_of(await admin.stored("audit", b"secret", properties={"REAL_TOPIC": "orders"}))
    own = place_of(await admin.stored("orders", b"mine"))
    own_delayed = place_of(await admin.stored("orders", b"mine", properties={"DELAY": "3"}))
    end = guarded.parts.store.statistics().log_end

    async def view(offset):
        # What the request says of the topic does not matter.
        header = ViewMessageRequest(offset=offset, topic="orders")
        return await taker.connection.request(RequestCode.VIEW_MESSAGE_BY_ID, header)

    async def send_back(offset):
        header = ConsumerSendBackRequest(offset=offset, group=GROUP, delay_level=1)
        return await taker.connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)

    answers = [await view(offset) for offset in (foreign, delayed, marked)]
    answers += [await send_back(offset) for offset in (foreign, delayed, marked)]

    assert [answer.code for answer in answers] == [DENIED] * 6
    assert all(b"secret" not in answer.body for answer in answers)
    assert guarded.parts.store.statistics().log_end == end
    assert (await view(own)).code == 0
    assert (await view(own_delayed)).code == 0
    assert (await send_back(own)).code == 0


async def test_a_forged_destination_of_a_delayed_message_is_not_followed(guarded, open_client):
    maker = await open_client(guarded, signed_by(MAKER))
    forged = {"DELAY": "1", "REAL_TOPIC": "audit", "REAL_QID": "0"}

    answer = await maker.send("orders", b"late", properties=forged)
    await until(lambda: guarded.parts.store.max_offset("orders", 0) == 1)

    assert answer.code == 0
    assert guarded.parts.store.max_offset("audit", 0) == 0


async def test_a_transaction_can_only_be_ended_by_who_may_send_to_its_topic(guarded, open_client):
    admin = await open_client(guarded, signed_by(ADMIN))
    maker = await open_client(guarded, signed_by(MAKER))
    marks = {"TRAN_MSG": "true", "PGROUP": "makers", "UNIQ_KEY": "0A"}
    half = await admin.send("audit", b"half", properties=marks, sys_flag=4)
    stored = half.header(SendMessageResponse)

    def end(topic):
        return EndTransactionRequest(
            producer_group="makers",
            tran_state_table_offset=stored.queue_offset,
            commit_log_offset=place_of(stored),
            commit_or_rollback=8,
            msg_id="0A",
            topic=topic,
        )

    code = RequestCode.END_TRANSACTION
    answers = [await maker.connection.request(code, end(topic)) for topic in (None, "orders")]
    visible_before = guarded.parts.store.max_offset("audit", 0)
    allowed = await admin.connection.request(code, end(None))

    assert [answer.code for answer in answers] == [DENIED] * 2
    assert visible_before == 0
    assert allowed.code == 0
    assert guarded.parts.store.max_offset("audit", 0) == 1


# White lists, changes of the file, no file.


async def test_hosts_in_the_global_white_list_need_no_account(start_broker, open_client, accounts):
    write(accounts, 'globalWhiteRemoteAddresses = ["127.0.*.*"]\n' + ACCOUNTS)
    broker = await start_broker(access=AccessSettings(accounts=accounts))
    client = await open_client(broker)

    assert (await client.send("anything")).code == 0


async def test_hosts_in_an_accounts_white_list_need_no_signature(
    start_broker, open_client, accounts
):
    host = 'admin = true\nwhiteRemoteAddress = "127.0.0.1"'
    write(accounts, ACCOUNTS.replace("admin = true", host))
    broker = await start_broker(access=AccessSettings(accounts=accounts))
    known = await open_client(broker, with_fields(AccessKey="admin-key"))
    other = await open_client(broker, with_fields(AccessKey="maker-key"))

    assert (await known.send("anything")).code == 0
    assert (await other.send("orders")).code == DENIED


async def test_without_accounts_everybody_may_do_everything(broker, open_client):
    for prepare in (None, signed_by(STRANGER), with_fields(AccessKey="", Signature="")):
        client = await open_client(broker, prepare)

        answers = [
            await client.send("orders"),
            await client.pull("orders"),
            await client.connection.request(RequestCode.GET_BROKER_CONFIG),
        ]

        assert [answer.code for answer in answers] == [0, 0, 0]


async def test_a_changed_file_is_in_force_without_a_restart(start_broker, open_client, accounts):
    broker = await start_broker(access=AccessSettings(accounts=accounts, check_interval=0.01))
    maker = await open_client(broker, signed_by(MAKER))
    stranger = await open_client(broker, signed_by(STRANGER))
    before = ((await maker.send("orders")).code, (await stranger.send("orders")).code)

    text = ACCOUNTS.replace(MAKER.access_key, STRANGER.access_key)
    write(accounts, text)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        codes.append((await stranger.send("orders")).code)
        assert len(codes) < 1000

    assert before == (0, DENIED)
    assert (await maker.send("orders")).code == DENIED


async def test_a_broken_file_leaves_the_accounts_as_they_were(guarded, open_client, accounts):
    maker = await open_client(guarded, signed_by(MAKER))
    write(accounts, "[[accounts]]\n")

    guarded.parts.access.refresh()

    assert (await maker.send("orders")).code == 0
    assert (await maker.send("audit")).code == DENIED


async def test_a_broker_does_not_start_with_accounts_that_it_cannot_read(start_broker, accounts):
    write(accounts, "broken")
    with pytest.raises(AccountsUnreadable):
        await start_broker(access=AccessSettings(accounts=accounts))

    write(accounts, ACCOUNTS)
    broker = await start_broker(access=AccessSettings(accounts=accounts))

    assert broker.parts.access.is_on


async def test_the_name_server_neither_asks_for_credentials_nor_minds_them(
    start_broker, name_server, accounts
):
    broker = await start_broker(
        access=AccessSettings(accounts=accounts), name_servers=(str(name_server.address),)
    )
    await until(lambda: broker.parts.registration.is_registered)

    for prepare in (None, signed_by(STRANGER)):
        connection = await connect(name_server.address, prepare=prepare)
        header = GetRouteInfoRequest(topic="TBW102")
        answer = await connection.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        connection.close()
        await connection.wait_closed()

        assert answer.code == 0


# What is said about it.


async def test_refusals_are_counted_always_and_logged_once_for_each_cause(
    guarded, open_client, caplog
):
    maker = await open_client(guarded, signed_by(MAKER))
    stranger = await open_client(guarded)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker.access"):
        for _ in range(5):
            await maker.send("audit")
            await maker.pull("orders")
            await stranger.send("orders")

    refused = guarded.parts.access.refused
    assert refused[Reason.NOT_PERMITTED] == 10
    assert refused[Reason.NO_CREDENTIALS] == 5
    assert len(caplog.records) == 3
    assert {record.__dict__["client"] for record in caplog.records} == {"127.0.0.1"}


async def test_made_up_keys_do_not_fill_the_log(guarded, open_client, caplog):
    numbers = iter(range(100))

    def prepare(command):
        key = f"made-up-{next(numbers)}"
        return sign(command, account(key, "whatever"))

    client = await open_client(guarded, prepare)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker.access"):
        for _ in range(20):
            await client.send("orders")

    assert len(caplog.records) == 1
    assert guarded.parts.access.refused[Reason.UNKNOWN_KEY] == 20


async def test_secrets_and_signatures_appear_in_no_log_and_no_answer(guarded, open_client, caplog):
    answers: list[Command] = []
    signatures: list[str] = []

    def noting(credentials):
        def prepare(command):
            signed = sign(command, credentials)
            signatures.append(signed.ext_fields["Signature"])
            return signed

        return prepare

    with caplog.at_level(logging.DEBUG):
        for credentials in (MAKER, TAKER, NOBODY, ADMIN, IMPOSTOR, STRANGER):
            client = await open_client(guarded, noting(credentials))
            answers.append(await client.send("orders"))
            answers.append(await client.pull("orders"))
            for code in (RequestCode.GET_BROKER_CONFIG, RequestCode.GET_BROKER_RUNTIME_INFO):
                answers.append(await client.connection.request(code))

    logged = caplog.text + repr([record.__dict__ for record in caplog.records])
    said = "".join(f"{a.remark}{dict(a.ext_fields)}{bytes(a.body)!r}" for a in answers)
    assert DENIED in {answer.code for answer in answers}
    for secret in ("s3cr3t", IMPOSTOR.secret_key, *signatures):
        assert secret not in logged
        assert secret not in said


async def test_a_transaction_is_guarded_before_the_disk_has_its_message(
    start_broker, open_client, accounts
):
    disk = GatedFiles()
    broker = await start_broker(
        access=AccessSettings(accounts=accounts),
        store=with_policy(SMALL_STORE, FlushPolicy.SYNC),
        parts={"files": disk},
    )
    admin = await open_client(broker, signed_by(ADMIN))
    maker = await open_client(broker, signed_by(MAKER))
    marks = {"TRAN_MSG": "true", "PGROUP": "makers", "UNIQ_KEY": "0A", "WAIT": "false"}
    disk.gate.clear()
    half = await admin.send("audit", b"half", properties=marks, sys_flag=4)
    stored = half.header(SendMessageResponse)
    header = EndTransactionRequest(
        producer_group="makers",
        tran_state_table_offset=stored.queue_offset,
        commit_log_offset=place_of(stored),
        commit_or_rollback=8,
        msg_id="0A",
    )

    denied = await maker.connection.request(RequestCode.END_TRANSACTION, header)
    allowed = await admin.connection.request(RequestCode.END_TRANSACTION, header)
    disk.gate.set()

    assert (denied.code, allowed.code) == (DENIED, ResponseCode.SUCCESS)
    await until(lambda: broker.parts.store.max_offset("audit", 0) == 1)


@pytest.mark.parametrize(
    ("asked", "needs"), REQUESTS + LOOKING, ids=lambda value: getattr(value, "code", "")
)
def test_every_request_needs_exactly_these_permissions(asked, needs):
    assert set(NEEDS[asked.code](asked, LOG.get)) == needs


ALL_NEEDS = [PUB_T, SUB_T, SUB_U, SUB_G, SUB_H]


@given(
    case=st.sampled_from([case for case in REQUESTS if case[0].code not in (36, 37)]),
    granted=st.sets(st.sampled_from(ALL_NEEDS)),
)
def test_a_signed_request_passes_if_and_only_if_all_its_needs_are_granted(
    tmp_path_factory, case, granted
):
    asked, needs = case
    access = access_with(tmp_path_factory.mktemp("accounts"), granted)
    connection = cast(Connection, OneEnd())

    def passes(command):
        try:
            access.check(connection, command)
        except Refused as refused:
            return refused.code != DENIED
        return True

    assert passes(sign(asked, TAKER)) is (needs <= granted)
    assert not passes(asked)


class OneEnd:
    """As much of a connection as access needs."""

    def __init__(self) -> None:
        self.remote = Address("10.0.0.1", 4711)
        self.context = Peer(str(self.remote), b"")
        self.is_open = True


def access_with(folder: Path, granted: set[Need]) -> Access:
    def listed(kind: Kind) -> list[str]:
        grants: dict[str, Grant] = {}
        for need in granted:
            if need.kind is kind:
                grants[need.name] = grants.get(need.name, Grant.DENY) | need.grant
        return [f"{name}={grant.words}" for name, grant in grants.items()]

    file = folder / "accounts.toml"
    file.write_text(
        f'[[accounts]]\naccessKey = "{TAKER.access_key}"\nsecretKey = "{TAKER.secret_key}"\n'
        f"topicPerms = {listed(Kind.TOPIC)}\ngroupPerms = {listed(Kind.GROUP)}\n"
    )
    store: Any = None  # none of the requests looks into the log
    return Access(file, store)
