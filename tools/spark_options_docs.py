"""Writes docs/reference/spark-options.md: `python -m tools.spark_options_docs`.

Which options there are, for what, and their defaults come from `orbitmq.spark.options`; what they
mean is written here. An option without a meaning, or a meaning without an option, is an error.

`--check` only says whether the page is current; a test does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from orbitmq.spark import options as declared
from orbitmq.spark.options import ACCESS_OPTIONS
from tools.madepages import keep_current

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "spark-options.md"

_HEAD = """\
# Spark options

This page is made by `python -m tools.spark_options_docs` from the code; edit it there. The guide is
[Spark](../spark.md).

Names are those of Spark's Kafka source where the meaning is the same, and are read without regard
to case. A name that is not known is refused, and so is a bad value, in any kind of query. What is
for batches only is refused by a stream; any other option that belongs to another kind of query is
warned of on the driver. Offsets in JSON: -2 is the earliest, -1 the latest; queues are named
`broker-a:0`. Times are milliseconds, or ISO texts with their zone. Ages such as `-1h` count back
from the start of the query.
"""

_SECTIONS: tuple[tuple[str, Iterable[str]], ...] = (
    ("Reaching the cluster", ACCESS_OPTIONS),
    ("Reading, batch and stream", declared.READ_OPTIONS),
    ("Streams only", declared.STREAM_OPTIONS),
    ("Batches only", declared.BATCH_OPTIONS),
    ("Writing", declared.WRITE_OPTIONS),
)

_MEANING = {
    "nameServer": "`host:port` of the name server; several separated by `;`.",
    "accessKey": "The account that requests are signed for; else `ORBITMQ_ACCESS_KEY`.",
    "secretKey": "Its secret; else `ORBITMQ_SECRET_KEY`. Not in plans or logs.",
    "securityToken": "Of a temporary account.",
    "tls.enabled": "Speak TLS to all servers.",
    "tls.authority": "A file of certificates to trust, in PEM; the machine's by default.",
    "tls.certificate": "A file with our own certificate, where servers ask for one.",
    "tls.key": "A file with its key.",
    "tls.keyPassword": "The password of that file.",
    "tls.verify": "Whether certificates of servers are checked.",
    "tls.verifyHost": "Whether they must be made out for the address that is asked.",
    "subscribe": "Topics with commas between them. One of `subscribe`, `subscribePattern` and "
    "`assign` is needed.",
    "topic": "Reading: the same as `subscribe`. Writing: where all rows go, whatever a column "
    "`topic` says; without the option, every row says it in that column.",
    "subscribePattern": "A regular expression for names of topics.",
    "assign": 'Single queues, as JSON: `{"orders": ["broker-a:0"]}`.',
    "group": "The group whose progress is reported, and read with `startingOffsets=group`. Without "
    "it a query reports nothing, is no member of a group and leaves none at the broker: it pulls "
    "as `TOOLS_CONSUMER`, which every broker has.",
    "groupPrefix": "Without `group`: pull as a group of a made-up name that begins so, the same "
    "for the same subscription, which brokers then make and keep. For accounts that are allowed "
    "groups by their prefix.",
    "subExpression": "A filter that runs at the broker: tags as in `a \\|\\| b`, or SQL92.",
    "subExpressionType": "`TAG` or `SQL92`.",
    "startingOffsets": "`earliest`, `latest` (streams), `group`, a time (`2026-11-18T09:00` "
    "in the driver's zone, `-10m`), an offset, so many messages before the end of each queue "
    "(`-1000`), or JSON for each queue.",
    "startingTimestamp": "Begin with what was stored at or after this time or age (`-1h`); wins "
    "over the next and over `startingOffsets`.",
    "startingOffsetsByTimestamp": "The same as JSON, for each queue.",
    "startingOffsetsByTimestampStrategy": "When a queue has nothing that young: `error` or "
    "`latest`; for an age it is `latest` unless given.",
    "failOnDataLoss": "Fail when wanted offsets are not there; else warn, leave out what is gone, "
    "read a queue that was made anew from its beginning, and go on at the present end of one that "
    "ends before the wanted offset.",
    "archive": "The place of an archive (`orbitmq archive`, `broker.archive.folder`): a folder or "
    "a URI that driver and executors reach. What brokers have deleted is read from there.",
    "minPartitions": "Cut queues so that there are about that many tasks.",
    "maxRecordsPerPartition": "Cut queues into pieces of at most that many messages.",
    "includeProperties": "Whether there is a column `properties`.",
    "bodyFormat": "Reading: decode bodies to the column `value`: `json`, `avro`, `protobuf`, "
    "`text` or `variant`. Writing: make bodies of the column `value`, or of all columns that "
    "messages do not have.",
    "bodySchema": "Of `json`: the fields as DDL, `id BIGINT, name STRING`, or `df.schema.json()`; "
    "not needed for writing. Of `avro`: the schema in JSON, or a file of it. Of `protobuf`: "
    "`orders.desc#shop.Order`, a file that `protoc --include_imports -o orders.desc` makes and a "
    "message type. Files are read on the driver.",
    "badBodies": "What becomes of a body that does not fit: `corrupt` has its reason and its bytes "
    "in the column `_corrupt`, `null` only a null `value`, `fail` ends the query.",
    "includeBody": "With `bodyFormat`: whether there is a column `body` as well.",
    "pullBatchSize": "Messages that one request asks for.",
    "pullTimeoutMs": "How long a broker may take for an answer.",
    "fetchOffset.numRetries": "How often a question for offsets is repeated.",
    "fetchOffset.retryIntervalMs": "The pause before it is.",
    "metadata.cache.ttl.ms": "How long a route is believed; new queues show by then. -1: 30 s.",
    "commitProgress": "Report finished batches to the broker, the last one included.",
    "maxOffsetsPerTrigger": "Messages of one batch, at most; split in proportion to backlogs.",
    "maxBytesPerTrigger": "Bytes of stored messages of one batch, about: `67108864`, `64m`. "
    "Estimated from some messages of each queue, spread over what would be read.",
    "minRowsPerTopic": "Messages of each topic in a limited batch, before the rest is split; equal "
    "parts if the limit has no room for that.",
    "minOffsetsPerTrigger": "Wait for that many,",
    "maxTriggerDelay": "but no longer than this: `30s`, `15m`.",
    "drainFile": "While this file exists, no batch begins: how a runner brings a stream to rest.",
    "endingOffsets": "Where to end, exclusive: `latest`, a time, an offset, so many messages "
    "before the end (`-1000`), or JSON for each queue.",
    "endingTimestamp": "End before what was stored at or after this time or age.",
    "endingOffsetsByTimestamp": "The same as JSON, for each queue.",
    "queues": "Only these queues: `broker-a:0`, or plain numbers for that queue of every broker.",
    "fromOffset": "Only from this offset on, in every queue.",
    "toOffset": "Only below this offset, in every queue.",
    "createTopic": "Whether rows may go to a topic that does not exist. Brokers create it then, if "
    "they are configured to.",
    "producerGroup": "The group that messages are sent as.",
    "sendTimeoutMs": "How long a frame of messages is tried.",
    "sendBatchBytes": "Bytes of messages that are sent together.",
    "exactlyOnce": "Whether brokers drop a row that they have stored already: `true` needs OrbitMQ "
    "brokers that de-duplicate, `false` is at least once. By default the rows of a stream are "
    "de-duplicated where all brokers can, and those of a batch are not.",
    "badRows": "What happens to a row that is no message: `fail`, or `skip` it with a warning.",
}

_LEAST = {"nameServer": "localhost:9876", "subscribe": "orders"}


def main(arguments: Sequence[str] | None = None) -> int:
    return keep_current(PAGE, page, "tools.spark_options_docs", __doc__, arguments)


def page() -> str:
    """The whole page. Raises `ValueError` when options and meanings do not fit together."""
    known = {name for _, names in _SECTIONS for name in names}
    if missing := sorted(known ^ _MEANING.keys()):
        raise ValueError(f"tools/spark_options_docs.py has to be told about {', '.join(missing)}")
    defaults = _defaults()
    parts = [_HEAD]
    for title, names in _SECTIONS:
        parts.append(f"\n## {title}\n\n| option | default | meaning |\n|---|---|---|\n")
        for name in dict.fromkeys(names):
            default = defaults.get(name, "")
            parts.append(f"| `{name}` | {default} | {_MEANING[name]} |\n")
    return "".join(parts)


def _defaults() -> dict[str, str]:
    """Read out of what the options become when nothing but the least is given."""
    stream = declared.stream_options(_LEAST, {})
    batch = declared.batch_options(_LEAST, {})
    write = declared.write_options({"nameServer": _LEAST["nameServer"]}, {})
    read = stream.read
    milliseconds: Callable[[float], str] = lambda seconds: f"`{round(seconds * 1000)}`"  # noqa: E731
    flag: Callable[[bool], str] = lambda value: f"`{str(value).lower()}`"  # noqa: E731
    place: Callable[[Any], str] = lambda value: f"`{type(value).__name__.lower()}`"  # noqa: E731
    return {
        "nameServer": "required",
        "group": "none",
        "groupPrefix": "none",
        "subExpression": "`*`",
        "subExpressionType": "`TAG`",
        "startingOffsets": f"stream {place(read.start)}, batch {place(batch.read.start)}",
        "startingOffsetsByTimestampStrategy": "`error`",
        "failOnDataLoss": flag(read.fail_on_data_loss),
        "includeProperties": flag(declared.include_properties(_LEAST)),
        "badBodies": f"`{declared.READ_OPTIONS['badBodies'].default}`",
        "includeBody": "`false`",
        "pullBatchSize": f"`{read.pull_size}`",
        "pullTimeoutMs": milliseconds(read.access.timeout),
        "fetchOffset.numRetries": f"`{read.offset_retries}`",
        "fetchOffset.retryIntervalMs": milliseconds(read.offset_pause),
        "metadata.cache.ttl.ms": milliseconds(read.route_life),
        "commitProgress": "`true` if `group` is given",
        "maxTriggerDelay": f"`{round(stream.max_delay / 60)}m`",
        "endingOffsets": place(batch.end),
        "producerGroup": f"`{write.producer_group}`",
        "sendTimeoutMs": milliseconds(write.timeout),
        "sendBatchBytes": f"`{write.frame_bytes}`",
        "exactlyOnce": "of a stream: what brokers can do",
        "badRows": "`skip`" if write.skip_bad_rows else "`fail`",
    }


if __name__ == "__main__":
    sys.exit(main())
