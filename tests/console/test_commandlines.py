"""Commands that the console shows are commands that the command line takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from orbitmq.cli.command import DEFAULT_NAME_SERVER
from orbitmq.client.admin.deadletters import DeadLetterFilter
from orbitmq.client.routes import Queue
from orbitmq.console.words import Action, command, for_cluster, instant
from tests.support.orbitmqcli import parsed

QUEUE = Queue("orders", "broker-a", 1)
CHOICE = DeadLetterFilter(
    since=1_800_000_000.25,
    until=1_800_000_100,
    keys=("order-17", "--all"),
    topic="orders",
    reason="it's $HOME; rm -rf /",
    pile="--dry-run",
    min_attempts=0,
    max_attempts=16,
    ids=("7F00",),
)
CHOSEN = shlex.join(
    (
        *("--since", "2027-01-15T08:00:00.250Z", "--until", "2027-01-15T08:01:40.000Z"),
        *("--key", "order-17", "--key=--all", "--topic", "orders"),
        *("--reason", "it's $HOME; rm -rf /", "--pile=--dry-run"),
        *("--min-attempts", "0", "--max-attempts", "16", "--id", "7F00"),
    )
)
#: The arguments and options of each action, as the console gives them, and what follows its words.
BROKER = {"name_server": ["a:1", "b:2"], "set": "broker.port=0"}
PLACE = {"name": "b", "data": "FOLDER", "port": 10911, "advertise": "HOST"}
COUNTS = {"write_queues": 4, "read_queues": 8, "ordered": True}
SENT = {"tag": "t", "keys": ("k",), "property": {"a": "b"}, "delay": "1.5s"}
FROM = {"queue": [QUEUE], "offset": 17, "newest": True, "limit": 50}
SLOWLY = {"where": CHOICE, "limit": 10, "rate": 2.5, "to": "retry"}
AGAIN = {"to": "origin", "again": True, "dry_run": True}
ROWS: list[tuple[Action, tuple[str | None, ...], Mapping[str, object], str]] = [
    (Action.START_CLUSTER, (), {}, ""),
    (Action.START_NAME_SERVER, (), {"port": 9876}, "--port 9876"),
    (Action.START_BROKER, (), BROKER,
     "--name-server a:1 --name-server b:2 --set broker.port=0"),
    (Action.START_BROKER, (), PLACE, "--name b --data FOLDER --port 10911 --advertise HOST"),
    (Action.START_CONSOLE, (), {}, ""),
    (Action.SHOW_CLUSTER, (), {}, ""),
    (Action.CREATE_TOPIC, ("orders",), {"queues": 8, "permission": "rw", "unordered": False},
     "orders --queues 8 --permission rw"),
    (Action.UPDATE_TOPIC, ("orders",), COUNTS, "orders --write-queues 4 --read-queues 8 --ordered"),
    (Action.DELETE_TOPIC, ("-orders",), {}, "-- -orders"),
    (Action.PRODUCE, ("orders", "a b"), SENT,
     "orders 'a b' --tag t --keys k --property a=b --delay 1.5s"),
    (Action.PRODUCE, ("-orders", "-1"), {"tag": "-t", "keys": ["-k"], "property": {}},
     "--tag=-t --keys=-k -- -orders -1"),
    (Action.CONSUME, ("orders",), {"follow": True, "tags": "a || b"},
     "orders --follow --tags 'a || b'"),
    (Action.SHOW_MESSAGE, ("7F00",), {"topic": "orders"}, "7F00 --topic orders"),
    (Action.TRACK_MESSAGE, ("7F00",), {}, "7F00"),
    (Action.FIND_MESSAGES, ("orders", "order-17"), {"limit": 50}, "orders order-17 --limit 50"),
    (Action.BROWSE_MESSAGES, ("orders",), FROM,
     "orders --queue broker-a:1 --offset 17 --newest --limit 50"),
    (Action.BROWSE_MESSAGES, ("orders",), {"since": instant(0.5), "sql": "amount > 5"},
     "orders --since 1970-01-01T00:00:00.500Z --sql 'amount > 5'"),
    (Action.LIST_GROUPS, (), {}, ""),
    (Action.SHOW_GROUP, ("billing",), {}, "billing"),
    (Action.SHOW_MEMBER, ("billing", "10.0.0.1@17#1"), {"stack": True},
     "billing '10.0.0.1@17#1' --stack"),
    (Action.SHOW_MEMBER, ("billing", None), {"stack": True}, "billing --stack"),
    (Action.UPDATE_GROUP, ("billing",), {"max_retries": 16}, "billing --max-retries 16"),
    (Action.PAUSE_GROUP, ("billing",), {}, "billing"),
    (Action.RESUME_GROUP, ("billing",), {}, "billing"),
    (Action.RESET_GROUP, ("billing", "orders"), {"to": "latest", "queue": [QUEUE]},
     "billing orders --to latest --queue broker-a:1"),
    (Action.RESET_GROUP, ("billing", "orders"), {"by": -100, "queue": []},
     "billing orders --by -100"),
    (Action.SKIP_BACKLOG, ("-billing",), {"dry_run": True}, "--dry-run -- -billing"),
    (Action.CLONE_GROUP, ("billing", "billing-2"), {"topic": "orders"},
     "billing billing-2 --topic orders"),
    (Action.LIST_DEAD_LETTERS, ("billing",), {"where": CHOICE, "newest": True, "limit": 100},
     f"billing {CHOSEN} --newest --limit 100"),
    (Action.COUNT_DEAD_LETTERS, ("billing",), {"where": CHOICE}, f"billing {CHOSEN}"),
    (Action.RESEND_DEAD_LETTERS, ("billing",), SLOWLY,
     f"billing {CHOSEN} --limit 10 --rate 2.5 --to retry"),
    (Action.RESEND_DEAD_LETTERS, ("billing",), AGAIN, "billing --to origin --again --dry-run"),
    (Action.EXPORT_DEAD_LETTERS, ("billing", "letters.parquet"), {"where": CHOICE},
     f"billing letters.parquet {CHOSEN}"),
    (Action.RUN_PIPELINE, ("FILE",), {}, "FILE"),
    (Action.SHOW_PIPELINE, ("by city",), {"console": "URL"}, "'by city' --console URL"),
    (Action.FORGET_PIPELINE, ("city",), {"console": "http://127.0.0.1:8090"},
     "city --console http://127.0.0.1:8090"),
    (Action.ADD_USER, ("ada",), {"role": "admin", "users": "u.json"},
     "ada --role admin --users u.json"),
    (Action.REMOVE_USER, ("ada",), {"users": "u.json"}, "ada --users u.json"),
    (Action.SET_PASSWORD, ("ada",), {"users": "u.json"}, "ada --users u.json"),
    (Action.SET_ROLE, ("ada", "reader"), {"users": "u.json"}, "ada reader --users u.json"),
]  # fmt: skip
#: Commands that need no cluster, or name it themselves.
APART = {
    *("up", "namesrv", "broker", "pipeline status", "pipeline forget"),
    *("user add", "user remove", "user password", "user role"),
}


@pytest.mark.parametrize(("action", "arguments", "options", "rest"), ROWS)
def test_the_command_line_accepts_the_command_of_an_action(action, arguments, options, rest):
    text = command(action, *arguments, **options)
    elsewhere = for_cluster(text, ["ns1:9876", "ns2:9876"])

    assert text == f"orbitmq {action} {rest}".rstrip()
    assert parsed(text)
    assert parsed(elsewhere)
    without = elsewhere.replace(" --name-server ns1:9876 --name-server ns2:9876", "", 1)
    assert without == text
    assert (elsewhere == text) is (action in APART)


def test_every_action_has_a_row():
    assert {action for action, *_ in ROWS} == set(Action)


@pytest.mark.parametrize(
    ("text", "name_servers", "end"),
    [
        # The shell that a command is pasted into may have another one in its environment.
        ("orbitmq topic list", [DEFAULT_NAME_SERVER], f" --name-server {DEFAULT_NAME_SERVER}"),
        ("orbitmq topic list", [], ""),
        ("timedatectl set-ntp true", ["ns1:9876"], ""),
    ],
)
def test_a_command_of_ours_names_its_cluster(text, name_servers, end):
    assert for_cluster(text, name_servers) == text + end
