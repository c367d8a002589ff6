"""Consumer groups: their configuration, their members, producers, and findings about them."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.config import ConfigFile
from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import (
    CLIENT_LIFE,
    COMPENSATION_LIFE,
    PREDEFINED_GROUPS,
    Channel,
    Client,
    ConsumerTable,
    Disagreements,
    GroupChange,
    GroupTable,
    ProducerTable,
    Variant,
)
from orbitmq.broker.topics import PageRequest, version_text
from orbitmq.wire.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    LanguageName,
    MessageModel,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.javajson import decode_body
from tests.support.tries import shortest_of

NOW = 1_700_000_000.0
ONE = Client("one", LanguageName.JAVA, 479, "10.0.0.1:1")
TWO = Client("two", LanguageName.CPP, 400, "10.0.0.2:2")


def table(*, auto_create: bool = True, room: int = 10_000) -> GroupTable:
    return GroupTable(auto_create=auto_create, max_auto=len(PREDEFINED_GROUPS) + room, now=NOW)


# Configurations.


def test_a_lookup_creates_a_group_with_apaches_defaults():
    groups = table()

    made = groups.find("g", now=NOW + 1)

    assert made is not None
    assert (made.retry_queue_nums, made.retry_max_times) == (1, 16)
    assert (made.consume_enable, made.consume_broadcast_enable) == (True, True)
    assert (made.broker_id, made.which_broker_when_consume_slowly) == (0, 1)
    assert made.notify_consumer_ids_changed_enable
    assert groups.find("g", now=NOW + 2) == made
    assert groups.data_version.counter == 1
    assert {each.group_name for each in groups} == {*PREDEFINED_GROUPS, "g"}


@pytest.mark.parametrize(
    ("groups", "name", "words"),
    [
        (table(room=0), "billing", r"max_auto_groups is 8.*orbitmq group create billing"),
        (
            table(auto_create=False),
            "billing",
            r"\[billing\].*auto_create_group is off.*orbitmq group create billing",
        ),
        *((table(), name, "choose another name") for name in ("", "  ", "a b", "g" * 121, "ä")),
    ],
)
def test_a_group_that_is_not_created_is_refused_with_the_reason_and_the_remedy(groups, name, words):
    with pytest.raises(Refused, match=words) as refused:
        groups.require(name, now=NOW)

    assert refused.value.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert groups.find(name, now=NOW) is None
    assert len(groups) == len(PREDEFINED_GROUPS)


def test_groups_of_the_system_are_created_without_auto_creation():
    assert table(auto_create=False).find("CID_RMQ_SYS_x", now=NOW) is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"group_name": "a b"}, "illegal"),
        ({"group_name": "g", "attributes": {"+a": "1"}}, "known are none"),
        ({"group_name": "g", "retry_queue_nums": -1}, "retryQueueNums must be from 0 to 16384"),
        ({"group_name": "g", "retry_max_times": -2}, "retryMaxTimes must be from -1"),
    ],
)
def test_a_configuration_that_is_not_valid_is_refused(config, words):
    groups = table()

    with pytest.raises(Refused, match=words):
        groups.update(SubscriptionGroupConfig(**config), now=NOW)

    assert len(groups) == len(PREDEFINED_GROUPS)


def test_only_administration_creates_groups_beyond_the_limit(caplog):
    groups = table(room=1)
    groups.find("a", now=NOW)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        refused = [groups.find(f"g{number}", now=NOW + number) for number in range(500)]
    groups.update(SubscriptionGroupConfig(group_name="c"), now=NOW)

    assert refused == [None] * 500
    assert len(caplog.records) == 1
    assert groups.find("c", now=NOW) is not None


@pytest.mark.parametrize(
    "name",
    ["x\n2026-01-31 12:00:00.000 ERROR   all is lost", "x\r\x1b[2J\x9b", "x" * 100_000, "\n" * 2],
)
def test_a_refused_name_cannot_forge_a_line_of_the_log(name):
    text = str(table().missing(name))

    assert text.isprintable()
    assert len(text) < 2000


def test_a_change_that_changes_nothing_keeps_the_version():
    groups = table()
    stopped = SubscriptionGroupConfig(group_name="g", consume_enable=False)

    groups.update(stopped, now=NOW)
    groups.update(stopped, now=NOW)
    groups.forbid("g", "U", is_forbidden=False, now=NOW)
    changed_once = groups.data_version.counter
    deleted = [groups.delete("g", now=NOW), groups.delete("g", now=NOW)]

    assert changed_once == 1
    assert deleted == [stopped, None]
    assert groups.data_version.counter == 2


def test_a_group_is_forbidden_single_topics_until_it_is_deleted():
    groups = table()

    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    groups.forbid("g", "U", is_forbidden=True, now=NOW)
    groups.forbid("g", "T", is_forbidden=False, now=NOW)

    asked = (("g", "T", 2), ("g", "U", 2), ("h", "U", 2), ("g", "U", 1))
    assert [groups.is_forbidden(*each) for each in asked] == [False, True, False, False]
    assert groups.file().forbidden_table == {"g": {"U": 4}}
    groups.delete("g", now=NOW)
    assert not groups.is_forbidden("g", "U")


def test_a_file_restores_the_groups(tmp_path):
    groups = table()
    groups.find("g", now=NOW)
    groups.update(SubscriptionGroupConfig(group_name="h", retry_max_times=3), now=NOW)
    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    file = ConfigFile(tmp_path / "subscriptionGroup.json", SubscriptionGroupTable)
    file.save(groups.file())

    loaded = file.load()
    assert loaded is not None
    again = table()
    again.load(loaded)

    assert list(again) == list(groups)
    assert again.is_forbidden("g", "T")
    assert again.data_version == groups.data_version
    document = json.loads((tmp_path / "subscriptionGroup.json").read_text())
    assert set(document) == {"dataVersion", "forbiddenTable", "subscriptionGroupTable"}
    assert document["subscriptionGroupTable"]["h"]["groupRetryPolicy"] == {"type": "CUSTOMIZED"}


def test_the_file_of_an_old_broker_lacks_much():
    old = '{"subscriptionGroupTable":{"g":{"consumeEnable":false,"groupName":"g"}}}'
    groups = table()

    groups.load(msgspec.json.decode(old, type=SubscriptionGroupTable))

    found = groups.get("g")
    assert found is not None
    assert (found.consume_enable, found.retry_max_times) == (False, 16)


def test_a_slave_becomes_a_copy_of_its_master():
    master, slave = table(), table()
    master.find("g", now=NOW + 1)
    slave.find("old", now=NOW + 2)

    slave.replace(master.file())

    assert list(slave) == list(master)
    assert slave.data_version == master.data_version


def test_a_page_has_what_its_groups_are_forbidden():
    groups = table()
    for name in ("zz1", "zz2"):
        groups.find(name, now=NOW)
        groups.forbid(name, "T", is_forbidden=True, now=NOW)

    last = groups.page(PageRequest(9, version_text(groups.data_version), 5))

    assert last.total == 10
    assert set(last.table.subscription_group_table) == {"zz2"}
    assert last.table.forbidden_table == {"zz2": {"T": 4}}


# Consumers.


def wants(topic: str, text: str = "*", version: int = 1, kind: str = "TAG") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=text, sub_version=version, expression_type=kind)


def data(
    *subscriptions: SubscriptionData,
    group: str = "g",
    model: MessageModel = MessageModel.CLUSTERING,
) -> ConsumerData:
    return ConsumerData(
        group_name=group,
        consume_type=ConsumeType.CONSUME_PASSIVELY,
        message_model=model,
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        subscription_data_set=subscriptions,
    )


def change(
    consumers: ConsumerTable, client: Client, said: ConsumerData, now: float = 0.0
) -> GroupChange | None:
    """A heartbeat over a connection that is named like its client."""
    return consumers.heartbeat(client.id, client, said, now=now).change


def test_joining_and_changed_topics_are_notified_to_all_members():
    consumers = ConsumerTable()

    changes = [
        change(consumers, ONE, data(wants("T"), wants("U"))),
        change(consumers, TWO, data(wants("T"))),
        change(consumers, ONE, data(wants("T"))),
    ]

    assert changes == [
        GroupChange(group="g", notify=("one",), joined=(ONE,), topics_added=("T", "U")),
        GroupChange(group="g", notify=("one", "two"), joined=(TWO,)),
        GroupChange(group="g", notify=("one", "two"), topics_removed=("U",)),
    ]
    assert [set(consumers.groups_of(topic)) for topic in "UT"] == [set(), {"g"}]


def test_another_filter_is_a_change_without_a_notice_and_another_version_is_none():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "A || B", 1)))
    # Clients list the tags in an order of their own, or not at all.
    again = msgspec.structs.replace(wants("T", "A || B", 2), tags_set=("B", "A"), code_set=(0, 0))

    renewed = change(consumers, ONE, data(again))
    replaced = change(consumers, ONE, data(wants("T", "B", 3)))

    assert renewed is None
    assert replaced == GroupChange(group="g", topics_replaced=("T",))
    assert consumers.subscription("g", "T") == wants("T", "B", 3)


@pytest.mark.parametrize(
    ("model", "notifies"), [(MessageModel.BROADCASTING, True), (MessageModel.CLUSTERING, False)]
)
def test_a_group_that_needs_no_notices_gets_none(model, notifies):
    consumers = ConsumerTable()
    for client in (ONE, TWO):
        said = data(wants("T"), model=model)
        joined = consumers.heartbeat(client.id, client, said, now=0.0, notifies=notifies).change
        assert joined is not None
        assert joined.notify == ()

    assert [each.notify for each in consumers.close("one")] == [()]


def test_a_closed_connection_leaves_all_its_groups():
    consumers = ConsumerTable()
    for group in ("g", "h"):
        change(consumers, ONE, data(wants("T", "mine"), group=group))
    change(consumers, TWO, data(wants("T", "newer", 2), wants("U"), group="h"))

    changes = consumers.close("one")
    last = consumers.leave("h", "two")

    assert changes == (
        GroupChange(group="g", left=(ONE,), topics_removed=("T",), is_gone=True),
        GroupChange(group="h", notify=("two",), left=(ONE,)),
    )
    assert last == GroupChange(group="h", left=(TWO,), topics_removed=("T", "U"), is_gone=True)
    assert (consumers.close("one"), consumers.leave("h", "one"), consumers.groups()) == (
        (),
        None,
        (),
    )


def test_the_subscription_of_a_member_that_leaves_is_replaced_by_that_of_another():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "mine", 1)))
    change(consumers, TWO, data(wants("T", "newer", 2), wants("U")))

    left = consumers.leave("g", "two")

    assert left == GroupChange(
        group="g", notify=("one",), left=(TWO,), topics_removed=("U",), topics_replaced=("T",)
    )
    assert consumers.subscription("g", "T") == wants("T", "mine", 1)


def test_a_connection_that_changes_its_client_id_is_another_member():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T")))

    changed = consumers.heartbeat("one", TWO, data(wants("U")), now=0.0).change

    assert changed == GroupChange(
        group="g",
        notify=("one",),
        joined=(TWO,),
        left=(ONE,),
        topics_added=("U",),
        topics_removed=("T",),
    )


def test_a_connection_has_limited_room_for_its_groups():
    consumers = ConsumerTable(connection_room=10_000)
    noted = []
    for number in range(100):
        said = consumers.within_room("one", data(wants("T"), group=f"g{number}"))
        if said is not None:
            noted.append(said)
            change(consumers, ONE, said)
    topics = [wants(f"T{number}", "a||b", number) for number in range(100)]
    many = consumers.within_room("two", data(*topics))
    repeated = consumers.within_room("one", data(wants("T"), group="g0"))
    changed = consumers.within_room("one", data(wants("T", "A"), group="g0"))
    more = consumers.within_room("one", data(group="new"))
    consumers.leave("g0", "one")

    assert 3 < len(noted) < 10
    assert many is not None
    assert 10 < len(many.subscription_data_set) < 20
    assert list(many.subscription_data_set) == topics[: len(many.subscription_data_set)]
    assert (repeated, more) == (noted[0], None)
    # It takes the place of what the group said before.
    assert changed == data(wants("T", "A"), group="g0")
    assert consumers.within_room("one", data(group="new")) is not None


def test_the_subscription_of_a_pull_counts_for_a_while_where_no_heartbeat_names_one():
    consumers = ConsumerTable()
    consumers.compensate("g", wants("T", "pull", 99), now=0.0)
    consumers.compensate("g", wants("U", "x" * 10_000), now=0.0)

    assert consumers.subscription("g", "T") == wants("T", "pull", 99)
    assert consumers.subscription("g", "T", with_compensation=False) is None
    assert consumers.subscription("g", "U") is None  # too long to be kept for tools
    assert (consumers.is_online("g"), consumers.consumer_list("g")) == (False, None)
    change(consumers, ONE, data(wants("T", "heartbeat", 1)))
    assert consumers.subscription("g", "T") == wants("T", "heartbeat", 1)
    consumers.close("one")
    consumers.expire(COMPENSATION_LIFE)
    assert consumers.subscription("g", "T") is not None
    consumers.expire(COMPENSATION_LIFE + 0.1)
    assert consumers.subscription("g", "T") is None


def test_members_that_fall_silent_together_are_one_change_of_their_group():
    consumers = ConsumerTable()
    for client, *topics in ((ONE, "A", "T"), (TWO, "B", "T"), (Client("three"), "T")):
        change(consumers, client, data(*(wants(topic, "*", 1) for topic in topics)))
    change(consumers, Client("three"), data(wants("T", "*", 1)), now=CLIENT_LIFE)

    silent, (shrunk,) = consumers.expire(CLIENT_LIFE + 0.1)

    assert silent == ("one", "two")
    assert (shrunk.left, shrunk.topics_removed) == ((ONE, TWO), ("A", "B"))
    assert (shrunk.notify, shrunk.is_gone) == (("three",), False)


JAVA_HEARTBEAT = (
    '{"clientID":"127.0.0.1@one6da228c9455","consumerDataSet":[{"consumeFromWhere":'
    '"CONSUME_FROM_LAST_OFFSET","consumeType":"CONSUME_PASSIVELY","groupName":"GID_G_26277",'
    '"messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":false,"codeSet":[],'
    '"expressionType":"TAG","subString":"*","subVersion":1794738003281,"tagsSet":[],"topic":'
    '"%RETRY%GID_G_26277"},{"classFilterMode":false,"codeSet":[],"expressionType":"TAG",'
    '"subString":"*","subVersion":1794738003277,"tagsSet":[],"topic":"G_27282"}],'
    '"unitMode":false}],"producerDataSet":[{"groupName":"CLIENT_INNER_PRODUCER"}]}'
)
#: Ordinals for enumerations, versions in quotes, much left out.
CPP_HEARTBEAT = (
    '{"clientID":"11686-127.0.0.1@one","consumerDataSet":[{"consumeFromWhere":0,"consumeType":1,'
    '"groupName":"GID_G_26277","messageModel":1,"subscriptionDataSet":[{"subString":"*",'
    '"subVersion":"1794737880007","topic":"%RETRY%GID_G_26277"},{"subString":"*","subVersion":'
    '"1794737880007","topic":"G_27282"}]}]}\n'
)


def test_clients_in_java_and_cpp_share_a_group():
    consumers = ConsumerTable()
    changes = []

    for now, text in enumerate((JAVA_HEARTBEAT, CPP_HEARTBEAT, JAVA_HEARTBEAT, CPP_HEARTBEAT)):
        beat = decode_body(HeartbeatData, text.encode())
        said = beat.consumer_data_set[0]
        client = Client(beat.client_id)
        changes.append(consumers.heartbeat(client.id, client, said, now=float(now)).change)

    assert changes[1:] == [
        GroupChange(
            group="GID_G_26277",
            notify=("127.0.0.1@one6da228c9455", "11686-127.0.0.1@one"),
            joined=(Client("11686-127.0.0.1@one"),),
        ),
        None,
        None,
    ]
    assert set(consumers.subscriptions("GID_G_26277")) == {"%RETRY%GID_G_26277", "G_27282"}
    assert consumers.model("GID_G_26277") is MessageModel.CLUSTERING


client_names = st.sampled_from(("a", "b", "c"))
group_names = st.sampled_from(("g", "h"))
subscription_sets = st.dictionaries(
    st.sampled_from(("T", "U", "V")), st.tuples(st.sampled_from(("A", "B")), st.integers(1, 3))
)


class Membership(RuleBasedStateMachine):
    """The table against the last heartbeat of every live member."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = ConsumerTable()
        self.heard: dict[tuple[str, str], tuple[float, dict[str, tuple[str, int]]]] = {}

    def topics(self, group: str) -> set[str]:
        return {
            topic for (name, _), (_, said) in self.heard.items() if name == group for topic in said
        }

    def members(self, group: str) -> set[str]:
        return {channel for name, channel in self.heard if name == group}

    @rule(seconds=st.sampled_from((1.0, 30.0, 119.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=client_names, group=group_names, said=subscription_sets)
    def beats(self, name: str, group: str, said: dict[str, tuple[str, int]]) -> None:
        was_new = (group, name) not in self.heard
        before = self.topics(group)
        self.heard[group, name] = (self.now, said)
        subscriptions = [wants(topic, text, version) for topic, (text, version) in said.items()]

        result = self.table.heartbeat(
            name, Client(name), data(*subscriptions, group=group), now=self.now
        )

        must_notify = was_new or before != self.topics(group)
        notified = () if result.change is None else result.change.notify
        assert set(notified) == (self.members(group) if must_notify else set())

    @rule(name=client_names, group=group_names)
    def leaves(self, name: str, group: str) -> None:
        was_there = self.heard.pop((group, name), None) is not None
        left = self.table.leave(group, name)
        assert (left is not None) == was_there
        if left is not None:
            assert set(left.notify) == self.members(group)
            assert left.is_gone == (not self.members(group))

    @rule(name=client_names)
    def is_cut_off(self, name: str) -> None:
        groups = {group for group, channel in self.heard if channel == name}
        for group in groups:
            del self.heard[group, name]
        changes = self.table.close(name)
        assert {entry.group for entry in changes} == groups
        for entry in changes:
            assert set(entry.notify) == self.members(entry.group)

    @rule()
    def scan(self) -> None:
        silent = {
            channel for (_, channel), (at, _) in self.heard.items() if self.now - at > CLIENT_LIFE
        }
        shrunk = {group for group, channel in self.heard if channel in silent}
        for key in [key for key in self.heard if key[1] in silent]:
            del self.heard[key]

        channels, changes = self.table.expire(self.now)

        assert set(channels) == silent
        assert sorted(entry.group for entry in changes) == sorted(shrunk)
        for entry in changes:
            assert set(entry.notify) == self.members(entry.group)

    @invariant()
    def the_table_follows_from_the_heartbeats(self) -> None:
        for group in ("g", "h"):
            assert self.table.is_online(group) == bool(self.members(group))
            assert {member.channel for member in self.table.members(group)} == self.members(group)
            known = self.table.subscriptions(group)
            assert set(known) == self.topics(group)
            for topic, chosen in known.items():
                said = [
                    entry[topic]
                    for (name, _), (_, entry) in self.heard.items()
                    if name == group and topic in entry
                ]
                assert chosen.sub_version == max(version for _, version in said)
                assert (chosen.sub_string, chosen.sub_version) in said
        for topic in ("T", "U", "V"):
            expected = {group for group in ("g", "h") if topic in self.topics(group)}
            assert self.table.groups_of(topic) == expected


Membership.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMembership = Membership.TestCase


# Producers.


def chosen(
    producers: ProducerTable,
    *,
    dead: tuple[str, ...] = (),
    full: tuple[str, ...] = (),
    group: str = "p",
) -> Channel | None:
    return producers.choose(
        group,
        is_active=lambda channel: channel not in dead,
        is_writable=lambda channel: channel not in full,
    )


def producers_on(*channels: str) -> ProducerTable:
    producers = ProducerTable()
    for channel in channels:
        producers.heartbeat("p", channel, Client("client of " + channel), now=0.0)
    return producers


@pytest.mark.parametrize("left", [1, 2, 5])
def test_checks_go_round_among_the_producers_that_are_left(left):
    producers = producers_on(*"abcde")
    for _ in range(7):
        chosen(producers)

    for channel in "abcde"[left:]:
        producers.close(channel)

    assert Counter(chosen(producers) for _ in range(2 * left)) == dict.fromkeys("abcde"[:left], 2)


@pytest.mark.parametrize(
    ("dead", "full", "expected"),
    [
        ("abcdefg", "", {"h"}),
        ("abcdefgh", "", {None}),
        ("cdefgh", "a", {"b"}),
        ("bcdefgh", "a", {"a"}),
        ("cdefgh", "ab", {"a", "b"}),
    ],
)
def test_a_check_goes_to_a_live_connection_that_accepts_more_bytes_if_there_is_one(
    dead, full, expected
):
    producers = producers_on(*"abcdefgh")

    assert {chosen(producers, dead=tuple(dead), full=tuple(full)) for _ in range(8)} == expected


@pytest.mark.parametrize("ending", ["close", "expire"])
def test_closing_a_connection_costs_as_much_as_its_groups(ending):
    def by_joining():
        """How long closing takes, in relation to joining."""
        producers = ProducerTable(most=20_000)
        begun = time.thread_time()
        for number in range(20_000):
            producers.heartbeat(f"g{number}", "x", Client("one"), now=0.0)
        joined = time.thread_time()
        if ending == "close":
            producers.close("x")
        else:
            producers.expire(CLIENT_LIFE + 1.0)
        closed = time.thread_time()

        assert producers.groups() == producers.channels_of("one") == ()
        return (closed - joined) / (joined - begun)

    # With a cost of the square of the groups it was two hundred times as much.
    assert shortest_of(by_joining, 20) < 20


def test_a_connection_has_room_for_a_number_of_producer_groups():
    producers = ProducerTable(most=2)
    for group in "pq":
        producers.heartbeat(group, "x", Client("one"), now=0.0)

    full = [producers.has_room(group, "x") for group in "pqr"]
    producers.leave("p", "x")

    assert full == [True, True, False]
    assert [producers.has_room("n" * size, "x") for size in (1, 255, 256)] == [True, True, False]


producer_channels = st.sampled_from(("x", "y", "z"))
producer_ids = st.sampled_from(("one", "two"))
producer_groups = st.sampled_from(("p", "q"))


class Producers(RuleBasedStateMachine):
    """The table against the heartbeats of each connection."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = ProducerTable()
        self.heard: dict[tuple[str, str], tuple[str, float]] = {}

    @rule(seconds=st.sampled_from((1.0, 60.0, 121.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(group=producer_groups, channel=producer_channels, client=producer_ids)
    def beats(self, group: str, channel: str, client: str) -> None:
        known = self.heard.get((group, channel), (None, 0.0))[0]
        is_new = self.table.heartbeat(group, channel, Client(client), self.now)
        assert is_new == (known != client)
        self.heard[group, channel] = (client, self.now)

    @rule(group=producer_groups, channel=producer_channels)
    def leaves(self, group: str, channel: str) -> None:
        assert self.table.leave(group, channel) == ((group, channel) in self.heard)
        self.heard.pop((group, channel), None)

    @rule(channel=producer_channels)
    def closes(self, channel: str) -> None:
        self.table.close(channel)
        self.heard = {key: value for key, value in self.heard.items() if key[1] != channel}

    @rule()
    def scan(self) -> None:
        silent = {key[1] for key, (_, at) in self.heard.items() if self.now - at > CLIENT_LIFE}
        assert set(self.table.expire(self.now)) == silent
        self.heard = {key: value for key, value in self.heard.items() if key[1] not in silent}

    @invariant()
    def the_table_follows_from_the_heartbeats(self) -> None:
        assert set(self.table.groups()) == {group for group, _ in self.heard}
        for group in ("p", "q"):
            known = [client for (name, _), (client, _) in self.heard.items() if name == group]
            assert sorted(each.id for each in self.table.clients(group)) == sorted(known)
            assert self.table.is_online(group) == bool(known)
            assert (chosen(self.table, group=group) is None) == (not known)
        for client in ("one", "two"):
            channels = self.table.channels_of(client)
            live = {channel for (_, channel), (name, _) in self.heard.items() if name == client}
            assert len(channels) == len(set(channels))
            assert set(channels) == live


Producers.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestProducers = Producers.TestCase


# Findings.


class Group:
    """A group whose members send heartbeats."""

    def __init__(self) -> None:
        self.consumers = ConsumerTable()
        self.disagreements = Disagreements(self.consumers)
        self.now = 0.0

    def beat(self, client: str, *said: tuple[str, ...], channel: str | None = None) -> None:
        self.now += 1.0
        # Versions differ even among members that agree.
        wanted = [wants(topic, text, int(self.now), *kind) for topic, text, *kind in said]
        channel = channel or client
        self.consumers.heartbeat(
            channel, Client(client, address=channel), data(*wanted), now=self.now
        )

    def check(self) -> tuple[list[str], list[str]]:
        """The texts of the findings that began and ended."""
        began, ended = self.disagreements.check()
        return [each.text for each in began], [each.text for each in ended]


@pytest.fixture
def group():
    return Group()


@pytest.mark.parametrize(
    ("members", "found"),
    [
        (
            {
                "one": (("T", "A || B"), ("U", "*"), ("S", "a > 1", "SQL92")),
                "two": (("U", ""), ("T", "B||A||A"), ("S", " a > 1", "SQL92")),
            },
            [],
        ),
        ({"one": (("T", "||"),), "two": (("T", "||"),)}, []),
        ({"one": (("T", "||"),), "two": (("T", "A"),)}, ["one with TAG '||', two with TAG 'A'"]),
        ({"one": (("T", "A"),), "two": (("T", "B"),)}, ["one with TAG 'A', two with TAG 'B'"]),
        (
            {"one": (("T", "a"),), "two": (("T", "a", "SQL92"),)},
            ["one with TAG 'a', two with SQL92 'a'"],
        ),
        (
            {"one": (("T", "*"), ("U", "*")), "two": (("T", "*"),), "three": (("T", "*"),)},
            ["one with TAG '*', three and 1 more without it"],
        ),
    ],
    ids=["same", "same and wrong", "one wrong", "tags", "language", "topic missing"],
)
def test_members_with_different_subscriptions_are_a_finding(group, members, found):
    for client, said in members.items():
        group.beat(client, *said)

    began, _ = group.check()

    assert [text.partition(": ")[2] for text in began] == [
        f"{each}; messages will be missed until they agree" for each in found
    ]
    assert all(text.startswith("members of group 'g' subscribe differently") for text in began)


def test_a_finding_is_reported_when_it_begins_and_when_it_ends(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    began, _ = group.check()
    for _ in range(5):
        group.beat("one", ("T", "A"))
        group.beat("two", ("T", "B"))
        assert group.check() == ([], [])

    # Its members may change while it stays.
    group.beat("three", ("T", "B"))
    assert group.check() == ([], [])
    (finding,) = group.disagreements.open_findings("g")
    group.consumers.close("one")

    assert len(began) == 1
    assert finding.variants[1] == Variant(
        clients=("three", "two"), expression="B", expression_type="TAG"
    )
    assert group.check() == ([], [finding.text])
    assert group.disagreements.open_findings() == ()


def test_a_member_whose_subscription_is_not_known_yet_is_no_finding(group):
    group.beat("one", ("T", "A"))
    group.consumers.heartbeat(
        "two", Client("two"), data(), now=5.0, fingerprint=1, without_subscriptions=True
    )

    assert group.check() == ([], [])


def test_one_id_on_two_live_connections_is_a_finding(group):
    for channel in ("10.0.0.1:1", "10.0.0.2:2", "10.0.0.1:1"):
        group.beat("same", ("T", "*"), channel=channel)
        assert group.check() == ([], [])
    group.beat("same", ("T", "*"), channel="10.0.0.2:2")

    (text,), _ = group.check()
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    lasting = group.check()
    group.consumers.close("10.0.0.2:2")

    assert "consumers with the client id 'same' (10.0.0.1:1, 10.0.0.2:2)" in text
    assert lasting == ([], [])
    assert group.check() == ([], [text])


def test_a_client_that_reconnects_is_no_finding(group):
    group.beat("one", ("T", "*"), channel="old connection")
    group.beat("one", ("T", "*"), channel="old connection")

    for _ in range(4):
        group.beat("one", ("T", "*"), channel="new connection")
        assert group.check() == ([], [])
    group.consumers.close("old connection")
    assert group.check() == ([], [])
