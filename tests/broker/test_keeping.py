"""What a broker finds in its files after a crash, and how it makes that agree with its messages.

A crash of the process is a copy of the folder, made while the broker runs: what was written is in
the copy. Losing power is a copy in which the messages are older than the progress.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import ProgressSettings
from orbitmq.store.files import DiskFiles
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import DeleteGroupRequest, TopicRequest
from tests.support.broker import GROUP, RawClient, bodies_in, until

StartBroker = Callable[..., Awaitable[Broker]]
OpenClient = Callable[..., Awaitable[RawClient]]

#: Progress is saved as soon as it changes, or not at all before the stop.
QUICKLY = ProgressSettings(save_interval=0.02)
NEVER = ProgressSettings(save_interval=3600.0)


def progress_file(root: Path) -> dict[str, dict[str, int]]:
    path = root / "config" / "consumerOffset.json"
    if not path.exists():
        return {}
    table: dict[str, dict[str, int]] = json.loads(path.read_text())["offsetTable"]
    return table


async def send(client: RawClient, topic: str, count: int, word: bytes) -> list[bytes]:
    bodies = [b"%s %d" % (word, number) for number in range(count)]
    for body in bodies:
        await client.stored(topic, body)
    return bodies


async def consume_all(client: RawClient, topic: str) -> None:
    """As a group that has been through all messages, and says so."""
    await client.pull(topic)
    answer = await client.report(topic, await client.max_offset(topic))
    assert answer.code == ResponseCode.SUCCESS


async def delivered(client: RawClient, topic: str) -> list[bytes]:
    """What the group gets that goes on where the broker says."""
    answer = await client.query(topic)
    return bodies_in(await client.pull(topic, 0, int(answer.ext_fields["offset"])))


async def delete_group(client: RawClient) -> Command:
    return await client.connection.request(
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        DeleteGroupRequest(group_name=GROUP, clean_offset=True),
    )


# Power is lost, and with it the end of the log.


async def test_new_messages_in_the_place_of_lost_ones_are_delivered(
    start_broker, open_client, tmp_path
):
    broker = await start_broker(root="before")
    client = await open_client(broker)
    await send(client, "orders", 5, b"flushed")
    await consume_all(client, "orders")
    await broker.stop()
    # The log has five messages, and the group has consumed ten.
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    path = tmp_path / "after" / "config" / "consumerOffset.json"
    table = {"offsetTable": {f"orders@{GROUP}": {"0": 10}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | table))

    client = await open_client(await start_broker(root="after"))
    new = await send(client, "orders", 8, b"new")

    assert await delivered(client, "orders") == new


async def test_queues_that_are_made_anew_from_the_log_cost_no_progress(
    start_broker, open_client, tmp_path
):
    broker = await start_broker(root="before", progress=QUICKLY)
    client = await open_client(broker)
    await send(client, "orders", 5, b"old")
    await consume_all(client, "orders")
    await until(lambda: progress_file(tmp_path / "before"))
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    shutil.rmtree(tmp_path / "after" / "consumequeue")

    after = await start_broker(root="after")
    client = await open_client(after)
    new = await send(client, "orders", 2, b"new")

    assert after.parts.store.min_offset("orders", 0) == 0
    assert await delivered(client, "orders") == new


# Something is deleted, and the process dies before progress is saved again.


async def test_a_topic_that_is_made_again_is_consumed_from_its_beginning_after_a_crash(
    start_broker, open_client, tmp_path
):
    broker = await start_broker(root="before", progress=QUICKLY)
    client = await open_client(broker)
    await send(client, "orders", 5, b"old")
    await consume_all(client, "orders")
    await until(lambda: progress_file(tmp_path / "before"))
    saved = tmp_path / "before" / "config" / "consumerOffset.json"
    document = saved.read_bytes()

    answer = await client.connection.request(
        RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic="orders")
    )
    assert answer.code == ResponseCode.SUCCESS
    new = await send(client, "orders", 8, b"new")
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    (tmp_path / "after" / "config" / "consumerOffset.json").write_bytes(document)
    client = await open_client(await start_broker(root="after"))

    assert await delivered(client, "orders") == new


class FullDisk(DiskFiles):
    """A disk that takes no configuration while it is full."""

    is_full = False

    def rename(self, source: Path, target: Path) -> None:
        if self.is_full:
            raise OSError(28, "no space left")
        super().rename(source, target)


async def test_a_deletion_of_progress_that_the_disk_did_not_take_is_not_called_done(
    start_broker, open_client, tmp_path
):
    disk = FullDisk()
    broker = await start_broker(progress=NEVER, parts={"disk": disk})
    client = await open_client(broker)
    await send(client, "orders", 5, b"old")
    await consume_all(client, "orders")
    await broker.parts.progress_saved()
    disk.is_full = True

    refused = await delete_group(client)
    disk.is_full = False
    again = await delete_group(client)

    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "delete it once more" in (refused.remark or "")
    assert again.code == ResponseCode.SUCCESS
    assert progress_file(tmp_path / "broker") == {}
