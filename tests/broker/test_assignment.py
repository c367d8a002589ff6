"""Members that have the broker work their share out get what they would work out by themselves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.strategies import share, strategy_named
from orbitmq.client.routes import Queue
from orbitmq.namesrv.server import NameServer
from orbitmq.remoting.channels import connect
from orbitmq.wire.bodies import MessageModel, QueryAssignment, SubscriptionData, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetRouteInfoRequest
from orbitmq.wire.javajson import encode_body
from tests.support.broker import GROUP, RawClient
from tests.support.remoting import serving

WANTED = SubscriptionData(topic="orders", sub_string="*")


async def ask(client: RawClient, client_id: str, **changes: Any) -> Command:
    asked = QueryAssignment(
        **{
            "client_id": client_id,
            "consumer_group": GROUP,
            "message_model": MessageModel.CLUSTERING,
            "strategy_name": "AVG",
            "topic": "orders",
        }
        | changes
    )
    return await client.connection.request(
        RequestCode.QUERY_ASSIGNMENT, body=encode_body(asked), timeout=30
    )


def queues_in(answer: Command) -> list[tuple[str, int]]:
    assert answer.code == 0, answer.remark
    given = json.loads(bytes(answer.body))["messageQueueAssignments"]
    assert {each["mode"] for each in given} <= {"PULL"}
    assert {each["messageQueue"]["topic"] for each in given} <= {"orders"}
    return [(each["messageQueue"]["brokerName"], each["messageQueue"]["queueId"]) for each in given]


def make_topic(broker: Broker, queues: int, perm: int = 6) -> None:
    broker.parts.topics.update(
        TopicConfig(
            topic_name="orders", perm=perm, read_queue_nums=queues, write_queue_nums=queues
        ),
        now=0.0,
    )


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE"])
@pytest.mark.parametrize(("queues", "members"), [(8, 1), (8, 3), (3, 3), (2, 3), (7, 2), (0, 2)])
async def test_the_shares_are_those_that_the_members_would_work_out(
    broker, open_client, strategy, queues, members
):
    make_topic(broker, queues)
    # In Java's order the last of these is before the one before it.
    ids = ["b@1", "a@2", "\U0001f680", "\uffee"][-members:]
    clients = {each: await open_client(broker) for each in ids}
    for client_id, client in clients.items():
        await client.heartbeat(client_id, WANTED)

    told = {
        client_id: queues_in(await ask(client, client_id, strategy_name=strategy))
        for client_id, client in clients.items()
    }

    known = [Queue("orders", "broker-a", number) for number in range(queues)]
    for client_id in ids:
        own = share(strategy_named(strategy), known, ids, client_id)
        assert told[client_id] == [(each.broker, each.id) for each in own]


async def until_known(name_server: NameServer, brokers: int) -> None:
    """Return when the name server has a route of the topic to so many brokers."""
    connection = await connect(name_server.address)
    header = GetRouteInfoRequest(topic="orders")
    async with asyncio.timeout(30):
        while True:
            answer = await connection.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, timeout=9)
            if answer.code == 0 and bytes(answer.body).count(b'"readQueueNums"') == brokers:
                break
            await asyncio.sleep(0.01)
    connection.close()
    await connection.wait_closed()


async def test_the_queues_of_all_brokers_of_the_topic_are_shared(
    start_broker, open_client, name_server
):
    at = {"name_servers": (str(name_server.address),)}
    first = await start_broker(root="first", name="first", **at)
    second = await start_broker(root="second", name="second", **at)
    for broker in (first, second):
        make_topic(broker, 2)
    client = await open_client(second)
    await client.heartbeat("c", WANTED)
    await until_known(name_server, brokers=2)

    told = queues_in(await ask(client, "c"))

    assert told == [("first", 0), ("first", 1), ("second", 0), ("second", 1)]


async def test_a_share_is_worked_out_anew_when_somebody_comes(broker, client, open_client):
    make_topic(broker, 4)
    await client.heartbeat("a", WANTED)
    alone = queues_in(await ask(client, "a"))

    await (await open_client(broker)).heartbeat("b", WANTED)
    shared = queues_in(await ask(client, "a"))

    assert [number for _, number in alone] == [0, 1, 2, 3]
    assert [number for _, number in shared] == [0, 1]


async def test_a_broadcast_member_has_all_queues_that_may_be_read(broker, client):
    make_topic(broker, 3)

    answer = await ask(
        client, "anybody", message_model=MessageModel.BROADCASTING, strategy_name=None
    )

    assert [number for _, number in queues_in(answer)] == [0, 1, 2]


async def test_queues_that_may_not_be_read_are_nobodys(broker, client):
    make_topic(broker, 3, perm=2)
    await client.heartbeat("c", WANTED)

    assert queues_in(await ask(client, "c")) == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (
            {"strategy_name": "CONSISTENT_HASH"},
            ResponseCode.INVALID_PARAMETER,
            "allocation strategy 'CONSISTENT_HASH' is not known to the broker, which knows AVG and",
        ),
        ({"strategy_name": None}, ResponseCode.INVALID_PARAMETER, "allocation strategy ''"),
        ({"client_id": "x"}, ResponseCode.CONSUMER_NOT_ONLINE, "x is not a member of group"),
        ({"consumer_group": "h"}, ResponseCode.CONSUMER_NOT_ONLINE, "send a heartbeat first"),
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST, "topic[none] not exist"),
    ],
)
async def test_a_share_that_cannot_be_told_is_refused_and_the_client_keeps_what_it_has(
    broker, client, changes, code, words
):
    make_topic(broker, 3)
    await client.heartbeat("c", WANTED)

    answer = await ask(client, **({"client_id": "c"} | changes))

    assert answer.code == code
    assert words in (answer.remark or "")


async def test_a_group_whose_strategy_is_not_known_is_in_the_log_once(broker, client, caplog):
    make_topic(broker, 3)
    await client.heartbeat("c", WANTED)

    for _ in range(3):
        await ask(client, "c", strategy_name="MACHINE_ROOM")

    (line,) = [each for each in caplog.records if "assigned no queues" in each.getMessage()]
    assert "'MACHINE_ROOM'" in line.getMessage()
    assert getattr(line, "group", "") == GROUP


async def test_without_its_name_server_a_broker_does_not_take_its_own_queues_for_all(
    start_broker, open_client, name_server
):
    broker = await start_broker(name_servers=(str(name_server.address),))
    make_topic(broker, 2)
    client = await open_client(broker)
    await client.heartbeat("c", WANTED)
    await name_server.stop()

    answer = await ask(client, "c")

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "no name server says where topic orders is" in (answer.remark or "")


@pytest.mark.parametrize("code", [ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SYSTEM_BUSY])
async def test_a_refusal_of_the_name_server_keeps_its_code(start_broker, open_client, code):
    def refuse(_, request):
        return request.answer(code, remark="not now")

    async with serving({RequestCode.GET_ROUTEINFO_BY_TOPIC: refuse}) as refusing:
        broker = await start_broker(name_servers=(str(refusing.address),))
        client = await open_client(broker)
        await client.heartbeat("c", WANTED)

        answer = await ask(client, "c")

    assert answer.code == code
    assert "gives no route of topic orders: not now" in (answer.remark or "")
