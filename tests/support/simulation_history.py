"""What happened in a simulated system, and whether it may have: after Jepsen's analysis of queues.

lost            an acknowledged message is not in the log of its broker, at its place
inconsistent    two readers, or a reader and the log, disagree about what is at a place
aborted         somebody was given a message whose sending was refused, or that nobody sent
reordered       messages sent one after the other lie in a queue in another order; or a member
                of an ordered group was given one before the one in front of it was done
overlapping     two members of an ordered group had messages of one queue at the same time
unseen          an acknowledged message was never consumed, though everything was healed and
                had time
skipped         progress at a broker passed a message that nobody has finished
forgotten       a broker that was started again knows less of progress than it must have saved
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

#: Broker, queue.
QueueKey = tuple[str, int]
#: Broker, queue, offset.
Place = tuple[str, int, int]
#: A broker saves progress every five seconds, and is looked at every half: a crash costs no more.
SAVED_AFTER = 6.0


class Outcome(enum.Enum):
    """What the sender of a message was told."""

    OPEN = "open"  #: nothing yet, or nothing certain: it may be stored or not
    ACKED = "acked"
    REFUSED = "refused"


class Moment(enum.Enum):
    """When most has been promised and least has been done: a good time for a broker to die."""

    ACKED = "acked"  #: a producer was just told that the broker has its message
    FAILED = "failed"  #: a member sends a message back, and forgets it when that is taken


@dataclass(slots=True)
class Sent:
    """A message, as its producer knows it."""

    producer: str
    outcome: Outcome = Outcome.OPEN
    place: Place | None = None


@dataclass(slots=True)
class _QueueOfGroup:
    """What a group did with one queue."""

    #: Offsets whose handler has ended, well or by failing.
    finished: set[int] = field(default_factory=set)
    #: Below this everything is finished.
    done: int = 0
    running: Counter[str] = field(default_factory=Counter)

    def finish(self, offset: int) -> None:
        self.finished.add(offset)
        while self.done in self.finished:
            self.done += 1


class _Progress:
    """How far a group had come in a queue, as a broker said from time to time.

    It may go back: a member that lost its queue unheard reports what it knows.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._since: list[tuple[float, int]] = [(float("-inf"), 0)]

    def note(self, offset: int, now: float) -> None:
        if offset != self._offset:
            self._offset = offset
            self._since.append((now, offset))

    def saved(self, now: float) -> int:
        """What a broker that dies now must know after its next start, at least."""
        earlier = [offset for at, offset in self._since if at <= now - SAVED_AFTER]
        later = [offset for at, offset in self._since if at > now - SAVED_AFTER]
        return min((earlier[-1], *later))


class History:
    """Takes down what happens, and finds what must not."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._digest = hashlib.sha256()
        self.trace: list[str] = []
        self.sent: dict[bytes, Sent] = {}
        self.violations: list[str] = []
        #: Called with every moment, and the broker that it is one of.
        self.watchers: list[Callable[[Moment, str], None]] = []
        self.deliveries: dict[str, Counter[bytes]] = defaultdict(Counter)
        self.succeeded: dict[str, set[bytes]] = defaultdict(set)
        self._read: dict[Place, bytes] = {}
        self._queues: dict[tuple[str, QueueKey], _QueueOfGroup] = defaultdict(_QueueOfGroup)
        self._acked_last: dict[tuple[str, QueueKey], int] = {}
        self._progress: dict[tuple[str, QueueKey], _Progress] = defaultdict(_Progress)
        #: Of brokers that are down: what they must know when they are back.
        self._saved: dict[str, dict[tuple[str, int], int]] = {}

    # ---- taking down

    def note(self, *words: object) -> None:
        """One event, with the time."""
        line = f"{self._time():.6f} {' '.join(map(str, words))}"
        self.trace.append(line)
        self._digest.update(line.encode() + b"\n")

    @property
    def fingerprint(self) -> str:
        """The same for the same events in the same order at the same times."""
        return self._digest.hexdigest()

    def begin_send(self, body: bytes, producer: str) -> None:
        self.sent[body] = Sent(producer)
        self.note("send", body.decode())

    def end_send(self, body: bytes, outcome: Outcome, place: Place | None = None) -> None:
        sent = self.sent[body]
        sent.outcome, sent.place = outcome, place
        self.note("sent", body.decode(), outcome.value, place)
        if outcome is Outcome.ACKED and place is not None:
            key = (sent.producer, place[:2])
            before = self._acked_last.get(key, -1)
            if place[2] <= before:
                self._object("reordered", f"{body!r} at {place}, behind {before} of its producer")
            self._acked_last[key] = max(before, place[2])
            self._tell(Moment.ACKED, place[0])

    def begin_handling(
        self, group: str, member: str, body: bytes, place: Place | None, *, is_ordered: bool
    ) -> None:
        """A handler is given a message; `place` is None for one of the retry topic."""
        self.deliveries[group][body] += 1
        self.note("begin", group, member, body.decode(), place)
        sent = self.sent.get(body)
        if sent is None or sent.outcome is Outcome.REFUSED:
            self._object("aborted", f"{body!r} was given to {member}, and was never accepted")
        if place is None:
            return
        known = self._read.setdefault(place, body)
        if known != body:
            self._object("inconsistent", f"{place} is {known!r} and {body!r}")
        queue = self._queues[group, place[:2]]
        if is_ordered:
            others = [each for each, count in queue.running.items() if count and each != member]
            if others:
                self._object("overlapping", f"{place} by {member} and {', '.join(others)}")
            if place[2] > queue.done:
                self._object(
                    "reordered", f"{member} was given {place} and {queue.done} is not done"
                )
        queue.running[member] += 1

    def end_handling(
        self, group: str, member: str, body: bytes, place: Place | None, *, is_done: bool
    ) -> None:
        """The handler has ended; `is_done` is whether the message is (a retry may follow)."""
        self.note("end", group, member, body.decode(), place, is_done)
        if place is not None:
            queue = self._queues[group, place[:2]]
            queue.running[member] -= 1
            if is_done:
                queue.finish(place[2])

    def sent_back(self, group: str, place: Place | None) -> None:
        """A failed message may be passed by progress: it comes again through the retry topic."""
        if place is not None:
            self._queues[group, place[:2]].finish(place[2])
            self._tell(Moment.FAILED, place[0])

    def member_died(self, member: str) -> None:
        """Whatever it had in its hands is nobody's now."""
        self.note("died", member)
        for queue in self._queues.values():
            queue.running.pop(member, None)

    def broker_died(self, broker: str) -> None:
        """It knows of progress what it has saved."""
        now = self._time()
        self._saved[broker] = {
            (group, queue_id): progress.saved(now)
            for (group, (name, queue_id)), progress in self._progress.items()
            if name == broker
        }

    # ---- looking

    def check_saved(self, group: str, broker: str, offsets: Mapping[int, int]) -> None:
        """Progress as a broker has it at its start."""
        for (whose, queue_id), saved in self._saved.get(broker, {}).items():
            if whose != group:
                continue
            known = offsets.get(queue_id, 0)
            if known < saved:
                self._object(
                    "forgotten", f"{group} at {broker}:{queue_id} is {known}, {saved} was saved"
                )
            self._progress[group, (broker, queue_id)].note(known, self._time())

    def check_progress(self, group: str, broker: str, offsets: Mapping[int, int]) -> None:
        """Progress as a broker has it now."""
        now = self._time()
        for queue_id, offset in offsets.items():
            key = (group, (broker, queue_id))
            done = self._queues[key].done
            if offset > done:
                self._object("skipped", f"{group} at {broker}:{queue_id} says {offset}, not {done}")
            self._progress[key].note(offset, now)

    def unseen(self, groups: Iterable[str]) -> dict[str, list[bytes]]:
        """Acknowledged messages that a group has not consumed."""
        acked = [body for body, sent in self.sent.items() if sent.outcome is Outcome.ACKED]
        return {
            group: missing
            for group in groups
            if (missing := [body for body in acked if body not in self.succeeded[group]])
        }

    def check_log(self, log: Mapping[Place, bytes]) -> None:
        """What the brokers' logs hold in the end, of all queues of the topic."""
        for body, sent in self.sent.items():
            if sent.outcome is Outcome.ACKED and sent.place is not None:
                found = log.get(sent.place)
                if found != body:
                    self._object("lost", f"{body!r} was stored at {sent.place}: {found!r} is there")
        for place, body in self._read.items():
            if log.get(place) != body:
                self._object("inconsistent", f"{place} was read as {body!r}: {log.get(place)!r}")

    def check_unseen(self, groups: Iterable[str]) -> None:
        for group, missing in self.unseen(groups).items():
            self._object("unseen", f"{group} never consumed {missing}")

    @property
    def acked(self) -> int:
        return sum(sent.outcome is Outcome.ACKED for sent in self.sent.values())

    @property
    def duplicates(self) -> int:
        return sum(count - 1 for group in self.deliveries.values() for count in group.values())

    def _tell(self, moment: Moment, broker: str) -> None:
        for watch in self.watchers:
            watch(moment, broker)

    def _object(self, kind: str, what: str) -> None:
        self.violations.append(f"{kind}: {what}")
        self.note("VIOLATION", kind, what)
