"""What administration can fail at, named by what the caller does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from orbitmq.client.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitmq.client.queue import Queue


class AdminError(ClientError):
    """Something that an operator can act on."""


class BadRequest(AdminError):
    """An argument that cannot be meant; nothing was asked of any server."""


class BrokerNotFound(AdminError):
    """No broker of this name or address is registered."""

    def __init__(self, broker: str, known: Iterable[str]) -> None:
        self.broker = broker
        self.known = tuple(known)
        super().__init__(
            f"no broker {broker!r} is registered; there are {', '.join(self.known) or 'none'}"
        )


class TopicNotFound(AdminError):
    """No broker has this topic."""

    def __init__(self, topic: str, *, similar: str | None = None) -> None:
        self.topic = topic
        #: A topic that is there, and that was perhaps meant.
        self.similar = similar
        meant = "" if similar is None else f"do you mean {similar!r}? If not, "
        super().__init__(
            f"no broker has topic {topic!r}; {meant}create it with: orbitmq topic create {topic}"
        )


class TopicExists(AdminError):
    """A topic that was to be made is there already, and was left as it is."""

    def __init__(self, topic: str, found: str) -> None:
        self.topic = topic
        #: What it is like, broker by broker.
        self.found = found
        super().__init__(
            f"topic {topic!r} exists already ({found}); change it with topics.update, or: orbitmq "
            f"topic update {topic}"
        )


class QueueNotFound(AdminError):
    """The topic has no such queue."""

    def __init__(self, queue: Queue, known: Iterable[Queue]) -> None:
        self.queue = queue
        self.known = tuple(known)
        names = ", ".join(f"{each.broker}:{each.id}" for each in self.known)
        super().__init__(
            f"topic {queue.topic!r} has no queue {queue.broker}:{queue.id}; has {names}"
        )


class GroupNotFound(AdminError):
    """No broker knows this consumer group."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(
            f"no broker knows group {group!r}; it is created when its first consumer starts, or "
            f"with: orbitmq group create {group}"
        )


class ConsumerNotOnline(AdminError):
    """The group, or this member of it, is not connected."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, client_id: str | None = None, reason: str = "") -> None:
        self.group = group
        self.client_id = client_id
        self.reason = reason
        who = f"group {group!r}" if client_id is None else f"consumer {client_id!r} of {group!r}"
        super().__init__(f"{who} is not online{': ' + reason if reason else ''}")


class MessageNotFound(AdminError):
    """No message is there under this id, key or offset."""

    def __init__(self, wanted: str, reason: str = "") -> None:
        self.wanted = wanted
        self.reason = reason
        super().__init__(f"no message {wanted}{': ' + reason if reason else ''}")


class NotSupported(AdminError):
    """This broker cannot do what was asked."""

    def __init__(self, what: str, where: str, remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(f"{where} cannot {what}{'; ' + remedy if remedy else ''}")


class NotEffective(AdminError):
    """Servers took a change and then did not show it."""

    retriable: ClassVar[bool] = True

    def __init__(self, what: str, problems: Iterable[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        super().__init__(f"{what} has no effect: {'; '.join(self.problems)}")


class PartlyDone(AdminError):
    """A change that some servers carried out and others did not. Repeating it is safe."""

    retriable: ClassVar[bool] = True

    def __init__(self, what: str, done: Iterable[str], failed: Iterable[tuple[str, str]]) -> None:
        self.what = what
        self.done = tuple(done)
        #: Each server with what went wrong there.
        self.failed = tuple(failed)
        problems = "; ".join(f"{where}: {why}" for where, why in self.failed)
        super().__init__(
            f"{what} is done on {', '.join(self.done) or 'no server'} and failed on {problems}"
        )
