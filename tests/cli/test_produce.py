"""`orbitmq produce`: from words, lines, files and JSON."""

from __future__ import annotations

import json
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from orbitmq.testing import EmbeddedCluster


@pytest.fixture
def topic(cluster, names):
    name = next(names)
    cluster.create_topic(name, queues=1)
    return name


def bodies(cluster: EmbeddedCluster, topic: str) -> list[bytes]:
    return sorted(bytes(each.body) for each in cluster.messages(topic))


def test_words_are_messages_with_keys_tags_and_properties(cluster, cli, topic):
    sent = cli.records(
        *("produce", topic, "one", "zwei ü"),
        *("--keys", "k1", "--keys", "k2", "--tag", "t", "--property", "region=eu"),
    )
    text = cli.run("produce", topic, "three")

    assert bodies(cluster, topic) == sorted([b"one", "zwei ü".encode(), b"three"])
    assert {each["status"] for each in sent} == {"ok"}
    message = cli.record("message", "get", sent[0]["id"], "--topic", topic)
    assert (message["keys"], message["tags"]) == (["k1", "k2"], "t")
    assert message["properties"]["region"] == "eu"
    assert "broker-" in text.stdout
    assert text.stderr.startswith("1 message sent in ")


def test_lines_of_standard_input_and_of_files_are_messages(cluster, cli, topic, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes(b"c\r\n\nd\n\xff")

    piped = cli.run("produce", topic, stdin=b"a\nb")
    read = cli.run("produce", topic, "--file", str(file))
    whole = cli.run("produce", topic, "--file", str(file), "--input", "whole")

    assert [ran.returncode for ran in (piped, read, whole)] == [0, 0, 0]
    assert piped.stdout == ""
    assert piped.stderr.startswith("2 messages sent in ")
    assert bodies(cluster, topic) == sorted([b"a", b"b", b"c", b"d", b"\xff", file.read_bytes()])


def test_a_line_is_sent_when_it_is_written_not_when_the_input_ends(cluster, cli, topic):
    with cli.start("produce", topic, "--json") as producing:
        producing.type("first\n")
        producing.until(lambda lines: len(lines) == 1)
        assert bodies(cluster, topic) == [b"first"]

        producing.type("second\n")
        producing.until(lambda lines: len(lines) == 2)
        # Ctrl-C ends it in order, although the input goes on.
        assert producing.stop(signal.SIGINT) == 130
    assert "2 messages sent" in producing.errors
    assert bodies(cluster, topic) == [b"first", b"second"]


def test_json_lines_say_everything_and_what_one_command_prints_another_reads(
    cluster, cli, topic, names
):
    copy = next(names)
    cluster.create_topic(copy, queues=1)
    lines = [
        {"body": "text", "keys": ["a", "b"], "tags": "t", "properties": {"x": "1"}},
        {"body": {"n": 1}},
        {"body_base64": "AP8="},
    ]

    cli.records(
        "produce",
        topic,
        *("--input", "json", "--tag", "default"),
        stdin="\n".join(map(json.dumps, lines)).encode(),
    )
    browsed = cli.run("message", "browse", topic, "--limit", "0", "--json").stdout
    cli.records("produce", copy, "--input", "json", stdin=browsed.encode())

    assert bodies(cluster, topic) == bodies(cluster, copy) == [b"\x00\xff", b"text", b'{"n":1}']
    (first,) = [each for each in cli.records("consume", copy) if each["body"] == "text"]
    assert (first["keys"], first["tags"], first["properties"]["x"]) == (["a", "b"], "t", "1")
    assert Counter(each["tags"] for each in cli.records("consume", copy)) == {"t": 1, "default": 2}


def test_words_are_repeated_up_to_a_count_at_a_rate(cluster, cli, topic):
    ran = cli.run("produce", topic, "a", "b", "--limit", "5", "--rate", "50")
    cut = cli.run("produce", topic, "--limit", "2", stdin=b"x\ny\nz\n")

    assert ran.returncode == cut.returncode == 0
    assert Counter(bodies(cluster, topic)) == {b"a": 3, b"b": 2, b"x": 1, b"y": 1}
    seconds = float(ran.stderr.partition(" in ")[2].split()[0])
    # The fifth is sent 80 ms after the first; the words are `90 ms, 55.5/s`.
    assert seconds >= 80 if " ms" in ran.stderr else seconds >= 0.08


def test_a_delay_keeps_messages_back(cluster, cli, topic):
    cli.records("produce", topic, "later", "--delay", "1h")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    cli.records("produce", topic, "later too", "--at", tomorrow.isoformat())
    cli.records("produce", topic, "now")

    assert bodies(cluster, topic) == [b"now"]


def test_a_dry_run_sends_nothing(cluster, cli, topic):
    ran = cli.run("produce", topic, "a", "b", "--dry-run", "--json")

    assert [json.loads(line)["status"] for line in ran.stdout.splitlines()] == ["not sent"] * 2
    assert "2 messages would be sent" in ran.stderr
    assert bodies(cluster, topic) == []


def test_a_new_topic_is_created_as_by_topic_create_and_the_likely_name_is_said(cluster, cli):
    cluster.create_topic("payments")
    cli.run("topic", "create", "made")

    planned = cli.run("produce", "paymets", "x", "--dry-run")
    sent = cli.run("produce", "paymets", "x")

    assert "topic paymets would be created; do you mean payments?" in planned.stderr
    assert "topic paymets is new: sending creates it; do you mean payments?" in sent.stderr
    queues = {each["topic"]: each["write_queues"] for each in cli.records("topic", "list")}
    # `topic create` creates it on all brokers, a send on the one that it reaches.
    assert queues["made"] == queues["paymets"] * len(cluster.broker_addresses)


def test_empty_input_is_said(cluster, cli):
    cluster.create_topic("silent")

    ran = cli.run("produce", "silent", stdin=b"\n")

    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == "orbitmq: the input is empty: nothing was sent\n"


@pytest.mark.parametrize(
    ("words", "stdin", "expected"),
    [
        (("--input", "json"), b'{"body":"ok"}\n{"bdy":1}', "line 2 of the input"),
        (("--input", "json"), b"nonsense", "line 1 of the input"),
        (("--input", "json"), b'{"keys":["a"]}', "give body or body_base64"),
        (("--input", "json"), b'{"body_base64":"%"}', "line 1 of the input"),
    ],
)
def test_wrong_input_is_named(cli, topic, words, stdin, expected):
    ran = cli.run("produce", topic, *words, stdin=stdin)

    assert ran.returncode == 2
    assert expected in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_file_that_cannot_be_read_and_a_queue_that_is_not_there_are_failures(
    cli, topic, tmp_path
):
    unread = cli.refusal("produce", topic, "--file", str(tmp_path / "none"), code=1)
    nowhere = cli.run("produce", topic, "x", "--queue", "broker-a:99")

    assert "none" in unread
    assert nowhere.returncode != 0
    assert "99" in nowhere.stderr
