"""Our answers to administration beside those of Apache's brokers, as recorded.

The same questions, asked by Apache's tools of 4.9 and 5.x, are put to our broker in a like state:
the codes are the same, and whatever an answer of Apache's has, ours has too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.javajson import Value, parse
from tests.support.admin import consumer_that, of_version, subscription
from tests.support.broker import RawClient

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"

GROUP = "admins"
CLIENT = "127.0.0.1@driver"
ADMINISTRATION = frozenset(
    {
        Code.GET_TOPIC_STATS_INFO,
        Code.GET_TOPIC_CONFIG,
        Code.GET_CONSUME_STATS,
        Code.GET_BROKER_RUNTIME_INFO,
        Code.GET_ALL_TOPIC_CONFIG,
        Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        Code.QUERY_TOPIC_CONSUME_BY_WHO,
        Code.GET_CONSUMER_CONNECTION_LIST,
        Code.GET_PRODUCER_CONNECTION_LIST,
        Code.GET_CONSUMER_RUNNING_INFO,
        Code.QUERY_CONSUME_TIME_SPAN,
    }
)
#: Maps whose keys are names or queues: what counts is what their values have.
TABLES = frozenset({"offsetTable", "topicConfigTable", "subscriptionGroupTable", "mqTable"}) | {
    "subscriptionTable",
    "forbiddenTable",
    "statusTable",
    "mqPopTable",
    "properties",
}
#: Keys of runtime information that depend on where the store is and what is in it.
VARYING = ("commitLogDiskRatio_", "scheduleMessageOffset_")


def exchanges(version: str, form: str) -> Iterator[tuple[Command, Command]]:
    """Questions about administration and what Apache's broker answered."""
    stem = f"{version}-admin-{form}"
    answers = {answer.opaque: answer for answer in _commands(f"{stem}-to-client.frames")}
    for request in _commands(f"{stem}-to-server.frames"):
        if not request.is_response and request.code in ADMINISTRATION and request.opaque in answers:
            yield request, answers[request.opaque]


def _commands(name: str) -> list[Command]:
    return list(map(decode_command, FrameReader().feed((RECORDINGS / name).read_bytes())))


def paths(value: Value, at: str = "") -> Iterator[str]:
    """Where an answer has something."""
    yield at
    if isinstance(value, list):
        for entry in value:
            yield from paths(entry, f"{at}[]")
    elif isinstance(value, dict):
        is_table = at.rpartition(".")[2] in TABLES
        for key, entry in value.items():
            name = "*" if is_table else str(key)
            if not name.startswith(VARYING):
                yield from paths(entry, f"{at}.{name}")


def body_of(answer: Command) -> Value:
    return parse(bytes(answer.body).decode()) if answer.body else None


@pytest.mark.parametrize("form", ["json", "binary"])
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
async def test_answers_have_apaches_codes_and_everything_that_apaches_have(broker, version, form):
    recorded = list(exchanges(version, form))
    running = next(
        bytes(answer.body)
        for request, answer in recorded
        if request.code == Code.GET_CONSUMER_RUNNING_INFO
    )

    def running_info(_, request):
        return request.answer(0, remark="not set any response code", body=running)

    consumer = await consumer_that(broker, {Code.GET_CONSUMER_RUNNING_INFO: running_info})
    await _prepare(consumer)

    different: dict[str, object] = {}
    for request, theirs in recorded:
        tool = await consumer_that(broker, {}, version=request.version)
        ours = await tool.connection.request(
            request.code, extra=dict(request.ext_fields), serialization=request.serialization
        )
        await tool.close()
        missing = set(paths(body_of(theirs))) - set(paths(body_of(ours)))
        lacking = theirs.ext_fields.keys() - ours.ext_fields.keys()
        if (ours.code, ours.remark) != (theirs.code, theirs.remark) or missing or lacking:
            different[f"{request.code} {dict(request.ext_fields)}"] = (ours, missing, lacking)
    await consumer.close()

    assert len({request.code for request, _ in recorded}) >= 9
    assert different == {}


async def _prepare(consumer: RawClient) -> None:
    for number in range(3):
        await consumer.stored("Orders", queue_id=number % 2, default_topic_queue_nums=2)
    await consumer.heartbeat(
        CLIENT, subscription("Orders"), subscription(f"%RETRY%{GROUP}"), group=GROUP
    )
    for queue_id in range(2):
        await consumer.pull("Orders", queue_id, consumer_group=GROUP)
        await consumer.report("Orders", 1, queue_id, consumer_group=GROUP)


def test_a_shape_is_where_something_is():
    document: Mapping[str, str] = {"a": '{"x":[{"y":1}],"offsetTable":{"k":{"z":2}}}'}

    assert set(paths(parse(document["a"]))) == {
        *("", ".x", ".x[]", ".x[].y"),
        *(".offsetTable", ".offsetTable.*", ".offsetTable.*.z"),
    }
    assert of_version(1)(Command(1, 1)).version == 1
