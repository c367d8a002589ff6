"""What clients may do at a broker that has accounts, the file of accounts, and its white lists."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.access import (
    NEEDS,
    Access,
    AccountsFile,
    AccountsUnreadable,
    Grant,
    Kind,
    Need,
    PatternError,
    parse_accounts,
    parse_patterns,
    read_accounts,
)
from orbitmq.broker.groups import Peer
from orbitmq.broker.settings import AccessSettings
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, Refused
from orbitmq.store.settings import FlushPolicy
from orbitmq.wire import headers
from orbitmq.wire.bodies import LockBatch, MessageQueue
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, sign
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
    listed,
    place_of,
    wanting,
)
from tests.support.broker import GROUP, SMALL_STORE, bodies_in, send_header, until
from tests.support.slowdisk import GatedFiles
from tests.support.store import with_policy

DENIED = int(ResponseCode.NO_PERMISSION)

MAKER = account("maker-key", "maker-s3cr3t")
TAKER = account("taker-key", "taker-s3cr3t")
NOBODY = account("nobody-key", "nobody-s3cr3t")
ADMIN = account("admin-key", "admin-s3cr3t")
IMPOSTOR = account("maker-key", "gu3ss-of-maker")
STRANGER = account("stranger-key", "maker-s3cr3t")

TAKES = f'topicPerms = ["orders=SUB"]\ngroupPerms = ["{GROUP}=SUB"]'
ACCOUNTS = (
    listed(MAKER, 'topicPerms = ["orders=PUB", "timed=PUB"]')
    + listed(TAKER, TAKES)
    + listed(NOBODY)
    + listed(ADMIN, "admin = true")
)


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
async def test_a_client_that_is_not_authenticated_can_do_nothing(guarded, open_client, prepare):
    topics = {config.topic_name for config in guarded.parts.topics}
    client = await open_client(guarded, prepare)

    answers = [
        await client.connection.request(code, send_header("orders"), body=b"{}", timeout=10)
        for code in NEEDS
    ]

    assert {answer.code for answer in answers} == {DENIED}
    assert {config.topic_name for config in guarded.parts.topics} == topics
    assert guarded.parts.store.statistics().log_end == 0


@pytest.mark.parametrize("version", [399, 401])
async def test_old_clients_do_not_sign_the_mark_of_unique_keys(guarded, open_client, version):
    def prepare(command):
        return sign(msgspec.structs.replace(command, version=version), TAKER)

    client = await open_client(guarded, prepare)
    header = headers.QueryMessageRequest(
        topic="orders", key="k", max_num=1, begin_timestamp=0, end_timestamp=1, is_unique_key=True
    )

    answer = await client.connection.request(RequestCode.QUERY_MESSAGE, header)

    assert answer.code == ResponseCode.QUERY_NOT_FOUND


# What an account is allowed.


async def test_a_consumer_may_consume_its_topics_with_its_group(guarded, open_client):
    maker = await open_client(guarded, signed_by(MAKER))
    taker = await open_client(guarded, signed_by(TAKER))
    stored = await maker.stored("orders", b"one")
    queue = MessageQueue(broker_name="broker-a", queue_id=0, topic="orders")
    lock = LockBatch(client_id="t", consumer_group=GROUP, mq_set=(queue,))
    back = headers.ConsumerSendBackRequest(offset=place_of(stored), group=GROUP, delay_level=-1)

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


# Ways around.


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
        header = headers.ViewMessageRequest(offset=offset, topic="orders")
        return await taker.connection.request(RequestCode.VIEW_MESSAGE_BY_ID, header)

    async def send_back(offset):
        header = headers.ConsumerSendBackRequest(offset=offset, group=GROUP, delay_level=1)
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


# White lists, changes of the file, no file.


@pytest.mark.parametrize(
    ("is_global", "key", "code"),
    [(True, None, 0), (True, "made-up", 0), (False, "admin-key", 0), (False, "maker-key", DENIED)],
    ids=["global", "global, with any key", "of the account", "of another account"],
)
async def test_a_host_in_a_white_list_needs_no_signature(
    start_broker, open_client, accounts, is_global, key, code
):
    if is_global:
        write(accounts, 'globalWhiteRemoteAddresses = ["127.0.*.*"]\n' + ACCOUNTS)
    else:
        # The admin is the last account.
        write(accounts, ACCOUNTS + 'whiteRemoteAddress = "127.0.0.1"\n')
    broker = await start_broker(access=AccessSettings(accounts=accounts))
    prepare = with_fields(AccessKey=key) if key else None
    first, second = await open_client(broker, prepare), await open_client(broker, prepare)

    answers = [
        await first.send("anything"),
        await first.heartbeat("c1", producers=("makers",)),
        # Hosts without accounts are not told apart.
        await second.heartbeat("c1", producers=("makers",)),
    ]

    assert [answer.code for answer in answers] == [code] * 3


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


async def test_a_broker_does_not_start_with_accounts_that_it_cannot_read(start_broker, accounts):
    write(accounts, "broken")
    with pytest.raises(AccountsUnreadable):
        await start_broker(access=AccessSettings(accounts=accounts))

    write(accounts, ACCOUNTS)
    broker = await start_broker(access=AccessSettings(accounts=accounts))

    assert broker.parts.access.is_on


# What is said about it.


async def test_a_transaction_is_ended_only_by_accounts_that_may_publish_also_before_it_is_flushed(
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
    stored = half.header(headers.SendMessageResponse)

    async def end(client, topic):
        header = headers.EndTransactionRequest(
            producer_group="makers",
            tran_state_table_offset=stored.queue_offset,
            commit_log_offset=place_of(stored),
            commit_or_rollback=8,
            msg_id="0A",
            topic=topic,
        )
        return (await client.connection.request(RequestCode.END_TRANSACTION, header)).code

    # What the request says of the topic does not matter.
    codes = [await end(maker, None), await end(maker, "orders"), await end(admin, None)]
    disk.gate.set()

    assert codes == [DENIED, DENIED, ResponseCode.SUCCESS]
    await until(lambda: broker.parts.store.max_offset("audit", 0) == 1)


@pytest.mark.parametrize(
    ("asked", "needs"), REQUESTS + LOOKING, ids=lambda value: getattr(value, "code", "")
)
def test_every_request_needs_exactly_these_permissions(asked, needs):
    assert set(NEEDS[asked.code](asked, LOG.get)) == needs


def test_the_needs_of_every_request_are_known():
    assert {request.code for request, _ in REQUESTS + LOOKING} == NEEDS.keys()


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


# The file of accounts.

FULL = """
globalWhiteRemoteAddresses = ["10.10.103.*", "192.168.0.{1,2}"]

[[accounts]]
accessKey = "RocketMQ"
secretKey = "12345678"
whiteRemoteAddress = "192.168.1.1-100"
admin = false
defaultTopicPerm = "DENY"
defaultGroupPerm = "SUB"
topicPerms = ["topicA=DENY", "topicB=PUB|SUB", "topicC=SUB", "topicD = SUB | PUB", "topicE=PUB"]
groupPerms = ["groupA=DENY", "groupB=PUB|SUB"]

[[accounts]]
accessKey = "rocketmq2"
secretKey = "87654321"
admin = true
"""

ACCOUNT = '[[accounts]]\naccessKey = "someone"\nsecretKey = "s3cr3t-word"\n'


# The file.


@pytest.mark.parametrize(
    ("kind", "name", "may_publish", "may_subscribe"),
    [
        (Kind.TOPIC, "topicA", False, False),
        (Kind.TOPIC, "topicB", True, True),
        (Kind.TOPIC, "topicC", False, True),
        (Kind.TOPIC, "topicD", True, True),
        (Kind.TOPIC, "topicE", True, False),
        (Kind.TOPIC, "other", False, False),
        (Kind.GROUP, "groupA", False, False),
        (Kind.GROUP, "groupB", True, True),
        (Kind.GROUP, "other", False, True),
        # A topic's permission is not that of a group of the same name.
        (Kind.GROUP, "topicE", False, True),
    ],
)
def test_what_is_listed_comes_before_the_default(kind, name, may_publish, may_subscribe):
    account = parse_accounts(FULL).by_key["RocketMQ"]

    assert account.may(kind, name, Grant.PUB) is may_publish
    assert account.may(kind, name, Grant.SUB) is may_subscribe


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "rmq_sys_wheel_timer",
    ],
)
def test_defaults_do_not_open_topics_that_hold_messages_of_others(topic):
    text = ACCOUNT + 'defaultTopicPerm = "PUB|SUB"\n'

    by_default = parse_accounts(text).by_key["someone"]
    by_name = parse_accounts(text + f'topicPerms = ["{topic}=SUB"]').by_key["someone"]

    assert by_default.may(Kind.TOPIC, "anything", Grant.SUB)
    assert not by_default.may(Kind.TOPIC, topic, Grant.SUB)
    assert by_name.may(Kind.TOPIC, topic, Grant.SUB)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("accounts = 5", "accounts"),
        ("[[accounts]]\naccessKey = 'someone'", "secretKey"),
        ("[[accounts]]\nsecretKey = 's3cr3t-word'", "accessKey"),
        ("[[accounts]]\naccessKey = 'six666'\nsecretKey = 's3cr3t-word'", "accessKey"),
        ("[[accounts]]\naccessKey = 'someone'\nsecretKey = 's3cr3t'", "someone"),
        (ACCOUNT + ACCOUNT, "someone"),
        (ACCOUNT + "adnim = true", "adnim"),
        (ACCOUNT + "admin = 'yes'", "admin"),
        (ACCOUNT + "defaultTopicPerm = 'ALL'", "defaultTopicPerm"),
        (ACCOUNT + "topicPerms = ['orders']", "topicPerms"),
        (ACCOUNT + "topicPerms = ['=SUB']", "topicPerms"),
        (ACCOUNT + "groupPerms = ['billing=SBU']", "SBU"),
        (ACCOUNT + "whiteRemoteAddress = '300.1.1.1'", "300.1.1.1"),
        ("globalWhiteRemoteAddresses = ['nonsense']", "nonsense"),
        (ACCOUNT + "not TOML", "TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_a_text_that_names_the_mistake_and_no_secret(
    tmp_path, text, named
):
    file = tmp_path / "accounts.toml"
    file.write_text(text)

    with pytest.raises(AccountsUnreadable) as caught:
        read_accounts(file)

    assert named in str(caught.value)
    assert str(file) in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_secret_is_not_part_of_what_an_account_shows():
    assert "s3cr3t" not in repr(parse_accounts(ACCOUNT))


# Changes of the file.


def rewritten(path: Path, text: str) -> None:
    """Replace a file so that the change can be seen, however coarse the disk's times are."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


def test_a_broken_or_missing_file_keeps_the_accounts_and_is_logged_once(tmp_path, caplog):
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNT)
    file = AccountsFile(path)

    with caplog.at_level(logging.ERROR):
        rewritten(path, ACCOUNT + "broken")
        broken = [file.refresh() for _ in range(3)]
        path.unlink()
        missing = [file.refresh() for _ in range(3)]

    assert broken == missing == [False] * 3
    assert set(file.accounts.by_key) == {"someone"}
    assert len(caplog.records) == 2
    assert "stay in force" in caplog.text
    assert "s3cr3t" not in caplog.text


# Hosts.


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["1.2.3.4", "::1"], ["not an address", ""]),
        ("*.*.*.*", ["1.2.3.4"], ["::1"]),
        ("192.168.0.1", ["192.168.0.1", "::ffff:192.168.0.1"], ["192.168.0.10", "192.168.0.2"]),
        ("192.168.*.*", ["192.168.0.1", "192.168.255.255"], ["192.169.0.1", "19.168.0.1"]),
        ("192.168.1-20.*", ["192.168.1.9", "192.168.20.9"], ["192.168.0.9", "192.168.21.9"]),
        ("192.168.0.{7,9}", ["192.168.0.7", "192.168.0.9"], ["192.168.0.8", "192.168.0.79"]),
        ("10.0.0.1, 10.0.0.{3,4},10.1.*.*", ["10.0.0.1", "10.0.0.4", "10.1.2.3"], ["10.0.0.2"]),
        ("::1", ["::1", "0:0:0:0:0:0:0:1"], ["::2", "0.0.0.1"]),
        ("2001:db8::1-ff", ["2001:db8::1", "2001:db8::ff"], ["2001:db8::100", "2001:db8:1::1"]),
        ("2001:db8:1:2:3:4:1-200:*", ["2001:db8:1:2:3:4:200:9"], ["2001:db8:1:2:3:4:201:9"]),
        ("fe80::*", ["fe80::7", "fe80::7%eth0"], ["fe80::1:7"]),
        ("", [], ["127.0.0.1", "::1", ""]),
    ],
)
def test_a_pattern_means_these_hosts_and_no_others(pattern, inside, outside):
    hosts = parse_patterns(pattern)

    assert [host for host in inside if host not in hosts] == []
    assert [host for host in outside if host in hosts] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "localhost",
        "1.2.3",
        "1.2.3.4.5",
        "1.2.3.256",
        "1.2.3.-1",
        "1.2.3.9-3",
        "1.2.3.+4",
        "1.2.3.1_0",
        "1.2.3.٣",
        "1.2.{3,4}.5",
        "1.2.3.{}",
        "1.2.3.{1,}",
        "1:2:3",
        "::1::2",
        "1:2:3:4:5:6:7::8",
        "::10000",
        "::g",
    ],
)
def test_a_pattern_that_means_nothing_is_refused(pattern):
    with pytest.raises(PatternError, match=r"192\.168\.0\.1"):
        parse_patterns(pattern)


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text):
    try:
        hosts = parse_patterns(text)
    except PatternError:
        return

    assert "not an address" not in hosts
