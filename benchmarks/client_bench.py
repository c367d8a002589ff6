"""The client in a process of its own, against a cluster in another one.

Clients are compared with the least that anybody has to do for the same messages (a bare socket, the
decoder, a function call), and with what people would write without them. With two cores the broker
and its clients get in each other's way, so ratios are made of the CPU time that the *client's*
process used, all threads together, unless a line is about waiting. Figures are rates by wall time.

The peers are the C++ client from PyPI and Apache's for Java. They do the same as ours at the same
broker, in turns with it, and consume with as many threads. Each works under the load of a line
until it gets no faster, before the line is measured: Java compiles what it runs often.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks.beside import NO_ROUNDS, Load, RoundsBeside, Side, again, by_wall, per_cpu
from benchmarks.load.asking import Pace, Paced
from benchmarks.load.clientprocesses import CPP, ClientProcess
from benchmarks.load.clientstage import ClientStage
from benchmarks.load.clientwork import Consume, Consuming, Deliver, Send, Sending, Spent
from benchmarks.load.handover import (
    CrewHandover,
    ExecutorHandover,
    PulledBatches,
    WindowHandover,
)
from benchmarks.load.processes import APACHE, APACHE_VERSION
from benchmarks.runner import (
    LEAST_ROUNDS,
    Bench,
    Clock,
    NotAtHand,
    Prepare,
    Sample,
    Scale,
    Work,
)

_STAGE = ClientStage()

#: Messages of the topic that is consumed, by size of the run.
_FEW, _MANY = 16_000, 96_000
_RATE = 1000.0
_PEER_ROUNDS = 5
#: A second at a steady pace says little: on a shared machine ratios of single ones differ by half.
_PACED_ROUNDS = 15

_numbers = itertools.count()


def _by_cpu(done: Spent) -> Sample:
    return Sample(done.messages, done.cpu, done.seconds)


def _is_quick(scale: Scale) -> bool:
    return scale.is_quick


# ---- sending


def _send(client: ClientProcess, way: Sending, count: int, threads: int) -> Spent:
    done = client.ask(
        Send(
            name_server=_STAGE.cluster.name_server,
            broker_port=_STAGE.cluster.broker_port,
            topic="bench-sends",
            way=way,
            count=count,
            threads=threads,
        )
    )
    assert isinstance(done, Spent)
    return done


def _sending(
    way: Sending,
    floor: Sending,
    counts: tuple[int, int],
    *,
    threads: int = 1,
) -> Prepare:
    """One way of our client's against another one; so many messages a round with each."""

    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        factor = 1 if _is_quick(scale) else 2

        def work(way: Sending, count: int) -> Work:
            def run() -> Sample:
                return _by_cpu(_send(_STAGE.ours, way, count * factor, threads))

            run()
            return run

        yield work(way, counts[0]), work(floor, counts[1])

    return prepare


# ---- consuming


def _consume(client: ClientProcess, way: Consuming, scale: Scale) -> Spent:
    count = _FEW if _is_quick(scale) else _MANY
    done = client.ask(
        Consume(
            name_server=_STAGE.cluster.name_server,
            broker_port=_STAGE.cluster.broker_port,
            topic=_STAGE.filled(count),
            group=f"bench-{next(_numbers)}",
            way=way,
            # Queues end at different times: the last messages would come at a lower rate.
            count=count * 9 // 10,
        )
    )
    assert isinstance(done, Spent)
    return done


def _consuming(way: Consuming, floor: Consuming = "bare") -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        def work(way: Consuming) -> Work:
            def run() -> Sample:
                return _by_cpu(_consume(_STAGE.ours, way, scale))

            run()
            return run

        yield work(way), work(floor)

    return prepare


def _pull_to_listener(ours: type[CrewHandover | WindowHandover]) -> Prepare:
    """From the messages of a pull to the end of every listener, in this process; no socket."""

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        batches = PulledBatches()
        with ours(batches) as candidate, ExecutorHandover(batches) as executor:
            candidate.work()
            executor.work()
            yield candidate.work, executor.work

    return prepare


# ---- both


class _PacedRounds:
    """Rounds at a steady pace: made for the line of the median, looked at again for another."""

    def __init__(self) -> None:
        self.ours: list[Paced] = []
        self.floor: list[Paced] = []


def _latency(rounds: _PacedRounds) -> Prepare:
    """Makes rounds, and tells their medians."""

    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        seconds = scale.round_seconds * 8
        relay = Pace(
            target=_STAGE.relay,
            way="relay",
            topic="bench-latency",
            body_size=1024,
            rate=_RATE,
            seconds=seconds,
        )
        wish = Deliver(
            name_server=_STAGE.cluster.name_server,
            topic="bench-latency",
            rate=_RATE,
            seconds=seconds,
        )

        def ours() -> Sample:
            done = _STAGE.ours.ask(wish)
            assert isinstance(done, Paced)
            rounds.ours.append(done)
            return _median(done)

        def floor() -> Sample:
            done = _STAGE.generator.ask(relay)
            assert isinstance(done, Paced)
            rounds.floor.append(done)
            return _median(done)

        ours()
        floor()
        rounds.ours.clear()
        rounds.floor.clear()
        yield ours, floor

    return prepare


def _latency_again(rounds: _PacedRounds) -> Prepare:
    """The 99th percentiles of rounds that were made before."""

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        if min(len(rounds.ours), len(rounds.floor)) < _PACED_ROUNDS:
            raise NotAtHand(NO_ROUNDS)
        yield again(rounds.ours, _p99), again(rounds.floor, _p99)

    return prepare


def _median(done: Paced) -> Sample:
    return Sample(1, done.median, done.median)


def _p99(done: Paced) -> Sample:
    return Sample(1, done.p99, done.p99)


def _end_to_end(way: Sending) -> Prepare:
    """A producer, a broker and a consumer, each alone in its process, at the same time."""

    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        count = _FEW if _is_quick(scale) else _MANY

        def run() -> Sample:
            topic = f"bench-through-{next(_numbers)}"
            wish = Send(
                name_server=_STAGE.cluster.name_server,
                broker_port=_STAGE.cluster.broker_port,
                topic=topic,
                way="awaited",
                count=1,
            )
            _STAGE.ours.ask(wish)  # makes the topic
            with ThreadPoolExecutor(1) as pool:
                consuming: Future[Spent] = pool.submit(_consume_through, topic, count)
                sent = _STAGE.ours.ask(
                    Send(
                        name_server=wish.name_server,
                        broker_port=wish.broker_port,
                        topic=topic,
                        way=way,
                        count=count,
                    )
                )
                consumed = consuming.result()
            assert isinstance(sent, Spent)
            taken = consumed.ended - min(sent.began, consumed.began)
            return Sample(count, taken, taken)

        def frames() -> Sample:
            return by_wall(_send(_STAGE.ours, "frames", count, 1))

        run()
        yield run, frames

    return prepare


def _consume_through(topic: str, count: int) -> Spent:
    done = _STAGE.second.ask(
        Consume(
            name_server=_STAGE.cluster.name_server,
            broker_port=_STAGE.cluster.broker_port,
            topic=topic,
            group=f"bench-{next(_numbers)}",
            way="batch",
            count=count,
        )
    )
    assert isinstance(done, Spent)
    return done


# ---- ours against others


def _blocking(count: int, threads: int) -> Load:
    def load(client: ClientProcess, scale: Scale) -> Spent:
        return _send(client, "blocking", count if scale.is_quick else count * 4, threads)

    return load


def _pushed(client: ClientProcess, scale: Scale) -> Spent:
    return _consume(client, "sync", scale)


_EXECUTOR = "executor.submit for each message"
_BARE = "pulls on a bare socket, decoded, a function called"
_THREADSAFE = "run_coroutine_threadsafe on an asyncio producer"
_FRAMES = "frames encoded beforehand, on a bare socket"
_CPP = "the C++ client from PyPI (rocketmq 0.4.4)"
_CPP_NOTE = (
    "called through Python's ctypes, as its package does it; its threads call back into Python"
)
_JAVA = f"Apache RocketMQ {APACHE_VERSION}'s Java client"


def _line(
    name: str,
    prepare: Prepare,
    compared_with: str,
    *,
    clock: Clock = Clock.CLIENT,
    target: float | None = None,
    room: str = "client",
    unit: str = "messages/s",
    unit_factor: float = 1.0,
    time_for: float | None = None,
    rounds: int = 7,
    least_rounds: int = LEAST_ROUNDS,
    note: str = "",
) -> Bench:
    return Bench(
        name=name,
        room=room,
        unit=unit,
        compared_with=compared_with,
        peer={_CPP: CPP, _JAVA: APACHE}.get(compared_with),
        prepare=prepare,
        clock=clock,
        target=target,
        unit_factor=unit_factor,
        time_for=time_for,
        rounds=rounds,
        least_rounds=least_rounds,
        once_per_round=True,
        stage=_STAGE,
        note=note,
    )


def _latency_lines() -> Iterator[Bench]:
    rounds = _PacedRounds()
    name = "producer to handler at 1,000 messages/s"
    yield _latency_line(f"{name}, median", _latency(rounds), target=0.25)
    yield _latency_line(f"{name}, 99th percentile", _latency_again(rounds))


def _latency_line(name: str, prepare: Prepare, *, target: float | None = None) -> Bench:
    return _line(
        name,
        prepare,
        "a bare relay",
        clock=Clock.WALL,
        unit="ms",
        unit_factor=1e3,
        time_for=1,
        target=target,
        rounds=_PACED_ROUNDS,
        least_rounds=_PACED_ROUNDS,
    )


def _peer_lines(
    peer: Callable[[], ClientProcess],
    called: str,
    compared_with: str,
    *,
    is_java: bool,
    note: str = "",
) -> Iterator[Bench]:
    """What a user gets, by wall time; and what that costs the client's machine."""
    loads: tuple[tuple[str, Load], ...] = (
        ("blocking sends, 1 thread", _blocking(1000, 1)),
        ("blocking sends, 8 threads", _blocking(2000, 8)),
        ("no-op listener, 20 threads", _pushed),
    )
    for name, load in loads:
        rounds = RoundsBeside(
            Side(lambda: _STAGE.ours, load),
            Side(peer, load),
            # Compiling is CPU time; and what others do on this machine is not.
            warm=per_cpu if is_java else None,
        )
        yield _line(
            f"{called}: {name}",
            rounds.by_wall,
            compared_with,
            clock=Clock.WALL,
            room="peers",
            rounds=_PEER_ROUNDS,
            least_rounds=_PEER_ROUNDS,
            note=note,
        )
        yield _line(
            f"{called}: {name}, for the same CPU time",
            rounds.by_cpu,
            compared_with,
            room="peers",
            unit="messages per s of CPU",
            rounds=_PEER_ROUNDS,
            note=note,
        )


# The target of five times was set on "CPU per message to hand over and call a trivial listener, 20
# threads": on the hand-over by itself. What finding the offset to commit costs was measured apart,
# without a target, and no executor does it; the second line has it, and what its ratio is.
BENCHES = (
    _line(
        "pull to listener, 20 threads",
        _pull_to_listener(CrewHandover),
        _EXECUTOR,
        clock=Clock.CPU,
        target=5.0,
        rounds=15,
        note="the hand-over and the call alone, which is what the target is about",
    ),
    _line(
        "pull to listener with window and progress, 20 threads",
        _pull_to_listener(WindowHandover),
        _EXECUTOR,
        clock=Clock.CPU,
        rounds=15,
        note="all that a consumer does for a message; the executor keeps no progress",
    ),
    _line("no-op handler", _consuming("sync"), _BARE),
    _line("no-op async handler", _consuming("async"), _BARE),
    _line("no-op batch handler", _consuming("batch"), _BARE),
    _line("poll", _consuming("poll"), _BARE),
    _line("poll_arrow", _consuming("arrow"), _BARE, note="its columns are complete"),
    _line(
        "blocking sends, 1 thread",
        _sending("blocking", "threadsafe", (1000, 500)),
        _THREADSAFE,
        target=2.0,
    ),
    _line(
        "blocking sends, 8 threads",
        _sending("blocking", "threadsafe", (2000, 1000), threads=8),
        _THREADSAFE,
        target=2.0,
    ),
    _line("await send, one at a time", _sending("awaited", "frames", (1000, 8000)), _FRAMES),
    _line("sends submitted, 256 in flight", _sending("pipelined", "frames", (4000, 8000)), _FRAMES),
    _line(
        "send_batch of 32", _sending("batched", "pipelined", (8192, 4000)), "single sends submitted"
    ),
    *_latency_lines(),
    _line(
        "end to end, three processes, single sends",
        _end_to_end("pipelined"),
        "sends of encoded frames, without a consumer",
        clock=Clock.WALL,
        rounds=5,
    ),
    _line(
        "end to end, three processes, batches of 32",
        _end_to_end("batched"),
        "single sends of encoded frames, without a consumer",
        clock=Clock.WALL,
        rounds=5,
    ),
    *_peer_lines(_STAGE.cpp, "beside C++", _CPP, is_java=False, note=_CPP_NOTE),
    *_peer_lines(_STAGE.java, "beside Java", _JAVA, is_java=True),
)
