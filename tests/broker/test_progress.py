"""Progress of groups: the table and its file, and requests about offsets over a socket."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.broker import Broker
from orbitmq.broker.config import ConfigFile
from orbitmq.broker.progress import (
    OWNERSHIP,
    PERMIT_LIFE,
    BackwardRule,
    CommitOutcome,
    CommitRule,
    CommitSource,
    ProgressFile,
    ProgressTable,
    encode_progress,
)
from orbitmq.broker.settings import ProgressSettings
from orbitmq.wire import headers
from orbitmq.wire.bodies import TopicConfig
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.javajson import decode_body
from tests.support.broker import GROUP, SMALL_STORE, RawClient
from tests.support.store import HandClock

WALL = 1_700_000_000.0

#: As an Apache broker of 5.x pretty-prints it.
APACHE_FILE = (
    '{\n\t"dataVersion":{\n\t\t"counter":3,\n\t\t"stateVersion":0,\n\t\t"timestamp":1700000000000'
    '\n\t},\n\t"groupTopicMap":{\n\t\t"g":["T","%RETRY%g"]\n\t},\n\t"offsetTable":{\n\t\t"T@g":{0:5,'
    '1:7\n\t\t},\n\t\t"%RETRY%g@g":{0:0\n\t\t}\n\t}\n}'
)
#: 5.5 adds a table of its own, and breaks lines differently.
NEW_FILE = (
    '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":1700000000000'
    '\n\t},\n\t"groupTopicMap":{\n\t\t"g":[\n\t\t\t"%RETRY%g",\n\t\t\t"T"\n\t\t]\n\t},\n\t"offsetTable":{'
    '\n\t\t"%RETRY%g@g":{\n\t\t\t0:0\n\t\t},\n\t\t"T@g":{\n\t\t\t0:5,\n\t\t\t1:7\n\t\t}\n\t},'
    '\n\t"pullOffsetTable":{}\n}'
)
#: And one of 4.9.
OLD_FILE = '{\n\t"offsetTable":{\n\t\t"T@g":{0:5,1:7\n\t\t},"%RETRY%g@g":{0:0}\n\t}\n}'


def table(rule: CommitRule | None = None) -> ProgressTable:
    return ProgressTable(wall=WALL, rule=rule)


def commit(
    progress: ProgressTable,
    offset: int,
    *,
    by: str = "one",
    way: CommitSource = CommitSource.REPORT,
    now: float = 0.0,
    topic: str = "T",
    queue: int = 0,
) -> CommitOutcome:
    return progress.commit(topic, "g", queue, offset, by=by, way=way, now=now)


# Going back.


PULL, REPORT, REQUEST = CommitSource.PULL, CommitSource.REPORT, CommitSource.REQUEST
OWNER, APACHE, NEVER = BackwardRule.OWNER, BackwardRule.APACHE, BackwardRule.NEVER


@pytest.mark.parametrize(
    ("rule", "by", "way", "seconds", "is_stored"),
    [
        # Of the client that reported 1000 before, or of another one.
        (OWNER, "one", REPORT, 5.0, True),
        (OWNER, "one", PULL, 1000.0, False),
        (OWNER, "two", PULL, 1000.0, False),
        (OWNER, "two", REPORT, OWNERSHIP, False),
        (OWNER, "two", REPORT, OWNERSHIP + 0.1, True),
        (OWNER, "two", REQUEST, 5.0, True),
        (APACHE, "two", PULL, 5.0, True),
        (APACHE, "two", REPORT, 5.0, True),
        (NEVER, "one", REPORT, 1000.0, False),
        (NEVER, "two", REQUEST, 5.0, True),
    ],
)
def test_a_rule_decides_which_commits_move_progress_back(rule, by, way, seconds, is_stored):
    progress = table(CommitRule(backward=rule))
    for now in (0.0, 50.0, 100.0):
        commit(progress, 1000, by="one", now=now)

    outcome = commit(progress, 500, by=by, way=way, now=100.0 + seconds)

    assert outcome is (CommitOutcome.MOVED_BACK if is_stored else CommitOutcome.REFUSED)
    assert progress.query("T", "g", 0) == (500 if is_stored else 1000)
    assert progress.refused == (not is_stored)


@pytest.mark.parametrize("rule", [OWNER, NEVER])
@pytest.mark.parametrize(
    ("offset", "seconds", "is_stored"),
    [(800, 1.0, True), (790, 1.0, False), (800, PERMIT_LIFE + 0.1, False)],
)
def test_a_member_may_move_back_to_where_the_broker_sent_it_for_a_while(
    rule, offset, seconds, is_stored
):
    progress = table(CommitRule(backward=rule, ownership=1000.0))
    commit(progress, 1000, by="dead")
    progress.permit("T", "g", 0, 800, now=0.0)

    outcome = commit(progress, offset, by="new", now=seconds)
    commit(progress, 900, by="new", now=seconds)
    again = commit(progress, 800, by="straggler", now=seconds)

    assert (outcome is CommitOutcome.MOVED_BACK) is is_stored
    assert again is CommitOutcome.REFUSED or not is_stored


# The file.


@pytest.mark.feature("H1")
@pytest.mark.parametrize("text", [APACHE_FILE, NEW_FILE, OLD_FILE])
def test_the_file_of_an_apache_broker_is_read_with_its_bare_keys(text, tmp_path):
    path = tmp_path / "consumerOffset.json"
    path.write_text(text)

    loaded = ConfigFile(path, ProgressFile).load()
    assert loaded is not None
    progress = table()
    progress.load(loaded)

    assert progress.offsets("T", "g") == {0: 5, 1: 7}
    assert progress.query("%RETRY%g", "g", 0) == 0
    assert progress.topics_of("g") == {"T", "%RETRY%g"}


@pytest.mark.feature("H1")
def test_the_file_has_the_shape_that_apache_reads(tmp_path):
    progress = table()
    commit(progress, 5, queue=2)
    commit(progress, 7, queue=10)
    path = tmp_path / "consumerOffset.json"

    file = ConfigFile(path, ProgressFile, encode=encode_progress)
    file.save(progress.file(wall=WALL, log_end=12))

    assert path.read_text() == (
        '{"dataVersion":{"counter":0,"stateVersion":0,"timestamp":1700000000000},'
        '"groupTopicMap":{"g":["T"]},"logEnd":12,"offsetTable":{"T@g":{"2":5,"10":7}}}'
    )
    assert file.load() == progress.file(wall=WALL, log_end=12)


def test_an_entry_without_a_group_is_named_and_left_out(caplog):
    progress = table()

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        progress.load(ProgressFile(offset_table={"nonsense": {0: 1}, "T@g": {0: 2}}))

    assert progress.query("T", "g", 0) == 2
    assert caplog.records[0].__dict__["key"] == "nonsense"


@pytest.mark.parametrize(("deleted", "left"), [(0, 5), (99, 5), (100, None), (101, None)])
def test_progress_in_a_topic_that_was_deleted_after_the_file_was_made_is_dropped(deleted, left):
    before, after = table(), table()
    commit(before, 5)
    commit(before, 7, topic="U")

    after.load(before.file(wall=WALL, log_end=100), lambda topic: deleted if topic == "T" else 0)

    assert after.query("T", "g", 0) == left
    assert after.query("U", "g", 0) == 7


@pytest.mark.parametrize(
    ("deleted", "log_end", "is_outdated"),
    [(0, 100, False), (99, 101, False), (0, 99, True), (100, 200, True)],
)
def test_a_file_is_outdated_when_the_log_lost_the_end_it_tells_of_or_a_topic_is_dropped(
    deleted, log_end, is_outdated
):
    before = table()
    commit(before, 5)

    found = table().load(before.file(wall=WALL, log_end=100), lambda _: deleted, log_end)

    assert found is is_outdated


def test_progress_beyond_the_end_of_its_queue_is_moved_back_and_told(caplog):
    progress = table()
    commit(progress, 10)
    commit(progress, 5, queue=1)
    commit(progress, 3, topic="%RETRY%g")
    saved = progress.revision

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        moved = progress.fit(lambda topic, _: 5 if topic == "T" else 0)
    again = progress.fit(lambda topic, _: 5 if topic == "T" else 0)

    assert (moved, again) == (2, 0)
    assert progress.offsets("T", "g") == {0: 5, 1: 5}
    assert progress.query("%RETRY%g", "g", 0) == 0
    assert progress.revision > saved
    (told,) = caplog.messages
    assert "in 2 places" in told
    assert "T@g queue 0: 10 -> 5, %RETRY%g@g queue 0: 3 -> 0" in told


# Against a model.

topics = st.sampled_from(("T", "U", "%RETRY%g"))
groups = st.sampled_from(("g", "h"))
queues = st.integers(0, 2)
offsets = st.integers(0, 50)


class ProgressModel(RuleBasedStateMachine):
    """The table against plain dictionaries, with restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = table()
        self.stored: dict[tuple[str, str, int], int] = {}
        self.owner: dict[tuple[str, str, int], tuple[str, float]] = {}
        self.resets: dict[tuple[str, str, int], int] = {}
        #: How far pulls have been answered since a reset was taken.
        self.reach: dict[tuple[str, str, int], int] = {}

    @rule(seconds=st.sampled_from((1.0, 10.0, 29.0, 31.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        topic=topics,
        group=groups,
        queue=queues,
        offset=offsets,
        by=st.sampled_from(("one", "two")),
        way=st.sampled_from(list(CommitSource)),
        asked=offsets,
    )
    def commits(
        self,
        topic: str,
        group: str,
        queue: int,
        offset: int,
        by: str,
        way: CommitSource,
        asked: int,
    ) -> None:
        key = (topic, group, queue)
        before = self.stored.get(key)
        owner, at = self.owner.get(key, (None, 0.0))
        asked = asked if way is CommitSource.PULL else 0
        if key in self.reach and before is not None and offset > before:
            self.reach[key] = max(self.reach[key], asked)
        is_from_before = before is not None and offset > max(before, self.reach.get(key, offset))
        is_stored = key not in self.resets and (
            way is CommitSource.REQUEST
            or before is None
            or (offset >= before and not is_from_before)
            or (
                offset < before
                and way is CommitSource.REPORT
                and (owner in (None, by) or self.now - at > OWNERSHIP)
            )
        )

        outcome = self.table.commit(
            topic, group, queue, offset, by=by, way=way, now=self.now, asked=asked
        )

        assert (outcome in (CommitOutcome.STORED, CommitOutcome.MOVED_BACK)) == is_stored
        if is_stored:
            assert (outcome is CommitOutcome.MOVED_BACK) == (before is not None and offset < before)
            self.stored[key] = offset
            self.owner[key] = (by, self.now)

    @rule(topic=topics, group=groups, queue=queues, offset=offsets)
    def is_reset(self, topic: str, group: str, queue: int, offset: int) -> None:
        key = (topic, group, queue)
        self.table.reset(topic, group, queue, offset)
        self.resets[key] = self.stored[key] = offset
        self.owner.pop(key, None)
        self.reach.pop(key, None)

    @rule(topic=topics, group=groups, queue=queues)
    def pulls(self, topic: str, group: str, queue: int) -> None:
        key = (topic, group, queue)
        expected = self.resets.pop(key, None)
        assert self.table.take_reset(topic, group, queue) == expected
        if expected is not None:
            self.reach[key] = expected

    @rule(topic=topics, group=groups, queue=queues, offset=offsets)
    def is_answered(self, topic: str, group: str, queue: int, offset: int) -> None:
        key = (topic, group, queue)
        self.table.note_pull(topic, group, queue, offset)
        if key in self.reach:
            self.reach[key] = max(self.reach[key], offset)

    @rule(topic=topics, group=groups, queue=queues)
    def is_sent_to_a_slave(self, topic: str, group: str, queue: int) -> None:
        self.table.reads_elsewhere(topic, group, queue)
        self.reach.pop((topic, group, queue), None)

    @rule(group=groups)
    def group_is_removed(self, group: str) -> None:
        self.table.remove_group(group)
        for entries in (self.stored, self.owner, self.resets, self.reach):
            for key in [key for key in entries if key[1] == group]:
                del entries[key]

    @rule(topic=topics)
    def topic_is_removed(self, topic: str) -> None:
        self.table.remove_topic(topic)
        for entries in (self.stored, self.owner, self.resets, self.reach):
            for key in [key for key in entries if key[0] == topic]:
                del entries[key]

    @rule()
    def broker_restarts(self) -> None:
        file = decode_body(ProgressFile, encode_progress(self.table.file(wall=WALL, log_end=0)))
        self.table = table()
        self.table.load(file)
        self.owner.clear()
        self.resets.clear()
        self.reach.clear()

    @invariant()
    def every_query_agrees(self) -> None:
        for topic in ("T", "U", "%RETRY%g"):
            for group in ("g", "h"):
                for queue in range(3):
                    key = (topic, group, queue)
                    expected = self.resets.get(key, self.stored.get(key))
                    assert self.table.query(topic, group, queue) == expected
        for group in ("g", "h"):
            assert self.table.topics_of(group) == {key[0] for key in self.stored if key[1] == group}
        for topic in ("T", "U"):
            assert self.table.groups_of(topic) == {key[1] for key in self.stored if key[0] == topic}


ProgressModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestProgressModel = ProgressModel.TestCase


# Requests about offsets.


async def ready(client: RawClient, broker: Broker, messages: int = 0) -> None:
    """A topic with a group, and some messages in its first queue."""
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    broker.parts.groups.find(GROUP, now=0.0)
    await asyncio.gather(*(client.stored("orders") for _ in range(messages)))


# Reports.


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"consumer_group": "new"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "Group new not"),
        ({"topic": "nothing"}, ResponseCode.TOPIC_NOT_EXIST, "Topic nothing not exist"),
        (
            {"queue_id": -1},
            ResponseCode.INVALID_PARAMETER,
            "no queue -1 and never had; it has 0 to 15",
        ),
        ({"queue_id": 16}, ResponseCode.INVALID_PARAMETER, "no queue 16 "),
        ({"offset": -5}, ResponseCode.INVALID_PARAMETER, "commitOffset must be 0 or more, got -5"),
    ],
)
async def test_a_report_that_cannot_be_right_is_refused_and_not_kept(
    broker, client, fields, code, named
):
    await ready(client, broker)

    answer = await client.report(**({"topic": "orders", "offset": 1} | fields))

    assert answer.code == code
    assert named in (answer.remark or "")
    assert "new" not in broker.parts.groups
    assert "nothing" not in broker.parts.topics
    assert broker.parts.progress.offsets("orders", GROUP) == {}


async def test_a_topic_that_got_fewer_queues_still_takes_reports_of_the_others(broker, client):
    await ready(client, broker)
    await client.stored("orders", queue_id=12)
    await client.report("orders", 0, queue_id=13)
    fewer = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4)
    broker.parts.topics.update(fewer, now=0.0)

    with_messages = await client.report("orders", 1, queue_id=12)
    with_progress = await client.report("orders", 0, queue_id=13)
    with_nothing = await client.report("orders", 0, queue_id=14)

    codes = [answer.code for answer in (with_messages, with_progress, with_nothing)]
    assert codes == [ResponseCode.SUCCESS, ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER]
    assert broker.parts.progress.offsets("orders", GROUP) == {12: 1, 13: 0}


async def test_a_report_from_before_a_reset_does_not_undo_it_when_a_pull_has_taken_it(
    broker, client
):
    await ready(client, broker, messages=10)
    client.report_one_way("orders", 8)
    broker.parts.progress.reset("orders", GROUP, 0, 3)
    moved = await client.pull("orders", 0, 8)

    client.report_one_way("orders", 8)
    stale = await client.query("orders")
    await client.pull("orders", 0, 3, max_msg_nums=2)
    for offset in (8, 5):
        client.report_one_way("orders", offset)
    replayed = await client.query("orders")
    by_tool = await client.report("orders", 9)

    assert moved.code == ResponseCode.PULL_OFFSET_MOVED
    assert stale.ext_fields["offset"] == "3"
    assert replayed.ext_fields["offset"] == "5"
    assert (by_tool.code, by_tool.remark) == (ResponseCode.SUCCESS, None)
    assert broker.parts.progress.stored("orders", GROUP, 0) == 9


@pytest.mark.feature("H2")
async def test_a_report_counts_at_once_and_a_straggler_cannot_move_it_back(
    broker, open_client, caplog
):
    owner, straggler = await open_client(broker), await open_client(broker)
    await ready(owner, broker)
    owner.report_one_way("orders", 100)
    assert (await owner.query("orders")).ext_fields["offset"] == "100"

    straggler.report_one_way("orders", 40)
    after_straggler = await straggler.query("orders")
    owner.report_one_way("orders", 90)
    after_seek = await owner.query("orders")
    broker.parts.progress.reset("orders", GROUP, 0, 10)
    after_reset = await straggler.query("orders")

    assert after_straggler.ext_fields["offset"] == "100"
    assert after_seek.ext_fields["offset"] == "90"
    assert "lower offset refused" in caplog.text
    assert after_reset.ext_fields["offset"] == "10"


async def test_a_cpp_client_never_says_one_way_and_is_taken_for_a_reporter(broker, open_client):
    def as_cpp(request):
        return msgspec.structs.replace(request, language=Language.CPP, version=63)

    owner, straggler = await open_client(broker), await open_client(broker, as_cpp)
    await ready(owner, broker)
    owner.report_one_way("orders", 100)
    await owner.query("orders")

    answer = await straggler.report("orders", 40)

    assert answer.code == ResponseCode.SUCCESS
    assert "not stored" in (answer.remark or "")
    assert (await owner.query("orders")).ext_fields["offset"] == "100"


# Groups without progress.


@pytest.mark.parametrize(
    ("messages", "settings", "fields", "expected"),
    [
        (3, {}, {}, "0"),
        (3, {}, {"set_zero_if_not_found": True}, "0"),
        (3, {}, {"set_zero_if_not_found": False}, None),
        (3, {"strict_last": True}, {}, None),
        (0, {}, {}, "0"),
        (0, {}, {"set_zero_if_not_found": True}, "0"),
        (0, {}, {"set_zero_if_not_found": False}, None),
        (0, {"zero_for_empty": False}, {}, None),
        (0, {"strict_last": True}, {}, None),
    ],
)
async def test_a_group_without_progress_begins_at_0_in_a_young_queue(
    start_broker, open_client, messages, settings, fields, expected
):
    broker = await start_broker(progress=ProgressSettings(**settings))
    client = await open_client(broker)
    await ready(client, broker, messages)

    answer = await client.query("orders", **fields)

    assert answer.ext_fields.get("offset") == expected
    code = ResponseCode.QUERY_NOT_FOUND if expected is None else ResponseCode.SUCCESS
    assert answer.code == code


async def test_a_queue_whose_messages_have_expired_is_not_young(start_broker, open_client):
    retention = replace(SMALL_STORE.retention, max_bytes=64 * 1024, files_per_run=100)
    store = replace(SMALL_STORE, file_size=32 * 1024, retention=retention)
    broker = await start_broker(store=store)
    client = await open_client(broker)
    await ready(client, broker, 3)
    for _ in range(40):
        await client.stored("others", b"x" * 4096)
    broker.parts.store.settle()
    broker.parts.store.clean()
    assert broker.parts.store.min_offset("orders", 0) == 3

    assert (await client.query("orders")).code == ResponseCode.QUERY_NOT_FOUND
    assert await client.max_offset("orders") == 3


# Queues.


@pytest.mark.feature("H6")
async def test_progress_and_bounds_of_a_queue_can_be_asked_for(start_broker, open_client):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock})
    client = await open_client(broker)
    for second in range(5):
        clock.time = 1_700_000_000.0 + 10 * second
        await client.stored("orders")
    broker.parts.groups.find(GROUP, now=0.0)
    await client.report("orders", 2)

    async def searched(second, boundary=None):
        answer = await client.connection.request(
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            headers.SearchOffsetRequest(
                topic="orders",
                queue_id=0,
                timestamp=round((1_700_000_000 + second) * 1000),
                boundary_type=boundary,
            ),
        )
        return answer.ext_fields["offset"]

    lowest = await client.connection.request(
        RequestCode.GET_MIN_OFFSET, headers.GetMinOffsetRequest(topic="orders", queue_id=0)
    )
    earliest = await client.connection.request(
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        headers.GetEarliestStoreTimeRequest(topic="orders", queue_id=0),
    )

    assert (await client.query("orders")).ext_fields["offset"] == "2"
    assert await client.max_offset("orders") == 5
    assert lowest.ext_fields["offset"] == "0"
    assert earliest.ext_fields["timestamp"] == "1700000000000"
    assert [await searched(second) for second in (-1, 0, 5, 10, 40, 41)] == list("001145")
    upper = headers.BoundaryType.UPPER
    assert [await searched(second, upper) for second in (-1, 0, 5, 10, 41)] == list("00014")


async def test_an_unknown_queue_is_empty(client):
    lowest = await client.connection.request(
        RequestCode.GET_MIN_OFFSET, headers.GetMinOffsetRequest(topic="nothing", queue_id=9)
    )
    found = await client.connection.request(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        headers.SearchOffsetRequest(topic="nothing", queue_id=9, timestamp=5),
    )
    earliest = await client.connection.request(
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        headers.GetEarliestStoreTimeRequest(topic="nothing", queue_id=9),
    )

    assert await client.max_offset("nothing", 9) == 0
    assert lowest.ext_fields["offset"] == found.ext_fields["offset"] == "0"
    assert earliest.ext_fields["timestamp"] == "-1"
