"""Where pulled messages go: decided by the kind of consumer, asked by the pull loop.

A consumer that is pushed to decodes them at once, checks tags by text, and gives what is new to its
handlers through the window. A consumer that is polled keeps the bytes until somebody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.flowcontrol import FlowReason, FlowSettings
from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.received import ReceivedMessage
from orbitmq.message.stored import decode_messages
from orbitmq.message.sysflag import BATCH_MASK

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.pullanswers import Pulled
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.client.queue import Queue
    from orbitmq.message.stored import StoredMessage


class Receiver(Protocol):
    """Takes what the pull loop finds. Called on the loop; must not block."""

    def queues_changed(self, count: int) -> None:
        """So many queues are pulled now."""

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        """Why a queue must not be pulled for now: too much of it is here already."""

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        """Take the messages that were found; returns how many were for us.

        Raises `MessageError` when they cannot be read, and has then taken none.
        """

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        """There is nothing for us below `next_offset` but what was received before."""

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        """The broker has no message at the offset asked for, and names another one."""


class Accepting(Protocol):
    """What receiving needs of consumption."""

    def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
        """Consume these, in time. Never blocks."""


class Positions(Protocol):
    """What receiving needs of a progress store."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        """Everything below `offset` is done with."""


class IntoWindow:
    """The receiver of a consumer that is pushed to."""

    def __init__(
        self,
        progress: Positions,
        consumption: Accepting,
        *,
        flow: FlowSettings | None = None,
        is_orderly: bool = False,
        group: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._progress = progress
        self._consumption = consumption
        self._flow = flow or FlowSettings()
        self._is_orderly = is_orderly
        self._group = group
        self._namespace = namespace
        self._limits = self._flow.limits(1, is_orderly=is_orderly)

    def queues_changed(self, count: int) -> None:
        self._limits = self._flow.limits(count, is_orderly=self._is_orderly)

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        return self._limits.exceeded_by(owned.window)

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        queue, group, namespace = owned.queue, self._group, self._namespace
        stored = decode_pulled(pulled)
        found = [ReceivedMessage(each, queue, group, None, namespace) for each in stored]
        if stored:
            owned.newest = stored[-1]
        wanted = subscription.accepted(found)
        window = owned.window
        new = window.add(wanted, pulled.next_offset)
        if new:
            try:
                self._consumption.accept(owned, new)
            except BaseException:
                window.withdraw(new)
                raise
        elif not len(window):
            self._all_done(owned)
        return len(wanted)

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        owned.window.skip_to(next_offset)
        if not len(owned.window):
            self._all_done(owned)

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        """Does not happen here: the queue is dropped and begun anew."""

    def _all_done(self, owned: OwnedQueue) -> None:
        done = owned.window.commit_offset
        if done is not None:
            self._progress.update(owned.queue, done)


def decode_pulled(pulled: Pulled) -> list[StoredMessage]:
    """The messages that a pull found. Raises `MessageError`."""
    stored = decode_messages(pulled.body)
    for each in stored:
        if each.sys_flag & BATCH_MASK == BATCH_MASK:
            return without_inner_batches(stored, pulled.offset)
    return stored
