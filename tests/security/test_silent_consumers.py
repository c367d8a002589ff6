"""Consumers to which nothing can come: each says why in time, and what is final ends it.

The cluster is a process of its own that lets in nobody without an account.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from orbitmq import (
    AsyncConsumer,
    AsyncProducer,
    AsyncPullConsumer,
    ClientSettings,
    Consumer,
    Producer,
    PullConsumer,
)
from orbitmq.broker.settings import AccessSettings
from orbitmq.client.routes import Queue
from orbitmq.errors import AccessDenied
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.command import Credentials
from tests.support.access import account, listed
from tests.support.command import Started
from tests.support.nursery import Nursery
from tests.support.orbitmqcli import Cli, Running

#: By then somebody knows why nothing comes; and on a machine that has more to do than it can.
IN_TIME, IN_TIME_OF_MANY = 5.0, 20.0
#: For what is not timed here.
PATIENCE = 60.0

OPERATOR = account("operator-key", "secret-of-operator")
#: May read `orders` as `billing`, and nothing else.
READER = account("reader-key", "secret-of-reader")
#: May read every topic, as no group.
LOOKER = account("looker-key", "secret-of-looker")
#: The right key, and a wrong secret.
IMPOSTOR = account("operator-key", "secret-of-somebody")
NOBODY = None

ACCOUNTS = (
    listed(OPERATOR, "admin = true")
    + listed(READER, 'topicPerms = ["orders=SUB"]\ngroupPerms = ["billing=SUB"]')
    + listed(LOOKER, 'defaultTopicPerm = "SUB"')
)


class Guarded(NamedTuple):
    """A cluster that asks everybody for an account."""

    name_server: str
    broker: str
    cli: Cli

    def settings(self, who: Credentials | None) -> ClientSettings:
        return ClientSettings(name_servers=(self.name_server,), credentials=who)

    def run(self, who: Credentials | None, *words: str) -> Any:
        return self.cli.run(*words, env=keys(who))

    def operate(self, *words: str) -> None:
        ran = self.run(OPERATOR, *words)
        assert ran.returncode == 0, ran.stderr

    def start(self, who: Credentials | None, *words: str) -> Running:
        return Running(words, self.cli.environment(keys(who)))


def keys(who: Credentials | None) -> dict[str, str]:
    if who is None:
        return {}
    return {"ORBITMQ_ACCESS_KEY": who.access_key, "ORBITMQ_SECRET_KEY": who.secret_key}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("guarded")
    (folder / "accounts.toml").write_text(ACCOUNTS)
    words = ("--set", f"broker.access.accounts={folder / 'accounts.toml'}")
    with (
        Started("up", "--namesrv-port", "0", "--broker-port", "0", *words, cwd=folder) as up,
        Nursery() as nursery,
    ):
        name_server = up.address("name server")
        guarded = Guarded(name_server, up.address("broker-a"), Cli(name_server, nursery))
        for topic in ("orders", "invoices"):
            guarded.operate("topic", "create", topic, "--queues", "2")
        with Producer("makers", client=guarded.settings(OPERATOR)) as producer:
            for number in range(6):
                producer.send("orders", f"m{number}", tags="paid")
        yield guarded


@pytest.fixture
def names():
    return (f"{time.monotonic_ns()}-{number}" for number in range(10))


def limit() -> float:
    is_crowded = os.getloadavg()[0] > (os.cpu_count() or 1)
    return IN_TIME_OF_MANY if is_crowded else IN_TIME


@contextmanager
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


#: Who consumes what as which group, and what is missing.
DENIED = [
    pytest.param(
        READER, "invoices", "billing", r"no SUB permission on topic 'invoices'", id="topic"
    ),
    pytest.param(READER, "orders", "others", r"no SUB permission on group 'others'", id="group"),
    pytest.param(IMPOSTOR, "orders", "billing", "check the access key and the secret", id="key"),
    pytest.param(NOBODY, "orders", "billing", "set an access key and a secret key", id="none"),
]


# ---- what does not pass


@pytest.mark.parametrize(("who", "topic", "group", "missing"), DENIED)
@pytest.mark.parametrize("way", ["subscribed", "assigned"])
def test_a_poll_raises_immediately_what_is_missing(guarded, way, who, topic, group, missing):
    with PullConsumer(group, client=guarded.settings(who), consume_from="first") as consumer:
        if way == "subscribed":
            consumer.subscribe(topic)
        else:
            consumer.assign([Queue(topic, "broker-a", 0)])

        with in_time(), pytest.raises(AccessDenied, match=missing):
            consumer.poll(timeout=PATIENCE)
        with in_time(), pytest.raises(AccessDenied, match=missing):
            consumer.poll_arrow(timeout=PATIENCE)
        with in_time(), pytest.raises(AccessDenied, match=missing):
            next(consumer)
        troubles = consumer.statistics().troubles

    assert len(troubles) == 1
    assert f"group {group!r} gets nothing from" in troubles[0]
    assert "use an account that may" in troubles[0]


@pytest.mark.parametrize(("who", "topic", "group", "missing"), DENIED)
def test_a_consumer_logs_one_error_and_its_run_raises_it(
    guarded, caplog, who, topic, group, missing
):
    consumer = Consumer(group, client=guarded.settings(who), ordered=topic == "invoices")
    consumer.on(topic)(lambda message: None)

    with in_time(), pytest.raises(AccessDenied, match=missing):
        consumer.run()

    assert len(errors(caplog)) == 1
    assert consumer.statistics().troubles == tuple(errors(caplog))


async def test_one_denied_topic_does_not_end_a_consumer_to_which_others_come(guarded, caplog):
    seen: list[str] = []
    consumer = AsyncConsumer("billing", client=guarded.settings(READER), consume_from="first")
    consumer.on("orders")(lambda message: seen.append(message.text()))
    running = asyncio.create_task(consumer.run())
    await until(lambda: len(seen) == 6)

    await consumer.subscribe("invoices", lambda message: None)
    await until(lambda: any("'invoices'" in each for each in consumer.statistics().troubles))
    with Producer("makers", client=guarded.settings(OPERATOR)) as producer:
        producer.send("orders", "later", tags="late")
    await until(lambda: "later" in seen)
    consumer.stop_soon()
    await running

    assert len(errors(caplog)) == 1


# ---- what may pass


async def test_a_paused_group_is_reported_and_consumed_when_it_is_resumed(guarded, names, caplog):
    group = next(names)
    guarded.operate("group", "create", group)
    guarded.operate("group", "pause", group, "--yes")
    seen: list[str] = []
    consumer = AsyncConsumer(group, client=guarded.settings(OPERATOR), consume_from="first")
    consumer.on("orders")(lambda message: seen.append(message.text()))
    running = asyncio.create_task(consumer.run())
    polled = AsyncPullConsumer(group, client=guarded.settings(OPERATOR), consume_from="first")
    polled.subscribe("orders")

    async with polled:
        await until_reported(
            lambda: consumer.statistics().troubles, f"orbitmq group resume {group}"
        )
        await until_reported(lambda: polled.statistics().troubles, f"orbitmq group resume {group}")
        assert await polled.poll(0.1) == []
    await asyncio.to_thread(guarded.operate, "group", "resume", group)
    await until(lambda: "m0" in seen)
    await until(lambda: consumer.statistics().troubles == ())
    consumer.stop_soon()
    await running

    told = [each for each in caplog.records if "group resume" in each.getMessage()]
    assert [each.levelno for each in told] == [logging.WARNING] * 2  # one of each consumer


@pytest.mark.parametrize(
    ("choice", "words"),
    [({"tags": "piad"}, "the tags 'piad'"), ({"sql": "TAGS = 'piad'"}, 'the condition "TAGS')],
)
async def test_a_filter_that_matches_nothing_is_reported_until_something_matches(
    guarded, names, caplog, choice, words
):
    topic = next(names)
    guarded.operate("topic", "create", topic, "--queues", "2")
    settings = guarded.settings(OPERATOR)
    with Producer("makers", client=settings) as producer:
        for number in range(3):
            producer.send(topic, f"m{number}", tags="paid")
        consumer = AsyncPullConsumer(f"{topic}-readers", client=settings, consume_from="first")
        consumer.subscribe(topic, **choice)

        async with consumer:
            await until_reported(lambda: consumer.statistics().troubles, words)
            told = [each for each in caplog.messages if words in each]
            producer.send(topic, "it", tags="piad")
            found = await consumer.poll(PATIENCE)
            await until(lambda: consumer.statistics().troubles == ())

    assert [each.text() for each in found] == ["it"]
    assert len(told) == 1
    assert f"gets nothing of {topic} so far: of 3 messages none" in told[0]


async def test_a_member_without_a_queue_is_reported_until_another_one_leaves(
    guarded, names, caplog
):
    group = next(names)
    seen: list[str] = []
    members = [AsyncConsumer(group, client=guarded.settings(OPERATOR)) for _ in range(3)]
    for member in members:
        member.on("orders")(lambda message: seen.append(message.text()))
        member.on("invoices")(lambda message: seen.append(message.text()))

    for member in members:
        await member.start()
    await until_reported(
        lambda: [trouble for member in members for trouble in member.statistics().troubles],
        "orbitmq topic update invoices --queues",
    )
    (spare,) = [member for member in members if member.statistics().troubles]
    first = next(member for member in members if member is not spare)
    await first.stop()
    await until(lambda: spare.statistics().troubles == ())
    for member in members:
        await member.stop()

    told = [each for each in caplog.messages if "has no queue for this member" in each]
    assert len(told) == 1
    assert "3 members share 4 of invoices, orders;" in told[0]
    assert told[0].endswith("orbitmq topic update invoices --queues N")


async def test_a_permission_that_is_taken_away_ends_a_consumer(tmp_path):
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)

    def adjust(settings):
        return replace(settings, access=AccessSettings(accounts=accounts, check_interval=0.05))

    seen: list[str] = []
    async with AsyncEmbeddedCluster(adjust=adjust) as cluster:
        await cluster.create_topic("orders", queues=1)
        client = ClientSettings(name_servers=(cluster.name_server,), credentials=READER)
        operator = ClientSettings(name_servers=(cluster.name_server,), credentials=OPERATOR)
        consumer = AsyncConsumer("billing", client=client, consume_from="first")
        consumer.on("orders")(lambda message: seen.append(message.text()))
        running = asyncio.create_task(consumer.run())
        async with AsyncProducer("makers", client=operator) as producer:
            await producer.send("orders", "before")
            await until(lambda: seen == ["before"])
            fresh = tmp_path / "fresh.toml"
            fresh.write_text(ACCOUNTS.replace('["orders=SUB"]', "[]"))
            fresh.replace(accounts)
            # Ends the pull that is held, once the broker has read the accounts.
            await asyncio.wait_for(_sent_until(producer, running), PATIENCE)

    with pytest.raises(AccessDenied, match="no SUB permission on topic 'orders'"):
        running.result()


async def _sent_until(producer: AsyncProducer, done: asyncio.Future[None]) -> None:
    while not done.done():
        await producer.send("orders", "more")
        await asyncio.wait((done,), timeout=0.1)


# ---- the command


@pytest.mark.parametrize(
    ("who", "words", "missing"),
    [
        (READER, ("invoices", "--group", "billing"), "no SUB permission on topic 'invoices'"),
        (READER, ("orders", "--group", "others"), "no SUB permission on group 'others'"),
        (READER, ("orders", "--group", "others", "--follow"), "permission on group 'others'"),
        (IMPOSTOR, ("orders", "--group", "billing"), "check the access key and the secret key"),
        (NOBODY, ("orders", "--group", "billing"), "set an access key and a secret key"),
        (READER, ("invoices",), "no SUB permission on topic 'invoices'"),
        (LOOKER, ("orders",), "no SUB permission on group 'TOOLS_CONSUMER'"),
        (LOOKER, ("orders", "--follow"), "no SUB permission on group 'TOOLS_CONSUMER'"),
        (IMPOSTOR, ("orders",), "check the access key and the secret key"),
    ],
)
def test_consume_ends_with_what_is_missing(guarded, who, words, missing):
    ran = guarded.run(who, "consume", *words)

    assert ran.returncode == 1
    assert ran.stdout == ""
    (sentence,) = ran.stderr.splitlines()
    assert missing in sentence


async def until(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def until_reported(troubles: Callable[[], Iterable[str]], words: str) -> None:
    """Wait for a trouble, no longer than anybody should."""
    await until(lambda: any(words in each for each in troubles()), limit())
