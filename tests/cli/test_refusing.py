"""Values that a flag cannot have: what is said names the flag, the value and what is allowed."""

from __future__ import annotations

import enum
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from orbitmq.cli.application import app
from tests.support.command import run
from tests.support.orbitmqcli import Cli
from tools.cli_docs import commands

BAD = "zzz"


@pytest.fixture(scope="module")
def cli(nursery):
    """Nothing here gets as far as a cluster."""
    return Cli("127.0.0.1:1", nursery)


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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("produce", "t", "x", "-n", "1"), "got '1'; to say how many: --count 1"),
        (("consume", "t", "-n", "20"), "got '20'; to say how many: --count 20"),
        (("message", "browse", "t", "-n", "5"), "got '5'; to say how many: --limit 5"),
        (("topic", "list", "-n", "9876"), "takes an address such as 127.0.0.1:9876, got '9876'"),
        (("console", "-n", "1"), "--name-server (-n) takes an address"),
        (("broker", "-n", "1"), "broker.name_servers: a number alone is no address"),
        (("topic", "list", "-n", ":9876"), "--name-server (-n): an address must be host:port"),
        (("message", "browse", "t", "--since", "x"), "--since must be a date such as"),
        (("message", "find", "t", "k", "--until", "x"), "--until must be a date such as"),
        (("group", "reset", "g", "t", "--to-time", "x"), "--to-time must be a date such as"),
        (("consume", "t", "--from", "x"), "--from must be begin, end, a date such as"),
        (("produce", "t", "x", "--at", "x"), "--at must be a date such as"),
        (("produce", "t", "x", "--at", "2h"), "say --delay 2h for so much later"),
        (("dlq", "resend", "g", "--rate", "-1"), "--rate must be a number above 0, got -1.0"),
        (("produce", "t", "x", "--rate", "inf"), "--rate must be a number above 0, got inf"),
        (("console", "--every", "0"), "--every must be a number above 0, got 0.0"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_about_the_flag(cli, words, expected):
    assert expected in cli.refusal(*words, code=2)


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
        r"orbitmq: the console needs uvicorn, .*; pip install 'orbitmq\[console\]'\n", ran.stderr
    )
    assert list(place.iterdir()) == []
