"""A thread that waits for one outcome, at a gate of its own."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from orbitmq.remoting.errors import RemotingError
    from orbitmq.wire.command import Command

#: Seconds that a thread sleeps at most before it looks at the time again: no clock of the system
#: has to understand a wait without an end.
LONGEST_SLEEP: Final = 3600.0


class Waiter:
    """Waits on its thread; is settled and woken by any other one."""

    __slots__ = ("_gate", "outcome")

    def __init__(self) -> None:
        # A lock would complain about being opened twice, by an error that an interrupt, which can
        # have any type, could not be told from.
        self._gate: SimpleQueue[None] = SimpleQueue()
        #: The answer, or why there is none; None as long as nothing is known.
        self.outcome: Command | RemotingError | None = None

    def settle(self, outcome: Command | RemotingError) -> None:
        """Here is the outcome. May be repeated: the first one counts."""
        if self.outcome is None:
            self.outcome = outcome
        self._gate.put(None)

    def wake(self) -> None:
        """Have it look around: there is an outcome, or something to do."""
        self._gate.put(None)

    def sleep(self, timeout: float) -> None:
        """Until it is woken, or for so long, or for no reason. A wake that came before counts."""
        if not 0.0 < timeout < LONGEST_SLEEP:
            timeout = max(0.0, min(timeout, LONGEST_SLEEP))
        try:  # noqa: SIM105  # `suppress` costs as much as the rest
            self._gate.get(True, timeout)
        except Empty:
            pass
