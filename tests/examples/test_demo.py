"""The demo ends in a summary that adds up, whenever it is ended, and says so in its exit code.

Two runs serve most of the tests. One is watched at a terminal until it has shown all there is to
show, has a consumer killed, and is ended by Ctrl-C while orders come; the other ends by itself, its
output in a pipe.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pyarrow.dataset as ds
import pytest

from examples.demo.orders import TOPIC, is_hopeless, make_order, segment_of
from examples.demo.revenue import Place, Revenue, Totals, of_rows
from tests.support.command import ROOT, Terminal, environment
from tests.support.demoing import (
    DEADLINE,
    RunningDemo,
    frames_of,
    largest_of,
    picture_in,
    sums_of,
    table_of,
)

pytestmark = pytest.mark.timeout(300)

SEED = 7


@dataclass(frozen=True, slots=True)
class Watched:
    """A run at a terminal, ended by Ctrl-C while orders came."""

    code: int
    said: str
    folder: Path
    #: Seconds from Ctrl-C to the end.
    took: float
    #: What the console knew about Spark's queries while orders came.
    pipelines: list[dict[str, Any]]
    children: list[int]


@dataclass(frozen=True, slots=True)
class Whole:
    """A run that came to its own end, with its output in a pipe."""

    code: int
    said: str
    folder: Path
    picture: Path

    @property
    def sent(self) -> int:
        return sums_of(self.said)["billing"][0]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched") / "demo"
    options = ("--seconds", "600", "--rate", "200", "--keep")
    with RunningDemo(folder, *options) as demo:
        (console,) = re.findall(r"Look around: (http://127\.0\.0\.1:\d+)", demo.until(" top --"))
        # Shippers are often not behind at all.
        demo.until(lambda said: largest_of(said).count(0) <= (largest_of(said).shipping_lag == 0))
        pipelines = pipelines_at(console, until=lambda found: any(each["dead"] for each in found))
        (shipper,) = [pid for pid in demo.children() if "examples.demo.shipping" in words_of(pid)]
        os.kill(shipper, signal.SIGKILL)
        demo.until(
            "A shipper was killed (SIGKILL). It was the only one, so a new one takes its place, "
            "and what it had in hand comes again."
        )
        children = demo.children()

        began = time.monotonic()
        demo.press_ctrl_c()
        code = demo.wait()
        took = time.monotonic() - began
        return Watched(code, demo.said, folder, took, pipelines, children)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "demo"
    picture = folder.parent / "chart.svg"
    options = ("--seconds", "4", "--rate", "250", "--seed", str(SEED), "--picture", str(picture))
    with RunningDemo(folder, *options, piped=True) as demo:
        return Whole(demo.wait(), demo.said, folder, picture)


def test_ctrl_c_while_orders_come_ends_it_within_five_seconds_and_says_how_far_it_came(watched):
    assert watched.took < 5
    assert "Stopping: " in watched.said
    assert "Traceback" not in watched.said
    # On a machine that is too busy for a summary it says so.
    assert watched.code in (0, 130), watched.said
    if watched.code == 0:
        for sent, done, dead, left, _ in sums_of(watched.said).values():
            assert sent == done + dead + left > 0
    until_gone(watched.children)


def test_a_run_that_ends_by_itself_tells_what_happens_while_it_happens(whole):
    assert whole.code == 0, whole.said
    assert "Traceback" not in whole.said
    told = [
        "Three shops send 250 orders a second",
        "A plain Python consumer ships them",
        "Spark bills the same orders",
        "The bank refused some",
        "It is a dead letter now",
        "The shops close",
        "Picture: ",
    ]
    assert [text for text in told if text not in whole.said] == []
    assert "Press any key" not in whole.said


def test_a_key_ends_what_stays(tmp_path):
    program = (
        "from examples.demo.interrupts import Interrupts\n"
        "from examples.demo.terminal import wait_for_key\n"
        "print('ready', flush=True); wait_for_key(Interrupts()); print('gone', flush=True)"
    )
    env = environment({"TERM": "xterm", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
    with Terminal([sys.executable, "-c", program], env, 24, 80) as terminal:
        terminal.until("ready")
        terminal.press("x")
        terminal.until("gone")
        assert terminal.wait() == 0


@pytest.mark.parametrize(
    "reach",
    [
        pytest.param(RunningDemo.until_signals_are_taken, id="while Python imports"),
        pytest.param(lambda demo: demo.until_there("broker.log"), id="while the broker starts"),
        pytest.param(lambda demo: demo.until("Starting Spark"), id="while Spark starts"),
    ],
)
def test_ctrl_c_before_the_first_order_says_that_nothing_was_sent(tmp_path, reach):
    with RunningDemo(tmp_path / "demo", "--seconds", "600") as demo:
        reach(demo)
        children = demo.children()

        began = time.monotonic()
        demo.press_ctrl_c()

        assert demo.wait() == 0, demo.said
        assert time.monotonic() - began < 5
        assert "nothing was sent" in demo.said
        assert "Traceback" not in demo.said
        assert "accounted for" not in demo.said
    until_gone(children)


def test_the_screen_shows_rates_lag_retries_dead_letters_and_batches(watched):
    frames = frames_of(watched.said)

    # An order that comes again is no other order, and none is shipped that was not sent.
    assert all(frame.shipped <= frame.sent for frame in frames)
    # That each of them was above zero was waited for. A hopeless order is tried three times.
    assert all(frame.retries >= 2 * frame.dead for frame in frames)
    assert all(
        frame.billing_lag == max(0, frame.sent - frame.billed - frame.dead) for frame in frames
    )


def test_a_consumer_that_is_killed_is_replaced(watched):
    last = frames_of(watched.said)[-1]

    # Orders are still shipped after its end.
    assert last.shipped > last.shipping_lag
    assert "1 members" not in watched.said


def test_the_stream_is_seen_at_the_console_whose_address_is_shown(watched):
    (found,) = watched.pipelines

    assert (found["name"], found["group"]) == ("billing", "billing")
    assert TOPIC in found["topics"]
    assert found["state"] in ("running", "waiting")
    assert found["batch"] >= 1
    assert found["error"] is None
    last = frames_of(watched.said)[-1]
    assert 0 < found["done"] <= last.billed
    assert 0 < found["dead"] <= last.dead
    assert found["retried"] > 0
    assert sum(found["lag"].values()) <= last.sent


def test_the_chart_has_each_series_in_one_colour_and_the_sums(whole):
    picture = picture_in(whole.picture)
    words = "".join(picture.itertext()).replace("\xa0", " ")
    colours = {
        each.get("id", ""): set(re.findall(r"stroke: (#\w+)", ET.tostring(each, "unicode")))
        for each in picture.iter()
        if each.get("id", "").startswith(("rate-", "lag-"))
    }

    assert colours["rate-billed"] == colours["lag-billing"]
    assert colours["rate-shipped"] == colours["lag-shipping"]
    assert len(set.union(*colours.values())) == 3
    assert "sent = done + dead letters, in both groups; lost 0" in words


def test_the_summary_of_a_run_adds_up(whole):
    sent, billed, dead, lost, _ = sums_of(whole.said)["billing"]

    assert 100 < sent <= 1000  # how many depends on the machine
    # Which orders are hopeless is decided by the seed, not by the run.
    assert dead == sum(is_hopeless(number, SEED) for number in range(sent)) > 0
    assert (sent, lost) == (billed + dead, 0)
    assert sums_of(whole.said)["shipping"][:4] == [sent, sent, 0, 0]
    assert "sent = done + dead letters, in both groups; lost 0" in whole.said
    assert "the bank knows no such account" in whole.said
    assert not (whole.folder / "broker").exists()


def test_the_revenue_that_the_stream_summed_up_is_that_of_the_orders(whole):
    rows = ds.dataset(whole.folder / "billed").to_table()
    summed = Totals(whole.folder / "revenue").latest()
    # A shop that heard no answer sends an order again; it is there twice then, in both sums.
    orders = rows.column("order").to_pylist()
    once = rows.take([orders.index(order) for order in set(orders)])

    assert summed == of_rows(rows)
    assert of_rows(once) == revenue_by_seed(whole.sent)
    shown = table_of(whole.said, "Revenue of paid orders")
    assert shown[0] == ["country", "gold", "new", "regular"]
    for country, *amounts in shown[1:]:
        for segment, amount in zip(shown[0][1:], amounts, strict=True):
            assert amount == f"{summed[Place(country, segment)].cents / 100:,.2f}"


def test_no_child_outlives_a_demo_that_is_killed(tmp_path):
    with RunningDemo(tmp_path / "demo", "--seconds", "600") as demo:
        demo.until("name server")
        children = demo.children()
        assert children

        demo.process.kill()
        demo.wait()
        until_gone(children)


def test_a_senseless_time_is_refused_in_one_sentence(tmp_path):
    with RunningDemo(tmp_path / "demo", "--seconds", "-1") as demo:
        assert demo.wait() == 2
        assert "--seconds must be positive, got -1" in demo.said


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path):
    thesis = tmp_path / "precious" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")

    with RunningDemo(thesis.parent, "--seconds", "1") as demo:
        assert demo.wait() == 1
        assert "is not empty and not a demo's" in demo.said
    assert thesis.read_text() == "years of work"


def test_the_picture_in_the_readme_shows_a_run_that_adds_up():
    picture = (ROOT / "docs" / "images" / "demo.svg").read_text().replace("&#160;", " ")

    assert "sent = done + dead letters, in both groups; lost 0" in picture
    assert "does not add up" not in picture


def pipelines_at(
    console: str, *, until: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """What a console says about Spark's queries, as soon as that is as wanted."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while True:
        with opener.open(f"{console}/api/v1/pipelines", timeout=DEADLINE) as answer:
            found: list[dict[str, Any]] = json.load(answer)["pipelines"]
        if until(found):
            return found
        assert time.monotonic() < end, found
        pause.wait(0.1)


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def until_gone(processes: list[int]) -> None:
    """Wait for the end of processes that are not ours to wait for."""
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"still there: {left}"
        pause.wait(0.05)


def revenue_by_seed(sent: int) -> dict[Place, Revenue]:
    """What the stream must come to, from the orders as they were decided before the run."""
    found: dict[Place, Revenue] = {}
    for each in range(sent):
        order, tag = make_order(each, SEED)
        if not is_hopeless(each, SEED):
            place = Place(order.country, segment_of(order.customer))
            before = found.get(place, Revenue(0, 0))
            paid = order.cents if tag == "paid" else 0
            found[place] = Revenue(before.orders + 1, before.cents + paid)
    return found
