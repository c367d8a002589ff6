"""Alerts: tells webhooks when a finding of *Now* begins, lasts and is resolved.

`AlertBook` decides what to tell; it does no I/O. `Alerts` judges every look, keeps the book over a
restart, and posts from tasks of its own, so that a slow receiver delays nothing but its own posts.
An alert is posted at least once: its `id` tells a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from orbitmq.clock import Clock
from orbitmq.console.faults import GROUP_CHECKS, Check, Fault, Severity
from orbitmq.console.history import Audit, HistoryFile
from orbitmq.console.settings import BadInput, NotThere
from orbitmq.console.webhooks import (
    Alert,
    AlertSettings,
    FixedSilence,
    Happening,
    NotDelivered,
    Webhook,
    body_of,
    matches_any,
    post,
)
from orbitmq.console.words import duration
from orbitmq.parsing import moment

log = logging.getLogger(__name__)

#: Seconds after a start in which findings of the run before count as lasting: some checks compare
#: looks over 90 s.
SETTLED: Final = 120.0
#: Alerts that wait for a receiver, and seconds for which they do.
MOST_WAITING: Final = 500
KEPT: Final = 24 * 3600.0
#: Alerts in one post.
BATCH: Final = 20
#: Posts of one batch that the receiver refuses.
REFUSALS: Final = 5
#: Seconds before a failed post is repeated, at first and at most.
FIRST_WAIT: Final = 1.0
LONGEST_WAIT: Final = 300.0
MOST_SILENCES: Final = 500
_LONGEST_REASON: Final = 500
_BOOK, _SILENCES = "alerts/book", "alerts/silences"
_SEVERITIES: Final = {Severity.BAD: "critical", Severity.WARN: "warning"}
#: Checks whose findings are known only as far as all servers answer.
_NEEDS_ALL: Final = GROUP_CHECKS | {Check.TOPICS, Check.CLOCKS}

Key = str


def key_of(fault: Fault) -> Key:
    """What makes two faults of two looks the same finding: its text changes with its numbers."""
    return f"{fault.check}/{fault.kind}/{fault.subject}"


def not_seen(problem: str) -> Fault:
    """The finding that the cluster as a whole does not answer."""
    return Fault(
        check=Check.NAME_SERVERS,
        kind="cluster does not answer",
        weight=Severity.BAD,
        subject="cluster",
        text=problem,
        remedy="look whether its name servers run and can be reached from the console",
    )


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that are not posted for a time."""

    id: str
    subject: str
    kind: str | None = None
    until: float | None = None
    reason: str
    who: str
    at: float | None = None
    #: Whether it is in the file, so that it cannot be removed.
    is_fixed: bool = False

    def covers(self, subject: str, kind: str, now: float) -> bool:
        if self.until is not None and self.until <= now:
            return False
        return (self.kind is None or self.kind == kind) and matches_any(subject, (self.subject,))


class Finding(msgspec.Struct, kw_only=True):
    """A finding that lasts."""

    incident: str
    since: float
    check: str
    kind: str
    subject: str
    severity: str
    text: str
    remedy: str
    command: str | None
    impact: float | None
    link: str


class HookBook(msgspec.Struct):
    """What a webhook was told, and what waits for it, the oldest first."""

    told: dict[Key, float] = msgspec.field(default_factory=dict)
    waiting: list[Alert] = msgspec.field(default_factory=list)
    #: Alerts that were given up.
    lost: int = 0


class Pages(msgspec.Struct):
    """The book as it is kept."""

    findings: dict[Key, Finding] = msgspec.field(default_factory=dict)
    hooks: dict[str, HookBook] = msgspec.field(default_factory=dict)


class AlertBook:
    """Findings, and what each webhook is told about them."""

    def __init__(
        self, webhooks: Sequence[Webhook], pages: Pages | None = None, *, now: float = 0.0
    ) -> None:
        """`pages` are those of the run before, `now` the time of the start."""
        self._webhooks = webhooks
        self._started = now
        #: Findings of the run before that were not found again yet.
        self._restored = set() if pages is None else set(pages.findings)
        self.pages = pages or Pages()
        known = self.pages.hooks
        self.pages.hooks = {each.name: known.get(each.name, HookBook()) for each in webhooks}

    def judge(
        self,
        faults: Iterable[Fault],
        now: float,
        *,
        is_partial: bool = False,
        problem: str | None = None,
        is_silent: Callable[[str, str], bool] = lambda _subject, _kind: False,
    ) -> bool:
        """One look; whether there is something to post or to keep.

        `is_partial`: a server did not answer. `problem`: the whole cluster did not, and `faults`
        does not count.
        """
        found = [not_seen(problem)] if problem is not None else list(faults)
        there: dict[Key, Fault] = {}
        for fault in found:
            there.setdefault(key_of(fault), fault)
        findings = self.pages.findings
        is_changed = False
        for key, fault in there.items():
            is_changed |= key not in findings
            findings[key] = _finding(fault, findings.get(key), now)
        self._restored -= there.keys()
        is_settled = now - self._started >= SETTLED
        for key in [key for key in findings if key not in there]:
            needs_all = findings[key].check in _NEEDS_ALL
            is_unknown = problem is not None or (is_partial and needs_all)
            if is_unknown or (key in self._restored and not is_settled):
                continue
            self._resolve(key, now)
            is_changed = True
        for webhook in self._webhooks:
            for key in there:
                is_changed |= self._tell(webhook, key, now, is_silent)
        return is_changed

    def _tell(
        self, webhook: Webhook, key: Key, now: float, is_silent: Callable[[str, str], bool]
    ) -> bool:
        book, finding = self.pages.hooks[webhook.name], self.pages.findings[key]
        is_critical = finding.severity == _SEVERITIES[Severity.BAD]
        last = book.told.get(key)
        if last is None:
            is_due, event = now - finding.since >= webhook.wait, Happening.BEGIN
        else:
            is_due = 0 < webhook.repeat <= now - last
            event = Happening.REPEAT
        if not is_due or not webhook.wants(finding.subject, is_critical=is_critical):
            return False
        if is_silent(finding.subject, finding.kind):
            return False
        if event is Happening.REPEAT and len(book.waiting) >= MOST_WAITING:
            # It must not take the place of what was never told.
            return False
        book.told[key] = now
        if last is None or all(each.incident != finding.incident for each in book.waiting):
            self.add(webhook.name, _alert(event, finding, now))
        return True

    def _resolve(self, key: Key, now: float) -> None:
        finding = self.pages.findings.pop(key)
        self._restored.discard(key)
        for name, book in self.pages.hooks.items():
            if book.told.pop(key, None) is not None:
                self.add(name, _alert(Happening.RESOLVE, finding, now))

    def add(self, name: str, alert: Alert) -> None:
        """Let an alert wait for a webhook; the oldest makes room."""
        book = self.pages.hooks[name]
        book.waiting.append(alert)
        over = len(book.waiting) - MOST_WAITING
        if over > 0:
            del book.waiting[:over]
            book.lost += over

    def batch(self, name: str, now: float) -> tuple[Alert, ...]:
        """The alerts of the next post; those that waited too long are given up."""
        book = self.pages.hooks[name]
        fresh = [each for each in book.waiting if now - each.at < KEPT]
        book.lost += len(book.waiting) - len(fresh)
        book.waiting = fresh
        return tuple(fresh[:BATCH])

    def done(self, name: str, alerts: Iterable[Alert], *, is_lost: bool = False) -> None:
        """These alerts were posted, or given up."""
        book, gone = self.pages.hooks[name], {each.id for each in alerts}
        kept = [each for each in book.waiting if each.id not in gone]
        if is_lost:
            book.lost += len(book.waiting) - len(kept)
        book.waiting = kept


def _finding(fault: Fault, before: Finding | None, now: float) -> Finding:
    return Finding(
        incident=secrets.token_hex(8) if before is None else before.incident,
        since=now if before is None else before.since,
        severity=_SEVERITIES[fault.weight],
        check=str(fault.check),
        kind=fault.kind,
        subject=fault.subject,
        text=fault.text,
        remedy=fault.remedy,
        command=fault.command,
        impact=None if fault.impact == float("inf") else fault.impact,
        link=fault.link,
    )


def _alert(event: Happening, finding: Finding, now: float) -> Alert:
    content: dict[str, object] = msgspec.to_builtins(finding)
    return msgspec.convert(
        content | {"id": secrets.token_hex(8), "event": event, "at": now}, type=Alert
    )


class SilenceRequest(msgspec.Struct, forbid_unknown_fields=True, rename={"lasts": "for"}):
    """What to silence: for some seconds, or until a time."""

    subject: str
    reason: str
    kind: str | None = None
    lasts: float | None = None
    until: float | str | None = None


class Silences:
    """All silences, kept over a restart."""

    def __init__(
        self, clock: Clock, file: HistoryFile, audit: Audit, fixed: Iterable[FixedSilence]
    ) -> None:
        self._clock = clock
        self._file = file
        self._audit = audit
        self._fixed = tuple(
            Silence(
                id=f"file-{number}",
                subject=each.subject,
                kind=each.kind,
                until=None if each.until is None else moment(each.until),
                reason=each.reason,
                who="the file",
                is_fixed=True,
            )
            for number, each in enumerate(fixed, 1)
        )
        self._made: dict[str, Silence] = {}
        #: Counts the changes.
        self.turn = 0

    async def load(self) -> None:
        """Load those of earlier runs."""
        for text in (await self._file.kept(_SILENCES)).values():
            for each in _decoded(text, list[Silence]) or ():
                self._made[each.id] = each

    @property
    def all(self) -> list[Silence]:
        """Those that are in force, the first to end first."""
        now = self._clock.now()
        there = [
            each for each in (*self._made.values(), *self._fixed)
            if each.until is None or each.until > now
        ]  # fmt: skip
        return sorted(there, key=lambda each: (each.until or float("inf"), each.subject))

    def of(self, subject: str, kind: str) -> Silence | None:
        """The silence of a finding."""
        now = self._clock.now()
        some = (*self._fixed, *self._made.values())
        return next((each for each in some if each.covers(subject, kind, now)), None)

    async def add(self, wanted: SilenceRequest, who: str) -> Silence:
        """Raises `BadInput`."""
        now, reason = self._clock.now(), wanted.reason.strip()
        if not wanted.subject.strip():
            raise BadInput("subject must be a name, in which * stands for any text")
        if not reason or len(reason) > _LONGEST_REASON:
            raise BadInput(f"a silence needs a reason of 1 to {_LONGEST_REASON} characters")
        if (wanted.lasts is None) == (wanted.until is None):
            raise BadInput("a silence has either `for` in seconds or `until`")
        until = moment(wanted.until, "until") if wanted.lasts is None else now + wanted.lasts
        if until <= now:
            raise BadInput("a silence must end in the future")
        self._made = {each.id: each for each in self.all if not each.is_fixed}
        if len(self._made) >= MOST_SILENCES:
            raise BadInput(f"{MOST_SILENCES} silences are in force; remove some first")
        silence = Silence(
            id=secrets.token_hex(6),
            subject=wanted.subject.strip(),
            kind=wanted.kind or None,
            until=until,
            reason=reason,
            who=who,
            at=now,
        )
        self._made[silence.id] = silence
        await self._keep()
        what = f"silence {silence.subject}" + (f" ({silence.kind})" if silence.kind else "")
        await self._audit.note(who, what, f"silent for {duration(until - now)}: {reason}")
        return silence

    async def remove(self, identity: str, who: str) -> Silence:
        """Raises `NotThere`, and `BadInput` for one of the file."""
        if any(each.id == identity for each in self._fixed):
            raise BadInput("this silence is in the file of the alerts; remove it there")
        silence = self._made.pop(identity, None)
        if silence is None:
            raise NotThere("this silence has ended or was removed")
        await self._keep()
        await self._audit.note(who, f"end silence {silence.subject}", "removed")
        return silence

    async def _keep(self) -> None:
        self.turn += 1
        await self._file.keep(_SILENCES, msgspec.json.encode(list(self._made.values())).decode())


@dataclass(slots=True)
class Delivery:
    """How posts to a webhook go."""

    webhook: Webhook
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    posted: int = 0
    posted_at: float | None = None
    #: Failed posts since the last one that succeeded, why, and when the next one is due.
    failures: int = 0
    problem: str | None = None
    next_at: float | None = None


#: Posts that the page shows.
_SHOWN: Final = 50


@dataclass(frozen=True, slots=True)
class Post:
    """A post as the page shows it."""

    at: float
    webhook: str
    alerts: int
    first: str
    problem: str | None


class Alerts:
    """Judges every look and posts what is new."""

    def __init__(
        self,
        settings: AlertSettings,
        clock: Clock,
        file: HistoryFile,
        audit: Audit,
        *,
        cluster: tuple[str, ...],
        name: str = "",
    ) -> None:
        self.settings = settings
        self.silences = Silences(clock, file, audit, settings.silences)
        self._clock = clock
        self._file = file
        self._cluster = cluster
        self._name = name
        self._book = AlertBook(settings.webhooks)
        self._tasks: list[asyncio.Task[None]] = []
        self.deliveries = {each.name: Delivery(each) for each in settings.webhooks}
        self.posts: deque[Post] = deque(maxlen=_SHOWN)

    async def start(self) -> None:
        """Load the book of the run before, and post what waits."""
        await self.silences.load()
        pages = None
        for text in (await self._file.kept(_BOOK)).values():
            pages = _decoded(text, Pages)
        self._book = AlertBook(self.settings.webhooks, pages, now=self._clock.now())
        self._tasks = [
            asyncio.create_task(self._deliver(each), name=f"alerts {each.webhook.name}")
            for each in self.deliveries.values()
        ]

    async def stop(self) -> None:
        """End the posts; what waits is posted after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.deliveries:
            await self._keep()

    @property
    def waiting(self) -> Mapping[str, HookBook]:
        """What each webhook was told, and what waits for it."""
        return self._book.pages.hooks

    @property
    def is_needed(self) -> bool:
        """Whether anybody is told."""
        return bool(self.deliveries)

    async def judge(
        self, faults: Iterable[Fault], *, is_partial: bool, problem: str | None
    ) -> None:
        """One look at the cluster."""
        is_changed = self._book.judge(
            faults,
            self._clock.now(),
            is_partial=is_partial,
            problem=problem,
            is_silent=lambda subject, kind: self.silences.of(subject, kind) is not None,
        )
        if is_changed:
            await self._keep()
            for each in self.deliveries.values():
                each.wake.set()

    def test(self, name: str, who: str) -> None:
        """Post a test to a webhook. Raises `NotThere`."""
        if name not in self.deliveries:
            raise NotThere(f"there is no webhook {name!r}")
        now = self._clock.now()
        alert = Alert(
            id=secrets.token_hex(8),
            incident="test",
            event=Happening.TEST,
            at=now,
            since=now,
            severity="warning",
            check="test",
            kind="test",
            subject="test",
            text=f"this is a test of the webhook {name}, sent by {who}",
            remedy="nothing is to be done",
        )
        self._book.add(name, alert)
        self.deliveries[name].wake.set()

    async def _keep(self) -> None:
        await self._file.keep(_BOOK, msgspec.json.encode(self._book.pages).decode())

    async def _deliver(self, delivery: Delivery) -> None:
        name = delivery.webhook.name
        while True:
            delivery.wake.clear()
            while batch := self._book.batch(name, self._clock.now()):
                wait = await self._try(delivery, batch)
                await self._keep()
                if wait:
                    await asyncio.sleep(wait)
            await delivery.wake.wait()

    async def _try(self, delivery: Delivery, batch: tuple[Alert, ...]) -> float:
        """Post a batch; the seconds to wait before the next post."""
        webhook, problem, wait = delivery.webhook, None, 0.0
        body = body_of(
            webhook,
            batch,
            console=self.settings.console,
            cluster=self._cluster,
            name=self._name,
        )
        try:
            await _on_a_thread(lambda: post(webhook, body))
        except NotDelivered as error:
            problem = str(error)
            delivery.failures += 1
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(delivery.failures - 1, 20))
            if delivery.problem is None:
                fields = {"webhook": webhook.name, "host": webhook.host, "reason": problem}
                log.warning("alerts are not delivered", extra=fields)
            if error.is_refused and delivery.failures % REFUSALS == 0:
                self._book.done(webhook.name, batch, is_lost=True)
        else:
            if delivery.problem is not None:
                log.info("alerts are delivered again", extra={"webhook": webhook.name})
            delivery.failures, delivery.posted_at = 0, self._clock.now()
            delivery.posted += len(batch)
            self._book.done(webhook.name, batch)
        delivery.problem = problem
        delivery.next_at = self._clock.now() + wait if wait else None
        first = f"{batch[0].event} {batch[0].subject}: {batch[0].kind}"
        self.posts.appendleft(Post(self._clock.now(), webhook.name, len(batch), first, problem))
        return wait


T = TypeVar("T")


def _decoded(text: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        log.warning("alerts of the run before are not known: %s", error)
        return None


async def _on_a_thread(work: Callable[[], None]) -> None:
    """Run work on a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001  # raised again where it is awaited
            error = caught
        # The loop may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="console alerts", daemon=True).start()
    await done
