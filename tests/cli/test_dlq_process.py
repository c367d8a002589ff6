"""Dead letters of real consumers at a broker in another process, by the command line alone."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.settings import ConsumeSettings, RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import Producer
from orbitmq.testing import EmbeddedCluster
from tests.support.brokerprocess import BlockingProcessCluster, BrokerProcess
from tests.support.command import DEADLINE
from tests.support.orbitmqcli import Cli

TOPIC = "orders"


@pytest.fixture(scope="module")
def cluster():
    with BrokerProcess() as process, BlockingProcessCluster(process) as cluster:
        cluster.create_topic(TOPIC, queues=1)
        yield cluster


@pytest.fixture
def cli(cluster, nursery):
    return Cli(cluster.name_server, nursery)


def send(cluster: EmbeddedCluster, *keys: str) -> None:
    with Producer(name_server=cluster.name_server) as producer:
        for key in keys:
            producer.send(TOPIC, f"order {key}", keys=key)


def give_up(cluster: EmbeddedCluster, group: str, **options: Any) -> None:
    """Have a member fail on everything that its group has not consumed yet."""
    quick = RebalanceSettings(persist=0.05)
    consumer = Consumer(
        group, name_server=cluster.name_server, consume_from="first", rebalance=quick, **options
    )

    @consumer.on(TOPIC)
    def fail(message: ReceivedMessage) -> None:
        raise ValueError("never works")

    with consumer:
        cluster.until_consumed(group, TOPIC, timeout=DEADLINE)


@pytest.mark.feature("F7")
def test_letters_are_looked_at_sent_again_at_a_rate_and_exported(cluster, cli, tmp_path):
    send(cluster, "a", "b", "c")
    give_up(cluster, "billing", max_retries=0)
    middle = datetime.fromtimestamp(cluster.clock.now() + 3600.0, UTC).isoformat()
    cluster.advance(7200.0)
    send(cluster, "d")
    # In order it is tried again here, and at once.
    give_up(cluster, "billing", ordered=True, consume=ConsumeSettings(suspend=0.01, max_retries=2))
    give_up(cluster, "mailer", max_retries=0)

    def keys(*words, group="billing"):
        """The keys of the letters that a filter leaves."""
        found = cli.records("dlq", "list", group, *words)
        return "".join(sorted(each["keys"][0] for each in found))

    letters = {each["id"]: each for each in cli.records("dlq", "list", "billing")}
    attempts = {each["keys"][0]: each["attempts"] for each in letters.values()}
    assert attempts == {"a": 1, "b": 1, "c": 1, "d": 3}
    assert keys(group="mailer") == "abcd"
    assert (keys("--until", middle), keys("--since", middle)) == ("abc", "d")
    assert (keys("--max-attempts", "1"), keys("--min-attempts", "2")) == ("abc", "d")
    assert keys("--key", "b", "--key", "d") == "bd"
    assert keys("--key", "b", "--min-attempts", "2") == ""

    # Each letter has an outcome; whoever has been sent again is left out the next time.
    began = time.monotonic()
    outcomes = cli.records("dlq", "resend", "billing", "--until", middle, "--rate", "10", "--yes")
    took = time.monotonic() - began
    assert sorted(letters[each["id"]]["keys"][0] for each in outcomes) == ["a", "b", "c"]
    assert [each["result"] for each in outcomes] == ["sent"] * 3
    assert len({each["sent_as"] for each in outcomes}) == 3
    assert took >= 2 / 10
    later = cli.records("dlq", "resend", "billing", "--yes")
    assert Counter(each["result"] for each in later) == {"already sent": 3, "sent": 1}

    # They come to the group that gave them up, and to nobody else.
    assert handled(cluster, "billing", 4) == ["order a", "order b", "order c", "order d"]
    assert len(cluster.messages("%RETRY%mailer")) == 0

    target = tmp_path / "letters.jsonl"
    written = cli.record("dlq", "export", "billing", str(target), "--since", middle)
    (letter,) = [json.loads(line) for line in target.read_text().splitlines()]
    assert written["count"] == 1
    assert (letter["keys"], letter["body"]) == (["d"], "order d")


def handled(cluster: EmbeddedCluster, group: str, count: int) -> list[str]:
    """What a member gets whose handler works."""
    found: list[str] = []
    consumer = Consumer(group, name_server=cluster.name_server)
    consumer.on(TOPIC)(lambda message: found.append(message.text()))
    with consumer:
        until = time.monotonic() + DEADLINE
        while len(found) < count:
            assert time.monotonic() < until, found
            cluster.until_consumed(group, f"%RETRY%{group}", timeout=DEADLINE)
    return sorted(found)
