"""What the command prints: help, version, settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from orbitmq import __version__
from orbitmq.cli.main import CommandError
from orbitmq.cli.servers import NameServerService, serve
from orbitmq.cli.settings import Loop
from orbitmq.namesrv.settings import NameServerSettings
from tests.support.command import run


def test_the_version_is_printed():
    ran = run("--version")

    assert (ran.returncode, ran.stdout) == (0, f"orbitmq {__version__} (speaks RocketMQ 5.3.3)\n")


def test_the_settings_are_shown_as_a_table_with_their_origins(tmp_path):
    file = tmp_path / "orbitmq.toml"
    file.write_text("[broker]\nport = 1234\n")

    ran = run(
        *("config", "show", "--config", str(file), "--set", "broker.name=east"),
        env={"ORBITMQ_LOG_LEVEL": "debug"},
    )

    rows = {line.split()[0]: line.split()[1:] for line in ran.stdout.splitlines()}
    assert rows["broker.port"] == ["1234", str(file)]
    assert rows["broker.name"] == ['"east"', "--set"]
    assert rows["log.level"] == ['"debug"', "ORBITMQ_LOG_LEVEL"]
    assert rows["namesrv.port"] == ["9876", "default"]
    assert rows["broker.store.flush.policy"] == ['"async"', "default"]


def test_the_settings_are_shown_as_json_and_only_what_was_changed_if_asked():
    ran = run("config", "show", "--json", "--changed", env={"ORBITMQ_BROKER_PORT": "0"})

    (line,) = ran.stdout.splitlines()
    assert json.loads(line) == {
        "setting": "broker.port",
        "value": 0,
        "origin": "ORBITMQ_BROKER_PORT",
        "variable": "ORBITMQ_BROKER_PORT",
        "meaning": "The port to bind; 0: any free one",
        "allowed": "a whole number",
        "unit": "",
    }


def test_settings_are_described_one_by_one_or_with_all_below():
    one = run("config", "show", "broker.send.flush_timeout", "--describe")
    several = run("config", "show", "broker.send")
    none = run("config", "show", "broker.sand")

    assert one.stdout.splitlines() == [
        "broker.send.flush_timeout = 5.0  (default)",
        "    Wait for a synchronous flush, then FLUSH_DISK_TIMEOUT",
        "    a number (seconds); ORBITMQ_BROKER_SEND_FLUSH_TIMEOUT",
    ]
    paths = [line.split()[0] for line in several.stdout.splitlines()[1:]]
    assert "broker.send.region" in paths
    assert all(path.startswith("broker.send.") for path in paths)
    assert none.returncode == 2
    assert "no setting is 'broker.sand' or below it" in none.stderr


def test_a_password_is_not_shown():
    words = ("broker.tls.certificate=c", "broker.tls.key=k", "broker.tls.key_password=hunter2")
    given = [part for word in words for part in ("--set", word)]

    table, as_json = run("config", "show", *given), run("config", "show", "--json", *given)

    assert table.returncode == as_json.returncode == 0
    assert "hunter2" not in table.stdout + as_json.stdout + table.stderr + as_json.stderr


def test_uvloop_that_is_not_there_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    service = NameServerService(NameServerSettings())

    with pytest.raises(CommandError, match=r"pip install '.*\[speed\]'"):
        serve(service, Loop.UVLOOP, lambda _: None)


def test_only_the_console_needs_what_its_extra_brings():
    program = """
import importlib, sys
sys.modules["starlette"] = sys.modules["uvicorn"] = sys.modules["pyspark"] = None
from orbitmq.cli.application import WORDS
for module in {word.module for word in WORDS.values() if word.extra is None}:
    importlib.import_module(module)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr


def test_the_base_install_says_what_the_command_needs():
    program = """
import sys
sys.modules["typer"] = None
from orbitmq.cli.main import main
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 1
    assert re.fullmatch(
        r"orbitmq: the command needs typer, which is not installed; .*pip install '.*\[broker\]'\n",
        ran.stderr,
    )
