"""Apache RocketMQ itself, from Maven Central, as child processes on loopback.

A `Release` is one version's jars plus our two Java sources compiled against them; it is fetched
once into ``build/interop/<version>/``. From it come a `NameServer`, a `Broker` and runs of the
client driver (``java/Client.java``). Everything a process writes stays below the folder it is
given, and its output is kept in a log that failures show.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.maven import Tell, Unavailable, fetch_jars, make_whole, tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "interop"
SOURCES = Path(__file__).resolve().parent / "java"

#: The newest of each line whose jars Maven Central gave us whole. Of 4.9.8 the name server, broker
#: and filter jars could not be had from there; its store and remoting sources equal those of 4.9.7.
VERSIONS = ("4.9.7", "5.5.0")

COMPILE_DEADLINE = 300.0
START_DEADLINE = 90.0
STOP_DEADLINE = 60.0
DRIVER_DEADLINE = 120.0

#: Where ports are looked for. From 32,768 on (elsewhere 49,152) systems give them to whoever wants
#: any, and may have done so when a Java process gets to it, some seconds later.
PORTS = range(20_000, 32_000)

#: The old line unmaps its files through internals that newer Java closes off.
JAVA_OPTIONS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
)

#: Without it the client puts an interface's IPv6 address into message ids, where there is one.
IPV4 = "-Djava.net.preferIPv4Stack=true"

#: Small files, so that a few messages roll them; the defaults reserve gigabytes.
BROKER_SETTINGS: Mapping[str, object] = {
    "brokerClusterName": "DefaultCluster",
    "brokerName": "broker-a",
    "brokerId": 0,
    "autoCreateTopicEnable": "true",
    "enablePropertyFilter": "true",
    "mappedFileSizeCommitLog": 4 * 1024 * 1024,
    "mappedFileSizeConsumeQueue": 20 * 2000,
    "maxHashSlotNum": 2000,
    "maxIndexNum": 8000,
    "flushDiskType": "ASYNC_FLUSH",
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 2000,
    # 5.x collects the marks of finished transactions this long (3 s unless told) before it writes
    # them; a check that comes earlier finds the half message open and commits it once more.
    "transactionOpBatchInterval": 100,
    # Until this long after its start (10 s unless told) a thread of 5.x that would write the counts
    # of transactions looks at the clock without a pause, and takes a whole core.
    "transactionMetricFlushInterval": 1000,
    "messageDelayLevel": "1s 2s 3s 4s 5s 6s 7s 8s 9s 10s 11s 12s 13s 14s 15s 16s 17s 18s",
    "useEpollNativeSelector": "false",
}


class DriverFailed(Exception):
    """The client driver, or a server, did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Release:
    """One version of Apache RocketMQ, ready to run."""

    version: str
    jars: Path
    classes: Path

    @classmethod
    def obtain(cls, version: str) -> Self:
        """Fetches and compiles what is not there yet; raises `Unavailable` with the reason."""
        tool("java")
        home = CACHE / version
        jars = jars_of(version)
        fetch(version)
        sources = sorted(SOURCES.glob("*.java"))
        text = b"".join(path.read_bytes() for path in sources)
        classes = home / f"classes-{hashlib.sha256(text).hexdigest()[:16]}"
        if not classes.exists():
            make_whole(classes, lambda folder: _compile(jars, sources, folder))
        return cls(version, jars, classes)

    @property
    def is_old_line(self) -> bool:
        return self.version.startswith("4.")

    def command(
        self, main: str, home: Path, *arguments: str, options: tuple[str, ...] = ()
    ) -> list[str]:
        """The command line that runs a main class with everything it writes below `home`."""
        return [
            tool("java"),
            *JAVA_OPTIONS,
            f"-Duser.home={home}",
            f"-Drmq.logback.configurationFile={home / 'conf' / 'logback.xml'}",
            *options,
            "-cp",
            os.pathsep.join((str(self.classes), str(self.jars / "*"))),
            main,
            *arguments,
        ]


@dataclass(frozen=True, slots=True)
class Driver:
    """Apache's client, one process per command, against a name server."""

    release: Release
    home: Path
    name_server: str
    broker: str
    options: tuple[str, ...] = ()

    def run(
        self,
        command: str,
        settings: Mapping[str, object],
        *,
        options: tuple[str, ...] = (),
        deadline: float = DRIVER_DEADLINE,
    ) -> list[dict[str, Any]]:
        """Runs one command of ``java/Client.java`` to its end and returns what it printed."""
        self.home.mkdir(parents=True, exist_ok=True)
        _write_logging(self.home)
        given = {"namesrv": self.name_server, "broker": self.broker, **settings}
        line = self.release.command(
            "Client",
            self.home,
            command,
            *(f"{name}={value}" for name, value in given.items()),
            options=(IPV4, "-Xmx256m", *self.options, *options),
        )
        what = f"{command} {dict(settings)}"
        print(f"client {self.release.version}: {what}", flush=True)
        try:
            done = subprocess.run(
                line, cwd=self.home, capture_output=True, text=True, timeout=deadline, check=False
            )
        except subprocess.TimeoutExpired as late:
            raise DriverFailed(f"{what} took over {deadline} s\n{late.stderr!r}") from late
        if done.returncode != 0:
            raise DriverFailed(
                f"{what} ended with {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
            )
        return [json.loads(each) for each in done.stdout.splitlines()]


@dataclass(slots=True)
class Server:
    """A running server of a `Release`: started on construction by `start`, ended by `stop`."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    launched: bool = False
    decided: threading.Event = field(default_factory=threading.Event)
    reader: threading.Thread | None = None

    @classmethod
    def start(cls, role: str, line: list[str], home: Path, environment: Mapping[str, str]) -> Self:
        print(f"starting the {role}", flush=True)
        process = subprocess.Popen(
            line,
            cwd=home,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        server = cls(role, process, home / f"{role}.log")
        server.reader = threading.Thread(target=server.keep_output, name=f"{role} output")
        server.reader.start()
        if not server.decided.wait(START_DEADLINE) or not server.launched:
            server.kill()
            raise DriverFailed(f"{role} did not start\n{server.output()}")
        return server

    def keep_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output, self.log.open("a") as log:
            for line in output:
                log.write(line)
                log.flush()
                if line.startswith("launched "):
                    self.launched = True
                    self.decided.set()
        self.decided.set()

    def output(self, characters: int = 8000) -> str:
        """The end of what the server wrote."""
        return self.log.read_text(errors="replace")[-characters:]

    def stop(self) -> None:
        """Ends the server in the orderly way; a broker flushes and removes its abort marker."""
        if self.process.poll() is None:
            print(f"stopping the {self.name}", flush=True)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                self.kill()
                raise DriverFailed(f"{self.name} did not stop\n{self.output()}") from None
        self._join()

    def kill(self) -> None:
        """Ends the server at this instant, as a power failure would."""
        self.process.kill()
        self.process.wait(STOP_DEADLINE)
        self._join()

    def _join(self) -> None:
        if self.reader is not None:
            self.reader.join(STOP_DEADLINE)


@dataclass(frozen=True, slots=True)
class NameServer:
    """Apache's name server."""

    server: Server
    address: str

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, release: Release, home: Path, *, options: tuple[str, ...] = ()
    ) -> Iterator[NameServer]:
        home.mkdir(parents=True, exist_ok=True)
        port = free_port()
        config = _write_properties(
            home / "namesrv.conf",
            {"listenPort": port, "bindAddress": "127.0.0.1", "useEpollNativeSelector": "false"},
        )
        _write_logging(home)
        line = release.command(
            "Launcher", home, "namesrv", "127.0.0.1", str(config), options=("-Xmx256m", *options)
        )
        server = Server.start("namesrv", line, home, {"ROCKETMQ_HOME": str(home)})
        try:
            yield cls(server, f"127.0.0.1:{port}")
        finally:
            server.stop()


@dataclass(frozen=True, slots=True)
class Broker:
    """Apache's broker on a store folder."""

    server: Server
    address: str
    store: Path

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        release: Release,
        home: Path,
        name_server: str,
        *,
        store: Path | None = None,
        listen: str = "127.0.0.1",
        advertise: str | None = None,
        port: int | None = None,
        settings: Mapping[str, object] | None = None,
        options: tuple[str, ...] = (),
    ) -> Iterator[Broker]:
        """Listens on `listen` and names `advertise` (the same unless given) in routes."""
        home.mkdir(parents=True, exist_ok=True)
        store = store or home / "store"
        advertise = advertise or listen
        others = {listen, advertise} - {"127.0.0.1"}
        port = port or free_port(neighbours=(-2, 1), also_on=tuple(others))
        config = _write_properties(
            home / "broker.conf",
            {
                **BROKER_SETTINGS,
                "namesrvAddr": name_server,
                "listenPort": port,
                "bindAddress": listen,
                "brokerIP1": advertise,
                "brokerIP2": advertise,
                "storePathRootDir": store,
                "storePathCommitLog": store / "commitlog",
                **(settings or {}),
            },
        )
        _write_logging(home)
        line = release.command(
            "Launcher",
            home,
            "broker",
            listen,
            str(config),
            options=("-Xms512m", "-Xmx1g", *options),
        )
        server = Server.start("broker", line, home, {"ROCKETMQ_HOME": str(home)})
        try:
            _await_registration(name_server, f"{advertise}:{port}", server)
            yield cls(server, f"{advertise}:{port}", store)
        finally:
            server.stop()


def free_port(neighbours: tuple[int, ...] = (), also_on: tuple[str, ...] = ()) -> int:
    """A port that is free on loopback, with its neighbours (the fast and the replication port)."""
    for _ in range(50):
        port = secrets.choice(PORTS)
        wanted = [("127.0.0.1", port + by) for by in (0, *neighbours)]
        wanted += [(host, port) for host in also_on]
        with contextlib.ExitStack() as held:
            try:
                for host, each in wanted:
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    held.enter_context(socket.socket(family)).bind((host, each))
            except OSError:
                continue
            return port
    raise Unavailable("found no free port with free neighbours on loopback")


def _await_registration(name_server: str, broker: str, server: Server) -> None:
    """Returns when the name server knows the broker; 5.x registers some time after its start."""
    host, port = name_server.rsplit(":", 1)
    header = b'{"code":106,"language":"JAVA","version":409,"opaque":1,"flag":0}'
    question = struct.pack(">II", 4 + len(header), len(header)) + header
    pause = threading.Event()
    until = time.monotonic() + START_DEADLINE
    while time.monotonic() < until and server.process.poll() is None:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(question)
            with connection.makefile("rb") as answer:
                (length,) = struct.unpack(">I", answer.read(4))
                if broker.encode() in answer.read(length):
                    return
        pause.wait(0.1)
    raise DriverFailed(f"the broker did not register\n{server.output()}")


def jars_of(version: str) -> Path:
    """The folder of the jars of a version, which is there when all of them are."""
    return CACHE / version / "jars"


def fetch(version: str, tell: Tell | None = None) -> None:
    """Fetches the jars of a version if they are not there yet. Raises `Unavailable`."""
    jars = jars_of(version)
    if not jars.exists():
        modules = ("namesrv", "broker", "tools", "client")
        wanted = [f"org.apache.rocketmq:rocketmq-{each}:{version}" for each in modules]
        make_whole(jars, lambda folder: fetch_jars(folder, wanted, tell=tell))


def _compile(jars: Path, sources: list[Path], classes: Path) -> None:
    line = [tool("javac"), "-nowarn", "-d", str(classes), "-cp", str(jars / "*")]
    line += [str(path) for path in sources]
    done = subprocess.run(
        line, check=False, capture_output=True, text=True, timeout=COMPILE_DEADLINE
    )
    if done.returncode != 0:
        raise DriverFailed(f"the client driver does not compile\n{done.stderr}")


def _write_properties(path: Path, settings: Mapping[str, object]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path


def _write_logging(home: Path) -> None:
    """Logging to standard output; the old line insists on its own file names."""
    conf = home / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    text = (
        '<configuration><appender name="out" class="{appender}"><encoder>'
        "<pattern>%d %p %c{{0}} - %m%n</pattern></encoder></appender>"
        '<root level="WARN"><appender-ref ref="out"/></root></configuration>'
    )
    old = text.format(appender="ch.qos.logback.core.ConsoleAppender")
    (conf / "logback_broker.xml").write_text(old)
    (conf / "logback_namesrv.xml").write_text(old)
    new = text.format(appender="org.apache.rocketmq.logging.ch.qos.logback.core.ConsoleAppender")
    (conf / "logback.xml").write_text(new)
