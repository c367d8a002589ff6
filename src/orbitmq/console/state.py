"""What a console consists of while it runs, and how a request finds it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.resets import ResetPlan
from orbitmq.client.engine import Engine
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.clock import Clock
from orbitmq.console import words
from orbitmq.console.alerts import Alerts
from orbitmq.console.bodies import Bodies, BodyView
from orbitmq.console.collect import BrokerTables, Collector, MemberPoller, Snapshot, readers
from orbitmq.console.faults import CLOCKS_EVERY, ClockWatch, Fault, Observation, find_faults
from orbitmq.console.history import GONE, Audit, FineHistory, HistoryFile
from orbitmq.console.http import Events, cookie_name
from orbitmq.console.logins import Logins, Session
from orbitmq.console.pipelines import Pipelines
from orbitmq.console.resends import LaterAttempts, Replays, later_attempts
from orbitmq.console.roles import RULES, Right
from orbitmq.console.settings import (
    ConsoleSettings,
    NotPermitted,
    NotThere,
    NotYet,
    OidcSettings,
    ReadOnly,
    is_loopback,
)
from orbitmq.console.users import Users

if TYPE_CHECKING:
    from orbitmq.console.oidc import Provider

#: The producer group of messages that are sent from the page.
PRODUCER_GROUP = "ORBITMQ_CONSOLE"


class ConsoleState:
    """The state behind the views of a cluster: one engine, one snapshot."""

    def __init__(self, settings: ConsoleSettings, clock: Clock, logins: Logins) -> None:
        self.settings = settings
        self.clock = clock
        self.engine = Engine(settings.client, clock=clock)
        self.events = Events()
        self.fine = FineHistory()
        self.file = HistoryFile(settings.history)
        self.audit = Audit(clock, self.file, self.events, settings.name)
        self.pipelines = Pipelines(clock)
        self.bodies = Bodies(self.file, settings.masked)
        self.plans = Plans(clock)
        self.alerts = Alerts(
            settings.alerts,
            clock,
            self.file,
            self.audit,
            cluster=settings.client.name_servers,
            name=settings.name,
        )
        self.logins = logins
        #: The content of the first view, and the key of what it was made from.
        self.now: tuple[object, dict[str, object]] | None = None
        #: Pages that follow a topic.
        self.tails = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start to look at the cluster."""
        await self.file.open()
        try:
            await self.audit.load()
            await self.bodies.load()
            await self.engine.start()
        except BaseException:
            await self.file.close()
            raise
        self.admin = AsyncAdmin.on(self.engine)
        self.producer = AsyncProducer.on(self.engine, PRODUCER_GROUP)
        await self.producer.start()
        self.replays = Replays(self.audit, self.events)
        self.tables = BrokerTables(self.engine)
        self.collector = Collector(
            # An admin of its own counts the requests of looks alone.
            AsyncAdmin.on(self.engine),
            self.tables,
            self.clock,
            every=self.settings.every,
            on_sample=self._sampled,
            # Pages ask again, and are told what is wrong.
            on_problem=lambda: self.events.publish("sample", {"at": None}),
        )
        self.members = MemberPoller(self.admin, self.clock)
        self.clocks = ClockWatch(self.admin, self.clock)
        await self.alerts.start()
        self._tasks += (
            asyncio.create_task(self.collector.run(), name="console collector"),
            asyncio.create_task(self._poll_members(), name="console members"),
            asyncio.create_task(self._compare_clocks(), name="console clocks"),
            asyncio.create_task(self._alert(), name="console alerts"),
        )

    async def stop(self) -> None:
        self.events.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.alerts.stop()
        await self.replays.stop()
        await self.producer.stop()
        await self.admin.stop()
        await self.engine.stop()
        await self.file.close()

    @property
    def snapshot(self) -> Snapshot:
        """The last snapshot. Raises `NotYet`."""
        snapshot = self.collector.snapshot
        if snapshot is None:
            raise NotYet(self.collector.problem or "the first look at the cluster has not ended")
        return snapshot

    def faults(self) -> tuple[Fault, ...]:
        return find_faults(
            Observation(
                snapshot=self.snapshot,
                now=self.clock.now(),
                findings=self.members.findings,
                skews=self.clocks.skews.found,
                pipelines=tuple(self.pipelines.all),
                name_servers=self.settings.client.name_servers,
            )
        )

    async def later_attempts(self, group: str) -> LaterAttempts | None:
        """Messages of a group that wait for a later attempt; None: not known."""
        snapshot = self.collector.snapshot
        if snapshot is None:
            return None
        return await later_attempts(self.engine, self.tables, readers(snapshot.cluster), group)

    async def _poll_members(self) -> None:
        while True:
            snapshot = self.collector.snapshot
            groups = () if snapshot is None else snapshot.groups.values()
            behind = {each.name for each in groups if each.lag}
            await self.members.poll(self.collector.clients, behind)
            await asyncio.sleep(self.settings.every)

    async def _compare_clocks(self) -> None:
        while True:
            snapshot = self.collector.snapshot
            topics = () if snapshot is None else snapshot.topics.values()
            written = [(each.last_stored_at, each.name) for each in topics if each.last_stored_at]
            # Clocks drift slowly; without any message there is nothing to compare yet.
            await self.clocks.look([name for _, name in sorted(written, reverse=True)])
            await asyncio.sleep(CLOCKS_EVERY if written else 1.0)

    async def _alert(self) -> None:
        """Judge every look for the webhooks."""
        judged: tuple[float | None, str | None] = (None, None)
        while self.alerts.is_needed:
            snapshot, problem = self.collector.snapshot, self.collector.problem
            seen = (None if snapshot is None else snapshot.at, problem)
            # A problem that lasts is judged again: its alert is due after a while.
            if seen != judged or problem is not None:
                judged = seen
                is_known = snapshot is not None and problem is None
                if is_known or problem is not None:
                    await self.alerts.judge(
                        self.faults() if is_known else (),
                        is_partial=snapshot is not None and snapshot.is_partial,
                        problem=problem,
                    )
            await asyncio.sleep(self.settings.every)

    def command(self, action: words.Action, *arguments: str | None, **options: Any) -> str:
        """The command of an action, for this cluster."""
        return self.for_cluster(words.command(action, *arguments, **options))

    def for_cluster(self, command: str) -> str:
        """A command with the name servers of this cluster."""
        return words.for_cluster(command, self.settings.client.name_servers)

    @property
    def enabling_command(self) -> str:
        """The command that starts a console with the right to change things, beside this one."""
        host = None if is_loopback(self.settings.host) else self.settings.host
        return self.command(words.Action.START_CONSOLE, write=True, host=host, port=0)

    async def _sampled(self, snapshot: Snapshot) -> None:
        values = measured(snapshot)
        for group, times in self.members.times.items():
            values[f"group/{group}/median"] = round(times.median, 4)
            values[f"group/{group}/slowest"] = round(times.slowest, 4)
            for name, took in (("p50", times.p50), ("p95", times.p95), ("p99", times.p99)):
                if took is not None:
                    values[f"group/{group}/{name}"] = round(took, 6)
            values[f"group/{group}/ok"] = round(times.ok_rate, 3)
            values[f"group/{group}/failed"] = round(times.failed_rate, 3)
            values[f"group/{group}/pulled"] = round(times.pull_rate, 3)
            values[f"group/{group}/pull"] = round(times.pull_time, 4)
        now = self.clock.now()
        for each in self.pipelines.all:
            is_up, report = each.is_up_at(now), each.report
            for name, value in (
                ("lag", float(each.total_lag)),
                ("rows", report.rows_per_second or 0.0),
                ("failed", report.failed_share),
            ):
                if value is not None:
                    values[f"pipeline/{each.name}/{name}"] = value if is_up else GONE
        self.fine.add(snapshot.at, values)
        await self.file.add(snapshot.at, values)
        self.events.publish("sample", {"at": snapshot.at})


def _provider(settings: OidcSettings, clock: Clock) -> Provider:
    # Late: an extra.
    from orbitmq.console.oidc import Provider  # noqa: PLC0415

    return Provider(settings, clock)


class Clusters:
    """The clusters of a console by their names, and its logins; a single cluster has no name."""

    def __init__(self, settings: ConsoleSettings, clock: Clock) -> None:
        self.settings = settings
        self.logins = Logins(
            settings.password,
            clock,
            lasts=settings.session,
            attempts=settings.attempts,
            users=None if settings.users is None else Users(settings.users),
            has_provider=settings.oidc is not None,
        )
        self.provider = None if settings.oidc is None else _provider(settings.oidc, clock)
        self.all: Mapping[str, ConsoleState] = {
            name: ConsoleState(each, clock, self.logins) for name, each in settings.each().items()
        }

    @property
    def default(self) -> ConsoleState:
        """The first one, which addresses without a cluster mean."""
        return next(iter(self.all.values()))

    @property
    def are_several(self) -> bool:
        return "" not in self.all

    async def start(self) -> None:
        """Start to look at all clusters; none has to answer."""
        if self.logins.users is not None:
            # A file that cannot be read is found now, and not by the first login.
            _ = self.logins.users.all
        async with AsyncExitStack() as started:
            for each in self.all.values():
                await each.start()
                started.push_async_callback(each.stop)
            started.pop_all()

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop() for each in self.all.values()))

    def end_streams(self) -> None:
        for each in self.all.values():
            each.events.close()

    async def note(self, who: str, command: str, outcome: str) -> None:
        """A change of the console itself, which concerns every cluster, for the audit."""
        for each in self.all.values():
            await each.audit.note(who, command, outcome)


def clusters_of(request: Request) -> Clusters:
    """All clusters of the console that answers a request."""
    found: Clusters = request.app.state.clusters
    return found


def state_of(request: Request) -> ConsoleState:
    """The cluster that a request is about. Raises `NotThere`."""
    clusters, name = clusters_of(request), getattr(request.state, "cluster", None)
    if name is None:
        return clusters.default
    if name not in clusters.all:
        raise NotThere(f"this console has no cluster {name!r}; it has {', '.join(clusters.all)}")
    return clusters.all[name]


def view_of(request: Request) -> BodyView:
    """Bodies as the session of a request may see them."""
    return BodyView(state_of(request).bodies, sees_masked=session_of(request).may(Right.MASKED))


def session_of(request: Request) -> Session:
    """The session of a request that needs one."""
    session: Session = request.state.session
    return session


def check_right(request: Request, right: Right, command: str | None = None) -> None:
    """Raise unless a request may do something; `command` does the same from a shell."""
    session = session_of(request)
    if not session.may(right):
        raise NotPermitted(session.role, right, command)
    if RULES[right].is_change and not state_of(request).settings.write:
        raise ReadOnly(command)


def session_check(request: Request) -> Callable[[], bool]:
    """A check whether the session of a request is still valid: streams outlast logins."""
    logins, token = clusters_of(request).logins, session_token(request)
    return lambda: logins.session(token) is not None


def session_token(request: Request) -> str | None:
    """The session token in the cookie of a request."""
    return request.cookies.get(cookie_name(request.headers.get("host", "")))


def actor_of(request: Request) -> str:
    """The actor of a request in the audit: its user, if it has one, and its address."""
    session, address = session_of(request), address_of(request)
    if session.user is None:
        return address
    return f"{session.user}{f' (by {session.via})' if session.via else ''}, {address}"


def address_of(request: Request) -> str:
    """The address that a request comes from."""
    return request.client.host if request.client else "unknown"


def measured(snapshot: Snapshot) -> dict[str, float]:
    """The numbers of a look that the history keeps, by series."""
    values = {
        "cluster/in": snapshot.in_rate,
        "cluster/out": snapshot.out_rate,
        "cluster/lag": float(snapshot.lag),
        "cluster/seconds": snapshot.oldest,
        "cluster/dead": float(snapshot.open_letters),
    }
    for group in snapshot.groups.values():
        prefix = f"group/{group.name}/"
        values[prefix + "in"] = group.in_rate
        values[prefix + "out"] = group.out_rate
        values[prefix + "retry"] = float(group.retry_lag)
        values[prefix + "dead"] = float(group.open_letters)
        values[prefix + "lag"] = float(group.lag)
        if group.lag_seconds is not None:
            values[prefix + "seconds"] = round(group.lag_seconds, 1)
    for topic in snapshot.topics.values():
        if topic.messages is not None or topic.in_rate:
            values[f"topic/{topic.name}/in"] = topic.in_rate
    return values


#: Seconds for which a plan can be applied: commits move on.
VALID = 600.0
_MOST = 200


@dataclass(frozen=True, slots=True)
class Planned:
    """The plans of one request, one for each topic."""

    id: str
    plans: tuple[ResetPlan, ...]
    command: str
    until: float


class Plans:
    """The plans that were shown, kept until they are applied: what was shown is what is done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[str, Planned] = {}

    def keep(self, plans: tuple[ResetPlan, ...], command: str) -> Planned:
        now = self._clock.monotonic()
        self._all = {key: each for key, each in self._all.items() if each.until > now}
        while len(self._all) >= _MOST:
            del self._all[next(iter(self._all))]
        planned = Planned(secrets.token_urlsafe(12), plans, command, now + VALID)
        self._all[planned.id] = planned
        return planned

    def take(self, identity: str) -> Planned:
        """Remove and return a plan. Raises `NotThere`."""
        planned = self._all.pop(identity, None)
        if planned is None or planned.until <= self._clock.monotonic():
            raise NotThere("this plan is applied already or too old; make a new one")
        return planned
