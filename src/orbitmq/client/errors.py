"""What can go wrong for a user of the client, told apart by what the user does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from orbitmq.errors import OrbitError
from orbitmq.errors import SettingError as SettingError  # noqa: PLC0414  # has its name here, too
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitmq.client.queue import Queue
    from orbitmq.remoting.address import Address


class ClientError(OrbitError):
    """Something about a producer, a consumer or an administration call."""


class WrongUse(ClientError):
    """A call that is right in itself, made at a place where it cannot work."""


class NotRunning(ClientError):
    """Used before its start or after its stop."""

    def __init__(self, what: str, *, was_stopped: bool = False) -> None:
        self.what = what
        self.was_stopped = was_stopped
        remedy = "it was stopped; make a new one" if was_stopped else "start it, or use `with`"
        super().__init__(f"{what} is not running: {remedy}")


class AlreadyRunning(WrongUse):
    """Started, and started again."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} is running already; one start is enough")


class UsedAfterFork(ClientError):
    """At work in one process and used in a fork of it, where its threads are not."""

    def __init__(self, what: str, belongs_to: int, used_in: int) -> None:
        self.what = what
        self.belongs_to = belongs_to
        self.used_in = used_in
        super().__init__(
            f"{what} belongs to process {belongs_to} and cannot be used in process {used_in}: a "
            "fork has none of its threads, and must not share its connections; make a new one "
            "after the fork (in gunicorn's post_fork, or in the function of the new process)"
        )


class NoNameServer(ClientError):
    """None of the name servers could be asked."""

    retriable: ClassVar[bool] = True

    def __init__(self, tried: Iterable[tuple[Address, str]]) -> None:
        #: The addresses, and why each could not be asked.
        self.tried = tuple(tried)
        reasons = "; ".join(f"{address}: {reason}" for address, reason in self.tried)
        super().__init__(
            f"no name server answers ({reasons}); check the address that is given (name_server, in "
            "Spark nameServer) and the network"
        )


class NoRoute(ClientError):
    """No broker serves this topic, as far as the name servers know."""

    retriable: ClassVar[bool] = True

    def __init__(
        self,
        topic: str,
        name_servers: Iterable[Address | str],
        *,
        similar: str | None = None,
    ) -> None:
        self.topic = topic
        self.name_servers = tuple(str(each) for each in name_servers)
        #: A topic that is there, and that was perhaps meant.
        self.similar = similar
        meant = "" if similar is None else f"do you mean {similar!r}? If not, "
        super().__init__(
            f"no broker serves topic {topic!r} according to {', '.join(self.name_servers)}; "
            f"{meant}create it with: orbitmq topic create {topic}"
        )


class BrokerUnavailable(ClientError):
    """A broker that is needed is not there, or not in the role in which it is needed."""

    retriable: ClassVar[bool] = True

    def __init__(self, broker: str, reason: str) -> None:
        self.broker = broker
        self.reason = reason
        super().__init__(f"broker {broker!r} is not available: {reason}")


class BrokerRefused(ClientError):
    """A server answered, and the answer is no."""

    def __init__(
        self, code: int, remark: str | None, address: Address | str, request_code: int
    ) -> None:
        self.code = int(code)
        self.remark = remark or ""
        self.address = str(address)
        self.request_code = int(request_code)
        super().__init__(
            f"{self.address} refused request {self.request_code} with {self.name}: "
            f"{self.remark or 'no reason given'}"
        )

    @property
    def name(self) -> str:
        """What `code` means: the name of a `ResponseCode`, or the number if it is not known."""
        try:
            return ResponseCode(self.code).name
        except ValueError:
            return f"code {self.code}"


class GroupRefused(BrokerRefused):
    """A broker does not have this consumer group, and does not make it by itself."""

    def __init__(self, group: str, refused: BrokerRefused) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        #: As brokers know it.
        self.group = group
        remark = self.remark or "it does not exist there"
        remedy = (
            "" if "group create" in remark else f"; create it with: orbitmq group create {group}"
        )
        self.args = (f"group {group!r} gets nothing from {self.address}: {remark}{remedy}",)


class AccessDenied(BrokerRefused):
    """A broker lets this client's account read nothing: a wrong key, or a permission is missing."""

    def __init__(self, group: str, refused: BrokerRefused) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        #: As brokers know it.
        self.group = group
        remark = self.remark or "its account may not"
        remedy = "use an account that may, or have the permission granted to this one"
        self.args = (f"group {group!r} gets nothing from {self.address}: {remark}; {remedy}",)


class NotANameServer(BrokerRefused):
    """What was given as a name server does not know what every name server knows."""

    def __init__(self, refused: BrokerRefused) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        why = (
            "asks for an account"
            if self.code == ResponseCode.NO_PERMISSION
            else f"does not know request {self.request_code}"
        )
        text = (
            f"{self.address} is no name server: it {why} and is probably a broker; give the "
            "address of the name server, port 9876 by default"
        )
        self.args = (text,)


class SendFailed(ClientError):
    """A message was not acknowledged; after a lost answer it may have been stored all the same."""

    retriable: ClassVar[bool] = True

    def __init__(self, topic: str, attempts: int, cause: BaseException | None = None) -> None:
        self.topic = topic
        self.attempts = attempts
        self.cause = cause
        times = {0: "before its first attempt", 1: "tried once"}.get(
            attempts, f"tried {attempts} times"
        )
        super().__init__(f"sending to {topic!r} failed, {times}: {cause}")


class MessageRefused(ClientError):
    """A message that cannot be sent as it is."""

    def __init__(self, field: str, problem: str) -> None:
        #: The part of the message that is wrong.
        self.field = field
        self.problem = problem
        super().__init__(f"message.{field} {problem}")


class BodyUnreadable(ClientError):
    """The body of a received message is not what it was asked for as."""

    def __init__(
        self, msg_id: str, queue: Queue, queue_offset: int, wanted: str, problem: str
    ) -> None:
        self.msg_id = msg_id
        self.queue = queue
        self.queue_offset = queue_offset
        super().__init__(
            f"the body of message {msg_id} (offset {queue_offset} of {queue}) is not {wanted}: "
            f"{problem}"
        )
