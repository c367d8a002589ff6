"""How many queue files stay open, and how many files a server may open."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from orbitmq.store.files import queue_files_to_keep

#: What a server does at its start, in a process whose limit is low.
_START = """
import resource
from orbitmq.store.files import queue_files_to_keep, raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, min(hard, 3000)))
before = queue_files_to_keep()
raise_descriptor_limit()
raise_descriptor_limit()
print(before, queue_files_to_keep(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(64, 256), (1024, 256), (4096, 1024), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)],
)
def test_a_quarter_of_the_files_is_for_queues(monkeypatch, limit, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))

    assert queue_files_to_keep() == kept


def test_a_server_allows_itself_what_the_system_allows_it():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = 3000 if hard == resource.RLIM_INFINITY else min(hard, 3000)

    done = subprocess.run(
        [sys.executable, "-c", _START], capture_output=True, check=True, text=True, timeout=60
    )

    assert done.stdout.split() == ["256", f"{max(256, highest // 4)}", f"{highest}", f"{highest}"]
