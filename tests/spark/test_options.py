"""The options of the source: what they become, and how a wrong one is refused."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest

from orbitmq.client.ranges.connections import RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.spark.options import (
    AtOffsets,
    AtTimes,
    Earliest,
    GroupProgress,
    Latest,
    OffsetSpec,
    OnNoMatch,
    OptionRefused,
    OptionUnknown,
    ReadOptions,
    Subscription,
    batch_options,
    include_properties,
    stream_options,
    write_options,
)

LEAST = {"nameServer": "localhost:9876", "subscribe": "orders"}
QUEUE = Queue("orders", "broker-a", 0)


def read(**options: str) -> ReadOptions:
    return batch_options(LEAST | options, {}).read


def stream_start(**options: str) -> OffsetSpec:
    return stream_options(LEAST | options, {}).read.start


def test_defaults():
    batch, stream = batch_options(LEAST, {}), stream_options(LEAST, {})

    assert batch.read.access.name_servers == ("localhost:9876",)
    assert batch.read.access.timeout == 3.0
    assert (batch.read.start, batch.end) == (Earliest(), Latest())
    assert stream.read.start == Latest()
    assert batch.read.wanted == RangeFilter("*", "TAG")
    assert batch.read.fail_on_data_loss
    assert not stream.commit_progress
    assert (stream.max_offsets, stream.min_offsets, stream.max_delay) == (None, None, 900.0)
    assert (batch.read.offset_retries, batch.read.offset_pause) == (3, 0.01)
    assert include_properties(LEAST)


def test_names_are_compared_without_case():
    found = batch_options({"NAMESERVER": "a:1", "Topic": "x", "MINPARTITIONS": "7"}, {})

    assert found.read.subscription == Subscription(topics=("x",))
    assert found.read.min_partitions == 7


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": "a, b,a"}, Subscription(topics=("a", "b"))),
        ({"topic": "a"}, Subscription(topics=("a",))),
        ({"subscribePattern": "ord.*"}, Subscription(pattern="ord.*")),
        (
            {"assign": '{"orders": ["broker-b:1", "broker-a:0"]}'},
            Subscription(queues=(QUEUE, Queue("orders", "broker-b", 1))),
        ),
    ],
)
def test_topics_are_named_in_one_of_three_ways(options, expected):
    assert batch_options({"nameServer": "a:1"} | options, {}).read.subscription == expected


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({}, "none is given"),
        ({"subscribe": "a", "subscribePattern": "b"}, "subscribe and subscribePattern are given"),
        ({"topic": "a", "subscribe": "a"}, "subscribe and topic are given"),
    ],
    ids=["none", "two ways", "alias and name"],
)
def test_topics_have_to_be_named_in_exactly_one_way(options, got):
    said = r"say which topics to read, with one of the options subscribe \(or topic\), "

    with pytest.raises(OptionRefused, match=f"{said}subscribePattern and assign; {got}") as refused:
        batch_options({"nameServer": "a:1"} | options, {})

    again = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  # our own
    assert str(again) == str(refused.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": "earliest"}, Earliest()),
        ({"startingOffsets": "LATEST"}, Latest()),
        ({"startingOffsets": "group", "group": "g"}, GroupProgress()),
        (
            {"startingOffsets": '{"orders": {"broker-a:0": -2}}'},
            AtOffsets({QUEUE: -2}, "startingOffsets"),
        ),
        (
            {"startingTimestamp": "1700000000123"},
            AtTimes("startingTimestamp", OnNoMatch.ERROR, time=1_700_000_000.123),
        ),
        (
            {"startingTimestamp": "2023-11-14T22:13:20Z", "startingOffsets": "earliest"},
            AtTimes("startingTimestamp", OnNoMatch.ERROR, time=1_700_000_000),
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"orders": {"broker-a:0": "1970-01-01T00:00Z"}}',
                "startingOffsetsByTimestampStrategy": "latest",
            },
            AtTimes("startingOffsetsByTimestamp", OnNoMatch.LATEST, times={QUEUE: 0.0}),
        ),
    ],
)
def test_a_start_can_be_said_in_many_ways(options, expected):
    assert stream_start(**options) == expected


def test_a_time_for_all_wins_over_times_and_offsets():
    found = stream_start(
        startingTimestamp="5",
        startingOffsetsByTimestamp='{"orders": {"broker-a:0": 6}}',
        startingOffsets="earliest",
    )

    assert found == AtTimes("startingTimestamp", OnNoMatch.ERROR, time=0.005)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"endingOffsets": "latest"}, Latest()),
        (
            {"endingOffsets": '{"orders": {"broker-a:0": -1}}'},
            AtOffsets({QUEUE: -1}, "endingOffsets"),
        ),
        ({"endingTimestamp": "7000"}, AtTimes("endingTimestamp", OnNoMatch.LATEST, time=7.0)),
        (
            {"endingOffsetsByTimestamp": '{"orders": {"broker-a:0": 9}}'},
            AtTimes("endingOffsetsByTimestamp", OnNoMatch.LATEST, times={QUEUE: 0.009}),
        ),
    ],
)
def test_an_end_can_be_said_in_many_ways(options, expected):
    assert batch_options(LEAST | options, {}).end == expected


#: Options that cannot work, and a part of what is said about them.
REFUSED: Mapping[str, tuple[dict[str, str], str]] = {
    "no name server": ({"nameServer": ""}, "'nameServer' must be host:port"),
    "no host": ({"nameServer": ":9876"}, "'nameServer' must be host:port .*':9876'"),
    "nothing between": ({"nameServer": ";"}, "'nameServer' must be host:port"),
    "a bad topic": ({"subscribe": "a/b"}, "'subscribe' must be the name of a topic"),
    "a bad group": ({"group": "a b"}, "'group' must be the name of a group"),
    "a bad prefix": ({"groupPrefix": "a b"}, "'groupPrefix' must be the name of a group"),
    "no time": ({"startingTimestamp": "soon"}, "'startingTimestamp' must be milliseconds"),
    "no zone": ({"startingTimestamp": "2026-11-15T08:00:00"}, "ISO time with its zone"),
    "a time too far": ({"startingTimestamp": "9" * 15}, "'startingTimestamp' must be"),
    "a negative time": ({"startingTimestamp": "-5"}, "'startingTimestamp' must be"),
    "no strategy": (
        {"startingOffsetsByTimestampStrategy": "guess"},
        "must be one of error, latest; got 'guess'",
    ),
    "no place": ({"startingOffsets": "middle"}, "earliest, latest, group or JSON; got 'middle'"),
    "no JSON": ({"startingOffsets": '{"orders"'}, "'startingOffsets' must be a JSON object"),
    "no queue": ({"startingOffsets": '{"orders": {"0": 5}}'}, "a queue is named broker:id"),
    "no offset": ({"startingOffsets": '{"orders": {"a:0": "5"}}'}, "offsets from -2 up"),
    "too small": ({"startingOffsets": '{"orders": {"a:0": -3}}'}, "offsets from -2 up"),
    "a queue twice": ({"startingOffsets": '{"orders": {"a:0": 1, "a:0": 2}}'}, "every name once"),
    "no object": ({"startingOffsets": '{"orders": [1]}'}, "'startingOffsets' must be"),
    "the group of nobody": ({"startingOffsets": "group"}, "'group' must be given when"),
    "an earliest end": ({"endingOffsets": '{"orders": {"a:0": -2}}'}, "offsets from -1 up"),
    "an end nowhere": ({"endingOffsets": "earliest"}, "'endingOffsets' must be latest or JSON"),
    "a batch from the end": ({"startingOffsets": "latest"}, "in a batch read"),
    "a queue from its end": ({"startingOffsets": '{"orders": {"a:0": -1}}'}, "in a batch read"),
    "backwards": ({"fromOffset": "9", "toOffset": "8"}, "'toOffset' must be at least fromOffset"),
    "no number": ({"minPartitions": "many"}, "'minPartitions' must be a whole number from 1 up"),
    "zero": ({"maxRecordsPerPartition": "0"}, "must be a whole number from 1 up; got '0'"),
    "a giant": ({"minPartitions": "9" * 19}, "'minPartitions' must be a whole number"),
    "no flag": ({"failOnDataLoss": "maybe"}, "'failOnDataLoss' must be one of true, false"),
    "half a key": ({"accessKey": "me"}, "'secretKey' must be given with the other"),
    "a key without its certificate": ({"tls.key": "k.pem"}, "'tls.certificate' must be given"),
    "a type of filter": ({"subExpressionType": "XPATH"}, "must be one of TAG, SQL92"),
    "no condition": ({"subExpressionType": "SQL92"}, "'subExpression' must be a condition"),
    "no tag": ({"subExpression": "||"}, "'subExpression' must be tags"),
    "a condition that is none": (
        {"subExpressionType": "SQL92", "subExpression": "a >"},
        r"'subExpression' must be a condition in SQL92 [\s\S]*; got 'a >'",
    ),
    "a slip of the pen": (
        {"startingOffset": "earliest"},
        "'startingoffset'; did you mean startingOffsets.$",
    ),
    "a slip in another's": ({"maxOffsetPerTrigger": "9"}, "did you mean maxOffsetsPerTrigger"),
    "an end before its start": (
        {
            "startingOffsets": '{"orders": {"a:0": 50, "a:1": 0}}',
            "endingOffsets": '{"orders": {"a:0": 10, "a:1": 0}}',
        },
        "'endingOffsets' must be at least startingOffsets, which is 50 there; got '10 for orders@a",
    ),
    "a limit of streams": (
        {"maxOffsetsPerTrigger": "abc"},
        "'maxOffsetsPerTrigger' must be a whol",
    ),
    "a delay of streams": ({"maxTriggerDelay": "soon"}, "'maxTriggerDelay' must be a number and"),
    "rows of writes": ({"badRows": "perhaps"}, "'badRows' must be one of fail, skip"),
    "offsets beside a time": (
        {"startingTimestamp": "5", "startingOffsets": "middle"},
        "'startingOffsets' must be earliest",
    ),
    "a pattern": ({"subscribe": "", "subscribePattern": "("}, "must be a regular expression"),
    "no assignment": ({"subscribe": "", "assign": "{}"}, "with at least one queue"),
    "a bad assignment": ({"subscribe": "", "assign": '{"t": "a:0"}'}, "'assign' must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_option_is_named_with_what_is_allowed(name):
    options, words = REFUSED[name]

    with pytest.raises(OptionRefused, match=words):
        batch_options(LEAST | options, {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"commitProgress": "true"}, "'commitProgress' must be false without the option 'group'"),
        ({"maxTriggerDelay": "15 fortnights"}, "'maxTriggerDelay' must be a number and a unit"),
        (
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "'minOffsetsPerTrigger' must be at most maxOffsetsPerTrigger, which is 8; got '9'",
        ),
    ],
)
def test_a_wrong_option_of_a_stream_is_named(options, words):
    with pytest.raises(OptionRefused, match=words):
        stream_options(LEAST | options, {})


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900), ("500ms", 0.5), ("1.5 h", 5400), ("2D", 172_800)]
)
def test_durations_have_units(text, seconds):
    assert stream_options(LEAST | {"maxTriggerDelay": text}, {}).max_delay == seconds


def test_progress_is_told_when_a_group_is_named():
    assert stream_options(LEAST | {"group": "g"}, {}).commit_progress
    assert not stream_options(LEAST | {"group": "g", "commitProgress": "false"}, {}).commit_progress


def test_a_read_without_a_group_goes_by_one_that_every_broker_has():
    assert read().group == "TOOLS_CONSUMER"
    assert not read().has_own_group
    assert not stream_options(LEAST, {}).commit_progress


def test_a_name_is_made_up_for_who_gives_a_prefix_the_same_for_each_subscription():
    one, again = read(groupPrefix="mine"), read(groupPrefix="mine")
    other = read(groupPrefix="mine", subscribe="invoices")

    assert one.group == again.group != other.group
    assert one.group.startswith("mine-")
    assert not one.has_own_group


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("maxOffsetsPerTrigger", "5"),
        ("minOffsetsPerTrigger", "5"),
        ("maxTriggerDelay", "5m"),
        ("commitProgress", "true"),
    ],
)
def test_what_is_for_streams_has_no_effect_on_a_batch_and_is_warned_of(caplog, option, text):
    assert batch_options(LEAST | {option: text}, {}) == batch_options(LEAST, {})

    assert caplog.messages == [f"option {option} has no effect here: it is for a stream"]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("endingOffsets", "latest"),
        ("endingTimestamp", "2023-11-14T22:13:20Z"),
        ("endingOffsetsByTimestamp", '{"orders": {"broker-a:0": 9}}'),
        ("queues", "1"),
        ("fromOffset", "7"),
        ("toOffset", "9"),
    ],
)
def test_a_stream_refuses_what_would_restrict_a_batch(caplog, option, text):
    words = f"option '{option}' must be left out of a stream: it is for batch reads; got"

    with pytest.raises(OptionRefused, match=words):
        stream_options(LEAST | {option: text}, {})
    assert not caplog.messages


@pytest.mark.parametrize(
    "wrong",
    [
        {"failOnDataLoss": "maybe"},
        {"startingOffsets": "middle"},
        {"endingOffsets": "earliest"},
        {"minPartitions": "0"},
        {"maxOffsetsPerTrigger": "abc"},
        {"pullTimeoutMs": "soon"},
        {"metadata.cache.ttl.ms": "-2"},
        {"group": "a b"},
        {"sendTimeoutMs": "-1"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_value_that_nothing_can_use_is_refused_wherever_it_is_given(wrong):
    (option,) = wrong

    for options in (batch_options, stream_options):
        with pytest.raises(OptionRefused, match=f"option '{option}' must be"):
            options(LEAST | wrong, {})
    with pytest.raises(OptionRefused, match=f"option '{option}' must be"):
        write_options({"nameServer": "a:1", "topic": "orders"} | wrong, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nameServer": "b:1", "namesrvAddr": "a:1"}, "did you mean nameServer"),
        ({"kafka.bootstrap.servers": "a:1"}, "kafka.bootstrap.servers'; did you mean nameServer"),
        ({"namesrvAddr": "a:1"}, "did you mean nameServer"),
        ({"nameServer": "a:1", "kafka.group.id": "billing"}, "did you mean group"),
    ],
)
def test_the_names_that_others_have_for_an_option_are_refused_with_ours(options, said):
    for environment in ({}, {"ORBITMQ_NAME_SERVER": "b:1"}):
        with pytest.raises(OptionUnknown, match=said):
            stream_options({"subscribe": "a"} | options, environment)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("maxBytesPerTrigger", "unknown option 'maxbytespertrigger'; did you mean maxOffsetsPerTr"),
        ("FAILONDATALOS", "unknown option 'failondatalos'; did you mean failOnDataLoss"),
        ("tags", "unknown option 'tags'; did you mean subExpression"),
        ("colour", "unknown option 'colour'; there are nameServer, "),
    ],
)
def test_unknown_options_are_refused_in_every_kind_of_query(option, said):
    with pytest.raises(OptionUnknown, match=said):
        batch_options(LEAST | {option: "1"}, {})
    with pytest.raises(OptionUnknown, match=said):
        stream_options(LEAST | {option: "1"}, {})
    with pytest.raises(OptionUnknown, match=said) as refused:
        write_options({"nameServer": "a:1", option: "1"}, {})

    again = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  # our own
    assert str(again) == str(refused.value)


def test_what_spark_gives_for_itself_is_no_unknown_option(caplog):
    given = {"checkpointLocation": "file:/x", "PATH": "x", "queryName": "q", "__partition": "[]"}

    stream_options(LEAST | given, {})
    write_options({"nameServer": "a:1", "topic": "orders"} | given, {})

    assert not caplog.messages


SECRETS = {
    "ORBITMQ_ACCESS_KEY": "reader",
    "ORBITMQ_SECRET_KEY": "hidden-secret",
    "ORBITMQ_SECURITY_TOKEN": "hidden-token",
    "ORBITMQ_TLS_KEY_PASSWORD": "hidden-password",
}


def test_secrets_come_from_the_environment_and_are_in_no_text():
    tls = {"tls.authority": "ca.pem", "tls.certificate": "me.pem", "tls.key": "me.key"}
    options = batch_options(LEAST | tls, SECRETS)
    access = options.read.access

    assert access.credentials is not None
    assert access.credentials.secret_key == SECRETS["ORBITMQ_SECRET_KEY"]
    assert access.credentials.security_token == SECRETS["ORBITMQ_SECURITY_TOKEN"]
    assert access.tls is not None
    assert access.tls.authority == Path("ca.pem")
    assert access.tls.key_password == SECRETS["ORBITMQ_TLS_KEY_PASSWORD"]
    assert "hidden" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301  # our own


def test_an_option_wins_over_the_environment():
    environment = {"ORBITMQ_NAME_SERVER": "elsewhere:1"} | SECRETS
    options = LEAST | {"accessKey": "writer", "secretKey": "other"}

    access = write_options(options | {"topic": "orders"}, environment).access
    assert access.name_servers == ("localhost:9876",)
    assert access.credentials is not None
    assert access.credentials.access_key == "writer"
    found = batch_options({"subscribe": "a"}, environment).read.access
    assert found.name_servers == ("elsewhere:1",)


def test_a_misspelt_secret_is_not_shown():
    with pytest.raises(OptionRefused) as raised:
        batch_options(LEAST | {"secretKy": "hidden"}, {})

    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"tls.enabled": "false", "tls.authority": "x"}, None),
        ({"tls.enabled": "true"}, (None, True, True)),
        ({"tls.authority": "x"}, (Path("x"), True, True)),
        ({"tls.verify": "false", "tls.verifyHost": "false"}, (None, False, False)),
    ],
)
def test_tls_is_spoken_when_anything_is_said_about_it(given, expected):
    tls = read(**given).access.tls

    assert (tls and (tls.authority, tls.verify, tls.verify_host)) == expected


def test_errors_survive_the_way_from_a_worker():
    error = OptionRefused("group", "a b", "a name")

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own

    assert (str(copy), copy.option, copy.value) == (str(error), "group", "a b")
    with pytest.raises(OptionRefused) as raised:
        batch_options(LEAST | {"startingOffset": "earliest"}, {})
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # noqa: S301
    assert "missing" not in str(raised.value)
