"""The options of the source: what they become, and how a wrong one is refused."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from orbitmq.client.ranges.connections import RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.spark.options import (
    AtOffset,
    AtOffsets,
    AtTimes,
    BeforeEnd,
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
        ({"startingOffsets": "first"}, Earliest()),
        ({"startingOffsets": "1500"}, AtOffset(1500)),
        (
            {"startingOffsets": "1970-01-01T00:00Z"},
            AtTimes("startingOffsets", OnNoMatch.LATEST, 0.0),
        ),
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
            {"startingTimestamp": "2023-11-14T22:13:20Z"}
            | {"startingOffsetsByTimestamp": '{"orders": {"broker-a:0": 6}}'}
            | {"startingOffsets": "earliest"},
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


@pytest.mark.feature("T3")
@pytest.mark.parametrize("age", ["-1h", "60m", "-3600s"])
@pytest.mark.parametrize("side", ["starting", "ending"])
@pytest.mark.parametrize("option", ["Timestamp", "Offsets"])
def test_an_age_counts_back_from_now(side, option, age):
    before = time.time()

    found = batch_options(LEAST | {side + option: age}, {})

    place = found.read.start if side == "starting" else found.end
    assert isinstance(place, AtTimes)
    assert place.time is not None
    assert before - 3600 <= place.time <= time.time() - 3600
    assert place.is_relative
    # A quiet queue has nothing that young, which is no mistake.
    assert place.on_no_match is OnNoMatch.LATEST


def test_a_strategy_for_queues_without_young_messages_holds_for_ages_too():
    strategy = {"startingOffsetsByTimestampStrategy": "error"}

    found = stream_start(startingTimestamp="-1h", **strategy)

    assert isinstance(found, AtTimes)
    assert found.on_no_match is OnNoMatch.ERROR


@pytest.mark.feature("T3")
def test_a_negative_number_counts_back_from_the_end():
    found = batch_options(LEAST | {"startingOffsets": "-1000", "endingOffsets": "-10"}, {})

    assert (found.read.start, found.end) == (BeforeEnd(1000), BeforeEnd(10))


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("64m", 64 << 20), ("2 GB", 2 << 30), ("10kb", 10240), ("7b", 7)]
)
def test_a_size_is_bytes_or_has_a_unit(text, size):
    assert stream_options(LEAST | {"maxBytesPerTrigger": text}, {}).max_bytes == size


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
    "a bad topic": ({"subscribe": "a/b"}, "'subscribe' must be the name of a topic"),
    "a bad group": ({"group": "a b"}, "'group' must be the name of a group"),
    "a bad prefix": ({"groupPrefix": "a b"}, "'groupPrefix' must be the name of a group"),
    "no time": ({"startingTimestamp": "soon"}, "'startingTimestamp' must be milliseconds"),
    "no zone": ({"startingTimestamp": "2026-11-15T08:00:00"}, "ISO time with its zone"),
    "no age": ({"startingTimestamp": "-1 week"}, "or an age such as -1h; got '-1 week'"),
    "the end in JSON only": ({"startingOffsets": "-1"}, "or -3 and below; got '-1'"),
    "no size": ({"maxBytesPerTrigger": "64q"}, "must be bytes from 1 up, such as 67108864 or 64m"),
    "more rows than a batch": (
        {"minRowsPerTopic": "9", "maxOffsetsPerTrigger": "8"},
        "'minRowsPerTopic' must be at most maxOffsetsPerTrigger, which is 8",
    ),
    "no strategy": (
        {"startingOffsetsByTimestampStrategy": "guess"},
        "must be one of error, latest; got 'guess'",
    ),
    "no JSON": ({"startingOffsets": '{"orders"'}, "'startingOffsets' must be a JSON object"),
    "no queue": ({"startingOffsets": '{"orders": {"0": 5}}'}, "a queue is named broker:id"),
    "no offset": ({"startingOffsets": '{"orders": {"a:0": "5"}}'}, "offsets from -2 up"),
    "too small": ({"startingOffsets": '{"orders": {"a:0": -3}}'}, "offsets from -2 up"),
    "the group of nobody": ({"startingOffsets": "group"}, "'group' must be given when"),
    "an end nowhere": ({"endingOffsets": "earliest"}, "'endingOffsets' must be latest, a time"),
    "a batch from the end": ({"startingOffsets": "latest"}, "in a batch read"),
    "a queue from its end": ({"startingOffsets": '{"orders": {"a:0": -1}}'}, "in a batch read"),
    "backwards": ({"fromOffset": "9", "toOffset": "8"}, "'fromOffset' must be at most toOffset"),
    "no number": ({"minPartitions": "many"}, "'minPartitions' must be a whole number from 1 up"),
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
        ({"endingOffsets": "latest"}, "must be left out of a stream: it is for batch reads; got"),
        ({"queues": "1"}, "must be left out of a stream: it is for batch reads; got '1'"),
        (
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "'minOffsetsPerTrigger' must be at most maxOffsetsPerTrigger, which is 8; got '9'",
        ),
    ],
)
def test_an_option_that_cannot_work_in_a_stream_is_refused(options, words):
    with pytest.raises(OptionRefused, match=words):
        stream_options(LEAST | options, {})


@pytest.mark.parametrize(
    ("options", "group", "commits"),
    [
        ({}, "TOOLS_CONSUMER", False),  # a group that every broker has
        ({"group": "g"}, "g", True),
        ({"group": "g", "commitProgress": "false"}, "g", False),
    ],
)
def test_offsets_are_committed_for_a_named_group(options, group, commits):
    found = stream_options(LEAST | options, {})

    assert (found.read.group, found.commit_progress) == (group, commits)
    assert found.read.has_own_group == ("group" in options)


def test_a_group_by_prefix_is_the_same_for_the_same_subscription():
    one, again = read(groupPrefix="mine"), read(groupPrefix="mine")
    other = read(groupPrefix="mine", subscribe="invoices")

    assert one.group == again.group != other.group
    assert one.group.startswith("mine-")
    assert not one.has_own_group


def test_an_option_for_streams_has_no_effect_on_a_batch_read_and_is_logged(caplog):
    given = LEAST | {"maxOffsetsPerTrigger": "5"}

    assert batch_options(given, {}) == batch_options(LEAST, {})
    assert caplog.messages == ["option maxOffsetsPerTrigger has no effect here: it is for a stream"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"failOnDataLoss": "maybe"},
        {"startingOffsets": "middle"},
        {"minPartitions": "0"},
        {"badRows": "perhaps"},
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
    ("option", "said"),
    [
        ("maxBytePerTrigger", "unknown option 'maxbytepertrigger'; did you mean maxBytesPerTrig"),
        ("FAILONDATALOS", "unknown option 'failondatalos'; did you mean failOnDataLoss"),
        ("tags", "unknown option 'tags'; did you mean subExpression"),
        ("namesrvAddr", "did you mean nameServer"),
        ("kafka.bootstrap.servers", "kafka.bootstrap.servers'; did you mean nameServer"),
        ("secretKy", "did you mean secretKey.$"),  # its value is not shown
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
