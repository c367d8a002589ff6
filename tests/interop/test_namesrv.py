"""Apache's broker registers with our name server, and Apache's client and tools find it there.

The broker is registered with Apache's name server too, so that every answer can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import ServerSettings
from orbitmq.wire.bodies import TopicList
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body
from tests.interop.apache import Broker, Driver
from tests.interop.apache import NameServer as ApacheNameServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

DEADLINE = 60.0

Questions: TypeAlias = tuple[tuple[int, dict[str, str]], ...]

#: Asked of both name servers, whose answers must be the same.
QUESTIONS: Questions = (
    (105, {"topic": "Orders"}),
    (105, {"topic": "TBW102"}),
    (105, {"topic": "%RETRY%g"}),
    (105, {"topic": "NoSuchTopic"}),
    (106, {}),
    (206, {}),
    (224, {"cluster": "DefaultCluster"}),
    (304, {}),
    (311, {}),
    (312, {}),
    (313, {}),
    (101, {"namespace": "nothing", "key": "there"}),
    (219, {"namespace": "nothing"}),
)

#: Codes that the old line does not know, and then does not answer at all.
QUESTIONS_OF_5_X: Questions = (
    (901, {"clusterName": "DefaultCluster", "brokerName": "broker-a"}),
    (4711, {}),
)

#: Answered with topics in the order of a hash table.
LISTS = frozenset({206, 224, 304, 311, 312, 313})


class Running:
    """Our name server on a loop of its own, for tests that wait for child processes."""

    def __init__(self, home: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="name server")
        self._thread.start()
        settings = NameServerSettings(home=home, server=ServerSettings())
        self.server = NameServer(settings)
        self._run(self.server.start())

    @property
    def address(self) -> str:
        return str(self.server.address)

    def knows(self, topic: str) -> bool:
        async def ask() -> bool:
            return self.server.service.routes.route(topic) is not None

        return bool(self._run(ask()))

    def ask_both(self, other: str, questions: Questions) -> list[tuple[Command, Command, Command]]:
        """The same questions to this and to another name server: request and both answers."""

        async def ask() -> list[tuple[Command, Command, Command]]:
            here, there = await connect(self.address), await connect(other)
            found = []
            try:
                for code, fields in questions:
                    request = Command.request(code, opaque=0, extra=fields)
                    answers = [await each.request(code, extra=fields) for each in (here, there)]
                    found.append((request, answers[0], answers[1]))
            finally:
                here.abort()
                there.abort()
            return found

        return list(self._run(ask()))

    def stop(self) -> None:
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(DEADLINE)


@contextlib.contextmanager
def our_name_server(home: Path) -> Iterator[Running]:
    running = Running(home)
    try:
        yield running
    finally:
        running.stop()


def test_apaches_broker_client_and_tools_work_with_our_name_server(release, tmp_path):
    with (
        our_name_server(tmp_path / "ours") as ours,
        ApacheNameServer.running(release, tmp_path / "theirs") as name_server,
    ):
        both = {"namesrvAddr": f"{name_server.address};{ours.address}"}
        with Broker.running(release, tmp_path / "broker", ours.address, settings=both) as broker:
            driver = Driver(release, tmp_path / "client", ours.address, broker.address)
            driver.run("topic", {"topics": "Orders", "queues": 3})
            sent = driver.run("send", {"topic": "Orders", "count": 5})
            consumed = driver.run("consume", {"topic": "Orders", "group": "g", "count": 5})
            shown = _answers(driver.run("admin", {"topic": "Orders", "group": "admins"}))
            questions = QUESTIONS if release.is_old_line else QUESTIONS + QUESTIONS_OF_5_X
            asked = ours.ask_both(name_server.address, questions)
            _compare(asked, is_old=release.is_old_line)

            assert len(sent) == len(consumed) == 5
            # Apache's tool forgets to send the value, and then does not find it.
            assert "CODE: 22" in shown["set-config"]
            assert broker.address in shown["route"]
            assert "CODE: 17" in shown["no-such-topic"]
            assert not [question for question, answer in shown.items() if answer == "None"]
            assert ours.knows("Orders")
        # An orderly stop unregisters the broker.
        _until(lambda: not ours.knows("Orders"))


def test_a_killed_broker_is_gone_from_routes_at_once(release, tmp_path):
    with (
        our_name_server(tmp_path / "ours") as ours,
        Broker.running(release, tmp_path / "broker", ours.address) as broker,
    ):
        assert ours.knows("TBW102")
        broker.server.kill()

        _until(lambda: not ours.knows("TBW102"))


def test_two_name_servers_of_ours_give_the_same_routes(release, tmp_path):
    with our_name_server(tmp_path / "one") as one, our_name_server(tmp_path / "other") as other:
        both = {"namesrvAddr": f"{one.address};{other.address}"}
        with Broker.running(release, tmp_path / "broker", one.address, settings=both):
            _until(lambda: other.knows("TBW102"))

            assert one.server.service.routes.clusters() == other.server.service.routes.clusters()
            assert one.server.service.routes.topics() == other.server.service.routes.topics()


def _answers(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["question"]: str(line.get("answer", line.get("refused"))) for line in lines}


def _compare(asked: list[tuple[Command, Command, Command]], *, is_old: bool) -> None:
    for request, ours, theirs in asked:
        assert ours.code == theirs.code, request.ext_fields
        # 4.9 links to another page in the second line; a remark on success is a left-over.
        assert (
            ours.code == 0
            or (ours.remark or "").split("\n")[0] == (theirs.remark or "").split("\n")[0]
        )
        body = bytes(ours.body)
        if is_old:
            body = body.replace(b',"enableActingMaster":false', b"")
        if request.code in LISTS:
            here, there = decode_body(TopicList, body), decode_body(TopicList, theirs.body)
            assert set(here.topic_list) == set(there.topic_list)
            assert here.broker_addr == there.broker_addr
        else:
            assert body == bytes(theirs.body), request.ext_fields


def _until(condition: Any) -> None:
    waiting = threading.Event()
    for _ in range(int(DEADLINE / 0.05)):
        if condition():
            return
        waiting.wait(0.05)
    raise AssertionError(f"not within {DEADLINE} s")
