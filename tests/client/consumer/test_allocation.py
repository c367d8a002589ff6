"""Shares: Java's answers, and the properties that make a group work without a leader."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.strategies import (
    NAMED,
    AllocationError,
    Averagely,
    AveragelyByCircle,
    ByConfig,
    ConsistentHash,
    MachineRoomNearby,
    in_order,
    name_of,
    share,
    strategy_named,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.javahash import java_order
from tests.support.allocation import RECORDED, SEED, Case, cases, digest, room_of, strategy_of


@pytest.fixture(scope="module")
def questions():
    return list(cases())


@pytest.fixture(scope="module")
def recorded():
    found: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return found


def test_the_recorded_answers_belong_to_the_generated_questions(questions, recorded):
    assert recorded["seed"] == SEED
    assert recorded["questions"] == digest(questions)
    assert len(recorded["answers"]) == len(questions) == 10_000


@pytest.mark.feature("A4")
@pytest.mark.feature("A5")
@pytest.mark.feature("A6")
@pytest.mark.feature("A7")
def test_every_strategy_answers_as_the_java_classes_do(questions, recorded):
    asked: dict[str, int] = {}

    for case, answer in zip(questions, recorded["answers"], strict=True):
        assert _answer(case) == answer, case
        name = case.strategy.partition(":")[0]
        asked[name] = asked.get(name, 0) + 1

    assert len(asked) == 6
    assert min(asked.values()) > 1000


def _answer(case: Case) -> list[int] | None:
    """The places of the own queues in the list as it was given; None for a refusal."""
    queues = in_order(case.queues)
    ids = sorted(case.client_ids, key=java_order)
    try:
        own = list(strategy_of(case)(queues, ids, case.me))
    except AllocationError:
        return None
    places = {queue: place for place, queue in reversed([*enumerate(case.queues)])}
    return [places[queue] for queue in own]


QUEUES = st.builds(
    lambda counts: [
        Queue("orders", f"broker-{number}", place)
        for number, count in enumerate(counts)
        for place in range(count)
    ],
    st.lists(st.integers(0, 24), min_size=1, max_size=4),
)
MEMBERS = st.sets(
    st.from_regex(r"r[1-3]\.[0-9]{1,3}\.[0-9]{1,3}@[0-9]{1,5}#[0-9]{1,9}", fullmatch=True),
    min_size=1,
    max_size=24,
)
STRATEGIES = st.sampled_from(
    [
        *NAMED.values(),
        ConsistentHash(virtual_nodes=1),
        MachineRoomNearby(lambda broker: f"r{broker[-1]}", room_of),
        MachineRoomNearby(lambda broker: f"r{broker[-1]}", room_of, AveragelyByCircle()),
    ]
)


@pytest.mark.feature("A3")
@given(queues=QUEUES, members=MEMBERS, strategy=STRATEGIES, chance=st.randoms())
def test_shares_are_disjoint_and_complete_whatever_order_members_see_things_in(
    queues, members, strategy, chance
):
    shares = []
    for me in members:
        seen_queues, seen_members = list(queues), list(members)
        chance.shuffle(seen_queues)
        chance.shuffle(seen_members)
        shares.append(share(strategy, seen_queues, seen_members, me))

    assert sorted(chain.from_iterable(shares)) == sorted(queues)


@given(queues=QUEUES, members=MEMBERS)
def test_consistent_hash_moves_only_the_queues_of_a_member_that_leaves(queues, members):
    gone, *stayed = members
    for me in stayed:
        before = set(share(ConsistentHash(), queues, members, me))
        after = set(share(ConsistentHash(), queues, stayed, me))

        assert before <= after
        assert after - before <= set(share(ConsistentHash(), queues, members, gone))


def _queues(count: int, broker: str = "b", topic: str = "T") -> list[Queue]:
    return [Queue(topic, broker, place) for place in range(count)]


def _places(own: Sequence[Queue]) -> list[int]:
    return [queue.id for queue in own]


def broken(queues, ids, me):
    raise KeyError(me)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (MachineRoomNearby(room_of, room_of), "no machine room is known for T@b:0"),
        (broken, r"broken.*KeyError: 'r1\.me'"),
    ],
)
def test_an_error_of_a_strategy_names_it(strategy, problem):
    with pytest.raises(AllocationError, match=problem):
        share(strategy, _queues(1), ["r1.me"], "r1.me")


def test_a_consumer_that_is_not_listed_owns_nothing():
    assert share(Averagely(), _queues(4), ["c1"], "c2") == ()
    assert list(Averagely()(_queues(4), ["c1"], "c2")) == []


@pytest.mark.feature("A7")
def test_a_function_is_a_strategy():
    def the_last_one(queues, ids, me):
        return [queues[-1]] if ids[0] == me else []

    strategy = strategy_named(the_last_one)

    assert _places(share(strategy, _queues(3), ["b", "a"], "a")) == [2]
    assert share(strategy, _queues(3), ["b", "a"], "b") == ()
    assert name_of(strategy).endswith("the_last_one")


def test_a_queue_that_the_topic_does_not_have_is_left_out():
    wanted = ByConfig((Queue("T", "b", 1), Queue("T", "b", 9), Queue("U", "b", 0)))

    assert _places(share(wanted, _queues(3), ["a"], "a")) == [1]


def test_strategies_are_chosen_by_apaches_names():
    assert list(NAMED) == ["AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"]
    assert strategy_named("avg_by_circle") == AveragelyByCircle()
    assert name_of(MachineRoomNearby(room_of, room_of)) == "MACHINE_ROOM_NEARBY-AVG"

    with pytest.raises(SettingError, match="AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, got 'MACHINE_RO"):
        strategy_named("MACHINE_ROOM")
    with pytest.raises(SettingError, match="got 7"):
        strategy_named(7)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(SettingError, match="virtual_nodes"):
        ConsistentHash(virtual_nodes=0)
