"""The pages of FastStream and FastAPI: their programs as processes, with a real broker."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.walkthrough import ROOT, SHOWN_ADDRESS, blocks, expected

pytestmark = pytest.mark.timeout(180)

PATIENCE = 40.0
PAGES = ROOT / "docs" / "integrations"


def write_programs(page: str, folder: Path, address: str) -> None:
    for block in blocks(PAGES / page):
        if block.language == "python" and block.title is not None:
            (folder / block.title).write_text(block.text.replace(SHOWN_ADDRESS, address))


def python(*words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.feature("W2")
def test_the_faststream_application_of_the_page_runs(orbit_cluster, tmp_path):
    write_programs("faststream.md", tmp_path, orbit_cluster.name_server)

    said = python("-m", "faststream", "run", "billing:app", folder=tmp_path)

    assert "order-1: 250" in said.splitlines()


@pytest.mark.feature("W2")
def test_the_test_client_of_the_page_needs_no_cluster(tmp_path):
    (example,) = (
        block.text
        for block in blocks(PAGES / "faststream.md")
        if block.language == "python" and block.title is None
    )

    (tmp_path / "test_billing.py").write_text(example)  # FastStream reads the source

    assert python("test_billing.py", folder=tmp_path).splitlines() == expected(example)


@pytest.mark.feature("W3")
def test_a_web_application_sends_and_consumes(orbit_cluster, tmp_path):
    write_programs("fastapi.md", tmp_path, orbit_cluster.name_server)

    with serving("shop:app", tmp_path) as server:
        assert ask(f"{server}/orders?cents=250", method="POST")["message"]
        until(lambda: ask(f"{server}/orders") == [250])


@pytest.mark.feature("W3")
def test_handlers_stand_beside_routes(orbit_cluster, tmp_path):
    write_programs("fastapi.md", tmp_path, orbit_cluster.name_server)

    with serving("billing:app", tmp_path) as server:
        for cents in (100, 150):
            ask(f"{server}/orders", {"customer": "ada", "cents": cents})
        until(lambda: ask(f"{server}/totals") == {"ada": 250})
        with urllib.request.urlopen(f"{server}/asyncapi", timeout=PATIENCE) as page:  # noqa: S310
            assert b"fastapi-orders" in page.read()


@contextmanager
def serving(app: str, folder: Path) -> Iterator[str]:
    """uvicorn, which must end well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words: Sequence[str] = ["uvicorn", app, "--fd", str(listener.fileno())]
        log = folder / "server.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
            )
        try:
            until(lambda: "startup complete" in log.read_text(), log.read_text)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            process.terminate()
            assert process.wait(PATIENCE) in (0, -15), log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            process.kill()
            process.wait(PATIENCE)


def ask(url: str, body: object = None, *, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:  # noqa: S310
        return json.load(answer)


def until(condition, why=lambda: "it never came true") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)
