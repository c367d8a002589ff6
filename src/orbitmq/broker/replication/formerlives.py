"""Topics that a master has deleted and made again between two looks at its table.

The table looks as it did, but for its version; only a master of ours says what it has deleted. The
queues tell. While a topic lives, none of its queues ends here beyond where it ends on the master:
everything here comes from there. So one that did was deleted, and its topic with it, after the last
message that the queue has here. (`Mirroring` sees the same by itself as soon as a queue begins
anew. This is for the time until somebody sends something.)

Two things must not be taken for it. Apache's queues are filled by a thread that may be behind its
log, which is what slaves are sent: only what that thread had certainly passed counts. And a topic
may have fewer queues than it had: of those, the master says nothing, and nothing is concluded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from orbitmq.store.statistics import QueueState
from orbitmq.store.store import Store
from orbitmq.wire.bodies.stats import TopicStats


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the log and the queues of this broker ended, before its master was asked anything."""

    log: int
    queues: Mapping[str, Mapping[int, QueueState]]  #: by topic and number

    @classmethod
    def of(cls, store: Store) -> Ends:
        queues: defaultdict[str, dict[int, QueueState]] = defaultdict(dict)
        for queue in store.queues():
            queues[queue.topic][queue.queue_id] = queue
        return cls(store.mirroring.written, queues)


def former_life(here: Mapping[int, QueueState], master: TopicStats) -> int:
    """The offset of the log below which the messages of a topic are of a former life; else 0."""
    ends = {queue.queue_id: bounds.max_offset for queue, bounds in master.offset_table.items()}
    return max(
        (
            queue.last_end
            for queue_id, queue in here.items()
            if queue_id in ends and ends[queue_id] < queue.max_offset
        ),
        default=0,
    )
