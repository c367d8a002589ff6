"""The processes of the lines about clients: a cluster, and a client of each kind."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.load.asking import Failed
from benchmarks.load.clientwork import ClientOutcome, ClientWish
from benchmarks.load.processes import APACHE, APACHE_VERSION, Child
from benchmarks.peers import ROOT, NotFetched, Peer, Tell
from benchmarks.runner import NotAtHand

_JAVA_SOURCES = Path(__file__).parent / "java"
_COMPILE_DEADLINE = 120.0
#: As many threads of the compiler and the collector as a machine with two cores can use.
_JAVA_OPTIONS = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true")


class OurCluster(Child):
    """`orbitmq up`: a name server and a broker in one process."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            *("-m", "orbitmq.cli", "up", "--json", "--namesrv-port", "0", "--broker-port", "0"),
            *("--log-level", "error", "--data", str(root)),
        )
        told = {}
        while (line := json.loads(self.line()))["event"] != "ready":
            told[line["role"]] = line["address"]
        self.name_server: str = told["name server"]
        self.broker_port = int(told["broker"].rpartition(":")[2])

    def __exit__(self, *unused: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        super().__exit__(*unused)


class ClientProcess(Child):
    """A process with one of the clients, which does what it is asked line by line."""

    mark = b"@"

    def ask(self, wish: ClientWish) -> ClientOutcome:
        self.say(self.written(wish))
        # Some libraries write to standard output as well.
        while not (line := self.line()).startswith(self.mark):
            continue
        outcome: ClientOutcome = msgspec.json.decode(line[len(self.mark) :], type=ClientOutcome)
        if isinstance(outcome, Failed):
            raise ChildProcessError(f"the client failed: {outcome.reason}")
        return outcome

    def written(self, wish: ClientWish) -> bytes:
        return msgspec.json.encode(wish)


class OurClient(ClientProcess):
    """Ours."""

    mark = b""

    def __init__(self) -> None:
        super().__init__("-m", "benchmarks.load.ourclient")


class KafkaClient(ClientProcess):
    """One of the two for Kafka; see `kafkaclient`."""

    mark = b""

    def __init__(self, library: str, package: str) -> None:
        """Raises `NotAtHand` where the library is not installed."""
        if importlib.util.find_spec(library) is None:
            raise NotAtHand(f"{package} is not installed; run: make setup")
        super().__init__("-m", "benchmarks.load.kafkaclient", library.partition("_")[0])


def _fetch_cpp(_: Tell) -> None:
    # It lives with the tests that use it.
    from tests.support import clients  # noqa: PLC0415

    try:
        clients.obtain("rocketmq")
    except clients.Unobtainable as error:
        raise NotFetched(str(error)) from error


CPP = Peer(
    "the C++ client",
    "the package index",
    [ROOT / "build" / "clients" / "rocketmq-0.4.4"],
    _fetch_cpp,
)


class CppClient(ClientProcess):
    """The one from PyPI, which is C++ inside."""

    def __init__(self, home: Path) -> None:
        # It lives with the tests that use it.
        from tests.support import clients  # noqa: PLC0415

        CPP.check()
        try:
            package = clients.obtain("rocketmq")
        except clients.Unobtainable as error:
            raise NotAtHand(str(error)) from error
        environment = {
            "HOME": str(home),  # it logs and keeps progress there
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(package),
        }
        driver = str(Path(__file__).parent / "cppclient.py")
        super().__init__("-W", "ignore", driver, environment=environment, is_talkative=True)


class JavaClient(ClientProcess):
    """Apache's."""

    def __init__(self, home: Path) -> None:
        # It lives with the tests against Apache, and needs Java: not for everybody who measures.
        from tests.interop import apache  # noqa: PLC0415
        from tests.support.maven import Unavailable  # noqa: PLC0415

        APACHE.check()
        try:
            release = apache.Release.obtain(APACHE_VERSION)
            classes = _compiled(release.jars, apache.CACHE / APACHE_VERSION)
        except Unavailable as error:
            raise NotAtHand(str(error)) from error
        home.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join((str(classes), str(release.jars / "*")))
        super().__init__(
            *_JAVA_OPTIONS,
            f"-Duser.home={home}",
            *("-cp", path, "Load"),
            program="java",
            is_talkative=True,
        )

    def written(self, wish: ClientWish) -> bytes:
        values: Mapping[str, object] = msgspec.to_builtins(wish)
        return " ".join(f"{name}={value}" for name, value in values.items()).encode()


def _compiled(jars: Path, home: Path) -> Path:
    """The folder of our classes for these jars, compiled once."""
    sources = sorted(_JAVA_SOURCES.glob("*.java"))
    text = b"".join(path.read_bytes() for path in sources)
    classes = home / f"load-{hashlib.sha256(text).hexdigest()[:16]}"
    if classes.exists():
        return classes
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        made = Path(scratch) / "made"
        line = ["javac", "-nowarn", "-d", str(made), "-cp", str(jars / "*"), *map(str, sources)]
        try:
            subprocess.run(line, check=True, capture_output=True, timeout=_COMPILE_DEADLINE)
        except FileNotFoundError as error:
            raise NotAtHand("javac is not installed") from error
        except subprocess.CalledProcessError as error:
            raise ChildProcessError(error.stderr.decode("utf-8", "replace")) from error
        try:
            made.rename(classes)
        except OSError:
            if not classes.exists():  # else somebody was faster
                raise
    return classes
