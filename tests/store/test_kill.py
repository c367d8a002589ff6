"""A real process, killed while it stores: what it has acknowledged is there afterwards.

ORBITMQ_ROUNDS says how often, ORBITMQ_FIRST_SEED makes other moments of it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import pytest

from orbitmq.message.stored import StoredMessage
from orbitmq.store.settings import FlushPolicy
from orbitmq.store.store import Store
from tests.support.store import SMALL, lookup, messages_of, with_policy

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = int(os.environ.get("ORBITMQ_ROUNDS", "8"))
SEED = os.environ.get("ORBITMQ_FIRST_SEED", "")
#: Kills of one store, after which another one begins: reading all of it takes longer each time.
OF_ONE_STORE = 20

#: Stores messages as fast as it can and prints the number of each when it counts as stored.
WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[3])
from dataclasses import replace
from orbitmq.message.stored import StoredMessage
from orbitmq.store.settings import FlushPolicy, FlushSettings
from orbitmq.store.store import Store
from tests.support.store import SMALL, put

policy = FlushPolicy(sys.argv[2])
flush = FlushSettings(policy=policy, durable_bytes=20_000, checkpoint_interval=0.001)
store = Store(sys.argv[1], replace(SMALL, file_size=65536, flush=flush))
for turn in itertools.count():
    first = turn * 7
    for number in range(first, first + 7):
        body = b"%08d" % number * (1 + number % 40)
        put(store, "T", number % 4, body, {"TAGS": "A", "UNIQ_KEY": f"u{number}"})
    end = store.write()
    if policy is FlushPolicy.SYNC:
        assert store.wait_flushed(end, 60)
    print(first + 6, flush=True)
    store.tick()
"""


def body_of(number: int) -> bytes:
    return b"%08d" % number * (1 + number % 40)


def last_acknowledged(output: IO[str], enough: int, process: subprocess.Popen[str]) -> int:
    """Kill the writer after some acknowledgements; the last one that it managed to give."""
    lines = [output.readline() for _ in range(enough)]
    process.kill()
    lines += output.readlines()
    whole = [line for line in lines if line.endswith("\n")]
    return int(whole[-1])


def tear(root: Path) -> None:
    """Leave half a record at the end of the log, as a write does that was cut short."""
    half = StoredMessage.build(topic="T", stored_body=bytes(500), store_ms=1).encode()[:200]
    for path in sorted((root / "commitlog").iterdir()):
        data = path.read_bytes()
        used = len(data.rstrip(b"\0"))
        if 0 < used < len(data) - 300:
            path.write_bytes((data[:used] + half).ljust(len(data), b"\0"))


def flip(root: Path, at: int) -> None:
    """Flip a bit of the first message's body."""
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(at)
        flipped = bytes([file.read(1)[0] ^ 1])
        file.seek(at)
        file.write(flipped)


@pytest.mark.feature("N1")
@pytest.mark.parametrize("policy", list(FlushPolicy))
def test_kill_9_under_load_loses_nothing_that_was_acknowledged(tmp_path, policy, pytestconfig):
    """Each time on what the last time left; torn tails are cut, queues and index made again."""
    dice = random.Random(policy.value + SEED)
    settings = replace(with_policy(SMALL, policy), file_size=65536)
    for life in range(ROUNDS):
        if life % OF_ONE_STORE == 0:
            root = tmp_path / f"store-{life}"
            known: dict[int, bytes] = {}
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), policy.value, str(pytestconfig.rootpath)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            acknowledged = last_acknowledged(process.stdout, dice.randrange(3, 60), process)
        if dice.random() < 0.5:
            tear(root)
        if dice.random() < 0.3:
            shutil.rmtree(root / "index")

        store = Store(root, settings, background=False)

        assert not store.recovery.was_clean
        assert store.recovery.damage == ()
        assert not store.recovery.rebuilt_all
        # What is read from the disk is checked: flip a bit of a message, and put it back.
        if store.recovery.start > 0:
            flip(root, at=90)
            assert store.read("T", 0, 0, 8).damaged == (0,)
            flip(root, at=90)
            assert store.read("T", 0, 0, 8).damaged == ()
        found: dict[int, bytes] = {}
        for queue_id in range(4):
            offset = 0
            while offset < store.max_offset("T", queue_id):
                result = store.read("T", queue_id, offset)
                assert result.damaged == ()
                for number, message in enumerate(messages_of(result), start=offset):
                    assert message.queue_offset == number
                    known[message.physical_offset] = message.body
                    found[message.physical_offset] = message.body
                offset = result.next_offset
        # One value per place for ever: whatever was read before is still the same.
        assert found == known
        this_run = [body for _, body in sorted(found.items())]
        first_of_run = max(at for at, body in enumerate(this_run) if body == body_of(0))
        for number, body in enumerate(this_run[first_of_run:]):
            assert body == body_of(number)
        assert len(this_run) - first_of_run > acknowledged
        for number in (0, acknowledged):
            newest = lookup(store, "T", f"u{number}")[0]
            assert bytes(newest[88 : 88 + len(body_of(number))]) == body_of(number)
        # And it goes on from here, after a proper end or another crash.
        if dice.random() < 0.5:
            store.close()
        else:
            store.abandon()
