"""What processes write down can be read again, whatever became of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.chaos.history import (
    Acked,
    BodyCorrupt,
    Event,
    Fault,
    Histories,
    Invoked,
    Read,
    Recorder,
    Value,
    body_of,
    parse_value,
    value_of,
)
from tools.chaos.programs import wait_until
from tools.chaos.timing import recoveries

ROOT = Path(__file__).parents[2]

names = st.text("abcdef0123-", min_size=1, max_size=8)
values = st.builds(Value, names, st.integers(0, 10**9), names)


@given(values, st.integers(0, 3000))
def test_a_body_says_what_it_is(value, size):
    body = body_of(value, size)

    assert value_of(body) == value
    assert parse_value(str(value)) == value
    assert len(body) >= size


@given(values, st.integers(1, 600), st.data())
def test_a_body_with_one_flipped_bit_is_noticed(value, size, data):
    body = bytearray(body_of(value, size))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= 1 << data.draw(st.integers(0, 7))

    try:
        read = value_of(bytes(body))
    except BodyCorrupt:
        return
    # A short body has no filling: then it is another value, which nobody has sent.
    assert read != value


def test_what_was_written_before_kill_9_is_there(tmp_path):
    path = tmp_path / "1.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tools.chaos.history import Invoked, Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]))\n"
        "for n in range(100): recorder.write(Invoked(float(n), f'p/{n}/k'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=False, env=env, timeout=60
    )

    assert ended.returncode == -signal.SIGKILL
    assert len(Histories(tmp_path).events()) == 100


def test_what_is_written_between_two_readings_is_read_once(tmp_path):
    one, two = Recorder(tmp_path / "1.jsonl"), Recorder(tmp_path / "2.jsonl")
    histories = Histories(tmp_path)
    one.write(Invoked(1.0, "p/0/k"))
    two.write(Invoked(3.0, "q/0/k"))
    before = histories.events()
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'{"is":"invoke","at":2.0,')
    halfway = histories.events()
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'"value":"p/1/k"}\n')

    after = histories.events()
    one.close()
    two.close()

    assert before == halfway == [Invoked(1.0, "p/0/k"), Invoked(3.0, "q/0/k")]
    assert after == [Invoked(1.0, "p/0/k"), Invoked(2.0, "p/1/k"), Invoked(3.0, "q/0/k")]


def at_work(*producers: str, readers: Sequence[str] = ("c",)) -> list[Event]:
    """Everybody has done something before anything goes wrong."""
    events: list[Event] = []
    for producer in producers:
        value = str(Value(producer, 0, "k"))
        events += [Invoked(0.1, value), Acked(0.2, value, "q", 0)]
    return [*events, *(Read(0.3, "g", reader, "q", 0, "p/0/k") for reader in readers)]


def test_recovery_is_that_of_the_last_who_went_on():
    events: list[Event] = [
        *at_work("p", "r", readers=("c", "d")),
        Fault(2.0, "kill broker", "b", False),
        Fault(5.0, "kill broker", "b", True),
        Invoked(5.5, "p/1/k"),
        Acked(6.0, "p/1/k", "q", 1),
        Read(6.5, "g", "c", "q", 1, "p/1/k"),
        Invoked(6.5, "r/1/k"),
        Acked(8.0, "r/1/k", "q", 2),
        Read(9.0, "g", "d", "q", 2, "r/1/k"),
        Read(9.5, "others", "x", "q", 2, "r/1/k"),
    ]

    (found,) = recoveries(events, ("g",))

    assert [found.stored, found.read] == pytest.approx([3.0, 4.0])


@pytest.mark.parametrize(("killed", "read"), [((), inf), (("d",), 1.5)])
def test_who_never_goes_on_is_told_unless_he_was_killed(killed, read):
    events: list[Event] = [
        *at_work("p", "r", readers=("c", "d")),
        Fault(2.0, "kill broker", "b", False),
        Fault(5.0, "kill broker", "b", True),
        *(Fault(5.2, "kill", name, False) for name in killed),
        Invoked(5.5, "p/1/k"),
        Acked(6.0, "p/1/k", "q", 1),
        Read(6.5, "g", "c", "q", 1, "p/1/k"),
        # Came when all was well again.
        Read(6.6, "g", "late", "q", 1, "p/1/k"),
    ]

    (found,) = recoveries(events, ("g",))

    assert found.stored == inf
    assert found.read == pytest.approx(read)


def test_recovery_is_not_blamed_for_the_next_fault():
    events: list[Event] = [
        *at_work("p"),
        Fault(2.0, "kill broker", "b", False),
        Fault(5.0, "kill broker", "b", True),
        Fault(5.5, "pause", "b", False),
        Fault(15.5, "pause", "b", True),
        Invoked(15.5, "p/1/k"),
        Acked(16.0, "p/1/k", "q", 1),
        Read(17.0, "g", "c", "q", 1, "p/1/k"),
    ]

    kill, pause = recoveries(events, ("g",))

    assert [kill.stored, kill.read] == pytest.approx([1.0, 2.0])
    assert [pause.stored, pause.read] == pytest.approx([0.5, 1.5])


def test_workers_end_with_whoever_started_them(tmp_path):
    program = (
        "import os, subprocess, sys\n"
        "child = 'from tools.chaos.fates import die_with_parent; import sys, threading; '\\\n"
        "    'die_with_parent(); print(1, flush=True); threading.Event().wait(60)'\n"
        "started = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "started.stdout.readline()\n"
        "print(started.pid, flush=True)\n"
        "os._exit(9)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, env=env, timeout=60, capture_output=True
    )

    assert ended.returncode == 9
    child = Path("/proc") / ended.stdout.decode().strip() / "cmdline"

    def is_gone():
        # A process that has ended and that nobody asked about has no command line.
        return not child.exists() or not child.read_bytes()

    wait_until(is_gone, "the child is gone", 20)
