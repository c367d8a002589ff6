"""What somebody who writes Python would use instead: clients for Kafka, beside a broker of Kafka's.

Each client does the same with the same bodies at its own broker, in turns with ours, and looks at
the outcome of every message, or at every body. Bodies go alone, without keys, tags and headers.
Ratios by wall time include the brokers, which share the machine's cores with their clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.beside import Load, RoundsBeside, Side, by_wall
from benchmarks.load.clientprocesses import ClientProcess
from benchmarks.load.clientstage import ClientStage
from benchmarks.load.clientwork import Consume, Consuming, Send, Sending, Spent
from benchmarks.load.kafka import KAFKA
from benchmarks.runner import Bench, Clock, NotAtHand, Prepare, Scale, Work

#: A name that the page knows: it shows both looks at a pair's rounds in one row.
ROOM = "beside Kafka's clients for Python"

CPU_AGAIN = ", for the same CPU time"

_STAGE = ClientStage()
_KIB = 1024
_SIZES = {_KIB: "1 KiB", 100: "100 B"}
_ROUNDS = 5
#: Messages that one wish sends, or consumes, in a full run and in a quick one.
_SENT = (50_000, 10_000)
_CONSUMED = (150_000, 20_000)

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Rival:
    """One of the two."""

    name: str
    client: Callable[[], ClientProcess]
    #: What fills topics fastest.
    filling: Sending


_CONFLUENT = _Rival("confluent-kafka", _STAGE.confluent, "many")
_AIOKAFKA = _Rival("aiokafka", _STAGE.aiokafka, "gathered")


def _wish(rival: _Rival | None, topic: str, way: Sending, count: int, size: int) -> Send:
    """Of one for Kafka, or of ours."""
    address, port = (
        (_STAGE.cluster.name_server, _STAGE.cluster.broker_port)
        if rival is None
        else (_STAGE.kafka.address, 0)
    )
    return Send(
        name_server=address, broker_port=port, topic=topic, way=way, count=count, body_size=size
    )


def _spent(client: ClientProcess, wish: Send | Consume) -> Spent:
    done = client.ask(wish)
    assert isinstance(done, Spent)
    return done


def _sends(rival: _Rival | None, way: Sending, size: int) -> Load:
    def load(client: ClientProcess, scale: Scale) -> Spent:
        wish = _wish(rival, f"sends-{size}", way, _SENT[scale.is_quick], size)
        return _spent(client, wish)

    return load


def _consumes(rival: _Rival | None, way: Consuming, size: int) -> Load:
    def load(client: ClientProcess, scale: Scale) -> Spent:
        count = _CONSUMED[scale.is_quick]
        filling: Sending = "many" if rival is None else rival.filling
        wish = _wish(rival, f"filled-{size}", filling, count, size)
        consume = Consume(
            name_server=wish.name_server,
            broker_port=wish.broker_port,
            topic=_STAGE.filled_by(client, wish),
            group=f"bench-{next(_numbers)}",
            way=way,
            # Queues end at different times: the last messages would come at a lower rate.
            count=count * 9 // 10,
        )
        return _spent(client, consume)

    return load


def _pair(
    name: str,
    size: int,
    rival: _Rival,
    ours: tuple[str, Load],
    theirs: tuple[str, Load],
    *,
    target: float | None = None,
    cpu_target: float | None = None,
    only_full: bool = False,
) -> Iterator[Bench]:
    """By wall time, then the same rounds by CPU time."""
    rounds = RoundsBeside(
        Side(lambda: _STAGE.ours, ours[1]),
        Side(rival.client, theirs[1]),
        warm=by_wall,  # its broker is Java
    )
    title = f"{name}, {_SIZES[size]}: {ours[0]} beside {rival.name}"
    looks: tuple[tuple[str, Prepare, Clock, float | None], ...] = (
        (title, rounds.by_wall, Clock.WALL, target),
        (title + CPU_AGAIN, rounds.by_cpu, Clock.CLIENT, cpu_target),
    )
    for line, prepare, clock, wanted in looks:
        yield Bench(
            name=line,
            room=ROOM,
            unit="messages/s" if clock is Clock.WALL else "messages per s of CPU",
            compared_with=f"{rival.name}'s {theirs[0]}",
            prepare=_left_out_if_quick(prepare) if only_full else prepare,
            clock=clock,
            target=wanted,
            rounds=_ROUNDS,
            once_per_round=True,
            stage=_STAGE,
            peer=KAFKA,
        )


def _left_out_if_quick(prepare: Prepare) -> Prepare:
    @contextmanager
    def prepared(scale: Scale) -> Iterator[tuple[Work, Work]]:
        if scale.is_quick:
            raise NotAtHand("left to the full run")
        with prepare(scale) as works:
            yield works

    return prepared


def _lines() -> Iterator[Bench]:
    for size in _SIZES:
        yield from _pair(
            "send each, collect all",
            size,
            _AIOKAFKA,
            ("AsyncProducer.submit", _sends(None, "gathered", size)),
            ("send", _sends(_AIOKAFKA, "gathered", size)),
            target=1.5,
            cpu_target=1.5,
            only_full=size < _KIB,
        )
        yield from _pair(
            "send each, collect all",
            size,
            _CONFLUENT,
            ("Producer.submit", _sends(None, "submitted", size)),
            ("produce", _sends(_CONFLUENT, "submitted", size)),
            only_full=True,
        )
        yield from _pair(
            "send a list",
            size,
            _CONFLUENT,
            ("send_many", _sends(None, "many", size)),
            ("produce", _sends(_CONFLUENT, "many", size)),
            target=0.9 if size == _KIB else 1.0,
        )
        # What few small messages there are in a quick run comes before the clock begins.
        yield from _pair(
            "poll",
            size,
            _CONFLUENT,
            ("poll", _consumes(None, "bodies", size)),
            ("consume", _consumes(_CONFLUENT, "bodies", size)),
            only_full=size < _KIB,
        )
        yield from _pair(
            "poll",
            size,
            _AIOKAFKA,
            ("poll", _consumes(None, "bodies", size)),
            ("getmany", _consumes(_AIOKAFKA, "bodies", size)),
            only_full=True,
        )
        yield from _pair(
            "call a function for each",
            size,
            _AIOKAFKA,
            ("handlers", _consumes(None, "sync", size)),
            ("getmany", _consumes(_AIOKAFKA, "sync", size)),
            target=1.2,
            only_full=size < _KIB,
        )


BENCHES = tuple(_lines())
