"""A file of progress in the log is never ahead of what the disk has of the log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orbitmq.broker.configfile import ConfigFile
from orbitmq.broker.scheduled import LogFollowingFile
from orbitmq.broker.scheduler import Scheduler
from orbitmq.clock import SystemClock
from orbitmq.store.settings import StoreFailed
from orbitmq.store.store import Store
from orbitmq.wire.bodies import DelayOffsets
from tests.support.broker import until


class FakeLog:
    """As much of a store as the file looks at: where the log ends, and what is flushed."""

    def __init__(self) -> None:
        self.end = 100
        self.waiting: list[tuple[int, Any]] = []
        self.flushes = True

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(log_end=self.end)

    def when_flushed(self, upto: int, call: Any) -> None:
        self.waiting.append((upto, call))

    def wait_flushed(self, upto: int, timeout: float) -> bool:
        return self.flushes

    def flush(self, failure: StoreFailed | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for _, call in waiting:
            call(failure)


class Table:
    """A table with one number in it."""

    def __init__(self) -> None:
        self.number = 0
        self.revision = 0
        self.is_ready = True

    def go_on(self) -> None:
        self.number += 1
        self.revision += 1

    def document(self) -> DelayOffsets | None:
        return DelayOffsets(offset_table={1: self.number}) if self.is_ready else None


@pytest.fixture
def log():
    return FakeLog()


@pytest.fixture
def table():
    return Table()


@pytest.fixture
async def file(tmp_path, log, table):
    return LogFollowingFile(
        ConfigFile(tmp_path / "progress.json", DelayOffsets),
        table.document,
        lambda: table.revision,
        cast(Store, log),
        Scheduler(asyncio.get_running_loop(), SystemClock()),
    )


def saved(tmp_path: Path) -> int | None:
    value = ConfigFile(tmp_path / "progress.json", DelayOffsets).load().value
    return None if value is None else value.offset_table[1]


async def test_the_file_is_written_after_the_flush_and_says_what_was_true_before_it(
    tmp_path, log, table, file
):
    table.go_on()
    file.save_soon()
    table.go_on()
    before = saved(tmp_path)

    log.flush()
    await until(lambda: saved(tmp_path) is not None)

    assert before is None
    assert saved(tmp_path) == 1


async def test_what_changed_meanwhile_is_saved_the_next_time(tmp_path, log, table, file):
    table.go_on()
    file.save_soon()
    table.go_on()
    log.flush()
    await until(lambda: saved(tmp_path) == 1)
    await asyncio.sleep(0)

    async with asyncio.timeout(30):
        while not log.waiting:
            file.save_soon()
            await asyncio.sleep(0.001)
    log.flush()
    await until(lambda: saved(tmp_path) == 2)


async def test_nothing_new_is_not_saved(log, file):
    file.save_soon()

    assert log.waiting == []


async def test_a_flush_that_failed_leaves_the_file_alone(tmp_path, log, table, file):
    table.go_on()
    file.save_soon()

    log.flush(StoreFailed("the disk is gone"))
    file.save_soon()

    assert saved(tmp_path) is None
    assert len(log.waiting) == 1


async def test_a_table_that_is_not_ready_is_asked_again(log, table, file):
    table.go_on()
    table.is_ready = False
    file.save_soon()
    unready = list(log.waiting)
    table.is_ready = True

    file.save_soon()

    assert unready == []
    assert len(log.waiting) == 1


@pytest.mark.parametrize("flushes", [True, False])
async def test_at_a_stop_it_is_written_if_the_log_could_be_flushed(
    tmp_path, log, table, file, flushes
):
    table.go_on()
    log.flushes = flushes

    file.close()

    assert saved(tmp_path) == (1 if flushes else None)
