"""A cluster with accounts and TLS, used through Spark; its secrets stay secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import Started
from tests.support.sparking import run_module

ROOT = Path(__file__).parents[2]
TLS = ROOT / "tests" / "data" / "tls"
CERTIFICATE, KEY = TLS / "certificate.pem", TLS / "key.pem"

ACCESS, SECRET, WRONG = "pipeline-key", "s3cr3t-0f-th3-p1p3l1n3", "gu3ss-0f-th3-s3cr3t"
#: Of an account that may read without naming a group.
UNNAMED, UNNAMED_SECRET = "reports-key", "s3cr3t-0f-th3-r3p0rts"
ACCOUNTS = f"""
[[accounts]]
accessKey = "{ACCESS}"
secretKey = "{SECRET}"
topicPerms = ["orders=PUB|SUB", "copies=PUB|SUB", "%DLQ%billing=PUB|SUB", "%RETRY%billing=PUB|SUB"]
groupPerms = ["archive=SUB", "billing=SUB"]

[[accounts]]
accessKey = "{UNNAMED}"
secretKey = "{UNNAMED_SECRET}"
topicPerms = ["orders=SUB"]
groupPerms = ["TOOLS_CONSUMER=SUB"]
"""


@pytest.fixture
def guarded(tmp_path):
    """The name server of a cluster that nobody enters without a certificate and an account."""
    accounts, config = tmp_path / "accounts.toml", tmp_path / "orbitmq.toml"
    accounts.write_text(ACCOUNTS)
    own = f'tls.certificate = "{CERTIFICATE}"\ntls.key = "{KEY}"\n'
    server = f'{own}tls.mode = "enforcing"\ntls.client_authority = "{CERTIFICATE}"\n'
    outward = f'{own}tls.authority = "{CERTIFICATE}"\n'
    config.write_text(
        f"[namesrv]\nport = 0\n{server}\n[broker]\nport = 0\n{server}\n"
        f'[broker.access]\naccounts = "{accounts}"\n[broker.outward]\n{outward}'
    )
    words = ("up", "--data", str(tmp_path / "data"), "--config", str(config), "--json")
    with Started(*words) as cluster:
        found = [json.loads(line) for line in cluster.lines]
        yield next(each["address"] for each in found if each.get("role") == "name server")


@pytest.mark.timeout(240)
def test_everything_works_with_the_right_keys_and_nothing_tells_them(guarded, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()

    secrets = {"access": ACCESS, "secret": SECRET, "wrong": WRONG}
    secrets_in = json.dumps(secrets | {"unnamed": (UNNAMED, UNNAMED_SECRET)})
    words = (guarded, str(CERTIFICATE), str(KEY), str(folder))
    done = run_module("sparkguarded", *words, text=secrets_in)

    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rows"], found["copies"], found["idle"]) == (60, 60, True)
    assert (found["done"], found["dead"], found["letters"]) == (59, 1, ["7"])
    refusals = found["refusals"]
    assert "signature" in refusals["wrong secret"]
    assert "credentials" in refusals["no account"]
    assert "it worked" not in refusals.values()
    # Who names no group reads as one that every broker has, and has to be allowed that one.
    assert "UnnamedReadRefused" in refusals["no group"]
    for remedy in ("TOOLS_CONSUMER", "'group'", "'groupPrefix'"):
        assert remedy in refusals["no group"]
    assert found["without a group"] == 60
    # Spark has logged a lot, at INFO, and so have we, at DEBUG: nothing of it helps a reader.
    assert "MicroBatchExecution" in done.stderr
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"orders" in kept
    for secret in (SECRET, WRONG, UNNAMED_SECRET):
        assert secret not in done.stdout
        assert secret not in done.stderr
        assert secret.encode() not in kept
