"""The load generator and what it is set on, with a few hundred requests."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import pytest

from benchmarks.load.asking import Drive, Driven, Pace, Paced, Pulls, Requests, Sends, Target
from benchmarks.load.proc import own_bytes
from benchmarks.load.processes import Floor, Generator, OurBroker
from benchmarks.load.stage import check
from benchmarks.runner import Bench, NotAtHand, Sample, Scale, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.runner import Work

SENDS = Sends(topic="load", body_size=100)


@pytest.fixture(scope="module")
def generator():
    with Generator() as running:
        yield running


def drive(generator: Generator, target: Target, requests: Requests, count: int) -> Driven:
    outcome = generator.ask(
        Drive(target=target, requests=requests, connections=2, in_flight=4, count=count)
    )
    assert isinstance(outcome, Driven)
    return outcome


def test_every_answer_of_a_floor_is_counted(generator):
    with Floor("constant") as floor:
        done = drive(generator, floor.target, SENDS, 400)

    assert done.messages == 400
    assert done.bytes >= 400 * 150
    assert done.cpu > 0
    assert done.refused == 0


def test_an_answer_that_is_no_success_is_a_refusal(generator):
    with Floor("echo") as floor:
        done = drive(generator, floor.target, SENDS, 100)

    assert done.messages == 100
    assert done.refused > 0
    with pytest.raises(ChildProcessError, match=r"refused, the first: .*310"):
        check(done)


def test_what_was_sent_to_our_broker_can_be_pulled(generator, tmp_path):
    with OurBroker(tmp_path) as broker:
        sent = drive(generator, broker.target, SENDS, 512)
        pulled = drive(
            generator,
            broker.target,
            Pulls(topic=SENDS.topic, queues=SENDS.queues, per_request=8, messages=64),
            100,
        )
        memory = own_bytes(broker.pid)

    assert check(sent).messages == 512
    assert check(pulled).messages == 800
    assert pulled.bytes > 800 * 100
    assert 10 << 20 < memory < 1 << 30


@pytest.mark.parametrize("way", ["broker", "relay"])
def test_at_a_steady_pace_every_message_arrives(generator, tmp_path, way):
    with OurBroker(tmp_path) if way == "broker" else Floor("relay") as server:
        outcome = generator.ask(
            Pace(
                target=server.target,
                way="broker" if way == "broker" else "relay",
                topic="paced",
                body_size=100,
                rate=500,
                seconds=0.4,
            )
        )

    assert isinstance(outcome, Paced)
    assert outcome.messages == 200
    assert 0 < outcome.median <= outcome.p99 < 30


class Counted:
    """A stage that writes down when it is entered and left."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> Self:
        self.seen.append("entered")
        return self

    def __exit__(self, *_: object) -> None:
        self.seen.append("left")


def line(name: str, stage: Counted, *, is_here: bool = True) -> Bench:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        if not is_here:
            raise NotAtHand("its stable is empty")
        stage.seen.append(name)
        yield lambda: Sample(10, 2.0, 5.0), lambda: Sample(10, 1.0, 1.0)

    return Bench(
        name=name,
        room="peers",
        unit="leaps/s",
        compared_with="a horse",
        prepare=prepare,
        once_per_round=True,
        stage=stage,
    )


def test_what_was_measured_elsewhere_gives_the_ratio_by_cost_and_the_figure_by_time():
    result = measure(line("racing", Counted()), Scale(rounds=3))

    assert result.ratio == 0.5
    assert result.figure == 2.0


def test_neighbours_share_a_stage_and_an_absent_peer_is_named(run):
    stage = Counted()

    ran = run(
        benches=[
            line("walking", stage),
            line("racing", stage, is_here=False),
            line("resting", stage),
        ]
    )

    assert ran.status == 0
    assert stage.seen == ["entered", "walking", "resting", "left"]
    missing = ran.report.results[1]
    assert missing.figure is None
    assert missing.note == "not at hand: its stable is empty"
