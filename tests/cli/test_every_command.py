"""Every command there is: run as a process with `--json`, and what it prints is what it documents.

What the commands do is in the other files. Here no command can be missing: the list is that of the
parser, and one without words below fails. Fields are compared with the documented class exactly, so
that a field that is not documented, is missing or has another type fails as well.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import pytest

from orbitmq.client.message import ReceivedMessage
from orbitmq.spark.consolelink import ConsoleLink, QueryReport
from orbitmq.testing import EmbeddedCluster
from tests.cli.conftest import consumer_of
from tests.support.command import Started
from tests.support.orbitmqcli import Cli
from tests.support.store import write_log
from tools.cli_docs import Command, commands

COMMANDS: Mapping[str, Command] = {each.name: each for each in commands()}

#: Words after each command, and how many objects it prints, where that is known. What is in braces
#: is filled in from the cluster.
ASKED: Mapping[str, tuple[str, int | None]] = {
    "cluster show": ("", 1),
    "topic list": ("", None),
    "topic show": ("orders", 1),
    "topic create": ("created --queues 2", 1),
    "topic update": ("orders --read-queues 4", 1),
    "topic delete": ("doomed --yes", 1),
    "group list": ("", None),
    "group show": ("billing", 1),
    "group member": ("billing", 1),
    "group create": ("created", 1),
    "group update": ("waiting --max-retries 3", 1),
    "group delete": ("doomed --yes", 1),
    "group pause": ("waiting --yes", 1),
    "group resume": ("waiting", 1),
    "group reset": ("waiting orders --to earliest --yes", None),
    "group skip": ("waiting --dry-run", None),
    "group clone": ("billing copied --yes", None),
    "message show": ("{id} --topic orders", 1),
    "message at": ("orders {queue} {offset}", 1),
    "message find": ("orders good", 1),
    "message browse": ("orders", 2),
    "message track": ("{id} --topic orders", None),
    "dlq list": ("billing", 1),
    "dlq summary": ("billing", None),
    "dlq show": ("billing", 1),
    "dlq resend": ("billing --dry-run", None),
    "dlq export": ("billing {folder}/letters.jsonl", 1),
    "produce": ("other hello", 1),
    "consume": ("orders --limit 2", 2),
    "top": ("--once --group billing", 1),
    "archive run": ("{folder}/broker-a --to {folder}/archive", None),
    "archive list": ("{folder}/archive", 1),
    "archive verify": ("{folder}/archive", None),
    "bench produce": ("load --limit 20", None),
    "bench consume": ("orders --limit 2", None),
    "bench end-to-end": ("load --limit 20", None),
    "doctor": ("--watch 0s", 1),
    "context add": ("laptop --name-server {name_server}", 1),
    "context list": ("", 1),
    "context show": ("laptop", 1),
    "context use": ("laptop", 1),
    "context remove": ("laptop", 1),
    "user add": ("ada --users {folder}/users --password-file {folder}/password", 1),
    "user list": ("--users {folder}/users", 1),
    "user role": ("ada operator --users {folder}/users", 1),
    "user password": ("ada --users {folder}/users --password-file {folder}/password", 1),
    "user remove": ("ada --users {folder}/users", 1),
    "config show": ("broker.store", None),
    "pipeline list": ("", None),
    "pipeline show": ("archive", 1),
    "pipeline run": ("archive --dry-run -o topic=orders -o path={folder}/lake", 1),
    "pipeline status": ("--console {console}", 1),
    "pipeline forget": ("enrich --dry-run --console {console}", 1),
}
#: Servers, which say where they listen and then that they are ready.
SERVED: Mapping[str, tuple[str, int]] = {
    "up": ("--namesrv-port 0 --broker-port 0", 2),
    "namesrv": ("--port 0", 1),
    "broker": ("--port 0 --name-server {name_server}", 1),
    "console": ("--port 0", 1),
}


@dataclass(frozen=True, slots=True)
class Shop:
    """A cluster in which every command finds something."""

    facts: Mapping[str, str]

    def words(self, command: str, rest: str) -> list[str]:
        return [*command.split(), *(word.format(**self.facts) for word in rest.split())]


@pytest.fixture(scope="module")
def shop(cluster, cli, tmp_path_factory):
    for topic in ("orders", "other", "load", "doomed"):
        cluster.create_topic(topic, queues=1)
    (sent,) = cluster.send("orders", b"fine", keys="good")
    cluster.send("orders", b"not fine", keys="bad")
    for group in ("waiting", "doomed"):
        cli.record("group", "create", group)

    def handle(message: ReceivedMessage) -> None:
        if message.body != b"fine":
            raise ValueError("no money left")

    folder = tmp_path_factory.mktemp("files")
    (folder / "password").write_text("correct horse battery")
    write_log(folder / "broker-a")
    consumer = consumer_of(cluster, "billing", "orders", handle, max_retries=0)
    with consumer, pipelines(cluster) as console:
        cluster.until_consumed("billing", "orders")
        yield Shop(
            {
                "id": sent.msg_id,
                "queue": f"{sent.queue.broker}:{sent.queue.id}",
                "offset": str(sent.queue_offset),
                "folder": str(folder),
                "console": console,
                "name_server": cluster.name_server,
            }
        )


@contextlib.contextmanager
def pipelines(cluster: EmbeddedCluster) -> Iterator[str]:
    """The address of a console that a pipeline reports to."""
    with Started("console", "--port", "0", "--name-server", cluster.name_server) as console:
        link = ConsoleLink(console.address("console"))
        link.watch("enrich", lambda: QueryReport(state="running"))
        try:
            yield console.address("console")
        finally:
            link.stop()


def test_no_command_is_left_out():
    assert {*ASKED, *SERVED} == COMMANDS.keys()


@pytest.mark.parametrize("name", ASKED)
def test_a_command_prints_the_objects_that_it_documents(cli, shop, name):
    words, number = ASKED[name]

    ran = cli.run(*shop.words(name, words), "--json")

    # The doctor has found the dead letter.
    assert ran.returncode == (name == "doctor"), ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert found if number is None else len(found) == number
    kind = COMMANDS[name].prints
    assert kind is not None
    for each in found:
        assert json.loads(msgspec.json.encode(msgspec.convert(each, kind))) == each


@pytest.mark.parametrize(
    "name",
    [
        each
        for each in ASKED
        if each.split()[0] not in ("config", "context", "user", "pipeline", "doctor", "archive")
    ],
)
def test_without_a_name_server_a_command_fails_with_one_sentence(nursery, name):
    words, _ = ASKED[name]
    facts = {"id": "0" * 32, "queue": "broker-a:0", "offset": "0", "folder": "/dev/shm"}  # noqa: S108
    nowhere = Cli("127.0.0.1:1", nursery)

    sentence = nowhere.refusal(*Shop(facts).words(name, words), code=1)

    assert sentence.startswith(
        "nothing listens at 127.0.0.1:1; start a cluster with: orbitmq up --n"
    )


@pytest.mark.parametrize("name", SERVED)
def test_a_server_prints_where_it_listens_and_that_it_is_ready(shop, tmp_path, name):
    words, number = SERVED[name]

    with Started(*shop.words(name, words), "--json", cwd=tmp_path) as server:
        *listening, ready = [json.loads(line) for line in server.lines]
        code = server.stop()

    assert code == 0
    assert len(listening) == number
    for each in listening:
        assert each.keys() == {"event", "role", "name", "address", "folder"}
        assert each["event"] == "listening"
        assert re.fullmatch(r"(http://)?127\.0\.0\.1:\d+/?", each["address"])
    assert ready == {"event": "ready"}
