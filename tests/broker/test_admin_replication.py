"""What slaves copy besides messages."""

from __future__ import annotations

import struct

import pytest

from orbitmq.broker.timers import TimerFile
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies import (
    ConsumerOffsets,
    DelayOffsets,
    HARuntimeInfo,
    RequestModes,
    TimerMetrics,
)
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body
from tests.support.admin import OLD_VERSION, ask, of_version, told
from tests.support.broker import GROUP
from tests.support.delivery import hand_broker


async def test_the_progress_of_all_groups_is_copied(broker, client):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)

    table = await told(client, ConsumerOffsets, RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert table.offset_table == {f"orders@{GROUP}": {0: 1}}
    assert table.data_version == broker.parts.progress.data_version


@pytest.mark.parametrize(("version", "key"), [(OLD_VERSION, b"{0:1}"), (401, b'{"0":1}')])
async def test_keys_that_are_numbers_are_bare_for_old_slaves_only(
    broker, open_client, client, version, key
):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    slave = await open_client(broker, of_version(version))

    answer = await ask(slave, RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert b'"orders@%b":%b' % (GROUP.encode(), key) in bytes(answer.body)


async def test_the_progress_of_delay_levels_is_copied(client):
    table = await told(client, DelayOffsets, RequestCode.GET_ALL_DELAY_OFFSET)

    assert table.offset_table == dict.fromkeys(range(1, 19), 0)


async def test_the_progress_of_timers_is_told_in_apaches_way_and_in_ours(tmp_path):
    async with hand_broker(tmp_path) as (broker, client):
        now_ms = milliseconds(broker.clock.now())
        for after in (1000, 60_000):
            due = {"TIMER_DELIVER_MS": str(now_ms + after)}
            await client.stored("orders", b"later", properties=due)
        broker.advance(5)

        answer = await ask(client, RequestCode.GET_TIMER_CHECK_POINT)
        counts = await told(client, TimerMetrics, RequestCode.GET_TIMER_METRICS)

    read_ms, _, offset, master_offset, *version = struct.unpack(">7q", bytes(answer.body))
    assert (read_ms, offset, master_offset) == (now_ms + 5000, 2, 2)
    assert version == [0, 0, 0]
    ours = decode_body(TimerFile, answer.ext_fields["orbitmqTimerProgress"].encode())
    assert (ours.scanned, ours.delivered_ms, ours.delivered_offset) == (2, now_ms + 1000, 0)
    assert {topic: each.count for topic, each in counts.timing_count.items()} == {"orders": 1}


async def test_no_group_pops(client):
    modes = await told(client, RequestModes, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)

    assert modes == RequestModes()


async def test_a_master_and_a_slave_tell_which_they_are(broker, client, start_broker, open_client):
    await client.stored("orders")
    slave = await open_client(await start_broker(root="slave", broker_id=1))

    master_says = await told(client, HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS)
    slave_says = await told(slave, HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS)

    assert master_says.master
    assert master_says.master_commit_log_max_offset == broker.parts.store.statistics().log_end
    assert not slave_says.master
