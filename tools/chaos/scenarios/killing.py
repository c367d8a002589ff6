"""R1, R2, R5: kill -9 of the broker under load, again and again."""

from __future__ import annotations

import contextlib
from math import inf

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.figures import Figure, at_most, judged, none_of, repeated, told, tried
from tools.chaos.history import now
from tools.chaos.programs import ScenarioFailed, Stage, pass_time, wait_until
from tools.chaos.repetitions import UNSAVED
from tools.chaos.timing import latencies, quantile, recoveries

_PRODUCERS = 4
_QUEUES = 16
_GROUPS = ("readers", "pullers")
_GIB = 1024**3
#: Seconds of a run in which a consumer dies once together with the broker, and a first one in
#: every run that is not shorter than this.
_WITH_CONSUMER = 60.0
_SHORTEST = 20.0
#: Seconds without a fault before that, in which progress is saved. They are no time of faults, and
#: make the run longer.
CALM = UNSAVED + 1.0


def kill_sync(stage: Stage, effort: Effort) -> list[Figure]:
    """With synchronous flushing: R1."""
    return _kill(stage, effort, "R1", "sync")


def kill_async(stage: Stage, effort: Effort) -> list[Figure]:
    """With asynchronous flushing: R2, the part without a power failure."""
    return _kill(stage, effort, "R2", "async")


def _kill(stage: Stage, effort: Effort, row: str, policy: str) -> list[Figure]:
    chance = effort.chance
    broker = stage.broker(
        "broker-a",
        f"broker.store.flush.policy={policy}",
        # Small files, so that the log rolls while it is killed.
        "broker.store.file_size=4194304",
        "broker.store.preallocate_step=1048576",
    )
    broker.start()
    create_topic(stage, queues=_QUEUES)
    producers = [
        stage.worker("produce", f"p{number}", rate=200, size=500, timeout=2.0)
        for number in range(_PRODUCERS)
    ]
    # What has a key is tried once, because of its order; this one tries again.
    producers.append(stage.worker("produce", "p-again", rate=100, timeout=2.0, is_keyed=False))
    consumers = [stage.worker("consume", f"c{number}", group="readers") for number in range(2)]
    puller = stage.worker("pull", "puller", group="pullers", hold=2.0, pull_timeout=5.0)
    for worker in (*producers, *consumers, puller):
        worker.until_written('"ready"')
    starts: list[float] = []
    openings: list[float] = []

    def kill_and_restart(pause: float = 0.0) -> None:
        broker.kill()
        pass_time(pause)
        starts.append(broker.restart())
        openings.append(broker.opened_in)

    def kill_with_consumer() -> None:
        """Whoever follows knows of progress what the broker has saved; it gets the time to."""
        pass_time(CALM)
        broker.kill()
        stage.kill(consumers.pop(chance.randrange(len(consumers))))
        starts.append(broker.restart())
        openings.append(broker.opened_in)
        consumers.append(stage.worker("consume", stage.fresh_name("c-late-"), group="readers"))
        consumers[-1].until_written('"ready"')

    pauses = with_consumers = 0
    deadline = now() + effort.seconds
    planned = deaths_of_both(effort.seconds)
    while now() < deadline:
        pass_time(chance.uniform(0.3, 3.0))
        if chance.random() < 0.1:
            # Long enough for clients to give it up; what they sent meanwhile it finds afterwards.
            stage.pause(broker.running)
            pass_time(chance.uniform(1.0, 6.0))
            stage.resume(broker.running)
            pauses += 1
            pass_time(chance.uniform(0.5, 2.0))
        # One at once, so that a short run has it too; the others when chance has it.
        if with_consumers < planned and (not with_consumers or chance.random() < 0.3):
            kill_with_consumer()
            with_consumers += 1
            deadline += CALM
        else:
            kill_and_restart(chance.uniform(0.0, 2.0) if chance.random() < 0.3 else 0.0)
        if chance.random() < 0.3:  # once more, while it may still be repairing
            kill_and_restart()
    pass_time(2.0)
    with contextlib.suppress(ScenarioFailed):  # whoever does not is told below
        wait_until(lambda: _have_all_gone_on(stage), "everybody goes on", every=0.5)
    finish(producers)
    took = drain(stage, _GROUPS)
    finish((*consumers, puller))
    audit(stage)
    events = stage.events()
    analysis = analyse(events, groups=(*_GROUPS, "audit"), contiguous=("pullers",))
    gone_on = recoveries(events, _GROUPS)
    size = broker.log_bytes() / _GIB
    times = latencies(events, "readers")
    return [
        tried(row, "kills", len(starts)),
        told(row, "pauses of the broker (SIGSTOP)", pauses),
        told(row, "kills of a consumer together with the broker", with_consumers),
        *judged(row, analysis),
        *repeated(row, events, _GROUPS),
        at_most(
            row,
            "opened after a kill, from settings to listening",
            max(openings),
            2 * max(size, 1.0),  # 2 s, and 2 s for each GB after the first
            "s",
        ),
        told(row, "opened after a kill, p50", quantile(sorted(openings), 0.5), "s"),
        told(row, "slowest start of a process, imports included, under load", max(starts), "s"),
        told(row, "size of the log", size * 1024, "MiB"),
        at_most(
            row,
            "every producer went on after",
            max((each.stored for each in gone_on), default=inf),
            5,
            "s",
        ),
        at_most(
            row,
            "every consumer went on after",
            max((each.read for each in gone_on), default=inf),
            5,
            "s",
        ),
        at_most(row, "drained after", took, 30, "s"),
        told(row, "stored twice (answer lost, sent again)", analysis.stored_twice),
        told(row, "delivered again", analysis.delivered_again),
        told(row, "end to end p50", quantile(times, 0.5) * 1000, "ms"),
        told(row, "end to end p99, outages included", quantile(times, 0.99) * 1000, "ms"),
        none_of(row, "complaints in logs", stage.complaints()),
    ]


def _have_all_gone_on(stage: Stage) -> bool:
    gone_on = recoveries(stage.events(), _GROUPS)
    return all(max(each.stored, each.read) < inf for each in gone_on)


def calm_beside(seconds: float) -> float:
    """Seconds without faults that a run with so many seconds of them has as well."""
    return CALM * deaths_of_both(seconds)


def deaths_of_both(seconds: float) -> int:
    """How often a consumer dies together with the broker in so many seconds of faults."""
    return int(seconds // _WITH_CONSUMER) or int(seconds >= _SHORTEST)
