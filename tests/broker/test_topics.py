"""Topics: what there is from the start, what sending makes, what administration may do."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.config import ConfigFile
from orbitmq.broker.errors import Refused, check_topic
from orbitmq.broker.topics import (
    PageRequest,
    TopicSettings,
    TopicTable,
    parse_changes,
    version_text,
)
from orbitmq.wire.bodies import DataVersion, TopicConfig, TopicConfigTable
from orbitmq.wire.codes import ResponseCode

NOW = 1_700_000_000.0


def table(**settings: object) -> TopicTable:
    return TopicTable(TopicSettings(**settings), now=NOW)  # type: ignore[arg-type]  # by name


def config(topic: str, queues: int = 4, **fields: object) -> TopicConfig:
    return msgspec.structs.replace(
        TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues), **fields
    )


# From the start.


def test_a_broker_has_apaches_system_topics_from_the_start():
    found = {
        each.topic_name: (each.read_queue_nums, each.write_queue_nums, each.perm)
        for each in table()
    }

    # To read is 4, to write 2, and to be inherited 1.
    assert found == {
        "SELF_TEST_TOPIC": (1, 1, 6),
        "TBW102": (8, 8, 7),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
        "rmq_sys_REVIVE_LOG_DefaultCluster": (8, 8, 6),
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a": (1, 1, 1),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, 1, 6),
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, 1, 6),
        "rmq_sys_wheel_timer": (1, 1, 6),
    }


# Names.


@given(st.text(min_size=1, max_size=50).filter(lambda text: not text.isascii() or "." in text))
def test_a_name_that_is_not_allowed_is_refused(name):
    with pytest.raises(Refused) as refusal:
        check_topic(name)

    assert refusal.value.code == ResponseCode.INVALID_PARAMETER


# Sending.


@pytest.mark.parametrize(("wanted", "made"), [(4, 4), (8, 8), (16, 8), (0, 0), (-3, 0)])
def test_sending_makes_a_topic_like_the_template(wanted, made):
    topics = table()

    topic = topics.for_send("T", template="TBW102", queues=wanted, now=NOW + 1)

    assert topic == config("T", made, perm=6)
    assert topics.get("T") == topic
    assert topics.take_changed() == {"T"}
    assert (topics.data_version.counter, topics.data_version.timestamp) == (1, 1_700_000_001_000)


@pytest.mark.parametrize("template", ["missing", "BenchmarkTest"])
def test_without_a_template_to_inherit_from_nothing_is_made(template):
    topics = table()

    with pytest.raises(Refused, match="orbitmq topic create T") as refusal:
        topics.for_send("T", template=template, queues=4, now=NOW)

    assert refusal.value.code == ResponseCode.TOPIC_NOT_EXIST
    assert "T" not in topics


def test_auto_creation_that_was_turned_off_stays_off_with_an_old_file():
    topics = table(auto_create=False)
    topics.load(table().file())
    assert "TBW102" in topics

    with pytest.raises(Refused):
        topics.for_send("T", template="TBW102", queues=4, now=NOW)


@pytest.mark.parametrize("topic", ["T", "%RETRY%stranger"])
def test_from_a_number_of_topics_on_sending_makes_no_more(topic):
    topics = table(max_auto=len(table()) + 1)
    topics.for_send("U", template="TBW102", queues=4, now=NOW)

    with pytest.raises(Refused, match="max_auto_topics") as refusal:
        topics.for_send(topic, template="TBW102", queues=4, now=NOW)

    # No user creates the retry topic of a group.
    assert ("orbitmq topic create T" in str(refusal.value)) is (topic == "T")
    assert refusal.value.code == ResponseCode.TOPIC_NOT_EXIST
    assert topic not in topics
    # What is there, what groups need and what administration makes is not meant.
    assert topics.for_send("U", template="TBW102", queues=4, now=NOW).topic_name == "U"
    topics.ensure_retry("g", 1, now=NOW)
    topics.ensure_dead_letter("g", now=NOW)
    topics.update(config("V", 2), now=NOW)
    assert {"%RETRY%g", "%DLQ%g", "V"} <= {each.topic_name for each in topics}


# What groups need.


def test_a_groups_topics_are_made_once():
    topics = table()

    assert topics.ensure_retry("g", 2, now=NOW) == config("%RETRY%g", 2)
    assert topics.ensure_dead_letter("g", now=NOW) == config("%DLQ%g", 1)
    version = topics.data_version
    assert topics.ensure_retry("g", 5, now=NOW) == config("%RETRY%g", 2)
    assert topics.ensure_dead_letter("g", now=NOW) == config("%DLQ%g", 1)
    assert topics.data_version == version


# Administration.


def test_a_topic_has_no_more_queues_than_the_setting_allows():
    topics = table(max_queues=32)

    largest = topics.update(config("T", 32), now=NOW)
    retry = topics.ensure_retry("g", 2**31 - 1, now=NOW)

    assert largest.read_queue_nums == 32
    assert (retry.read_queue_nums, retry.write_queue_nums) == (32, 32)
    with pytest.raises(Refused, match="from 0 to 32"):
        topics.update(config("T", 33), now=NOW)


def test_order_topics_are_marked_as_the_name_server_says():
    topics = table()
    topics.update(config("T"), now=NOW)

    topics.apply_order_config(["T", "unknown"], now=NOW)
    topics.apply_order_config(["T"], now=NOW)

    assert topics.is_order("T")
    assert not topics.is_order("unknown")
    assert topics.data_version.counter == 2


# Attributes.


def test_attributes_are_set_changed_and_taken_away():
    topics = table()

    def change(text):
        return topics.update(config("T", attributes=parse_changes(text)), now=NOW).attributes

    assert change("+cleanup.policy=DELETE,+message.type=FIFO") == {
        "cleanup.policy": "DELETE",
        "message.type": "FIFO",
    }
    assert change("-message.type,+reserve.time=-1") == {
        "cleanup.policy": "DELETE",
        "reserve.time": "-1",
    }
    assert change("")["cleanup.policy"] == "DELETE"


@pytest.mark.parametrize(
    ("text", "allowed", "instead"),
    [
        ("+cleanup.policy=COMPACTION", "must be DELETE", "does not compact"),
        ("+queue.type=BatchCQ", "must be SimpleCQ", "an entry in the queue for every message"),
    ],
)
def test_what_the_broker_does_not_do_is_refused_with_what_it_does(text, allowed, instead):
    topics = table()

    with pytest.raises(Refused, match=f"{allowed}, got .*{instead}") as refusal:
        topics.update(config("T", attributes=parse_changes(text)), now=NOW)

    assert refusal.value.code == ResponseCode.SYSTEM_ERROR
    assert "T" not in topics


@pytest.mark.parametrize("way", ["load", "replace"])
def test_a_topic_of_an_apache_broker_keeps_attributes_that_have_no_effect_and_the_log_says_so(
    way, caplog
):
    attributes = {"cleanup.policy": "COMPACTION", "queue.type": "BatchCQ"}
    theirs = TopicConfigTable(
        data_version=DataVersion(counter=7),
        topic_config_table={
            "newest": config("newest", attributes=attributes),
            "plain": config("plain", attributes={"cleanup.policy": "DELETE"}),
        },
    )
    topics = table()

    getattr(topics, way)(theirs)
    changed = topics.update(config("newest", 9, attributes={"+message.type": "FIFO"}), now=NOW)

    assert changed.attributes == attributes | {"message.type": "FIFO"}
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert vars(warning)["topic"] == "newest"
    assert vars(warning)["attributes"] == "cleanup.policy=COMPACTION, queue.type=BatchCQ"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("key=value", "not of the form"),
        ("+key", "not of the form"),
        ("-key=value", "not of the form"),
        ("+key=", "not of the form"),
        ("+message.type=FIFO,+message.type=DELAY", "twice"),
        ("+message.type=FIFO,-message.type", "twice"),
        ("+no.such=1", "unsupported.*cleanup.policy, message.type"),
        ("+message.type=fifo", "NORMAL"),
        ("+reserve.time=-2", "from -1"),
        ("+reserve.time=soon", "a whole number"),
        ("+reserve.time=9223372036854775808", "a whole number"),
        ("-message.type", "not set"),
        ("+queue.type=BatchCQ", "fixed"),
        ("-cleanup.policy", "fixed"),
        ("+-a=1", "without them"),
    ],
)
def test_a_change_of_attributes_that_makes_no_sense_is_refused_as_a_whole(text, reason):
    topics = table()
    before = topics.update(config("T", attributes={"+cleanup.policy": "DELETE"}), now=NOW)

    with pytest.raises(Refused, match=reason) as refusal:
        topics.update(config("T", 9, attributes=parse_changes(text)), now=NOW)

    assert refusal.value.code == ResponseCode.SYSTEM_ERROR
    assert topics.get("T") == before


# The file, name servers and tools.

APACHE_FILE = (
    '{\n\t"dataVersion":{\n\t\t"counter":2,\n\t\t"stateVersion":0,\n\t\t"timestamp":1700000000123'
    '\n\t},\n\t"topicConfigTable":{\n\t\t"T":{\n\t\t\t"attributes":{},\n\t\t\t"order":false,'
    '\n\t\t\t"perm":6,\n\t\t\t"readQueueNums":4,\n\t\t\t"topicFilterType":"SINGLE_TAG",'
    '\n\t\t\t"topicName":"T",\n\t\t\t"topicSysFlag":0,\n\t\t\t"writeQueueNums":4\n\t\t}\n\t}\n}'
)


def test_the_file_of_an_apache_broker_is_read_over_the_system_topics(tmp_path):
    path = tmp_path / "topics.json"
    path.write_text(APACHE_FILE)
    topics = table()

    loaded = ConfigFile(path, TopicConfigTable).load()
    assert loaded is not None
    topics.load(loaded)

    assert topics.get("T") == config("T", 4)
    assert topics.data_version.counter == 2
    assert "SCHEDULE_TOPIC_XXXX" in topics


def test_the_file_has_the_two_keys_that_apache_reads(tmp_path):
    topics = table()
    topics.update(config("T", 4), now=NOW)
    file = ConfigFile(tmp_path / "topics.json", TopicConfigTable)

    file.save(topics.file())

    document = json.loads((tmp_path / "topics.json").read_text())
    assert set(document) == {"dataVersion", "topicConfigTable"}
    assert document["topicConfigTable"]["T"] == json.loads(APACHE_FILE)["topicConfigTable"]["T"]
    again = table()
    loaded = file.load()
    assert loaded is not None
    again.load(loaded)
    assert list(again) == list(topics)


def test_a_table_that_changed_between_pages_is_begun_anew():
    topics = table()
    first = topics.page(PageRequest(0, "", 5))
    quoted = version_text(topics.data_version)
    topics.update(config("AAA"), now=NOW)

    again = topics.page(PageRequest(5, quoted, 5))

    assert len(first.table.topic_config_table) == 5
    assert next(iter(again.table.topic_config_table)) == "AAA"
