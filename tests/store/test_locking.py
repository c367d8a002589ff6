"""One owner per folder, several stores per process."""

from __future__ import annotations

import subprocess
import sys
from errno import EIO, ENOSPC, EROFS
from typing import TYPE_CHECKING

import pytest

from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreError, StoreLocked
from orbitmq.store.store import Store
from tests.support.store import SMALL, FailingFiles

if TYPE_CHECKING:
    from pathlib import Path


OPEN_AND_WAIT = """
import sys
from orbitmq.store.files import DiskFiles
from orbitmq.store.store import Store
store = Store(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_the_same_process_cannot_open_a_folder_twice(open_store, tmp_path):
    open_store()
    (tmp_path / "alias").symlink_to(tmp_path / "store")

    with pytest.raises(StoreLocked, match=str(tmp_path / "alias")):
        open_store(root=tmp_path / "alias")


def test_another_process_cannot_open_it_either_and_is_told_who_has_it(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"

        with pytest.raises(StoreLocked) as refused:
            Store(tmp_path / "store", SMALL)

        holder.kill()
    assert refused.value.pid == holder.pid
    # The lock of a dead process is free, and its store is repaired.
    store = Store(tmp_path / "store")
    assert not store.recovery.was_clean
    store.close()


def test_a_folder_that_cannot_be_made_is_refused_clearly(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "file" / "store")


def test_a_full_disk_does_not_keep_a_store_locked(open_store):
    disk = FailingFiles()
    disk.fail("pwrite", ENOSPC)

    for _ in range(2):
        store = open_store(files=disk)
        assert "make room" in store.statistics().refusal
        store.close()
    disk.fail("pwrite", EIO)
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be"):
            open_store(files=disk)
    disk.heal()

    open_store().close()


def test_a_disk_that_is_mounted_read_only_is_called_that(tmp_path):
    class ReadOnly(DiskFiles):
        def open(self, path: Path, *, create: bool = False) -> int:
            raise OSError(EROFS, "Read-only file system", str(path))

    with pytest.raises(StoreError, match=r"mounted read-only.*open a copy") as refused:
        Store(tmp_path / "store", files=ReadOnly())

    assert str(tmp_path / "store") in str(refused.value)
