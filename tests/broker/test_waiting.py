"""Who waits, found by queue, by topic and by group."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.longpoll import HeldPull, WaitingTable
from orbitmq.filter.tags import parse_tags
from orbitmq.wire.command import Command

TOPICS = ("T", "U")
QUEUES = (0, 1)
GROUPS = ("g", "h")


def pull_of(topic: str, queue_id: int, group: str, tags: str = "*") -> HeldPull:
    connection: Any = None
    request = Command.request(11, opaque=1, body=tags.encode())
    return HeldPull(connection, request, topic, queue_id, group, 0, parse_tags(tags))


pulls = st.builds(
    pull_of, st.sampled_from(TOPICS), st.sampled_from(QUEUES), st.sampled_from(GROUPS)
)


@given(st.lists(pulls, max_size=20), st.sets(st.integers(0, 19)))
def test_those_are_found_who_wait_and_whom_it_concerns(added, leaving):
    table = WaitingTable()
    for pull in added:
        table.add(pull)
    for number in leaving:
        if number < len(added):
            table.remove(added[number])
    there = [pull for number, pull in enumerate(added) if number not in leaving]

    assert bool(table) == bool(there)
    for topic in (None, *TOPICS):
        for queue_id in (None, *QUEUES):
            for group in (None, *GROUPS):
                found = list(table.find(topic, queue_id, group))
                assert len(found) == len(set(found))
                assert set(found) == {
                    pull
                    for pull in there
                    if topic in (None, pull.topic)
                    and queue_id in (None, pull.queue_id)
                    and group in (None, pull.group)
                }


@given(st.lists(pulls, max_size=20))
def test_those_who_wait_for_a_queue_are_listed_as_they_came(added):
    table = WaitingTable()
    for pull in added:
        table.add(pull)

    for topic in TOPICS:
        for queue_id in QUEUES:
            expected = [pull for pull in added if pull.key == (topic, queue_id)]
            assert list(table.of_queue(topic, queue_id)) == expected


@given(st.lists(pulls, max_size=20))
def test_who_leaves_while_others_are_looked_for_does_no_harm(added):
    table = WaitingTable()
    for pull in added:
        table.add(pull)
    seen: list[HeldPull] = []

    for pull in table.find(None, None, None):
        seen.append(pull)
        table.remove(pull)

    assert set(seen) == set(added)
    assert not table
    # Nothing is left behind for names that nobody waits for any more.
    assert table.__dict__ == WaitingTable().__dict__


def test_one_that_waits_with_a_large_filter_counts_for_several():
    usual = pull_of("T", 0, "g", "red || blue")
    large = pull_of("T", 0, "g", "||".join(map(str, range(4_000))))

    assert usual.weight == 1
    assert large.weight == 1 + 22_888 // 4096 + 160_128 // 16_384
