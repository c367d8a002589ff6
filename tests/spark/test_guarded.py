"""A cluster with accounts and TLS, used through Spark; its secrets stay secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Started

ROOT = Path(__file__).parents[2]
TLS = ROOT / "tests" / "data" / "tls"
CERTIFICATE, KEY = TLS / "certificate.pem", TLS / "key.pem"

ACCESS, SECRET, WRONG = "pipeline-key", "s3cr3t-0f-th3-p1p3l1n3", "gu3ss-0f-th3-s3cr3t"
ACCOUNTS = f"""
[[accounts]]
accessKey = "{ACCESS}"
secretKey = "{SECRET}"
topicPerms = ["orders=PUB|SUB", "copies=PUB|SUB", "%DLQ%billing=PUB|SUB", "%RETRY%billing=PUB|SUB"]
groupPerms = ["archive=SUB", "billing=SUB"]
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """The name server of a cluster that nobody enters without a certificate and an account."""
    accounts, config = tmp_path / "accounts.toml", tmp_path / "orbitmq.toml"
    accounts.write_text(ACCOUNTS)
    server = "".join(
        f'tls.{name} = "{value}"\n'
        for name, value in {
            "certificate": CERTIFICATE,
            "key": KEY,
            "mode": "enforcing",
            "client_authority": CERTIFICATE,
        }.items()
    )
    outward = "".join(
        f'tls.{name} = "{value}"\n'
        for name, value in {
            "authority": CERTIFICATE,
            "certificate": CERTIFICATE,
            "key": KEY,
        }.items()
    )
    config.write_text(
        f"[namesrv]\nport = 0\n{server}\n[broker]\nport = 0\n{server}\n"
        f'[broker.access]\naccounts = "{accounts}"\n[broker.outward]\n{outward}'
    )
    words = ("up", "--data", str(tmp_path / "data"), "--config", str(config), "--json")
    with Started(*words) as cluster:
        found = [json.loads(line) for line in cluster.lines]
        yield next(each["address"] for each in found if each.get("role") == "name server")


@pytest.mark.timeout(240)
def test_everything_works_with_the_right_keys_and_nothing_tells_them(
    guarded: str, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()

    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.sparkguarded"),
            *(guarded, str(CERTIFICATE), str(KEY), str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        input=json.dumps({"access": ACCESS, "secret": SECRET, "wrong": WRONG}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rows"], found["copies"], found["idle"]) == (60, 60, True)
    assert (found["done"], found["dead"], found["letters"]) == (59, 1, ["7"])
    refusals = found["refusals"]
    assert "signature" in refusals["wrong secret"]
    assert "credentials" in refusals["no account"]
    assert "it worked" not in refusals.values()
    # Spark has logged a lot, at INFO, and so have we, at DEBUG: nothing of it helps a reader.
    assert "MicroBatchExecution" in done.stderr
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"orders" in kept
    for secret in (SECRET, WRONG):
        assert secret not in done.stdout
        assert secret not in done.stderr
        assert secret.encode() not in kept
