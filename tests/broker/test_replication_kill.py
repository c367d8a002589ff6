"""A master and a slave as processes, killed at any instant; what was promised is kept."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest

from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import RemotingError, parse_address
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.headers import SendMessageResponse
from tests.support.broker import RawClient, messages_in, until
from tests.support.command import Started
from tests.support.replication import log_bytes

pytestmark = pytest.mark.timeout(180)

#: Stored, but perhaps only by the master.
HALF = (ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT)
FILE_SIZE = 4 * 1024 * 1024
SETTINGS = (f"store.file_size={FILE_SIZE}", "replication.heartbeat=0.5", "replication.retry=0.1")


@pytest.fixture
async def start_process(tmp_path):
    async with AsyncExitStack() as stack:

        async def start(root, *settings, port=0):
            words = [
                word for each in (*SETTINGS, *settings) for word in ("--set", f"broker.{each}")
            ]
            data = str(tmp_path / root)
            started = await asyncio.to_thread(
                Started, "broker", "--data", data, "--port", str(port), *words
            )
            stack.push_async_callback(asyncio.to_thread, started.__exit__)
            return started, parse_address(started.address("broker-a"))

        yield start


async def kill(started: Started) -> None:
    started.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(started.process.wait)


class Producer:
    """Sends until it is told to stop, and writes down what it was promised."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self.promised: dict[tuple[int, int], bytes] = {}
        self.half_promised = 0
        self._sent = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            body = b"%d " % self._sent + b"x" * 300
            queue_id = self._sent % 4
            self._sent += 1
            try:
                answer = await self._client.send("orders", body, queue_id=queue_id)
            except RemotingError:
                return
            if answer.code == ResponseCode.SUCCESS:
                place = answer.header(SendMessageResponse)
                self.promised[queue_id, place.queue_offset] = body
            else:
                assert answer.code in HALF, answer.remark
                self.half_promised += 1

    async def until_promised(self, more: int) -> None:
        goal = len(self.promised) + more
        await until(lambda: len(self.promised) >= goal or self._task.done(), 60)
        assert not self._task.done()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self._client.close()


async def read_all(client: RawClient, queue_id: int) -> dict[tuple[int, int], bytes]:
    found: dict[tuple[int, int], bytes] = {}
    offset = 0
    while (answer := await client.pull("orders", queue_id, offset)).code == 0:
        for message in messages_in(answer):
            assert message.queue_offset == len(found)
            found[queue_id, message.queue_offset] = bytes(message.body)
        offset = int(answer.ext_fields["nextBeginOffset"])
    return found


@pytest.mark.feature("I7")
async def test_what_master_and_slave_have_promised_survives_the_death_of_either(
    start_process, tmp_path
):
    free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    ha_port = free.sockets[0].getsockname()[1]
    free.close()
    await free.wait_closed()
    serving = (
        "replication.serve=true",
        "replication.whole_log=true",
        f"replication.port={ha_port}",
    )
    master, address = await start_process("master", *serving, "replication.in_sync_replicas=2")
    following = (
        "broker_id=1",
        f"replication.master={address}",
        f"replication.master_ha=127.0.0.1:{ha_port}",
    )
    producers = [Producer(RawClient(await connect(address), [])) for _ in range(8)]

    slave, _ = await start_process("slave", *following)
    for _ in range(3):
        await producers[0].until_promised(100)
        await kill(slave)
        slave, slave_address = await start_process("slave", *following)
    await producers[0].until_promised(100)
    await kill(master)
    for producer in producers:
        await producer.end()
    promised = {place: body for each in producers for place, body in each.promised.items()}
    reader = RawClient(await connect(slave_address), [])
    async with asyncio.timeout(20):
        while (await reader.pull("orders")).code == ResponseCode.SYSTEM_BUSY:  # noqa: ASYNC110  # another process has no event
            await asyncio.sleep(0.01)
    found = {
        place: body
        for queue_id in range(4)
        for place, body in (await read_all(reader, queue_id)).items()
    }
    await reader.close()

    assert len(promised) >= 400
    assert {place: found.get(place) for place in promised} == promised
    assert sum(each.half_promised for each in producers) > 0
    slave.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(slave.process.wait)
    mine, theirs = log_bytes(tmp_path / "master"), log_bytes(tmp_path / "slave")
    copied = b"".join(theirs.values()).rstrip(b"\0")
    assert len(copied) > FILE_SIZE / 8
    assert b"".join(mine.values())[: len(copied)] == copied
