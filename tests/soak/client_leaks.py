"""Nothing is left of lost connections and stopped consumers; `client_soak` does it for long."""

from __future__ import annotations

import logging

import pytest

from tests.soak.client_soak import (
    Reconnecting,
    Restarting,
    check_flat,
    cluster_process,
    settled_census,
)


@pytest.fixture
def name_server(tmp_path, caplog):
    # Records are kept for reports of failures, with all that they mention.
    caplog.set_level(logging.CRITICAL, "orbitmq")
    with cluster_process(tmp_path) as address:
        yield address


async def test_nothing_is_left_of_connections_that_were_lost(name_server):
    async with Reconnecting(name_server).running() as clients:
        for number in range(8):
            await clients.step(number)
        before, cut = await settled_census(), clients.cut

        for number in range(8, 40):
            await clients.step(number)

        after = await settled_census(before)
    assert clients.cut - cut >= 100
    check_flat(before, after, times=32)


async def test_nothing_is_left_of_consumers_that_were_stopped(name_server):
    restarting = Restarting(name_server)
    for number in range(8):
        await restarting.step(number)
    before = await settled_census()

    for number in range(8, 40):
        await restarting.step(number)

    after = await settled_census(before)
    check_flat(before, after, times=32)
