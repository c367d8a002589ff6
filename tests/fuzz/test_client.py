"""A client whose servers answer nonsense: it says so, in time, with an error of its own.

Answers have the right number, so that somebody waits for them, and something wrong in them; or
they are recorded frames that were spoilt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import OrbitError
from orbitmq.wire.bodies import BrokerData, QueueData, TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode, WireError
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.javajson import encode_body
from tests.support.fuzzing import body_like, fuzz_seed, note_inputs, rounds
from tests.support.mutations import EDGES, ODD_TEXTS, Corpus

SEED = fuzz_seed(7)
ROUNDS = rounds(60)
#: What a client is given for one call, and what it may take with all that comes after.
PATIENCE = 0.3
DEADLINE = 30.0


class Nonsense:
    """A name server and broker that answers anything."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._corpus = Corpus()
        self._answers = [
            command
            for conversation in self._corpus.conversations
            for frame in conversation
            if (command := _decoded(frame)) is not None and command.flag & 1
        ]
        self.address = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield self.address
        finally:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        try:
            while heard := await reader.read(65_536):
                for frame in frames.feed(heard):
                    writer.write(self._answer(decode_command(frame)))
                await writer.drain()
        except (ConnectionError, WireError):
            pass
        finally:
            writer.close()

    def _answer(self, request: Command) -> bytes:
        chance = self._chance
        if chance.random() < 0.15:
            return self._corpus.mutated(chance)
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC and chance.random() < 0.8:
            answer = Command(code=0, opaque=request.opaque, flag=1, body=self._route())
        else:
            answer = chance.choice(self._answers)
        fields = dict(answer.ext_fields)
        for _ in range(chance.choice((0, 0, 1, 2))):
            name = chance.choice((*fields, "nextBeginOffset", "maxOffset", "queueOffset", "msgId"))
            fields[name] = str(chance.choice((*EDGES, *ODD_TEXTS)))[:4000]
        body = bytes(answer.body)
        if body and chance.random() < 0.4:
            at = chance.randrange(len(body))
            body = body[:at] + chance.randbytes(chance.randint(0, 8)) + body[at + 4 :]
        code = answer.code
        if chance.random() < 0.3:
            code = chance.choice((*(int(each) for each in ResponseCode), -1, 99999))
        answer = msgspec.structs.replace(answer, code=code, opaque=request.opaque, body=body)
        return encode_command(answer.with_fields(fields))

    def _route(self) -> bytes:
        """One that leads here, most of the time."""
        if self._chance.random() < 0.3:
            return body_like(TopicRouteData, self._chance)
        broker = BrokerData(
            cluster="DefaultCluster", broker_name="broker-a", broker_addrs={0: self.address}
        )
        queues = QueueData(
            broker_name="broker-a", read_queue_nums=2, write_queue_nums=2, perm=6, topic_sys_flag=0
        )
        return encode_body(TopicRouteData(broker_datas=(broker,), queue_datas=(queues,)))


def _decoded(frame: bytes) -> Command | None:
    (found,) = FrameReader().feed(frame)
    return decode_command(found)


@pytest.mark.timeout(1200)
async def test_nonsense_from_servers_is_an_error_in_time_and_nothing_else(caplog):
    caplog.set_level(logging.WARNING)
    chance = random.Random(SEED)
    tasks = len(asyncio.all_tasks())
    outcomes = {"answered": 0, "refused": 0}
    async with Nonsense(chance).listening() as address:
        for number in range(ROUNDS):
            use = (_send, _look_up, _poll, _administer)[number % 4]
            async with asyncio.timeout(DEADLINE):
                outcomes[await _outcome(use, address)] += 1

    async with asyncio.timeout(DEADLINE):
        while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110  # tasks have no event
            await asyncio.sleep(0.01)
    assert all(outcomes.values()), outcomes
    note_inputs(ROUNDS)
    unexpected = [each for each in caplog.records if each.name == "asyncio" or _is_ours(each)]
    assert [caplog.handler.format(each)[-2000:] for each in unexpected] == []


def _is_ours(record: logging.LogRecord) -> bool:
    """A traceback of something else than a declared error."""
    error = record.exc_info[1] if record.exc_info else None
    return error is not None and not isinstance(error, OrbitError)


async def _outcome(use: Callable[[ClientSettings], Awaitable[object]], address: str) -> str:
    settings = ClientSettings(
        name_servers=(address,), request_timeout=PATIENCE, stop_timeout=PATIENCE
    )
    try:
        await use(settings)
    except OrbitError as error:
        return "refused" if str(error) else "refused without a word"
    return "answered"


async def _send(settings: ClientSettings) -> None:
    sending = SendSettings(timeout=PATIENCE)
    async with AsyncProducer("makers", client=settings, sending=sending) as producer:
        await producer.send("orders", b"x")


async def _look_up(settings: ClientSettings) -> None:
    async with AsyncProducer("makers", client=settings) as producer:
        await producer.queues("orders")


async def _poll(settings: ClientSettings) -> None:
    async with AsyncPullConsumer("billing", client=settings) as consumer:
        await consumer.assign([Queue("orders", "broker-a", 0)])
        for message in await consumer.poll(timeout=PATIENCE):
            assert message.queue_offset is not None


async def _administer(settings: ClientSettings) -> None:
    async with AsyncAdmin(client=settings) as admin:
        await admin.topics.list()
