"""R19: disks that are full, read-only or lie, and too few file handles."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.faultybroker import DISK_FULL, READ_ONLY, SYNC_FAILS
from tools.chaos.figures import Figure, at_least, at_most, judged, none_of, tried
from tools.chaos.history import Acked, Event, Invoked, Refused, Unknown, now
from tools.chaos.programs import Broker, Program, Stage, pass_time, wait_until

_GROUP = "pullers"
_KINDS = "kinds of trouble"
_MIB = 1024 * 1024
_SMALL = (
    "broker.store.file_size=4194304",
    "broker.store.preallocate_step=1048576",
    "broker.store.queue_file_entries=20000",
    "broker.store.index_file.slots=1000",
    "broker.store.index_file.entries=20000",
    # Of a small disk a few megabytes are much.
    "broker.store.retention.full_ratio=1",
    "broker.store.retention.forced_ratio=1",
    "broker.store.retention.expired_ratio=1",
)


#: So that the log needs a new file, and a handle for it, every few moments.
_TINY = ("broker.store.file_size=32768", "broker.store.preallocate_step=32768")


def disk_full(stage: Stage, effort: Effort) -> list[Figure]:
    """The log's disk says that it is full, for a while."""
    return _switched(stage, effort, "disk full", DISK_FULL)


def disk_read_only(stage: Stage, effort: Effort) -> list[Figure]:
    """The log's disk can only be read, for a while."""
    return _switched(stage, effort, "read-only disk", READ_ONLY)


def _switched(stage: Stage, effort: Effort, what: str, fault: str) -> list[Figure]:
    broker = stage.broker("broker-a", "broker.store.flush.policy=sync", *_SMALL)
    broker.start()
    return _trouble(
        stage,
        effort,
        what,
        lambda: broker.switch(fault, on=True),
        lambda: broker.switch(fault, on=False),
    )


def tiny_disk(stage: Stage, effort: Effort) -> list[Figure]:
    """A file system of 64 MiB, made for the broker alone, is really full."""
    mount = stage.folder / "disk"
    mount.mkdir()
    prefix = private_mount(f"mount -t tmpfs -o size=64m tmpfs '{mount}'")
    if prefix is None:
        value = "left out: no file system can be mounted here"
        return [Figure("R19", "really full disk", value, "tried", is_kept=False)]
    broker = stage.broker(
        "broker-a",
        "broker.store.flush.policy=sync",
        *_SMALL,
        prefix=prefix,
        folder=mount / "broker-a",
    )
    broker.start()
    seen = Path(f"/proc/{broker.running.pid}/root") / str(mount).lstrip("/")
    ballast = seen / "ballast"

    def fill() -> None:
        stage.tell("disk full", broker.name, is_over=False)
        with ballast.open("wb") as file:
            try:
                while True:
                    file.write(bytes(_MIB))
                    file.flush()
            except OSError:
                return

    def free() -> None:
        ballast.unlink()
        stage.tell("disk full", broker.name, is_over=True)

    return _trouble(stage, effort, "really full disk (tmpfs)", fill, free, fills_up=True)


def _trouble(
    stage: Stage,
    effort: Effort,
    what: str,
    begin: Callable[[], None],
    end: Callable[[], None],
    *,
    fills_up: bool = False,
) -> list[Figure]:
    """Writes are refused while it lasts and go on afterwards; reads go on all the time."""
    create_topic(stage, queues=4)
    producers = _producers(stage, size=4000 if fills_up else 300)
    reader = stage.worker("pull", "puller", group=_GROUP)
    reader.until_written('"ready"')
    pass_time(max(1.0, effort.seconds / 5))
    begun = now()
    begin()
    wait_until(lambda: _count(stage, Refused, begun) >= 20, "sends are refused")
    pass_time(max(1.0, effort.seconds / 5))
    during = audit(stage, group="audit-during")
    acked_before = _count(stage, Acked, 0.0, begun)
    # What is refused is told at once, and not with the end of a wait.
    unknown = _count(stage, Unknown, begun)
    ended = now()
    end()
    again = wait_until(lambda: _count(stage, Acked, ended) >= 20, "sends are taken again")
    finish(producers)
    took = drain(stage, (_GROUP,))
    finish([reader])
    audit(stage)
    analysis = analyse(stage.events(), groups=(_GROUP, "audit"), contiguous=(_GROUP,))
    return [
        tried("R19", _KINDS, 1),
        at_least("R19", f"{what}: refused with a code", analysis.refused, 20),
        at_most("R19", f"{what}: without an answer", unknown, 0),
        at_least("R19", f"{what}: read meanwhile", during, acked_before),
        at_most("R19", f"{what}: taken again after", again, 5, "s"),
        at_most("R19", f"{what}: drained after", took, 30, "s"),
        *judged("R19", analysis),
        # Of a disk that fails, the broker's log tells with the place where it noticed.
        none_of("R19", "other complaints in logs", stage.complaints(but="Errno")),
    ]


def failing_sync(stage: Stage, effort: Effort) -> list[Figure]:
    """`fdatasync` fails: nothing that waited is acknowledged, nor what follows until a restart."""
    broker = stage.broker("broker-a", "broker.store.flush.policy=sync", *_SMALL)
    broker.start()
    create_topic(stage, queues=4)
    producers = _producers(stage)
    reader = stage.worker("pull", "puller", group=_GROUP)
    reader.until_written('"ready"')
    pass_time(max(1.0, effort.seconds / 5))
    broker.switch(SYNC_FAILS, on=True)
    begun = now()
    wait_until(lambda: _failures(stage, begun) >= 20, "sends fail")
    broker.switch(SYNC_FAILS, on=False)
    # The disk works again; what it holds is not known, and nothing is taken.
    pass_time(max(1.0, effort.seconds / 5))
    restart = now()
    after = _acknowledged(stage.events(), begun, restart)
    during = audit(stage, group="audit-during")
    broker.kill()
    broker.restart()
    back = now()
    wait_until(lambda: _count(stage, Acked, back) >= 20, "sends are taken again")
    finish(producers)
    took = drain(stage, (_GROUP,))
    finish([reader])
    audit(stage)
    # A send that failed because of the disk may be found after the restart: nobody was told yes.
    events = [
        Unknown(event.at, event.value, event.reason) if isinstance(event, Refused) else event
        for event in stage.events()
    ]
    analysis = analyse(events, groups=(_GROUP, "audit"), contiguous=(_GROUP,))
    return [
        tried("R19", _KINDS, 1),
        at_most("R19", "failing fdatasync: acknowledged after the failure", after, 0),
        at_least("R19", "failing fdatasync: read meanwhile", during, 1),
        at_most("R19", "failing fdatasync: drained after", took, 30, "s"),
        *judged("R19", analysis),
        # Of a disk that fails, the broker's log tells with the place where it noticed.
        none_of("R19", "other complaints in logs", stage.complaints(but="Errno")),
    ]


def few_handles(stage: Stage, effort: Effort) -> list[Figure]:
    """A broker that may open few files is asked for more connections than it can have."""
    broker = stage.broker(
        "broker-a", *_SMALL, *_TINY, prefix=("sh", "-c", 'ulimit -n 80; exec "$@"', "sh")
    )
    broker.start()
    create_topic(stage, queues=4)
    producers = _producers(stage)
    reader = stage.worker("pull", "puller", group=_GROUP)
    reader.until_written('"ready"')
    pass_time(1.0)
    crowd = _connect(broker, 120)
    begun, files = now(), broker.log_files()
    pass_time(max(1.0, effort.seconds / 5))
    # Files of the log are begun only when somebody sends.
    rolled = broker.log_files() - files
    for connection in crowd:
        connection.close()
    freed = now()
    wait_until(lambda: _count(stage, Acked, freed) >= 20, "sends are taken again")
    finish(producers)
    took = drain(stage, (_GROUP,))
    finish([reader])
    audit(stage)
    analysis = analyse(stage.events(), groups=(_GROUP, "audit"), contiguous=(_GROUP,))
    return [
        tried("R19", _KINDS, 1),
        at_least("R19", "file handles: connections beyond the limit", len(crowd), 81),
        at_least(
            "R19", "file handles: acknowledged meanwhile", _count(stage, Acked, begun, freed), 20
        ),
        at_least("R19", "file handles: files of the log begun meanwhile", rolled, 1),
        at_most("R19", "file handles: drained after", took, 30, "s"),
        *judged("R19", analysis),
        # Of a disk that fails, the broker's log tells with the place where it noticed.
        none_of("R19", "other complaints in logs", stage.complaints(but="Errno")),
    ]


def private_mount(command: str) -> tuple[str, ...] | None:
    """Words before a program's that give it a mount of its own, if this machine allows it."""
    if shutil.which("unshare") is None:
        return None
    words = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    tried = subprocess.run(
        [*words, f"{command} && true"], capture_output=True, check=False, timeout=30
    )
    if tried.returncode != 0:
        return None
    return (*words, f'{command} && exec "$@"', "sh")


def _producers(stage: Stage, size: int = 300) -> list[Program]:
    """Without retries, so that a refusal is certain."""
    producers = [
        stage.worker("produce", f"p{number}", rate=150, size=size, retries=0, timeout=5.0)
        for number in range(2)
    ]
    for producer in producers:
        producer.until_written('"ready"')
    return producers


def _count(stage: Stage, kind: type[Event], since: float, until: float = float("inf")) -> int:
    return sum(isinstance(event, kind) and since <= event.at < until for event in stage.events())


def _failures(stage: Stage, since: float) -> int:
    return _count(stage, Refused, since) + _count(stage, Unknown, since)


def _acknowledged(events: list[Event], since: float, until: float) -> int:
    """The sends that began at `since` or later and were acknowledged before `until`.

    An answer to an earlier send may be recorded late by a busy producer.
    """
    begun = {event.value for event in events if isinstance(event, Invoked) and event.at >= since}
    return sum(
        isinstance(event, Acked) and event.value in begun and event.at < until for event in events
    )


def _connect(broker: Broker, count: int) -> list[socket.socket]:
    found = []
    for _ in range(count):
        try:
            found.append(socket.create_connection(("127.0.0.1", broker.port), timeout=5))
        except OSError:
            break
    return found
