"""R14: transactions whose producers and broker die at any step."""

from __future__ import annotations

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.figures import Figure, at_most, judged, none_of, told, tried
from tools.chaos.history import now
from tools.chaos.programs import Program, Stage, pass_time

_GROUP = "readers"


def transactions(stage: Stage, effort: Effort) -> list[Figure]:
    """Two of three are committed; a third of the verdicts is never said, and asked for."""
    chance = effort.chance
    broker = stage.broker(
        "broker-a",
        "broker.store.flush.policy=sync",
        "broker.transactions.timeout=1",
        "broker.transactions.check_interval=1",
        "broker.transactions.check_max=1000",
    )
    broker.start()
    create_topic(stage, queues=8)
    reader = stage.worker("consume", "c1", group=_GROUP)
    producers = [_start(stage, effort, chance.randrange(1 << 30)) for _ in range(3)]
    for worker in (reader, *producers):
        worker.until_written('"ready"')
    kills = 0
    deadline = now() + effort.seconds
    while now() < deadline:
        pass_time(chance.uniform(0.3, 3.0))
        kills += 1
        if chance.random() < 0.6:
            stage.kill(producers.pop(chance.randrange(len(producers))))
            producers.append(_start(stage, effort, chance.randrange(1 << 30)))
            producers[-1].until_written('"ready"')
        else:
            broker.kill()
            broker.restart()
    # Those who are left send no more, and answer what they are asked.
    answering = stage.worker("transact", "answers", rate=0)
    answering.until_written('"ready"')
    finish(producers)
    took = drain(stage, (_GROUP,))
    pass_time(3.0)  # for what should never come
    finish((answering, reader))
    audit(stage)
    analysis = analyse(stage.events(), groups=(_GROUP, "audit"))
    return [
        tried("R14", "kills of producers and of the broker", kills),
        *judged("R14", analysis),
        told("R14", "rolled back, and never seen", analysis.refused),
        told("R14", "committed twice (the word was repeated after a crash)", analysis.stored_twice),
        at_most("R14", "drained after", took, 30, "s"),
        none_of("R14", "complaints in logs", stage.complaints()),
    ]


def _start(stage: Stage, effort: Effort, seed: int) -> Program:
    name = stage.fresh_name("t")
    return stage.worker("transact", name, rate=60, seed=seed, timeout=2.0)
