"""Records that are walked in many places at once: the same places as one after the other."""

from __future__ import annotations

import random

import pytest

from orbitmq.message.scan import LANE, LEAST_LANES, walk_lanes
from tests.support.message import VECTOR_RECORD, plain_pull, with_bytes

MAGIC = VECTOR_RECORD[4:8]
COUNT = 4000


def starts_in(pull: bytes) -> list[int]:
    found, at = [], 0
    while at < len(pull):
        found.append(at)
        at += int.from_bytes(pull[at : at + 4], "big")
    return found


def bodies_of(seed: int, most: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.randrange(most)) for _ in range(COUNT)]


@pytest.mark.parametrize("most", [2, 300, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_lanes_find_what_a_walk_finds_and_most_of_it(seed, most):
    bodies = bodies_of(seed, most)
    pull = plain_pull(COUNT, lambda n: bodies[n])
    expected = starts_in(pull)

    found = walk_lanes(memoryview(pull), 0, len(pull), len(pull) // COUNT).tolist()

    assert found == expected[: len(found)]
    assert len(found) > COUNT - 4 * LANE


@pytest.mark.parametrize("size", [-1, 0, 5, 91, 1000, 2**31 - 1])
def test_magic_codes_inside_bodies_end_the_walk_before_they_are_believed(size):
    # In every body, so that lanes begin in the midst of one.
    trap = (size.to_bytes(4, "big", signed=True) + MAGIC) * 30
    bodies = [trap + b"x" * (n % 13) for n in range(COUNT)]
    pull = plain_pull(COUNT, lambda n: bodies[n])

    found = walk_lanes(memoryview(pull), 0, len(pull), len(pull) // COUNT).tolist()

    assert found
    assert found == starts_in(pull)[: len(found)]


@pytest.mark.parametrize("damage", [b"\0" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff"])
def test_nothing_behind_a_damaged_size_is_found(damage):
    bodies = bodies_of(7, 300)
    pull = plain_pull(COUNT, lambda n: bodies[n])
    starts = starts_in(pull)
    damaged = with_bytes(pull, starts[1234], damage)

    found = walk_lanes(memoryview(damaged), 0, len(damaged), len(pull) // COUNT).tolist()

    assert found == starts[:1234]


def test_every_record_that_is_found_ends_before_the_stop():
    bodies = bodies_of(8, 300)
    pull = plain_pull(COUNT, lambda n: bodies[n])
    starts = starts_in(pull)
    stop = starts[2000] + 50

    found = walk_lanes(memoryview(pull), starts[10], stop, len(pull) // COUNT).tolist()

    assert found == starts[10 : 10 + len(found)]
    assert found[-1] <= starts[1999]


def test_a_few_records_are_left_to_those_who_go_one_by_one():
    pull = plain_pull(LANE * LEAST_LANES)

    assert not len(walk_lanes(memoryview(pull), 0, len(pull), 100))
