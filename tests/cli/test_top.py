"""`orbitmq top`: frames for programs and pipes, a live screen at a terminal."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

from orbitmq.cli.top import meant
from orbitmq.client.consumer.consumer import Consumer
from tests.support.command import Started
from tests.support.orbitmqcli import Cli


@pytest.fixture(scope="module")
def busy(cluster, cli):
    """A topic with 20 messages, a group online that has them, and one that waits for all."""
    cluster.create_topic("orders", queues=2)
    cluster.send("orders", *[b"x"] * 20)
    cli.record("group", "create", "waiting")
    cli.record("group", "reset", "waiting", "orders", "--to", "earliest", "--yes")
    consumer = Consumer("billing", name_server=cluster.name_server, consume_from="last")
    consumer.on("orders")(lambda _message: None)
    consumer.start()
    # As long as it has not reported where it begins, everything counts as waiting.
    cluster.until_consumed("billing", "orders")
    yield consumer
    consumer.stop()


def test_one_frame_has_lag_rates_and_owners(cluster, cli, busy):
    frame = cli.record("top", "--once", "--group", "billing")
    worst = cli.record("top", "--once")

    assert [each["broker"] for each in frame["brokers"]] == ["broker-a", "broker-b"]
    groups = {each["group"]: each for each in frame["groups"]}
    assert (groups["waiting"]["lag"], groups["waiting"]["state"]) == (20, "offline")
    assert groups["waiting"]["lag_seconds"] > 0
    assert (groups["billing"]["lag"], groups["billing"]["members"]) == (0, 1)
    assert {each["messages"] for each in frame["topics"] if each["topic"] == "orders"} == {20}
    owners = {each["owner"] for each in frame["queues"] if each["topic"] == "orders"}
    assert owners == {busy.client_id}
    assert worst["group"] == "waiting"
    assert worst["handlers"] == []


def test_without_a_terminal_frames_are_printed_one_after_the_other(cluster, cli, busy):
    text = cli.text("top", "--limit", "2", "--interval", "10ms")
    frames = cli.records("top", "--limit", "2", "--interval", "10ms")

    assert text.count("OrbitMQ top") == 2
    assert text.count("Groups, most lag first") == 2
    assert "\x1b" not in text
    changes = [{each["lag_change"] for each in frame["groups"]} for frame in frames]
    assert changes[0] == {None}
    assert None not in changes[1]


def test_all_rates_of_a_frame_are_of_the_same_seconds_and_add_up(cluster, cli, busy):
    cluster.create_topic("bills", queues=1)
    cli.record("group", "create", "slow")
    cli.record("group", "reset", "slow", "bills", "--to", "earliest", "--yes")
    with cli.start("top", "--json", "--interval", "100ms") as running:
        running.until(bool)
        cluster.send("bills", *[b"x"] * 30)
        cluster.send("orders", *[b"x"] * 10)
        cluster.until_consumed("billing", "orders")
        lines = running.until(lambda lines: is_counted(json.loads(lines[-1])))
    # Other tests have their own order of groups.
    cli.record("group", "delete", "slow", "--with-topics", "--yes")
    cli.record("topic", "delete", "bills", "--yes")
    first, last = json.loads(lines[0]), json.loads(lines[-1])

    assert first["rate_seconds"] is None
    seconds = last["rate_seconds"]
    topics = {each["topic"]: each["in_rate"] * seconds for each in last["topics"]}
    groups = {each["group"]: each for each in last["groups"]}
    assert (topics["bills"], topics["orders"]) == (pytest.approx(30), pytest.approx(10))
    assert groups["slow"]["lag_change"] * seconds == pytest.approx(30)
    assert groups["slow"]["out_rate"] == 0
    assert groups["billing"]["out_rate"] * seconds == pytest.approx(10)
    for side in ("in_rate", "out_rate"):
        assert sum(each[side] for each in last["brokers"]) == pytest.approx(last[side])
    assert last["in_rate"] * seconds == pytest.approx(40)


def is_counted(frame: Any) -> bool:
    """Whether a frame has the 30 messages of one topic and the 10 that a group finished."""
    seconds = frame["rate_seconds"] or 0.0
    out = {each["group"]: each["out_rate"] * seconds for each in frame["groups"]}
    return bool(frame["in_rate"] * seconds > 39.5 and out.get("billing", 0.0) > 9.5)


def test_keys_choose_a_group_change_the_order_and_pause(cluster, cli, busy):
    with cli.at_terminal("top", "--interval", "100ms") as terminal:
        terminal.until("> waiting")
        cluster.create_topic("fresh")
        terminal.until("fresh")
        terminal.press("s")
        terminal.until("oldest first")
        terminal.press("\x1b[B")
        terminal.until("> billing")
        terminal.until("Queues of billing")
        terminal.press("p")
        terminal.until("PAUSED")
        terminal.press("q")
        assert terminal.wait() == 0
    # The other screen was entered and left again.
    assert "\x1b[?1049h" in terminal.screen
    assert terminal.screen.rstrip().endswith("\x1b[?1049l")
    assert "Traceback" not in terminal.screen


def test_keys_that_mean_nothing_are_passed_over():
    assert list(meant(b"\x1b[Axj\x1b[5~ \xffQ")) == ["up", "down", "p", "q"]


def test_ctrl_c_ends_it_in_order(cli, busy):
    with cli.start("top", "--json", "--interval", "1h") as running:
        running.until(lambda lines: len(lines) == 1)
        assert running.stop(signal.SIGINT) == 0
    assert running.errors == ""


def test_a_group_that_is_not_there_is_named_in_the_frame(cli, busy):
    frame = cli.record("top", "--once", "--group", "ghost")

    assert "no broker knows group 'ghost'" in frame["problem"]


def test_in_a_pipe_it_outlives_a_restart_of_the_cluster(nursery, tmp_path):
    data = ("--data", str(tmp_path / "data"), "--broker-port", "0")
    with Started("up", "--namesrv-port", "0", *data) as first:
        name_server = first.address("name server")
        cli = Cli(name_server, nursery)
        assert re.search(r"lag 0 +1 broker$", cli.text("top", "--once"), re.MULTILINE)
        assert "OrbitMQ, speaks 5.3.3" in cli.text("cluster", "show")
        with cli.start("top", "--interval", "100ms", "--json", "--request-timeout", "2") as top:
            top.until(bool)
            first.stop()
            top.until_told("not reachable since")
            port = name_server.rpartition(":")[2]
            with Started("up", "--namesrv-port", port, *data) as second:
                before = len(top.lines)
                top.until(lambda lines: len(lines) > before)
                code = top.stop()
                second.stop()

    assert code == 0
    assert top.errors.count("not reachable since") == 1
    assert "reachable again after" in top.errors
