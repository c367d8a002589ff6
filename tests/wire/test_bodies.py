"""Every declared body, in our dialect and in those of the peers."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitmq.wire import bodies
from orbitmq.wire.codes import BodyError, WireLimits
from orbitmq.wire.javajson import Body, decode_body, encode_body
from tests.support.wire import BODIES, instances

QUEUE = bodies.MessageQueue(broker_name="b", queue_id=0, topic="T")
QUEUE_JSON = b'{"brokerName":"b","queueId":0,"topic":"T"}'


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: str(kind.__name__))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), bare=st.booleans())
def test_every_body_comes_back_as_it_was_sent(kind, bare, data):
    body = data.draw(instances(kind))

    again = decode_body(kind, encode_body(body, bare_integer_keys=bare))

    assert again == body


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: str(kind.__name__))
def test_keys_are_written_in_alphabetical_order(kind):
    assert list(kind.__struct_encode_fields__) == sorted(kind.__struct_encode_fields__)


ROUTE = bodies.TopicRouteData(
    broker_datas=(
        bodies.BrokerData(
            broker_addrs={0: "1.2.3.4:10911", 1: "1.2.3.5:10911"}, broker_name="b", cluster="C"
        ),
    ),
    queue_datas=(bodies.QueueData(broker_name="b", perm=6, read_queue_nums=4, write_queue_nums=4),),
)
ROUTE_START = b'{"brokerDatas":[{"brokerAddrs":'
ROUTE_REST = (
    b',"brokerName":"b","cluster":"C","enableActingMaster":false}],"filterServerTable":{},'
    b'"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,"topicSysFlag":0,'
    b'"writeQueueNums":4}]}'
)
BARE_ADDRS = b'{0:"1.2.3.4:10911",1:"1.2.3.5:10911"}'
QUOTED_ADDRS = b'{"0":"1.2.3.4:10911","1":"1.2.3.5:10911"}'


@pytest.mark.parametrize("addresses", [BARE_ADDRS, QUOTED_ADDRS], ids=["4.9 and older", "5.x"])
def test_routes_are_read_with_bare_and_with_quoted_keys(addresses):
    assert decode_body(bodies.TopicRouteData, ROUTE_START + addresses + ROUTE_REST) == ROUTE


@pytest.mark.parametrize(
    "text",
    [
        (
            b'{"dataVersion":{"counter":3,"stateVersion":0,"timestamp":5},"groupTopicMap":{"g":["T"]},'
            b'"offsetTable":{"T@g":{0:5,1:7},"%RETRY%g@g":{0:0}}}'
        ),
        (
            b'{"offsetTable":{"T@g":{"0":5,"1":7},"%RETRY%g@g":{"0":"0"}},'
            b'"dataVersion":{"counter":3,"timestamp":5}}\n'
        ),
        (
            b'{\n\t"offsetTable":{\n\t\t"T@g":{0:5,1:7\n\t\t},"%RETRY%g@g":{0:0}\n\t},'
            b'"dataVersion":{"counter":3,"stateVersion":0,"timestamp":5}}'
        ),
    ],
    ids=["bare keys", "quoted keys and numbers", "as in the file"],
)
def test_offset_tables_are_read_with_bare_and_with_quoted_keys(text):
    assert decode_body(bodies.ConsumerOffsets, text) == bodies.ConsumerOffsets(
        data_version=bodies.DataVersion(counter=3, timestamp=5),
        offset_table={"T@g": {0: 5, 1: 7}, "%RETRY%g@g": {0: 0}},
    )


def test_standard_json_is_written_unless_an_old_reader_needs_bare_keys():
    standard = encode_body(ROUTE)

    assert standard == ROUTE_START + QUOTED_ADDRS + ROUTE_REST
    assert json.loads(standard)["brokerDatas"][0]["brokerAddrs"]["1"] == "1.2.3.5:10911"
    assert encode_body(ROUTE, bare_integer_keys=True) == ROUTE_START + BARE_ADDRS + ROUTE_REST


#: Shapes as Java emits them, and what they mean.
CATALOGUE: list[tuple[Body, bytes]] = [
    (
        bodies.ConsumeStats(offset_table={QUEUE: bodies.QueueProgress(broker_offset=5)}),
        b'{"consumeTps":0.0,"offsetTable":{' + QUEUE_JSON + b':{"brokerOffset":5,'
        b'"consumerOffset":0,"lastTimestamp":0,"pullOffset":0}}}',
    ),
    (bodies.TopicStats(), b'{"offsetTable":{},"topicPutTps":0.0}'),
    (bodies.ResetOffsets(offset_table={QUEUE: 5}), b'{"offsetTable":{' + QUEUE_JSON + b":5}}"),
    (
        bodies.ResetOffsetList(
            offset_table=(bodies.QueueOffset(broker_name="b", offset=5, queue_id=0, topic="T"),)
        ),
        b'{"offsetTable":[{"brokerName":"b","offset":5,"queueId":0,"topic":"T"}]}',
    ),
    (
        bodies.ConsumerStatus(consumer_table={"c": {QUEUE: 5}}, message_queue_table={}),
        b'{"consumerTable":{"c":{' + QUEUE_JSON + b':5}},"messageQueueTable":{}}',
    ),
    (bodies.ConsumerList(consumer_id_list=("id1", "id2")), b'{"consumerIdList":["id1","id2"]}'),
    (
        bodies.LockBatch(client_id="c", consumer_group="g", mq_set=(QUEUE,)),
        b'{"clientId":"c","consumerGroup":"g","mqSet":['
        + QUEUE_JSON
        + b'],"onlyThisBroker":false}',
    ),
    (bodies.LockedQueues(lock_ok_mq_set=(QUEUE,)), b'{"lockOKMQSet":[' + QUEUE_JSON + b"]}"),
    (
        bodies.TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4),
        (
            b'{"attributes":{},"order":false,"perm":6,"readQueueNums":4,"topicFilterType":'
            b'"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":4}'
        ),
    ),
    (
        bodies.SubscriptionGroupConfig(group_name="g"),
        (
            b'{"attributes":{},"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,'
            b'"consumeFromMinEnable":true,"consumeMessageOrderly":false,"consumeTimeoutMinute":15,'
            b'"groupName":"g","groupRetryPolicy":{"type":"CUSTOMIZED"},"groupSysFlag":0,'
            b'"notifyConsumerIdsChangedEnable":true,"retryMaxTimes":16,"retryQueueNums":1,'
            b'"whichBrokerWhenConsumeSlowly":1}'
        ),
    ),
    (
        bodies.ConsumerRunningInfo(mq_table={QUEUE: bodies.ProcessQueueInfo()}),
        b'{"mqPopTable":{},"mqTable":{' + QUEUE_JSON + b':{"cachedMsgCount":0,'
        b'"cachedMsgMaxOffset":0,"cachedMsgMinOffset":0,"cachedMsgSizeInMiB":0,"commitOffset":0,'
        b'"droped":false,"lastConsumeTimestamp":0,"lastLockTimestamp":0,"lastPullTimestamp":0,'
        b'"locked":false,"transactionMsgCount":0,"transactionMsgMaxOffset":0,'
        b'"transactionMsgMinOffset":0,"tryUnlockTimes":0}},"properties":{},"statusTable":{},'
        b'"subscriptionSet":[],"userConsumerInfo":{}}',
    ),
    (
        bodies.ConsumeDirectlyResult(consume_result=bodies.ConsumeResult.CR_SUCCESS, remark="r"),
        (
            b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,"remark":"r",'
            b'"spentTimeMills":0}'
        ),
    ),
    (
        bodies.BrokerStatsData(),
        (
            b'{"statsDay":{"avgpt":0.0,"sum":0,"tps":0.0},"statsHour":{"avgpt":0.0,"sum":0,"tps":0.0},'
            b'"statsMinute":{"avgpt":0.0,"sum":0,"tps":0.0}}'
        ),
    ),
]


@pytest.mark.parametrize(
    ("body", "text"), CATALOGUE, ids=[type(body).__name__ for body, _ in CATALOGUE]
)
def test_bodies_have_the_shape_that_java_gives_them(body, text):
    assert encode_body(body) == text
    assert decode_body(type(body), text) == body


def test_cluster_information_is_read_with_the_bare_keys_apache_always_writes():
    text = (
        b'{"brokerAddrTable":{"b":{"brokerAddrs":{0:"1.2.3.4:10911"},"brokerName":"b",'
        b'"cluster":"C","enableActingMaster":false}},"clusterAddrTable":{"C":["b"]}}'
    )

    cluster = decode_body(bodies.ClusterInfo, text)

    assert cluster.broker_addr_table["b"].broker_addrs == {0: "1.2.3.4:10911"}
    assert encode_body(cluster, bare_integer_keys=True) == text


def test_a_heartbeat_of_a_cpp_client_means_the_same_as_that_of_a_java_client():
    cpp = (
        b'{"clientID":"1@one","consumerDataSet":[{"consumeFromWhere":0,"consumeType":1,'
        b'"groupName":"g","messageModel":1,"subscriptionDataSet":[{"subString":"*",'
        b'"subVersion":"1794737880007","topic":"T"}]}]}\n'
    )
    java = (
        b'{"clientID":"1@one","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        b'"consumeType":"CONSUME_PASSIVELY","groupName":"g","messageModel":"CLUSTERING",'
        b'"subscriptionDataSet":[{"classFilterMode":false,"codeSet":[],"expressionType":"TAG",'
        b'"subString":"*","subVersion":1794737880007,"tagsSet":[],"topic":"T"}],"unitMode":false}],'
        b'"heartbeatFingerprint":0,"producerDataSet":[],"withoutSub":false}'
    )
    meant = bodies.HeartbeatData(
        client_id="1@one",
        consumer_data_set=(
            bodies.ConsumerData(
                group_name="g",
                consume_from_where=bodies.ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
                consume_type=bodies.ConsumeType.CONSUME_PASSIVELY,
                message_model=bodies.MessageModel.CLUSTERING,
                subscription_data_set=(
                    bodies.SubscriptionData(topic="T", sub_string="*", sub_version=1794737880007),
                ),
            ),
        ),
    )

    assert decode_body(bodies.HeartbeatData, cpp) == meant
    assert decode_body(bodies.HeartbeatData, java) == meant
    assert encode_body(meant) == java


def test_a_repeated_object_is_found_through_its_reference():
    text = b'{"lockOKMQSet":[' + QUEUE_JSON + b',{"$ref":"$.lockOKMQSet[0]"}]}'

    assert decode_body(bodies.LockedQueues, text).lock_ok_mq_set == (QUEUE, QUEUE)


def test_a_reference_is_never_taken_for_an_object_without_fields():
    text = (
        b'{"dataVersion":{"counter":7,"stateVersion":0,"timestamp":9},'
        b'"mappingDataVersion":{"$ref":"$.dataVersion"},"topicConfigTable":{}}'
    )

    table = decode_body(bodies.TopicConfigTable, text)

    assert table.mapping_data_version == bodies.DataVersion(counter=7, timestamp=9)


def test_references_cannot_make_a_small_body_large():
    width = 300
    inner = ",".join(['{"$ref":"$.consumeStatsList[0].g[0]"}'] * width)
    lists = ",".join(['{"$ref":"$.consumeStatsList[0]"}'] * width)
    text = f'{{"consumeStatsList":[{{"g":[{{}},{inner}]}},{lists}]}}'.encode()
    kind = next(kind for kind in BODIES if kind.__name__ == "ConsumeStatsList")

    with pytest.raises(BodyError, match="more by references"):
        decode_body(kind, text, WireLimits(body_values=20_000))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "'(all)' must be an object, got an array"),
        (b'{"consumerDataSet":[]}', "'clientID' must be present"),
        (b'{"clientID":"c","consumerDataSet":5}', "'consumerDataSet' must be an array, got 5"),
        (
            b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":9}]}',
            "'consumerDataSet.[0].consumeType' must be one of CONSUME_ACTIVELY",
        ),
        (
            b'{"clientID":"c","heartbeatFingerprint":"x"}',
            "'heartbeatFingerprint' must be an integer",
        ),
        (b'{"clientID":{"a":1}}', "'clientID' must be a string, got an object"),
        (b"[" * 100_000, "more than 64 levels"),
    ],
)
def test_a_wrong_body_says_where_and_what_is_allowed(text, problem):
    with pytest.raises(BodyError) as caught:
        decode_body(bodies.HeartbeatData, text)

    assert caught.value.body == "HeartbeatData"
    assert problem in str(caught.value)


@pytest.mark.parametrize("key", [b'"x"', b'"{}"', b'{"topic":"T"}', b"5", b'"{"'])
def test_a_key_that_is_no_queue_is_refused(key):
    with pytest.raises(BodyError):
        decode_body(bodies.ResetOffsets, b'{"offsetTable":{' + key + b":5}}")


@settings(max_examples=300)
@given(
    st.sampled_from([text for _, text in CATALOGUE] + [ROUTE_START + BARE_ADDRS + ROUTE_REST]),
    st.floats(0, 1, exclude_max=True),
    st.binary(max_size=3),
    st.sampled_from(BODIES),
)
def test_mutated_bodies_raise_only_body_errors(text, where, change, kind):
    at = int(where * len(text))
    try:
        body = decode_body(kind, text[:at] + change + text[at + 1 :])
    except BodyError:
        return

    assert decode_body(kind, encode_body(body)) == body
