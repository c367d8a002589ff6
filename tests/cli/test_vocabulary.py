"""One vocabulary: former flags, suggestions, hints that name the cluster, help that people read."""

from __future__ import annotations

import re
import time

import pytest

from orbitmq.cli.main import for_this_cluster
from tools.cli_docs import commands


@pytest.mark.parametrize(
    ("words", "former", "present"),
    [
        (("consume", "words", "--count", "1"), "--count", "--limit"),
        (("consume", "words", "--count=1"), "--count", "--limit"),
        (("produce", "words", "x", "--order-key", "a", "--key", "b"), "--order-key", "--ordering"),
        (("group", "reset", "g", "words", "--to-end", "--dry-run"), "--to-end", "--to latest"),
        (("group", "reset", "g", "words", "--to-offset=0", "--dry-run"), "--to-offset", "--to"),
    ],
)
def test_a_former_flag_works_and_names_the_present_one(cluster, cli, words, former, present):
    cli.run("topic", "create", "words", "--if-missing")
    cli.run("produce", "words", "x")
    cli.run("group", "create", "g", "--if-missing")

    ran = cli.run(*words)

    assert ran.returncode == 0, ran.stderr
    assert f"{former} is deprecated; use {present}" in ran.stderr


def test_no_help_names_a_former_flag_or_the_types_of_python(cli):
    for command in commands():
        shown = cli.text(*command.name.split(), "--help")
        assert not re.search(r"<(bool|str|int|float|list)|\{[A-Z]+\}|--count\b|--to-begin", shown)
    for section in ("topic", "group", "context", "message"):
        assert "<bool>" not in cli.text(section, "--help")
    assert "<bool>" not in cli.text("--help")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("topc", "list"), "topic"),
        (("topic", "lsit"), "list"),
        (("topic", "ls"), "orbitmq topic list"),
        (("context", "delete", "old"), "orbitmq context remove"),
        (("send", "orders", "x"), "orbitmq produce"),
        (("consume", "orders", "--limt", "3"), "--limit"),
    ],
)
def test_a_misspelled_word_gets_a_suggestion(cli, words, meant):
    ran = cli.run(*words)

    assert ran.returncode == 2
    assert meant in ran.stderr


@pytest.mark.parametrize(
    "words",
    [("consume", "quiet", "--follow"), ("console", "--port", "0")],
    ids=lambda each: each[0],
)
def test_a_command_ends_within_its_timeout(cluster, cli, words):
    cluster.create_topic("quiet")
    began = time.monotonic()

    ran = cli.run(*words, "--timeout", "1s")

    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - began < 20


def test_hints_name_the_cluster_of_the_command(cluster, cli):
    env = {"ORBITMQ_NAME_SERVER": ""}

    ran = cli.run("topic", "show", "nothing", "-n", cluster.name_server, env=env)

    assert f"orbitmq topic create --name-server {cluster.name_server} nothing" in ran.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n", "a:1"], "see: orbitmq topic create --name-server a:1 x"),
        (["-na:1"], "see: orbitmq topic create --name-server a:1 x"),
        (["--name-server=a:1"], "see: orbitmq topic create --name-server a:1 x"),
        (["--context", "b c"], "see: orbitmq topic create --context 'b c' x"),
        (["--", "-n", "a"], "see: orbitmq topic create x"),
        ([], "see: orbitmq topic create x"),
    ],
)
def test_the_words_of_a_hint(words, expected):
    assert for_this_cluster("see: orbitmq topic create x", words) == expected
