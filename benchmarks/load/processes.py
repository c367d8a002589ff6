"""The processes of a bench: load generator, floors, our broker, Apache's."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Self

import msgspec

from benchmarks.load.asking import Failed, Outcome, Target, Wish
from benchmarks.peers import ROOT, Peer, Tell, fetching
from benchmarks.runner import NotAtHand

_STOP_DEADLINE = 30.0
#: Longer than anything takes that a process is asked to do: it hangs.
_SILENCE_DEADLINE = 180.0

#: The version that is measured: of the two lines, the one that the figures of others are about.
APACHE_VERSION = "4.9.7"

#: Apache's defaults, where the settings for tests have small ones, and patience on a busy machine.
_APACHE_SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 1 << 30,
    "mappedFileSizeConsumeQueue": 20 * 300_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "waitTimeMillsInSendQueue": 10_000,
    "osPageCacheBusyTimeOutMills": 10_000,
}
#: Collector, generations and pauses as in its own start script (`bin/runbroker.sh`), with a quarter
#: of the heap, which leaves this machine some memory. Left out of that script: logs of the
#: collector, and `-XX:+AlwaysPreTouch`, with which the whole heap would be occupied from the start.
#: The first two put back what the tests against Apache choose for a quick start.
_APACHE_JAVA = (
    *("-XX:-UseSerialGC", "-XX:TieredStopAtLevel=4"),
    *("-Xms2g", "-Xmx2g", "-Xmn1g"),
    *("-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25"),
    *("-XX:InitiatingHeapOccupancyPercent=30", "-XX:SoftRefLRUPolicyMSPerMB=0"),
)
APACHE_HEAP = "2 GiB instead of the 8 GiB of its start script, not touched beforehand"
#: How it runs, for readers of the page.
APACHE_JAVA_TEXT = " ".join(_APACHE_JAVA[2:])


class Child:
    """A process of ours that says in one line when it is ready, and ends with its input."""

    def __init__(
        self,
        *words: str,
        program: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        is_talkative: bool = False,
    ) -> None:
        """`is_talkative`: what it has to say on standard error is of no interest."""
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_talkative else None,
            env=environment,
        )
        self.began = began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> bytes:
        """The next line that it says. One that says nothing for too long is ended."""
        assert self._process.stdout is not None
        watch = threading.Timer(_SILENCE_DEADLINE, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise ChildProcessError(f"it ended with {self._process.wait()} and said nothing")
        return line

    def say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


class Generator(Child):
    """The load generator."""

    def __init__(self) -> None:
        super().__init__("-m", "benchmarks.load.generator")

    def ask(self, wish: Wish) -> Outcome:
        self.say(msgspec.json.encode(wish))
        outcome: Outcome = msgspec.json.decode(self.line(), type=Outcome)
        if isinstance(outcome, Failed):
            raise ChildProcessError(f"the load failed: {outcome.reason}")
        return outcome


class Floor(Child):
    """A server that does as little as possible; see `floors`."""

    def __init__(self, kind: str, answer_size: int = 0) -> None:
        super().__init__("-m", "benchmarks.load.floors", kind, str(answer_size))
        self.target = Target(port=int(self.line()), pid=self.pid)


class OurBroker(Child):
    """`orbitmq broker`, as users start it."""

    def __init__(self, root: Path, *settings: str) -> None:
        words = [word for setting in settings for word in ("--set", setting)]
        super().__init__(
            *("-m", "orbitmq.cli", "broker", "--json", "--stop-with-input", "--port", "0"),
            *("--log-level", "error", "--data", str(root)),
            *words,
        )
        told = json.loads(self.line())
        assert json.loads(self.line()) == {"event": "ready"}
        #: Seconds from starting the process to its word that it is ready.
        self.took = time.perf_counter() - self.began
        self.target = Target(port=int(told["address"].rpartition(":")[2]), pid=self.pid)


class Interpreter(Child):
    """A Python that does nothing: what every process of ours costs at least."""

    def __init__(self) -> None:
        super().__init__("-c", "import sys; print('ready', flush=True); sys.stdin.read()")
        self.line()
        self.took = time.perf_counter() - self.began


def _fetch_apache(tell: Tell) -> None:
    # It lives with the tests against Apache, and needs Java: not for everybody who measures.
    from tests.interop import apache  # noqa: PLC0415
    from tests.support import maven  # noqa: PLC0415

    with fetching():
        maven.tool("java")
        apache.fetch(APACHE_VERSION, lambda files: tell(f"{files} files"))


#: The broker and the client.
APACHE = Peer(
    f"Apache RocketMQ {APACHE_VERSION}",
    "Maven Central",
    [ROOT / "build" / "interop" / APACHE_VERSION / "jars"],
    _fetch_apache,
)


@contextmanager
def apache_broker() -> Iterator[tuple[Target, float]]:
    """Apache's broker and the seconds that it took to start; raises `NotAtHand`."""
    from tests.interop import apache  # noqa: PLC0415  # as above
    from tests.support.maven import Unavailable  # noqa: PLC0415

    APACHE.check()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # It tells what it does, which is of use in a log of tests only.
        with redirect_stdout(io.StringIO()):
            try:
                release = apache.Release.obtain(APACHE_VERSION)
            except Unavailable as error:
                raise NotAtHand(str(error)) from error
            names = stack.enter_context(apache.NameServer.running(release, home / "names"))
            stack.callback(names.server.kill)
            began = time.perf_counter()
            broker = stack.enter_context(
                apache.Broker.running(
                    release,
                    home / "broker",
                    names.address,
                    settings=_APACHE_SETTINGS,
                    options=_APACHE_JAVA,
                )
            )
            took = time.perf_counter() - began
        # Nobody needs what it stored: no need to wait for an orderly end.
        stack.callback(broker.server.kill)
        port = int(broker.address.rpartition(":")[2])
        yield Target(port=port, pid=broker.server.process.pid), took
