"""What holds for all commands: help, exit codes, refusals, pipes, credentials, and their page."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.broker.settings import AccessSettings
from orbitmq.testing import EmbeddedCluster
from tests.support.command import COMMAND, DEADLINE, Started, environment, run
from tests.support.orbitmqcli import Cli
from tools.cli_docs import PAGE, commands, main, page

TLS_FOLDER = Path(__file__).parent.parent / "data" / "tls"

#: Start servers or Spark, or look at what needs no cluster.
SERVING = {
    *("up", "broker", "namesrv", "console", "config show"),
    *("context list", "context show", "context add", "context use", "context remove"),
    *("archive run", "archive list", "archive verify"),
    *("user list", "user add", "user role", "user password", "user remove"),
    *("pipeline run", "pipeline list", "pipeline show", "pipeline status", "pipeline forget"),
}
CHANGING = {
    *("bench produce", "bench end-to-end"),
    *("topic create", "topic update", "topic delete", "produce", "dlq resend"),
    *("group create", "group update", "group delete", "group pause", "group resume"),
    *("group reset", "group skip", "group clone"),
}


def test_every_command_has_examples_json_and_what_a_change_needs():
    for command in commands():
        flags = {flag for each in command.made.params for flag in each.opts}
        assert f"orbitmq {command.name}" in command.made.epilog, command.name
        assert "--json" in flags, command.name
        assert command.made.help, command.name
        assert ({"--yes", "--dry-run"} <= flags) == (command.name in CHANGING), command.name
        if command.name not in SERVING:
            assert {"--name-server", "--access-key", "--secret-key", "--tls", "--exact"} <= flags
            assert command.prints is not None


def test_the_flags_that_commands_share_mean_the_same_everywhere():
    meanings: dict[str, set[str | None]] = {}
    for command in commands():
        for flag in command.made.params:
            if getattr(flag, "rich_help_panel", None) in ("Connection", "Output", "Consent"):
                meanings.setdefault(flag.opts[0], set()).add(flag.help)

    assert {name for name, texts in meanings.items() if len(texts) > 1} == set()


def test_the_environment_says_where_the_cluster_is_and_a_flag_is_stronger(cluster, nursery):
    lost = Cli("127.0.0.1:1", nursery)

    by_flag = lost.run("topic", "list", "--name-server", cluster.name_server)
    both = {"ORBITMQ_NAME_SERVER": "", "NAMESRV_ADDR": f"127.0.0.1:1;{cluster.name_server}"}
    by_apache = lost.run("topic", "list", env=both)

    assert by_flag.returncode == by_apache.returncode == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A cluster that lets in nobody without an account."""
    accounts = tmp_path_factory.mktemp("accounts") / "accounts.toml"
    accounts.write_text(
        '[[accounts]]\naccessKey = "operator"\nsecretKey = "correct horse"\nadmin = true\n'
    )

    def adjust(settings):
        return replace(settings, access=AccessSettings(accounts=accounts))

    with EmbeddedCluster(adjust=adjust) as cluster:
        yield cluster


def test_requests_are_signed_with_the_account_and_no_secret_is_told(guarded, nursery):
    cli = Cli(guarded.name_server, nursery)
    wrong = {"ORBITMQ_ACCESS_KEY": "operator", "ORBITMQ_SECRET_KEY": "wrong horse"}
    right = {"ORBITMQ_ACCESS_KEY": "operator", "ORBITMQ_SECRET_KEY": "correct horse"}

    without = cli.run("topic", "list")
    refused = cli.run("topic", "list", "--verbose", env=wrong)
    allowed = cli.run("topic", "create", "mine", "--json", env=right)
    by_flag = cli.run("topic", "list", "--access-key", "operator", "--secret-key", "correct horse")

    assert (without.returncode, refused.returncode) == (1, 1)
    assert json.loads(allowed.stdout)["result"] == "created"
    assert "mine" in by_flag.stdout
    told = without.stderr + refused.stderr + refused.stdout + allowed.stderr + by_flag.stderr
    assert "horse" not in told


def test_tls_is_spoken_to_servers_that_are_trusted(nursery, tmp_path):
    words = [
        word
        for server in ("broker", "namesrv")
        for name in ("certificate", "key")
        for word in ("--set", f"{server}.tls.{name}={TLS_FOLDER / name}.pem")
    ]
    with Started("up", "--namesrv-port", "0", "--broker-port", "0", *words, cwd=tmp_path) as up:
        cli = Cli(up.address("name server"), nursery)

        trusted = cli.run("topic", "list", "--all", "--tls-ca", str(TLS_FOLDER / "certificate.pem"))
        anybody = cli.run("topic", "list", "--all", "--tls-unverified")
        stranger = cli.run("topic", "list", "--all", "--tls")

    assert trusted.returncode == anybody.returncode == 0
    assert "TBW102" in trusted.stdout
    # A certificate that nobody vouches for: so it was TLS that was spoken.
    assert stranger.returncode == 1
    assert "certificate" in stranger.stderr


def test_changes_are_written_down_with_their_outcome_and_without_secrets(cli, tmp_path):
    file = tmp_path / "audit.jsonl"
    audit = {"ORBITMQ_AUDIT": str(file)}
    secret = ("--access-key", "me", "--secret-key", "hunter2")

    cli.run("topic", "create", "audited", *secret, env=audit)
    cli.run("topic", "create", "audited", "--secret-key=hunter2", "--access-key=me", env=audit)
    cli.run("topic", "delete", "audited", "--dry-run", env=audit)
    cli.run("topic", "list", env=audit)
    cli.run("topic", "delete", "audited", "--yes", "--audit", str(file))

    made, again, deleted = [json.loads(line) for line in file.read_text().splitlines()]
    assert made["command"] == [
        *("orbitmq", "topic", "create", "audited"),
        *("--access-key", "me", "--secret-key", "(hidden)"),
    ]
    assert made["problem"] is None
    assert made["user"]
    assert "exists" in again["problem"]
    assert deleted["command"][2] == "delete"
    assert "hunter2" not in file.read_text()
    unwritten = cli.run("group", "create", "g", "--audit", str(tmp_path / "no" / "file"))
    assert unwritten.returncode == 1
    assert "cannot be recorded" in unwritten.stderr


# Pipes and signals.


def test_a_reader_that_leaves_early_ends_the_command_quietly(cluster, cli):
    cluster.create_topic("long")
    cluster.send("long", *[b"x" * 1000] * 300)
    words = ("message", "browse", "long", "--limit", "0", "--json")

    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cli.environment()
    ) as browsing:
        assert browsing.stdout is not None
        assert browsing.stderr is not None
        browsing.stdout.readline()
        browsing.stdout.close()
        errors = browsing.stderr.read()
        code = browsing.wait(DEADLINE)

    assert errors == b""
    assert code == 141


def test_ctrl_c_ends_a_command_that_waits_without_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [*COMMAND, "topic", "list", "--name-server", address, "--timeout", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        ) as asking:
            connection, _ = silent.accept()
            asking.send_signal(signal.SIGINT)
            _, errors = asking.communicate(timeout=DEADLINE)
            connection.close()

    assert (asking.returncode, errors) == (130, "")


# How soon it starts, and what it loads.


def test_a_command_loads_only_what_it_needs(cluster):
    program = """
import sys
from orbitmq.cli.main import main
sys.argv = ["orbitmq", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
slow = {"numpy", "pyarrow", "pandas", "pyspark", "lark", "rich", "orbitmq.broker", "orbitmq.store"}
sys.stderr.write(" ".join(sorted(slow & set(sys.modules))))
"""

    def loaded(*words):
        ran = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            env=environment({"ORBITMQ_NAME_SERVER": cluster.name_server}),
            check=True,
        )
        return set(ran.stderr.split())

    assert loaded("--version") == set()
    assert loaded("topic", "list", "--json") == set()
    assert loaded("topic", "list") == set()


def test_the_list_of_words_loads_none_of_them():
    ran = run("--help")
    mistyped = run("toppic", "list")

    for word in ("up", "topic", "group", "message", "dlq", "produce", "consume", "top", "doctor"):
        assert f" {word} " in ran.stdout
    assert mistyped.returncode == 2
    assert "Did you mean" in mistyped.stderr


def test_the_page_about_the_commands_is_current(capsys):
    assert PAGE.read_text() == page(), "python -m tools.cli_docs writes it"
    assert main(["--check"]) == 0


def test_a_mistake_of_ours_is_a_sentence_too_unless_one_looks_for_it():
    program = """
import sys
import orbitmq.cli.application
from orbitmq.cli.main import main
orbitmq.cli.application.app = lambda **_: 1 / 0
main()
"""

    def errors(**env):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment(env),
            check=False,
        )
        assert ran.returncode == 1
        return ran.stderr

    assert errors() == (
        "orbitmq: this is a bug in OrbitMQ, please report it: ZeroDivisionError: division by "
        "zero (ORBITMQ_TRACEBACK=1 shows where)\n"
    )
    assert "Traceback" in errors(ORBITMQ_TRACEBACK="1")
