"""Producers: who can be asked about a transaction, and who can be given a reply."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.groups import CLIENT_LIFE, Channel, Client, ProducerTable
from orbitmq.wire.bodies import LanguageName
from tests.support.tries import shortest_of


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
