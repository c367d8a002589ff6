"""Messages that have come: as the store places them, and as others hear of them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from orbitmq.store.consumequeue import ConsumeQueue


class ArrivedIn(Protocol):
    """The queue of an arrival, as far as it concerns others: which one it is."""

    @property
    def topic(self) -> str: ...

    @property
    def queue_id(self) -> int: ...


#: A message that readers can see now: its queue, its number there, its tag code (the time of
#: delivery in the schedule topic), its offset in the log and its size.
Arrival: TypeAlias = tuple[ArrivedIn, int, int, int, int]
#: The same before it is announced, with the queue that it is to be written to.
Placed: TypeAlias = tuple[ConsumeQueue, int, int, int, int]
