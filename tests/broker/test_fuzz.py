"""Thousands of invalid conversations with a live broker.

An invalid request may cost its sender the connection and nothing else: another client is served
meanwhile, the memory of a closed connection is released, and the log has no traceback, because
every request has a declared answer.

`ORBITMQ_FUZZ_SEED` chooses other conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import time
from pathlib import Path

import pytest

from tests.support.broker import RawClient, bodies_in, until
from tests.support.fuzzing import converse_all, fuzz_seed, note_inputs
from tests.support.mutations import Corpus

SEED = fuzz_seed(20)
CONVERSATIONS = 4_000
#: Conversations after which caches are warm and memory is looked at for the first time.
WARM = 1_000
#: What the store and its tables may legitimately keep of the rest: a topic here, a message there.
GROWTH = 48 * 1024 * 1024
#: For the broker to end a connection whose peer has said everything.
ENDS_WITHIN = 30.0


async def test_invalid_conversations_harm_only_their_own_connection(
    start_broker, open_client, caplog
):
    caplog.set_level(logging.WARNING, "orbitmq")
    print(f"\nseed {SEED}")
    broker = await start_broker()
    healthy = await open_client(broker)
    await _assert_served(healthy)
    tasks = len(asyncio.all_tasks())
    good_manners = asyncio.create_task(_good_manners(healthy))
    corpus, chance = Corpus(), random.Random(SEED)
    cases = (corpus.mutated(chance) for _ in range(CONVERSATIONS))

    await converse_all(broker.address, itertools.islice(cases, WARM), ends_within=ENDS_WITHIN)
    before = _resident()
    await converse_all(broker.address, cases, ends_within=ENDS_WITHIN)
    grown = _resident() - before

    good_manners.cancel()
    longest = await good_manners
    print(f"memory grew by {grown / 1024:.0f} KiB, the slowest answer took {longest:.3f} s")
    await _assert_served(healthy)
    assert healthy.connection.is_open
    await until(lambda: len(broker.parts.listeners.connections) == 1)
    await until(lambda: len(asyncio.all_tasks()) <= tasks, deadline=30)
    assert len(broker.parts.held) == 0
    assert not broker.parts.producers.groups()
    consumers = broker.parts.consumers
    assert not [group for group in consumers.groups() if consumers.members(group)]
    note_inputs(CONVERSATIONS)
    assert grown < GROWTH
    assert longest < ENDS_WITHIN
    assert _unexpected(caplog) == []


async def _good_manners(client: RawClient) -> float:
    """Ask sensible things until cancelled; how long the slowest answer took."""
    longest = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.monotonic()
            await _assert_served(client)
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0)
    return longest


async def _assert_served(client: RawClient) -> None:
    body = os.urandom(16)
    stored = await client.stored("healthy", body)
    pulled = await client.pull("healthy", offset=stored.queue_offset)
    assert bodies_in(pulled) == [body]


def _resident() -> int:
    """Bytes of memory that this process, and the broker in it, occupy."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _unexpected(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Tracebacks, and complaints of the loop. Other errors are what operators are to be told."""
    return [
        caplog.handler.format(record)[-3000:]
        for record in caplog.records
        if record.exc_info or record.name == "asyncio"
    ]
