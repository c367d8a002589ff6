"""Losing power at any moment, with unflushed pages lost in any order.

Each seed is a life of a store, three times interrupted. ORBITMQ_SEEDS sets how many,
ORBITMQ_FIRST_SEED where to begin; a failure says how to repeat it.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.broker.config import ConfigFile
from orbitmq.broker.progress import CommitSource, ProgressFile, ProgressTable, encode_progress
from orbitmq.store.settings import FlushPolicy, FlushSettings, RetentionSettings
from orbitmq.store.store import Store
from tests.support.powerloss import ForgetfulFiles
from tests.support.repeating import tell_how_to_repeat
from tests.support.store import SMALL, HandClock, lookup, messages_of, put

SEEDS = int(os.environ.get("ORBITMQ_SEEDS", "60"))
FIRST = int(os.environ.get("ORBITMQ_FIRST_SEED", "0"))

#: Lives that once went wrong: a progress file that told of a lost end of the log; a page that was
#: lost up to the first byte of a record, which is zero.
HARD_LIVES = (65, 205)
#: Lives whose last record kept everything but the page with the end of its properties.
TORN_LIVES = (1086, 1285)

#: place in the log -> queue, number, body
Known = dict[int, tuple[int, int, bytes]]


def contents(store: Store) -> Known:
    found: Known = {}
    for state in store.queues():
        offset = 0
        while offset < state.max_offset:
            result = store.read(state.topic, state.queue_id, offset)
            assert result.damaged == ()
            for number, message in enumerate(messages_of(result), start=offset):
                assert message.queue_offset == number
                found[message.physical_offset] = (message.queue_id, number, message.body)
            offset = result.next_offset
    return found


def live(store: Store, clock: HandClock, dice: random.Random, written: Known) -> int:
    """Use the store for a while; the offset below which everything was said to be stored."""
    promised = 0
    for _ in range(dice.randrange(5, 60)):
        action = dice.random()
        if action < 0.6:
            for _ in range(dice.randrange(1, 8)):
                queue_id = dice.randrange(3)
                body = dice.randbytes(dice.randrange(0, 400))
                place, number = put(store, "T", queue_id, body, {"KEYS": "k", "TAGS": "A"})
                written[place] = (queue_id, number, body)
            store.write()
        elif action < 0.8:
            end = store.statistics().log_end
            assert store.wait_flushed(end)
            promised = end
        else:
            clock.advance(dice.choice([0.2, 1.5, 11.0]))
            store.tick()
    return promised


def seeds(share: float = 1.0, always: tuple[int, ...] = ()) -> list[int]:
    """The seeds of a test that takes a share of them, one at least, and some always.

    Not so when it is said where to begin: then something is to be repeated.
    """
    chosen = range(FIRST, FIRST + max(1, int(SEEDS * share)))
    return sorted({*chosen, *(() if "ORBITMQ_FIRST_SEED" in os.environ else always)})


def _durable_bytes(seed: int) -> int:
    """After how much log a round is due: small, for rounds in which the index takes no part."""
    usual = FlushSettings().durable_bytes
    return usual if seed in TORN_LIVES else (500, 3000, usual)[seed % 3]


@pytest.fixture(autouse=True)
def repetition(request, seed):
    tell_how_to_repeat(request, ORBITMQ_FIRST_SEED=seed, ORBITMQ_SEEDS=1)


@pytest.mark.parametrize("policy", list(FlushPolicy))
@pytest.mark.parametrize("seed", seeds(0.5, always=TORN_LIVES))
def test_what_was_flushed_survives_and_the_rest_is_cut_cleanly(tmp_path, policy, seed):
    dice = random.Random(f"{policy.value}{seed}")
    flush = FlushSettings(
        policy=policy, queue_tail_bytes=dice.choice([100, 2000]), durable_bytes=_durable_bytes(seed)
    )
    settings = replace(SMALL, flush=flush)
    clock = HandClock()
    root = tmp_path / "life0"
    root.mkdir()
    known: Known = {}
    for life in range(3):
        files = ForgetfulFiles(root)
        store = Store(root, settings, clock=clock, files=files, background=False)
        assert store.recovery.damage == ()
        written: Known = dict(known)

        promised = live(store, clock, dice, written)

        root = tmp_path / f"life{life + 1}"
        files.lose_power(root, dice)
        store.abandon()
        after = Store(root, settings, clock=clock, files=ForgetfulFiles(root), background=False)
        found = contents(after)
        assert after.recovery.damage == ()
        # Queues that had to be made anew would hide that the checkpoint said too much.
        assert not after.recovery.rebuilt_all
        for place, message in found.items():
            assert written[place] == message
        for place, message in written.items():
            if place < promised or place in known:
                assert found[place] == message
        # The log ends with the last record found: nothing is missing in between.
        assert sorted(found) == sorted(written)[: len(found)]
        assert len(lookup(after, "T", "k", 10_000)) == len(found)
        after.close()
        known = found


@pytest.mark.parametrize("seed", seeds(0.25))
def test_files_that_are_deleted_leave_no_hole(tmp_path, seed):
    dice = random.Random(f"deleted{seed}")
    settings = replace(SMALL, retention=RetentionSettings(max_bytes=4 * SMALL.file_size))
    clock = HandClock()
    root = tmp_path / "before"
    root.mkdir()
    files = ForgetfulFiles(root)
    store = Store(root, settings, clock=clock, files=files, background=False)
    for number in range(400):
        put(store, "T", 0, b"%04d" % number + bytes(150), {"KEYS": "k"})
    store.write()
    assert store.wait_flushed(store.statistics().log_end)
    store.clean()
    begin = store.statistics().log_start
    assert begin > 2 * SMALL.file_size

    files.lose_power(tmp_path / "after", dice)
    store.abandon()

    disk = ForgetfulFiles(tmp_path / "after")
    with Store(tmp_path / "after", settings, clock=clock, files=disk, background=False) as after:
        assert after.recovery.damage == ()
        assert after.statistics().log_start == begin


@pytest.mark.parametrize("seed", seeds(0.25))
def test_without_waiting_for_the_disk_little_is_lost_and_only_at_the_end(tmp_path, seed):
    dice = random.Random(seed)
    root = tmp_path / "before"
    root.mkdir()
    files, clock = ForgetfulFiles(root), HandClock()
    flush = FlushSettings(policy=FlushPolicy.ASYNC, queue_tail_bytes=2000)
    settings = replace(SMALL, file_size=64 * 1024, flush=flush)
    store = Store(root, settings, clock=clock, files=files, background=False)
    written: dict[int, float] = {}
    largest = dice.choice([60, 900])
    unlooked = 0  # bytes since the store looked last
    for _ in range(dice.randrange(20, 250)):
        for _ in range(dice.randrange(4)):
            body = dice.randbytes(dice.randrange(largest))
            written[put(store, "T", dice.randrange(3), body)[0]] = clock.now()
        before = store.statistics().log_end
        unlooked += store.write() - before
        if dice.random() < 0.8:
            clock.advance(0.1)
            store.tick()
            unlooked = 0

    end, gone = store.statistics().log_end, clock.now()
    files.lose_power(tmp_path / "after", dice)
    store.abandon()
    left = ForgetfulFiles(tmp_path / "after")
    after = Store(tmp_path / "after", settings, clock=clock, files=left, background=False)
    survived = after.statistics().log_end
    places = sorted(contents(after))
    after.abandon()

    # No hole: the log is what it was, up to where it was cut.
    assert places == [place for place in sorted(written) if place < survived]
    assert end - survived <= flush.least_bytes + unlooked
    for place, when in written.items():
        if place >= survived:
            assert gone - when <= flush.thorough_interval + 0.1


class Consumption:
    """A group that consumes a store, and its progress: in memory, and in a file on the same disk.

    What it has been given is remembered over all lives. No message may be passed that it was not.
    """

    def __init__(self) -> None:
        self.given: set[bytes] = set()

    def begin(self, store: Store, root: Path, files: ForgetfulFiles) -> None:
        """As a broker does at its start."""
        self._store = store
        self._table = ProgressTable(wall=0.0)
        path = root / "config" / "consumerOffset.json"
        self._file = ConfigFile(path, ProgressFile, disk=files, encode=encode_progress)
        is_outdated = False
        if (saved := self._file.load()) is not None:
            is_outdated = self._table.load(saved, store.deleted_below, store.mirroring.written)
        if self._table.fit(store.max_offset) or is_outdated:
            self.save()

    def save(self) -> None:
        self._file.save(self._table.file(wall=0.0, log_end=self._store.mirroring.written))

    def consume(self, queue_id: int) -> None:
        """Be given all messages of a queue from the progress on."""
        offset = self._table.stored("T", "g", queue_id) or 0
        end = self._store.max_offset("T", queue_id)
        while offset < end:
            result = self._store.read("T", queue_id, offset)
            self.given.update(message.body for message in messages_of(result))
            offset = result.next_offset
        self._table.commit("T", "g", queue_id, end, by="one", way=CommitSource.REPORT, now=0.0)

    def delete_topic(self) -> None:
        self._store.delete_topic("T", is_noted=True)
        self._table.remove_topic("T")

    def check(self) -> None:
        for queue_id, number, body in contents(self._store).values():
            if number < (self._table.stored("T", "g", queue_id) or 0):
                assert body in self.given, (queue_id, number)


@pytest.mark.parametrize("seed", seeds(always=HARD_LIVES))
def test_no_group_passes_a_message_that_it_was_not_given(tmp_path, seed):
    dice = random.Random(f"progress{seed}")
    flush = FlushSettings(policy=FlushPolicy.ASYNC, queue_tail_bytes=dice.choice([100, 2000]))
    settings = replace(SMALL, flush=flush)
    clock, consumption = HandClock(), Consumption()
    root = tmp_path / "life0"
    root.mkdir()
    written = 0
    for life in range(4):
        files = ForgetfulFiles(root)
        store = Store(root, settings, clock=clock, files=files, background=False)
        consumption.begin(store, root, files)
        consumption.check()
        for _ in range(dice.randrange(5, 60)):
            action = dice.random()
            if action < 0.5:
                for _ in range(dice.randrange(1, 6)):
                    put(store, "T", dice.randrange(3), b"%d" % written + b"x" * dice.randrange(300))
                    written += 1
                store.write()
            elif action < 0.75:
                consumption.consume(dice.randrange(3))
            elif action < 0.88:
                consumption.save()
            elif action < 0.91:
                consumption.delete_topic()
            else:
                clock.advance(dice.choice([0.2, 1.5, 11.0]))
                store.tick()
        consumption.check()
        root = tmp_path / f"life{life + 1}"
        if dice.random() < 0.3:
            files.lose_process(root)
        else:
            files.lose_power(root, dice)
        store.abandon()
