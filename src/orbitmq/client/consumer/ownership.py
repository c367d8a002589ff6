"""The queues of one consumer: owned, and claimed on the way to that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.client.consumer.members import CLAIMS, LEAVING, queues_text
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.bodies.stats import ConsumerRunningInfo, ProcessQueueInfo

if TYPE_CHECKING:
    from orbitmq.client.consumer.locks import QueueLock
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.queue import Queue
    from orbitmq.clock import Clock

_MIB = 1024 * 1024


@dataclass(slots=True, eq=False)
class Claim:
    """A queue that belongs to us by the rules, and that we have not begun yet."""

    queue: Queue
    since: float  #: by the clock's `monotonic`
    #: The members before the change that made the queue ours.
    former: tuple[str, ...] = ()
    #: How many questions had been sent when it was made: only answers to later ones matter.
    after: int = 0
    #: Whether all brokers were asked for the members since: the second look of `handover`.
    is_looked_at: bool = False
    lock: QueueLock | None = None
    #: Not tried again before, because where the queue begins could not be said.
    not_before: float = float("-inf")


@dataclass(slots=True)
class RebalanceCounts:
    """What has happened to the queues of a consumer since it was made."""

    rounds: int = 0
    failed_rounds: int = 0  #: a topic that was left as it was, for want of an answer
    gained: int = 0
    released: int = 0
    stalled: int = 0  #: queues begun anew because their pull had stopped
    postponed: int = 0  #: attempts to begin a queue whose start could not be worked out
    overdue: int = 0  #: queues begun while somebody else still held them, after the longest wait
    #: Messages whose handler outlived the loss of their queue: they come a second time.
    abandoned: int = 0


@dataclass(slots=True)
class Ownership:
    """What is owned and what is claimed; a queue is never both."""

    owned: dict[Queue, OwnedQueue] = field(default_factory=dict)
    claims: dict[Queue, Claim] = field(default_factory=dict)
    counts: RebalanceCounts = field(default_factory=RebalanceCounts)
    #: Queues that are not owned, and that are being reset: how often at once (`resetting`).
    resets: Counter[Queue] = field(default_factory=Counter)

    def reset_begins(self, queue: Queue) -> None:
        self.resets[queue] += 1

    def reset_ended(self, queue: Queue) -> None:
        self.resets[queue] -= 1
        if not self.resets[queue]:
            del self.resets[queue]

    def of(self, topic: str) -> list[OwnedQueue]:
        """The owned queues of a topic, also those that are being given up."""
        return [owned for queue, owned in self.owned.items() if queue.topic == topic]

    def claims_of(self, topic: str) -> list[Claim]:
        return [claim for queue, claim in self.claims.items() if queue.topic == topic]

    def running_info(self, progress: ProgressStore, clock: Clock) -> ConsumerRunningInfo:
        """What others are told when they ask (307). A queue is in it until it is given up.

        One that was claimed is, until the reset that it has met is put by: whoever has it next has
        to find that.
        """
        leaving = [
            queue for queue, owned in self.owned.items() if owned.is_draining or owned.is_dropped
        ]
        given_up = [
            queue for queue in self.resets if queue not in self.owned and queue not in self.claims
        ]
        properties = {CLAIMS: self.claims, LEAVING: [*leaving, *given_up]}
        held = {
            _wire(queue): _described(owned, progress.read(queue), clock)
            for queue, owned in self.owned.items()
        }
        for queue in given_up:
            held[_wire(queue)] = ProcessQueueInfo(
                commit_offset=_known(progress.read(queue)), is_dropped=True
            )
        return ConsumerRunningInfo(
            mq_table=held,
            properties={name: queues_text(queues) for name, queues in properties.items() if queues},
        )


def _wire(queue: Queue) -> MessageQueue:
    return MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)


def _described(owned: OwnedQueue, position: int | None, clock: Clock) -> ProcessQueueInfo:
    window = owned.window
    least, most = window.bounds or (0, 0)
    taken_least, taken_most = window.taken_bounds or (0, 0)
    lock = owned.lock
    times = _epoch_millis(clock, pull=owned.last_pull, consumed=owned.last_consumed)
    return ProcessQueueInfo(
        cached_msg_count=len(window),
        cached_msg_max_offset=most,
        cached_msg_min_offset=least,
        cached_msg_size_in_mib=window.size // _MIB,
        commit_offset=_known(position),
        is_dropped=owned.is_dropped,
        last_consume_timestamp=times["consumed"],
        last_pull_timestamp=times["pull"],
        locked=lock is not None and lock.is_held(clock.monotonic()),
        transaction_msg_count=window.taken_count,
        transaction_msg_max_offset=taken_most,
        transaction_msg_min_offset=taken_least,
    )


def _known(position: int | None) -> int:
    return -1 if position is None else position


def _epoch_millis(clock: Clock, **instants: float) -> Mapping[str, int]:
    """Instants of the clock that never goes back, as times of the day."""
    offset = clock.now() - clock.monotonic()
    return {name: milliseconds(instant + offset) for name, instant in instants.items()}
