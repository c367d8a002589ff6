"""Consumers as programs: signals, forks, and a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.producer.producer import Producer
from orbitmq.testing import EmbeddedCluster

DEADLINE = 30.0

#: A program that consumes and says what it does, one line each.
PROGRAM = """
import sys, os, threading
{imports}

def say(*words):
    # One call: lines of several threads must not mix.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

{body}
"""

SYNC = """
from orbitmq.client.consumer.consumer import Consumer

consumer = Consumer("billing", name_server=sys.argv[1], consume_from="first")

@consumer.on("orders")
def bill(message):
    say("begin", message.text())
    threading.Event().wait(0.2 if message.text() == "slow" else 0.0)
    say("end", message.text())

say("run")
consumer.run()
say("stopped")
"""

ASYNC = """
import asyncio
from orbitmq.client.consumer.consumer import AsyncConsumer

consumer = AsyncConsumer("billing", name_server=sys.argv[1], consume_from="first")

@consumer.on("orders")
async def bill(message):
    say("begin", message.text())
    await asyncio.sleep(0.2 if message.text() == "slow" else 0.0)
    say("end", message.text())

say("run")
asyncio.run(consumer.run())
say("stopped")
"""


class Program:
    """A running program, and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.said.append(line.strip())
                self._news.notify_all()

    def until_said(self, line: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: line in self.said, DEADLINE), self.said

    def end(self) -> int:
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def close(self) -> None:
        """End it, with all that it has forked: a child would keep the pipe open, and its reader."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(DEADLINE)
        self._reader.join(1.0)
        if self._reader.is_alive():  # so somebody of the group is there, and the id still its own
            os.killpg(self.process.pid, signal.SIGKILL)
            self._reader.join(DEADLINE)
        assert not self._reader.is_alive(), "somebody holds the pipe; closing it would wait"
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def program(text: str, *arguments: str, folder: Path) -> Iterator[Program]:
    script = folder / f"program{len(list(folder.iterdir()))}.py"
    script.write_text(PROGRAM.format(imports="", body=textwrap.dedent(text)))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running = Program(process)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def cluster(new_blocking_cluster):
    with new_blocking_cluster() as cluster:
        cluster.create_topic("orders")
        yield cluster


def send(cluster: EmbeddedCluster, *bodies: str) -> None:
    with Producer(name_server=cluster.name_server) as producer:
        for body in bodies:
            producer.send("orders", body)


@pytest.mark.feature("N4")
@pytest.mark.parametrize(
    ("text", "number"),
    [(SYNC, signal.SIGINT), (ASYNC, signal.SIGTERM)],
    ids=["sync, Ctrl-C", "async, SIGTERM"],
)
def test_a_signal_stops_in_order_and_nothing_is_repeated(cluster, tmp_path, text, number):
    with program(text, cluster.name_server, folder=tmp_path) as first:
        send(cluster, "a", "b", "slow")
        first.until_said("end a")
        first.until_said("end b")
        first.until_said("begin slow")
        first.process.send_signal(number)

        assert first.end() == 0, first.said
        assert first.said[-2:] == ["end slow", "stopped"]
    assert sum(cluster.progress("billing", "orders").values()) == 3
    with program(text, cluster.name_server, folder=tmp_path) as second:
        send(cluster, "c")
        second.until_said("end c")
        second.process.send_signal(number)
        second.end()

    begun = Counter(line for line in first.said + second.said if line.startswith("begin"))
    assert begun == {"begin a": 1, "begin b": 1, "begin slow": 1, "begin c": 1}


def own(consumer: Consumer) -> int:
    return sum(queue.topic == "orders" for queue in consumer.assignment())


def ends(running: Program) -> int:
    return sum(line.startswith("end") for line in running.said)


@pytest.mark.feature("P6")
def test_a_consumer_used_after_a_fork_says_so(cluster, tmp_path):
    text = """
    from orbitmq.client.consumer.consumer import Consumer
    from orbitmq.client.errors import UsedAfterFork

    consumer = Consumer("billing", name_server=sys.argv[1], consume_from="first")
    consumer.on("orders")(lambda message: say("got", message.text()))
    consumer.start()
    child = os.fork()
    if child == 0:
        for call in (consumer.statistics, consumer.start, consumer.assignment):
            try:
                call()
            except UsedAfterFork as error:
                say("refused:", error)
        consumer.stop()   # as a `with` block that the fork was in would
        again = Consumer("billing", name_server=sys.argv[1], consume_from="first")
        again.on("orders")(lambda message: None)
        with again:
            say("child", len(again.client_id) > 0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say("child ended", status)
    say("parent", consumer.workers)
    consumer.stop()
    say("stopped")
    """
    with program(text, cluster.name_server, folder=tmp_path) as running:
        assert running.end() == 0, running.said

    refusals = [line for line in running.said if line.startswith("refused:")]
    assert len(refusals) == 3
    assert all("make a new one after the fork" in line for line in refusals)
    assert running.said[-4:] == ["child True", "child ended 0", "parent 20", "stopped"]


MADE_BEFORE_THE_FORK = """
import signal
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.producer.producer import Producer
from orbitmq.client.pullconsumer.consumer import PullConsumer

signal.alarm(25)  # ends a program that hangs
producer = Producer("makers", name_server=sys.argv[1])
reader = PullConsumer("reports", name_server=sys.argv[1], consume_from="first")
consumer = Consumer("billing", name_server=sys.argv[1], consume_from="first")
handled = threading.Event()

@consumer.on("orders")
def bill(message):
    handled.set()

def work():
    reader.subscribe("orders")
    with producer, reader, consumer:
        say("sent", producer.send("orders", "x").is_ok)
        say("id", producer.client_id)
        say("id", reader.client_id)
        say("id", consumer.client_id)
        reader.poll(0.1)
        return 0

children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            status = work()
        except BaseException as error:
            say("failed", repr(error))
        finally:
            os._exit(status)
    children.append(child)
for child in children:
    say("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
work()
"""


@pytest.mark.feature("P6")
def test_clients_made_before_a_fork_are_started_after_it_each_with_an_id_of_its_own(
    cluster, tmp_path
):
    with program(MADE_BEFORE_THE_FORK, cluster.name_server, folder=tmp_path) as running:
        assert running.end() == 0, running.said

    assert running.said.count("sent True") == 3
    assert running.said.count("ended 0") == 2
    ids = [line for line in running.said if line.startswith("id ")]
    assert len(set(ids)) == len(ids) == 9
