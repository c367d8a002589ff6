"""What happens, told in words while it happens: each thing once, when it is first seen."""

from __future__ import annotations

from collections.abc import Iterator

from examples.demo.billing import Counts
from examples.demo.history import Moment
from examples.demo.orders import BILLING, MAX_RETRIES, QUEUES, TOPIC


class Story:
    """The sentences of one run."""

    def __init__(self, rate: float, console: str) -> None:
        self._rate = rate
        self._console = console.rstrip("/")
        self._told: set[str] = set()
        self._members = 1

    def of(self, now: Moment, counts: Counts, *, is_sending: bool) -> list[str]:
        """What is new at this moment."""
        found = [text for name, text in self._facts(now, counts) if name not in self._told]
        self._told.update(name for name, _ in self._facts(now, counts))
        if now.members != self._members:
            found.append(self._change(now.members))
            self._members = now.members
        if not is_sending and "closed" not in self._told:
            self._told.add("closed")
            found.append("The shops close. Both groups finish what is left, retries included.")
        return found

    def _facts(self, now: Moment, counts: Counts) -> Iterator[tuple[str, str]]:
        if now.sent:
            yield (
                "sent",
                (
                    f"Three shops send {self._rate:,g} orders a second into the topic {TOPIC!r}, "
                    f"which has {QUEUES} queues."
                ),
            )
        if now.shipped:
            yield (
                "shipped",
                "A plain Python consumer ships them within milliseconds: group 'shipping'.",
            )
        if counts.billed:
            yield (
                "billed",
                (
                    "Spark bills the same orders, a batch at a time, joins them with customers "
                    f"and writes Parquet: group {BILLING!r}, with progress of its own."
                ),
            )
        if counts.retried:
            yield (
                "retried",
                (
                    "The bank refused some. They went back to the broker, which delivers them "
                    "again after a second; no other order waits for them."
                ),
            )
        if now.dead:
            yield (
                "dead",
                (
                    f"One has failed {MAX_RETRIES + 1} times. It is a dead letter now, kept with "
                    f"its reason: {self._console}/dead-letters/{BILLING}"
                ),
            )

    def _change(self, members: int) -> str:
        if members > self._members:
            return (
                f"Another shipper joins: {members} members share the {QUEUES} queues now, and "
                "nothing stops meanwhile."
            )
        return (
            f"A shipper leaves: the other {members} take over its queues where it stood."
            if members > 1
            else "A shipper is gone: the one that is left takes over its queues."
        )
