"""Third-party clients for tests: how they are obtained, and a process that runs one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orbitmq.testing import EmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import ResetOffsetRequest
from tests.support.command import ROOT, Piped
from tests.support.remoting import asked

LOCK = ROOT / "requirements" / "clients.txt"
FOLDER = ROOT / "build" / "clients"
DRIVER = ROOT / "tests" / "clients" / "cpp_driver.py"

#: For anything that the client does without waiting for its own timers.
DEADLINE = 30.0
_DOWNLOAD_DEADLINE = 60.0


#: Access and secret key of an account that may send orders, and of one that may read them.
MAKER = ("maker-key", "maker-s3cr3t")
TAKER = ("taker-key", "taker-s3cr3t")
ACCOUNTS = f"""
[[accounts]]
accessKey = "{MAKER[0]}"
secretKey = "{MAKER[1]}"
topicPerms = ["Orders=PUB"]

[[accounts]]
accessKey = "{TAKER[0]}"
secretKey = "{TAKER[1]}"
topicPerms = ["Orders=SUB"]
groupPerms = ["readers=SUB"]
"""


def orders(count: int, first: int = 0, **more: object) -> list[dict[str, Any]]:
    """Messages for a driver to send, whose bodies are those of `bodies`."""
    return [{"topic": "Orders", "body": body, **more} for body in bodies(count, first)]


def bodies(count: int, first: int = 0) -> list[str]:
    return [f"order {number}" for number in range(first, first + count)]


def consume(client: DrivenClient, cluster: EmbeddedCluster, group: str, **more: object) -> None:
    """Have a driver start a consumer of the orders; what else it takes is up to the driver."""
    settings = {"topic": "Orders", "group": group, "name_server": cluster.name_server}
    client.ask("consume", **(settings | more))


def rewind(cluster: EmbeddedCluster, group: str) -> None:
    """Send a group back to the first order, as `mqadmin resetOffsetByTime` asks for it.

    Our own tool reads progress back, and would not know what to make of a client that has been
    through a few messages again by then, or still reports what was before.
    """
    beginning = ResetOffsetRequest(group=group, topic="Orders", timestamp=0, is_force=True)
    for broker in cluster.broker_addresses:
        answer = asyncio.run(asked(broker, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, beginning))
        assert answer.code == ResponseCode.SUCCESS, answer.remark


class Unobtainable(Exception):
    """The package could not be installed here."""


def obtain(package: str) -> Path:
    """The folder that holds a package of the lock, installed once. Raises `Unobtainable`."""
    pinned = rf"^{re.escape(package)}==[^\n]*\\\n[^\n]*sha256:\w+"
    (entry,) = re.findall(pinned, LOCK.read_text(), re.MULTILINE)
    version = entry.split("==")[1].split()[0]
    target = FOLDER / f"{package}-{version}"
    if target.is_dir():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(entry + "\n")
        made = Path(scratch) / "made"
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "10"),
            *("--require-hashes", "--target", str(made), "-r", str(wanted)),
        ]
        try:
            ran = subprocess.run(
                command, capture_output=True, timeout=_DOWNLOAD_DEADLINE, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unobtainable(f"{package} {version}: no package index answered in time") from None
        if ran.returncode != 0:
            raise Unobtainable(f"{package} {version} could not be installed with pip here")
        try:
            made.rename(target)
        except OSError:
            # Somebody else was as far at the same time.
            shutil.rmtree(made, ignore_errors=True)
    return target


class DrivenClient(Piped):
    """A process that does with a client what it is told, and what it has told so far."""

    deadline = DEADLINE

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.messages: list[dict[str, Any]] = []
        self.checked: list[str] = []
        self._answers: list[dict[str, Any]] = []
        # Clients log and keep progress below the home directory.
        env = {"HOME": str(home), "PATH": os.environ.get("PATH", ""), **environment}
        super().__init__(command, env, cwd=home, stdin=subprocess.PIPE)

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have something done; what it gave. Fails the test when it failed."""
        answer = self.try_to(do, **arguments)
        assert "failed" not in answer, answer["failed"]
        return answer["done"]

    def try_to(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have something done that may fail; the answer as it is."""
        before = len(self._answers)
        self.write(json.dumps({"do": do, **arguments}) + "\n")
        self.until(lambda: len(self._answers) > before, f"an answer to {do}")
        return self._answers[-1]

    def produce(self, group: str, name_server: str, keys: Sequence[str] = ()) -> None:
        """Start a producer, with an access key and a secret key if these are given."""
        self.ask("produce", group=group, name_server=name_server, keys=list(keys))

    def send(self, how: str, *messages: dict[str, Any], group: str = "makers") -> list[list[Any]]:
        """Send them; what the broker answered.

        The client gives a look-up of a route up after some seconds, which on a busy machine are
        soon over; nothing was sent then, and the same can be asked for again.
        """
        asked: dict[str, Any] = {"group": group, "how": how, "messages": list(messages)}
        for _ in range(3):
            answer = self.try_to("send", **asked)
            if "No route info" not in answer.get("failed", ""):
                break
        assert "failed" not in answer, answer["failed"]
        done: list[list[Any]] = answer["done"]
        return done

    def until(self, condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
        """Return when the condition holds; fail when it does not in time or the client is gone."""
        self.until_true(condition, f"{what}; had {self.messages}", deadline)

    def until_bodies(self, bodies: Sequence[str], deadline: float = DEADLINE) -> None:
        """Wait until messages of these bodies have come, at least once each."""
        wanted = set(bodies)
        self.until(lambda: wanted <= set(self.bodies()), f"{sorted(wanted)}", deadline)

    def bodies(self) -> list[str]:
        return [message["body"] for message in self.messages]

    def close(self) -> None:
        """End it, which it does by itself when its input ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.wait()

    def take(self, line: str) -> None:
        told = json.loads(line)
        if "message" in told:
            self.messages.append(told["message"])
        elif "checked" in told:
            self.checked.append(told["checked"])
        else:
            self._answers.append(told)


#: Starts a process with a client, below this home directory.
Launch = Callable[[Path], DrivenClient]


class CppClient(DrivenClient):
    """A process with the C++ client."""

    def __init__(self, package: Path, home: Path) -> None:
        command = [sys.executable, "-W", "ignore", str(DRIVER)]
        super().__init__(command, {"PYTHONPATH": str(package)}, home)
