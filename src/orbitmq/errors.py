"""The errors of OrbitMQ that a caller tells apart, by what the caller does about them.

Narrower classes exist for single conditions (`TopicNotFound` is a `NotFound`); they add facts as
attributes. `retriable` says whether the same call may succeed later without any change.
"""

from __future__ import annotations

import enum
import json
import shlex
import shutil
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

#: `orbitmq.Queue` and `orbitmq.SendResult`: this module is below theirs and imports neither.
Queue: TypeAlias = Any
SendResult: TypeAlias = Any


def install_command(extra: str) -> str:
    """The command that installs an extra, as it works here: also from a checkout."""
    here = Path(__file__).resolve()
    checkout = here.parents[2] if (here.parents[2] / "pyproject.toml").is_file() else _origin()
    what = f"orbitmq[{extra}]" if checkout is None else f"{checkout}[{extra}]"
    pip = Path(sys.executable).parent / "pip"
    on_path = shutil.which("pip")
    is_ours = on_path is not None and Path(on_path) == pip
    command = "pip" if is_ours else f"{shlex.quote(sys.executable)} -m pip"
    return f"{command} install '{what}'"


def _origin() -> Path | None:
    """The folder that this package was installed from, if it was."""
    from importlib import metadata  # noqa: PLC0415  # every Spark session imports this module

    try:
        found = metadata.distribution("orbitmq").read_text("direct_url.json")
        path = urllib.parse.urlsplit(json.loads(found or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return None
    folder = Path(urllib.parse.unquote(path.path))
    is_there = path.scheme == "file" and (folder / "pyproject.toml").is_file()
    return folder if is_there else None


#: How much of the faulty line an error shows on either side of the fault.
_EXCERPT = 40


class OrbitError(Exception):
    """The base class of all errors that OrbitMQ raises on purpose.

    The text is one sentence, with the remedy when there is one; the facts are attributes.
    """

    #: Whether the same call may succeed later without any change by the caller.
    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Callable[..., OrbitError], tuple[object, ...]]:
        # Python would call the class with the text alone, which few subclasses accept.
        return _unpickle, (type(self), self.args, self.__dict__)


def _unpickle(kind: type[OrbitError], args: tuple[Any, ...], facts: dict[str, Any]) -> OrbitError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class ClientError(OrbitError):
    """The base class of what a producer, a consumer or an administration call raises."""


# ---- what the program has to change


class SettingError(OrbitError):
    """A setting or an argument has an invalid value. The text names it and says what is allowed."""


class InvalidFilter(OrbitError):
    """A subscription expression is invalid.

    `position` counts characters from 0; `line` and `column` count from 1, as editors do.
    """

    def __init__(self, reason: str, expression: str, position: int) -> None:
        self.reason = reason
        self.expression = expression
        self.position = position
        self.line = expression.count("\n", 0, position) + 1
        self.column = position - (expression.rfind("\n", 0, position) + 1) + 1
        super().__init__(
            f"{reason}, at line {self.line}, column {self.column}:\n{excerpt(expression, position)}"
        )


class WrongUse(ClientError):
    """A call that is not possible here or in this state."""


class NotRunning(WrongUse):
    """A client was used before its start or after its stop."""

    def __init__(self, what: str, *, was_stopped: bool = False) -> None:
        self.what = what
        self.was_stopped = was_stopped
        remedy = "it was stopped; make a new one" if was_stopped else "start it, or use `with`"
        super().__init__(f"{what} is not running: {remedy}")


class MissingExtra(ClientError):
    """A feature needs libraries that are not installed."""

    def __init__(self, what: str, needs: str, extra: str) -> None:
        #: The extra of the package that installs them.
        self.extra = extra
        super().__init__(f"{what} needs {needs}: {install_command(extra)}")


class NotSupported(ClientError):
    """The broker cannot do this: it is too old, or set up without it."""


class MessageRefused(ClientError):
    """A message that cannot be sent as it is."""

    def __init__(self, field: str, problem: str) -> None:
        #: The part of the message that is wrong.
        self.field = field
        self.problem = problem
        super().__init__(f"message.{field} {problem}")


class BodyUnreadable(ClientError):
    """The body of a received message does not have the format that was asked for."""

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


class OffsetOutOfRange(ClientError):
    """An offset that the queue does not have."""

    def __init__(self, queue: Queue, offset: int, first: int, end: int) -> None:
        self.queue = queue
        self.offset = offset
        self.first = first
        self.end = end
        super().__init__(f"{queue} has the offsets {first} to {end}, got {offset}")


# ---- what is missing or in the way at the cluster


class NotFound(ClientError):
    """A topic, group, queue, message or broker does not exist."""


class NoRoute(NotFound):
    """No broker serves this topic, according to the name servers."""

    retriable: ClassVar[bool] = True

    def __init__(
        self, topic: str, name_servers: Iterable[object], *, similar: str | None = None
    ) -> None:
        self.topic = topic
        self.name_servers = tuple(str(each) for each in name_servers)
        #: An existing topic with a similar name.
        self.similar = similar
        super().__init__(
            f"no broker serves topic {topic!r} according to {', '.join(self.name_servers)}"
            f"{missing_topic(topic, similar)}"
        )


class AlreadyExists(ClientError):
    """What was to be created exists already. It is unchanged."""


class BrokerRefused(ClientError):
    """A server answered a request with an error."""

    def __init__(self, code: int, remark: str | None, address: object, request_code: int) -> None:
        self.code = int(code)
        #: The name of `code`, if it has one.
        self.name = code.name if isinstance(code, enum.Enum) else f"code {self.code}"
        self.remark = remark or ""
        self.address = str(address)
        self.request_code = int(request_code)
        #: The name of `request_code` in words, such as "send message".
        self.request = (
            request_code.name.lower().replace("_", " ")
            if isinstance(request_code, enum.Enum)
            else f"request {self.request_code}"
        )
        known = f"{self.name}, code {self.code}" if isinstance(code, enum.Enum) else self.name
        super().__init__(
            f"{self.address} refused {self.request!r}: {self.remark or 'no reason given'} ({known})"
        )


class AccessDenied(BrokerRefused):
    """A broker denies this client's account reading: wrong key, or missing permission."""

    def __init__(self, group: str, refused: BrokerRefused) -> None:
        self.__dict__.update(vars(refused))
        #: As brokers know it.
        self.group = group
        remark = self.remark or "its account may not"
        remedy = "use an account that may, or have the permission granted to this one"
        self.args = (f"group {group!r} gets nothing from {self.address}: {remark}; {remedy}",)


# ---- what may work later


class Unavailable(ClientError):
    """A server cannot be reached, or is not in the role that the call needs."""

    retriable: ClassVar[bool] = True


class TimedOut(ClientError):
    """No answer in time. The request may have been carried out."""

    retriable: ClassVar[bool] = True


class TooManyInFlight(ClientError):
    """Submitted messages wait for their answers, and there was no room for another one in time."""

    retriable: ClassVar[bool] = True

    def __init__(self, count: int, size: int, timeout: float) -> None:
        self.count = count
        self.size = size
        self.timeout = timeout
        super().__init__(
            f"{count} submitted messages with {size} bytes wait for answers and left no room for "
            f"another one within {timeout:g} s; submit less at a time, or raise "
            "sending.max_in_flight or sending.max_in_flight_bytes"
        )


class SendFailed(ClientError):
    """A message was not acknowledged. If the answer was lost, it may be stored all the same.

    `results` has one entry for each message of a batch, None for those that were not acknowledged.
    It is empty if a single message was sent.
    """

    retriable: ClassVar[bool] = True

    def __init__(
        self,
        topic: str,
        attempts: int,
        cause: BaseException | None = None,
        results: Sequence[SendResult | None] = (),
    ) -> None:
        self.topic = topic
        self.attempts = attempts
        self.cause = cause
        self.results = tuple(results)
        times = {0: "before its first attempt", 1: "tried once"}.get(
            attempts, f"tried {attempts} times"
        )
        stored = ""
        if self.results:
            count = sum(result is not None for result in self.results)
            stored = f" ({count} of {len(self.results)} messages are stored)"
        super().__init__(f"sending to {topic!r} failed, {times}: {cause}{stored}")


class PartlyDone(ClientError):
    """A change that took effect on some servers only. It is safe to repeat it."""

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


# ---- texts


def missing_topic(topic: str, similar: str | None) -> str:
    """The remedy for a missing topic, as the end of an error's text."""
    if topic.startswith("%RETRY%"):
        return "; a broker creates it when its group consumes"
    if topic.startswith("%DLQ%"):
        return "; a broker creates it with the first dead letter of its group"
    meant = "" if similar is None else f"do you mean {similar!r}? If not, "
    # Name servers forget a topic when its last broker is away.
    return (
        " (it does not exist, or its brokers are away); "
        f"{meant}create it with: orbitmq topic create {topic}"
    )


def excerpt(text: str, position: int) -> str:
    """The line around `position` and a caret below it, fit for a log."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    end = len(text) if end < 0 else end
    cut_start = max(start, position - _EXCERPT)
    cut_end = min(end, position + _EXCERPT)
    before = ("..." if cut_start > start else "") + _printable(text[cut_start:position])
    after = _printable(text[position:cut_end]) + ("..." if cut_end < end else "")
    return f"  {before}{after}\n  {' ' * len(before)}^"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)
