"""Administration of topics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbitmq.wire.bodies import CreateTopicList, TopicConfig, TopicConfigDetail, TopicConfigTable
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import CreateTopicRequest, GetAllTopicConfigRequest, TopicRequest
from orbitmq.wire.javajson import encode_body
from tests.support.admin import ask, told
from tests.support.broker import GROUP, RawClient, bodies_in, until


async def create(client: RawClient, topic: str, **fields: Any) -> Command:
    defaults: dict[str, Any] = {
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    header = CreateTopicRequest(topic=topic, **(defaults | fields))
    return await ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def delete(client: RawClient, topic: str) -> Command:
    return await ask(client, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic=topic))


async def shown(client: RawClient, topic: str) -> TopicConfigDetail:
    return await told(
        client, TopicConfigDetail, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic=topic)
    )


async def test_a_topic_is_created_changed_and_shown(client):
    created = await create(
        client, "orders", read_queue_nums=3, write_queue_nums=2, attributes="+message.type=FIFO"
    )
    changed = await create(client, "orders", read_queue_nums=5, perm=4, order=True)

    config = await shown(client, "orders")
    assert created.code == changed.code == ResponseCode.SUCCESS
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (5, 4, 4)
    assert config.order
    assert config.attributes == {"message.type": "FIFO"}


async def test_name_servers_hear_of_a_new_topic_at_once(start_broker, open_client, name_server):
    broker = await start_broker(name_servers=(str(name_server.address),))
    client = await open_client(broker)
    await until(lambda: name_server.service.routes.route("TBW102") is not None)

    await create(client, "orders", read_queue_nums=3)

    await until(lambda: name_server.service.routes.route("orders") is not None)
    route = name_server.service.routes.route("orders")
    assert route is not None
    assert route.queue_datas[0].read_queue_nums == 3


@pytest.mark.parametrize(
    ("topic", "fields", "code"),
    [
        ("", {}, ResponseCode.INVALID_PARAMETER),
        ("no spaces", {}, ResponseCode.INVALID_PARAMETER),
        ("x" * 128, {}, ResponseCode.INVALID_PARAMETER),
        ("TBW102", {}, ResponseCode.INVALID_PARAMETER),
        ("rmq_sys_mine", {}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"attributes": "+message.type=MIXED"}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"attributes": "+nonsense=1"}, ResponseCode.SYSTEM_ERROR),
        ("orders", {"attributes": "nonsense"}, ResponseCode.SYSTEM_ERROR),
        ("orders", {"topic_filter_type": "NO_TAG"}, ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_a_topic_that_cannot_be_is_refused(broker, client, topic, fields, code):
    before = list(broker.parts.topics)

    answer = await create(client, topic, **fields)

    assert answer.code == code
    assert answer.remark
    assert list(broker.parts.topics) == before


async def test_a_list_is_made_although_one_of_it_is_there_already(broker, client):
    await create(client, "one")
    configs = tuple(
        TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4)
        for name in ("one", "two", "three")
    )
    body = encode_body(CreateTopicList(topic_config_list=configs))

    answer = await ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)

    assert answer.code == ResponseCode.SUCCESS
    assert {"one", "two", "three"} <= {config.topic_name for config in broker.parts.topics}


async def test_a_list_with_a_bad_name_changes_nothing(broker, client):
    configs = tuple(TopicConfig(topic_name=name) for name in ("one", "TBW102"))
    body = encode_body(CreateTopicList(topic_config_list=configs))

    answer = await ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "one" not in broker.parts.topics


async def test_a_list_names_what_was_done_before_it_failed(client):
    configs = (
        TopicConfig(topic_name="one"),
        TopicConfig(topic_name="two", attributes={"+nonsense": "1"}),
    )
    body = encode_body(CreateTopicList(topic_config_list=configs))

    answer = await ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "the 1 topics before it in the list are done" in (answer.remark or "")


async def test_a_deleted_topic_is_forgotten_with_its_queues_and_its_progress(broker, client):
    await client.stored("orders", b"old")
    await client.pull("orders")
    await client.report("orders", 1)

    answer = await delete(client, "orders")

    parts = broker.parts
    assert answer.code == ResponseCode.SUCCESS
    assert "orders" not in parts.topics
    assert parts.progress.offsets("orders", GROUP) == {}
    assert not [queue for queue in parts.store.queues() if queue.topic == "orders"]
    assert "orders" not in parts.counters.topics


async def test_a_topic_that_is_made_again_begins_at_zero(client):
    for _ in range(3):
        await client.stored("orders", b"old")
    await delete(client, "orders")

    sent = await client.stored("orders", b"new")

    assert sent.queue_offset == 0
    assert bodies_in(await client.pull("orders")) == [b"new"]


async def test_a_retry_topic_that_can_only_be_of_a_popping_group_goes_with_its_topic(
    broker, client
):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    popped = f"%RETRY%{GROUP}+orders"
    broker.parts.topics.ensure(TopicConfig(topic_name=popped), now=0)

    await delete(client, "orders")

    assert popped not in broker.parts.topics


async def test_the_retries_of_a_group_whose_name_ends_with_the_topic_stay(broker, client):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    retries = f"%RETRY%{GROUP}_orders"
    await client.stored(retries, b"again")

    await delete(client, "orders")

    assert "orders" not in broker.parts.topics
    answer = await client.pull(retries, consumer_group=f"{GROUP}_orders")
    assert bodies_in(answer) == [b"again"]


async def test_a_pull_that_waits_for_a_deleted_topic_is_told_at_once(broker, client):
    await client.stored("orders")
    pull = asyncio.create_task(client.pull("orders", offset=1, hold=60))
    await until(lambda: len(broker.parts.held) == 1)

    await delete(client, "orders")

    async with asyncio.timeout(30):
        answer = await pull
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_pull_that_waits_is_told_at_once_that_it_may_not_read_any_more(broker, client):
    await create(client, "orders")
    pull = asyncio.create_task(client.pull("orders", hold=60))
    await until(lambda: len(broker.parts.held) == 1)

    await create(client, "orders", perm=2)

    async with asyncio.timeout(30):
        answer = await pull
    assert answer.code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize("topic", ["", " ", "TBW102", "SCHEDULE_TOPIC_XXXX"])
async def test_a_system_topic_cannot_be_deleted(broker, client, topic):
    before = len(broker.parts.topics)

    answer = await delete(client, topic)

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert len(broker.parts.topics) == before


async def test_deleting_what_is_not_there_succeeds(client):
    assert (await delete(client, "never")).code == ResponseCode.SUCCESS


async def test_an_unknown_topic_is_not_shown(client):
    answer = await ask(client, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic="never"))

    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


async def test_all_topics_are_shown_to_tools_that_do_not_ask_for_pages(broker, client):
    answer = await ask(client, RequestCode.GET_ALL_TOPIC_CONFIG)
    table = await told(client, TopicConfigTable, RequestCode.GET_ALL_TOPIC_CONFIG)

    assert answer.ext_fields["totalTopicNum"] == str(len(broker.parts.topics))
    assert list(table.topic_config_table.values()) == sorted(
        broker.parts.topics, key=lambda config: config.topic_name
    )


async def test_pages_together_are_all_topics(broker, client):
    seen: dict[str, TopicConfig] = {}
    version = ""
    while len(seen) < len(broker.parts.topics):
        header = GetAllTopicConfigRequest(
            topic_seq=len(seen), data_version=version, max_topic_num=5
        )
        table = await told(client, TopicConfigTable, RequestCode.GET_ALL_TOPIC_CONFIG, header)
        assert 0 < len(table.topic_config_table) <= 5
        seen |= table.topic_config_table
        assert table.data_version is not None
        version = encode_body(table.data_version).decode()

    assert seen == {config.topic_name: config for config in broker.parts.topics}
