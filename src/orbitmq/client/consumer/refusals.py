"""Brokers that refuse to let a group consume, and whether anything can arrive in spite of them.

| a broker says                                       | what it is    | what follows              |
|-----------------------------------------------------|---------------|---------------------------|
| the account may not, or is not known                | AccessDenied  | it does not pass by itself |
| there is no such group, and none is made            | GroupRefused  | somebody may create it    |
| reading is off: the group, the topic or the broker  | ReadingOff    | an operator will undo it  |

A refusal stands for a queue until a pull is served there or the queue is given up, and for a topic
until its members are listed. It is an error in the log (ReadingOff: a warning) when it begins and,
while it lasts, from time to time. That it ended does not bring the next line forward: where brokers
with the group and without it answer by turns, at one address even, every other answer would be a
beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from orbitmq.client.errors import AccessDenied, BrokerRefused, GroupRefused
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.codes import ForbiddenType, ResponseCode

if TYPE_CHECKING:
    from orbitmq.client.queue import Queue
    from orbitmq.clock import Clock
    from orbitmq.remoting.address import Address

log = logging.getLogger(__name__)

#: While a broker refuses a group, it is told again after so many seconds.
TELL_AGAIN: Final = 600.0

#: How to have messages again that were switched off; by what was.
_UNDONE_BY: Final[Mapping[ForbiddenType, str]] = {
    ForbiddenType.BROKER: "let the broker be read: permission = 6 in its settings",
    ForbiddenType.GROUP: "resume it with: orbitmq group resume {group}",
    ForbiddenType.TOPIC: "turn it on with: orbitmq topic update {topic} --permission rw",
    ForbiddenType.BROADCASTING: "allow it with: orbitmq group update {group} --broadcast",
    ForbiddenType.SUBSCRIPTION: "an administrator can allow it again",
}


class ReadingOff(BrokerRefused):
    """Somebody has switched the reading of a group, a topic or a broker off."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, topic: str, kind: ForbiddenType, refused: BrokerRefused) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        self.kind = kind
        undone_by = _UNDONE_BY[kind].format(group=group, topic=topic)
        # The same text for all topics of a group that is paused.
        text = f"group {group!r} gets nothing from {self.address} for now: {self.remark}"
        self.args = (f"{text}; {undone_by}",)


Refusal: TypeAlias = AccessDenied | GroupRefused | ReadingOff


def is_access_denied(error: BaseException | None) -> bool:
    """Whether a server refused because of who asks. Brokers before 5.3 have no code for it."""
    return isinstance(error, BrokerRefused) and (
        error.code == ResponseCode.NO_PERMISSION
        or (error.code == ResponseCode.SYSTEM_ERROR and "AclException" in error.remark)
    )


class Refusals:
    """What brokers refuse to one group now, and which topics were ever served."""

    def __init__(self, group: str, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._told = Reminders(interval=TELL_AGAIN)
        self._queues: dict[Queue, Refusal] = {}
        #: Topics whose members brokers do not list to this account.
        self._topics: dict[str, AccessDenied] = {}
        self._served: set[str] = set()
        #: Called with every refusal: maybe nothing can arrive any more.
        self.on_refused: Callable[[], None] = _nothing

    def refused(
        self, queue: Queue, refused: BrokerRefused, off: ForbiddenType | None = None
    ) -> bool:
        """A broker has refused to tell of a queue, or to serve it; whether that is one of these."""
        refusal: Refusal
        if refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            refusal = GroupRefused(self._group, refused)
        elif off is not None:
            refusal = ReadingOff(self._group, queue.topic, off, refused)
        elif is_access_denied(refused):
            refusal = AccessDenied(self._group, refused)
        else:
            return False
        self._queues[queue] = refusal
        self._note(refusal)
        return True

    def hidden(self, topic: str, denied: AccessDenied) -> None:
        """No broker of a topic lists the members to this account, or takes it as one of them."""
        self._topics[topic] = denied
        self._note(denied)

    def seen(self, topic: str) -> None:
        """The members are listed, or of no interest any more."""
        self._topics.pop(topic, None)

    def served(self, queue: Queue, where: Address | None) -> None:
        """A broker has answered a pull: it has the group, and lets it read the topic."""
        self._served.add(queue.topic)
        if not self._queues:
            return
        self._queues.pop(queue, None)
        for other, refusal in tuple(self._queues.items()):
            is_over = other.topic == queue.topic or _is_of_all_topics(refusal)
            if is_over and refusal.address == str(where):
                del self._queues[other]

    def given_up(self, queue: Queue) -> None:
        """A queue is not pulled any more: who refused it does not concern us because of it."""
        self._queues.pop(queue, None)

    def was_served(self, topic: str) -> bool:
        """Whether any pull of a topic ever was."""
        return topic in self._served

    def standing(self) -> tuple[str, ...]:
        """Those of now, a sentence each."""
        return tuple(dict.fromkeys(map(str, (*self._topics.values(), *self._queues.values()))))

    def of_all(self, queues: Iterable[Queue]) -> GroupRefused | AccessDenied | None:
        """One that does not pass by itself, if there are queues and all have such."""
        found = [self._queues.get(queue) for queue in queues]
        lasting = [each for each in found if isinstance(each, GroupRefused | AccessDenied)]
        return lasting[0] if lasting and len(lasting) == len(found) else None

    def denial(
        self, shares: Mapping[str, Collection[Queue]], owned: Collection[Queue]
    ) -> AccessDenied | None:
        """Why nothing can arrive until an account is changed; None while anything can.

        `shares` are the own queues of each topic, of which those `owned` are pulled.
        """
        if not (self._queues or self._topics):
            return None
        found: AccessDenied | None = None
        for topic, queues in shares.items():
            reasons = [self._queues.get(queue) for queue in queues]
            denied = [each for each in reasons if isinstance(each, AccessDenied)]
            if denied and len(denied) == len(reasons):
                reason = denied[0]
            elif topic in self._topics and not any(queue in owned for queue in queues):
                reason = self._topics[topic]
            else:
                return None
            found = found or reason
        return found

    def _note(self, refusal: Refusal) -> None:
        if count := self._told.note(str(refusal), self._clock.monotonic()):
            log.log(
                logging.WARNING if isinstance(refusal, ReadingOff) else logging.ERROR,
                "%s",
                refusal,
                extra={"group": self._group, "broker": refusal.address, "times": count},
            )
        self.on_refused()


def _is_of_all_topics(refusal: Refusal) -> bool:
    """Whether a broker refuses the group whatever it asks for: served once, that is over."""
    if isinstance(refusal, ReadingOff):
        return refusal.kind in (ForbiddenType.GROUP, ForbiddenType.BROKER)
    return isinstance(refusal, GroupRefused)


def _nothing() -> None:
    """For those who look by themselves."""
