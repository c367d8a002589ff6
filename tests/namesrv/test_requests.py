"""Every request of a name server, over a socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.wire import bodies, headers
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.namesrv import name_server, registration, route_request, topic
from tests.support.remoting import ManualClock, RawPeer, until

TOPICS = (
    topic("orders"),
    topic("payments", queues=8),
    topic("unit", flags=1),
    topic("sub", flags=2),
)


@pytest.fixture
async def server():
    async with name_server() as running:
        yield running


@pytest.fixture
async def peer(server):
    async with RawPeer.connected(server.address) as connected:
        yield connected


def _ask(
    code: int,
    header: Header | None = None,
    *,
    body: bytes = b"",
    extra: Mapping[str, str] | None = None,
) -> Command:
    return Command.request(code, header, opaque=77, body=body, extra=extra)


async def _topics(peer: RawPeer, request: Command) -> tuple[str, ...]:
    answer = await peer.ask(request)
    assert answer.code == 0
    return decode_body(bodies.TopicList, answer.body).topic_list


async def test_a_route_is_what_apache_writes_to_the_byte(peer):
    registered = await peer.ask(registration(TOPICS))
    new = await peer.ask(route_request("orders", version=401))
    old = await peer.ask(route_request("orders", version=400))
    asking = await peer.ask(route_request("orders", version=63, standard_json=True))

    template = (
        '{"brokerDatas":[{"brokerAddrs":{%s:"127.0.0.1:10911"},"brokerName":"broker-a",'
        '"cluster":"DefaultCluster","enableActingMaster":false}],"filterServerTable":{},'
        '"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,"topicSysFlag":0,'
        '"writeQueueNums":4}]}'
    )
    assert registered.code == 0
    assert bytes(new.body).decode() == template % '"0"'
    assert bytes(old.body).decode() == template % "0"
    assert asking.body == new.body


async def test_a_slave_is_told_its_master(peer):
    master = await peer.ask(registration(TOPICS))
    slave = await peer.ask(registration(TOPICS, broker_id=1, address="127.0.0.1:20911"))

    assert master.header(headers.RegisterBrokerResponse) == headers.RegisterBrokerResponse()
    assert slave.header(headers.RegisterBrokerResponse) == headers.RegisterBrokerResponse(
        master_addr="127.0.0.1:10911", ha_server_addr="127.0.0.1:10912"
    )


async def test_a_registration_may_come_compressed_bare_or_empty(peer):
    table = bodies.TopicConfigTable(
        data_version=bodies.DataVersion(counter=7),
        topic_config_table={each.topic_name: each for each in TOPICS},
    )
    packed = bodies.compress_registration(
        bodies.RegisterBroker(topic_config_serialize_wrapper=table)
    )
    fields = dict(registration([]).ext_fields)
    compressed = {**fields, "compressed": "true", "bodyCrc32": str(bodies.body_crc32(packed))}
    plain = {**fields, "bodyCrc32": "0"}

    answers = [
        await peer.ask(Command(103, 1, _fields=compressed, body=packed, version=479)),
        await peer.ask(route_request("payments")),
        # Brokers before 3.0.11 send the table alone.
        await peer.ask(
            Command(
                103, 2, _fields={**plain, "brokerName": "old"}, body=encode_body(table), version=30
            )
        ),
        await peer.ask(Command(103, 3, _fields={**plain, "brokerName": "empty"}, version=479)),
    ]
    route = decode_body(bodies.TopicRouteData, (await peer.ask(route_request("orders"))).body)

    assert [answer.code for answer in answers] == [0, 0, 0, 0]
    assert [queues.broker_name for queues in route.queue_datas] == ["broker-a", "old"]


@pytest.mark.parametrize(
    ("changes", "body", "remark"),
    [
        ({"bodyCrc32": "0"}, b"{nonsense", "RegisterBroker body"),
        ({"bodyCrc32": "0", "compressed": "true"}, b"xx", "not zlib"),
        ({"bodyCrc32": "12345"}, None, "crc32 not match"),
        ({"brokerName": None}, None, "RegisterBrokerRequest"),
        ({}, None, "register broker failed"),
    ],
    ids=["broken", "not packed", "checksum", "no name", "one topic before all"],
)
async def test_a_registration_that_cannot_be_is_refused_with_the_reason(
    peer, changes, body, remark
):
    request = registration([topic("only")])
    fields = {**request.ext_fields, **changes}
    fields = {name: value for name, value in fields.items() if value is not None}
    given = request.body if body is None else body

    answer = await peer.ask(Command(103, 1, _fields=fields, body=given, version=479))

    assert answer.code == 1
    assert remark in (answer.remark or "")


async def test_a_broker_asks_whether_its_topics_are_known(peer):
    header = headers.BrokerRequest(
        broker_name="broker-a",
        broker_addr="127.0.0.1:10911",
        cluster_name="DefaultCluster",
        broker_id=0,
    )
    ours = bodies.DataVersion(counter=3, state_version=1, timestamp=5)
    code = RequestCode.QUERY_DATA_VERSION

    unknown = await peer.ask(_ask(code, header, body=encode_body(ours)))
    await peer.ask(registration(TOPICS, version=ours))
    same = await peer.ask(_ask(code, header, body=encode_body(ours)))
    other = await peer.ask(_ask(code, header, body=encode_body(bodies.DataVersion(counter=4))))

    kind = headers.QueryDataVersionResponse
    assert [each.header(kind).changed for each in (unknown, same, other)] == [True, False, True]
    assert unknown.body == b""
    assert bytes(other.body) == b'{"counter":3,"stateVersion":1,"timestamp":5}'


async def test_heartbeats_and_version_queries_keep_a_broker_alive_and_silence_ends_it():
    clock = ManualClock()
    settings = NameServerSettings(scan_interval=0.01)
    broker = {
        "clusterName": "DefaultCluster",
        "brokerAddr": "127.0.0.1:10911",
        "brokerName": "broker-a",
        "brokerId": "0",
    }
    async with (
        name_server(settings, clock=clock) as server,
        RawPeer.connected(server.address) as broker_side,
        RawPeer.connected(server.address) as client,
    ):
        await broker_side.ask(registration(TOPICS, timeout_millis=20_000))
        for code, body in ((904, b""), (322, b'{"counter":1}'), (904, b"")):
            clock.time += 15
            assert (await broker_side.ask(_ask(code, extra=broker, body=body))).code == 0
        alive = await client.ask(route_request("orders"))
        # Beyond its own 20 s, far within the 120 s of a broker that names none.
        clock.time += 21
        await until(lambda: server.service.routes.route("orders") is None)

        assert alive.code == 0
        assert (await client.ask(route_request("orders"))).code == 17
        assert await broker_side.is_closed_by_the_other_side()


async def test_cluster_and_members_have_bare_keys_for_everybody(peer):
    await peer.ask(registration(TOPICS))
    await peer.ask(registration(TOPICS, broker_id=1, address="127.0.0.1:20911"))

    cluster = await peer.ask(_ask(RequestCode.GET_BROKER_CLUSTER_INFO))
    members = await peer.ask(
        _ask(
            RequestCode.GET_BROKER_MEMBER_GROUP,
            headers.GetBrokerMemberGroupRequest(
                cluster_name="DefaultCluster", broker_name="broker-a"
            ),
        )
    )

    addresses = '{0:"127.0.0.1:10911",1:"127.0.0.1:20911"}'
    assert bytes(cluster.body).decode() == (
        f'{{"brokerAddrTable":{{"broker-a":{{"brokerAddrs":{addresses},"brokerName":"broker-a",'
        '"cluster":"DefaultCluster","enableActingMaster":false}},'
        '"clusterAddrTable":{"DefaultCluster":["broker-a"]}}'
    )
    assert bytes(members.body).decode() == (
        f'{{"brokerMemberGroup":{{"brokerAddrs":{addresses},"brokerName":"broker-a",'
        '"cluster":"DefaultCluster"}}'
    )


async def test_topics_are_listed(peer):
    await peer.ask(registration(TOPICS))
    await peer.ask(
        registration(
            [topic("far"), topic("both", flags=3)],
            name="broker-d",
            address="127.0.0.1:30911",
            cluster="D",
        )
    )

    by_cluster = headers.GetTopicsByClusterRequest(cluster="D")
    assert await _topics(peer, _ask(206)) == ("both", "far", "orders", "payments", "sub", "unit")
    assert await _topics(peer, _ask(224, by_cluster)) == ("both", "far")
    assert await _topics(peer, _ask(304)) == ("D", "DefaultCluster", "broker-a", "broker-d")
    assert await _topics(peer, _ask(311)) == ("both", "unit")
    assert await _topics(peer, _ask(312)) == ("both", "sub")
    assert await _topics(peer, _ask(313)) == ("sub",)
    assert b'"brokerAddr":"127.0.0.1:10911"' in bytes((await peer.ask(_ask(304))).body)


async def test_lists_can_be_disabled():
    settings = NameServerSettings(enable_all_topic_list=False, enable_topic_list=False)
    by_cluster = headers.GetTopicsByClusterRequest(cluster="D")
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        answers = [await peer.ask(_ask(code, by_cluster)) for code in (206, 224, 311, 312, 313)]

    assert {(answer.code, answer.remark) for answer in answers} == {(1, "disable")}


async def test_topics_are_deleted_and_registered_by_hand(peer):
    await peer.ask(registration(TOPICS))
    by_hand = bodies.TopicRouteData(
        queue_datas=(
            bodies.QueueData(broker_name="broker-a", perm=6, read_queue_nums=2, write_queue_nums=2),
        )
    )

    answers = [
        await peer.ask(_ask(216, headers.DeleteTopicInNamesrvRequest(topic="orders"))),
        await peer.ask(
            _ask(
                216, headers.DeleteTopicInNamesrvRequest(topic="sub", cluster_name="DefaultCluster")
            )
        ),
        await peer.ask(
            _ask(216, headers.DeleteTopicInNamesrvRequest(topic="unit", cluster_name="other"))
        ),
        await peer.ask(
            _ask(217, headers.RegisterTopicRequest(topic="by-hand"), body=encode_body(by_hand))
        ),
        await peer.ask(_ask(217, headers.RegisterTopicRequest(topic="empty"))),
    ]

    assert [answer.code for answer in answers] == [0, 0, 0, 0, 0]
    assert await _topics(peer, _ask(206)) == ("by-hand", "payments", "unit")


async def test_write_permission_is_wiped_and_added_with_a_count(peer):
    await peer.ask(registration(TOPICS))
    broker = headers.BrokerPermissionRequest(broker_name="broker-a")

    wiped = await peer.ask(_ask(205, broker))
    without = await peer.ask(route_request("orders"))
    added = await peer.ask(_ask(327, broker))
    with_it = await peer.ask(route_request("orders"))

    assert wiped.header(headers.WipeWritePermResponse).wipe_topic_count == 4
    assert added.header(headers.AddWritePermResponse).add_topic_count == 4
    assert b'"perm":4' in bytes(without.body)
    assert b'"perm":6' in bytes(with_it.body)


async def test_values_by_key_are_put_read_listed_and_deleted(peer):
    put = headers.PutKVConfigRequest(namespace="N", key="k", value="v=1")
    one = headers.KVConfigRequest(namespace="N", key="k")
    many = headers.GetKVListRequest(namespace="N")

    missing = await peer.ask(_ask(101, one))
    no_list = await peer.ask(_ask(219, many))
    stored = await peer.ask(_ask(100, put))
    found = await peer.ask(_ask(101, one))
    listed = await peer.ask(_ask(219, many))
    deleted = await peer.ask(_ask(102, one))
    gone = await peer.ask(_ask(101, one))
    nameless = await peer.ask(_ask(100, extra={"namespace": "N", "value": "v"}))

    assert (missing.code, missing.remark) == (22, "No config item, Namespace: N Key: k")
    assert (no_list.code, no_list.remark) == (22, "No config item, Namespace: N")
    assert (stored.code, deleted.code, gone.code, nameless.code) == (0, 0, 22, 1)
    assert found.header(headers.GetKVConfigResponse).value == "v=1"
    assert bytes(listed.body) == b'{"table":{"k":"v=1"}}'


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_the_order_of_topics_goes_to_brokers_and_into_routes_where_wanted(is_wanted):
    order = headers.PutKVConfigRequest(
        namespace="ORDER_TOPIC_CONFIG", key="orders", value="broker-a:4"
    )
    settings = NameServerSettings(
        order_message_enable=is_wanted, return_order_topic_config=is_wanted
    )
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        before = await peer.ask(registration(TOPICS))
        await peer.ask(_ask(100, order))
        after = await peer.ask(registration(TOPICS))
        route = await peer.ask(route_request("orders"))
        other = await peer.ask(route_request("payments"))

    assert before.body == b""
    assert bytes(after.body) == (b'{"table":{"orders":"broker-a:4"}}' if is_wanted else b"")
    assert (b'"orderTopicConf":"broker-a:4"' in bytes(route.body)) is is_wanted
    assert b"orderTopicConf" not in bytes(other.body)


async def test_values_outlive_the_server_in_rocketmqs_file(tmp_path):
    path = tmp_path / "kvConfig.json"
    path.write_text('{"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:4;broker-b:4"}}}')
    settings = NameServerSettings(home=tmp_path)
    put = headers.PutKVConfigRequest(namespace="N", key="kéy", value='"v"')
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        assert (await peer.ask(_ask(100, put))).code == 0
    content = path.read_text()
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        found = await peer.ask(_ask(101, headers.KVConfigRequest(namespace="N", key="kéy")))

    apaches = {"ORDER_TOPIC_CONFIG": {"T": "broker-a:4;broker-b:4"}}
    assert json.loads(content) == {"configTable": {"N": {"kéy": '"v"'}} | apaches}
    assert found.header(headers.GetKVConfigResponse).value == '"v"'


async def test_a_value_that_cannot_be_kept_is_refused_and_not_shown(tmp_path):
    # The temporary file cannot be made where a folder has its name.
    (tmp_path / "kvConfig.json.tmp").mkdir()
    put = headers.PutKVConfigRequest(namespace="N", key="k", value="v")
    settings = NameServerSettings(home=tmp_path)
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        refused = await peer.ask(_ask(100, put))
        found = await peer.ask(_ask(101, headers.KVConfigRequest(namespace="N", key="k")))

    assert refused.code == 1
    assert "nothing was changed" in (refused.remark or "")
    assert found.code == 22


async def test_settings_are_shown_changed_and_kept(tmp_path):
    settings = NameServerSettings(home=tmp_path)
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        before = bytes((await peer.ask(_ask(319))).body).decode()
        changed = await peer.ask(_ask(318, body=b"enableAllTopicList=false\nunknownKey=1\n"))
        after = bytes((await peer.ask(_ask(319))).body).decode()
        refused = await peer.ask(_ask(206))
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        kept = await peer.ask(_ask(206))

    assert "enableAllTopicList=true\n" in before
    assert before.splitlines() == sorted(before.splitlines())
    assert changed.code == 0
    assert "enableAllTopicList=false\n" in after
    assert "unknownKey" not in after
    assert (refused.code, kept.code) == (1, 1)


@pytest.mark.parametrize(
    ("text", "code", "remark"),
    [
        (b"kvConfigPath=/tmp/x", 16, "Can not update config in black list."),
        (b"rocketmqHome=/tmp/x", 16, "Can not update config in black list."),
        (b"mine=1", 16, "Can not update config in black list."),
        (b"enableTopicList=perhaps", 1, "enableTopicList must be true or false, got 'perhaps'"),
        (b"waitSecondsForService=soon", 1, "waitSecondsForService must be whole seconds"),
        (b"scanNotActiveBrokerInterval=0", 1, "scan_interval must be positive"),
        (b"listenPort=1", 1, "listenPort can only be changed by a restart"),
        (b"enableTopicList=\xff", 1, "not UTF-8"),
        (b"", 0, ""),
    ],
)
async def test_a_change_that_is_not_allowed_names_the_setting(text, code, remark):
    settings = NameServerSettings(config_black_list=("mine",))
    async with name_server(settings) as server, RawPeer.connected(server.address) as peer:
        answer = await peer.ask(_ask(318, body=text))

        assert answer.code == code
        assert remark in (answer.remark or "")
        assert server.service.settings == replace(settings, server=server.service.settings.server)


async def test_routes_can_wait_for_brokers_to_register_after_a_start():
    clock = ManualClock()
    settings = NameServerSettings(need_wait_for_service=True)
    async with (
        name_server(settings, clock=clock) as server,
        RawPeer.connected(server.address) as peer,
    ):
        await peer.ask(registration(TOPICS))
        early = await peer.ask(route_request("orders"))
        clock.time += 45
        late = await peer.ask(route_request("orders"))

    assert (early.code, early.remark) == (1, "name server not ready")
    assert late.code == 0


async def test_a_client_may_ask_for_its_own_zone(peer):
    await peer.ask(registration(TOPICS, extra={"__ZONE_NAME": "east"}))
    await peer.ask(
        registration(TOPICS, name="broker-w", address="127.0.0.1:30911", extra={"__ZONE_NAME": "w"})
    )
    zone = {"topic": "orders", "__ZONE_MODE": "true", "__ZONE_NAME": "East"}

    near = decode_body(bodies.TopicRouteData, (await peer.ask(_ask(105, extra=zone))).body)
    everything = decode_body(bodies.TopicRouteData, (await peer.ask(route_request("orders"))).body)

    assert [broker.broker_name for broker in near.broker_datas] == ["broker-a"]
    assert [broker.zone_name for broker in everything.broker_datas] == ["east", "w"]
