"""Consumers: what heartbeats make of a group, and who is told."""

from __future__ import annotations

import time
from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.groups import (
    CLIENT_LIFE,
    COMPENSATION_LIFE,
    Channel,
    Client,
    ConsumerTable,
    GroupChange,
    ProducerTable,
)
from orbitmq.wire.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    LanguageName,
    MessageModel,
    SubscriptionData,
)
from orbitmq.wire.javajson import decode_body
from tests.support.tries import shortest_of

ONE = Client("one", LanguageName.JAVA, 479, "10.0.0.1:1")
TWO = Client("two", LanguageName.CPP, 400, "10.0.0.2:2")
THREE = Client("three")


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
    """A heartbeat over a connection that is called like its client."""
    return consumers.heartbeat(client.id, client, said, now=now).change


def test_a_connection_has_room_for_so_much_about_its_groups():
    """Whoever makes up groups or topics without end is not kept in memory."""
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

    assert 3 < len(noted) < 10
    assert consumers.groups() == tuple(f"g{number}" for number in range(len(noted)))
    assert many is not None
    assert 10 < len(many.subscription_data_set) < 20
    assert list(many.subscription_data_set) == topics[: len(many.subscription_data_set)]
    # What is there stays, and there is room again where somebody leaves.
    assert repeated == noted[0]
    assert consumers.within_room("one", data(group="new")) is None
    consumers.leave("g0", "one")
    assert consumers.within_room("one", data(group="new")) is not None


@pytest.mark.parametrize(
    "large",
    [
        SubscriptionData(topic="T" * 10_000),
        SubscriptionData(topic="T", sub_string="x" * 10_000),
        SubscriptionData(topic="T", expression_type="x" * 10_000),
        SubscriptionData(topic="T", filter_class_source="x" * 10_000),
        SubscriptionData(topic="T", tags_set=("x",) * 150),
        SubscriptionData(topic="T", code_set=(1,) * 250),
    ],
    ids=["topic", "text", "kind", "source", "tags", "hashes"],
)
def test_whatever_a_subscription_says_takes_room(large):
    consumers = ConsumerTable(connection_room=10_000)

    assert consumers.within_room("one", data(large, wants("U"))) == data(wants("U"))


def test_a_consumer_that_joins_is_told_to_everybody_and_to_itself():
    consumers = ConsumerTable()

    first = change(consumers, ONE, data(wants("T")))
    second = change(consumers, TWO, data(wants("T")))

    assert first == GroupChange(group="g", notify=("one",), joined=(ONE,), topics_added=("T",))
    assert second == GroupChange(group="g", notify=("one", "two"), joined=(TWO,))


def test_a_heartbeat_that_says_the_same_changes_nothing():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T"), wants("U")))

    assert change(consumers, ONE, data(wants("T"), wants("U")), now=30.0) is None
    assert change(consumers, ONE, data(wants("U"), wants("T")), now=60.0) is None
    assert consumers.expire(60.0 + CLIENT_LIFE) == ((), ())


def test_a_newer_version_replaces_and_is_no_reason_to_rebalance():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "A", 1)))

    replaced = change(consumers, ONE, data(wants("T", "B", 2)))

    assert replaced == GroupChange(group="g", topics_replaced=("T",))
    assert consumers.subscription("g", "T") == wants("T", "B", 2)


def test_a_newer_version_of_the_same_wish_is_nobodys_business():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "A || B", 1)))
    # Clients list the tags in an order of their own, or not at all.
    again = msgspec.structs.replace(wants("T", "A || B", 2), tags_set=("B", "A"), code_set=(0, 0))

    renewed = change(consumers, ONE, data(again))
    joined = change(consumers, TWO, data(wants("T", "A || B", 3)))

    assert renewed == GroupChange(group="g", topics_renewed=("T",))
    assert joined is not None
    assert not joined.topics_replaced
    assert joined.topics_renewed == ("T",)
    assert consumers.subscription("g", "T") == wants("T", "A || B", 3)


def test_topics_are_told_in_the_order_of_the_heartbeat():
    consumers = ConsumerTable()
    topics = tuple(f"T{number * 7 % 40}" for number in range(40))

    joined = change(consumers, ONE, data(*(wants(topic) for topic in topics)))
    replaced = change(consumers, ONE, data(*(wants(topic, "A", 2) for topic in topics[::-1])))
    renewed = change(consumers, ONE, data(*(wants(topic, "A", 3) for topic in topics)))

    assert joined is not None
    assert joined.topics_added == topics
    assert replaced == GroupChange(group="g", topics_replaced=topics[::-1])
    assert renewed == GroupChange(group="g", topics_renewed=topics)


def test_an_older_version_of_another_member_does_not_replace():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "new", 5)))
    change(consumers, TWO, data(wants("T", "old", 4)))

    assert consumers.subscription("g", "T") == wants("T", "new", 5)


def test_of_two_with_the_same_version_the_first_stays():
    consumers = ConsumerTable()
    change(consumers, TWO, data(wants("T", "first", 5)))
    change(consumers, ONE, data(wants("T", "second", 5)))
    change(consumers, ONE, data(wants("T", "third", 5)))

    assert consumers.subscription("g", "T") == wants("T", "first", 5)


def test_a_member_that_catches_up_does_not_replace_who_was_there_first():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "old", 1)))
    change(consumers, TWO, data(wants("T", "first", 5)))

    assert change(consumers, ONE, data(wants("T", "second", 5))) is None
    assert consumers.subscription("g", "T") == wants("T", "first", 5)


def test_a_topic_stays_until_no_member_names_it():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T"), wants("U")))
    change(consumers, TWO, data(wants("T")))
    assert set(consumers.subscriptions("g")) == {"T", "U"}

    dropped = change(consumers, ONE, data(wants("T")))

    assert dropped == GroupChange(group="g", notify=("one", "two"), topics_removed=("U",))
    assert consumers.groups_of("U") == frozenset()
    assert consumers.groups_of("T") == {"g"}


def test_members_that_differ_do_not_keep_notifying_each_other():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T")))
    change(consumers, TWO, data(wants("U")))

    for now in range(30, 300, 30):
        assert change(consumers, ONE, data(wants("T")), now=float(now)) is None
        assert change(consumers, TWO, data(wants("U")), now=float(now)) is None
    assert consumers.subscription("g", "T") == wants("T")
    assert consumers.subscription("g", "U") == wants("U")


def test_what_a_member_wanted_goes_with_it():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T", "mine", 1)))
    change(consumers, TWO, data(wants("T", "newer", 2), wants("U")))

    left = consumers.leave("g", "two")

    assert left == GroupChange(
        group="g", notify=("one",), left=(TWO,), topics_removed=("U",), topics_replaced=("T",)
    )
    assert consumers.subscription("g", "T") == wants("T", "mine", 1)


@pytest.mark.parametrize(
    ("model", "notifies"), [(MessageModel.BROADCASTING, True), (MessageModel.CLUSTERING, False)]
)
def test_broadcasting_groups_and_those_that_do_not_want_it_are_not_notified(model, notifies):
    consumers = ConsumerTable()
    for client in (ONE, TWO):
        result = consumers.heartbeat(
            client.id, client, data(wants("T"), model=model), now=0.0, notifies=notifies
        )
        assert result.change is not None
        assert result.change.notify == ()

    closed = consumers.close("one")

    assert [change.notify for change in closed] == [()]


# Leaving.


def test_a_closed_connection_leaves_all_its_groups_at_once():
    consumers = ConsumerTable()
    for group in ("g", "h"):
        change(consumers, ONE, data(wants("T"), group=group))
    change(consumers, TWO, data(wants("T"), group="h"))

    gone, shrunk = consumers.close("one")

    assert gone == GroupChange(group="g", left=(ONE,), topics_removed=("T",), is_gone=True)
    assert shrunk == GroupChange(group="h", notify=("two",), left=(ONE,))
    assert consumers.close("one") == ()
    assert consumers.groups() == ("h",)
    assert consumers.groups_of("T") == {"h"}


def test_goodbye_from_somebody_unknown_is_nothing():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T")))

    assert consumers.leave("g", "two") is None
    assert consumers.leave("h", "one") is None


def test_survivors_are_told_of_those_that_fell_silent():
    consumers = ConsumerTable()
    for client in (ONE, TWO, THREE):
        change(consumers, client, data(wants("T")), now=0.0)
    change(consumers, ONE, data(wants("T"), group="h"), now=50.0)
    change(consumers, TWO, data(wants("T")), now=100.0)

    assert consumers.expire(CLIENT_LIFE) == ((), ())
    channels, changes = consumers.expire(CLIENT_LIFE + 0.1)

    assert channels == ("one", "three")
    assert changes == (
        GroupChange(group="g", notify=("two",), left=(ONE, THREE)),
        GroupChange(group="h", left=(ONE,), topics_removed=("T",), is_gone=True),
    )
    assert consumers.expire(CLIENT_LIFE + 0.1) == ((), ())


def test_what_those_who_fell_silent_together_wanted_is_told_once_and_in_their_order():
    consumers = ConsumerTable()
    change(consumers, ONE, data(*map(wants, ("T", "D", "C", "B"))), now=0.0)
    change(consumers, TWO, data(*(wants(topic, "A", 2) for topic in ("F", "T", "E", "B"))), now=0.0)
    change(consumers, THREE, data(wants("T"), wants("B")), now=100.0)

    _, (gone,) = consumers.expire(CLIENT_LIFE + 1.0)

    assert gone == GroupChange(
        group="g",
        notify=("three",),
        left=(ONE, TWO),
        topics_removed=("D", "C", "F", "E"),
        topics_replaced=("T", "B"),
    )


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


# Short heartbeats.


def test_short_heartbeats_keep_the_subscription():
    consumers = ConsumerTable()
    full = consumers.heartbeat("one", ONE, data(wants("T")), now=0.0, fingerprint=7)
    short = consumers.heartbeat(
        "one", ONE, data(), now=100.0, fingerprint=7, without_subscriptions=True
    )

    assert not full.wants_subscriptions
    assert short.change is None
    assert not short.wants_subscriptions
    assert set(consumers.subscriptions("g")) == {"T"}
    assert consumers.expire(CLIENT_LIFE + 50.0) == ((), ())


def test_a_short_heartbeat_that_cannot_be_understood_is_answered_by_a_question():
    consumers = ConsumerTable()
    after_restart = consumers.heartbeat(
        "one", ONE, data(), now=0.0, fingerprint=7, without_subscriptions=True
    )
    assert after_restart.wants_subscriptions
    assert after_restart.change is not None
    assert after_restart.change.notify == ("one",)

    consumers.heartbeat("one", ONE, data(wants("T")), now=1.0, fingerprint=7)
    other = consumers.heartbeat(
        "one", ONE, data(), now=2.0, fingerprint=8, without_subscriptions=True
    )
    assert other.wants_subscriptions


# Subscriptions that came with pulls.


def test_a_subscription_of_a_pull_stands_in_for_ten_minutes():
    consumers = ConsumerTable()
    consumers.compensate("g", wants("T", "A"), now=0.0)

    assert consumers.subscription("g", "T") == wants("T", "A")
    assert consumers.subscription("g", "T", with_compensation=False) is None
    assert not consumers.is_online("g")
    assert consumers.consumer_list("g") is None
    assert consumers.groups_of("T") == frozenset()

    consumers.expire(COMPENSATION_LIFE)
    assert consumers.subscription("g", "T") is not None
    consumers.expire(COMPENSATION_LIFE + 0.1)
    assert consumers.subscription("g", "T") is None


def test_what_pulls_said_is_kept_as_long_as_there_is_room():
    consumers = ConsumerTable(compensation_room=1_000)
    for group in ("a", "b", "a"):
        consumers.compensate(group, wants("T", group * 400), now=0.0)
    both = consumers.subscription("a", "T"), consumers.subscription("b", "T")

    consumers.compensate("c", wants("T", "c" * 300), now=1.0)
    consumers.compensate("d", wants("T", "d" * 2_000), now=1.0)

    assert all(both)
    assert not any(consumers.subscription(group, "T") for group in "abcd")
    consumers.compensate("e", wants("T", "e" * 900), now=1.0)
    consumers.expire(COMPENSATION_LIFE + 2.0)
    consumers.compensate("f", wants("T", "f" * 900), now=1.0)
    assert consumers.subscription("f", "T") is not None


def test_what_a_pull_said_first_is_forgotten_first():
    consumers = ConsumerTable(compensation_room=1_000)
    for group in ("a", "b", "a", "c"):
        consumers.compensate(group, wants("T", group * 400), now=0.0)

    assert [bool(consumers.subscription(group, "T")) for group in "abc"] == [True, False, True]


def test_a_heartbeat_outweighs_what_a_pull_said():
    consumers = ConsumerTable()
    consumers.compensate("g", wants("T", "pull", 99), now=0.0)
    change(consumers, ONE, data(wants("T", "heartbeat", 1)))

    assert consumers.subscription("g", "T") == wants("T", "heartbeat", 1)


# Bodies.


def test_the_lists_show_every_connection():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T")))
    consumers.heartbeat("second connection", ONE, data(wants("T")), now=1.0)
    change(consumers, TWO, data(wants("T")))

    ids = consumers.consumer_list("g")
    connections = consumers.connections("g")

    assert ids is not None
    assert ids.consumer_id_list == ("one", "one", "two")
    assert connections is not None
    assert [entry.client_addr for entry in connections.connection_set] == [
        "10.0.0.1:1",
        "10.0.0.1:1",
        "10.0.0.2:2",
    ]
    assert connections.connection_set[2].language is LanguageName.CPP
    assert connections.consume_type is ConsumeType.CONSUME_PASSIVELY
    assert connections.message_model is MessageModel.CLUSTERING
    assert connections.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    assert connections.subscription_table == {"T": wants("T")}
    assert consumers.connections("h") is None


def test_how_a_group_consumes_is_what_was_said_last():
    consumers = ConsumerTable()
    change(consumers, ONE, data(wants("T")))
    change(consumers, TWO, data(wants("T"), model=MessageModel.BROADCASTING))

    assert consumers.model("g") is MessageModel.BROADCASTING
    assert consumers.model("h") is None


# Real clients.


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

    joining, joined, *repeated = changes
    assert joining is not None
    assert joining.topics_added == ("%RETRY%GID_G_26277", "G_27282")
    assert joined == GroupChange(
        group="GID_G_26277",
        notify=("127.0.0.1@one6da228c9455", "11686-127.0.0.1@one"),
        joined=(Client("11686-127.0.0.1@one"),),
    )
    assert repeated == [None, None]
    assert consumers.model("GID_G_26277") is MessageModel.CLUSTERING


# Against a model.

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
        assert {entry.group for entry in changes} == shrunk
        for entry in changes:
            assert set(entry.notify) == self.members(entry.group)

    @invariant()
    def what_a_connection_takes_is_what_its_groups_take(self) -> None:
        taken: dict[Channel, int] = {}
        for group in ("g", "h"):
            for member in self.table.members(group):
                taken[member.channel] = taken.get(member.channel, 0) + member.size
        assert self.table._said == taken

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


def table(*channels: str) -> ProducerTable:
    producers = ProducerTable()
    for channel in channels:
        producers.heartbeat("p", channel, Client("client of " + channel), now=0.0)
    return producers


def test_a_producer_is_new_once():
    producers = ProducerTable()

    assert producers.heartbeat("p", "x", Client("one"), now=0.0)
    assert not producers.heartbeat("p", "x", Client("one"), now=30.0)
    assert producers.heartbeat("q", "x", Client("one"), now=30.0)
    assert producers.is_online("p")
    assert not producers.is_online("r")
    assert producers.groups() == ("p", "q")


def test_checks_go_round():
    producers = table("x", "y", "z")

    assert Counter(chosen(producers) for _ in range(9)) == {"x": 3, "y": 3, "z": 3}


def test_only_a_live_connection_is_chosen_however_many_dead_ones_there_are():
    producers = table(*"abcdefgh")

    assert {chosen(producers, dead=tuple("abcdefg")) for _ in range(8)} == {"h"}
    assert chosen(producers, dead=tuple("abcdefgh")) is None
    assert chosen(producers, group="nobody") is None


def test_a_connection_that_takes_no_more_bytes_is_the_second_choice():
    producers = table("x", "y")

    assert {chosen(producers, full=("x",)) for _ in range(4)} == {"y"}
    assert chosen(producers, full=("x", "y")) in ("x", "y")
    assert chosen(producers, dead=("y",), full=("x",)) == "x"


def test_silent_producers_are_forgotten_and_their_connections_named():
    producers = table("x", "y")
    producers.heartbeat("q", "x", Client("client of x"), now=50.0)
    producers.heartbeat("p", "y", Client("client of y"), now=100.0)

    assert producers.expire(CLIENT_LIFE) == ()
    assert producers.expire(CLIENT_LIFE + 0.1) == ("x",)
    assert producers.groups() == ("p",)
    assert producers.channels_of("client of x") == ()


def test_a_client_keeps_its_way_while_it_is_in_another_group():
    producers = table("x")
    producers.heartbeat("q", "x", Client("client of x"), now=0.0)

    assert producers.leave("p", "x")
    assert not producers.leave("p", "x")
    assert producers.channels_of("client of x") == ("x",)
    assert producers.close("x") == {"q"}
    assert producers.channels_of("client of x") == ()


def test_a_client_that_came_back_is_not_lost_when_its_old_connection_closes():
    producers = ProducerTable()
    producers.heartbeat("p", "old", Client("one"), now=0.0)
    producers.heartbeat("p", "new", Client("one"), now=1.0)
    both = producers.channels_of("one")

    producers.close("old")

    assert both == ("old", "new")
    assert producers.channels_of("one") == ("new",)


def test_a_connection_that_changes_its_client_id_is_another_producer():
    producers = ProducerTable()
    producers.heartbeat("p", "x", Client("one"), now=0.0)

    assert producers.heartbeat("p", "x", Client("two"), now=1.0)
    assert producers.channels_of("one") == ()
    assert producers.channels_of("two") == ("x",)


def test_the_lists_show_who_is_there():
    producers = ProducerTable()
    producers.heartbeat("p", "x", Client("one", LanguageName.GO, 317, "10.0.0.1:9"), now=10.0)

    connections = producers.connections("p")
    (info,) = producers.infos("p", now=15.0, wall=1_700_000_000.0)

    assert connections is not None
    (entry,) = connections.connection_set
    assert (entry.client_id, entry.client_addr) == ("one", "10.0.0.1:9")
    assert (entry.language, entry.version) == (LanguageName.GO, 317)
    assert producers.connections("q") is None
    assert producers.infos("q", now=15.0, wall=1_700_000_000.0) == ()
    assert producers.clients("p") == (Client("one", LanguageName.GO, 317, "10.0.0.1:9"),)
    assert info.last_update_timestamp == 1_699_999_995_000
    assert info.remote_ip == "10.0.0.1:9"


@pytest.mark.parametrize("ending", ["close", "expire"])
def test_closing_a_connection_costs_as_much_as_the_groups_it_is_in(ending):
    def by_joining():
        """How much closing takes, by what joining takes."""
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

    # It takes less than joining; when it took the square of it, it was two hundred times as much.
    assert shortest_of(by_joining, 20) < 20


def test_a_connection_has_room_for_some_groups_and_keeps_those_it_has():
    producers = ProducerTable(most=2)
    assert producers.has_room("p", "x")
    producers.heartbeat("p", "x", Client("one"), now=0.0)
    producers.heartbeat("q", "x", Client("one"), now=0.0)

    full = [producers.has_room(group, "x") for group in "pqr"]
    other = producers.has_room("r", "y")
    producers.leave("p", "x")

    assert full == [True, True, False]
    assert other
    assert producers.has_room("r", "x")
    assert producers.has_room("n" * 255, "x")
    assert not producers.has_room("n" * 256, "x")


names = st.sampled_from(("x", "y", "z"))
ids = st.sampled_from(("one", "two"))
groups = st.sampled_from(("p", "q"))


class Producers(RuleBasedStateMachine):
    """The table against what was heard over each connection."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = ProducerTable()
        self.heard: dict[tuple[str, str], tuple[str, float]] = {}

    @rule(seconds=st.sampled_from((1.0, 60.0, 121.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(group=groups, channel=names, client=ids)
    def beats(self, group: str, channel: str, client: str) -> None:
        known = self.heard.get((group, channel), (None, 0.0))[0]
        is_new = self.table.heartbeat(group, channel, Client(client), self.now)
        assert is_new == (known != client)
        self.heard[group, channel] = (client, self.now)

    @rule(group=groups, channel=names)
    def leaves(self, group: str, channel: str) -> None:
        assert self.table.leave(group, channel) == ((group, channel) in self.heard)
        self.heard.pop((group, channel), None)

    @rule(channel=names)
    def closes(self, channel: str) -> None:
        self.table.close(channel)
        self.heard = {key: value for key, value in self.heard.items() if key[1] != channel}

    @rule()
    def scan(self) -> None:
        silent = {key[1] for key, (_, at) in self.heard.items() if self.now - at > CLIENT_LIFE}
        assert set(self.table.expire(self.now)) == silent
        self.heard = {key: value for key, value in self.heard.items() if key[1] not in silent}

    @invariant()
    def the_table_is_what_was_heard(self) -> None:
        assert set(self.table.groups()) == {group for group, _ in self.heard}
        for group in ("p", "q"):
            connections = self.table.connections(group)
            shown = [] if connections is None else [c.client_id for c in connections.connection_set]
            known = [client for (name, _), (client, _) in self.heard.items() if name == group]
            assert sorted(filter(None, shown)) == sorted(known)
            found = chosen(self.table, group=group)
            assert (found is None) == (not known)
        for client in ("one", "two"):
            ways = self.table.channels_of(client)
            live = {channel for (_, channel), (name, _) in self.heard.items() if name == client}
            assert len(ways) == len(set(ways))
            assert set(ways) == live


Producers.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestProducers = Producers.TestCase


@pytest.mark.parametrize("count", [1, 2, 5])
def test_members_that_leave_do_not_disturb_the_round(count):
    producers = table(*"abcde")
    for _ in range(7):
        chosen(producers)

    for channel in "abcde"[count:]:
        producers.close(channel)

    assert {chosen(producers) for _ in range(count)} == set("abcde"[:count])
