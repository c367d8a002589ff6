"""Commands that the console shows are commands that the command line takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from orbitmq.cli.application import app as root
from orbitmq.client.queue import Queue
from orbitmq.console import commandlines as lines

QUEUE = Queue("orders", "broker-a", 1)
TEXTS = [
    lines.create_topic("orders", queues=8, permission="rw"),
    lines.create_topic("orders", write_queues=4, read_queues=8, ordered=True, is_new=False),
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
    lines.skip_backlog("billing", None) + " --dry-run",
    lines.skip_backlog("billing", "orders"),
    lines.clone_group("billing", "billing-2", None),
    lines.clone_group("billing", "billing-2", "orders"),
    lines.list_dead_letters("billing"),
    lines.resend_dead_letters("billing", reason="it's $HOME; rm -rf", limit=10, rate=2.5),
    lines.resend_dead_letters("billing", topic="orders", to="origin", again=True),
    lines.export_dead_letters("billing", "letters.parquet"),
    lines.show_message("7F00", "orders"),
    lines.produce("orders", "a 'body'", tags="t", keys=["k"], properties={"a": "b"}, delay=1.5),
    lines.command("doctor"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_line_takes_it(text: str) -> None:
    import typer

    command: Any = typer.main.get_command(root)
    words = shlex.split(text)[1:]
    context = command.make_context("orbitmq", list(words), resilient_parsing=False)
    while True:
        name, found, rest = command.resolve_command(context, words)
        context = found.make_context(name, list(rest), parent=context)
        if not hasattr(found, "resolve_command"):
            break
        command, words = found, rest

    assert context.params


def test_words_are_quoted_for_a_shell() -> None:
    text = lines.resend_dead_letters("billing", reason="it's $HOME; rm -rf /")

    assert shlex.split(text) == [
        "orbitmq", "dlq", "resend", "billing", "--reason", "it's $HOME; rm -rf /", "--to", "retry",
    ]  # fmt: skip
