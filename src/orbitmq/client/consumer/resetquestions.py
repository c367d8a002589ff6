"""Whether an administrator wants a group to go on elsewhere in a queue that nobody pulls.

Brokers say so to a pull of the group, once (OrbitMQ's, and Apache's from version 5; older ones
push it to the members). A position that a broker has for the group says nothing like it: reports
come from anybody.

OrbitMQ's can be asked to say it again (`keep`): an answer may be lost, and who has heard of a reset
is to be there before it is forgotten. As long as it is not, they take no reports of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.landmarks import look
from orbitmq.client.consumer.pullanswers import PullStatus, read_pulled
from orbitmq.wire.codes import RequestCode

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue

#: What says something about resets; everything else is an error.
_ANSWERS: Final = frozenset(int(status.value) for status in PullStatus)


async def reset_told(
    engine: Engine, group: str, queue: Queue, at: int, *, keep: bool = False
) -> int | None:
    """Where a group that is at `at` is to go on, if its broker says so. Raises when it cannot."""
    answer = await engine.ask(
        engine.routes.master(queue.broker),
        RequestCode.PULL_MESSAGE,
        look(group, queue, at, keep_reset=keep or None),
        accept=_ANSWERS,
    )
    pulled = read_pulled(answer, at)
    return pulled.next_offset if pulled is not None and pulled.is_reset else None
