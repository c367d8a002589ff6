"""Who may make which request: a table of every code that a broker or a name server answers.

A code that is added without a line here fails a test, so that nobody forgets to say who may use it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from orbitmq.broker.access import NEEDS
from orbitmq.broker.broker import Broker
from orbitmq.broker.handlers.membership import handlers_of
from orbitmq.broker.settings import AccessSettings
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command, Credentials, sign
from tests.support.access import account, listed
from tests.support.broker import RawClient
from tests.support.mutations import ODD_TEXTS
from tests.support.wire import HEADERS

DENIED = int(ResponseCode.NO_PERMISSION)


class Right(enum.Enum):
    """What an account needs for a request."""

    PUBLISH = "PUB on the topic"
    CONSUME = "SUB on the group, the topic or both"
    OWN = "nothing more than to be an account: it concerns the client itself"
    ADMIN = "admin = true"


#: Every request that a broker answers. Heartbeats also need SUB on what they name.
BROKER: Mapping[Code, Right] = {
    Code[word]: right
    for right, words in {
        Right.PUBLISH: """
        SEND_MESSAGE SEND_MESSAGE_V2 SEND_BATCH_MESSAGE SEND_REPLY_MESSAGE SEND_REPLY_MESSAGE_V2
        RECALL_MESSAGE END_TRANSACTION
        """,
        Right.CONSUME: """
        PULL_MESSAGE LITE_PULL_MESSAGE QUERY_MESSAGE VIEW_MESSAGE_BY_ID QUERY_CONSUMER_OFFSET
        UPDATE_CONSUMER_OFFSET SEARCH_OFFSET_BY_TIMESTAMP GET_MAX_OFFSET GET_MIN_OFFSET
        GET_EARLIEST_MSG_STORETIME CONSUMER_SEND_MSG_BACK GET_CONSUMER_LIST_BY_GROUP
        GET_CONSUMER_RUNNING_INFO LOCK_BATCH_MQ UNLOCK_BATCH_MQ CHECK_CLIENT_CONFIG
        QUERY_ASSIGNMENT
        """,
        Right.OWN: """
        HEART_BEAT UNREGISTER_CLIENT
        """,
        Right.ADMIN: """
        UPDATE_AND_CREATE_TOPIC UPDATE_AND_CREATE_TOPIC_LIST GET_ALL_TOPIC_CONFIG
        UPDATE_BROKER_CONFIG GET_BROKER_CONFIG GET_BROKER_RUNTIME_INFO GET_ALL_CONSUMER_OFFSET
        GET_ALL_DELAY_OFFSET GET_TIMER_CHECK_POINT GET_TIMER_METRICS
        UPDATE_AND_CREATE_SUBSCRIPTIONGROUP GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        GET_TOPIC_STATS_INFO GET_CONSUMER_CONNECTION_LIST GET_PRODUCER_CONNECTION_LIST
        DELETE_SUBSCRIPTIONGROUP GET_CONSUME_STATS DELETE_TOPIC_IN_BROKER
        INVOKE_BROKER_TO_RESET_OFFSET INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST QUERY_TOPIC_CONSUME_BY_WHO
        QUERY_CONSUME_TIME_SPAN GET_SYSTEM_TOPIC_LIST_FROM_BROKER CLEAN_EXPIRED_CONSUMEQUEUE
        QUERY_CORRECTION_OFFSET CONSUME_MESSAGE_DIRECTLY CLONE_GROUP_OFFSET
        VIEW_BROKER_STATS_DATA CLEAN_UNUSED_TOPIC GET_BROKER_CONSUME_STATS QUERY_CONSUME_QUEUE
        RESUME_CHECK_HALF_MESSAGE GET_ALL_PRODUCER_INFO DELETE_EXPIRED_COMMITLOG
        QUERY_TOPICS_BY_CONSUMER QUERY_SUBSCRIPTION_BY_CONSUMER GET_TOPIC_CONFIG
        GET_SUBSCRIPTIONGROUP_CONFIG UPDATE_AND_GET_GROUP_FORBIDDEN GET_ALL_MESSAGE_REQUEST_MODE
        GET_BROKER_HA_STATUS
        """,
    }.items()
    for word in words.split()
}

#: Every request that a name server answers, and whether it changes anything. Name servers know no
#: accounts, like Apache's: who reaches one may do all of this, so it belongs into a network of its
#: own.
NAME_SERVER: Mapping[Code, bool] = {
    Code[word]: changes
    for changes, words in {
        False: """
        GET_ROUTEINFO_BY_TOPIC QUERY_DATA_VERSION GET_BROKER_MEMBER_GROUP
        GET_BROKER_CLUSTER_INFO GET_ALL_TOPIC_LIST_FROM_NAMESERVER GET_TOPICS_BY_CLUSTER
        GET_SYSTEM_TOPIC_LIST_FROM_NS GET_UNIT_TOPIC_LIST GET_HAS_UNIT_SUB_TOPIC_LIST
        GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST GET_KV_CONFIG GET_KVLIST_BY_NAMESPACE
        GET_NAMESRV_CONFIG
        """,
        True: """
        REGISTER_BROKER UNREGISTER_BROKER BROKER_HEARTBEAT DELETE_TOPIC_IN_NAMESRV
        REGISTER_TOPIC_IN_NAMESRV WIPE_WRITE_PERM_OF_BROKER ADD_WRITE_PERM_OF_BROKER
        PUT_KV_CONFIG DELETE_KV_CONFIG UPDATE_NAMESRV_CONFIG
        """,
    }.items()
    for word in words.split()
}

#: May do everything with every topic and every group, and is no administrator.
ALMIGHTY = account("almighty-key", "almighty-s3cr3t")
#: An account that may do nothing.
NOBODY = account("nobody-key", "nobody-s3cr3t")
IMPOSTOR = account("almighty-key", "gu3ss")
STRANGER = account("stranger-key", "almighty-s3cr3t")
ADMIN = account("admin-key", "admin-s3cr3t")

ACCOUNTS = (
    listed(ALMIGHTY, 'defaultTopicPerm = "PUB|SUB"\ndefaultGroupPerm = "SUB"')
    + listed(NOBODY)
    + listed(ADMIN, "admin = true")
)


#: The short names of a send, in which texts have to be valid.
SHORT = dict.fromkeys("defghjklm", "0") | {"a": "makers", "b": "orders", "c": "TBW102", "i": ""}


def all_fields() -> dict[str, str]:
    """Every field of every header: a text where one is expected, else a number."""
    return {
        field.encode_name: "orders" if "str" in str(field.type) else "1"
        for kind in HEADERS
        for field in msgspec.structs.fields(kind)
    } | SHORT


async def ask(client: RawClient, code: int, extra: Mapping[str, str], body: bytes) -> Command:
    return await client.connection.request(code, None, body=body, extra=extra, timeout=30)


def signed_by(credentials: Credentials | None) -> Callable[[Command], Command] | None:
    return None if credentials is None else lambda command: sign(command, credentials)


@pytest.fixture
async def broker(start_broker, tmp_path):
    """One that asks for credentials."""
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)
    return await start_broker(access=AccessSettings(accounts=accounts))


@pytest.fixture
async def name_server(tmp_path):
    settings = NameServerSettings(home=tmp_path, server=ServerSettings(port=0))
    server = NameServer(settings)
    await server.start()
    yield server
    await server.stop(grace=0)


def state_of(broker: Broker) -> object:
    """Whatever a request could have changed."""
    parts = broker.parts
    return (
        sorted(config.topic_name for config in parts.topics),
        parts.groups.revision,
        parts.progress.revision,
        parts.store.statistics().log_end,
        parts.settings,
        parts.consumers.groups(),
        parts.producers.groups(),
        len(parts.held),
    )


async def test_every_request_that_a_broker_answers_is_in_the_table(broker):
    assert {Code(code) for code in handlers_of(broker.parts)} == set(BROKER)
    # What is not in the table of permissions is refused to everybody but administrators.
    assert {code for code in BROKER if code not in NEEDS} == {
        code for code, right in BROKER.items() if right is Right.ADMIN
    }


@pytest.mark.parametrize(
    "credentials",
    [
        pytest.param(None, id="no credentials"),
        pytest.param(IMPOSTOR, id="a wrong secret"),
        pytest.param(STRANGER, id="an unknown key"),
        pytest.param(NOBODY, id="no permissions"),
    ],
)
async def test_a_client_without_rights_is_refused_every_request_and_changes_nothing(
    broker, open_client, credentials
):
    before = state_of(broker)
    client = await open_client(broker, signed_by(credentials))
    allowed = []

    for code, right in BROKER.items():
        answer = await ask(client, code, all_fields(), b"")
        if answer.code != DENIED and not (credentials is NOBODY and is_own(code, right)):
            allowed.append((code, answer.code, answer.remark))

    assert allowed == []
    assert state_of(broker) == before


def is_own(code: Code, right: Right) -> bool:
    """What concerns nobody but the client, or names a message that is not there."""
    nothing_there = {Code.VIEW_MESSAGE_BY_ID, Code.HEART_BEAT, Code.LOCK_BATCH_MQ}
    without_body = {Code.UNLOCK_BATCH_MQ, Code.CHECK_CLIENT_CONFIG, Code.QUERY_ASSIGNMENT}
    return right is Right.OWN or code in nothing_there or code in without_body


async def test_an_account_with_all_topics_and_groups_is_still_no_administrator(broker, open_client):
    before = state_of(broker)
    client = await open_client(broker, signed_by(ALMIGHTY))
    administrator = await open_client(broker, signed_by(ADMIN))
    allowed, refused = [], []

    for code, right in BROKER.items():
        if right is not Right.ADMIN:
            continue
        for body in (b"", b"{}"):
            answer = await ask(client, code, all_fields(), body)
            if answer.code != DENIED:
                allowed.append((code, answer.code, answer.remark))
    assert state_of(broker) == before
    for code in (Code.GET_ALL_TOPIC_CONFIG, Code.GET_BROKER_CONFIG, Code.GET_BROKER_RUNTIME_INFO):
        answer = await ask(administrator, code, {}, b"")
        if answer.code != ResponseCode.SUCCESS:
            refused.append(code)

    assert allowed == []
    assert refused == []


async def test_an_unknown_code_is_refused_before_anything_else(broker, open_client):
    client = await open_client(broker, signed_by(ALMIGHTY))

    answers = [await ask(client, code, {}, b"") for code in (0, 9, 9999, 2**31 - 1)]

    assert {answer.code for answer in answers} == {DENIED}


def test_every_request_that_a_name_server_answers_is_in_the_table(name_server):
    assert {Code(code) for code in name_server.service.handlers} == set(NAME_SERVER)


async def test_looking_changes_nothing_at_a_name_server_whatever_is_asked(
    name_server, open_client, tmp_path
):
    service = name_server.service
    before = (service.routes.clusters(), service.settings, names_in(tmp_path))
    client = await open_client(name_server)

    for code, changes in NAME_SERVER.items():
        if changes:
            continue
        for text in ("orders", *ODD_TEXTS[:12]):
            extra = dict.fromkeys(all_fields(), text)
            answer = await ask(client, code, extra, text.encode("utf-8", "surrogatepass"))
            assert answer.opaque

    assert (service.routes.clusters(), service.settings, names_in(tmp_path)) == before


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_no_request_moves_the_files_of_a_name_server(name_server, open_client, tmp_path):
    home = name_server.service.settings.home
    client = await open_client(name_server)

    for setting in ("configStorePath", "kvConfigPath", "rocketmqHome", "configBlackList"):
        answer = await ask(client, Code.UPDATE_NAMESRV_CONFIG, {}, f"{setting}=/elsewhere".encode())
        assert answer.code != ResponseCode.SUCCESS, setting

    assert name_server.service.settings.home == home
