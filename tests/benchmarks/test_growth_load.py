"""The generator of the curves and the filled stores, against a real broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.growth.asking import Done, Follows, Load, Reads, Sends, Wish, Work
from benchmarks.growth.filling import Filling
from benchmarks.growth.generator import fulfil
from benchmarks.growth.lines import Line
from benchmarks.growth.stage import GrowthStage, LoadFailed
from tests.support.tries import TRIES

if TYPE_CHECKING:
    from benchmarks.load.asking import Target

SECONDS = 0.15
SHELF = Filling(topic="shelf", queues=6, per_queue=100, body_size=300, side_by_side=7)


@pytest.fixture(scope="module")
def stage():
    with GrowthStage() as running:
        yield running


@pytest.fixture
def broker(stage):
    return stage.broker("filled", [SHELF])


def load(target: Target, work: Work, connections: int = 2, in_flight: int = 4) -> Load:
    return Load(target=target, work=work, connections=connections, in_flight=in_flight)


def bring(*loads: Load) -> Done:
    done = fulfil(Wish(loads=loads, seconds=SECONDS))
    assert not done.failure
    return done


def stored(target: Target, topic: str, queues: int) -> int:
    with Line(target.port) as line:
        return sum(line.end_of(topic, queue_id) for queue_id in range(queues))


def test_a_filled_store_is_served_in_full(broker):
    assert stored(broker, SHELF.topic, SHELF.queues) == SHELF.count

    done = bring(
        load(broker, Reads(topic=SHELF.topic, queues=SHELF.queues, per_queue=SHELF.per_queue))
    )

    assert done.read > 0
    assert done.read % 32 == 0
    assert done.cpu > 0


def test_what_counts_as_sent_is_stored(stage, broker):
    topic = stage.topic(broker, "sent", 40)

    done = bring(load(broker, Sends(topic=topic, queues=40, body_size=100)))

    # Those before the clock started and those still on their way are stored as well.
    assert 0 < done.sent <= stored(broker, topic, 40)
    assert done.seconds >= SECONDS


def test_so_many_messages_are_brought_however_long_that_takes(stage, broker):
    topic = stage.topic(broker, "enough", 4)

    done = stage.bring(0.0, load(broker, Sends(topic=topic, queues=4, body_size=100)), least=3000)

    assert done.sent >= 3000
    assert stage.messages_in_each_queue(broker, topic, 4) >= 700


@pytest.mark.parametrize(("is_shared", "copies"), [(True, 1), (False, 3)])
def test_consumers_share_the_messages_or_get_all_of_them(stage, broker, is_shared, copies):
    topic = stage.topic(broker, f"followed-{copies}", 8)
    sends = load(broker, Sends(topic=topic, queues=8, body_size=100))
    follows = Follows(topic=topic, queues=8, is_shared=is_shared)

    def is_so():
        done = bring(load(broker, follows, connections=3), sends)
        # What was on its way when the clock started and when it stopped makes the difference.
        return done.read == pytest.approx(copies * done.sent, rel=0.2, abs=copies * 64)

    # A machine that stops for a moment at either end makes it larger.
    assert any(is_so() for _ in range(TRIES))


def test_a_broker_that_refuses_is_not_fast_but_a_failure(stage, broker):
    sends = Sends(topic="sent to nobody", queues=4, body_size=100)

    with pytest.raises(LoadFailed, match=r"refused: .*topic"):
        stage.bring(SECONDS, load(broker, sends))
