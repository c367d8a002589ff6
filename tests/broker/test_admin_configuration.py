"""Settings over the wire, and cleaning on demand."""

from __future__ import annotations

import dataclasses

import pytest

from orbitmq.broker.settings import SETTINGS, BrokerSettings, changed, shown
from orbitmq.errors import SettingError
from orbitmq.remoting.settings import Address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import parse_properties
from tests.support.admin import ask
from tests.support.broker import RawClient, until

ADDRESS = Address("127.0.0.1", 10911)


async def update(client: RawClient, text: str) -> Command:
    return await ask(client, RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())


async def config(client: RawClient) -> dict[str, str]:
    answer = await ask(client, RequestCode.GET_BROKER_CONFIG)
    assert answer.code == ResponseCode.SUCCESS
    assert '"counter"' in answer.ext_fields["version"]
    return parse_properties(bytes(answer.body).decode())


async def test_all_settings_are_shown_under_rocketmqs_names(broker, client):
    text = await config(client)

    assert text["brokerName"] == "broker-a"
    assert text["listenPort"] == str(broker.address.port)
    assert text["maxMessageSize"] == "4194304"
    assert text["flushDiskType"] == "ASYNC_FLUSH"
    assert text["fileReservedTime"] == "72"
    assert text["deleteWhen"] == "04"
    assert text["messageDelayLevel"] == (
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    )
    assert SETTINGS.keys() <= text.keys()


async def test_a_change_takes_effect_at_once(broker, client):
    before = (await ask(client, RequestCode.GET_BROKER_CONFIG)).ext_fields["version"]

    answer = await update(client, "maxMessageSize=1024\nregionId=north\n")

    too_large = await client.send("orders", b"x" * 1025)
    assert answer.code == ResponseCode.SUCCESS
    assert too_large.code == ResponseCode.MESSAGE_ILLEGAL
    assert (await config(client))["regionId"] == "north"
    assert broker.parts.settings.send.region == "north"
    after = (await ask(client, RequestCode.GET_BROKER_CONFIG)).ext_fields["version"]
    assert before != after


async def test_a_broker_that_may_not_be_written_tells_the_name_servers(
    start_broker, open_client, name_server
):
    client = await open_client(await start_broker(name_servers=(str(name_server.address),)))
    routes = name_server.service.routes
    await client.stored("orders")
    await until(lambda: routes.route("orders") is not None)

    await update(client, "brokerPermission=4")

    def permission():
        route = routes.route("orders")
        return route.queue_datas[0].perm if route is not None else -1

    await until(lambda: permission() == 4)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("brokerName=other", ResponseCode.SYSTEM_ERROR, "brokerName cannot be changed"),
        ("flushDiskType=SYNC_FLUSH", ResponseCode.SYSTEM_ERROR, "the store was opened with it"),
        ("listenPort=1", ResponseCode.SYSTEM_ERROR, "listenPort cannot be changed"),
        ("noSuchThing=1", ResponseCode.SYSTEM_ERROR, "no setting 'noSuchThing'"),
        ("longPollingEnable=perhaps", ResponseCode.SYSTEM_ERROR, "must be true or false"),
        ("maxMessageSize=many", ResponseCode.SYSTEM_ERROR, "must be a whole number"),
        ("maxMessageSize=0", ResponseCode.SYSTEM_ERROR, "must be positive"),
        ("maxMessageSize=99999999", ResponseCode.SYSTEM_ERROR, "which is what the store takes"),
        ("brokerPermission=9", ResponseCode.SYSTEM_ERROR, "permission must be from 0 to 7"),
        ("rocketmqHome=/", ResponseCode.NO_PERMISSION, "black list"),
        ("brokerConfigPath=/", ResponseCode.NO_PERMISSION, "black list"),
    ],
)
async def test_what_cannot_be_changed_is_refused_by_name_and_nothing_else_changes(
    broker, client, text, code, words
):
    before = broker.parts.settings

    answer = await update(client, "traceOn=false\n" + text)

    assert answer.code == code
    assert words in (answer.remark or "")
    assert broker.parts.settings is before


async def test_text_that_is_not_utf_8_is_refused(client):
    answer = await ask(client, RequestCode.UPDATE_BROKER_CONFIG, body=b"\xff=1")

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "UTF-8" in (answer.remark or "")


async def test_values_that_are_in_force_already_are_accepted(broker, client):
    before = broker.parts.settings
    everything = await ask(client, RequestCode.GET_BROKER_CONFIG)

    answer = await ask(client, RequestCode.UPDATE_BROKER_CONFIG, body=everything.body)

    assert answer.code == ResponseCode.SUCCESS
    assert broker.parts.settings is before


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_can_be_written_and_read_back(name, tmp_path):
    settings = BrokerSettings(root=tmp_path)
    text = shown(settings, ADDRESS)[name]
    setting = SETTINGS[name]

    value = setting.kind.value(text)

    if name != "messageDelayLevel":
        assert setting.kind.text(value) == text
    assert changed(settings, ADDRESS, {name: text}) is settings


def test_every_setting_that_is_said_to_change_does(tmp_path):
    settings = BrokerSettings(root=tmp_path)
    for name, setting in SETTINGS.items():
        if setting.fixed is not None:
            continue
        text = shown(settings, ADDRESS)[name]
        other = {"true": "false", "false": "true"}.get(text)
        if other is None:
            other = "4" if name == "brokerPermission" else "1000"
        after = changed(settings, ADDRESS, {name: other})

        assert shown(after, ADDRESS)[name] == other, name
        assert dataclasses.replace(after) == after


def test_a_value_that_the_settings_refuse_is_a_setting_error(tmp_path):
    with pytest.raises(SettingError, match="region"):
        changed(BrokerSettings(root=tmp_path), ADDRESS, {"regionId": "no spaces"})


async def test_cleaning_is_done_when_asked_for(broker, client):
    await client.stored("orders")
    codes = (
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
    )

    answers = [await ask(client, code) for code in codes]

    assert [answer.code for answer in answers] == [ResponseCode.SUCCESS] * 3
    assert await client.max_offset("orders") == 1
    assert broker.parts.store.statistics().used_ratio > 0


async def test_queues_without_a_topic_are_cleaned_away(broker, client):
    await client.stored("orders")
    await client.stored("gone")
    broker.parts.topics.delete("gone", now=0)

    await ask(client, RequestCode.CLEAN_UNUSED_TOPIC)

    assert {queue.topic for queue in broker.parts.store.queues()} == {"orders"}
