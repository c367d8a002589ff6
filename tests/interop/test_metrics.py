"""What Apache's 5.x broker tells Prometheus: names, kinds, labels and buckets.

The recording of it is what the broker's own tests compare with; here it is checked against a broker
that runs. ``python -m tests.interop.test_metrics`` writes it anew.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop import apache
from tests.interop.session import Session

if TYPE_CHECKING:
    from tests.interop.apache import Release

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "5.5.0-metrics.json"
DEADLINE = 120.0

#: What comes last: the dead letters of a consumer that fails always.
LAST = "rocketmq_send_to_dlq_messages_total"

Table = dict[str, dict[str, Any]]


def test_the_recording_of_apaches_metrics_is_current(release, tmp_path):
    if release.is_old_line:
        pytest.skip("4.x has no metrics of its own")

    assert observe(release, tmp_path) == json.loads(RECORDING.read_text())


def observe(release: Release, home: Path) -> Table:
    """Use a broker in every way that it has metrics for, and read its page."""
    port = apache.free_port()
    settings = {
        "metricsExporterType": "PROM",
        "metricsPromExporterPort": port,
        "metricsPromExporterHost": "127.0.0.1",
        "messageDelayLevel": "1s 1s 1s 1s 1s",
    }
    with (
        apache.NameServer.running(release, home / "names") as names,
        apache.Broker.running(release, home / "broker", names.address, settings=settings) as broker,
        Session.running(release, home / "client", names.address) as session,
    ):
        session.run("topic", {"topics": "Orders,Sagas", "queues": 2, "broker": broker.address})
        session.run("send", {"topic": "Orders", "count": 5})
        session.run("send", {"topic": "Orders", "count": 1, "timer-ms": 1500})
        session.run("transaction", {"topic": "Sagas", "count": 3})
        staying = {"hold": "", "deadline": 240}
        failing = {"fail": 1000, "max-reconsume": 1, **staying}
        session.start("consume", {"topic": "Orders", "group": "readers", **failing})
        session.start("consume", {"topic": "Sagas", "group": "repliers", "reply": "", **staying})
        until = time.monotonic() + DEADLINE
        pause = threading.Event()
        page = ""
        while LAST not in page or "rocketmq_timer_dequeue_total" not in page:
            assert time.monotonic() < until, page
            pause.wait(0.5)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                page = answer.read().decode()
        return table_of(page)


def table_of(page: str) -> Table:
    """For every metric its kind, the names of its labels, and its buckets."""
    table: Table = {}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    for name, kind in sorted(kinds.items()):
        suffix = "_bucket" if kind == "histogram" else ""
        samples = re.findall(rf"^{name}{suffix}\{{(.*)\}} ", page, re.MULTILINE)
        found = [dict(re.findall(r'(\w+)="([^"]*)"', sample)) for sample in samples]
        labels = {label for sample in found for label in sample}
        table[name] = {"kind": kind, "labels": sorted(labels - {"le"})}
        if suffix:
            table[name]["buckets"] = sorted({sample["le"] for sample in found}, key=float)
    return table


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        observed = observe(apache.Release.obtain("5.5.0"), Path(scratch))
    RECORDING.write_text(json.dumps(observed, indent=1) + "\n")
