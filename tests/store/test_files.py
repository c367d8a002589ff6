"""Disk space, files and descriptors are taken ahead of the writing, and never in its way."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orbitmq.store.files import Preallocation, Worker, queue_files_to_keep
from tests.support.store import QuickFiles, bodies, put


class RecordingFiles(QuickFiles):
    """Remembers which ranges were taken, by which thread."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.made_by: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def allocate(self, fd: int, at: int, size: int) -> None:
        assert self.gate.wait(30)
        self.taken.append((at, size))

    def open(self, path: Path, *, create: bool = False) -> int:
        if create and path.parent.name == "commitlog":
            self.made_by.append(threading.current_thread().name)
        return super().open(path, create=create)


def test_space_is_taken_in_steps_ahead_of_the_writing(tmp_path):
    files = RecordingFiles()
    space = Preallocation(0, 10_000, 1000, files, Worker("unused"))

    for position in range(0, 9000, 100):
        space.before_write(position + 100)
        space.after_write(position + 100)

    # Without gaps, from half a step ahead of the first write to the end of the file.
    assert files.taken[0] == (600, 1000)
    for (at, size), (following, _) in zip(files.taken, files.taken[1:], strict=False):
        assert at + size == following
    last_at, last_size = files.taken[-1]
    assert last_at + last_size >= 9500


def test_a_write_waits_for_the_range_that_is_being_taken_and_for_no_other():
    files = RecordingFiles()
    worker = Worker("test-worker")
    worker.start()
    space = Preallocation(0, 10_000, 1000, files, worker)
    files.gate.clear()
    space.after_write(100)  # takes 600 to 1600, and hangs

    space.before_write(600)  # not in its way

    entered = threading.Event()

    def write_into_it():
        space.before_write(601)
        entered.set()

    writer = threading.Thread(target=write_into_it)
    writer.start()
    assert not entered.is_set()
    files.gate.set()
    assert entered.wait(30)
    writer.join()
    worker.stop()


def test_the_next_file_is_made_by_the_worker(open_store):
    files = RecordingFiles()
    store = open_store(files=files, background=True)
    for _ in range(200):
        put(store, "T", 0, bytes(200))
        store.write()

    assert store.statistics().log_files > 4
    assert files.made_by[0] == "MainThread"
    assert set(files.made_by[1:]) == {"orbitmq-file-maker"}
    assert len(bodies(store, "T", 0)) == 200
    store.close()
    # A file that was made in advance and not needed is not left behind.
    last = max((store.root / "commitlog").iterdir())
    assert last.read_bytes().strip(b"\0")


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
