"""`kill -9` of a broker under load, five times: what it has acknowledged is there afterwards.

What this shows is that a broker forgets nothing when its process ends anywhere: what was written is
in the page cache of a machine that goes on. It cannot show what a flush is for. That a message that
was acknowledged with `sync` survives the loss of power is shown where a disk can forget:
tests/store/test_powerloss.py for the store, tests/simulation for whole brokers.

Clients here are raw connections, and the time of their recovery counts from when the broker says
that it is ready: how long an interpreter takes to start is the machine's affair. Our own clients,
and brokers that are killed: tests/client/producer/test_killed_brokers.py and `make chaos`.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from orbitmq.message.stored import StoredMessage
from tests.support.broker import until
from tests.support.killing import (
    LATER_TOPIC,
    QUEUES,
    TOPIC,
    Crowd,
    LateProducer,
    Ledger,
    Producer,
    Puller,
    Reporter,
    Victim,
    body_of,
    number_of,
    read_all,
)

KILLS = 5
PRODUCERS = 4
IN_FLIGHT = 16
#: What every producer must have sent in a life of the broker.
SENDS = 100
SAVE_INTERVAL = 0.5
#: For the file of progress to be written, which waits for a disk that others use as well.
WRITING = 2.0
#: For every client to be served again once the broker is back; for their pauses, and the machine.
RECOVERY = 30.0
#: For the last delayed message, whose delay is five seconds, to be delivered.
DELIVERY = 20.0

SETTINGS = (
    "broker.store.flush.policy=sync",
    # Small files, so that the log rolls several times.
    "broker.store.file_size=4194304",
    f"broker.progress.save_interval={SAVE_INTERVAL}",
    "broker.delays.save_interval=1",
)


@pytest.fixture
async def victim(tmp_path):
    broker = Victim(tmp_path / "broker", *SETTINGS)
    await broker.start()
    yield broker
    await broker.bury()


async def test_what_was_acknowledged_survives_kill_9_under_load(victim):
    ledger, crowd = Ledger(), Crowd()
    numbers = itertools.count()
    producers = [Producer(victim, ledger, numbers) for _ in range(PRODUCERS)]
    late = LateProducer(victim, ledger, itertools.count(10_000_000))
    pullers = [Puller(victim, ledger, queue_id) for queue_id in range(QUEUES)]
    reporter = Reporter(victim, pullers)
    clients = [*producers, late, *pullers, reporter]
    for producer in producers:
        crowd.add(producer.run(IN_FLIGHT))
    # The topic is made by the first send, the group by the first pull.
    await until(lambda: ledger.acknowledged)
    for puller in pullers:
        crowd.add(puller.run())
    await until(lambda: any(puller.offset for puller in pullers))
    crowd.add(late.run())

    for _ in range(KILLS):
        reporting = crowd.add(reporter.run())
        began, answered = time.monotonic(), len(ledger.acknowledged)

        def is_under_way(began=began, answered=answered):
            crowd.check()
            old_enough = time.monotonic() - SAVE_INTERVAL - WRITING - 0.2
            return (
                len(ledger.acknowledged) >= answered + SENDS * PRODUCERS
                and old_enough > began
                and len(reporter.acknowledged_by(old_enough)) == QUEUES
            )

        await until(is_under_way, deadline=30)
        killed = time.monotonic()
        await victim.kill()
        reporting.cancel()
        await victim.start()
        ready = time.monotonic()
        await reporter.assert_kept(since=killed - SAVE_INTERVAL - WRITING)

        def waiting(ready=ready):
            crowd.check()
            return [type(client).__name__ for client in clients if client.answered_at < ready]

        await until(lambda: not waiting(), RECOVERY)
        print(
            f"\nback {ready - killed:.2f} s after the kill, all clients served "
            f"{time.monotonic() - ready:.2f} s later; {len(ledger.acknowledged)} acknowledged",
            end="",
        )
    await crowd.disperse()

    assert sum(producer.unanswered for producer in producers) >= KILLS, "there was no load"
    await _assert_everything_is_there(victim, ledger)
    await _assert_delivered(victim, ledger)
    # And all of it once more after an orderly stop, which loses no progress at all.
    await reporter.report_all()
    assert await victim.stop() == 0
    await victim.start()
    await reporter.assert_kept(since=time.monotonic())
    await _assert_everything_is_there(victim, ledger)
    assert "Traceback" not in victim.log
    for client in clients:
        await client.close()


async def _assert_everything_is_there(victim: Victim, ledger: Ledger) -> None:
    again = Ledger()
    found = await read_all(victim, TOPIC, again.show, lambda: True)

    numbers = [number_of(message) for message in found]
    assert len(set(numbers)) == len(numbers), "a message is there twice"
    assert ledger.acknowledged, "nothing was acknowledged"
    for place, number in ledger.acknowledged.items():
        assert place in again.seen, f"{place} is lost"
        assert again.seen[place].body == body_of(number)
    for place, message in ledger.seen.items():
        assert again.seen[place].encode() == message.encode()


async def _assert_delivered(victim: Victim, ledger: Ledger) -> None:
    """Delayed messages come, not before they are due; after a crash perhaps once more."""
    missing = set(ledger.promised)
    assert missing, "no delayed message was acknowledged"

    def take(message: StoredMessage) -> None:
        number = number_of(message)
        assert message.body == body_of(number)
        # What was never acknowledged may have been stored all the same.
        assert message.store_ms >= ledger.promised.get(number, 0), "it came too early"
        missing.discard(number)

    async with asyncio.timeout(DELIVERY):
        await read_all(victim, LATER_TOPIC, take, lambda: not missing)
