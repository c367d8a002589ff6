"""Everybody has a turn, those in a hurry sooner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.console.collect import Rotation


@given(st.integers(1, 40), st.integers(1, 12), st.sets(st.integers(0, 39)))
def test_everybody_has_a_turn_whoever_is_in_a_hurry(many: int, size: int, hurry: set[int]) -> None:
    rotation = Rotation(size)
    names = [f"group-{number}" for number in range(many)]
    urgent = {f"group-{number}" for number in hurry}
    reserved = max(1, size // 3)

    seen: set[str] = set()
    for _ in range(many // reserved + 2):
        chosen = rotation.next(names, urgent)
        assert len(chosen) == len(set(chosen)) == min(size, many)
        seen.update(chosen)

    assert seen == set(names)


def test_those_in_a_hurry_have_most_of_the_turns() -> None:
    rotation = Rotation(3)
    names = [f"group-{number}" for number in range(100)]

    turns = [rotation.next(names, {"group-50", "group-51"}) for _ in range(10)]

    assert all({"group-50", "group-51"} <= set(turn) for turn in turns)


def test_who_is_gone_is_forgotten_and_new_ones_come_first() -> None:
    rotation = Rotation(1)
    assert rotation.next(["a", "b"]) == ["a"]
    assert rotation.next(["b", "c"]) == ["b"]

    assert rotation.next(["a", "b", "c"]) == ["a"]
