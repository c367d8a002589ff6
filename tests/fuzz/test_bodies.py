"""Bodies of every request that has one, with something wrong in them, for brokers and name servers.

A body that cannot be read is answered; its sender keeps its connection, and nobody else notices.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

import msgspec
import pytest

from orbitmq.broker.broker import Broker
from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import Address
from orbitmq.wire import bodies
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.codes import ResponseCode
from tests.support.broker import RawClient, bodies_in, small_settings
from tests.support.fuzzing import body_like, fuzz_seed, note_inputs, rounds
from tests.support.mutations import EDGES, ODD_TEXTS

ROUNDS = rounds(120)
SEED = fuzz_seed(7)

BROKER: Mapping[Code, type[msgspec.Struct]] = {
    Code.HEART_BEAT: bodies.HeartbeatData,
    Code.LOCK_BATCH_MQ: bodies.LockBatch,
    Code.UNLOCK_BATCH_MQ: bodies.LockBatch,
    Code.CHECK_CLIENT_CONFIG: bodies.CheckClientRequest,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: bodies.SubscriptionGroupConfig,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: bodies.CreateGroupList,
    Code.UPDATE_AND_CREATE_TOPIC_LIST: bodies.CreateTopicList,
}
NAME_SERVER: Mapping[Code, type[msgspec.Struct]] = {
    Code.REGISTER_BROKER: bodies.RegisterBroker,
    Code.QUERY_DATA_VERSION: bodies.DataVersion,
    Code.REGISTER_TOPIC_IN_NAMESRV: bodies.TopicRouteData,
    Code.BROKER_HEARTBEAT: bodies.TopicConfigTable,
}
#: For headers that are needed to get at the body.
FIELDS = {
    "brokerName": "broker-a",
    "brokerAddr": "10.0.0.1:10911",
    "clusterName": "DefaultCluster",
    "haServerAddr": "10.0.0.1:10912",
    "brokerId": "0",
    "topic": "orders",
}
#: A request that takes longer than this hangs.
DEADLINE = 30.0


@pytest.fixture
async def broker(tmp_path):
    broker = Broker(small_settings(tmp_path))
    await broker.start()
    yield broker
    await broker.stop(grace=0)


@pytest.mark.timeout(1200)
async def test_a_broker_answers_whatever_a_body_says(broker, caplog):
    caplog.set_level(logging.WARNING)
    healthy = await RawClient.open(broker)

    answered = await converse(broker.address, BROKER)

    assert {int(ResponseCode.SUCCESS)} < answered, "some have to be right, and some wrong"
    stored = await healthy.stored("healthy", b"still here")
    pulled = await healthy.pull("healthy", offset=stored.queue_offset)
    assert bodies_in(pulled) == [b"still here"]
    await healthy.close()
    assert tracebacks(caplog) == []


@pytest.mark.timeout(1200)
async def test_a_name_server_answers_whatever_a_body_says(name_server, caplog):
    caplog.set_level(logging.WARNING)

    answered = await converse(name_server.address, NAME_SERVER)

    assert {int(ResponseCode.SUCCESS)} < answered
    assert tracebacks(caplog) == []


async def converse(address: Address, kinds: Mapping[Code, type[msgspec.Struct]]) -> set[int]:
    """Ask all of it on one connection, which stays open; the codes of the answers."""
    chance = random.Random(SEED)
    answered = set()
    connection = await connect(address)
    for code, kind in kinds.items():
        for _ in range(ROUNDS):
            body = body_like(kind, chance)
            answer = await connection.request(code, None, body=body, extra=FIELDS, timeout=DEADLINE)
            answered.add(answer.code)
            assert connection.is_open, body
    connection.close()
    await connection.wait_closed()
    note_inputs(len(kinds) * ROUNDS)
    return answered


@pytest.mark.timeout(600)
@pytest.mark.parametrize("code", [Code.UPDATE_BROKER_CONFIG, Code.UPDATE_NAMESRV_CONFIG])
async def test_settings_that_a_request_changes_are_taken_or_refused(
    code, broker, name_server, caplog
):
    caplog.set_level(logging.WARNING)
    is_broker = code is Code.UPDATE_BROKER_CONFIG
    address = broker.address if is_broker else name_server.address
    asking = Code.GET_BROKER_CONFIG if is_broker else Code.GET_NAMESRV_CONFIG
    chance = random.Random(SEED)
    connection = await connect(address)
    text = bytes((await connection.request(asking, timeout=DEADLINE)).body).decode()
    names = [line.partition("=")[0] for line in text.splitlines() if "=" in line]

    for _ in range(ROUNDS):
        lines = []
        for _ in range(chance.randint(1, 3)):
            name = chance.choice((*names, *names, *ODD_TEXTS))
            value = chance.choice(("true", "false", *map(str, EDGES), *ODD_TEXTS))
            lines.append(f"{name}{chance.choice('=:= ')}{value}")
        body = "\n".join(lines).encode("utf-8", "surrogatepass")
        answer = await connection.request(code, None, body=body, timeout=DEADLINE)
        assert answer.code in set(ResponseCode)
        again = await connection.request(asking, timeout=DEADLINE)
        assert again.code == ResponseCode.SUCCESS, body
    note_inputs(ROUNDS)

    connection.close()
    await connection.wait_closed()
    assert tracebacks(caplog) == []


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        caplog.handler.format(record)[-2000:]
        for record in caplog.records
        if record.exc_info or record.name == "asyncio"
    ]
