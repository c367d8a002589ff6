"""`orbitmq group reset`, `skip` and `clone`: planned, consented to, applied, read back."""

from __future__ import annotations

import pytest

from orbitmq import Queue
from orbitmq.testing import EmbeddedCluster


@pytest.fixture
def topic(cluster, cli, names):
    """A topic with 12 messages in 4 queues, and a group of the same name that finished them."""
    name = next(names)
    cluster.create_topic(name, queues=2)
    for broker in ("broker-a", "broker-b"):
        for queue in range(2):
            cluster.send(name, "1", "2", "3", queue=Queue(name, broker, queue))
    cli.record("group", "create", name)
    cli.record("group", "reset", name, name, "--to", "latest", "--yes")
    return name


def offsets(cluster: EmbeddedCluster, name: str) -> list[int]:
    return [offset for _, offset in sorted(cluster.progress(name, name).items())]


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (("--to", "earliest"), [0, 0, 0, 0]),
        (("--to", "latest"), [3, 3, 3, 3]),
        (("--to", "2"), [2, 2, 2, 2]),
        (("--to", "1", "--queue", "broker-b:1"), [3, 3, 3, 1]),
        (("--by", "-2"), [1, 1, 1, 1]),
        (("--by", "-9"), [0, 0, 0, 0]),
        (("--to", "1h"), [0, 0, 0, 0]),
        (("--to", "2001-02-03T04:05:06"), [0, 0, 0, 0]),
    ],
)
def test_a_reset_puts_progress_where_it_was_told_to_in_all_queues_or_some(
    cluster, cli, topic, to, expected
):
    if to == ("--to", "latest"):
        cli.record("group", "reset", topic, topic, "--to", "earliest", "--yes")

    moved = cli.record("group", "reset", topic, topic, *to, "--yes")

    assert moved["result"] == "moved"
    assert offsets(cluster, topic) == expected
    assert all(each["read_back"] == each["to_offset"] for each in moved["queues"])


def test_a_dry_run_shows_queue_by_queue_what_is_skipped_and_what_comes_again(cluster, cli, topic):
    planned = cli.record("group", "reset", topic, topic, "--to", "1", "--dry-run")
    text = cli.run("group", "reset", topic, topic, "--to", "1", "--dry-run")

    assert (planned["result"], planned["is_dry_run"]) == ("would be moved", True)
    assert (planned["skipped"], planned["replayed"]) == (0, 8)
    assert [each["read_back"] for each in planned["queues"]] == [None] * 4
    assert f"Plan: group {topic} in topic {topic}" in text.stdout
    assert "nothing was changed" in text.stderr
    assert offsets(cluster, topic) == [3, 3, 3, 3]


def test_nothing_moves_before_a_yes_and_at_a_terminal_the_plan_is_shown_first(cluster, cli, topic):
    refused = cli.run("group", "reset", topic, topic, "--to", "earliest")
    assert refused.returncode == 2
    assert "0 messages skipped, 12 consumed again" in refused.stderr
    assert offsets(cluster, topic) == [3, 3, 3, 3]

    with cli.at_terminal("group", "reset", topic, topic, "--to", "earliest") as terminal:
        terminal.until("[y/N]")
        terminal.press("y\r")
        assert terminal.wait() == 0
    assert "Plan: " in terminal.screen
    assert "Read back: " in terminal.screen
    assert offsets(cluster, topic) == [0, 0, 0, 0]


def test_skipping_puts_a_group_at_the_end_of_all_that_it_consumes(cluster, cli, topic):
    cli.record("group", "reset", topic, topic, "--to", "earliest", "--yes")

    (moved,) = cli.records("group", "skip", topic, "--yes")
    again = cli.run("group", "skip", topic, "--yes")

    assert (moved["topic"], moved["skipped"], moved["result"]) == (topic, 12, "moved")
    assert offsets(cluster, topic) == [3, 3, 3, 3]
    assert "nothing to move" in again.stderr


def test_a_clone_has_the_progress_of_its_source_and_is_made_if_need_be(cluster, cli, topic):
    cli.record("group", "reset", topic, topic, "--to", "2", "--yes")

    moved = cli.record("group", "clone", topic, "twin", "--yes")

    assert (moved["group"], moved["source"], moved["result"]) == ("twin", topic, "moved")
    assert sorted(cluster.progress("twin", topic).values()) == [2, 2, 2, 2]
