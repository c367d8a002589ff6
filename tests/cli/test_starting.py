"""A broker process while it repairs its store: it answers who watches, and heeds signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Generous: nothing of this takes long, but the machine may be busy.
DEADLINE = 30.0


@contextlib.contextmanager
def opening(folder: Path, http: int, port: int, command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A broker that reads its checkpoint, which is a pipe: that takes until somebody writes."""
    store = folder / "broker-a"
    store.mkdir()
    os.mkfifo(store / "checkpoint")
    words = {
        "broker": ("broker", "--data", str(store), "--port", str(port)),
        "up": ("up", "--data", str(folder), "--broker-port", str(port), "--namesrv-port", "0"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "orbitmq.cli", *words[command], "--http-port", str(http)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def page(port: int, path: str) -> tuple[int, dict[str, object]]:
    """What a page says; asked again until somebody listens."""
    until = time.monotonic() + DEADLINE
    pause = threading.Event()
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE) as told:
                return told.status, json.load(told)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except urllib.error.URLError:
            assert time.monotonic() < until, "nobody listens"
            pause.wait(0.05)


@pytest.mark.parametrize(("command", "number"), [("broker", signal.SIGTERM), ("up", signal.SIGINT)])
def test_a_signal_ends_a_broker_that_repairs_its_store_at_once(
    tmp_path, unused_tcp_port_factory, command, number
):
    port, http = unused_tcp_port_factory(), unused_tcp_port_factory()
    with opening(tmp_path, http, port, command) as process:
        alive = page(http, "/healthz")
        ready = page(http, "/readyz")
        was_running = process.poll() is None

        process.send_signal(number)
        code = process.wait(DEADLINE)
        assert process.stdout is not None
        printed = process.stdout.read()

    assert was_running
    assert (alive[0], alive[1]["status"]) == (200, "starting")
    assert (ready[0], ready[1]["reasons"]) == (503, ["the broker is starting"])
    assert code == 0
    assert b"ready" not in printed.lower()
