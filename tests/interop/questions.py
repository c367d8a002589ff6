"""One conversation with a broker, held with Apache's and with ours.

Requests are raw: names and values of fields as they go over the wire. Each has a name, by which
answers are compared. A broker must be fresh; topics are made by the conversation itself.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING

from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import RequestTimedOut
from orbitmq.wire.codes import RequestCode, Serialization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.command import Command

Fields = dict[str, object]

#: Bodies above it are refused; both brokers are started with it.
MAX_MESSAGE = 65536
BORN = 1_700_000_000_000
DEADLINE = 10.0
CLIENT, OTHER_CLIENT = "192.0.2.1@one", "192.0.2.2@two"


class Conversation:
    """What was asked of a broker and what it answered, by name and in order."""

    def __init__(self, client: Connection, other: Connection) -> None:
        self.client = client
        self.other = other
        #: None where no answer came.
        self.answers: dict[str, Command | None] = {}
        self.serialization = Serialization.JSON

    async def ask(
        self,
        name: str,
        code: int,
        fields: Mapping[str, object] | None = None,
        body: bytes | object = b"",
        *,
        by_other: bool = False,
    ) -> Command:
        """Ask under a name. A body that is not bytes goes as JSON."""
        assert name not in self.answers, name
        connection = self.other if by_other else self.client
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        extra = {field: _text(value) for field, value in (fields or {}).items()}
        self.answers[name] = None
        answer = await connection.request(
            code, extra=extra, body=raw, timeout=DEADLINE, serialization=self.serialization
        )
        self.answers[name] = answer
        return answer

    async def ask_in_vain(self, name: str, code: int, fields: Fields) -> None:
        """Ask what is not answered by Apache's broker."""
        extra = {field: _text(value) for field, value in fields.items()}
        try:
            self.answers[name] = await self.client.request(code, extra=extra, timeout=1.0)
        except RequestTimedOut:
            self.answers[name] = None

    async def send(
        self, name: str, topic: str, body: bytes = b"hello", /, **changes: object
    ) -> Command:
        fields: Fields = {
            "producerGroup": "makers",
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4,
            "queueId": 0,
            "sysFlag": 0,
            "bornTimestamp": BORN,
            "flag": 0,
            "properties": properties(UNIQ_KEY=name),
            "reconsumeTimes": 0,
            "unitMode": False,
            "batch": False,
        }
        code = changes.pop("code", 10)
        assert isinstance(code, int)
        return await self.ask(name, code, _without_none(fields | changes), body)

    async def pull(self, name: str, topic: str, offset: int, /, **changes: object) -> Command:
        fields: Fields = {
            "consumerGroup": "billing",
            "topic": topic,
            "queueId": 0,
            "queueOffset": offset,
            "maxMsgNums": 32,
            "sysFlag": 4,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
        }
        code = changes.pop("code", 11)
        assert isinstance(code, int)
        return await self.ask(name, code, _without_none(fields | changes))

    async def until_written(self, topic: str, offset: int, queue_id: int = 0) -> None:
        """Apache's queues follow its log after a while."""
        fields = {"topic": topic, "queueId": str(queue_id)}
        async with asyncio.timeout(DEADLINE):
            while True:
                answer = await self.client.request(30, extra=fields, timeout=DEADLINE)
                if int(answer.ext_fields["offset"]) >= offset:
                    return
                await asyncio.sleep(0.02)


async def converse(address: str) -> dict[str, Command | None]:
    """Ask everything; the answers by name."""

    def ignore(_: Connection, __: Command) -> None:
        """What a broker tells its clients is not part of this."""

    told = (RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    quiet = dict.fromkeys(map(int, told), ignore)
    client = await connect(address, owner=Dispatcher(quiet))
    other = await connect(address, owner=Dispatcher(quiet))
    try:
        conversation = Conversation(client, other)
        for part in PARTS:
            try:
                await part(conversation)
            except RequestTimedOut as late:
                raise AssertionError(list(conversation.answers)[-1]) from late
        return conversation.answers
    finally:
        client.abort()
        other.abort()


async def topics(it: Conversation) -> None:
    for topic, queues, perm in (
        ("Orders", 2, 6),
        ("Empty", 1, 6),
        ("ReadOnly", 1, 4),
        ("WriteOnly", 1, 2),
        ("Doomed", 1, 6),
    ):
        await it.ask(f"create {topic}", 17, _topic(topic, queues, perm))
    await it.ask("create again", 17, _topic("Orders", 2, 6))
    await it.ask("create with a bad name", 17, _topic("a b", 1, 6))
    await it.ask("create with a long name", 17, _topic("a" * 128, 1, 6))
    await it.ask("create without a name", 17, _topic("", 1, 6))
    await it.ask("create a system topic", 17, _topic("TBW102", 1, 6))
    await it.ask(
        "create with an unknown attribute", 17, _topic("Odd", 1, 6) | {"attributes": "+a=b"}
    )
    await it.ask("topic config", 351, {"topic": "Orders"})
    await it.ask("topic config of an unknown", 351, {"topic": "Unknown"})
    await it.ask("delete", 215, {"topic": "Doomed"})
    await it.ask("topic config of a deleted", 351, {"topic": "Doomed"})
    await it.ask("delete an unknown", 215, {"topic": "Unknown"})
    await it.ask("delete a system topic", 215, {"topic": "TBW102"})
    await it.ask("delete without a name", 215, {"topic": ""})
    await it.ask("all topic configs", 21)
    await it.ask("system topics", 305)


async def sends(it: Conversation) -> None:
    for number in range(5):
        tag = ("red", "green")[number % 2]
        own = properties(
            KEYS=f"k{number}", UNIQ_KEY=f"order-{number}", TAGS=tag, number=str(number)
        )
        await it.send(f"send {number}", "Orders", b"order %d" % number, properties=own)
    alone = {"defaultTopicQueueNums": 1}
    await it.send("send without a unique key", "Empty2", properties="", queueId=-1, **alone)
    await it.send("send without properties", "Empty2", properties=None)
    await it.send("send to a new topic", "Made", defaultTopicQueueNums=2)
    await it.send("send from an unknown template", "Unmade", defaultTopic="NoTemplate")
    await it.send("send to a bad name", "a b")
    await it.send("send to a long name", "a" * 128)
    await it.send("send to TBW102", "TBW102")
    await it.send("send to the schedule", "SCHEDULE_TOPIC_XXXX")
    await it.send("send to the half topic", "RMQ_SYS_TRANS_HALF_TOPIC")
    await it.send("send to a read-only topic", "ReadOnly")
    await it.send("send to queue 7 of 2", "Orders", queueId=7)
    await it.send("send without a body", "Orders", b"")
    await it.send("send too large a body", "Orders", b"x" * (MAX_MESSAGE + 1))
    await it.send("send the largest body", "Empty2", b"x" * MAX_MESSAGE)
    await it.send("send too many properties", "Orders", properties=properties(a="x" * 32768))
    await it.send("send without a topic field", "Orders", topic=None)
    await it.send("send without a queue field", "Orders", queueId=None)
    await it.send("send a number that is none", "Orders", queueId="seven")
    await it.send("send with a delay", "Later", properties=properties(DELAY="18", UNIQ_KEY="d"))
    await it.send("send with a delay beyond", "Later", properties=properties(DELAY="99"))
    await it.send(
        "send with a timer beyond", "Later", properties=properties(TIMER_DELAY_SEC="99999999")
    )
    await it.send("send to a retry topic", "%RETRY%billing")
    await it.send("send to a retry topic too often", "%RETRY%billing", reconsumeTimes=17)
    batch = _batch(b"one", b"two", b"three")
    many = _short("Many", batch=True)
    await it.send("send a batch", "Many", batch, code=320, **many)
    await it.send("send a batch by code 310", "Many", batch, code=310, **many)
    await it.send("send a batch by code 10", "Many", batch, batch=True, properties="")
    await it.send("send half a batch", "Many", batch[:-3], code=320, **many)
    retry = _short("%RETRY%billing", batch=True)
    await it.send("send a batch to a retry topic", "", batch, code=320, **retry)
    await it.send("send by code 310", "Many", code=310, **_short("Many"))
    await it.until_written("Orders", 5)
    await it.until_written("Many", 10)


async def transactions(it: Conversation) -> None:
    own = properties(TRAN_MSG="true", PGROUP="makers", UNIQ_KEY="half-1")
    half = await it.send("send half", "Paid", sysFlag=4, properties=own)
    found = half.ext_fields
    end: Fields = {
        "producerGroup": "makers",
        "tranStateTableOffset": found["queueOffset"],
        "commitLogOffset": int(found["msgId"][16:], 16),
        "commitOrRollback": 8,
        "fromTransactionCheck": False,
        "msgId": "half-1",
        "transactionId": "half-1",
    }
    await it.ask("commit for another group", 37, end | {"producerGroup": "others"})
    await it.ask("commit another place", 37, end | {"tranStateTableOffset": 99})
    await it.ask("commit nothing", 37, end | {"commitLogOffset": 999_999_999})
    await it.ask_in_vain("leave open", 37, end | {"commitOrRollback": 0})
    await it.ask("commit", 37, end)
    await it.until_written("Paid", 1)
    await it.pull("pull a committed message", "Paid", 0)


async def deliveries(it: Conversation) -> None:
    own = properties(UNIQ_KEY="soon", DELAY="1", TAGS="red")
    await it.send("send with a short delay", "Soon", properties=own)
    own = properties(UNIQ_KEY="timed", TIMER_DELAY_SEC="2", TAGS="red")
    await it.send("send with a timer", "Timed", properties=own)
    await it.until_written("Soon", 1)
    await it.pull("pull a delayed message", "Soon", 0)
    await it.until_written("Timed", 1)
    await it.pull("pull a timed message", "Timed", 0)


async def pulls(it: Conversation) -> None:
    await it.pull("pull", "Orders", 0)
    await it.pull("pull two", "Orders", 1, maxMsgNums=2)
    await it.pull("pull green", "Orders", 0, subscription="green")
    await it.pull("pull either", "Orders", 0, subscription="green || red")
    await it.pull("pull what does not match", "Orders", 0, subscription="blue")
    sql = {"expressionType": "SQL92"}
    await it.pull("pull by SQL", "Orders", 0, subscription="number >= 3", **sql)
    await it.pull("pull by bad SQL", "Orders", 0, subscription="number >= ", **sql)
    await it.pull("pull by unknown type", "Orders", 0, expressionType="SQL93")
    await it.pull("pull at the end", "Orders", 5)
    await it.pull("pull beyond the end", "Orders", 9)
    await it.pull("pull before the begin", "Orders", -1)
    await it.pull("pull an empty queue", "Empty", 0)
    await it.pull("pull beyond an empty queue", "Empty", 3)
    await it.pull("pull an unknown topic", "Unknown", 0)
    await it.pull("pull queue 7 of 2", "Orders", 0, queueId=7)
    await it.pull("pull a negative queue", "Orders", 0, queueId=-1)
    await it.pull("pull a write-only topic", "WriteOnly", 0)
    await it.pull("pull without a subscription", "Orders", 0, sysFlag=0)
    await it.pull("pull nothing", "Orders", 0, maxMsgNums=0)
    await it.pull("pull and commit", "Orders", 0, sysFlag=5, commitOffset=2, consumerGroup="noting")
    await it.pull("pull by a lite consumer", "Orders", 0, sysFlag=20, code=361)
    await it.pull("pull without a group field", "Orders", 0, consumerGroup=None)
    await it.pull("pull with a bad group", "Orders", 0, consumerGroup="a b")
    await it.pull("pull for a moment", "Empty", 0, sysFlag=6, suspendTimeoutMillis=300)


async def offsets(it: Conversation) -> None:
    here: Fields = {"topic": "Orders", "queueId": 0}
    await it.ask("max offset", 30, here)
    await it.ask("min offset", 31, here)
    await it.ask("earliest time", 32, here)
    for name, code in (("max", 30), ("min", 31)):
        await it.ask(f"{name} offset of an empty queue", code, {"topic": "Empty", "queueId": 0})
        await it.ask(f"{name} offset of an unknown topic", code, {"topic": "Unknown", "queueId": 0})
    await it.ask("earliest time of an empty queue", 32, {"topic": "Empty", "queueId": 0})
    for when, time in (("the beginning", 0), ("the future", 4_000_000_000_000)):
        for boundary in ("lower", "upper"):
            fields = here | {"timestamp": time, "boundaryType": boundary}
            await it.ask(f"search {when}, {boundary}", 29, fields)
    await it.ask("search in an empty queue", 29, {"topic": "Empty", "queueId": 0, "timestamp": 0})
    of_group = here | {"consumerGroup": "fresh"}
    await it.ask("progress of a fresh group", 14, of_group)
    strict = of_group | {"setZeroIfNotFound": False}
    await it.ask("progress of a fresh group, strictly", 14, strict)
    await it.ask("progress in an empty queue", 14, of_group | {"topic": "Empty"})
    await it.ask("progress in an unknown topic", 14, of_group | {"topic": "Unknown"})
    await it.ask("report", 15, of_group | {"consumerGroup": "billing", "commitOffset": 3})
    await it.ask("progress after a report", 14, of_group | {"consumerGroup": "billing"})
    await it.ask("report back", 15, of_group | {"consumerGroup": "billing", "commitOffset": 1})
    await it.ask("progress after a report back", 14, of_group | {"consumerGroup": "billing"})
    unknown = of_group | {"consumerGroup": "never-seen", "commitOffset": 3}
    await it.ask("report by an unknown group", 15, unknown)
    known = {"consumerGroup": "billing", "commitOffset": 3, "queueId": 0}
    await it.ask("report in an unknown topic", 15, known | {"topic": "Unknown"})
    await it.ask("progress noted by a pull", 14, here | {"consumerGroup": "noting"})


async def members(it: Conversation) -> None:
    await it.ask("members of nobody", 38, {"consumerGroup": "lonely"})
    await it.ask("heartbeat", 34, body=_heartbeat(CLIENT, "Orders", "*", version=7))
    await it.ask("heartbeat again", 34, body=_heartbeat(CLIENT, "Orders", "*", version=7))
    await it.ask("members of one", 38, {"consumerGroup": "team"})
    beat = _heartbeat(OTHER_CLIENT, "Orders", "*", version=7)
    await it.ask("heartbeat of another", 34, body=beat, by_other=True)
    await it.ask("members of two", 38, {"consumerGroup": "team"})
    await it.ask("heartbeat that is no JSON", 34, body=b"not a heartbeat")
    await it.ask("heartbeat without a body", 34)
    by_member = {"consumerGroup": "team", "sysFlag": 0, "subscription": None}
    await it.pull("pull by a member", "Orders", 3, **by_member, subVersion=7)
    await it.pull("pull by a member with a newer one", "Orders", 3, **by_member, subVersion=8)
    await it.pull("pull by a member of another topic", "Many", 0, **by_member, subVersion=7)
    check = {"clientId": CLIENT, "group": "team", "subscriptionData": _subscription("Orders", "*")}
    await it.ask("check of tags", 46, body=check)
    sql = _subscription("Orders", "a > 1") | {"expressionType": "SQL92"}
    await it.ask("check of SQL", 46, body=check | {"subscriptionData": sql})
    sql = sql | {"subString": "a >"}
    await it.ask("check of bad SQL", 46, body=check | {"subscriptionData": sql})
    await it.ask("consumer connections", 203, {"consumerGroup": "team"})
    await it.ask("consumer connections of nobody", 203, {"consumerGroup": "lonely"})
    producers = {"producerGroup": "makers", "topic": "Orders"}
    await it.ask("producer connections", 204, producers)
    await it.ask("producer connections of nobody", 204, producers | {"producerGroup": "lonely"})
    await it.ask("all producers", 328)
    await it.ask("topics of a group", 343, {"group": "billing"})
    of_group = {"group": "team", "topic": "Orders"}
    await it.ask("subscription of a group", 345, of_group)
    await it.ask("subscription of nobody", 345, of_group | {"group": "lonely"})
    await it.ask("groups of a topic", 300, {"topic": "Orders"})


async def locks(it: Conversation) -> None:
    queues = [{"topic": "Orders", "brokerName": "broker-a", "queueId": id_} for id_ in range(2)]
    mine = {"consumerGroup": "team", "clientId": CLIENT, "mqSet": queues[:1]}
    theirs = mine | {"clientId": OTHER_CLIENT, "mqSet": queues}
    await it.ask("lock", 41, body=mine)
    await it.ask("lock again", 41, body=mine)
    await it.ask("lock what another has", 41, body=theirs, by_other=True)
    await it.ask("unlock what another has", 42, body=theirs | {"mqSet": queues[:1]}, by_other=True)
    await it.ask("lock what was not unlocked", 41, body=theirs, by_other=True)
    await it.ask("unlock", 42, body=mine)
    await it.ask("lock what was unlocked", 41, body=theirs, by_other=True)
    await it.ask("unlock all", 42, body=theirs, by_other=True)
    await it.ask("lock without a body", 41)
    await it.ask("lock nothing", 41, body=mine | {"mqSet": []})


async def send_backs(it: Conversation) -> None:
    answer = await it.pull("pull to send back", "Orders", 0, maxMsgNums=1)
    at = struct.unpack_from(">q", bytes(answer.body), 28)[0]
    back: Fields = {
        "offset": at,
        "group": "team",
        "delayLevel": 18,
        "originMsgId": "order-0",
        "originTopic": "Orders",
        "unitMode": False,
        "maxReconsumeTimes": 16,
    }
    await it.ask("send back", 36, back)
    await it.ask("send back soon", 36, back | {"delayLevel": 1})
    await it.until_written("%RETRY%team", 1)
    await it.pull("pull what was sent back", "%RETRY%team", 0)
    await it.ask("send back for good", 36, back | {"delayLevel": -1})
    await it.until_written("%DLQ%team", 1)
    await it.pull("pull a dead letter", "%DLQ%team", 0)
    await it.ask("send back nothing", 36, back | {"offset": 999_999_999})
    await it.ask("send back for an unknown group", 36, back | {"group": "a b"})


async def messages(it: Conversation) -> None:
    window = {"beginTimestamp": 0, "endTimestamp": 4_000_000_000_000, "maxNum": 8}
    await it.ask("by key", 12, window | {"topic": "Orders", "key": "k3"})
    await it.ask("by unknown key", 12, window | {"topic": "Orders", "key": "none"})
    by_unique = window | {"topic": "Orders", "key": "order-2", "_UNIQUE_KEY_QUERY": "true"}
    await it.ask("by unique key", 12, by_unique)
    await it.ask("by offset", 33, {"offset": 0})
    await it.ask("by offset beyond", 33, {"offset": 999_999_999})
    await it.ask("consume queue", 321, _queue_rows("Orders", 1, 2))
    await it.ask("consume queue of an unknown", 321, _queue_rows("Unknown", 0, 2))


async def groups(it: Conversation) -> None:
    group = {"groupName": "audit", "retryMaxTimes": 3, "retryQueueNums": 2, "consumeEnable": False}
    await it.ask("create group", 200, body=group)
    await it.ask("create group with a bad name", 200, body=group | {"groupName": "a b"})
    await it.ask("create group that is no JSON", 200, body=b"no group")
    await it.ask("group config", 352, {"group": "audit"})
    await it.ask("group config of an unknown", 352, {"group": "a b"})
    await it.pull("pull by a forbidden group", "Orders", 0, consumerGroup="audit")
    await it.ask("all groups", 201)
    await it.ask("delete group", 207, {"groupName": "audit", "removeOffset": True})
    await it.ask("groups after one was deleted", 201)
    await it.ask("delete an unknown group", 207, {"groupName": "never-seen", "removeOffset": True})


async def resets(it: Conversation) -> None:
    reset = {"topic": "Orders", "group": "billing", "timestamp": 0, "isForce": True}
    await it.ask("reset", 222, reset)
    await it.ask("reset in an unknown topic", 222, reset | {"topic": "Unknown"})
    await it.ask("progress after a reset", 14, _of("billing"))
    clone = {"srcGroup": "billing", "destGroup": "cloned", "topic": "Orders", "offline": True}
    await it.ask("clone", 314, clone)
    await it.ask("progress of a clone", 14, _of("cloned"))
    await it.ask("clone of nothing", 314, clone | {"srcGroup": "never-seen", "destGroup": "other"})
    await it.ask("correct", 308, {"topic": "Orders", "compareGroup": "billing", "filterGroups": ""})


async def statistics(it: Conversation) -> None:
    await it.ask("topic stats", 202, {"topic": "Orders"})
    await it.ask("topic stats of an unknown", 202, {"topic": "Unknown"})
    await it.ask("consume stats", 208, {"consumerGroup": "billing", "topic": "Orders"})
    await it.ask("consume stats of all topics", 208, {"consumerGroup": "team", "topic": ""})
    await it.ask("consume stats of nobody", 208, {"consumerGroup": "lonely", "topic": ""})
    await it.ask("consume span", 303, {"topic": "Orders", "group": "billing"})
    await it.ask("consume span of an unknown", 303, {"topic": "Unknown", "group": "billing"})
    await it.ask("stats of the broker", 317, {"isOrder": False})
    await it.ask("stats item", 315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "Orders"})
    await it.ask("stats item of an unknown", 315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "x"})
    await it.ask("stats of an unknown name", 315, {"statsName": "NOTHING", "statsKey": "Orders"})
    await it.ask("all progress", 43)
    await it.ask("all delay progress", 45)
    await it.ask("running info of nobody", 307, {"consumerGroup": "team", "clientId": "nobody"})
    await it.ask("runtime info", 28)


async def the_rest(it: Conversation) -> None:
    await it.ask("unknown code", 4711)
    await it.ask("clean queues", 306)
    await it.ask("clean topics", 316)
    gone = {"clientID": OTHER_CLIENT, "producerGroup": "makers", "consumerGroup": "team"}
    await it.ask("unregister", 35, gone, by_other=True)
    await it.ask("members after one went", 38, {"consumerGroup": "team"})
    await it.ask("unregister a stranger", 35, gone | {"clientID": "nobody"}, by_other=True)


async def in_binary(it: Conversation) -> None:
    """What was asked before, with the other kind of header."""
    it.serialization = Serialization.ROCKETMQ
    await it.send("binary: send", "Orders", queueId=1)
    await it.send("binary: send to a bad name", "a b")
    await it.send("binary: send by code 310", "Many", code=310, **_short("Many"))
    await it.until_written("Orders", 1, queue_id=1)
    await it.pull("binary: pull", "Orders", 0, queueId=1)
    await it.pull("binary: pull at the end", "Orders", 1, queueId=1)
    await it.ask("binary: max offset", 30, {"topic": "Orders", "queueId": 0})
    await it.ask("binary: heartbeat", 34, body=_heartbeat(CLIENT, "Orders", "*", version=7))
    await it.ask("binary: members", 38, {"consumerGroup": "team"})
    await it.ask("binary: unknown code", 4711)
    it.serialization = Serialization.JSON


#: In this order; later parts build on what earlier ones left.
PARTS = (
    topics,
    sends,
    transactions,
    deliveries,
    pulls,
    offsets,
    members,
    locks,
    send_backs,
    messages,
    groups,
    resets,
    statistics,
    in_binary,
    the_rest,
)


def properties(**own: str) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in own.items())


def _topic(topic: str, queues: int, perm: int) -> Fields:
    return {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": perm,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }


def _short(topic: str, *, batch: bool = False) -> dict[str, object]:
    """The fields of a send under the names of code 310, in the place of the long ones."""
    long = (
        "producerGroup topic defaultTopic defaultTopicQueueNums queueId sysFlag bornTimestamp flag "
        "properties reconsumeTimes unitMode batch"
    )
    values = ("makers", topic, "TBW102", 4, 0, 0, BORN, 0, "", 0, False)
    short = dict(zip("abcdefghijk", values, strict=True))
    return dict.fromkeys(long.split()) | short | {"m": batch}


def _batch(*bodies: bytes) -> bytes:
    """A batch as clients write it: each message with a property of its own."""
    whole = b""
    for number, body in enumerate(bodies):
        own = properties(UNIQ_KEY=f"batch-{number}").encode()
        rest = struct.pack(">iiii", 0, 0, 0, len(body)) + body + struct.pack(">h", len(own)) + own
        whole += struct.pack(">i", 4 + len(rest)) + rest
    return whole


def _subscription(topic: str, expression: str, version: int = 0) -> Fields:
    return {
        "topic": topic,
        "subString": expression,
        "tagsSet": [],
        "codeSet": [],
        "subVersion": version,
        "expressionType": "TAG",
        "classFilterMode": False,
    }


def _heartbeat(client: str, topic: str, expression: str, *, version: int) -> Fields:
    consumer = {
        "groupName": "team",
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [_subscription(topic, expression, version)],
        "unitMode": False,
    }
    return {
        "clientID": client,
        "producerDataSet": [{"groupName": "makers"}],
        "consumerDataSet": [consumer],
    }


def _queue_rows(topic: str, index: int, count: int) -> Fields:
    return {
        "topic": topic,
        "queueId": 0,
        "index": index,
        "count": count,
        "consumerGroup": "billing",
    }


def _of(group: str) -> Fields:
    return {"topic": "Orders", "queueId": 0, "consumerGroup": group}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_none(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}
