"""Dead letters: lists, counts, exports and resends messages that a group gave up.

OrbitMQ's broker stores the reason and the origin (`DLQ_REASON`, `DLQ_ORIGIN_*`); Apache's stores
the topic and id of the original, but no reason.
"""

from __future__ import annotations

import asyncio
import base64
import enum
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec

from orbitmq.arguments import explained
from orbitmq.client.admin.requests import AdminRequests, BrokerNode, Failed
from orbitmq.client.admin.topics import AsyncTopics, Permission
from orbitmq.client.errors import AdminError, BadRequest, GroupNotFound, TopicNotFound
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import install_command
from orbitmq.message.properties import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    INSTANCE_ID,
    KEYS,
    ORIGIN_MESSAGE_ID,
    RESERVED,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    encode_properties,
)
from orbitmq.message.record import COMPRESSED, COMPRESSION_TYPE_MASK, MessageError
from orbitmq.names import check_group, dead_letter_topic, retry_topic
from orbitmq.parsing import Moment, moment, positive, whole
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import SendMessageRequest, SendMessageResponse

if TYPE_CHECKING:
    from orbitmq.client.admin.messages import AsyncMessages


#: The reason when the broker has stored none.
DLQ_REASON = "DLQ_REASON"

UNKNOWN_REASON = "unknown"
#: The most characters of a pile's name.
LONGEST_NAME = 200
#: The classes of age, with their upper bounds in seconds.
AGES: tuple[tuple[str, float], ...] = (
    ("last hour", 3600.0),
    ("last day", 86_400.0),
    ("last week", 604_800.0),
    ("older", float("inf")),
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up."""

    group: str
    message: ReceivedMessage

    @property
    def id(self) -> str:
        """The id of this letter: the offset id in the dead-letter topic."""
        return self.message.offset_id

    @property
    def topic(self) -> str | None:
        """The original topic."""
        return self.message.get(DLQ_ORIGIN_TOPIC) or self.message.get(RETRY_TOPIC)

    @property
    def origin_id(self) -> str | None:
        """The offset id of the original message."""
        return self.message.get(DLQ_ORIGIN_MESSAGE_ID) or self.message.get(ORIGIN_MESSAGE_ID)

    @property
    def reason(self) -> str:
        """The reason that the consumer reported."""
        return self.message.get(DLQ_REASON, UNKNOWN_REASON)

    @property
    def pile(self) -> str:
        """The name of its pile: the first line of its reason."""
        lines = self.reason.strip().splitlines()
        return lines[0].strip()[:LONGEST_NAME] if lines else UNKNOWN_REASON

    @property
    def attempts(self) -> int:
        """The number of attempts."""
        return self.message.reconsume_times

    @property
    def died_at(self) -> float:
        return self.message.stored_at

    @property
    def keys(self) -> tuple[str, ...]:
        return self.message.keys

    @property
    def resent_times(self) -> int:
        """The number of earlier resends."""
        text = self.message.get(RESENT_TIMES, "0")
        return int(text) if text.isdecimal() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Chooses dead letters; every given condition must hold."""

    since: Moment | None = None  #: died at or after
    until: Moment | None = None  #: died before
    keys: Collection[str] = ()  #: has one of these keys
    topic: str | None = None  #: was sent to this topic
    reason: str | None = None  #: its reason contains this, in any case
    pile: str | None = None  #: the first line of its reason is this, as `DeadLetter.pile` has it
    min_attempts: int | None = None
    max_attempts: int | None = None
    ids: Collection[str] = ()  #: is one of these letters, by `DeadLetter.id` or unique id

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is not None:
                moment(value, f"filter.{name}")
        for name in ("min_attempts", "max_attempts"):
            value = getattr(self, name)
            if value is not None:
                whole(value, f"filter.{name}", least=0)
        for name in ("keys", "ids"):
            if isinstance(getattr(self, name), str):
                raise BadRequest(f"filter.{name} must be several texts, not one")

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter matches, except for the times."""
        if self.keys and not set(self.keys).intersection(letter.keys):
            return False
        if self.topic is not None and letter.topic != self.topic:
            return False
        if self.reason is not None and self.reason.lower() not in letter.reason.lower():
            return False
        if self.pile is not None and letter.pile != self.pile:
            return False
        if self.min_attempts is not None and letter.attempts < self.min_attempts:
            return False
        if self.max_attempts is not None and letter.attempts > self.max_attempts:
            return False
        return not self.ids or letter.id in self.ids or letter.message.unique_id in self.ids


@dataclass(frozen=True, slots=True)
class Pile:
    """Dead letters with a common property."""

    name: str
    count: int
    first_died_at: float
    last_died_at: float
    #: The latest of them.
    sample: DeadLetter

    @property
    def sample_id(self) -> str:
        return self.sample.message.msg_id


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """The dead letters of a group, in piles; the largest pile first."""

    group: str
    count: int
    by_reason: tuple[Pile, ...]
    by_topic: tuple[Pile, ...]
    by_age: tuple[Pile, ...]


@dataclass(slots=True)
class _Piles:
    """Counts letters by pile."""

    piles: dict[str, Pile] = field(default_factory=dict)

    def add(self, name: str, letter: DeadLetter) -> None:
        pile = self.piles.get(name)
        died = letter.died_at
        if pile is None:
            self.piles[name] = Pile(name, 1, died, died, letter)
        else:
            # Letters come in the order of storing.
            self.piles[name] = Pile(name, pile.count + 1, pile.first_died_at, died, letter)

    def all(self) -> tuple[Pile, ...]:
        return tuple(sorted(self.piles.values(), key=lambda pile: (-pile.count, pile.name)))


# Export to JSON lines or Parquet, with the same columns. In JSON a text body is `body`, any other
# `body_base64`. A file appears under its name when it is complete.


#: Letters of a write.
CHUNK = 1000


class ExportFormat(enum.StrEnum):
    """The format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class _File(Protocol):
    def write(self, letters: Sequence[DeadLetter]) -> None: ...

    def close(self) -> None: ...


def _format(path: Path, given: ExportFormat | str | None) -> ExportFormat:
    wanted = given or {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(
        path.suffix.lower()
    )
    try:
        return ExportFormat(wanted or "")
    except ValueError:
        raise BadRequest(
            f"a file is written as one of {', '.join(ExportFormat)}; {path.name!r} does not say "
            f"which{'' if given is None else f', and {given!r} is none of them'}"
        ) from None


def _own_body(letter: DeadLetter) -> bytes:
    return letter.message.body


def _open(chosen: ExportFormat, path: Path, body: Callable[[DeadLetter], bytes]) -> _File:
    try:
        if chosen is ExportFormat.JSONL:
            return _JsonLines(path, body)
        return _Parquet(path, _arrow(), body)
    except OSError as error:
        raise AdminError(f"{path} cannot be written: {error}") from error


def _finish(file: _File, partial: Path, target: Path) -> None:
    file.close()
    partial.replace(target)


def _discard(file: _File, partial: Path) -> None:
    file.close()
    partial.unlink(missing_ok=True)


async def _chunks(letters: AsyncIterator[DeadLetter]) -> AsyncGenerator[list[DeadLetter], None]:
    chunk: list[DeadLetter] = []
    async for letter in letters:
        chunk.append(letter)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _row(letter: DeadLetter) -> dict[str, Any]:
    """The columns of a letter, without its body."""
    message = letter.message
    return {
        "group": letter.group,
        "id": message.msg_id,
        "unique_id": message.unique_id,
        "offset_id": letter.id,
        "topic": letter.topic,
        "origin_id": letter.origin_id,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "resent_times": letter.resent_times,
        "died_at": letter.died_at,
        "born_at": message.born_at,
        "tags": message.tags,
        "keys": list(message.keys),
        "broker": message.queue.broker,
        "queue_id": message.queue.id,
        "queue_offset": message.queue_offset,
        "properties": dict(message.properties),
    }


class _JsonLines:
    """One JSON object per line."""

    def __init__(self, path: Path, body: Callable[[DeadLetter], bytes]) -> None:
        self._file = path.open("wb")
        self._body = body

    def write(self, letters: Sequence[DeadLetter]) -> None:
        lines = []
        for letter in letters:
            row = _row(letter)
            body = self._body(letter)
            try:
                row["body"] = body.decode()
            except UnicodeDecodeError:
                row["body_base64"] = base64.b64encode(body).decode()
            lines.append(msgspec.json.encode(row))
        self._file.write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """A Parquet file."""

    def __init__(self, path: Path, arrow: ModuleType, body: Callable[[DeadLetter], bytes]) -> None:
        import pyarrow.parquet as parquet  # noqa: PLC0415  # an extra

        text = arrow.string()
        self._arrow = arrow
        self._body = body
        self._schema = arrow.schema(
            [
                ("group", text),
                ("id", text),
                ("unique_id", text),
                ("offset_id", text),
                ("topic", text),
                ("origin_id", text),
                ("reason", text),
                ("attempts", arrow.int32()),
                ("resent_times", arrow.int32()),
                ("died_at", arrow.timestamp("us", tz="UTC")),
                ("born_at", arrow.timestamp("us", tz="UTC")),
                ("tags", text),
                ("keys", arrow.list_(text)),
                ("broker", text),
                ("queue_id", arrow.int32()),
                ("queue_offset", arrow.int64()),
                ("properties", arrow.map_(text, text)),
                ("body", arrow.binary()),
            ]
        )
        self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, letters: Sequence[DeadLetter]) -> None:
        rows = []
        for letter in letters:
            row = _row(letter)
            for name in ("died_at", "born_at"):
                row[name] = round(row[name] * 1_000_000)
            row["properties"] = list(row["properties"].items())
            row["body"] = self._body(letter)
            rows.append(row)
        self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _arrow() -> ModuleType:
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise AdminError(
            f"Parquet files need pyarrow; install it: {install_command('arrow')}"
        ) from error
    module: ModuleType = pa
    return module


# Resending. A letter goes to the group's retry topic, for that group only, or to its original
# topic, for every group. The copy names its letter and counts the resends, so that no letter is
# resent twice by accident. A broker redirects messages for the retry topic of an orderly group to
# the dead letters; therefore every copy is read back before it counts as sent.


#: System properties that belong to the message, not to its delivery.
_KEPT = frozenset({KEYS, TAGS, UNIQ_KEY, INSTANCE_ID, SHARDING_KEY})
_DROPPED = (RESERVED | {DLQ_REASON, DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID}) - _KEPT

PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"


class ResendTo(enum.StrEnum):
    """The destination of a resend."""

    #: Only the group that gave it up gets it.
    RETRY = "retry"
    #: Every group that consumes the topic gets it.
    ORIGIN = "origin"


class ResendResult(enum.StrEnum):
    """The result for one letter."""

    SENT = "sent"
    WOULD_BE_SENT = "would be sent"
    ALREADY_SENT = "already sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResendOutcome:
    """The outcome for one letter."""

    letter: DeadLetter
    result: ResendResult
    #: The topic of the copy, also in a dry run.
    topic: str | None = None
    #: The offset id of the copy.
    sent_as: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ResendReport:
    """The outcomes for all letters."""

    group: str
    outcomes: tuple[ResendOutcome, ...]

    @property
    def counts(self) -> Mapping[ResendResult, int]:
        return Counter(outcome.result for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[ResendOutcome, ...]:
        return tuple(each for each in self.outcomes if each.result is ResendResult.FAILED)


@explained()
class AsyncDeadLetters:
    """Lists, counts, exports and resends dead letters."""

    def __init__(self, asking: AdminRequests, topics: AsyncTopics, messages: AsyncMessages) -> None:
        self._asking = asking
        self._topics = topics
        self._messages = messages

    async def list(
        self,
        group: str,
        where: DeadLetterFilter | None = None,
        *,
        newest_first: bool = False,
    ) -> AsyncGenerator[DeadLetter, None]:
        """The dead letters of a group in the order of storing."""
        check_group(group)
        chosen = where or DeadLetterFilter()
        try:
            async for message in self._messages.browse(
                dead_letter_topic(group),
                since=chosen.since,
                until=chosen.until,
                newest_first=newest_first,
            ):
                letter = DeadLetter(group, message)
                if chosen.matches(letter):
                    yield letter
        except TopicNotFound:
            # The topic is created for the first letter.
            return

    async def sample(
        self, group: str, count: int = 1, where: DeadLetterFilter | None = None
    ) -> tuple[DeadLetter, ...]:
        """The latest letters."""
        whole(count, "count")
        found: list[DeadLetter] = []
        async for letter in self.list(group, where, newest_first=True):
            found.append(letter)
            if len(found) == count:
                break
        return tuple(found)

    async def summary(self, group: str, where: DeadLetterFilter | None = None) -> DeadLetterSummary:
        """The number of letters by reason, topic and age."""
        reasons, topics, ages = _Piles(), _Piles(), _Piles()
        now = self._asking.clock.now()
        count = 0
        async for letter in self.list(group, where):
            count += 1
            reasons.add(letter.pile, letter)
            topics.add(letter.topic or UNKNOWN_REASON, letter)
            age = now - letter.died_at
            ages.add(next(name for name, limit in AGES if age < limit), letter)
        return DeadLetterSummary(group, count, reasons.all(), topics.all(), ages.all())

    async def export(
        self,
        group: str,
        path: Path | str,
        where: DeadLetterFilter | None = None,
        *,
        format: ExportFormat | str | None = None,  # noqa: A002  # the usual name
        body: Callable[[DeadLetter], bytes] | None = None,
    ) -> int:
        """Write the matching letters to a file and return their number.

        `body` gives the bytes that are written as the body of a letter, by default its own.

        The file's suffix chooses the format unless it is given. Parquet needs pyarrow: `pip
        install 'orbitmq[arrow]'`. An existing file is replaced.
        """
        target = Path(path)
        chosen = _format(target, format)
        partial = target.with_name(target.name + ".part")
        # Writing in a thread keeps the event loop free.
        file = await asyncio.to_thread(_open, chosen, partial, body or _own_body)
        count = 0
        try:
            async for letters in _chunks(self.list(group, where)):
                count += len(letters)
                await asyncio.to_thread(file.write, letters)
        except BaseException:
            await asyncio.to_thread(_discard, file, partial)
            raise
        await asyncio.to_thread(_finish, file, partial, target)
        return count

    async def resend(
        self,
        group: str,
        where: DeadLetterFilter | None = None,
        *,
        to: ResendTo | str = ResendTo.RETRY,
        rate: float | None = None,
        limit: int | None = None,
        again: bool = False,
        dry_run: bool = False,
    ) -> ResendReport:
        """Resend all matching letters; `resending` reports each one as it goes."""
        outcomes = [
            outcome
            async for outcome in self.resending(
                group, where, to=to, rate=rate, limit=limit, again=again, dry_run=dry_run
            )
        ]
        return ResendReport(group, tuple(outcomes))

    async def resending(
        self,
        group: str,
        where: DeadLetterFilter | None = None,
        *,
        to: ResendTo | str = ResendTo.RETRY,
        rate: float | None = None,
        limit: int | None = None,
        again: bool = False,
        dry_run: bool = False,
    ) -> AsyncGenerator[ResendOutcome, None]:
        """Resend letters one after the other and yield the outcome of each.

        `rate` limits letters per second, `limit` letters in all. A letter that was resent before is
        skipped unless `again`. A failure does not stop the others. `dry_run` sends nothing.
        """
        target = _target(to)
        pause = 0.0 if rate is None else 1 / positive(rate, "rate")
        most = None if limit is None else whole(limit, "limit")
        routes = _Routes(self._topics)
        if target is ResendTo.RETRY:
            await routes.check_retry(group)
        clock = self._asking.clock
        next_at = clock.monotonic()
        sent = 0
        async for letter in self.list(group, where):
            if sent == most:
                return
            outcome = await self._planned(letter, target, again=again)
            if outcome.result is ResendResult.WOULD_BE_SENT:
                sent += 1
                if not dry_run:
                    await asyncio.sleep(max(0.0, next_at - clock.monotonic()))
                    next_at = max(next_at, clock.monotonic()) + pause
                    outcome = await self._sent(letter, target, outcome.topic or "", routes)
            yield outcome

    async def _planned(self, letter: DeadLetter, target: ResendTo, *, again: bool) -> ResendOutcome:
        topic = retry_topic(letter.group) if target is ResendTo.RETRY else letter.topic
        if topic is None:
            return _failed(letter, None, "nothing in it says which topic it was sent to")
        if again:
            return ResendOutcome(letter, ResendResult.WOULD_BE_SENT, topic)
        try:
            # Copies in an unreadable topic are invisible. Unless it is the destination, where
            # every group would get the message twice, the retry topic alone is checked.
            copy = await copy_of(self._messages, letter, needed=topic)
        except Failed as error:
            return _failed(letter, topic, f"whether it was sent before is not known: {error}")
        if copy is None:
            return ResendOutcome(letter, ResendResult.WOULD_BE_SENT, topic)
        return ResendOutcome(letter, ResendResult.ALREADY_SENT, copy.queue.topic, copy.offset_id)

    async def _sent(
        self, letter: DeadLetter, target: ResendTo, topic: str, routes: _Routes
    ) -> ResendOutcome:
        try:
            stored = letter.message.stored
            # The copy gets a new checksum; a damaged body must not become valid.
            stored.verify()
            queue = await routes.queue(topic, letter.message.queue.broker)
            node = (await self._asking.topology()).master(queue.broker)
            header = SendMessageRequest(
                producer_group=PRODUCER_GROUP,
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue.id,
                sys_flag=stored.sys_flag & (COMPRESSED | COMPRESSION_TYPE_MASK),
                born_timestamp=stored.born_ms,
                flag=stored.flag,
                properties=encode_properties(_properties(letter, target)).decode(),
                reconsume_times=0,
                broker_name=queue.broker,
            )
            answer = await self._asking.ask(
                node.address, RequestCode.SEND_MESSAGE_V2, header, body=stored.stored_body
            )
            sent_as = answer.header(SendMessageResponse).msg_id
            copy = await self._messages.by_offset_id(sent_as)
        except (*Failed, MessageError) as error:
            return _failed(letter, topic, str(error))
        if copy.queue.topic != topic:
            return _failed(
                letter,
                topic,
                f"the broker put it into {copy.queue.topic!r}: the group consumes in order; send "
                "it to the origin instead",
            )
        return ResendOutcome(letter, ResendResult.SENT, topic, sent_as)


class _Routes:
    """Chooses queues in turn, on the letter's own broker if it has the topic."""

    def __init__(self, topics: AsyncTopics) -> None:
        self._topics = topics
        self._queues: dict[str, list[Queue]] = {}
        self._turn = 0

    async def check_retry(self, group: str) -> None:
        """The error for a group without a retry topic: never online, or deleted."""
        try:
            await self._of(retry_topic(group))
        except AdminError as error:
            raise GroupNotFound(group) from error

    async def queue(self, topic: str, broker: str) -> Queue:
        queues = await self._of(topic)
        near = [queue for queue in queues if queue.broker == broker] or queues
        self._turn += 1
        return near[self._turn % len(near)]

    async def _of(self, topic: str) -> list[Queue]:
        queues = self._queues.get(topic)
        if queues is None:
            route = await self._topics.route(topic)
            queues = self._queues[topic] = [
                Queue(topic, broker.broker, number)
                for broker in route.brokers
                if broker.permission & Permission.WRITE and 0 in broker.addresses
                for number in range(broker.write_queues)
            ]
        if not queues:
            raise AdminError(f"no broker accepts messages for topic {topic!r} at the moment")
        return queues


def _target(to: ResendTo | str) -> ResendTo:
    try:
        return ResendTo(to)
    except ValueError:
        raise BadRequest(
            f"dead letters are sent to one of {', '.join(ResendTo)}, not to {to!r}"
        ) from None


def _properties(letter: DeadLetter, target: ResendTo) -> dict[str, str | None]:
    """The properties of the copy: the message's own, and its origin."""
    message = letter.message
    kept: dict[str, str | None] = {
        name: value for name, value in message.properties.items() if name not in _DROPPED
    }
    if target is ResendTo.RETRY:
        # The listener sees the original topic.
        kept[RETRY_TOPIC] = letter.topic
        kept[ORIGIN_MESSAGE_ID] = letter.origin_id
    kept[RESENT_FROM] = letter.id
    kept[RESENT_TIMES] = str(letter.resent_times + 1)
    return kept


def _failed(letter: DeadLetter, topic: str | None, problem: str) -> ResendOutcome:
    return ResendOutcome(letter, ResendResult.FAILED, topic, problem=problem)


# Finding resends. A letter stays in its queue. The copy names its letter (`DLQ_RESENT_FROM`) and is
# found by the unique id of both, in the group's retry topic or in the original topic. This is the
# only record of a resend, by command, console or program. A copy expires after its letter.
# An original topic that this account may not read is skipped.


#: Letters of a lookup.
_TOGETHER: Final = 64


@dataclass(frozen=True, slots=True)
class LetterTrace:
    """The part of a letter that is needed to find its copies."""

    letter_id: str
    unique_id: str | None
    #: The topic of copies for its group only.
    retry: str
    #: The topic of copies for every group.
    origin: str | None
    died_at: float

    @classmethod
    def of(cls, letter: DeadLetter) -> Self:
        return cls(
            letter.id,
            letter.message.unique_id,
            retry_topic(letter.group),
            letter.topic,
            letter.died_at,
        )

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that may have copies."""
        return (self.retry,) if self.origin is None else (self.retry, self.origin)

    async def copy(
        self,
        messages: AsyncMessages,
        *,
        topics: Collection[str] | None = None,
        brokers: Collection[BrokerNode] | None = None,
        needed: str | None = None,
    ) -> ReceivedMessage | None:
        """The latest copy of the letter; None: it was not resent.

        Searches `topics`, all by default, on `brokers`. An unreadable original topic is skipped
        unless it is `needed`: then `BrokerRefused` is raised, if no broker returns a copy.
        """
        if self.unique_id is None:
            return None
        found: list[ReceivedMessage] = []
        for topic in self.topics if topics is None else topics:
            copies, refusal = await messages.readable_copies(topic, self.unique_id, brokers=brokers)
            made = [each for each in copies if each.get(RESENT_FROM) == self.letter_id]
            # One visible copy is enough, even if other brokers refuse.
            if refusal is not None and not made and topic in (self.retry, needed):
                raise refusal
            found += made
        return max(found, key=lambda each: each.stored_at, default=None)


async def copy_of(
    messages: AsyncMessages, letter: DeadLetter, *, needed: str | None = None
) -> ReceivedMessage | None:
    """The latest copy of a letter; None: it was not resent."""
    return await LetterTrace.of(letter).copy(messages, needed=needed)


async def with_copies(
    messages: AsyncMessages, letters: AsyncIterator[DeadLetter]
) -> AsyncIterator[tuple[DeadLetter, ReceivedMessage | None]]:
    """Each letter with its latest copy; None: it was not resent."""
    waiting: list[DeadLetter] = []
    async for letter in letters:
        waiting.append(letter)
        if len(waiting) == _TOGETHER:
            for each in await looked_up(messages, waiting):
                yield each
            waiting = []
    for each in await looked_up(messages, waiting):
        yield each


async def looked_up(
    messages: AsyncMessages, letters: Iterable[DeadLetter]
) -> list[tuple[DeadLetter, ReceivedMessage | None]]:
    """As `with_copies`, for one block of letters."""
    # The admin bounds the number of concurrent requests.
    asked = tuple(letters)
    copies = await asyncio.gather(*(copy_of(messages, each) for each in asked))
    return list(zip(asked, copies, strict=True))


#: The offset id of that letter.
RESENT_FROM: Final = "DLQ_RESENT_FROM"
#: The number of resends, including this one.
RESENT_TIMES: Final = "DLQ_RESENT_TIMES"
