"""The clients for Kafka that ours is measured beside, and how the page shows that."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from benchmarks.kafka_bench import BENCHES, CPU_AGAIN, ROOM
from benchmarks.load.clientprocesses import KafkaClient
from benchmarks.load.clientwork import Consume, Send, Spent
from benchmarks.load.kafka import KAFKA, KafkaBroker, KafkaJars
from benchmarks.runner import Bench, Clock, NotAtHand, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.load.clientwork import Consuming, Sending
    from benchmarks.runner import Scale, Work

_COUNT = 2_000
_LIBRARIES = {"confluent_kafka": "confluent-kafka", "aiokafka": "aiokafka"}


@pytest.fixture(scope="module")
def kafka():
    if not KAFKA.is_there:
        pytest.skip("Kafka's jars are not here; make bench fetches them")
    with KafkaBroker(KafkaJars.obtain()) as broker:
        yield broker


@pytest.mark.parametrize("library", _LIBRARIES)
@pytest.mark.parametrize(
    ("sending", "consuming"), [("many", "bodies"), ("gathered", "sync"), ("submitted", "bodies")]
)
def test_a_client_for_kafka_sends_and_consumes_so_many(
    kafka, library, sending: Sending, consuming: Consuming
):
    topic = f"{library}-{sending}"
    with KafkaClient(library, _LIBRARIES[library]) as client:
        sent = client.ask(
            Send(
                name_server=kafka.address,
                broker_port=0,
                topic=topic,
                way=sending,
                count=_COUNT,
                body_size=100,
            )
        )
        # All of them, and one that looked for the partitions.
        consumed = client.ask(
            Consume(
                name_server=kafka.address,
                broker_port=0,
                topic=topic,
                group=f"group-{topic}",
                way=consuming,
                count=_COUNT + 1,
            )
        )

    assert isinstance(sent, Spent)
    assert isinstance(consumed, Spent)
    assert sent.messages == _COUNT
    assert 0 < consumed.messages <= _COUNT
    assert min(sent.seconds, sent.cpu, consumed.cpu) > 0


def test_a_library_that_is_not_installed_is_named():
    with pytest.raises(NotAtHand, match="horse-kafka is not installed"):
        KafkaClient("horse_kafka", "horse-kafka")


def line(name: str, clock: Clock, *, target: float | None = None, reason: str = "") -> Bench:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        if reason:
            raise NotAtHand(reason)
        yield lambda: Sample(9_000, 1.0, 1.0), lambda: Sample(6_000, 1.0, 1.0)

    return Bench(
        name=name,
        room=ROOM,
        unit="messages/s",
        compared_with="a horse",
        prepare=prepare,
        clock=clock,
        target=target,
        once_per_round=True,
    )


def test_the_page_has_both_looks_at_the_same_rounds_in_one_row_and_in_a_plot(run):
    ran = run(
        benches=[
            line("racing", Clock.WALL, target=1.2),
            line("racing" + CPU_AGAIN, Clock.CLIENT),
            line("resting", Clock.WALL, target=1.2, reason="no horse"),
        ]
    )

    assert f"## {ROOM[0].upper()}{ROOM[1:]}" in ran.page
    assert (
        "| racing | 9,000 | a horse | 6,000 | 1.50 (1.50 to 1.50); at least 1.2: ok "
        "| 1.50 (1.50 to 1.50) |" in ran.page
    )
    assert "| resting |  | a horse (not at hand: no horse) |" in ran.page
    assert "acks=1" in ran.page
    plots = [path for path in ran.files if path.suffix == ".svg"]
    assert [path.name for path in plots] == ["performance-beside-kafka-s-clients-for-python.svg"]
    assert "by CPU time of the client" in plots[0].read_text()


def test_every_line_beside_kafka_has_its_rounds_looked_at_by_both_clocks():
    names = [each.name for each in BENCHES]

    assert names[1::2] == [name + CPU_AGAIN for name in names[::2]]
    assert all(each.peer is KAFKA for each in BENCHES)
