"""Values that a flag cannot have: what is said names the flag, the value and what is allowed."""

from __future__ import annotations

import enum
import os
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from orbitmq.cli.application import app
from tests.support.command import run
from tools.cli_docs import commands

BAD = "zzz"


def flags_with_kinds() -> Iterator[tuple[str, str, Any]]:
    """Every flag of every command that does not take any text, with the type of its values."""
    for command in commands():
        for parameter in command.made.params:
            flag = parameter.opts[0]
            if not flag.startswith("--") or parameter.is_flag or parameter.name == "help":
                continue
            (kind, *_) = kinds = _plain(command.declared[parameter.name])
            if str not in kinds and Path not in kinds:
                yield command.name, flag, kind


def _plain(declared: Any) -> list[Any]:
    """The types inside of `Annotated[list[int] | None, ...]`, without what is around them."""
    if isinstance(declared, type) and not typing.get_args(declared):
        return [declared]
    inner = typing.get_args(declared)
    if typing.get_origin(declared) is typing.Annotated:
        inner = inner[:1]
    return [each for part in inner if part is not type(None) for each in _plain(part)]


ALL = list(flags_with_kinds())


@pytest.mark.parametrize(("command", "flag", "kind"), ALL)
def test_a_value_of_the_wrong_kind_is_named_with_what_is_allowed(command, flag, kind):
    with pytest.raises(Exception, match=repr(BAD)) as refused:
        typer.main.get_command(app).main([*command.split(), flag, BAD], standalone_mode=False)

    said = refused.value.format_message()  # type: ignore[attr-defined]  # click's, by any name
    assert f"Invalid value for {flag!r}" in said
    assert "Input should" not in said
    assert "Value error" not in said
    if issubclass(kind, enum.Enum):
        assert all(repr(str(each.value)) in said for each in kind)
    else:
        assert ("a whole number" if kind is int else "a number") in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("message", "browse", "t", "--limit", "-1"), "must be 0 or more, got '-1'"),
        (("message", "browse", "t", "--limit", "x"), "must be a whole number, 0 or more, got 'x'"),
        (("topic", "create", "t", "--queues", "0"), "must be from 1 to 65536, got '0'"),
        (("up", "--broker-port", "70000"), "must be from 0 to 65535, got '70000'"),
        (("up", "--brokers", "27"), "must be from 1 to 26, got '27'"),
        (("up", "--console", "--console-port", "-2"), "must be from 0 to 65535, got '-2'"),
    ],
)
def test_a_number_that_is_out_of_bounds_is_told_the_bounds(cli, words, expected):
    ran = cli.run(*words)

    assert ran.returncode == 2
    assert expected in " ".join(ran.stderr.replace("│", " ").split())


def test_a_value_of_the_environment_is_named_with_its_variable(cli):
    ran = cli.run("topic", "list", env={"ORBITMQ_TLS": BAD})

    said = " ".join(ran.stderr.replace("│", " ").split())
    assert ran.returncode == 2
    assert "'ORBITMQ_TLS'" in said
    assert f"must be true or false, got {BAD!r}" in said


#: Commands that fail, by exit code, with a part of the sentence that they print.
REFUSED = {
    1: [
        ("topic show 'bad topic'", "'bad topic'"),
        ("topic create TBW102", "topic 'TBW102' exists"),
        ("topic create t --dry-run --broker x", "no broker 'x' is registered"),
        ("topic create t --dry-run --cluster x", "no broker 'of cluster x'"),
        ("group create g --dry-run --broker x", "no broker 'x' is registered"),
        ("group reset ghost orders --to latest", "no broker knows group 'ghost'"),
        ("message show {none} --topic orders", "no message"),
        ("message at orders broker-a:0 999", "no message at offset 999"),
        ("message at orders broker-z:0 0", "broker-z"),
        ("message browse ghost", "no broker has topic 'ghost'"),
        ("message browse orders --queue broker-a:77", "no queue broker-a:77"),
        ("message find orders k", "no message of topic 'orders' has the key 'k'"),
        ("consume ghost", "no broker has topic 'ghost'"),
        ("produce orders --file /nowhere", "/nowhere: No such file or directory"),
        ("bench consume ghost", "no broker has topic 'ghost'"),
    ],
    2: [
        ("topic list --request-timeout 0", "--request-timeout must be a number above 0, got 0.0"),
        ("topic list --request-timeout nan", "--request-timeout must be a number above 0, got nan"),
        ("topic list --access-key a", "--secret-key is missing"),
        ("topic list --secret-key a", "--access-key is missing"),
        ("topic list --tls-ca /nowhere.pem", "/nowhere.pem"),
        ("topic list --name-server host:port", "host:port"),
        ("topic list -n 9876", "takes an address such as 127.0.0.1:9876, got '9876'"),
        ("topic list -n :9876", "--name-server (-n): an address must be host:port"),
        ("topic create 'a b'", "'a b' contains illegal characters"),
        ("topic create t --dry-run --type odd", "--type must be one of normal,"),
        ("topic update t", "nothing to change"),
        ("group update t", "nothing to change"),
        ("group reset billing orders", "with --to, which is earliest, latest"),
        ("group reset billing orders --to latest --by 3", "give one"),
        ("group reset billing orders --to 99 --yes", "which has 0 to 1"),
        ("group reset billing orders --to latest --queue x", "a queue is named as broker-a:3"),
        ("group reset billing orders --to x", "--to must be earliest, latest, a time such as"),
        ("group clone billing billing", "cannot be cloned onto itself"),
        ("message show nonsense", "nonsense"),
        ("message at orders broker-a 0", "a queue is named as broker-a:3"),
        ("message browse orders -n 5", "got '5'; for a number of messages use --limit 5"),
        ("message browse orders --tags a --sql b", "cannot be given together"),
        ("message browse orders --since x", "--since must be a date such as"),
        ("message browse orders --cursor junk", "not a cursor"),
        ("message browse orders --cursor junk --limit 0", "--limit"),
        ("message find orders ''", "must not be empty"),
        ("message find orders k --until x", "--until must be a date such as"),
        ("consume orders -n 20", "got '20'; for a number of messages use --limit 20"),
        ("consume orders --from x", "--from must be earliest, latest, a time such as"),
        ("consume orders --tags a --sql b", "cannot be given together"),
        ("consume orders --group g --queue broker-a:0", "the group assigns the queues"),
        ("consume orders --queue broker-a", "a queue is named as broker-a:3"),
        ("consume orders --queue broker-a:99", "99"),
        ("consume orders --group 'bad group'", "a group may consist of"),
        ("produce orders x -n 1", "got '1'; for a number of messages use --limit 1"),
        ("produce orders x --at x", "--at must be a date such as"),
        ("produce orders x --at 2h", "for a delay use --delay 2h"),
        ("produce orders x --rate inf", "--rate must be a number above 0, got inf"),
        ("produce orders x --file y", "not both"),
        ("produce orders x --delay soon", "--delay must be a duration"),
        ("produce orders x --delay 1s --at 2099-01-31", "cannot be given together"),
        ("produce orders x --property novalue", "as in region=eu"),
        ("produce orders x --property KEYS=x", "is a name of the system"),
        ("produce orders x --queue nowhere", "a queue is named as broker-a:3"),
        ("produce orders ''", "must not be empty"),
        ("dlq resend g --rate -1", "--rate must be a number above 0, got -1.0"),
        ("console -n 1", "--name-server (-n) takes an address"),
        ("console --every 0", "--every must be a number above 0, got 0.0"),
        ("broker -n 1", "broker.name_servers: a number alone is no address"),
        ("produce orders x --tag 'a || b'", "a message has one tag"),
        (
            "topic list --nam x",
            "no option '--nam' of orbitmq topic list; did you mean --name-server?",
        ),
        ("topic create t --partitions 3", "did you mean --queues?"),
        ("topic list --bootstrap-server x", "did you mean --name-server?"),
        (
            "up --port 1",
            "did you mean --namesrv-port, --broker-port, --http-port or --console-port?",
        ),
        ("lag", "did you mean: orbitmq group list"),
        (
            "consume --topic orders",
            "no option '--topic' of orbitmq consume; write: orbitmq consume T",
        ),
        ("topic list --xyzzy", "see: orbitmq topic list --help"),
        ("top --interval 0", "--interval must be above 0"),
        ("top --interval often", "--interval must be a duration"),
        ("bench produce t --rate 0", "--rate must be a number above 0"),
        ("bench produce t --timeout 0", "--timeout must be a duration"),
        ("bench produce t --timeout x", "--timeout must be a duration"),
        ("bench produce t --plot x.bmp", "--plot must end in .svg, .png or .pdf"),
        ("bench produce t --size 100000 --batch 100", "--size times --batch"),
        ("bench end-to-end t --size 4", "--size must be 16 or more"),
        ("bench consume t --embedded", "bench end-to-end --embedded"),
    ],
}


@pytest.fixture(scope="module")
def shop(cluster, cli):
    """The command for a cluster with a topic of one message and a group."""
    cluster.create_topic("orders", queues=1)
    cli.records("produce", "orders", "x", "--queue", "broker-a:0")
    cli.record("group", "create", "billing")
    return cli


@pytest.mark.parametrize(
    ("code", "words", "expected"), [(code, *row) for code, rows in REFUSED.items() for row in rows]
)
def test_what_cannot_be_done_is_refused_in_one_sentence(shop, code, words, expected):
    assert expected in shop.refusal(*shlex.split(words.format(none="0" * 32)), code=code)


@pytest.mark.parametrize("words", ["topic", "topic lits", "topic show", "topic list --nonsense"])
def test_the_exit_code_of_misuse_is_two(cli, words):
    ran = cli.run(*words.split())

    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("words", [("console",), ("up", "--console")])
def test_a_console_whose_extra_is_missing_names_the_remedy_and_leaves_nothing_behind(
    tmp_path, words
):
    hidden, place = tmp_path / "hidden", tmp_path / "place"
    hidden.mkdir()
    place.mkdir()
    (hidden / "uvicorn.py").write_text("raise ModuleNotFoundError('hidden', name='uvicorn')\n")
    path = f"{hidden}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    ran = run(*words, cwd=place, env={"PYTHONPATH": path})

    assert ran.returncode == 1
    assert re.fullmatch(
        r"orbitmq: the console needs uvicorn, .*; .*pip install '.*\[console\]'\n", ran.stderr
    )
    assert list(place.iterdir()) == []
