"""What can go wrong for a user of the client, told apart by what the user does about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from orbitmq.errors import OrbitError
from orbitmq.names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitmq.client.producer.send import SendResult
    from orbitmq.client.routes import Queue
    from orbitmq.remoting.settings import Address
    from orbitmq.wire.codes import Release


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
        super().__init__(
            f"no broker serves topic {topic!r} according to {', '.join(self.name_servers)}"
            f"{_missing_topic(topic, similar)}"
        )


def _missing_topic(topic: str, similar: str | None) -> str:
    """What to do about it; name servers forget a topic when its last broker is away."""
    if topic.startswith(RETRY_PREFIX):
        return "; a broker makes it when its group consumes"
    if topic.startswith(DEAD_LETTER_PREFIX):
        return "; a broker makes it with the first dead letter of its group"
    meant = "" if similar is None else f"do you mean {similar!r}? If not, "
    return (
        " (it does not exist, or its brokers are away); "
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


# What can go wrong with a producer beyond what can with any client.


class BatchFailed(SendFailed):
    """A part of a batch was not acknowledged; `results` says what was."""

    def __init__(
        self,
        topic: str,
        attempts: int,
        cause: BaseException | None,
        results: Sequence[SendResult | None],
    ) -> None:
        super().__init__(topic, attempts, cause)
        #: One for each message, in their order; None for those that were not acknowledged.
        self.results = tuple(results)
        stored = sum(result is not None for result in self.results)
        self.args = (f"{self.args[0]} ({stored} of {len(self.results)} messages are stored)",)


class NoReply(ClientError):
    """A request was sent and nobody replied in time; it may have been handled all the same."""

    retriable: ClassVar[bool] = True

    def __init__(self, topic: str, timeout: float) -> None:
        self.topic = topic
        self.timeout = timeout
        super().__init__(
            f"no reply to the request to {topic!r} within {timeout:g} s; is a consumer running "
            "that replies, and is it given enough time?"
        )


class NotARequest(ClientError):
    """A reply to a message that asks for none."""

    def __init__(self, msg_id: str, missing: str) -> None:
        self.msg_id = msg_id
        self.missing = missing
        super().__init__(
            f"message {msg_id} is no request: it has no property {missing}; only messages sent "
            "with `request` can be replied to"
        )


class RecallHandleInvalid(ClientError):
    """A text that is no handle of a message that is delivered later."""

    def __init__(self, handle: object, problem: str) -> None:
        self.handle = handle
        self.problem = problem
        shown = handle[:80] if isinstance(handle, str) else handle
        super().__init__(
            f"{shown!r} is no recall handle: {problem}; it is what `SendResult.recall_handle` of a "
            "message with `delay` or `deliver_at` says (with `delay_level` it is None: such a "
            "message cannot be taken back)"
        )


class TimesUnsupported(MessageRefused):
    """A message for later, and a broker that would deliver it at once."""

    def __init__(self, wish: str, broker: str, release: Release | None) -> None:
        self.broker = broker
        self.release = None if release is None else str(release)
        what = "an old release" if release is None else f"RocketMQ {release}"
        super().__init__(
            wish,
            f"needs brokers of RocketMQ 5.0 or later; {broker!r} is {what} and would deliver the "
            "message at once; use delay_level= there (1 to 18: 1s 5s 10s 30s 1m 2m ... 2h, unless "
            "the broker's messageDelayLevel says otherwise)",
        )


class RecallUnsupported(BrokerRefused):
    """A broker that takes no message back, whatever the handle is."""

    def __init__(self, refused: BrokerRefused, broker: str) -> None:
        super().__init__(refused.code, refused.remark, refused.address, refused.request_code)
        self.broker = broker
        text = (
            f"broker {broker!r} ({self.address}) takes no messages back: its release of RocketMQ "
            "does not know how; let consumers drop the message instead, for instance by a key that "
            "they look up"
        )
        self.args = (text,)


# What can go wrong with a consumer that is polled.


class QueueNotAssigned(ClientError):
    """A queue that is not, or no longer, this consumer's."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        super().__init__(
            f"{queue} is not assigned to this consumer; another member may have it by now: "
            "see assignment()"
        )


class OffsetOutOfRange(ClientError):
    """A position that a queue does not have."""

    def __init__(self, queue: Queue, offset: int, first: int, end: int) -> None:
        self.queue = queue
        self.offset = offset
        self.first = first
        self.end = end
        super().__init__(f"{queue} has the offsets {first} to {end}, got {offset}")


class ArrowMissing(ClientError):
    """Record batches need libraries that are not installed."""

    def __init__(self) -> None:
        super().__init__("poll_arrow needs pyarrow and numpy: pip install 'orbitmq[arrow]'")


# What administration can fail at, named by what the caller does about it.


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
        super().__init__(f"no broker has topic {topic!r}{_missing_topic(topic, similar)}")


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
