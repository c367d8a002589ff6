"""Apache's mqadmin, of both lines, against our broker and name server.

All commands of a release run in one process, in the order of `COMMANDS`; what they print is
compared with what the broker knows. A consumer and a producer of ours are online meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.statistics import CallTimes, property_of
from orbitmq.message.stored import decode_messages
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import ServerSettings
from orbitmq.wire import bodies
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import encode_body
from tests.interop.apache import IPV4, _write_logging
from tests.support.broker import RawClient, small_settings, until

if TYPE_CHECKING:
    from tests.interop.apache import Release

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

T = TypeVar("T")
DEADLINE = 300.0
CLIENT = "192.0.2.1@tester"
QUEUE = bodies.MessageQueue(broker_name="broker-a", queue_id=0, topic="Orders")

#: By name, so that tests can ask for what one printed.
COMMANDS = {
    "updateTopic": "updateTopic -b {broker} -t Invoices -r 3 -w 2 -p 6",
    "topicList": "topicList",
    "topicRoute": "topicRoute -t Orders",
    "topicStatus": "topicStatus -t Orders",
    "clusterList": "clusterList",
    "clusterTotals": "clusterList -m",
    "brokerStatus": "brokerStatus -b {broker}",
    "progress": "consumerProgress -g billing",
    "progressOfAll": "consumerProgress",
    "connection": "consumerConnection -g billing",
    "producers": "producerConnection -g makers -t Orders",
    "status": "consumerStatus -g billing -i " + CLIENT,
    "clone": "cloneGroupOffset -s billing -d cloned -t Orders",
    "byId": "queryMsgById -i {offset_id} {topic}",
    "byKey": "queryMsgByKey -t Orders -k invoice-7",
    "byUniqueKey": "queryMsgByUniqueKey -i {unique_id} -t Orders",
    "byOffset": "queryMsgByOffset -t Orders -b broker-a -i 0 -o 1",
    "queue": "queryCq -b {broker} -t Orders -q 0 -i 0 -c 2",
    "reset": "resetOffsetByTime -g offline -t Orders -s 0",
    "resetOnline": "resetOffsetByTime -g billing -t Orders -s 0",
    "progressAfter": "consumerProgress -g billing",
    "skip": "skipAccumulatedMessage -g offline -t Orders",
    "updateGroup": "updateSubGroup -b {broker} -g audit -r 3",
    "groupConfig": "getConsumerConfig -g audit",
    "deleteGroup": "deleteSubGroup -b {broker} -g audit",
    "groupConfigAfter": "getConsumerConfig -g audit",
    "config": "getBrokerConfig -b {broker}",
    "updateConfig": "updateBrokerConfig -b {broker} -k maxMessageSize -v 65536",
    "configAfter": "getBrokerConfig -b {broker}",
    "refusedConfig": "updateBrokerConfig -b {broker} -k brokerName -v other",
    "stats": "statsAll -t Orders",
    "consumeStats": "brokerConsumeStats -b {broker}",
    "cleanQueues": "cleanExpiredCQ -b {broker}",
    "cleanTopics": "cleanUnusedTopic -b {broker}",
    "updatePerm": "updateTopicPerm -b {broker} -t Invoices -p 4",
    "routeAfter": "topicRoute -t Invoices",
    "deleteTopic": "deleteTopic -c DefaultCluster -t Invoices",
    "topicListAfter": "topicList",
    "clusterOf": "topicClusterList -t Orders",
    "allocation": "allocateMQ -t Orders -i 192.0.2.1,192.0.2.2",
    "orderPut": "updateOrderConf -t Orders -m put -v broker-a:4",
    "orderGet": "updateOrderConf -t Orders -m get",
    "orderDelete": "updateOrderConf -t Orders -m delete",
    "wipe": "wipeWritePerm -b broker-a",
    "routeWiped": "topicRoute -t Orders",
    "addPerm": "addWritePerm -b broker-a",
    "routeOpen": "topicRoute -t Orders",
    "kvPut": "updateKvConfig -s NOTES -k answer -v 42",
    "kvDelete": "deleteKvConfig -s NOTES -k answer",
    "namesConfig": "getNamesrvConfig",
    "producersOf": "producer -b {broker}",
    "directly": "queryMsgById -i {offset_id} {topic} -g billing -d " + CLIENT,
    "cleanLog": "deleteExpiredCommitLog -b {broker}",
    "send": "sendMessage -t Orders -p by-mqadmin -k invoice-9 -c paid -b broker-a -i 1",
    "print": "printMsg -t Orders",
    "printQueue": "printMsgByQueue -t Orders -a broker-a -i 0 -p true -d true",
    "consume": "consumeMessage -t Orders -g readers -b broker-a -i 1",
}


class Running:
    """Our name server and broker, with a consumer, on a loop of their own."""

    def __init__(self, home: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker")
        self._thread.start()
        self._run(self._start(home))

    async def _start(self, home: Path) -> None:
        self.names = NameServer(NameServerSettings(server=ServerSettings()))
        await self.names.start()
        settings = small_settings(home / "store", name_servers=(str(self.names.address),))
        self.broker = Broker(settings)
        await self.broker.start()
        self.client = RawClient(await connect(self.broker.address, owner=_consumer()), [])
        self.sent = [
            await self.client.stored(
                "Orders", b"body-%d" % number, properties={"KEYS": f"invoice-{number}"}
            )
            for number in range(6, 9)
        ]
        await self.client.heartbeat(
            CLIENT,
            bodies.SubscriptionData(topic="Orders", sub_string="*"),
            bodies.SubscriptionData(topic="%RETRY%billing", sub_string="*"),
            producers=("makers",),
        )
        await self.client.pull("Orders")
        await self.client.report("Orders", 2)
        self.broker.parts.groups.find("offline", now=0)
        self.broker.parts.groups.find("cloned", now=0)
        self.broker.parts.topics.ensure_retry("cloned", 1, now=0)
        self.broker.parts.registration.notice()
        await until(lambda: self.names.service.routes.route("%RETRY%cloned") is not None, 30)

    def progress(self, group: str) -> dict[int, int]:
        async def ask() -> dict[int, int]:
            return self.broker.parts.progress.offsets("Orders", group)

        return self._run(ask())

    def stop(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()

    async def _stop(self) -> None:
        await self.client.close()
        await self.broker.stop()
        await self.names.stop()

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(DEADLINE)


def _consumer() -> Dispatcher:
    """Answers what brokers ask consumers."""

    def running_info(_: Connection, request: Command) -> Command:
        info = bodies.ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_CLIENT_VERSION": "V5_3_3",
                "PROP_CONSUMER_START_TIMESTAMP": "1700000000000",
            },
            mq_table={QUEUE: bodies.ProcessQueueInfo(commit_offset=2, cached_msg_count=1)},
            status_table={"Orders": bodies.ConsumeStatus(consume_ok_tps=1.5)},
            subscription_set=(bodies.SubscriptionData(topic="Orders", sub_string="*"),),
            user_consumer_info={property_of("Orders"): CallTimes.of([0.25]).to_text()},
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(info))

    def consume(_: Connection, request: Command) -> Command:
        (message,) = decode_messages(bytes(request.body))
        result = bodies.ConsumeDirectlyResult(
            consume_result=bodies.ConsumeResult.CR_SUCCESS, remark=f"took {message.body.decode()}"
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(result))

    def status(_: Connection, request: Command) -> Command:
        body = bodies.ConsumerStatus(message_queue_table={QUEUE: 2})
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def ignored(_: Connection, __: Command) -> None:
        return None

    return Dispatcher(
        {
            RequestCode.GET_CONSUMER_RUNNING_INFO: running_info,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: status,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: consume,
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: ignored,
        }
    )


class Session:
    """What the commands printed, and the broker that they talked to."""

    def __init__(self, running: Running, printed: dict[str, str]) -> None:
        self.running = running
        self.printed = printed
        self.broker = str(running.broker.address)

    def rows(self, command: str) -> list[list[str]]:
        return [line.split() for line in self.printed[command].splitlines() if line.strip()]

    def row(self, command: str, *begin: str) -> list[str]:
        """The line of a table that begins with these words."""
        found = [row for row in self.rows(command) if row[: len(begin)] == list(begin)]
        assert len(found) == 1, self.printed[command]
        return found[0]


@pytest.fixture(scope="module")
def session(release, tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("ours"))
    try:
        yield Session(running, _run_commands(release, running, tmp_path_factory.mktemp("tools")))
    finally:
        running.stop()


def _run_commands(release: Release, running: Running, home: Path) -> dict[str, str]:
    _write_logging(home)
    # The old line's tools insist on a file of this name.
    (home / "conf" / "logback_tools.xml").write_text((home / "conf/logback_broker.xml").read_text())
    sent = running.sent[1]
    words = {
        "broker": str(running.broker.address),
        "offset_id": sent.msg_id,
        "unique_id": sent.transaction_id,
        # Only the new line takes, and wants, it here.
        "topic": "" if release.is_old_line else "-t Orders",
    }
    names = str(running.names.address)
    lines = [[*command.format(**words).split(), "-n", names] for command in COMMANDS.values()]
    done = subprocess.run(
        release.command("Admin", home, options=(IPV4, "-Xmx256m")),
        cwd=home,
        env={**os.environ, "ROCKETMQ_HOME": str(home)},
        input="".join("\t".join(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    printed: dict[str, str] = {}
    for number, name in enumerate(COMMANDS):
        found = re.search(rf">>> begin {number}\n(.*)\n>>> end {number}\n", done.stdout, re.DOTALL)
        assert found is not None, done.stdout[-4000:]
        printed[name] = found[1]
    return printed


def test_topics_are_made_listed_shown_and_deleted(session):
    assert f"create topic to {session.broker} success." in session.printed["updateTopic"]
    assert ["Orders"] in session.rows("topicList")
    assert ["Invoices"] in session.rows("topicList")
    assert f'"{session.broker}"' in session.printed["topicRoute"]
    assert session.row("topicStatus", "broker-a", "0")[2:4] == ["0", "3"]
    assert session.row("topicStatus", "broker-a", "3")[2:4] == ["0", "0"]
    assert '"perm":4' in session.printed["routeAfter"].replace(" ", "")
    assert "delete topic [Invoices] from cluster" in session.printed["deleteTopic"]
    assert ["Invoices"] not in session.rows("topicListAfter")
    assert ["Orders"] in session.rows("topicListAfter")


def test_the_cluster_and_the_broker_are_shown(session):
    row = session.row("clusterList", "DefaultCluster", "broker-a", "0", session.broker)
    assert row[4] == "V5_3_3"
    assert session.row("clusterTotals", "DefaultCluster", "broker-a")[2:] == ["0", "0", "3", "3"]
    assert re.search(r"msgPutTotalTodayNow\s*: 3\n", session.printed["brokerStatus"])
    assert re.search(r"groupFindings\s*: 0\n", session.printed["brokerStatus"])


def test_progress_is_shown_and_read_back_after_a_reset(session):
    row = session.row("progress", "Orders", "broker-a", "0")
    assert "3" in row[3:5]
    assert "2" in row[4:6]
    assert "Diff Total: 1" in session.printed["progress"]
    assert session.row("progressOfAll", "billing")[:2] == ["billing", "1"]
    assert session.row("reset", "broker-a", "0") == ["broker-a", "0", "0"]
    assert session.row("resetOnline", "broker-a", "0") == ["broker-a", "0", "0"]
    assert "Diff Total: 3" in session.printed["progressAfter"]
    assert session.row("skip", "broker-a", "0") == ["broker-a", "0", "3"]
    assert session.running.progress("offline") == {0: 3, 1: 0, 2: 0, 3: 0}


def test_progress_is_cloned(session):
    assert "clone group offset success" in session.printed["clone"]
    assert session.running.progress("cloned")[0] == 2


def test_consumers_and_producers_are_shown(session, release):
    assert CLIENT in session.printed["connection"]
    assert f"producer group (makers) instance : clientId={CLIENT}" in session.printed["producersOf"]
    assert "PYTHON" in session.printed["connection"]
    assert "ConsumeType: CONSUME_PASSIVELY" in session.printed["connection"]
    assert "127.0.0.1:" in session.printed["producers"]
    assert "Orders" in session.printed["status"]
    assert "#Consumer MQ Detail#" in session.printed["status"]
    # What Apache's consumers do not tell is printed as it is, and passed over by 4.9.
    told = [each for each in session.printed["status"].splitlines() if "consumeTimes" in each]
    assert len(told) == (0 if release.is_old_line else 1)
    assert all(each.split(": ", 1)[1].startswith("calls=1 p50=0.250000 ") for each in told)


def test_messages_are_found_by_id_key_unique_id_and_offset(session):
    unique_id = session.running.sent[1].transaction_id
    assert unique_id is not None
    for command in ("byId", "byUniqueKey", "byOffset"):
        assert "invoice-7" in session.printed[command], session.printed[command]
    assert session.row("byKey", unique_id)[1:3] == ["0", "1"]
    assert "max: 3, min: 0" in session.printed["queue"]


def test_groups_are_made_shown_and_deleted(session):
    assert (
        f"create subscription group to {session.broker} success" in session.printed["updateGroup"]
    )
    assert ["retryMaxTimes", "=", "3"] in session.rows("groupConfig")
    assert "delete subscription group [audit] from broker" in session.printed["deleteGroup"]
    assert "retryMaxTimes" not in session.printed["groupConfigAfter"]


def test_settings_are_shown_changed_and_refused_with_the_reason(session):
    assert ["maxMessageSize", "=", "4194304"] in session.rows("config")
    assert "update broker config success" in session.printed["updateConfig"]
    assert ["maxMessageSize", "=", "65536"] in session.rows("configAfter")
    assert "brokerName cannot be changed while the broker runs" in session.printed["refusedConfig"]


def test_statistics_and_cleaning_are_answered(session):
    row = session.row("stats", "Orders", "billing")
    assert row[-2:] == ["3", "3"]
    assert "Diff Total:" in session.printed["consumeStats"]
    assert "success" in session.printed["cleanQueues"]
    assert "success" in session.printed["cleanTopics"]
    assert "success" in session.printed["cleanLog"]


def test_queues_are_shared_out_and_given_an_order(session):
    assert ["DefaultCluster"] in session.rows("clusterOf")
    shares = re.findall(r'"(192\.0\.2\.\d)":\[(.*?)\]', session.printed["allocation"])
    queues = {member: set(re.findall(r'"queueId":(\d)', share)) for member, share in shares}
    assert {member: len(share) for member, share in queues.items()} == dict.fromkeys(
        ("192.0.2.1", "192.0.2.2"), 2
    )
    assert set.union(*queues.values()) == {"0", "1", "2", "3"}
    assert "update orderConf success" in session.printed["orderPut"]
    assert "orderConf=[broker-a:4]" in session.printed["orderGet"]
    assert "delete orderConf success" in session.printed["orderDelete"]


def test_a_broker_is_closed_for_producers_and_opened_again(session):
    assert f"in name server[{session.running.names.address}] OK" in session.printed["wipe"]
    assert '"perm":4' in session.printed["routeWiped"]
    assert f"in name server[{session.running.names.address}] OK" in session.printed["addPerm"]
    assert '"perm":6' in session.printed["routeOpen"]


def test_the_name_servers_settings_and_values_are_kept(session):
    assert "success" in session.printed["kvPut"]
    assert "success" in session.printed["kvDelete"]
    assert ["bindAddress", "=", "127.0.0.1"] in session.rows("namesConfig")


def test_a_message_is_given_to_a_consumer_again(session):
    assert "consumeResult=CR_SUCCESS" in session.printed["directly"]
    assert "remark=took body-7" in session.printed["directly"]


def test_messages_are_sent_printed_and_consumed(session):
    (broker, queue, status, message_id) = session.rows("send")[-1]
    assert (broker, queue, status) == ("broker-a", "1", "SEND_OK")
    assert session.printed["print"].count("MSGID: ") == 4
    assert f"MSGID: {message_id} " in session.printed["print"]
    assert "KEYS=invoice-9" in session.printed["print"]
    assert session.printed["printQueue"].count("MSGID: ") == 3
    assert all(f"body-{number}" in session.printed["printQueue"] for number in range(6, 9))
    assert session.printed["consume"].count("MSGID: ") == 1
    assert f"MSGID: {message_id} " in session.printed["consume"]
