"""Makes the recordings in ``tests/data/recordings`` anew: ``python -m tests.interop.record``.

For every version and header serialisation, Apache's own name server, broker and client run
through the recording proxy, one scenario after the other; the frames of each direction become
one file. A further run per version takes the bytes of stored messages out of the commit log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.interop.apache import VERSIONS, Broker, Driver, NameServer, Release, free_port
from tests.support.recording_proxy import Recording, RecordingProxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CPP_DRIVER = Path(__file__).resolve().parent / "cpp_driver.py"
FOLDER = Path(__file__).resolve().parents[1] / "data" / "recordings"

#: The broker listens on the first; clients find the second in routes, where the proxy listens.
SERVED, ADVERTISED = "127.0.0.1", "127.0.0.2"

HEADERS: Mapping[str, tuple[str, ...]] = {
    "json": (),
    "binary": ("-Drocketmq.serialize.type=ROCKETMQ",),
}

Step = tuple[str, dict[str, Any]]

#: The configuration names paths of the machine; the other two repeat what their neighbours show.
UNRECORDED = "broker-config,all-topic-configs,all-groups"

#: Name of the recording, then what the client driver does for it. Later scenarios read what
#: earlier ones sent.
SCENARIOS: tuple[tuple[str, tuple[Step, ...]], ...] = (
    ("topic", (("topic", {"topics": "Orders,Batches,Delays,Payments,Sagas", "queues": 2}),)),
    (
        "send",
        (
            ("send", {"topic": "Orders", "count": 2, "tag": "red,blue", "keys": "order-"}),
            ("send", {"topic": "Orders", "count": 1, "property": "colour:blau é,size:7"}),
            ("send", {"topic": "Orders", "size": 900, "compress-above": 400}),
            ("send", {"topic": "Orders", "oneway": 1, "keys": "oneway-"}),
        ),
    ),
    (
        "batch",
        (("send", {"topic": "Batches", "count": 4, "batch": 4, "tag": "red,blue", "keys": "b"}),),
    ),
    ("delay", (("send", {"topic": "Delays", "count": 1, "delay": 1}),)),
    ("consume", (("consume", {"topic": "Orders", "group": "billing", "count": 5}),)),
    (
        "tags",
        (("consume", {"topic": "Orders", "group": "tags", "count": 1, "expression": "red || x"}),),
    ),
    (
        "sql",
        (
            (
                "consume",
                {"topic": "Orders", "group": "sql", "count": 1, "sql": "size > 5 AND number = '0'"},
            ),
        ),
    ),
    (
        "retry",
        (
            ("send", {"topic": "Payments", "count": 1, "tag": "red", "keys": "p"}),
            ("consume", {"topic": "Payments", "group": "retry", "fail": 1, "retry-level": 1}),
        ),
    ),
    ("orderly", (("consume", {"topic": "Batches", "group": "orderly", "count": 4, "orderly": 1}),)),
    ("pull", (("pull", {"topics": "Batches"}),)),
    ("offsets", (("offsets", {"topic": "Batches", "group": "progress"}),)),
    ("query", (("query-key", {"topic": "Orders", "keys": "order-0,order-9"}),)),
    ("transaction", (("transaction", {"topic": "Sagas", "count": 3}),)),
    ("admin", (("admin", {"topic": "Orders", "group": "admins", "except": UNRECORDED}),)),
)

#: What differs in nothing but the header from its JSON twin is not recorded again.
JSON_ONLY = frozenset({"tags", "sql", "delay"})

#: Kinds of stored messages, and how each comes into the log. A list of Java options goes along.
RECORDS: tuple[tuple[str, tuple[str, ...], tuple[Step, ...]], ...] = (
    (
        "single",
        (),
        (
            ("send", {"topic": "Orders", "count": 3, "tag": "red,blue", "keys": "k"}),
            ("send", {"topic": "Orders", "count": 2, "property": "colour:blau é,size:7"}),
        ),
    ),
    (
        "batch",
        (),
        (("send", {"topic": "Orders", "count": 5, "batch": 5, "tag": "red", "keys": "b"}),),
    ),
    *(
        (
            f"compressed-{name.lower()}",
            (f"-Drocketmq.message.compressType={name}",),
            (("send", {"topic": "Orders", "count": 2, "size": 2000, "compress-above": 400}),),
        )
        for name in ("ZLIB", "LZ4", "ZSTD")
    ),
    ("transaction", (), (("transaction", {"topic": "Sagas", "count": 3}),)),
    (
        "retry",
        (),
        (
            ("send", {"topic": "Payments", "count": 1, "tag": "red", "keys": "p"}),
            (
                "consume",
                {"topic": "Payments", "group": "retry", "count": 1, "fail": 1, "retry-level": 1},
            ),
        ),
    ),
    # Last, so that no other kind gets these when they are due.
    ("delay", (), (("send", {"topic": "Orders", "count": 2, "delay": 18, "tag": "late"}),)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--cpp", help="an interpreter with rocketmq==0.4.4; records that alone")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.cpp:
        with tempfile.TemporaryDirectory() as scratch:
            record_cpp(Release.obtain(VERSIONS[0]), arguments.cpp, Path(scratch))
        return
    for version in arguments.versions:
        release = Release.obtain(version)
        for name in HEADERS:
            with tempfile.TemporaryDirectory() as scratch:
                record_frames(release, name, Path(scratch))
        with tempfile.TemporaryDirectory() as scratch:
            record_messages(release, Path(scratch) / "ipv4", SERVED)
            record_messages(release, Path(scratch) / "ipv6", "::1", kinds=("single", "batch"))


def record_frames(release: Release, headers: str, scratch: Path) -> None:
    options = HEADERS[headers]
    with _recorded_cluster(release, scratch, options) as (driver, recording, registration):
        for name, steps in SCENARIOS:
            if headers != "json" and name in JSON_ONLY:
                continue
            for command, settings in steps:
                driver.run(command, settings)
            _write(f"{release.version}-{name}-{headers}", recording)
        _write(f"{release.version}-register-{headers}", registration, limit=3)


def record_cpp(release: Release, interpreter: str, scratch: Path) -> None:
    with _recorded_cluster(release, scratch, ()) as (driver, recording, _):
        driver.run("topic", {"topics": "Cpp", "queues": 2})
        recording.take()
        for command in ("send", "consume"):
            subprocess.run(
                [interpreter, str(CPP_DRIVER), driver.name_server, command],
                check=True,
                timeout=120,
                env={**os.environ, "HOME": str(scratch)},
            )
            _write(f"cpp044-{command}-json", recording)


@contextlib.contextmanager
def _recorded_cluster(
    release: Release, scratch: Path, options: tuple[str, ...]
) -> Iterator[tuple[Driver, Recording, Recording]]:
    """A client of a new cluster, what passes between them, and how the broker registers."""
    with contextlib.ExitStack() as running:
        names = running.enter_context(
            NameServer.running(release, scratch / "names", options=options)
        )
        registration = running.enter_context(_proxy(SERVED, 0, names.address))
        questions = running.enter_context(_proxy(SERVED, 0, names.address))
        port = free_port(neighbours=(-2, 1), also_on=(ADVERTISED,))
        broker = running.enter_context(
            Broker.running(
                release,
                scratch / "broker",
                names.address,
                advertise=ADVERTISED,
                port=port,
                options=options,
                settings={
                    "namesrvAddr": _address(registration),
                    # Relative, because the broker tells its paths to whoever asks.
                    "storePathRootDir": "store",
                    "storePathCommitLog": "store/commitlog",
                },
            )
        )
        running.enter_context(_proxy(ADVERTISED, port, f"{SERVED}:{port}", questions.recording))
        driver = Driver(release, scratch / "client", _address(questions), broker.address, options)
        yield driver, questions.recording, registration.recording


def record_messages(
    release: Release, scratch: Path, address: str, kinds: tuple[str, ...] = ()
) -> None:
    version6 = ":" in address
    suffix = "-ipv6" if version6 else ""
    stack = ("-Djava.net.preferIPv4Stack=false",) if version6 else ()
    with contextlib.ExitStack() as running:
        names = running.enter_context(NameServer.running(release, scratch / "names"))
        broker = running.enter_context(
            Broker.running(release, scratch / "broker", names.address, listen=address)
        )
        log = broker.store / "commitlog" / f"{0:020d}"
        driver = Driver(release, scratch / "client", names.address, broker.address, stack)
        driver.run("topic", {"topics": "Orders,Payments,Sagas", "queues": 2})
        for kind, options, steps in RECORDS:
            if kinds and kind not in kinds:
                continue
            before = len(b"".join(stored_messages(log)))
            for command, settings in steps:
                driver.run(command, settings, options=options)
            fresh = b"".join(stored_messages(log))[before:]
            path = FOLDER / f"{release.version}-{kind}{suffix}.records"
            path.write_bytes(fresh)
            print(f"{path.name}: {len(fresh)} bytes")


def stored_messages(log: Path) -> Iterator[bytes]:
    """The messages of one commit-log file, up to its end or its blank rest."""
    if not log.exists():
        return
    data = log.read_bytes()
    at = 0
    while (size := int.from_bytes(data[at : at + 4], "big")) and data[at + 4 : at + 8] != BLANK:
        yield data[at : at + size]
        at += size


#: The magic code of the filler at the end of a file.
BLANK = (0xCBD43194).to_bytes(4, "big")


@contextlib.contextmanager
def _proxy(
    host: str, port: int, server: str, recording: Recording | None = None
) -> Iterator[RecordingProxy]:
    far_host, far_port = server.rsplit(":", 1)
    with RecordingProxy.running((host, port), (far_host, int(far_port)), recording) as proxy:
        yield proxy


def _address(proxy: RecordingProxy) -> str:
    return f"{proxy.listen[0]}:{proxy.listen[1]}"


def _write(name: str, recording: Recording, limit: int | None = None) -> None:
    for way, frames in zip(("to-server", "to-client"), recording.take(), strict=True):
        kept = distinct(frames)[:limit]
        path = FOLDER / f"{name}-{way}.frames"
        path.write_bytes(b"".join(kept))
        print(f"{path.name}: {len(kept)} of {len(frames)} frames, {path.stat().st_size} bytes")


def distinct(frames: list[bytes]) -> list[bytes]:
    """The frames without those that repeat an earlier one under a new `opaque`."""
    first: dict[bytes, bytes] = {}
    for frame in frames:
        first.setdefault(_without_opaque(frame), frame)
    return list(first.values())


def _without_opaque(frame: bytes) -> bytes:
    if frame[4] == 0:
        return re.sub(rb'"opaque":\d+', b"", frame[8:], count=1)
    return frame[4:13] + frame[17:]  # after the two lengths: code 2, language 1, version 2


if __name__ == "__main__":
    main()
