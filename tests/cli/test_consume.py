"""`orbitmq consume`: looking, following, and being a member of a group."""

from __future__ import annotations

import json
import signal

import pytest

from tests.support.rebalancing import slipping_in


@pytest.fixture
def topic(cluster, names):
    """A topic with six messages in four queues."""
    name = next(names)
    cluster.create_topic(name, queues=2)
    cluster.send(name, *(f"m{number}" for number in range(6)), tags="paid", keys="k")
    return name


ALL = [f"m{number}" for number in range(6)]


def test_everything_there_is_printed_and_nobody_notices(cluster, cli, topic):
    groups = {each["group"] for each in cli.records("group", "list", "--all")}

    text = cli.run("consume", topic)
    records = cli.records("consume", topic)

    assert sorted(text.stdout.splitlines()) == ALL
    assert text.stderr == "6 messages\n"
    assert sorted(each["body"] for each in records) == ALL
    assert {(each["tags"], tuple(each["keys"])) for each in records} == {("paid", ("k",))}
    # No group was made, and no progress was stored.
    assert {each["group"] for each in cli.records("group", "list", "--all")} == groups
    assert cluster.progress("TOOLS_CONSUMER", topic) == {}


def test_bodies_are_printed_byte_by_byte_as_json_or_hex(cluster, cli, names):
    name = next(names)
    cluster.create_topic(name, queues=1)
    cluster.send(name, b'{"a":[1]}')

    assert cli.text("consume", name) == '{"a":[1]}\n'
    assert cli.text("consume", name, "--format", "json") == '{\n  "a": [\n    1\n  ]\n}\n'
    assert cli.text("consume", name, "--format", "hex").startswith("00000000  7b 22 61")
    heading, body = cli.text("consume", name, "--headers").splitlines()
    assert heading.startswith(f"# {name}@broker-")
    assert body == '{"a":[1]}'


def test_a_count_a_beginning_queues_and_filters_limit_it(cluster, cli, topic):
    def number(*words):
        return len(cli.records("consume", topic, *words))

    assert number("--limit", "2") == 2
    assert number("--from", "end") == 0
    assert number("--from", "1h") == 6
    assert number("--from", "2099-01-01T00:00:00") == 0
    assert number("--tags", "other") == 0
    assert number("--sql", "TAGS = 'paid'") == 6
    queue = "broker-a:0"
    (status,) = [
        each["messages"]
        for each in cli.record("topic", "show", topic)["queues"]
        if f"{each['broker']}:{each['queue_id']}" == queue
    ]
    assert number("--queue", queue) == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_prints_what_comes_until_it_is_stopped(cluster, cli, topic, number):
    with cli.start("consume", topic, "--follow", "--from", "begin", "--json") as following:
        following.until(lambda lines: len(lines) == 6)
        cluster.send(topic, b"new")
        lines = following.until(lambda lines: len(lines) == 7)
        code = following.stop(number)

    assert code == 0
    assert json.loads(lines[-1])["body"] == "new"
    assert following.errors == "7 messages\n"


@pytest.mark.parametrize("group", [(), ("--group",)], ids=["looking", "in-a-group"])
def test_following_an_empty_topic_prints_what_is_stored_while_it_starts(cluster, cli, names, group):
    name = next(names)
    cluster.create_topic(name, queues=1)
    words = (*group, f"{name}-readers") if group else ()

    with (
        slipping_in(cluster.brokers[0], name),
        cli.start("consume", name, "--follow", *words) as following,
    ):
        lines = following.until(lambda lines: len(lines) == 1)

    assert lines == ["slipped in"]


def test_a_member_of_a_group_gets_everything_once_and_leaves_progress(cluster, cli, topic):
    group = f"{topic}-readers"

    first = cli.records("consume", topic, "--group", group, "--limit", "4")
    second = cli.records("consume", topic, "--group", group)
    third = cli.records("consume", topic, "--group", group)

    assert (len(first), len(second), len(third)) == (4, 2, 0)
    assert sorted(each["body"] for each in first + second) == ALL
    assert sum(cluster.progress(group, topic).values()) == 6
