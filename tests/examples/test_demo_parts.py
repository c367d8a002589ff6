"""Parts of the demo: who takes over for a shipper that is killed, and what the summary says."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from examples.demo.children import MOST_REPLACED, Shippers
from examples.demo.orders import is_hopeless
from examples.demo.revenue import Totals
from examples.demo.summary import Ending, GivenUp, Sums, add_up, show

DEADLINE = 30.0
SEED = 7
#: Orders of that seed that are not to end as dead letters, and one that is.
FINE = [f"order-{number}" for number in range(4)]
NONE_GIVEN_UP = GivenUp(frozenset(), 0)
HOPELESS = next(number for number in range(10_000) if is_hopeless(number, SEED))


@pytest.fixture
def shippers(tmp_path):
    started = Shippers("127.0.0.1:1", tmp_path)
    try:
        yield started
    finally:
        started.end()


def test_the_others_take_over_for_a_shipper_that_is_killed(shippers):
    for _ in range(3):
        shippers.join()

    first, second = killed(shippers), killed(shippers)

    again = "over its queues, and what it had in hand comes again."
    assert first == f"A shipper was killed (SIGKILL). The other 2 take {again}"
    assert second == f"A shipper was killed (SIGKILL). The other one takes {again}"
    assert (shippers.members, shippers.fallen, shippers.problem) == (1, 2, None)
    assert shippers.look_after() == []


def test_the_last_shipper_is_replaced_but_not_for_ever(shippers):
    shippers.join()

    replaced = [killed(shippers) for _ in range(MOST_REPLACED)]

    assert all("so a new one takes its place" in said for said in replaced)
    assert shippers.problem is None
    assert killed(shippers) == "A shipper was killed (SIGKILL). No other one is left."
    assert "no shipper stays" in str(shippers.problem)


def test_what_was_not_handled_when_it_was_stopped_is_not_lost(tmp_path):
    sums = summed(tmp_path, shipped={FINE[0]: 2, FINE[1]: 1})

    said = shown(sums, Ending("The broker was killed (SIGKILL).", 0))

    assert (sums.sent, sums.shipped, sums.open_in_shipping, sums.open_in_billing) == (4, 2, 2, 4)
    assert "Stopped early: this is how far it came" in said
    assert "not handled yet" in said
    assert "lost" not in said
    assert "accounted for" not in said
    assert "report it" not in said


def test_an_order_that_is_missing_although_all_was_waited_for_is_lost(tmp_path):
    said = shown(summed(tmp_path, shipped=dict.fromkeys(FINE[:3], 1)), Ending(None, 0))

    assert "Not every order is accounted for" in said
    assert "lost" in said
    assert "please report it" in said


def test_an_order_that_was_given_up_and_should_not_have_been_is_told_of(tmp_path):
    wrong = summed(tmp_path, shipped={}, given_up=GivenUp(frozenset([FINE[0]]), 1))
    right = summed(tmp_path, shipped={}, given_up=GivenUp(frozenset([f"order-{HOPELESS}"]), 1))

    assert (wrong.misjudged, right.misjudged) == (1, 0)
    assert "please report it" in shown(wrong, Ending("Spark's Java has ended", 0))


def killed(shippers: Shippers) -> str:
    """Kill a shipper; what is said about it."""
    pids = [member.process.pid for member in shippers.children]
    os.kill(pids[-1], signal.SIGKILL)
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while not (said := shippers.look_after()):
        assert time.monotonic() < end
        pause.wait(0.01)
    (sentence,) = said
    return sentence


def summed(folder: Path, *, shipped: dict[str, int], given_up: GivenUp = NONE_GIVEN_UP) -> Sums:
    """The sums of a run that acknowledged `FINE` and billed nothing."""
    totals = Totals(folder / "revenue")
    return add_up(len(FINE), SEED, folder / "billed", totals, shipped, given_up)[0]


def shown(sums: Sums, ending: Ending) -> str:
    screen = Console(record=True, width=120, file=io.StringIO())
    show(sums, pa.table({}), [], ending, screen)
    return screen.export_text()
