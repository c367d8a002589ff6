"""What the simulation stands on: its time, its network and its disk do as real ones may."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from orbitmq.remoting.settings import Address
from tests.support.powerloss import ForgetfulFiles
from tests.support.simulation_loop import Machine, Stuck, VirtualLoop
from tests.support.simulation_network import Network, SimulatedListener, Weather

HERE, THERE = "10.0.0.1", "10.0.0.2"


class Heard(asyncio.Protocol):
    """Takes down what it hears."""

    def __init__(self) -> None:
        self.data = b""
        self.pieces = 0
        self.is_over = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True


class Pair:
    """Two machines and a connection between them."""

    def __init__(self, loop: VirtualLoop, seed: int = 1) -> None:
        self.loop = loop
        self.network = Network(loop, random.Random(seed), lambda *_: None)
        self.near, self.far = Heard(), Heard()
        self.here, self.there = Machine(loop, "here", HERE), Machine(loop, "there", THERE)
        self.network.add(self.here)
        self.network.add(self.there)

    async def open(self) -> None:
        await self.there.run(self._listen())
        await self.here.run(self._connect())
        await asyncio.sleep(1)

    async def _listen(self) -> None:
        def arrived(end: object) -> None:
            end.open(self.far)  # type: ignore[attr-defined]

        await SimulatedListener(arrived, pause=1).listen(Address(THERE, 1), 10)

    async def _connect(self) -> None:
        await self.loop.create_connection(lambda: self.near, THERE, 1)


@pytest.fixture
def run():
    with contextlib.ExitStack() as stack:

        def run_one(work):
            loop = VirtualLoop()
            stack.callback(loop.close)
            loop.run_until_complete(work(loop))
            return loop

        yield run_one


Run = Callable[[Callable[[VirtualLoop], Awaitable[None]]], VirtualLoop]


def test_a_year_passes_at_once(run):
    async def sleep(_):
        await asyncio.sleep(365 * 86400.0)

    assert run(sleep).time() == pytest.approx(365 * 86400.0)


def test_waiting_for_what_never_comes_is_noticed():
    loop = VirtualLoop()

    async def wait():
        await loop.create_future()

    waiting = loop.create_task(wait())
    with pytest.raises(Stuck):
        loop.run_until_complete(waiting)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_once_and_in_order_however_they_are_torn(run, seed):
    async def talk(loop):
        pair = Pair(loop, seed)
        pair.network.weather = Weather(slow_share=0.5, torn_share=0.7)
        await pair.open()
        said = [b"%d " % number for number in range(200)]
        for each in said:
            pair.near.transport.write(each)
        await asyncio.sleep(10)

        assert pair.far.data == b"".join(said)
        assert pair.far.pieces > len(said)

    run(talk)


def test_a_cut_connection_loses_an_end_of_what_was_said_and_both_sides_hear_of_it(run):
    async def talk(loop):
        pair = Pair(loop)
        pair.network.weather = Weather(cut_share=0.1)
        await pair.open()
        said = b""
        for number in range(200):
            said += b"%d " % number
            pair.near.transport.write(b"%d " % number)
            await asyncio.sleep(0.01)

        assert pair.near.is_over
        assert pair.far.is_over
        assert said.startswith(pair.far.data)
        assert len(pair.far.data) < len(said)

    run(talk)


def test_what_is_said_across_a_gap_arrives_when_it_closes(run):
    async def talk(loop):
        pair = Pair(loop)
        await pair.open()
        pair.network.separate(HERE, THERE)
        pair.near.transport.write(b"one")
        await asyncio.sleep(100)
        heard = pair.far.data
        pair.network.join(HERE, THERE)
        pair.near.transport.write(b"two")
        await asyncio.sleep(1)

        assert heard == b""
        assert pair.far.data == b"onetwo"

    run(talk)


@pytest.mark.parametrize("returns", [True, False])
def test_of_a_machine_that_vanished_nobody_hears_until_one_takes_its_place(run, returns):
    async def talk(loop):
        pair = Pair(loop)
        await pair.open()
        pair.network.silence(pair.there, abruptly=True)
        pair.there.die()
        if returns:
            pair.network.add(Machine(loop, "again", THERE))
        pair.near.transport.write(b"anybody?")
        await asyncio.sleep(100)

        assert pair.near.is_over is returns
        assert pair.far.data == b""

    run(talk)


def test_a_dead_machine_does_nothing_any_more(run):
    async def live(loop):
        done: list[str] = []
        machine = Machine(loop, "m", HERE)

        async def work():
            loop.call_later(1, done.append, "timer")
            await asyncio.sleep(2)
            done.append("task")

        machine.run(work())
        await asyncio.sleep(0.5)
        machine.die()
        await asyncio.sleep(5)

        assert done == []
        assert not machine.tasks

    run(live)


def test_a_failure_that_nobody_asks_for_is_told_unless_its_machine_is_dead(run):
    async def live(loop):
        alive, dead = Machine(loop, "alive", HERE), Machine(loop, "dead", THERE)

        async def fail(what):
            try:
                await asyncio.sleep(1)
            finally:
                raise ValueError(what)

        alive.run(fail("heard"))
        dead.run(fail("unheard"))
        await asyncio.sleep(0.5)
        dead.die()
        await asyncio.sleep(1)

    loop = run(live)

    assert ["heard" in each for each in loop.complaints] == [True]


# ---- the disk


def after(files: ForgetfulFiles, root: Path, seed: int) -> dict[str, bytes]:
    target = root.with_name(f"{root.name}-{seed}")
    files.lose_power(target, random.Random(seed))
    return {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}


def write(files: ForgetfulFiles, path: Path, data: bytes, *, syncs: bool) -> None:
    fd = files.open(path, create=True)
    files.pwrite(fd, data, 0)
    if syncs:
        files.sync(fd)
    files.close(fd)


def test_what_was_flushed_stays_and_the_rest_may_go_page_by_page(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    files = ForgetfulFiles(root)
    write(files, root / "file", b"a" * 16384, syncs=True)
    files.sync_folder(root)
    write(files, root / "file", b"b" * 16384, syncs=False)

    found = {after(files, root, seed)["file"] for seed in range(200)}

    assert b"a" * 16384 in found
    assert b"b" * 16384 in found
    assert any(each[:4096] == b"a" * 4096 and each[-4096:] == b"b" * 4096 for each in found)
    assert all(set(each[at : at + 4096]) in ({97}, {98}) for each in found for at in (0, 4096))


def test_a_name_that_was_not_flushed_may_be_as_before_or_as_now_and_never_both(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    files = ForgetfulFiles(root)
    write(files, root / "old", b"old", syncs=True)
    files.sync_folder(root)
    write(files, root / "new", b"new", syncs=True)
    files.rename(root / "new", root / "old")

    found = [after(files, root, seed) for seed in range(100)]

    assert {each["old"] for each in found} == {b"old", b"new"}
    assert all("new" not in each or each["old"] == b"old" for each in found)
    files.sync_folder(root)
    assert {after(files, root, seed)["old"] for seed in range(100, 150)} == {b"new"}
