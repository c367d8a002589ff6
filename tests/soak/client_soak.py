"""Twelve hours of leaks in ten minutes: a thousand lost connections, a hundred consumers.

Run with `make soak`. What is leaked in a night of reconnects and deployments is leaked here as
often; memory counts as well, because it has had time to settle.
"""

from __future__ import annotations

import logging

import pytest

from tests.support.leaks import (
    Census,
    Reconnecting,
    Restarting,
    check_flat,
    cluster_process,
    settled_census,
)

_MIB = 1024 * 1024
#: What allocators keep beside, whatever happens.
_MEMORY = 16 * _MIB


def _report(what: str, before: Census, after: Census, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\n{what}: threads {before.threads} -> {after.threads}, "
            f"descriptors {before.descriptors} -> {after.descriptors}, "
            f"tasks {before.tasks} -> {after.tasks}, "
            f"objects {before.objects.total():,} -> {after.objects.total():,}, "
            f"memory {before.memory / _MIB:.1f} -> {after.memory / _MIB:.1f} MiB"
        )


@pytest.fixture
def name_server(tmp_path, caplog):
    # Records are kept for reports of failures, with all that they mention.
    caplog.set_level(logging.CRITICAL, "orbitmq")
    with cluster_process(tmp_path) as address:
        yield address


@pytest.mark.timeout(1200)
async def test_a_thousand_lost_connections_leave_nothing(name_server, capsys):
    async with Reconnecting(name_server).running() as clients:
        number = 0
        while clients.cut < 200:
            await clients.step(number)
            number += 1
        before, warm = await settled_census(), number

        while clients.cut < 1200:
            await clients.step(number)
            number += 1

        after = await settled_census(before)
    _report("1,000 reconnects", before, after, capsys)
    check_flat(before, after, times=number - warm)
    assert after.memory - before.memory < _MEMORY


@pytest.mark.timeout(1200)
async def test_a_hundred_stopped_consumers_leave_nothing(name_server, capsys):
    restarting = Restarting(name_server)
    for number in range(20):
        await restarting.step(number)
    before = await settled_census()

    for number in range(20, 120):
        await restarting.step(number)

    after = await settled_census(before)
    _report("100 restarts of consumers", before, after, capsys)
    check_flat(before, after, times=100)
    assert after.memory - before.memory < _MEMORY
