"""Consumer groups: their configuration, their members, producers, and findings about them."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.config import ConfigFile
from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import (
    CLIENT_LIFE,
    PREDEFINED_GROUPS,
    Channel,
    Client,
    ConsumerTable,
    Disagreements,
    GroupChange,
    GroupTable,
    ProducerTable,
)
from orbitmq.wire import bodies
from orbitmq.wire.codes import ResponseCode

NOW = 1_700_000_000.0
ONE = Client("one", bodies.LanguageName.JAVA, 479, "10.0.0.1:1")
TWO = Client("two", bodies.LanguageName.CPP, 400, "10.0.0.2:2")


def table(*, auto_create: bool = True, room: int = 10_000) -> GroupTable:
    return GroupTable(auto_create=auto_create, max_auto=len(PREDEFINED_GROUPS) + room, now=NOW)


# Configurations.


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


def test_only_administration_creates_groups_beyond_the_limit(caplog):
    groups = table(room=1)
    groups.find("a", now=NOW)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        refused = [groups.find(f"g{number}", now=NOW + number) for number in range(500)]
    groups.update(bodies.SubscriptionGroupConfig(group_name="c"), now=NOW)

    assert refused == [None] * 500
    assert len(caplog.records) == 1
    assert groups.find("c", now=NOW) is not None


def test_a_file_restores_the_groups(tmp_path):
    groups = table()
    groups.find("g", now=NOW)
    groups.update(bodies.SubscriptionGroupConfig(group_name="h", retry_max_times=3), now=NOW)
    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    file = ConfigFile(tmp_path / "subscriptionGroup.json", bodies.SubscriptionGroupTable)
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

    groups.load(msgspec.json.decode(old, type=bodies.SubscriptionGroupTable))

    found = groups.get("g")
    assert found is not None
    assert (found.consume_enable, found.retry_max_times) == (False, 16)


# Consumers.


def wants(
    topic: str, text: str = "*", version: int = 1, kind: str = "TAG"
) -> bodies.SubscriptionData:
    return bodies.SubscriptionData(
        topic=topic, sub_string=text, sub_version=version, expression_type=kind
    )


def data(*subscriptions: bodies.SubscriptionData, group: str = "g") -> bodies.ConsumerData:
    return bodies.ConsumerData(
        group_name=group,
        consume_type=bodies.ConsumeType.CONSUME_PASSIVELY,
        message_model=bodies.MessageModel.CLUSTERING,
        consume_from_where=bodies.ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        subscription_data_set=subscriptions,
    )


def test_a_connection_that_changes_its_client_id_is_another_member():
    consumers = ConsumerTable()
    consumers.heartbeat("one", ONE, data(wants("T")), now=0.0)

    changed = consumers.heartbeat("one", TWO, data(wants("U")), now=0.0).change

    assert changed == GroupChange(
        group="g",
        notify=("one",),
        joined=(TWO,),
        left=(ONE,),
        topics_added=("U",),
        topics_removed=("T",),
    )


def test_members_that_fall_silent_together_are_one_change_of_their_group():
    consumers = ConsumerTable()
    three = Client("three")
    for client, *topics in ((ONE, "A", "T"), (TWO, "B", "T"), (three, "T")):
        consumers.heartbeat(client.id, client, data(*map(wants, topics)), now=0.0)
    consumers.heartbeat(three.id, three, data(wants("T")), now=CLIENT_LIFE)

    silent, (shrunk,) = consumers.expire(CLIENT_LIFE + 0.1)

    assert silent == ("one", "two")
    assert (shrunk.left, shrunk.topics_removed) == ((ONE, TWO), ("A", "B"))
    assert (shrunk.notify, shrunk.is_gone) == (("three",), False)


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
    producers = ProducerTable()
    for channel in "abcdefgh":
        producers.heartbeat("p", channel, Client("client of " + channel), now=0.0)

    assert {chosen(producers, dead=tuple(dead), full=tuple(full)) for _ in range(8)} == expected


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
