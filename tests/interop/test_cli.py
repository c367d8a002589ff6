"""The `orbitmq` command against Apache's brokers."""

from __future__ import annotations

import pytest

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from tests.interop.beside import until
from tests.support.nursery import Nursery
from tests.support.orbitmqcli import Cli

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cli(beside):
    with Nursery() as nursery:
        yield Cli(beside.name_server, nursery)


async def test_a_topic_a_group_and_messages_through_their_lives(cli):
    shown = cli.record("cluster", "show")
    assert [each["is_orbitmq"] for each in shown["brokers"]] == [False]

    made = cli.record("topic", "create", "cli-life", "--queues", "2")
    assert made["after"]["write_queues"] == 2
    sent = cli.records("produce", "cli-life", "a", "b", "c", "--keys", "k", "--tag", "t")
    assert [each["status"] for each in sent] == ["ok"] * 3

    assert cli.record("topic", "show", "cli-life")["messages"] == 3
    assert sorted(each["body"] for each in cli.records("consume", "cli-life")) == ["a", "b", "c"]
    assert len(cli.records("message", "browse", "cli-life", "--limit", "0")) == 3
    got = cli.record("message", "get", sent[0]["id"], "--topic", "cli-life")
    assert got["body"] == "a"
    # The index is filled a moment after the queue.
    find = ("message", "find", "cli-life", "k", "--json")
    await until(lambda: len(cli.run(*find).stdout.splitlines()) == 3)

    member = ("consume", "cli-life", "--group", "cli-readers")
    assert len(cli.records(*member)) == 3
    assert cli.records(*member) == []
    group = cli.record("group", "show", "cli-readers")
    assert group["lag"] == 0
    moved = cli.record("group", "reset", "cli-readers", "cli-life", "--to", "earliest", "--yes")
    assert [each["read_back"] for each in moved["queues"]] == [0, 0]
    tracks = cli.records("message", "track", sent[0]["id"], "--topic", "cli-life")
    assert {each["group"]: each["fate"] for each in tracks}["cli-readers"] == "waiting"
    frame = cli.record("top", "--once", "--group", "cli-readers")
    assert sum(each["lag"] for each in frame["queues"]) == 3
    diagnosis = cli.run("doctor", "--no-spark", "--watch", "0", "--json")
    assert '"check":"brokers","is_well":true' in diagnosis.stdout

    assert cli.record("group", "skip", "cli-readers", "--yes")["result"] == "moved"
    assert cli.record("group", "pause", "cli-readers", "--yes")["result"] == "paused"
    assert cli.record("group", "delete", "cli-readers", "--yes")["result"] == "deleted"
    assert cli.record("topic", "delete", "cli-life", "--yes")["result"] == "deleted"


async def test_dead_letters_are_listed_and_sent_again(beside, cli):
    cli.record("topic", "create", "cli-dead", "--queues", "1")
    cli.records("produce", "cli-dead", "bad")
    consumer = Consumer(
        "cli-dead-readers",
        client=beside.settings(),
        max_retries=0,
        consume_from="first",
        rebalance=RebalanceSettings(persist=0.2),
    )

    @consumer.on("cli-dead")
    def handle(_message: ReceivedMessage) -> None:
        raise ValueError("always")

    consumer.start()
    try:
        await until(lambda: bool(cli.records("dlq", "list", "cli-dead-readers")))
    finally:
        consumer.stop()

    (letter,) = cli.records("dlq", "list", "cli-dead-readers")
    assert (letter["topic"], letter["body"]) == ("cli-dead", "bad")
    assert cli.record("dlq", "summary", "cli-dead-readers")["count"] == 1
    (again,) = cli.records("dlq", "resend", "cli-dead-readers", "--to", "origin", "--yes")
    assert again["result"] == "sent"
    assert len(cli.records("consume", "cli-dead")) == 2
