"""What slaves copy besides messages."""

from __future__ import annotations

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.wire.bodies.membership import RequestModes
from orbitmq.wire.bodies.offsets import ConsumerOffsets, DelayOffsets
from orbitmq.wire.bodies.stats import HARuntimeInfo
from orbitmq.wire.codes import RequestCode
from tests.broker.conftest import OpenClient, StartBroker
from tests.support.admin import OLD_VERSION, ask, of_version, told
from tests.support.broker import GROUP, RawClient


async def test_the_progress_of_all_groups_is_copied(broker: Broker, client: RawClient) -> None:
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)

    table = await told(client, ConsumerOffsets, RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert table.offset_table == {f"orders@{GROUP}": {0: 1}}
    assert table.data_version == broker.parts.progress.data_version


@pytest.mark.parametrize(("version", "key"), [(OLD_VERSION, b"{0:1}"), (401, b'{"0":1}')])
async def test_keys_that_are_numbers_are_bare_for_old_slaves_only(
    broker: Broker, open_client: OpenClient, client: RawClient, version: int, key: bytes
) -> None:
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    slave = await open_client(broker, of_version(version))

    answer = await ask(slave, RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert b'"orders@%b":%b' % (GROUP.encode(), key) in bytes(answer.body)


async def test_the_progress_of_delay_levels_is_copied(client: RawClient) -> None:
    table = await told(client, DelayOffsets, RequestCode.GET_ALL_DELAY_OFFSET)

    assert table.offset_table == dict.fromkeys(range(1, 19), 0)


async def test_no_group_pops(client: RawClient) -> None:
    modes = await told(client, RequestModes, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)

    assert modes == RequestModes()


async def test_a_master_and_a_slave_tell_which_they_are(
    broker: Broker, client: RawClient, start_broker: StartBroker, open_client: OpenClient
) -> None:
    await client.stored("orders")
    slave = await open_client(await start_broker(root="slave", broker_id=1))

    master_says = await told(client, HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS)
    slave_says = await told(slave, HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS)

    assert master_says.master
    assert master_says.master_commit_log_max_offset == broker.parts.store.statistics().log_end
    assert not slave_says.master
