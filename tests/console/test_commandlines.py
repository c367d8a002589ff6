"""Commands that the console shows are commands that the command line takes."""

from __future__ import annotations

import shlex

import pytest

from orbitmq.cli.command import DEFAULT_NAME_SERVER
from orbitmq.client.admin import DeadLetterFilter
from orbitmq.client.routes import Queue
from orbitmq.console import words as lines
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
#: Whom commands ask that are told nothing.
TEXTS = [
    lines.create_topic("orders", queues=8, permission="rw"),
    lines.create_topic("orders", write_queues=4, read_queues=8, ordered=True, is_new=False),
    lines.create_topic("orders", ordered=False, is_new=False),
    lines.delete_topic("orders"),
    lines.show_group("billing"),
    lines.pause_group("billing"),
    lines.pause_group("billing", resume=True),
    lines.show_member("billing", "10.0.0.1@17#1", stack=True),
    lines.reset_group("billing", "orders", to_begin=True),
    lines.reset_group("billing", "orders", to_end=True, queues=[QUEUE]),
    lines.reset_group("billing", "orders", to_time="2026-01-31T23:59:59"),
    lines.reset_group("billing", "orders", to_offset=17),
    lines.reset_group("billing", "orders", by=-100),
    lines.skip_backlog("billing", None),
    lines.skip_backlog("-billing", None, dry_run=True),
    lines.skip_backlog("billing", "orders"),
    lines.clone_group("billing", "billing-2", None),
    lines.clone_group("billing", "billing-2", "orders"),
    lines.list_dead_letters("billing"),
    lines.list_dead_letters("billing", CHOICE, newest=True, limit=100),
    lines.count_dead_letters("billing", CHOICE),
    lines.resend_dead_letters("billing", CHOICE, limit=10, rate=2.5),
    lines.resend_dead_letters("-billing", CHOICE, limit=10, rate=2.5, dry_run=True),
    lines.resend_dead_letters("billing", to="origin", again=True),
    lines.export_dead_letters("billing", "letters.parquet", CHOICE),
    lines.show_message("7F00", "orders"),
    lines.show_message("7F00", None),
    lines.track_message("7F00", None),
    lines.find_messages("orders", "order-17", limit=50),
    lines.browse_messages("orders", queues=[QUEUE], offset=17, newest=True, limit=50),
    lines.browse_messages("orders", since=0.5, until="2026-01-31T23:59:59", limit=50),
    lines.browse_messages("orders", queues=[QUEUE], expression="a || b", newest=True),
    lines.browse_messages("orders", expression="amount > 5", is_sql=True),
    lines.follow_topic("orders", expression="a || b"),
    lines.follow_topic("orders", expression="amount > 5", is_sql=True),
    lines.follow_topic("orders"),
    lines.show_member("billing", None, stack=True),
    lines.command("group", "update", "billing", max_retries=16),
    lines.produce("orders", "a 'body'", tags="t", keys=["k"], properties={"a": "b"}, delay=1.5),
    lines.produce("-orders", "-1", tags="-t", keys=["-k"]),
    lines.delete_topic("-orders"),
    lines.command("doctor"),
    lines.show_pipeline("orders by city"),
    lines.show_pipeline("orders by city", "https://console.example.org"),
    lines.forget_pipeline("orders by city", "http://127.0.0.1:8090"),
    lines.start_name_server(9876),
    lines.start_broker(
        "broker-a", ["ns1:9876", "ns2:9876"], advertise="HOST", setting="broker.port=0"
    ),
    lines.start_broker("broker-a", ["ns1:9876"], data="FOLDER", port=10911),
    lines.start_broker(None, []),
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_line_takes_it(text: str) -> None:
    assert parsed(text)


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_line_takes_it_for_another_cluster_too(text: str) -> None:
    elsewhere = lines.aimed(text, ["ns1:9876", "ns2:9876"])

    assert parsed(elsewhere)
    words = shlex.split(text)
    if words[1:3] in (["pipeline", "status"], ["pipeline", "forget"]) or words[1] in (
        "namesrv",
        "broker",
    ):
        # They ask no cluster, or are told which in their own way.
        assert elsewhere == text
    else:
        told = "--name-server ns1:9876 --name-server ns2:9876"
        assert elsewhere.replace(f" {told}", "", 1) == text


def test_the_cluster_is_named_even_if_it_is_the_one_that_a_bare_shell_asks() -> None:
    # The shell that a command is pasted into may have another one in its environment.
    aimed = lines.aimed("orbitmq topic list", [DEFAULT_NAME_SERVER])

    assert aimed == f"orbitmq topic list --name-server {DEFAULT_NAME_SERVER}"


def test_nothing_is_said_where_no_cluster_is_given_or_asked() -> None:
    assert lines.aimed("orbitmq topic list", []) == "orbitmq topic list"
    assert lines.aimed("timedatectl set-ntp true", ["ns1:9876"]) == "timedatectl set-ntp true"


def test_words_are_quoted_for_a_shell() -> None:
    text = lines.resend_dead_letters("a|b", CHOICE)

    assert shlex.split(text) == [
        "orbitmq", "dlq", "resend", "a|b",
        "--since", "2027-01-15T08:00:00.250Z", "--until", "2027-01-15T08:01:40.000Z",
        "--key", "order-17", "--key=--all", "--topic", "orders",
        "--reason", "it's $HOME; rm -rf /", "--pile=--dry-run",
        "--min-attempts", "0", "--max-attempts", "16", "--id", "7F00", "--to", "retry",
    ]  # fmt: skip
