"""`orbitmq broker` with a disk and a clock that fail on command.

`python -m tools.chaos.faultybroker FOLDER broker --data ...` runs the real command. The broker gets
a file layer and a clock that look into FOLDER: a file named after a fault switches it on, and
removing the file switches it off. What fails is what a test could not make fail without being root,
or without a second disk: `fdatasync`, a write to a disk that is full or read-only, the machine's
date.

`ORBITMQ_CHAOS_RATE` makes the broker's steady clock run faster, so that a lock of 60 s lapses in a
few; members are given times in the same proportion.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orbitmq.cli.servers
from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.main import main
from orbitmq.store.files import DiskFiles
from tools.chaos.fates import die_with_parent, tell_where_when_asked

RATE = "ORBITMQ_CHAOS_RATE"
SYNC_FAILS = "sync-fails"
DISK_FULL = "disk-full"
READ_ONLY = "read-only"
FORGETS = "forgets"  #: writes are confirmed and not made: shows that the checker is awake
CLOCK = "clock"  #: holds the seconds by which the date is wrong
OPENED = "opened"  #: holds the seconds that the broker took from having its settings to listening


class Switches:
    """The faults that are on."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def is_on(self, fault: str) -> bool:
        # A stat is a microsecond: cheap beside the write that it decides about.
        return os.path.exists(f"{self._folder}/{fault}")  # noqa: PTH110

    def numbers(self, fault: str) -> Callable[[], float]:
        """What says how large a fault is now; needs no new file handle for that."""
        file = os.open(f"{self._folder}/{fault}", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return lambda: float(os.pread(file, 64, 0) or b"0")

    def check_writable(self) -> None:
        if self.is_on(DISK_FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.is_on(READ_ONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def check_syncable(self) -> None:
        if self.is_on(SYNC_FAILS):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class FailingFiles(DiskFiles):
    """The disk of the store."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def open(self, path: Path, *, create: bool = False) -> int:
        if create and not path.exists():
            self._switches.check_writable()
        return super().open(path, create=create)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        self._switches.check_writable()
        if self._switches.is_on(FORGETS):
            return len(data)
        return super().pwrite(fd, data, at)

    def allocate(self, fd: int, at: int, size: int) -> None:
        self._switches.check_writable()
        super().allocate(fd, at, size)

    def sync(self, fd: int) -> None:
        self._switches.check_syncable()
        super().sync(fd)


class FailingConfigDisk(FailingFiles, DiskFiles):
    """The disk of the configuration."""


class JumpingClock:
    """A date that can be set while the broker runs, and a steady clock that may run fast."""

    def __init__(self, switches: Switches, rate: float) -> None:
        self._wrong_by = switches.numbers(CLOCK)
        self._rate = rate
        self._began = time.monotonic()

    def now(self) -> float:
        return time.time() + self._wrong_by()

    def monotonic(self) -> float:
        return self._began + (time.monotonic() - self._began) * self._rate


class FaultyBroker(Broker):
    """A broker on a failing disk, which says how long it took to start."""

    def __init__(self, settings: BrokerSettings, *, folder: Path) -> None:
        switches = Switches(folder)
        self._opened = folder / OPENED
        super().__init__(
            settings,
            clock=JumpingClock(switches, float(os.environ.get(RATE, "1"))),
            files=FailingFiles(switches),
            disk=FailingConfigDisk(switches),
        )

    async def start(self) -> None:
        began = time.monotonic()
        await super().start()
        self._opened.write_text(str(time.monotonic() - began))


def run(folder: Path) -> None:
    """Run the command whose words follow, with faults in its broker."""
    broker = partial(FaultyBroker, folder=folder)
    # The seam of this program: the command makes its broker with this.
    setattr(orbitmq.cli.servers, "Broker", broker)  # noqa: B010
    main()


if __name__ == "__main__":
    die_with_parent()
    tell_where_when_asked()
    faults = Path(sys.argv.pop(1))
    run(faults)
