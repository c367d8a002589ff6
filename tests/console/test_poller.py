from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.console.collect import Poller
from orbitmq.errors import OrbitError


@given(st.integers(1, 40), st.integers(1, 12), st.sets(st.integers(0, 39)))
def test_every_name_has_a_turn_whichever_are_urgent(many, size, numbers):
    poller: Poller[str, None] = Poller(size)
    names = [f"group-{number}" for number in range(many)]
    urgent = {f"group-{number}" for number in numbers}
    reserved = max(1, size // 3)

    seen: set[str] = set()
    for _ in range(many // reserved + 2):
        chosen = poller.choose(names, urgent)
        assert len(chosen) == len(set(chosen)) == min(size, many)
        seen.update(chosen)

    assert seen == set(names)


def test_urgent_names_have_most_of_the_turns():
    poller: Poller[str, None] = Poller(3)
    names = [f"group-{number}" for number in range(100)]

    turns = [poller.choose(names, {"group-50", "group-51"}) for _ in range(10)]

    assert all({"group-50", "group-51"} <= set(turn) for turn in turns)


def test_names_that_are_gone_are_forgotten_and_new_ones_come_first():
    poller: Poller[str, None] = Poller(1)
    assert poller.choose(["a", "b"]) == ["a"]
    assert poller.choose(["b", "c"]) == ["b"]

    assert poller.choose(["a", "b", "c"]) == ["a"]


async def test_answers_are_kept_until_the_next_turn_and_while_requests_fail():
    poller: Poller[str, int] = Poller(2)
    asked: list[str] = []

    async def ask(name):
        asked.append(name)
        if name == "b" and len(asked) > 2:
            raise OrbitError("no answer")
        return len(asked)

    await poller.refresh(["a", "b", "c"], ask)
    await poller.refresh(["a", "b", "c"], ask, due=["b"])
    assert (asked, poller.answers) == (["a", "b", "b"], {"a": 1, "b": 2})

    await poller.refresh(["b", "c"], ask)
    assert poller.answers == {"b": 2, "c": 5}
