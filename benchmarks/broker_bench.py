"""The broker as a process, under load from another process.

A rate over sockets depends on who else uses the machine, and with two cores the load generator is
as busy as the server. Ratios to a floor are therefore made of the CPU time that the *servers* used
for the same requests, unless the line is about waiting (one request in flight, the disk, latency):
those are made of wall time. Figures are rates by wall time, as a user would see them.

The floors run on the same event loop as the broker, answer the same requests and do nothing else.
Apache's broker, where it can be had, gets the same frames from the same generator, round by round
in turns with ours; it uses both cores and ours one. Before every line it works under the load of
that line until it gets no faster: Java compiles what it runs often, at the expense of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from benchmarks.load.asking import Drive, Driven, Pace, Paced, Pulls, Requests, Sends, Target
from benchmarks.load.counting import flushes
from benchmarks.load.proc import own_bytes, resident_bytes
from benchmarks.load.processes import APACHE, APACHE_HEAP, APACHE_VERSION, Interpreter, OurBroker
from benchmarks.load.stage import Stage, check
from benchmarks.runner import Bench, Clock, Prepare, Sample, Scale, Work
from benchmarks.warming import warm_up

_STAGE = Stage()
_MIB = float(1 << 20)

#: Connections, and requests in flight on each.
_ONE = (1, 1)
_MANY_CONNECTIONS = (64, 1)
_BUSY = (8, 16)
_FEW = (4, 4)

_100B = Sends(topic="bench-100", body_size=100)
_1KIB = Sends(topic="bench-1024", body_size=1024)
_BATCHES = Sends(topic="bench-batches", body_size=1024, per_request=32)
_LARGE_BATCHES = Sends(topic="bench-large-batches", body_size=1024, per_request=256)

#: Consecutive messages of a queue lie apart in the log, or side by side.
_APART = Sends(topic="bench-apart", body_size=1024, queues=4)
_SIDE_BY_SIDE = Sends(topic="bench-beside", body_size=1024, queues=1, per_request=32)
_PER_QUEUE = 4096
_PULLS_OF_32 = Pulls(topic=_APART.topic, queues=4, per_request=32, messages=_PER_QUEUE)
_PULLS_OF_256 = Pulls(topic=_SIDE_BY_SIDE.topic, queues=1, per_request=256, messages=_PER_QUEUE)

#: A gibibyte of old messages, which do not lie in the way of new ones.
_OLD = Sends(topic="bench-old", body_size=8192, queues=1, per_request=32)
_OLD_MESSAGES = (1 << 30) // 8192
_LIVE_RATE = 400.0  #: so few that the generator sleeps in between and leaves a core to the replay

_TICK = 1e-3  #: a second's least part that a server needs for anything

_RATE = 1000.0  #: messages a second whose latency is looked at

_Reading = Callable[[Driven], Sample]


def _by_cpu(done: Driven) -> Sample:
    return Sample(done.messages, done.cpu, done.seconds)


def _by_wall(done: Driven) -> Sample:
    return Sample(done.messages, done.seconds, done.seconds)


def _per_cpu(done: Driven) -> Sample:
    return Sample(done.messages, done.cpu, done.cpu)


def _bytes_by_cpu(done: Driven) -> Sample:
    return Sample(done.bytes, done.cpu, done.seconds)


def _seconds(scale: Scale, *, beside_java: bool = False) -> float:
    """Of one round, on each side: more than in one process, because two have to get going."""
    return scale.java_round if beside_java else scale.round_seconds * 2.5


@dataclass(frozen=True, slots=True)
class _Side:
    """A server and its load."""

    target: Target
    requests: Requests
    load: tuple[int, int]
    is_broker: bool = True  #: whether its answers mean something
    is_java: bool = False  #: which is cold at first


def _pair(
    scale: Scale, candidate: _Side, floor: _Side, reading: _Reading, *, again: bool = False
) -> tuple[Work, Work]:
    """Both sides as works, warmed up. `again`: another reading of what the line before measured."""
    seconds = _seconds(scale, beside_java=floor.is_java)
    # The line before may not have been asked for.
    again = again and _STAGE.has_kept(floor.target, floor.requests, floor.load, seconds)

    def work(side: _Side) -> Work:
        def run() -> Sample:
            done = _STAGE.drive(side.target, side.requests, side.load, seconds=seconds, again=again)
            return reading(check(done) if side.is_broker else done)

        if not again:
            _fill(side)
            if side.is_java:
                _warm_up(scale, side)
            run()
        return run

    works = work(candidate), work(floor)
    if not again:
        _STAGE.settle(candidate.target, floor.target)
        _STAGE.warmed_up()
    return works


def _warm_up(scale: Scale, side: _Side) -> None:
    def slot() -> float:
        done = check(
            _STAGE.drive(side.target, side.requests, side.load, seconds=scale.warming.slot)
        )
        # Compiling is CPU time; and what others do on this machine is not.
        return done.messages / max(done.cpu, _TICK)

    warm_up(slot, scale.warming)


def _fill(side: _Side) -> None:
    if not side.is_broker:
        return
    if side.requests == _PULLS_OF_32:
        _STAGE.fill(side.target, _APART, 4 * _PER_QUEUE)
    elif side.requests == _PULLS_OF_256:
        _STAGE.fill(side.target, _SIDE_BY_SIDE, _PER_QUEUE // _SIDE_BY_SIDE.per_request)


def _answer_size(side: _Side) -> int:
    """Bytes of an answer, so that a constant one can have as many."""
    _fill(side)
    done = check(_STAGE.drive(side.target, side.requests, _ONE, count=16))
    return done.bytes * side.requests.per_request // done.messages


# ---- ours against a floor


def _against(
    floor: str,
    requests: Requests,
    load: tuple[int, int],
    reading: _Reading = _by_cpu,
    *,
    again: bool = False,
) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        ours = _Side(_STAGE.broker().target, requests, load)
        size = _answer_size(ours) if isinstance(requests, Pulls) else 0
        other = _Side(_STAGE.floor(floor, size), requests, load, is_broker=False)
        yield _pair(scale, ours, other, reading, again=again)

    return prepare


@contextmanager
def _batches(scale: Scale) -> Iterator[tuple[Work, Work]]:
    broker = _STAGE.broker().target
    yield _pair(scale, _Side(broker, _BATCHES, _FEW), _Side(broker, _1KIB, _BUSY), _by_cpu)


def _synchronous(requests: Sends, load: tuple[int, int]) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        waiting = _Side(_STAGE.sync_broker().target, requests, load)
        hasty = _Side(_STAGE.broker().target, requests, load)
        yield _pair(scale, waiting, hasty, _by_wall)

    return prepare


@contextmanager
def _per_flush(scale: Scale) -> Iterator[tuple[Work, Work]]:
    """How many messages share one wait for the disk, of those that are on their way."""
    target = _STAGE.sync_broker().target
    connections, in_flight = _BUSY

    def shared() -> Sample:
        before = flushes(target)
        done = check(_STAGE.drive(target, _1KIB, _BUSY, seconds=_seconds(scale)))
        count = flushes(target) - before
        return Sample(done.messages, count, count)

    shared()
    _STAGE.settle(target)
    _STAGE.warmed_up()
    yield shared, lambda: Sample(connections * in_flight, 1, 1)


# ---- latency

_Percentile = Literal["median", "p99"]


def _latency(
    percentile: _Percentile, *, against_apache: bool = False, again: bool = False
) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        ours = _STAGE.broker().target
        other = _STAGE.apache()[0] if against_apache else _STAGE.floor("relay")

        def wanted(target: Target, way: Literal["broker", "relay"], seconds: float) -> Pace:
            return Pace(
                target=target,
                way=way,
                topic="bench-latency",
                body_size=1024,
                rate=_RATE,
                seconds=seconds,
            )

        pace = wanted(ours, "broker", max(_seconds(scale) * 3, scale.java_round))
        other_pace = wanted(other, "broker" if against_apache else "relay", pace.seconds)
        is_seen_again = again and _STAGE.has_kept_pace(other_pace)

        def work(wish: Pace) -> Work:
            def run() -> Sample:
                done: Paced = _STAGE.pace(wish, again=is_seen_again)
                taken = done.median if percentile == "median" else done.p99
                return Sample(1, taken, taken)

            if not is_seen_again:
                run()
            return run

        if against_apache and not is_seen_again:
            slot = wanted(other, "broker", scale.warming.slot)
            warm_up(lambda: 1 / _STAGE.pace(slot).median, scale.warming)
        works = work(pace), work(other_pace)
        if not is_seen_again:
            _STAGE.settle(ours, other)
            _STAGE.warmed_up()
        yield works

    return prepare


@contextmanager
def _beside_replay(scale: Scale) -> Iterator[tuple[Work, Work]]:
    """Live messages while another group reads a gibibyte of old ones, and without."""
    target = _STAGE.broker().target
    _STAGE.fill(target, _OLD, _OLD_MESSAGES // _OLD.per_request)
    seconds = _seconds(scale) * 3
    live = Pace(
        target=target,
        way="broker",
        topic="bench-live",
        body_size=1024,
        rate=_LIVE_RATE,
        seconds=seconds,
    )
    replay = Drive(
        target=target,
        requests=Pulls(topic=_OLD.topic, queues=1, per_request=32, messages=_OLD_MESSAGES),
        connections=1,
        in_flight=8,
        seconds=seconds + 0.2,
    )

    def alone() -> Sample:
        done = _STAGE.pace(live)
        return Sample(1, done.p99, done.p99)

    def beside() -> Sample:
        with ThreadPoolExecutor(1) as pool:
            replaying = pool.submit(_STAGE.second_generator.ask, replay)
            sample = alone()
            done = replaying.result()
        assert isinstance(done, Driven)
        check(done)
        return sample

    beside()
    _STAGE.settle(target)
    _STAGE.warmed_up()
    yield beside, alone


# ---- starting, and memory


@contextmanager
def _start(_: Scale) -> Iterator[tuple[Work, Work]]:
    def ours() -> Sample:
        with TemporaryDirectory(prefix="orbitmq-bench-") as folder, OurBroker(Path(folder)) as one:
            return Sample(1, one.took, one.took)

    def bare() -> Sample:
        with Interpreter() as one:
            return Sample(1, one.took, one.took)

    ours()
    yield ours, bare


def _memory(*, loaded: bool) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        with (
            TemporaryDirectory(prefix="orbitmq-bench-") as folder,
            OurBroker(Path(folder)) as ours,
            Interpreter() as bare,
        ):
            if loaded:
                check(_STAGE.drive(ours.target, _1KIB, _BUSY, count=50_000))
            yield _occupied(ours.pid), _occupied(bare.pid)

    return prepare


def _occupied(pid: int, count: Callable[[int], int] = own_bytes) -> Work:
    def look() -> Sample:
        size = count(pid)
        return Sample(1, size, size)

    return look


# ---- ours against Apache's


def _beside_apache(
    requests: Requests, load: tuple[int, int], reading: _Reading, *, again: bool
) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        apache, _ = _STAGE.apache()
        ours = _Side(_STAGE.broker().target, requests, load)
        theirs = _Side(apache, requests, load, is_java=True)
        yield _pair(scale, ours, theirs, reading, again=again)

    return prepare


@contextmanager
def _start_beside_apache(scale: Scale) -> Iterator[tuple[Work, Work]]:
    _, took = _STAGE.apache()
    with _start(scale) as (ours, _):
        yield ours, lambda: Sample(1, took, took)


def _memory_beside_apache(count: Callable[[int], int]) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        apache, _ = _STAGE.apache()
        yield _occupied(_STAGE.broker().pid, count), _occupied(apache.pid, count)

    return prepare


_CONSTANT = "a server with a constant answer"
_ECHO = "an echo server"
_RELAY = "a bare relay"
_PYTHON = "Python without anything"
_APACHE = f"Apache RocketMQ {APACHE_VERSION}'s broker"


def _line(
    name: str,
    prepare: Prepare,
    compared_with: str,
    *,
    clock: Clock = Clock.SERVER,
    target: float | None = None,
    room: str = "broker",
    unit: str = "messages/s",
    unit_factor: float = 1.0,
    time_for: float | None = None,
    rounds: int = 5,
    note: str = "",
) -> Bench:
    return Bench(
        name=name,
        room=room,
        unit=unit,
        compared_with=compared_with,
        peer=APACHE if compared_with == _APACHE else None,
        prepare=prepare,
        clock=clock,
        target=target,
        unit_factor=unit_factor,
        time_for=time_for,
        rounds=rounds,
        once_per_round=True,
        stage=_STAGE,
        note=note,
    )


def _latency_line(
    name: str, percentile: _Percentile, *, target: float | None = None, apache: bool = False
) -> Bench:
    return _line(
        name,
        _latency(percentile, against_apache=apache, again=percentile != "median"),
        _APACHE if apache else _RELAY,
        clock=Clock.WALL,
        target=target,
        room="peers" if apache else "broker",
        unit="ms",
        unit_factor=1e3,
        time_for=1,
    )


def _apache_lines(
    name: str, requests: Requests, load: tuple[int, int], *, target: float | None = None
) -> tuple[Bench, Bench]:
    """What clients get, and what that costs: they differ where a server uses several cores."""
    return (
        _line(
            name,
            _beside_apache(requests, load, _by_wall, again=False),
            _APACHE,
            clock=Clock.WALL,
            target=target,
            room="peers",
        ),
        _line(
            f"{name}, for the same CPU time",
            _beside_apache(requests, load, _per_cpu, again=True),
            _APACHE,
            room="peers",
            unit="messages per s of CPU",
        ),
    )


_SAME_ASYNC = "the same with asynchronous flush"
_DISK = "depends on the disk"
_BYTES = "bytes of answers"

BENCHES = (
    _line(
        "sends of 100 B, 1 in flight",
        _against("echo", _100B, _ONE, _by_wall),
        _ECHO,
        clock=Clock.WALL,
    ),
    _line(
        "sends of 1 KiB, 1 in flight",
        _against("echo", _1KIB, _ONE, _by_wall),
        _ECHO,
        clock=Clock.WALL,
    ),
    _line("sends of 100 B, 64 connections", _against("echo", _100B, _MANY_CONNECTIONS), _ECHO),
    _line(
        "sends of 1 KiB, 64 connections",
        _against("echo", _1KIB, _MANY_CONNECTIONS),
        _ECHO,
        target=0.2,
    ),
    _line(
        "sends of 100 B, 8 connections with 16 in flight",
        _against("constant", _100B, _BUSY),
        _CONSTANT,
    ),
    _line(
        "sends of 1 KiB, 8 connections with 16 in flight",
        _against("constant", _1KIB, _BUSY),
        _CONSTANT,
        target=0.1,
    ),
    _line("batches of 32 messages of 1 KiB", _batches, "single sends of 1 KiB", target=1.8),
    _line(
        "synchronous flush, 100 B, 1 in flight",
        _synchronous(_100B, _ONE),
        _SAME_ASYNC,
        clock=Clock.WALL,
        note=_DISK,
    ),
    _line(
        "synchronous flush, 1 KiB, 1 in flight",
        _synchronous(_1KIB, _ONE),
        _SAME_ASYNC,
        clock=Clock.WALL,
        note=_DISK,
    ),
    _line(
        "synchronous flush, 100 B, 64 connections",
        _synchronous(_100B, _MANY_CONNECTIONS),
        _SAME_ASYNC,
        clock=Clock.WALL,
        note=_DISK,
    ),
    _line(
        "synchronous flush, 1 KiB, 64 connections",
        _synchronous(_1KIB, _MANY_CONNECTIONS),
        _SAME_ASYNC,
        clock=Clock.WALL,
        note=_DISK,
    ),
    _line(
        "synchronous flush, 1 KiB, 128 in flight",
        _synchronous(_1KIB, _BUSY),
        _SAME_ASYNC,
        clock=Clock.WALL,
        note=_DISK,
        target=0.3,
    ),
    _line(
        "messages that share a flush, 1 KiB, 128 in flight",
        _per_flush,
        "all that are in flight",
        unit="messages",
        target=0.4,
        note=_DISK,
    ),
    _line(
        "pulls of 32, four queues interleaved, 1 KiB",
        _against("constant", _PULLS_OF_32, _FEW),
        _CONSTANT,
        target=0.25,
    ),
    _line(
        "the same in bytes",
        _against("constant", _PULLS_OF_32, _FEW, _bytes_by_cpu, again=True),
        _CONSTANT,
        unit="MiB/s",
        unit_factor=1 / _MIB,
    ),
    _line(
        "pulls of 256 side by side, 1 KiB",
        _against("constant", _PULLS_OF_256, _FEW),
        _CONSTANT,
        target=0.4,
    ),
    _line(
        "those of 256 in bytes",
        _against("constant", _PULLS_OF_256, _FEW, _bytes_by_cpu, again=True),
        _CONSTANT,
        unit="MiB/s",
        unit_factor=1 / _MIB,
    ),
    _latency_line("arrival to delivery at 1,000 messages/s, median", "median", target=0.25),
    _latency_line("arrival to delivery at 1,000 messages/s, 99th percentile", "p99"),
    _line(
        "arrival to delivery beside a replay of 1 GiB, 99th percentile",
        _beside_replay,
        "the same without the replay",
        clock=Clock.WALL,
        unit="ms",
        unit_factor=1e3,
        time_for=1,
        target=0.5,
        note=f"at {_LIVE_RATE:g} messages/s",
    ),
    _line(
        "start of the process until it listens",
        _start,
        _PYTHON,
        clock=Clock.WALL,
        unit="s",
        time_for=1,
        rounds=3,
    ),
    _line(
        "memory at rest",
        _memory(loaded=False),
        _PYTHON,
        unit="MiB",
        unit_factor=1 / _MIB,
        time_for=1,
        rounds=1,
    ),
    _line(
        "memory after 50,000 sends of 1 KiB",
        _memory(loaded=True),
        _PYTHON,
        unit="MiB",
        unit_factor=1 / _MIB,
        time_for=1,
        rounds=1,
    ),
    *_apache_lines("sends of 1 KiB, 8 connections with 16 in flight", _1KIB, _BUSY),
    *_apache_lines("sends of 1 KiB, 64 connections", _1KIB, _MANY_CONNECTIONS),
    *_apache_lines("sends of 1 KiB, 1 in flight", _1KIB, _ONE),
    *_apache_lines("batches of 32 messages of 1 KiB", _BATCHES, _FEW),
    *_apache_lines("batches of 256 messages of 1 KiB", _LARGE_BATCHES, _FEW, target=2.5),
    *_apache_lines("pulls of 32, four queues interleaved, 1 KiB", _PULLS_OF_32, _FEW),
    _latency_line("arrival to delivery at 1,000 messages/s, median", "median", apache=True),
    _latency_line("arrival to delivery at 1,000 messages/s, 99th percentile", "p99", apache=True),
    _line(
        "start of the process until it serves",
        _start_beside_apache,
        _APACHE,
        clock=Clock.WALL,
        room="peers",
        unit="s",
        time_for=1,
        rounds=1,
        note="one start of each; Apache's until its name server knows it",
    ),
    _line(
        "memory after all of these lines",
        _memory_beside_apache(own_bytes),
        _APACHE,
        room="peers",
        unit="MiB",
        unit_factor=1 / _MIB,
        time_for=1,
        rounds=1,
        note=f"anonymous memory, without mapped files; its heap: {APACHE_HEAP}",
    ),
    _line(
        "resident memory after all of these lines",
        _memory_beside_apache(resident_bytes),
        _APACHE,
        room="peers",
        unit="MiB",
        unit_factor=1 / _MIB,
        time_for=1,
        rounds=1,
        note="with the parts of mapped files that are in memory, which the kernel takes back when "
        "it needs them; Apache's broker maps its whole store",
    ),
)
