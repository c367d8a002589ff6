"""Commands that the console shows are commands that the command line takes."""

from __future__ import annotations

import shlex

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
COMMANDS = {
    "up": command(Action.START_CLUSTER),
    "namesrv --port 9876": command(Action.START_NAME_SERVER, port=9876),
    "broker --name b --name-server a:1 --name-server b:2 --set broker.port=0": command(
        Action.START_BROKER, name="b", name_server=["a:1", "b:2"], set="broker.port=0"
    ),
    "broker --name b --data FOLDER --port 10911 --advertise HOST": command(
        Action.START_BROKER, name="b", data="FOLDER", port=10911, advertise="HOST"
    ),
    "console": command(Action.START_CONSOLE),
    "cluster show": command(Action.SHOW_CLUSTER),
    "topic create orders --queues 8 --permission rw": command(
        Action.CREATE_TOPIC, "orders", queues=8, permission="rw", ordered=None, unordered=False
    ),
    "topic update orders --write-queues 4 --read-queues 8 --ordered": command(
        Action.UPDATE_TOPIC, "orders", write_queues=4, read_queues=8, ordered=True
    ),
    "topic update orders --unordered": command(
        Action.UPDATE_TOPIC, "orders", ordered=False, unordered=True
    ),
    "topic delete orders": command(Action.DELETE_TOPIC, "orders"),
    "topic delete -- -orders": command(Action.DELETE_TOPIC, "-orders"),
    "produce orders 'a b' --tag t --key k --property a=b --delay 1.5s": command(
        Action.PRODUCE, "orders", "a b", tag="t", key=("k",), property={"a": "b"}, delay="1.5s"
    ),
    "produce --tag=-t --key=-k -- -orders -1": command(
        Action.PRODUCE, "-orders", "-1", tag="-t", key=["-k"], property={}
    ),
    "consume orders --follow --tags 'a || b'": command(
        Action.CONSUME, "orders", follow=True, tags="a || b"
    ),
    "consume orders --follow": command(Action.CONSUME, "orders", follow=True, sql=None),
    "message show 7F00 --topic orders": command(Action.SHOW_MESSAGE, "7F00", topic="orders"),
    "message track 7F00": command(Action.TRACK_MESSAGE, "7F00"),
    "message find orders order-17 --limit 50": command(
        Action.FIND_MESSAGES, "orders", "order-17", limit=50
    ),
    "message browse orders --queue broker-a:1 --offset 17 --newest --limit 50": command(
        Action.BROWSE_MESSAGES, "orders", queue=[QUEUE], offset=17, newest=True, limit=50
    ),
    "message browse orders --since 1970-01-01T00:00:00.500Z --sql 'amount > 5'": command(
        Action.BROWSE_MESSAGES, "orders", since=instant(0.5), sql="amount > 5"
    ),
    "group list": command(Action.LIST_GROUPS),
    "group show billing": command(Action.SHOW_GROUP, "billing"),
    "group member billing '10.0.0.1@17#1' --stack": command(
        Action.SHOW_MEMBER, "billing", "10.0.0.1@17#1", stack=True
    ),
    "group member billing --stack": command(Action.SHOW_MEMBER, "billing", None, stack=True),
    "group update billing --max-retries 16": command(
        Action.UPDATE_GROUP, "billing", max_retries=16
    ),
    "group pause billing": command(Action.PAUSE_GROUP, "billing"),
    "group resume billing": command(Action.RESUME_GROUP, "billing"),
    "group reset billing orders --to-begin": command(
        Action.RESET_GROUP, "billing", "orders", to_begin=True, queue=[]
    ),
    "group reset billing orders --to-end --queue broker-a:1": command(
        Action.RESET_GROUP, "billing", "orders", to_end=True, queue=[QUEUE]
    ),
    "group reset billing orders --to-time 2026-01-31T23:59:59": command(
        Action.RESET_GROUP, "billing", "orders", to_time="2026-01-31T23:59:59"
    ),
    "group reset billing orders --to-offset 17": command(
        Action.RESET_GROUP, "billing", "orders", to_offset=17
    ),
    "group reset billing orders --by -100": command(
        Action.RESET_GROUP, "billing", "orders", by=-100
    ),
    "group skip billing": command(Action.SKIP_BACKLOG, "billing", None),
    "group skip --dry-run -- -billing": command(Action.SKIP_BACKLOG, "-billing", dry_run=True),
    "group clone billing billing-2 --topic orders": command(
        Action.CLONE_GROUP, "billing", "billing-2", topic="orders"
    ),
    "dlq list billing": command(Action.LIST_DEAD_LETTERS, "billing"),
    f"dlq list billing {CHOSEN} --newest --limit 100": command(
        Action.LIST_DEAD_LETTERS, "billing", where=CHOICE, newest=True, limit=100
    ),
    f"dlq summary billing {CHOSEN}": command(Action.COUNT_DEAD_LETTERS, "billing", where=CHOICE),
    f"dlq resend billing {CHOSEN} --limit 10 --rate 2.5 --to retry": command(
        Action.RESEND_DEAD_LETTERS, "billing", where=CHOICE, limit=10, rate=2.5, to="retry"
    ),
    "dlq resend billing --to origin --again --dry-run": command(
        Action.RESEND_DEAD_LETTERS, "billing", to="origin", again=True, dry_run=True
    ),
    f"dlq export billing letters.parquet {CHOSEN}": command(
        Action.EXPORT_DEAD_LETTERS, "billing", "letters.parquet", where=CHOICE
    ),
    "pipeline run FILE": command(Action.RUN_PIPELINE, "FILE"),
    "pipeline status 'orders by city' --console URL": command(
        Action.SHOW_PIPELINE, "orders by city", console="URL"
    ),
    "pipeline forget city --console http://127.0.0.1:8090": command(
        Action.FORGET_PIPELINE, "city", console="http://127.0.0.1:8090"
    ),
}


@pytest.mark.parametrize(("expected", "text"), COMMANDS.items())
def test_the_command_line_accepts_the_command(expected, text):
    assert text == f"orbitmq {expected}"
    assert parsed(text)


@pytest.mark.parametrize("action", Action)
def test_every_action_has_a_row(action):
    assert any(each == action or each.startswith(f"{action} ") for each in COMMANDS)


@pytest.mark.parametrize("text", COMMANDS.values())
def test_the_command_line_accepts_it_for_another_cluster(text):
    elsewhere = for_cluster(text, ["ns1:9876", "ns2:9876"])

    assert parsed(elsewhere)
    added = elsewhere.replace(" --name-server ns1:9876 --name-server ns2:9876", "", 1)
    first, second, *_ = *shlex.split(text)[1:], ""
    if first in ("up", "namesrv", "broker") or second in ("status", "forget"):
        assert elsewhere == text
    else:
        assert elsewhere != added == text


def test_the_cluster_is_named_even_if_it_is_the_default_one():
    # The shell that a command is pasted into may have another one in its environment.
    text = for_cluster("orbitmq topic list", [DEFAULT_NAME_SERVER])

    assert text == f"orbitmq topic list --name-server {DEFAULT_NAME_SERVER}"


@pytest.mark.parametrize(
    ("text", "name_servers"),
    [("orbitmq topic list", []), ("timedatectl set-ntp true", ["ns1:9876"])],
)
def test_a_command_stays_where_no_cluster_is_given_or_asked(text, name_servers):
    assert for_cluster(text, name_servers) == text
