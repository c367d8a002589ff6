"""The processes with clients, and what they are compared with, with a few hundred messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import pytest

from benchmarks.load.asking import Paced
from benchmarks.load.clientprocesses import OurClient, OurCluster
from benchmarks.load.clientwork import Consume, Consuming, Deliver, Send, Sending, Spent
from benchmarks.load.handover import CrewHandover, ExecutorHandover, PulledBatches, WindowHandover
from benchmarks.load.processes import Child
from benchmarks.load.sparkpaced import percentile
from orbitmq import Position, PullConsumer

if TYPE_CHECKING:
    from pathlib import Path

_COUNT = 640


@dataclass(frozen=True, slots=True)
class Both:
    cluster: OurCluster
    client: OurClient

    def send(self, way: Sending, topic: str, *, threads: int = 1) -> Spent:
        done = self.client.ask(
            Send(
                name_server=self.cluster.name_server,
                broker_port=self.cluster.broker_port,
                topic=topic,
                way=way,
                count=_COUNT,
                threads=threads,
            )
        )
        assert isinstance(done, Spent)
        return done

    def consume(self, way: Consuming, topic: str) -> Spent:
        done = self.client.ask(
            Consume(
                name_server=self.cluster.name_server,
                broker_port=self.cluster.broker_port,
                topic=topic,
                group=f"group-{way}",
                way=way,
                count=_COUNT,
            )
        )
        assert isinstance(done, Spent)
        return done


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("cluster")
    with OurCluster(folder) as cluster, OurClient() as client:
        yield Both(cluster, client)


@pytest.mark.parametrize("way", get_args(Sending))
def test_so_many_messages_are_sent_in_every_way(both, way):
    done = both.send(way, f"sends-{way}", threads=4 if way in ("blocking", "threadsafe") else 1)

    assert done.messages == _COUNT
    assert done.seconds > 0
    assert done.cpu > 0


@pytest.mark.parametrize("way", get_args(Consuming))
def test_so_many_messages_are_consumed_in_every_way(both, way):
    both.send("pipelined", f"pulls-{way}")

    done = both.consume(way, f"pulls-{way}")

    # What came first starts the clock and is not counted.
    assert 0 < done.messages <= _COUNT
    assert done.seconds > 0
    assert done.cpu > 0


def test_the_way_from_a_producer_to_a_handler_is_timed(both):
    name_server = both.cluster.name_server

    done = both.client.ask(Deliver(name_server=name_server, topic="paced", rate=200, seconds=0.5))

    assert isinstance(done, Paced)
    assert done.messages == 100
    assert 0 < done.median <= done.p99


def test_messages_at_a_steady_pace_say_when_they_were_due(both):
    name_server = both.cluster.name_server
    words = ("-m", "benchmarks.load.sparkpaced", "rocketmq", name_server, "due", "200")
    with (
        Child(*words) as sender,
        PullConsumer("due", name_server=name_server, consume_from=Position.FIRST) as consumer,
    ):
        assert sender.line() == b"ready\n"
        consumer.subscribe("due")
        due: list[float] = []
        while len(due) < 100 and (found := consumer.poll(timeout=20)):
            due += [float(each.body) for each in found]

    first, *_, last = sorted(due)[1:]  # the first one made the topic
    assert len(due) >= 100
    assert last - first == pytest.approx((len(due) - 2) / 200, rel=0.01)


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (90, 9), (99, 10), (100, 10), (1, 1)])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(percent, value):
    assert percentile(range(10, 0, -1), percent) == value


@pytest.mark.parametrize("kind", [CrewHandover, WindowHandover, ExecutorHandover])
def test_handing_over_ends_with_every_message_done(kind):
    batches = PulledBatches()
    with kind(batches) as handover:
        assert [handover.work() for _ in range(2)] == [batches.count] * 2
