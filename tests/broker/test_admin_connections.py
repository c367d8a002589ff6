"""Who is connected, who consumes what, and what is wrong inside groups."""

from __future__ import annotations

import asyncio
import json

from orbitmq.broker.handlers import membership
from orbitmq.wire.bodies import (
    ConsumerConnection,
    GroupList,
    KVTable,
    MessageModel,
    ProducerConnection,
    ProducerTable,
    QuerySubscription,
    TopicList,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    GetConsumerConnectionRequest,
    GetProducerConnectionRequest,
    GroupRequest,
    QuerySubscriptionRequest,
    TopicRequest,
)
from orbitmq.wire.javajson import decode_body
from tests.support.admin import ask, subscription, told
from tests.support.broker import GROUP

CONSUMERS = RequestCode.GET_CONSUMER_CONNECTION_LIST


async def test_the_members_of_a_group_and_its_subscription_are_shown(client):
    await client.heartbeat("me", subscription("orders", "red || blue"))

    shown = await told(
        client, ConsumerConnection, CONSUMERS, GetConsumerConnectionRequest(consumer_group=GROUP)
    )

    assert [each.client_id for each in shown.connection_set] == ["me"]
    assert shown.connection_set[0].client_addr == str(client.connection.local)
    assert shown.message_model is MessageModel.CLUSTERING
    assert shown.subscription_table["orders"].sub_string == "red || blue"


async def test_groups_that_are_not_there_are_refused(client):
    consumers = await ask(client, CONSUMERS, GetConsumerConnectionRequest(consumer_group="nobody"))
    producers = await ask(
        client,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        GetProducerConnectionRequest(producer_group="nobody"),
    )

    assert consumers.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert consumers.remark == "the consumer group[nobody] not online"
    assert producers.code == ResponseCode.SYSTEM_ERROR
    assert producers.remark == "the producer group[nobody] not exist"


async def test_producers_are_shown_by_group_and_all_together(client):
    await client.heartbeat("me", producers=("makers",))

    one = await told(
        client,
        ProducerConnection,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        GetProducerConnectionRequest(producer_group="makers"),
    )
    everybody = await told(client, ProducerTable, RequestCode.GET_ALL_PRODUCER_INFO)

    assert [each.client_id for each in one.connection_set] == ["me"]
    assert everybody.data["makers"][0].client_id == "me"
    assert everybody.data["makers"][0].last_update_timestamp > 1_700_000_000_000


async def test_a_long_list_of_producers_does_not_keep_others_waiting(client):
    groups = tuple(f"makers-{number}" for number in range(2_000))
    await client.heartbeat("me", producers=groups)
    answers: list[str] = []

    async def asked(name, code):
        answer = await client.connection.request(code, timeout=30)
        answers.append(name)
        return answer

    # On one connection, where what is done at once is answered in its order.
    everybody, _ = await asyncio.gather(
        asked("all producers", RequestCode.GET_ALL_PRODUCER_INFO),
        asked("system topics", RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER),
    )

    assert answers == ["system topics", "all producers"]
    assert set(decode_body(ProducerTable, everybody.body).data) == set(groups)
    assert everybody.remark is None


async def test_a_list_of_producers_fits_into_a_frame(client, monkeypatch):
    monkeypatch.setattr(membership, "LARGEST_ANSWER", 5_000)
    await client.heartbeat("\x01" * 10, producers=tuple(f"g{number:03}" for number in range(100)))

    answer = await ask(client, RequestCode.GET_ALL_PRODUCER_INFO)

    shown = decode_body(ProducerTable, answer.body).data
    assert answer.code == ResponseCode.SUCCESS
    assert 10 < len(shown) < 100
    assert 2_500 < len(answer.body) <= 5_000
    assert answer.remark == f"{len(shown)} of 100 groups are shown, more are too long"


async def test_a_topic_is_consumed_by_who_is_there_and_by_who_has_progress(broker, client):
    await client.stored("orders")
    await client.heartbeat("me", subscription("orders"), group="online")
    broker.parts.groups.find("before", now=0)
    await client.report("orders", 1, consumer_group="before")

    groups = await told(
        client, GroupList, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequest(topic="orders")
    )
    topics = await told(
        client, TopicList, RequestCode.QUERY_TOPICS_BY_CONSUMER, GroupRequest(group="before")
    )

    assert groups.group_list == ("before", "online")
    assert topics == TopicList(broker_addr=str(broker.address), topic_list=("orders",))


async def test_what_a_group_wants_of_a_topic_is_told_if_it_is_there(client):
    await client.heartbeat("me", subscription("orders", "red"))
    code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER

    there = await told(
        client, QuerySubscription, code, QuerySubscriptionRequest(group=GROUP, topic="orders")
    )
    gone = await told(
        client, QuerySubscription, code, QuerySubscriptionRequest(group="nobody", topic="orders")
    )

    assert there.subscription_data is not None
    assert there.subscription_data.sub_string == "red"
    assert gone == QuerySubscription(group="nobody", topic="orders")


async def test_the_topics_of_the_system_are_listed(broker, client):
    listed = await told(client, TopicList, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)

    assert set(listed.topic_list) == broker.parts.topics.system_topics()


async def test_members_that_subscribe_differently_are_named_in_the_answer_about_their_group(
    broker, client, open_client
):
    other = await open_client(broker)
    await client.heartbeat("one", subscription("orders", "red"))
    await other.heartbeat("two", subscription("orders", "blue"))

    answer = await ask(client, CONSUMERS, GetConsumerConnectionRequest(consumer_group=GROUP))

    (finding,) = json.loads(answer.ext_fields["findings"])
    assert answer.code == ResponseCode.SUCCESS
    assert finding["kind"] == "different subscriptions"
    assert (finding["group"], finding["topic"]) == (GROUP, "orders")
    assert sorted(
        (variant["clients"], variant["expression"]) for variant in finding["variants"]
    ) == [(["one"], "red"), (["two"], "blue")]
    assert "messages will be missed" in finding["text"]


async def test_a_client_id_that_two_consumers_have_is_named(broker, client, open_client):
    other = await open_client(broker)
    for _ in range(2):
        await client.heartbeat("same", subscription("orders"))
        await other.heartbeat("same", subscription("orders"))

    answer = await ask(client, CONSUMERS, GetConsumerConnectionRequest(consumer_group=GROUP))

    (finding,) = json.loads(answer.ext_fields["findings"])
    assert finding["kind"] == "duplicate client"
    assert finding["clientId"] == "same"
    assert len(finding["addresses"]) == 2


async def test_a_group_that_agrees_has_no_findings(broker, client, open_client):
    other = await open_client(broker)
    await client.heartbeat("one", subscription("orders", "red || blue"))
    await other.heartbeat("two", subscription("orders", "blue||red"))

    answer = await ask(client, CONSUMERS, GetConsumerConnectionRequest(consumer_group=GROUP))

    assert "findings" not in answer.ext_fields


async def test_findings_of_all_groups_are_part_of_the_runtime_information(
    broker, client, open_client
):
    other = await open_client(broker)
    await client.heartbeat("one", subscription("orders", "red"))
    await other.heartbeat("two", subscription("orders", "blue"))
    broker.parts.disagreements.check(broker.parts.clock.monotonic())

    table = (await told(client, KVTable, RequestCode.GET_BROKER_RUNTIME_INFO)).table

    assert table["groupFindings"] == "1"
    assert "subscribe differently to topic 'orders'" in table["groupFinding_1"]
