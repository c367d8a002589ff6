"""Named clusters: `orbitmq context`, `--context` and ORBITMQ_CONTEXT."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping

import pytest

pytestmark = pytest.mark.feature("W4")


@pytest.fixture
def home(tmp_path):
    """The environment of a user who has no contexts, and says no name server."""
    folder = str(tmp_path / "config")
    return {"XDG_CONFIG_HOME": folder, "ORBITMQ_NAME_SERVER": "", "NAMESRV_ADDR": ""}


NOWHERE = "127.0.0.1:1"


def names(cli, home: Mapping[str, str]) -> dict[str, bool]:
    listed = cli.run("context", "list", "--json", env=home).stdout.splitlines()
    return {each["name"]: each["is_current"] for each in map(json.loads, listed)}


def test_contexts_are_added_used_shown_and_removed(cli, home):
    for name in ("laptop", "staging"):
        cli.run("context", "add", name, "--name-server", f"{name}:9876", env=home)
    assert names(cli, home) == {"laptop": True, "staging": False}

    used = cli.run("context", "use", "staging", env=home)
    shown = json.loads(cli.run("context", "show", "--json", env=home).stdout)
    removed = cli.run("context", "remove", "staging", env=home)

    assert used.stdout == "commands use context staging now\n"
    assert (shown["name"], shown["name_servers"]) == ("staging", ["staging:9876"])
    assert "commands use 127.0.0.1:9876 now" in removed.stdout
    assert names(cli, home) == {"laptop": False}


@pytest.mark.parametrize("words", [("--context", "away"), ()])
def test_a_context_whose_cluster_is_away_is_named(cli, home, words):
    cli.run("context", "add", "away", "--name-server", NOWHERE, env=home)

    ran = cli.run("topic", "list", *words, env=home)

    assert ran.returncode == 1
    assert f"nothing listens at {NOWHERE}, where context 'away' is; start that" in ran.stderr
    given = cli.run("topic", "list", "--name-server", NOWHERE, env=home)
    assert "start a cluster with: orbitmq up" in given.stderr


def test_a_secret_is_readable_by_its_owner_alone_and_never_shown(cli, home, tmp_path):
    words = ("--name-server", NOWHERE, "--access-key", "ops", "--secret-file", "-")

    added = cli.run("context", "add", "secured", *words, stdin=b"hunter2\n", env=home)

    assert added.returncode == 0, added.stderr
    file = tmp_path / "config" / "orbitmq" / "contexts.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "hunter2" in file.read_text()
    shown = cli.run("context", "show", "secured", env=home).stdout
    assert "ops" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("words", "more", "is_reached"),
    [
        ((), {}, False),  # the present one, "away"
        (("--context", "here"), {}, True),
        ((), {"ORBITMQ_CONTEXT": "here"}, True),
        (("--context", "away"), {"ORBITMQ_CONTEXT": "here"}, False),
        (("--context", "here"), {"ORBITMQ_NAME_SERVER": NOWHERE}, True),
        ((), {"ORBITMQ_CONTEXT": "here", "ORBITMQ_NAME_SERVER": NOWHERE}, False),
        (("--name-server", "{here}"), {"ORBITMQ_CONTEXT": "away"}, True),
        ((), {"ORBITMQ_NAME_SERVER": "{here}"}, True),
    ],
)
def test_a_flag_goes_before_the_environment_and_that_before_the_present_context(
    cli, cluster, home, words, more, is_reached
):
    here = cluster.name_server
    cli.run("context", "add", "away", "--name-server", NOWHERE, env=home)
    cli.run("context", "add", "here", "--name-server", here, env=home)
    env = home | {name: text.format(here=here) for name, text in more.items()}

    ran = cli.run("topic", "list", *(word.format(here=here) for word in words), env=env)

    assert (ran.returncode == 0) == is_reached, ran.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("context", "use", "nowhere"), "there is no context 'nowhere'"),
        (("topic", "list", "--context", "nowhere"), "add it with: orbitmq context add nowhere"),
        (("context", "show"), "there is no current context"),
        (("context", "add", "a", "-n", "a:b:c"), "--name-server: "),
        (("context", "add", "a", "-n", "a", "--access-key", "k"), "needs its secret"),
        (("topic", "list", "-n", "a", "--context", "b"), "cannot be given together"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(cli, home, words, sentence):
    ran = cli.run(*words, env=home)

    assert ran.returncode in (1, 2)
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_file_that_is_none_is_named(cli, home, tmp_path):
    file = tmp_path / "config" / "orbitmq" / "contexts.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")

    ran = cli.run("context", "list", env=home)

    assert f"{file} is no file of contexts" in ran.stderr
