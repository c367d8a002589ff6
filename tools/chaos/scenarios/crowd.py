"""R23: many small things: topics, groups, connections."""

from __future__ import annotations

import asyncio
import time
import urllib.request

from orbitmq.remoting.channels import Channels
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.bodies import (
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import CreateTopicRequest
from orbitmq.wire.javajson import encode_body
from tools.chaos.census import census
from tools.chaos.effort import Effort
from tools.chaos.figures import Figure, at_most, none_of, told, tried
from tools.chaos.programs import Broker, Program, ScenarioFailed, Stage, free_port, wait_until

_DEADLINE = 120.0


def crowd(stage: Stage, effort: Effort) -> list[Figure]:
    """1,000 topics, 2,500 groups and 1,000 connections; a tenth of that in a short run."""
    share = 1.0 if effort.seconds >= 10 else 0.1
    topics, groups, clients = int(1000 * share), int(2500 * share), int(1000 * share)
    broker = stage.broker("broker-a")
    broker.start()
    return asyncio.run(_crowd(stage, broker, topics, groups, clients))


async def _crowd(
    stage: Stage, broker: Broker, topics: int, groups: int, clients: int
) -> list[Figure]:
    made = await _make_topics(broker, topics)
    channels = [Channels() for _ in range(clients)]
    try:
        bodies = [_heartbeat(number, topics, groups, clients) for number in range(clients)]
        await _beat(broker, channels, bodies)  # the first makes the groups
        used = []
        for _ in range(3):
            before = census(broker.running.pid).cpu
            await _beat(broker, channels, bodies)
            used.append(census(broker.running.pid).cpu - before)
        painted = await asyncio.to_thread(_first_paint, stage)
        held = census(broker.running.pid)
    finally:
        for each in channels:
            await each.close()
    return [
        tried("R23", "topics", topics),
        tried("R23", "groups", groups),
        tried("R23", "connections", clients),
        told("R23", "topics made in", made, "s"),
        at_most("R23", "broker's CPU of a round of heartbeats (30 s)", min(used), 1.0, "s"),
        at_most("R23", "console's first page", painted, 1.0, "s"),
        told("R23", "broker's memory", held.memory / 1024 / 1024, "MiB"),
        none_of("R23", "complaints in logs", stage.complaints()),
    ]


async def _make_topics(broker: Broker, count: int) -> float:
    began = time.monotonic()
    channels, address = Channels(), parse_address(broker.address)
    try:
        async with asyncio.timeout(_DEADLINE):
            for number in range(count):
                header = CreateTopicRequest(
                    topic=f"topic-{number}",
                    default_topic="TBW102",
                    read_queue_nums=4,
                    write_queue_nums=4,
                    perm=6,
                    topic_filter_type="SINGLE_TAG",
                    order=False,
                )
                answer = await channels.request(
                    address, RequestCode.UPDATE_AND_CREATE_TOPIC, header, timeout=10
                )
                if answer.code != ResponseCode.SUCCESS:
                    raise ScenarioFailed(f"a topic was refused: {answer.remark}")
    finally:
        await channels.close()
    return time.monotonic() - began


def _heartbeat(number: int, topics: int, groups: int, clients: int) -> bytes:
    """The heartbeat of a client with its share of the groups, two topics each."""
    consumers = tuple(
        ConsumerData(
            group_name=f"group-{group}",
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            message_model=MessageModel.CLUSTERING,
            subscription_data_set=tuple(
                SubscriptionData(topic=f"topic-{(group + more) % topics}", sub_string="*")
                for more in range(2)
            ),
        )
        for group in range(number, groups, clients)
    )
    return encode_body(HeartbeatData(client_id=f"127.0.0.1@{number}", consumer_data_set=consumers))


async def _beat(broker: Broker, channels: list[Channels], bodies: list[bytes]) -> None:
    address = parse_address(broker.address)
    gate = asyncio.Semaphore(64)

    async def beat(each: Channels, body: bytes) -> None:
        async with gate:
            answer = await each.request(address, RequestCode.HEART_BEAT, body=body, timeout=30)
            if answer.code != ResponseCode.SUCCESS:
                raise ScenarioFailed(f"a heartbeat was refused: {answer.remark}")

    async with asyncio.timeout(_DEADLINE):
        await asyncio.gather(*map(beat, channels, bodies))


def _first_paint(stage: Stage) -> float:
    """Until the page with its first data is there, of a console that has looked once."""
    port = free_port()
    words = ["-m", "orbitmq.cli", "console", "--name-server", stage.name_server]
    words += ["--port", str(port), "--json", "--log-level", "warning"]
    program = stage.add(Program("console", words, stage.folder / "console.log"))
    page = f"http://127.0.0.1:{port}/"

    def has_looked() -> bool:
        if not program.is_alive:
            raise ScenarioFailed(f"the console ended: {program.output()[-2000:]}")
        try:
            return b'"brokers":[{' in _get(page)
        except OSError:
            return False

    wait_until(has_looked, "the console shows the broker", _DEADLINE)
    return min(_timed(page) for _ in range(3))


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310  # our own page
        return bytes(answer.read())


def _timed(address: str) -> float:
    began = time.monotonic()
    _get(address)
    return time.monotonic() - began
