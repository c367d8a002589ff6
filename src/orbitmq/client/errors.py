"""Narrower classes of the errors in `orbitmq.errors`: one condition each, with its facts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from orbitmq.errors import (
    AlreadyExists,
    BrokerRefused,
    ClientError,
    MessageRefused,
    NotFound,
    NotSupported,
    PartlyDone,
    SettingError,
    TimedOut,
    Unavailable,
    WrongUse,
    missing_topic,
)
from orbitmq.wire.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from orbitmq.client.routes import Queue
    from orbitmq.remoting.settings import Address
    from orbitmq.wire.codes import Release
    from orbitmq.wire.command import Command


# ---- any client


class UsedAfterFork(WrongUse):
    """A client was started in one process and used in a fork of it."""

    def __init__(self, what: str, belongs_to: int, used_in: int) -> None:
        self.what = what
        self.belongs_to = belongs_to
        self.used_in = used_in
        super().__init__(
            f"{what} belongs to process {belongs_to} and cannot be used in process {used_in}: a "
            "fork has none of its threads, and must not share its connections; make a new one "
            "after the fork (in gunicorn's post_fork, or in the function of the new process)"
        )


class NoNameServer(Unavailable):
    """No name server answers."""

    def __init__(self, tried: Iterable[tuple[Address, str]]) -> None:
        #: The addresses, each with its error.
        self.tried = tuple(tried)
        reasons = "; ".join(f"{address}: {reason}" for address, reason in self.tried)
        super().__init__(
            f"no name server answers ({reasons}); check the address that is given (name_server, in "
            "Spark nameServer, else the variable ORBITMQ_NAME_SERVER) and the network"
        )


class BrokerUnavailable(Unavailable):
    """A broker is not registered, or not in the role that the call needs."""

    def __init__(self, broker: str, reason: str) -> None:
        self.broker = broker
        self.reason = reason
        super().__init__(f"broker {broker!r} is not available: {reason}")


def refused_by(answer: Command, address: Address | str, request_code: int) -> BrokerRefused:
    """The error for an answer other than success."""
    code = answer.code
    with suppress(ValueError):
        code = ResponseCode(code)
    with suppress(ValueError):
        request_code = RequestCode(request_code)
    return BrokerRefused(code, answer.remark, address, request_code)


class NotANameServer(BrokerRefused):
    """The server at a name server's address is a broker."""

    def __init__(self, refused: BrokerRefused) -> None:
        self.__dict__.update(vars(refused))
        why = (
            "asks for an account"
            if self.code == ResponseCode.NO_PERMISSION
            else f"does not know {self.request!r}"
        )
        text = (
            f"{self.address} is no name server: it {why} and is probably a broker; give the "
            "address of the name server, port 9876 by default"
        )
        self.args = (text,)


# ---- sending


class TimesUnsupported(MessageRefused):
    """A delayed message, and a broker that would deliver it immediately."""

    def __init__(self, option: str, broker: str, release: Release | None) -> None:
        self.broker = broker
        self.release = None if release is None else str(release)
        what = "an old release" if release is None else f"RocketMQ {release}"
        super().__init__(
            option,
            f"needs brokers of RocketMQ 5.0 or later; {broker!r} is {what} and would deliver the "
            "message immediately; use delay_level= there (1 to 18: 1s 5s 10s 30s 1m 2m ... 2h, "
            "unless the broker's messageDelayLevel says otherwise)",
        )


class NoReply(TimedOut):
    """A request was sent and no reply arrived in time. It may have been handled."""

    def __init__(self, topic: str, timeout: float) -> None:
        self.topic = topic
        self.timeout = timeout
        super().__init__(
            f"no reply to the request to {topic!r} within {timeout:g} s; is a consumer running "
            "that replies, and is the timeout long enough?"
        )


class RecallHandleInvalid(SettingError, ClientError):
    """A text that is not the recall handle of a delayed message."""

    def __init__(self, handle: object, problem: str) -> None:
        self.handle = handle
        self.problem = problem
        shown = handle[:80] if isinstance(handle, str) else handle
        super().__init__(
            f"{shown!r} is no recall handle: {problem}; it is what `SendResult.recall_handle` of a "
            "message with `delay` or `deliver_at` says (with `delay_level` it is None: such a "
            "message cannot be taken back)"
        )


class RecallUnsupported(NotSupported, BrokerRefused):
    """A broker that cannot recall messages."""

    def __init__(self, refused: BrokerRefused, broker: str) -> None:
        self.__dict__.update(vars(refused))
        self.broker = broker
        text = (
            f"broker {broker!r} ({self.address}) takes no messages back: its release of RocketMQ "
            "does not know how; let consumers drop the message instead, for instance by a key that "
            "they look up"
        )
        self.args = (text,)


# ---- consuming


class GroupRefused(BrokerRefused):
    """A broker does not have this consumer group, and does not create it."""

    def __init__(self, group: str, refused: BrokerRefused) -> None:
        self.__dict__.update(vars(refused))
        #: As brokers know it.
        self.group = group
        remark = self.remark or "it does not exist there"
        remedy = (
            "" if "group create" in remark else f"; create it with: orbitmq group create {group}"
        )
        self.args = (f"group {group!r} gets nothing from {self.address}: {remark}{remedy}",)


class QueueNotAssigned(WrongUse):
    """A queue that is not, or no longer, assigned to this consumer."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        super().__init__(
            f"{queue} is not assigned to this consumer; another member may own it by now: "
            "see assignment"
        )


# ---- administration


class AdminError(ClientError):
    """The base class of errors that only administration raises."""


class BadRequest(SettingError, AdminError):
    """An invalid argument. No request was sent."""


class BrokerNotFound(NotFound, AdminError):
    """No broker with this name or address is registered."""

    def __init__(self, broker: str, known: Iterable[str]) -> None:
        self.broker = broker
        self.known = tuple(known)
        super().__init__(
            f"no broker {broker!r} is registered; there are {', '.join(self.known) or 'none'}"
        )


class TopicNotFound(NotFound, AdminError):
    """No broker has this topic."""

    def __init__(self, topic: str, *, similar: str | None = None) -> None:
        self.topic = topic
        #: An existing topic with a similar name.
        self.similar = similar
        super().__init__(f"no broker has topic {topic!r}{missing_topic(topic, similar)}")


class TopicExists(AlreadyExists, AdminError):
    """The topic to create exists already. It is unchanged."""

    def __init__(self, topic: str, found: str) -> None:
        self.topic = topic
        #: Its settings, by broker.
        self.found = found
        super().__init__(
            f"topic {topic!r} exists already ({found}); change it with topics.update, or: orbitmq "
            f"topic update {topic}"
        )


class QueueNotFound(NotFound, AdminError):
    """The topic has no such queue."""

    def __init__(self, queue: Queue, known: Iterable[Queue]) -> None:
        self.queue = queue
        self.known = tuple(known)
        names = ", ".join(f"{each.broker}:{each.id}" for each in self.known)
        super().__init__(
            f"topic {queue.topic!r} has no queue {queue.broker}:{queue.id}; has {names}"
        )


class GroupNotFound(NotFound, AdminError):
    """No broker knows this consumer group."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(
            f"no broker knows group {group!r}; it is created when its first consumer starts, or "
            f"with: orbitmq group create {group}"
        )


class MessageNotFound(NotFound, AdminError):
    """No message has this id, key or offset."""

    def __init__(self, wanted: str, reason: str = "") -> None:
        self.wanted = wanted
        self.reason = reason
        super().__init__(f"no message {wanted}{': ' + reason if reason else ''}")


class ConsumerNotOnline(Unavailable, AdminError):
    """The group, or this member of it, is not connected."""

    def __init__(self, group: str, client_id: str | None = None, reason: str = "") -> None:
        self.group = group
        self.client_id = client_id
        self.reason = reason
        who = f"group {group!r}" if client_id is None else f"consumer {client_id!r} of {group!r}"
        super().__init__(f"{who} is not online{': ' + reason if reason else ''}")


class NotEffective(PartlyDone, AdminError):
    """Servers accepted a change, but do not show it afterwards."""

    retriable: ClassVar[bool] = True

    def __init__(self, what: str, problems: Iterable[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        self.done = ()
        self.failed = ()
        self.args = (f"{what} has no effect: {'; '.join(self.problems)}",)
