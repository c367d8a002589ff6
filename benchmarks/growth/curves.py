"""The curves: what grows, under which load, and why a curve may rise where it does.

The broker is a process of its own, and what counts is its CPU time: system calls included, the
generator's work not. Only for the number of broker processes is it the rate by wall time, because
more processes are there to use more cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.growth.asking import Done, Follows, Load, Reads, Sends, Work
from benchmarks.growth.curve import Allowance, Curve, Prepare, Probe, Probes
from benchmarks.growth.filling import Filling
from benchmarks.growth.frames import PER_PULL, PLACES
from benchmarks.growth.stage import GrowthStage
from benchmarks.growth.wording import BYTES_AXIS
from benchmarks.load.asking import Target
from benchmarks.runner import Scale

_STAGE = GrowthStage()

_KIB = 1024
_CONNECTIONS = (1, 2, 4, 8, 16, 32, 64)
_QUEUES = (1, 4, 16, 64, 256, 1000)
_BACKLOG = (0, 100_000, 1_000_000, 10_000_000)
_OLD = _BACKLOG[1:]
_SIZES = (100, _KIB, 10 * _KIB, 100 * _KIB, _KIB * _KIB)
_PROCESSES = (1, 2)
#: Of the rate with two processes, whose load generator needs a core as well.
_LEAST_GAIN = 1.5

#: Connections, and requests in flight on each.
_BUSY = (8, 16)
_FEW = (4, 4)
_ONE = (1, 8)

#: How many messages there are to be read at each number of queues, and at each size.
_SHELF = 32_000
_SHELF_BYTES = 32 << 20


def _micros(done: Done, messages: int) -> float:
    return done.cpu / messages * 1e6


def _seconds(scale: Scale) -> float:
    """Of one visit to one size."""
    return scale.round_seconds * 1.25


def _sending(scale: Scale, target: Target, work: Sends, load: tuple[int, int]) -> float:
    done = _STAGE.bring(_seconds(scale), _load(target, work, load))
    return _micros(done, done.sent)


def _reading(scale: Scale, target: Target, work: Reads) -> float:
    done = _STAGE.bring(_seconds(scale), _load(target, work, _FEW))
    return _micros(done, done.read)


def _ready(scale: Scale, target: Target, filling: Filling) -> Reads:
    """Every place has been read once: the first time after a start is dearer.

    Old messages are checked then, in stretches of a thousand, each once. In the order of a queue
    that costs about half of what serving a message does; but those who read here and there pay for
    a whole stretch with each of their first pulls.
    """
    reads = Reads(topic=filling.topic, queues=filling.queues, per_queue=filling.per_queue)
    _STAGE.bring(_seconds(scale), _load(target, reads, _ONE), least=PLACES * PER_PULL)
    return reads


def _load(target: Target, work: Work, load: tuple[int, int]) -> Load:
    return Load(target=target, work=work, connections=load[0], in_flight=load[1])


# ---- connections


def _by_connections(in_flight: Callable[[int], int]) -> Prepare:
    """Sends of 1 KiB, so many in flight on each of so many connections; and a constant answer."""

    @contextmanager
    def prepare(scale: Scale, _: Sequence[int]) -> Iterator[Probes]:
        broker, floor = _STAGE.broker("first"), _STAGE.constant_answers()
        sends = Sends(topic=_STAGE.topic(broker, "growth-connections", 4), queues=4, body_size=_KIB)

        def probe(target: Target) -> Probe:
            return lambda count: _sending(scale, target, sends, (count, in_flight(count)))

        yield Probes(probe(broker), probe(floor))

    return prepare


# ---- queues


@contextmanager
def _sends_by_queues(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
    broker = _STAGE.broker("first")
    for queues in sizes:
        _STAGE.topic(broker, f"growth-queues-{queues}", queues)

    def ours(queues: int) -> float:
        sends = Sends(topic=f"growth-queues-{queues}", queues=queues, body_size=_KIB)
        return _sending(scale, broker, sends, _BUSY)

    yield Probes(ours)


def _reads_by_queues(name: str, side_by_side: int) -> Prepare:
    def shelf(queues: int) -> Filling:
        return Filling(
            topic=f"growth-{name}-{queues}",
            queues=queues,
            per_queue=_SHELF // queues,
            body_size=_KIB,
            side_by_side=side_by_side,
        )

    @contextmanager
    def prepare(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
        broker = _STAGE.broker(name, [shelf(queues) for queues in sizes])
        reads = {queues: _ready(scale, broker, shelf(queues)) for queues in sizes}
        yield Probes(lambda queues: _reading(scale, broker, reads[queues]))

    return prepare


# ---- backlog


def _backlog(messages: int) -> Filling:
    return Filling(
        topic="growth-backlog",
        queues=4,
        per_queue=messages // 4,
        body_size=24,
        side_by_side=1000,
        is_bare=True,
    )


def _with_backlog(messages: int) -> Target:
    return _STAGE.broker(f"backlog {messages}", [_backlog(messages)])


@contextmanager
def _sends_by_backlog(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
    brokers = {messages: _with_backlog(messages) for messages in sizes}
    sends = Sends(topic=_backlog(0).topic, queues=_backlog(0).queues, body_size=100)
    yield Probes(lambda messages: _sending(scale, brokers[messages], sends, _BUSY))


@contextmanager
def _reads_by_backlog(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
    brokers = {messages: _with_backlog(messages) for messages in sizes}
    reads = {
        messages: _ready(scale, broker, _backlog(messages)) for messages, broker in brokers.items()
    }
    yield Probes(lambda messages: _reading(scale, brokers[messages], reads[messages]))


# ---- consumers


def _by_consumers(*, is_shared: bool, queues: int) -> Prepare:
    """Messages of 100 B from four producers to waiting consumers; the cost of one delivery."""
    name = "growth-shared" if is_shared else "growth-each"

    @contextmanager
    def prepare(scale: Scale, _: Sequence[int]) -> Iterator[Probes]:
        broker = _STAGE.broker("first")
        topic = _STAGE.topic(broker, name, queues)
        sends = _load(broker, Sends(topic=topic, queues=queues, body_size=100), _FEW)
        follows = Follows(topic=topic, queues=queues, is_shared=is_shared)

        def ours(consumers: int) -> float:
            following = Load(target=broker, work=follows, connections=consumers)
            done = _STAGE.bring(_seconds(scale), following, sends)
            return _micros(done, done.read)

        yield Probes(ours)

    return prepare


# ---- sizes


def _sends_of(size: int) -> Sends:
    return Sends(topic=f"growth-size-{size}", queues=4, body_size=size)


@contextmanager
def _sends_by_size(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
    broker = _STAGE.broker("sizes")
    for size in sizes:
        _STAGE.topic(broker, _sends_of(size).topic, _sends_of(size).queues)
    yield Probes(lambda size: _sending(scale, broker, _sends_of(size), _FEW))


@contextmanager
def _reads_by_size(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
    """Of what was sent to the same broker, the same number of bytes of each size."""
    broker = _STAGE.broker("sizes")
    reads = {}
    for size in sizes:
        sends = _sends_of(size)
        wanted = min(_SHELF, _SHELF_BYTES // size) // sends.queues
        _STAGE.topic(broker, sends.topic, sends.queues)
        while _STAGE.messages_in_each_queue(broker, sends.topic, sends.queues) < wanted:
            _STAGE.bring(0, _load(broker, sends, _FEW), least=wanted)
        reads[size] = Reads(topic=sends.topic, queues=sends.queues, per_queue=wanted)
    yield Probes(lambda size: _reading(scale, broker, reads[size]))


# ---- processes


def _by_processes(reading: Callable[[Done], float]) -> Prepare:
    """Every broker under the load of one."""

    @contextmanager
    def prepare(scale: Scale, sizes: Sequence[int]) -> Iterator[Probes]:
        brokers = [_STAGE.broker(name) for name in ("first", "second")[: max(sizes)]]
        for broker in brokers:
            _STAGE.topic(broker, "growth-processes", 4)
        sends = Sends(topic="growth-processes", queues=4, body_size=_KIB)

        def ours(processes: int) -> float:
            loads = [_load(broker, sends, _BUSY) for broker in brokers[:processes]]
            return reading(_STAGE.bring(_seconds(scale) * 3, *loads))

        yield Probes(ours)

    return prepare


_CONSTANT = "a server with a constant answer"
_BACKLOG_NOTE = (
    "Messages of the backlog have bodies of 24 B and neither keys nor other properties: it is "
    "about their number."
)

CURVES = (
    Curve(
        name="sends of 1 KiB, one in flight on each connection",
        axis="connections",
        sizes=_CONNECTIONS,
        prepare=_by_connections(lambda _: 1),
        floor=_CONSTANT,
        stage=_STAGE,
    ),
    Curve(
        name="sends of 1 KiB, 64 in flight on all connections together",
        axis="connections",
        sizes=_CONNECTIONS,
        prepare=_by_connections(lambda count: 64 // count),
        floor=_CONSTANT,
        allowance=Allowance(
            "one read of a connection brings all the requests that are there, and one write takes "
            "all their answers; the more connections the same requests come on, the more system "
            "calls they need, which is most of what the floor does",
            3.0,
        ),
        stage=_STAGE,
    ),
    Curve(
        name="sends of 1 KiB to all queues of a topic",
        axis="queues",
        sizes=_QUEUES,
        prepare=_sends_by_queues,
        allowance=Allowance(
            "every queue has a file, which is made, written and flushed from time to time so that "
            "a start after a crash has little to read again; with many queues that is done less "
            "often (`broker.store.flush.durable_bytes`)",
            1.5,
        ),
        stage=_STAGE,
    ),
    Curve(
        name="pulls of 32, those of a queue side by side in the log",
        axis="queues",
        sizes=_QUEUES,
        prepare=_reads_by_queues("beside", 32),
        stage=_STAGE,
    ),
    Curve(
        name="pulls of 32, queues interleaved in the log",
        axis="queues",
        sizes=_QUEUES,
        prepare=_reads_by_queues("apart", 1),
        allowance=Allowance(
            "messages of the only queue lie side by side and are sent as one piece; from the "
            "second queue on each is gathered by itself",
            3.0,
        ),
        stage=_STAGE,
    ),
    Curve(
        name="sends of 100 B",
        axis="messages of backlog",
        sizes=_BACKLOG,
        quick_sizes=_BACKLOG[:-1],
        prepare=_sends_by_backlog,
        note=_BACKLOG_NOTE,
        stage=_STAGE,
    ),
    Curve(
        name="pulls of 32 anywhere in the backlog",
        axis="messages of backlog",
        sizes=_OLD,
        quick_sizes=_OLD[:-1],
        prepare=_reads_by_backlog,
        allowance=Allowance(
            "every pull of a large backlog finds entries and messages in memory that no cache of "
            "the processor holds",
            1.6,
        ),
        note=f"{_BACKLOG_NOTE} Every place that is pulled from was read once before: the first "
        "reading after a start, which checks old messages, is not in these figures.",
        stage=_STAGE,
    ),
    Curve(
        name="delivery to consumers of one group that share 64 queues",
        axis="consumers",
        sizes=_CONNECTIONS,
        prepare=_by_consumers(is_shared=True, queues=64),
        allowance=Allowance(
            "answers to one consumer share a write and its next pulls a read; with a consumer for "
            "each queue every message needs both for itself",
            2.2,
        ),
        stage=_STAGE,
    ),
    Curve(
        name="delivery to as many groups, each of which gets all messages",
        axis="consumers",
        sizes=_CONNECTIONS,
        prepare=_by_consumers(is_shared=False, queues=4),
        stage=_STAGE,
    ),
    Curve(
        name="sends",
        axis=BYTES_AXIS,
        sizes=_SIZES,
        prepare=_sends_by_size,
        allowance=Allowance(
            "every byte is read from the socket, checked and written. A message above 64 KiB comes "
            "in several reads, which are joined: one copy more",
            rise_per_size=1.6,
        ),
        stage=_STAGE,
    ),
    Curve(
        name="pulls",
        axis=BYTES_AXIS,
        sizes=_SIZES,
        prepare=_reads_by_size,
        allowance=Allowance(
            "every byte is written to the socket. An answer holds 256 KiB, or one message: from "
            "there on each message is an answer of its own",
            rise_per_size=1.6,
        ),
        stage=_STAGE,
    ),
    Curve(
        name="sends of 1 KiB, 128 in flight at every broker",
        axis="broker processes",
        sizes=_PROCESSES,
        prepare=_by_processes(lambda done: done.sent / done.seconds),
        unit="messages/s",
        is_rate=True,
        least_gain=_LEAST_GAIN,
        note="By wall time. The process that loads the brokers needs a core as well: with two "
        "cores, two brokers cannot give twice the rate.",
        stage=_STAGE,
    ),
    Curve(
        name="the same, CPU time of all brokers together",
        axis="broker processes",
        sizes=_PROCESSES,
        prepare=_by_processes(lambda done: _micros(done, done.sent)),
        stage=_STAGE,
    ),
)
