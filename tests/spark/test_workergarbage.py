"""What a worker has imported is kept out of its collections: there, once, and nowhere else."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest

from orbitmq.spark import worker
from orbitmq.spark.worker import freeze_modules


@pytest.fixture
def calls(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    worker._freeze.cache_clear()
    return done


@pytest.mark.parametrize("module", ["pyspark.daemon", "orbitmq.spark.workerdaemon"])
def test_a_worker_puts_its_modules_aside_once(calls, monkeypatch, module):
    daemon = SimpleNamespace(__spec__=SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", daemon)

    freeze_modules()
    freeze_modules()

    assert calls == ["collect", "freeze"]


def test_nobody_elses_process_is_touched(calls):
    freeze_modules()

    assert calls == []


#: Decodes few messages and many, and one without properties.
_DECODES = """
import sys
from orbitmq.message.arrow import BadBody, messages_to_arrow
from tests.support.message import plain_message, plain_pull
for pull in (plain_pull(5), plain_pull(500), plain_message(1, properties=b"").encode()):
    messages_to_arrow(pull, broker_name="b", bad_body=BadBody.NULL)
print("pandas" in sys.modules)
"""


def test_decoding_does_not_import_pandas():
    # Arrow does at the least occasion, and each worker of Spark would pay for it.
    found = subprocess.run(
        [sys.executable, "-c", _DECODES], capture_output=True, text=True, timeout=60, check=True
    )

    assert found.stdout.strip() == "False"
