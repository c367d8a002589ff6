"""The same requests to Apache's broker and to ours: the answers are the same.

What is compared: the code, the names and values of header fields, and the body, taken apart to its
single values. Addresses, times and offsets in the log are put in general terms first. Remarks are
prose for people and not compared. Every difference that remains must be in `ACCEPTED`, with its
reason, and everything in `ACCEPTED` must be a difference.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.message.stored import decode_messages
from orbitmq.testing import EmbeddedCluster
from orbitmq.wire.javajson import ObjectKey, parse
from tests.interop.apache import Broker, Release
from tests.interop.apache import NameServer as ApacheNameServer
from tests.interop.questions import MAX_MESSAGE, converse
from tests.support.maven import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orbitmq.broker.settings import BrokerSettings
    from orbitmq.wire.command import Command
    from orbitmq.wire.javajson import Value

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

VERSION = "5.5.0"

MADE_UP = "a unique id that the broker made"
SAMPLED = "a rate or sum of now, and not of the last sample"
OWN = "ours tells more about itself"

#: `question path` (with wildcards) of differences, and why they are accepted.
ACCEPTED: dict[str, str] = {
    "all topic configs body.deletedTopics.*": "for our slaves, which forget what was deleted",
    "binary: * kind of header": "ours answers in kind, Apache's in the kind that it is set to",
    # Sending.
    "send without a body header.*": "Apache's broker fails there, and its answer then lacks these",
    "send half a batch code": "Apache's broker fails (1); ours says that the message is bad (13)",
    "send without * header.transactionId": MADE_UP,
    "*send by code 310 header.transactionId": MADE_UP,
    "send with a delay beyond header.transactionId": MADE_UP,
    "send with a timer header.recallHandle": "names a time, which ours keeps to the millisecond",
    "pull a timed message message?0].properties.TIMER_*": "times inside of Apache's timing wheel",
    # Pulling.
    "pull by bad SQL code": (
        "ours refuses; Apache's sends everything: what should refuse is an assertion, and those "
        "are off in Java"
    ),
    "pull by unknown type code": "as with bad SQL",
    "binary: pull code": (
        "the group was reset to where it pulls from; Apache's moves it there, and stops it for that"
    ),
    "pull a dead letter message?0].properties.DLQ_*": "ours says where it comes from, and why",
    "*heartbeat* header.dedupWindow": "for how long, and for how many, ours remembers ids",
    # Questions about messages.
    "by *key header.indexLastUpdatePhyoffset": "an offset in the log, whose records differ in size",
    "by unknown key header.indexLastUpdateTimestamp": "ours says how far the index is in any case",
    "consume queue body.filterData": "always null, which ours leaves out",
    "consume queue body.subscriptionData.subVersion": "the time of the question; nobody reads it",
    "consume queue of an unknown code": "ours refuses; Apache's makes the queue by looking for it",
    "progress in an * code": (
        "ours answers 0 for a queue that never had a message, as Apache's 4.9 does, so that a new "
        "group cannot skip the first one (`broker.progress.zero_for_empty`)"
    ),
    # Groups and topics.
    "groups after one was deleted *": "Apache's cleans up after a group, and thereby makes it anew",
    "* body.*RMQ_SYS_ROCKSDB_TRANS_*": "of a kind of store that ours does not have",
    "all topic configs header.totalTopicNum": "these two",
    "all topic configs body.mappingDataVersion.timestamp": "ours has no static topics",
    "all producers body.data.makers*.remoteIP": "Java writes a slash in front of an address",
    # Progress.
    "all delay progress body.*": (
        "Apache's lists levels once something was delivered; the version counts what was saved"
    ),
    "all progress body.groupTopicMap*": "an index of the other tables, left in by accident",
    "all progress body.pullOffsetTable*": "not kept over a restart, so a slave has no use for it",
    "consume stats body.*.pullOffset": "a reset of ours forgets what had been pulled before",
    "stats of the broker body.*.pullOffset": "Apache's does not fill it in here",
    "stats of the broker body.totalInflightDiff": "made of these",
    "stats of the broker body.*%RETRY%billing.*": "ours counts retries that nobody has begun",
    "stats of the broker body.consumeStatsList.billing?1].consumeTps": "likewise",
    "stats of the broker body.totalDiff": "likewise",
    "stats of the broker body.consumeStatsList.audit": "the deleted group",
    "stats of the broker body.consumeStatsList.never-seen": "likewise, and it never was there",
    "consume span body.*.delayTime": "depends on the time",
    # Statistics: Apache's samples every ten seconds, ours knows at once.
    "stats item body.*": SAMPLED,
    "topic stats body.topicPutTps": SAMPLED,
    "consume stats body.consumeTps": SAMPLED,
    "stats of the broker body.*.consumeTps": SAMPLED,
    "runtime info body.table.commitLogDiskRatio_*": "is named after a folder",
    "runtime info body.table.brokerVersion": "the number beside the name, which ours has too",
    "runtime info body.table.getTransferedTps": "as tools of the old line spell it",
    "runtime info body.table.dedup*": OWN,
    "runtime info body.table.group*": OWN,
    "runtime info body.table.heldPulls": OWN,
    "runtime info body.table.maxAuto*": OWN,
    "runtime info body.table.nameConflicts": OWN,
    "runtime info body.table.refused*": OWN,
    "runtime info body.table.store*": OWN,
    "runtime info body.table.topics": OWN,
    "runtime info body.table.unreachableNameServers": OWN,
}

#: Of these answers only the names are compared; the values are measurements.
MEASUREMENTS = frozenset({"runtime info"})


def test_our_broker_answers_as_apaches_does(tmp_path):
    theirs = _taken_apart(*_ask_apache(tmp_path))
    ours = _taken_apart(*_ask_ours(tmp_path))

    different = sorted(_differences(ours, theirs))
    unexplained = [line for line, key in different if not _reasons(key)]
    assert not unexplained, "\n".join(["differences without a reason:", *unexplained])
    used = {pattern for _, key in different for pattern in _reasons(key)}
    assert set(ACCEPTED) == used, "reasons without a difference"


NOTHING = "(nothing)"
Answers = tuple[str, "dict[str, Command | None]"]
Values = dict[str, dict[str, str]]


def _ask_apache(folder: Path) -> Answers:
    try:
        release = Release.obtain(VERSION)
    except Unavailable as reason:
        pytest.skip(str(reason))
    settings = {
        "maxMessageSize": MAX_MESSAGE,
        "transactionTimeOut": 600_000,
        "transactionCheckInterval": 600_000,
        "messageDelayLevel": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
    }
    with (
        ApacheNameServer.running(release, folder / "names") as names,
        Broker.running(
            release, folder / "apache", names.address, settings=settings, options=("-Xmx512m",)
        ) as broker,
    ):
        return broker.address, asyncio.run(converse(broker.address))


def _ask_ours(folder: Path) -> Answers:
    def adjust(settings: BrokerSettings) -> BrokerSettings:
        return replace(settings, send=replace(settings.send, max_message_size=MAX_MESSAGE))

    with EmbeddedCluster(folder=folder / "ours", adjust=adjust) as cluster:
        (address,) = cluster.broker_addresses
        return address, asyncio.run(converse(address))


# Comparing.


def _differences(ours: Values, theirs: Values) -> Iterator[tuple[str, str]]:
    """What differs, for people and as a key to `ACCEPTED`."""
    for question in theirs:
        here, there = ours[question], theirs[question]
        paths = here.keys() | there.keys()
        if here.get("code") != there.get("code"):
            paths = {"code"}  # and everything else follows from that
        for path in sorted(paths):
            mine, other = here.get(path, NOTHING), there.get(path, NOTHING)
            is_measured = question in MEASUREMENTS and NOTHING not in (mine, other)
            if mine != other and not is_measured:
                yield f"{question} {path}: ours {mine}, Apache's {other}", f"{question} {path}"


def _reasons(key: str) -> list[str]:
    return [pattern for pattern in ACCEPTED if fnmatch.fnmatchcase(key, pattern)]


def _taken_apart(address: str, answers: dict[str, Command | None]) -> Values:
    general = Generalisation(address)
    return {
        question: _values(answer, general) if answer is not None else {"": "no answer"}
        for question, answer in answers.items()
    }


class Generalisation:
    """Puts what no two brokers have in common in general terms."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __call__(self, text: str) -> str:
        text = _OFFSET_ID.sub("<offset id>", text.replace(self._address, "<broker>"))
        text = _CLIENT.sub("<client>", text)
        return _TIME.sub("<time>", text)


#: The broker's address and port, and the offset in its log.
_OFFSET_ID = re.compile(r"7F000001[0-9A-F]{8}[0-9A-F]{16}")
_CLIENT = re.compile(r"127\.0\.0\.1:\d+")
#: Of these years, as a number or as tools show it. What the questions give is older.
_TIME = re.compile(r"\b1[789][1-9]\d{10}\b|\b20\d\d-\d\d-\d\d#[\d:]+")

#: Magic numbers of records, with short and long lengths of topics.
_RECORDS = (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xa3")
_FIELDS = (
    "topic",
    "queue_id",
    "queue_offset",
    "flag",
    "sys_flag",
    "born_ms",
    "reconsume_times",
    "body",
    "transaction_type",
)


def _values(answer: Command, general: Generalisation) -> dict[str, str]:
    """Every single value of an answer, by its path."""
    found = {"code": str(answer.code), "kind of header": answer.serialization.name}
    found |= {f"header.{name}": general(text) for name, text in answer.ext_fields.items()}
    body = bytes(answer.body)
    if body[4:8] in _RECORDS:
        for number, message in enumerate(decode_messages(body)):
            at = f"message[{number}]"
            found |= {f"{at}.{name}": str(getattr(message, name)) for name in _FIELDS}
            for name, text in message.properties.items():
                found[f"{at}.properties.{name}"] = general(text)
    elif body:
        found.update(_leaves("body", parse(body.decode()), general))
    return found


def _leaves(path: str, value: Value, general: Generalisation) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            if isinstance(key, ObjectKey):
                key = "-".join(str(part) for _, part in sorted(key))
            yield from _leaves(f"{path}.{general(str(key))}", each, general)
    elif isinstance(value, list) and value:
        # Most are sets in Java, in any order; some are maps in disguise. What one broker tells of
        # retries and the other does not must not move the rest.
        inside = sorted(
            (sorted(_leaves("", each, general)) for each in value),
            key=lambda leaves: ("%RETRY%" in str(leaves), leaves),
        )
        for number, leaves in enumerate(inside):
            for rest, text in leaves:
                if not rest:
                    yield f"{path}.{text}", "listed"
                else:
                    yield f"{path}{'' if _is_map(value) else f'[{number}]'}{rest}", text
    else:
        yield path, general(str(value))


def _is_map(value: list[Value]) -> bool:
    return all(isinstance(each, dict) and len(each) == 1 for each in value)
