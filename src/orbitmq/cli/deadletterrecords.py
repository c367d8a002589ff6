"""Dead letters as `--json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orbitmq.cli.jsonoutput import body_fields
from orbitmq.client.admin.deadletters import DeadLetter, DeadLetterSummary, Pile
from orbitmq.client.admin.resending import ResendOutcome
from orbitmq.client.received import ReceivedMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRecord:
    """A message that a group gave up; the fields of an exported file, and its latest copy."""

    group: str
    id: str  #: the message's own, the same through all retries: as `message show` takes it
    unique_id: str | None  #: the same; null if its producer gave it none
    offset_id: str  #: where this letter is stored; names it when the message died more than once
    topic: str | None  #: that it was sent to
    origin_id: str | None  #: offset id of the message as it was sent
    reason: str  #: as the consumer said it; unknown at Apache's brokers
    attempts: int
    resent_times: int  #: how often it had been sent again before it died this time
    resent_at: float | None  #: when it was last sent again; null: it waits for somebody
    resent_as: str | None  #: offset id of that copy
    died_at: float
    born_at: float
    tags: str | None
    keys: tuple[str, ...]
    broker: str
    queue_id: int
    queue_offset: int
    properties: Mapping[str, str]
    body: str | None
    body_base64: str | None

    @classmethod
    def of(cls, letter: DeadLetter, copy: ReceivedMessage | None) -> DeadLetterRecord:
        message = letter.message
        body, encoded = body_fields(message.body)
        return cls(
            group=letter.group,
            id=message.msg_id,
            unique_id=message.unique_id,
            offset_id=letter.id,
            topic=letter.topic,
            origin_id=letter.origin_id,
            reason=letter.reason,
            attempts=letter.attempts,
            resent_times=letter.resent_times,
            resent_at=None if copy is None else copy.stored_at,
            resent_as=None if copy is None else copy.offset_id,
            died_at=letter.died_at,
            born_at=message.born_at,
            tags=message.tags,
            keys=letter.keys,
            broker=message.queue.broker,
            queue_id=message.queue.id,
            queue_offset=message.queue_offset,
            properties=dict(message.properties),
            body=body,
            body_base64=encoded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PileRecord:
    """Dead letters that have something in common."""

    name: str
    count: int
    first_died_at: float
    last_died_at: float
    sample_id: str  #: id of the latest of them

    @classmethod
    def of(cls, pile: Pile) -> PileRecord:
        return cls(
            name=pile.name,
            count=pile.count,
            first_died_at=pile.first_died_at,
            last_died_at=pile.last_died_at,
            sample_id=pile.sample.message.msg_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRecord:
    """The dead letters of a group; without a group one line for each that has any."""

    group: str
    count: int
    resent: int | None  #: of these, sent again; null where there are too many to look each one up
    by_reason: tuple[PileRecord, ...]  #: the largest pile first; empty when no group was named
    by_topic: tuple[PileRecord, ...]
    by_age: tuple[PileRecord, ...]

    @property
    def open(self) -> int | None:
        """Those that nobody has sent again."""
        return None if self.resent is None else self.count - self.resent

    @classmethod
    def of(cls, summary: DeadLetterSummary, resent: int | None) -> SummaryRecord:
        return cls(
            group=summary.group,
            count=summary.count,
            resent=resent,
            by_reason=tuple(map(PileRecord.of, summary.by_reason)),
            by_topic=tuple(map(PileRecord.of, summary.by_topic)),
            by_age=tuple(map(PileRecord.of, summary.by_age)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendRecord:
    """What became of one letter; one line for each."""

    group: str
    id: str  #: of the message
    offset_id: str  #: of the letter
    result: str  #: sent, `would be sent`, `already sent` or failed
    topic: str | None  #: that it went, or would go, to
    sent_as: str | None  #: offset id of the copy
    problem: str | None

    @classmethod
    def of(cls, outcome: ResendOutcome) -> ResendRecord:
        return cls(
            group=outcome.letter.group,
            id=outcome.letter.message.msg_id,
            offset_id=outcome.letter.id,
            result=outcome.result.value,
            topic=outcome.topic,
            sent_as=outcome.sent_as,
            problem=outcome.problem,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """A file that was written."""

    group: str
    file: str
    count: int
