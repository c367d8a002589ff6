"""Faults: what is wrong with a cluster, in words, and the command that helps.

`find_faults` judges one observation: a snapshot and the reports of members, clocks and pipelines.
`examine` makes an observation of everything for a caller that asks once, such as the doctor.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.cluster import DISK_WARNING, BrokerStatus, ClusterStatus
from orbitmq.client.admin.members import Finding, FindingKind
from orbitmq.client.admin.requests import Unreachable
from orbitmq.client.admin.topics import Permission, QueueStatus, Topic, TopicKind
from orbitmq.client.engine import Engine
from orbitmq.client.errors import GroupNotFound
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock
from orbitmq.console import collect, words
from orbitmq.console.collect import (
    STALLED_AFTER,
    UNEVEN_POLLS,
    BrokerTables,
    Collector,
    GroupSample,
    HandlerTimes,
    MemberFindings,
    MemberPoller,
    Pace,
    Snapshot,
    TopicPart,
    Uneven,
)
from orbitmq.console.history import REPORT_INTERVAL
from orbitmq.console.pipelines import Pipeline, PipelineState
from orbitmq.console.words import Action, duration, several, share
from orbitmq.errors import OrbitError
from orbitmq.names import is_retry_topic

log = logging.getLogger(__name__)

#: Seconds that messages wait before a group without members, or one that falls behind, is a fault.
SILENT_AFTER = 60.0
BEHIND_AFTER = 120.0
#: The share of the limit on automatic topics or groups from which it is a fault.
NEARLY_FULL = 0.8
_BROKERS_PAGE = "/brokers"

#: Clocks that differ by fewer seconds count as equal.
TOLERANCE = 2.0
#: Seconds between two comparisons of clocks in a console: clocks drift slowly.
CLOCKS_EVERY = 60.0
#: Topics that are read for a comparison, and those tried until as many could be read.
_CLOCK_TOPICS = 3
_CLOCK_TOPICS_TRIED = 20

#: Seconds without progress after which `examine` calls a group stalled: two commits of its members.
PATIENCE = 2 * REPORT_INTERVAL
#: Topics whose latest messages `examine` reads for clocks.
_SAMPLED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the checks judge."""

    snapshot: Snapshot
    now: float
    #: What is wrong among the members of groups.
    findings: Mapping[str, MemberFindings] = field(default_factory=dict, hash=False)
    #: Brokers whose clocks are wrong, in words.
    skews: Mapping[str, str] = field(default_factory=dict, hash=False)
    pipelines: tuple[Pipeline, ...] = ()
    #: The name servers for commands; empty: the default ones of the command line.
    name_servers: tuple[str, ...] = ()
    #: The groups that were looked at; empty: all.
    only: frozenset[str] = frozenset()


def find_faults(seen: Observation) -> tuple[Fault, ...]:
    """Everything that is wrong, the worst first."""
    snapshot = seen.snapshot
    found = sorted_faults(
        (
            *server_faults(snapshot.cluster, snapshot.unreachable),
            *topic_faults(each.topic for each in snapshot.topics.values()),
            *clock_faults(seen.skews),
            *group_faults(
                snapshot.groups.values(), seen.findings, _group_warnings(snapshot, seen.only)
            ),
            *pipeline_faults(seen.pipelines, seen.now),
        )
    )
    return tuple(for_cluster(fault, seen.name_servers) for fault in found)


def for_cluster(fault: Fault, name_servers: tuple[str, ...]) -> Fault:
    """The fault with a command for its cluster."""
    command, otherwise = (
        None if each is None else words.for_cluster(each, name_servers)
        for each in (fault.command, fault.otherwise_command)
    )
    return replace(fault, command=command, otherwise_command=otherwise)


class Check(enum.StrEnum):
    """What is checked; a fault belongs to one of these."""

    NAME_SERVERS = "name servers"
    BROKERS = "brokers"
    ADDRESSES = "advertised addresses"
    DISKS = "disks"
    HEALTH = "health"
    ROOM = "room for topics and groups"
    TOPICS = "topics"
    CLOCKS = "clocks"
    SUBSCRIPTIONS = "subscriptions"
    CLIENT_IDS = "client ids"
    STUCK_QUEUES = "stuck queues"
    UNBALANCED = "unbalanced groups"
    ENDLESS_RETRIES = "endless retries"
    UNATTENDED = "unattended groups"
    FALLING_BEHIND = "falling behind"
    DEAD_LETTERS = "dead letters"
    GROUP_SETTINGS = "group settings"
    PIPELINES = "pipelines"
    JAVA = "Java"
    WORKERS = "Python of workers"


class Severity(enum.StrEnum):
    """How urgent a fault is."""

    BAD = "bad"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    check: Check
    #: In a word or two.
    kind: str
    weight: Severity
    #: What it is about, and where the page shows it.
    subject: str
    link: str = "/"
    text: str
    #: What to do about it, repair first.
    remedy: str
    command: str | None = None
    #: What else can be done where repair is not wanted, and its command.
    otherwise: str | None = None
    otherwise_command: str | None = None
    #: Messages that it concerns; faults of servers concern all.
    impact: float = math.inf


def page_of(place: str, name: str) -> str:
    """Where the page shows something."""
    return f"/{place}/{quote(name, safe='')}"


def sorted_faults(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The worst first: by severity, then by the number of messages that they concern."""
    return tuple(sorted(faults, key=lambda fault: (fault.weight, -fault.impact, fault.kind)))


@dataclass(frozen=True, slots=True)
class Card:
    """All faults of one group, server, topic or pipeline, the worst first."""

    subject: str
    link: str
    weight: Severity
    faults: tuple[Fault, ...]


def cards(faults: Iterable[Fault]) -> tuple[Card, ...]:
    """Faults by what they are about, the worst first."""
    about: dict[tuple[bool, bool, str], list[Fault]] = {}
    for fault in sorted_faults(faults):
        is_group, is_pipeline = fault.check in GROUP_CHECKS, fault.check is Check.PIPELINES
        about.setdefault((is_group, is_pipeline, fault.subject), []).append(fault)
    return tuple(
        Card(subject, some[0].link, some[0].weight, tuple(some))
        for (_, _, subject), some in about.items()
    )


def gathered(faults: Iterable[Fault], shown: int = 5) -> list[Mapping[str, object]]:
    """Faults by kind, with their number and the first of them.

    Forty groups without consumers are one event and not forty.
    """
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    return [
        {"kind": kind, "weight": some[0].weight, "count": len(some), "faults": some[:shown]}
        for kind, some in kinds.items()
    ]


#: The checks that are about a group.
GROUP_CHECKS = frozenset(
    {
        *(Check.SUBSCRIPTIONS, Check.CLIENT_IDS, Check.STUCK_QUEUES, Check.UNBALANCED),
        *(Check.ENDLESS_RETRIES, Check.UNATTENDED, Check.FALLING_BEHIND),
        *(Check.DEAD_LETTERS, Check.GROUP_SETTINGS),
    }
)


_NO_FINDINGS = MemberFindings()


def server_faults(
    cluster: ClusterStatus, unreachable: Iterable[Unreachable] = ()
) -> Iterator[Fault]:
    """Faults that the status of the cluster shows."""
    yield from name_server_faults(cluster)
    yield from broker_faults(cluster)
    yield from name_faults(cluster)
    yield from address_faults(cluster)
    yield from disk_faults(cluster)
    yield from health_faults(cluster, unreachable)
    yield from capacity_faults(cluster)


def name_server_faults(cluster: ClusterStatus) -> Iterator[Fault]:
    """Name servers that are down or know less than others."""
    everywhere = {str(broker.node) for broker in cluster.brokers}
    for server in cluster.name_servers:
        if server.problem is not None:
            yield _bad(
                Check.NAME_SERVERS,
                "name server down",
                str(server.address),
                f"the name server {server.address} does not answer: {server.problem}",
                "start it, or leave it out of the name servers that clients are given",
                words.command(Action.START_NAME_SERVER, port=server.address.port),
            )
        elif missing := sorted(everywhere - set(server.brokers)):
            yield _bad(
                Check.NAME_SERVERS,
                "name server knows less",
                str(server.address),
                f"the name server {server.address} does not know {', '.join(missing)}, so that "
                "clients which ask it miss their queues",
                "give all brokers the same list of name servers (broker.name_servers)",
                _start(cluster, missing[0].partition("/")[0]),
            )


def broker_faults(cluster: ClusterStatus) -> Iterator[Fault]:
    """Brokers that clients cannot use."""
    if not cluster.brokers:
        yield _bad(
            Check.BROKERS,
            "no broker",
            "brokers",
            "no broker is registered",
            "start one",
            _start(cluster),
        )
    masters = {each.node.broker for each in cluster.brokers if each.node.is_master}
    for name in sorted({each.node.broker for each in cluster.brokers} - masters):
        yield _bad(
            Check.BROKERS,
            "no master",
            name,
            f"broker {name} has no master, so that nothing can be sent to it",
            "start its master again",
            _start(cluster, name),
        )
    for broker in cluster.brokers:
        if not broker.is_up:
            yield _bad(
                Check.BROKERS,
                "broker down",
                str(broker.node),
                f"broker {broker.node} tells clients to connect to {broker.node.address}, which "
                f"cannot be reached from here: {broker.problem}",
                "if it runs, give it the address that clients reach (--advertise, brokerIP1 at "
                "Apache's); if not, start it",
                _start(cluster, broker.node.broker, broker.node.address.port, advertise=True),
            )


def name_faults(cluster: ClusterStatus) -> Iterator[Fault]:
    """Brokers that share a name, so that clients find one of them only."""
    for broker in cluster.brokers:
        if broker.runtime is not None and broker.runtime.name_conflicts:
            yield _bad(
                Check.BROKERS,
                "name given twice",
                str(broker.node),
                f"broker {broker.node}: {broker.runtime.name_conflicts}",
                "stop one of the two, and start it again as it was started, with another name",
                _start(cluster, "NAME"),
            )


def address_faults(cluster: ClusterStatus) -> Iterator[Fault]:
    """Addresses that mean another machine to clients elsewhere."""
    if all(_is_loopback(server.address.host) for server in cluster.name_servers):
        # The whole cluster is on this machine.
        return
    for broker in cluster.brokers:
        if _is_loopback(broker.node.address.host):
            yield _bad(
                Check.ADDRESSES,
                "address of loopback",
                str(broker.node),
                f"broker {broker.node} tells clients to connect to {broker.node.address}, and "
                "clients on other machines would connect to themselves",
                "start it with the address that they reach (--advertise, brokerIP1 at Apache's)",
                _start(cluster, broker.node.broker, broker.node.address.port, advertise=True),
            )


def disk_faults(cluster: ClusterStatus) -> Iterator[Fault]:
    """Disks that are nearly full."""
    for broker in cluster.brokers:
        used = None if broker.runtime is None else broker.runtime.disk_used
        if used is not None and used >= DISK_WARNING:
            yield _bad(
                Check.DISKS,
                "disk nearly full",
                str(broker.node),
                f"the disk of broker {broker.node} is {share(used)} full, and messages are refused "
                "when it is full",
                "add space, or shorten the retention (in seconds): stop it, and start it again as "
                "it was started, with its own folder and other flags",
                _start(
                    cluster,
                    broker.node.broker,
                    broker.node.address.port,
                    setting=f"broker.store.retention.keep={24 * 3600}",
                ),
            )


def health_faults(
    cluster: ClusterStatus, unreachable: Iterable[Unreachable] = ()
) -> Iterator[Fault]:
    """What brokers report besides disks and groups, and brokers that do not answer."""
    remedy = "look into its log around this time, and whether its machine is reachable"
    command = words.command(Action.SHOW_CLUSTER)
    down = {str(broker.node) for broker in cluster.brokers if not broker.is_up}
    for broker in cluster.brokers:
        for warning in _own_warnings(broker):
            text = f"broker {broker.node}: {warning}"
            yield _bad(Check.HEALTH, "unwell", str(broker.node), text, remedy, command)
    for missing in unreachable:
        if missing.server not in down:
            text = f"topics and groups of {missing.server} are missing here: {missing.reason}"
            yield _bad(Check.HEALTH, "not answered", missing.server, text, remedy, command)


def _own_warnings(broker: BrokerStatus) -> Iterator[str]:
    if broker.runtime is None:
        if broker.is_up:
            yield from broker.warnings
        return
    known = {*broker.runtime.findings, broker.runtime.name_conflicts}
    for warning in broker.runtime.warnings:
        # Groups, names and disks have checks of their own.
        if warning not in known and not warning.startswith("the disk is"):
            yield warning


def capacity_faults(cluster: ClusterStatus) -> Iterator[Fault]:
    """Brokers that are near the limit on topics or groups that they create automatically."""
    for broker in cluster.brokers:
        for each in () if broker.runtime is None else broker.runtime.ceilings:
            if each.share < NEARLY_FULL:
                continue
            one = each.what.removesuffix("s")
            is_full = each.count >= each.most
            users = "producers" if one == "topic" else "consumers"
            yield Fault(
                check=Check.ROOM,
                kind=f"no room for {each.what}" if is_full else f"little room for {each.what}",
                weight=Severity.BAD if is_full else Severity.WARN,
                subject=str(broker.node),
                link=_BROKERS_PAGE,
                text=f"broker {broker.node} has {each.count:,} {each.what}, and from "
                f"{each.most:,} on it makes no more for {users} that name a new one "
                f"({each.setting})",
                remedy=f"delete those that are not needed (orbitmq {one} delete), make new ones by "
                f"hand (orbitmq {one} create), or raise the setting: stop the broker, and start it "
                "again as it was started, with its own folder and other flags",
                command=_start(
                    cluster,
                    broker.node.broker,
                    broker.node.address.port,
                    setting=f"{each.setting}={2 * each.most}",
                ),
            )


def topic_faults(topics: Iterable[Topic]) -> Iterator[Fault]:
    """Topics whose messages would not be consumed."""
    for topic in topics:
        for each in topic.brokers:
            if each.write_queues > each.read_queues and each.permission & Permission.WRITE:
                yield Fault(
                    check=Check.TOPICS,
                    kind="hidden queues",
                    weight=Severity.BAD,
                    subject=topic.name,
                    link=page_of("topics", topic.name),
                    text=f"topic {topic.name} on {each.broker} is written to {each.write_queues} "
                    f"queues and read from {each.read_queues}, so that messages in the others "
                    "are never read",
                    remedy="let all queues be read that are written to",
                    command=words.command(
                        Action.UPDATE_TOPIC, topic.name, read_queues=each.write_queues
                    ),
                )


def clock_faults(skews: Mapping[str, str]) -> Iterator[Fault]:
    """Brokers whose clock is wrong; `skews` says by how much, compared with which clock."""
    for broker, text in sorted(skews.items()):
        yield _bad(
            Check.CLOCKS,
            "clock is wrong",
            broker,
            text,
            "keep the clocks of all machines in step (NTP): delays, retention and lag in seconds "
            "depend on them; on the machine of the broker",
            "timedatectl set-ntp true",
        )


def _bad(check: Check, kind: str, subject: str, text: str, remedy: str, command: str) -> Fault:
    return Fault(
        check=check,
        kind=kind,
        weight=Severity.BAD,
        subject=subject,
        link=_BROKERS_PAGE,
        text=text,
        remedy=remedy,
        command=command,
    )


def _start(
    cluster: ClusterStatus,
    broker: str | None = None,
    port: int | None = None,
    *,
    advertise: bool = False,
    setting: str | None = None,
) -> str:
    return words.command(
        Action.START_BROKER,
        name=broker,
        # The data folder of a broker is known only where it was started.
        data=None if broker is None else "FOLDER",
        port=port,
        name_server=[str(server.address) for server in cluster.name_servers],
        advertise="HOST" if advertise else None,
        set=setting,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def group_faults(
    groups: Iterable[GroupSample],
    findings: Mapping[str, MemberFindings],
    warnings: Mapping[str, str | None],
) -> Iterator[Fault]:
    """Faults of groups: by the reports of members, by lag and settings, and by brokers' warnings.

    `warnings` maps what brokers say about their groups to the name of the group, if it is known.
    """
    said: set[str] = set()
    for group in groups:
        within = findings.get(group.name, _NO_FINDINGS)
        found = {
            (each.kind, each.topic, each.client_id, each.queue): each
            for each in (*within.findings, *group.findings)
        }
        said.update(each.text for each in found.values())
        ruled = list(_by_rules(group))
        if any(fault.kind == Pace.STALLED for fault in ruled):
            # That is said of all queues together.
            found = {key: each for key, each in found.items() if key[0] not in _STALLED}
        judged = [*map(findings_fault, _by_kind(found.values()))]
        if within.endless is not None:
            judged.append(_endless(group.name, within.endless))
        if within.uneven:
            judged.append(_unbalanced(group.name, within.uneven))
        yield from (replace(fault, impact=float(group.lag)) for fault in judged)
        yield from ruled
    for text, name in sorted(warnings.items()):
        if text not in said:
            yield _disagreement(text, name)


def _group_warnings(snapshot: Snapshot, only: frozenset[str]) -> dict[str, str | None]:
    """What brokers say about their groups, with the name of the group if it is known."""
    texts: dict[str, str | None] = {}
    for each in snapshot.cluster.brokers:
        for text in () if each.runtime is None else each.runtime.findings:
            match = re.search(r"group '([^']+)'", text)
            group = match[1] if match and match[1] in snapshot.groups else None
            if not only or group in only:
                texts[text] = group
    return texts


@dataclass(frozen=True, slots=True)
class _FindingRule:
    check: Check
    remedy: str
    command: Callable[[Finding], str]


#: What to do about a finding among the members of a group, and with which command.
_FINDING_RULES: Mapping[FindingKind, _FindingRule] = {
    FindingKind.DIFFERENT_SUBSCRIPTIONS: _FindingRule(
        Check.SUBSCRIPTIONS,
        "let all members subscribe alike, or give those that differ a group of their own",
        lambda finding: words.command(Action.CLONE_GROUP, finding.group, f"{finding.group}-2"),
    ),
    FindingKind.DUPLICATE_CLIENT: _FindingRule(
        Check.CLIENT_IDS,
        "give each process an instance name of its own (ClientSettings.instance), or none at all",
        lambda finding: words.command(Action.SHOW_GROUP, finding.group),
    ),
    FindingKind.UNOWNED_QUEUE: _FindingRule(
        Check.STUCK_QUEUES,
        "check that all members subscribe to the topic and use one allocation strategy",
        lambda finding: words.command(Action.SHOW_GROUP, finding.group),
    ),
    FindingKind.STALLED_QUEUE: _FindingRule(
        Check.STUCK_QUEUES,
        "see where its handler hangs",
        lambda finding: words.command(
            Action.SHOW_MEMBER, finding.group, finding.client_id, stack=True
        ),
    ),
}


_STALLED = (FindingKind.STALLED_QUEUE,)


def _by_kind(findings: Iterable[Finding]) -> Iterable[list[Finding]]:
    """Findings about queues by kind: six queues without an owner are one event."""
    piles: dict[object, list[Finding]] = {}
    for each in findings:
        piles.setdefault(each.kind if each.queue else each, []).append(each)
    return piles.values()


def findings_fault(alike: list[Finding]) -> Fault:
    """Findings of one kind in a group as one fault."""
    fault, more = finding_fault(alike[0]), len(alike) - 1
    if not more:
        return fault
    return replace(fault, text=f"{fault.text}, and likewise in {several(more, 'more queue')}")


def finding_fault(finding: Finding) -> Fault:
    """The fault that a finding among the members of a group is."""
    mistake = _FINDING_RULES[finding.kind]
    return Fault(
        check=mistake.check,
        kind=finding.kind.value,
        weight=Severity.BAD,
        subject=finding.group,
        link=page_of("groups", finding.group),
        text=finding.text.rpartition("; ")[0] or finding.text,
        remedy=mistake.remedy,
        command=mistake.command(finding),
    )


def _disagreement(text: str, group: str | None) -> Fault:
    return Fault(
        check=Check.SUBSCRIPTIONS,
        kind="members disagree",
        weight=Severity.BAD,
        subject=group or "a group",
        link=page_of("groups", group) if group else "/groups",
        text=text,
        remedy="start all members of the group with the same subscriptions and an id each",
        command=words.command(Action.SHOW_GROUP, group)
        if group
        else words.command(Action.LIST_GROUPS),
    )


def _endless(group: str, client_id: str) -> Fault:
    return Fault(
        check=Check.ENDLESS_RETRIES,
        kind="endless retries",
        weight=Severity.WARN,
        subject=group,
        link=page_of("groups", group),
        text=f"{client_id} of group {group!r} consumes in order and retries without a limit: one "
        "message that cannot be processed stops its queue",
        remedy="limit its retries: max_retries=16 in Python, setMaxReconsumeTimes in Java",
        command=words.command(Action.SHOW_MEMBER, group),
    )


def _unbalanced(group: str, uneven: Sequence[Uneven]) -> Fault:
    first, more = uneven[0], len(uneven) - 1
    likewise = f", and likewise {several(more, 'more topic')}" if more else ""
    return Fault(
        check=Check.UNBALANCED,
        kind="unbalanced",
        weight=Severity.WARN,
        subject=group,
        link=page_of("consumers", group),
        text=f"the members of group {group!r} do not share topic {first.topic!r} evenly: "
        f"{first.text}{likewise}",
        remedy="start all members with one allocation strategy and the same name servers; if they "
        "have those, restart the member that has too many: the others take over within 20 s",
        command=words.command(Action.SHOW_GROUP, group),
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """A kind of fault of a group."""

    check: Check
    kind: str
    weight: Severity
    applies: Callable[[GroupSample], bool]
    text: Callable[[GroupSample], str]
    remedy: str
    command: Callable[[GroupSample], str]
    place: str = "groups"
    otherwise: str | None = None
    otherwise_command: Callable[[GroupSample], str] | None = None
    #: Messages that it concerns.
    impact: Callable[[GroupSample], int] = lambda group: group.lag


def _waits(group: GroupSample) -> str:
    """`1,200 messages wait, the oldest for 3 min`"""
    age = group.lag_seconds
    since = f", the oldest for {duration(age)}" if age else ""
    return several(group.lag, "message waits", "messages wait") + since


def _age(group: GroupSample) -> float:
    return group.lag_seconds or 0.0


def _topic_of(group: GroupSample) -> str:
    """The topic in which most messages wait for a group."""
    parts = [part for part in group.parts if not is_retry_topic(part.topic)]
    return max(parts, key=lambda part: part.lag, default=TopicPart("TOPIC", 0, 0)).topic


def dead_letters(group: GroupSample) -> str:
    """`5 dead letters are open, 4 were resent`; `at most` while some were not looked up."""
    resent = group.resent
    most, least = ("at most ", "at least ") if group.unknown_letters else ("", "")
    said = f"{most}{several(group.open_letters, 'dead letter is', 'dead letters are')} open"
    if not resent.count:
        return said
    return f"{said}, {least}{several(resent.count, 'was', 'were')} resent"


def _died(group: GroupSample) -> str:
    """`2 messages died in the last hour and were not resent`, as far as that is known."""
    waiting, unknown = group.open_last_hour, group.unknown_last_hour
    if waiting == unknown:
        were = "it was" if unknown == 1 else "they were"
        died = several(unknown, "message")
        return f"{died} died in the last hour, and it is not known whether {were} resent"
    most = "at most " if unknown else ""
    was = "was" if waiting == 1 else "were"
    return (
        f"{most}{several(waiting, 'message')} died in the last hour and {was} not resent; "
        f"{dead_letters(group)}"
    )


_RULES: tuple[_Rule, ...] = (
    _Rule(
        Check.STUCK_QUEUES,
        "stalled",
        Severity.BAD,
        lambda group: group.pace is Pace.STALLED and bool(group.members),
        lambda group: (
            f"{_waits(group)}, and none was finished for {duration(group.still)} although "
            f"{several(group.members or 0, 'member is', 'members are')} online"
        ),
        "look at what its members do: a handler that hangs, or an orderly queue that tries one "
        "message over and over, shows in their stack",
        lambda group: (
            words.command(Action.SHOW_MEMBER, group.name, stack=True)
            # Of several members, one has to be chosen first.
            if group.members == 1
            else words.command(Action.SHOW_GROUP, group.name)
        ),
    ),
    _Rule(
        Check.UNATTENDED,
        "nobody consumes",
        Severity.WARN,
        lambda group: group.pace is Pace.SILENT and _age(group) >= SILENT_AFTER,
        lambda group: f"{_waits(group)}, and no member is online",
        'start its consumers: the application that has them, or in Python Consumer("GROUP") with '
        "a handler for TOPIC and run()",
        lambda group: words.command(Action.SHOW_GROUP, group.name),
        otherwise="only if these messages are not needed, skip them (a Spark stream goes on from "
        "its checkpoint all the same)",
        otherwise_command=lambda group: words.command(
            Action.SKIP_BACKLOG, group.name, dry_run=True
        ),
    ),
    _Rule(
        Check.UNATTENDED,
        "paused",
        Severity.WARN,
        lambda group: group.pace is Pace.PAUSED,
        lambda group: f"it is paused, and {_waits(group)}",
        "let it go on when the reason for the pause is gone",
        lambda group: words.command(Action.RESUME_GROUP, group.name),
    ),
    _Rule(
        Check.FALLING_BEHIND,
        "falling behind",
        Severity.WARN,
        lambda group: group.pace is Pace.GROWING and _age(group) >= BEHIND_AFTER,
        lambda group: (
            f"{_waits(group)}; {group.in_rate:,.0f} come in each second and {group.out_rate:,.0f} "
            "are finished"
        ),
        "start more consumers, as far as there are queues, or make the handler faster",
        lambda group: words.command(Action.SHOW_GROUP, group.name),
    ),
    _Rule(
        Check.DEAD_LETTERS,
        "dead letters",
        Severity.WARN,
        # A dead letter that is not known to be resent counts as one that waits.
        lambda group: group.open_last_hour > 0,
        _died,
        "see why they died, mend that, and send some of them again",
        lambda group: words.command(Action.COUNT_DEAD_LETTERS, group.name),
        "dead-letters",
        impact=lambda group: group.open_last_hour,
    ),
    _Rule(
        Check.GROUP_SETTINGS,
        "settings differ",
        Severity.WARN,
        lambda group: not group.is_uniform,
        lambda group: f"{', '.join(group.brokers)} have different settings for it",
        "set it again, on all brokers alike",
        lambda group: words.command(
            Action.UPDATE_GROUP, group.name, max_retries=group.settings.max_retries
        ),
    ),
)


def _by_rules(group: GroupSample) -> Iterator[Fault]:
    for rule in _RULES:
        if rule.applies(group):
            yield Fault(
                check=rule.check,
                kind=rule.kind,
                weight=rule.weight,
                subject=group.name,
                link=page_of(rule.place, group.name),
                text=rule.text(group),
                remedy=rule.remedy.replace("GROUP", group.name).replace("TOPIC", _topic_of(group)),
                command=rule.command(group),
                otherwise=rule.otherwise,
                otherwise_command=rule.otherwise_command and rule.otherwise_command(group),
                impact=float(rule.impact(group)),
            )


def pipeline_faults(pipelines: Iterable[Pipeline], now: float) -> Iterator[Fault]:
    """Pipelines that failed, that are failing, or that no longer report."""
    for each in pipelines:
        rule = _PIPELINE_RULES.get(each.state_at(now))
        if rule is not None:
            yield Fault(
                check=Check.PIPELINES,
                kind=f"pipeline {each.state_at(now)}",
                weight=Severity.BAD,
                subject=each.name,
                link=page_of("pipelines", each.name),
                text=rule.text(each, now),
                remedy=rule.remedy,
                command=rule.command(each),
                impact=float(each.total_lag),
            )


@dataclass(frozen=True, slots=True)
class _PipelineRule:
    text: Callable[[Pipeline, float], str]
    remedy: str
    command: Callable[[Pipeline], str]


def _failing(pipeline: Pipeline, _: float) -> str:
    report = pipeline.report
    counts = [
        f"{number:,} {what}"
        for number, what in ((report.retried, "retried"), (report.dead, "dead"))
        if number
    ]
    much = "much" if report.failed_share is None else share(report.failed_share)
    since = f" ({', '.join(counts)} since it was started)" if counts else ""
    return f"{much} of what it handled lately failed{since}: {_error(pipeline)}"


def _error(pipeline: Pipeline) -> str:
    return pipeline.report.error or "no reason was reported"


def _look_into(pipeline: Pipeline) -> str:
    """Why messages failed is with the dead letters, once there are some."""
    group = pipeline.report.group
    if group is not None and pipeline.report.dead:
        return words.command(Action.COUNT_DEAD_LETTERS, group)
    return words.command(Action.SHOW_PIPELINE, pipeline.name, console="URL")


def _run_again(_: Pipeline) -> str:
    return words.command(Action.RUN_PIPELINE, "FILE")


_PIPELINE_RULES: Mapping[PipelineState, _PipelineRule] = {
    PipelineState.FAILED: _PipelineRule(
        lambda pipeline, _: f"it failed: {_error(pipeline)}",
        "look at the driver's log; after a restart it goes on from its checkpoint",
        _run_again,
    ),
    PipelineState.FAILING: _PipelineRule(
        _failing,
        "mend its handler or what that needs, and start it again; dead letters can be resent then",
        _look_into,
    ),
    PipelineState.LOST: _PipelineRule(
        lambda pipeline, now: (
            f"it has not been heard of for {duration(now - pipeline.reported_at)}; its driver may "
            "be gone"
        ),
        "look at the driver's log; after a restart it goes on from its checkpoint",
        _run_again,
    ),
}


@dataclass(frozen=True, slots=True)
class Examination:
    """An observation, and how thorough it was."""

    seen: Observation
    #: Queues whose latest message was looked at.
    queues: int
    #: Topics whose latest message could not be read, and why.
    left_out: Mapping[str, str] = field(hash=False)
    #: Groups that seemed to stand still, and for how many seconds they were watched.
    watched: frozenset[str]
    seconds: float
    #: Groups whose queues seemed to be shared unevenly.
    uneven: frozenset[str] = frozenset()


async def examine(
    engine: Engine,
    admin: AsyncAdmin,
    clock: Clock,
    *,
    watch: float,
    only: Collection[str] = (),
) -> Examination:
    """Look at everything, of dead letters at those of the last hour.

    Groups that seem to stand still are watched for `watch` seconds. None is called stalled in less
    than `PATIENCE`, falling behind in less than `history.WINDOW`, or unbalanced in less than
    `UNEVEN_AFTER`. `only` names the groups to look at, by default all. Raises `GroupNotFound` for
    one that no broker knows, and `OrbitError` when no name server answers.
    """
    collector = Collector(admin, BrokerTables(engine), clock, patience=PATIENCE, is_thorough=True)
    snapshot = _chosen(await collector.look(), only)
    _check_known(snapshot, only)
    clients = {
        group: found for group, found in collector.clients.items() if group in snapshot.groups
    }
    behind = [name for name, group in snapshot.groups.items() if group.lag]
    members = MemberPoller(admin, clock, is_thorough=True)
    began = clock.monotonic()
    await members.poll(clients, behind)
    skews = await compare_clocks(admin, _sampled(snapshot), clock)
    still = frozenset(name for name, group in snapshot.groups.items() if _seems_still(group))
    uneven = frozenset(members.uneven)
    if uneven and watch >= collect.UNEVEN_AFTER:
        # Unevenness counts from the first poll.
        for _ in range(UNEVEN_POLLS):
            await asyncio.sleep(watch / UNEVEN_POLLS)
            await members.poll(clients, behind, uneven)
    elif still:
        await asyncio.sleep(max(0.0, watch - (clock.monotonic() - began)))
    if still:
        snapshot = _chosen(await collector.look(resent=False), only)
    seen = Observation(
        snapshot=_patient(snapshot, members.times),
        now=clock.now(),
        findings=members.findings,
        skews=skews.found,
        only=frozenset(only),
    )
    seconds = clock.monotonic() - began
    return Examination(seen, skews.looked, skews.left_out, still, seconds, uneven)


def _check_known(snapshot: Snapshot, only: Collection[str]) -> None:
    if snapshot.unreachable:
        # A broker that does not answer may know the group.
        return
    for name in sorted(set(only) - snapshot.groups.keys()):
        raise GroupNotFound(name)


def _seems_still(group: GroupSample) -> bool:
    return bool(group.members) and group.lag > 0 and (group.lag_seconds or 0.0) >= STALLED_AFTER


def _patient(snapshot: Snapshot, times: Mapping[str, HandlerTimes]) -> Snapshot:
    """Judge groups whose members finished something lately as a console does: they are slow."""
    groups = {
        name: replace(group, patience=STALLED_AFTER)
        if name in times and times[name].ok_rate > 0
        else group
        for name, group in snapshot.groups.items()
    }
    return replace(snapshot, groups=groups)


def _chosen(snapshot: Snapshot, only: Collection[str]) -> Snapshot:
    if not only:
        return snapshot
    groups = {name: group for name, group in snapshot.groups.items() if name in only}
    return replace(snapshot, groups=groups)


def _sampled(snapshot: Snapshot) -> list[str]:
    topics = (each.topic for each in snapshot.topics.values())
    return [each.name for each in topics if each.kind is not TopicKind.SYSTEM][:_SAMPLED]


@dataclass(frozen=True, slots=True)
class ClockSkews:
    """What messages show about clocks."""

    #: What is wrong, by broker.
    found: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Queues whose latest message was looked at.
    looked: int = 0
    #: Topics that could not be read, and why.
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)


async def compare_clocks(
    admin: AsyncAdmin, topics: Iterable[str], clock: Clock, *, enough: int | None = None
) -> ClockSkews:
    """Compare brokers' clocks with this machine's and with producers', by the latest messages.

    A message cannot have been stored in the future, nor before it was sent. `enough` topics are
    read, by default all; those that cannot be read are left out.
    """
    found: dict[str, str] = {}
    left_out: dict[str, str] = {}
    looked = read = 0
    for topic in topics:
        if read == enough:
            break
        try:
            for broker, queue in (await _latest(admin, topic)).items():
                problem = await _skew(admin, queue.queue, queue.max_offset - 1, clock)
                looked += 1
                if problem is not None:
                    found.setdefault(broker, problem)
        except OrbitError as error:
            left_out[topic] = str(error)
        else:
            read += 1
    return ClockSkews(found, looked, left_out)


async def _latest(admin: AsyncAdmin, topic: str) -> dict[str, QueueStatus]:
    """The queue of each broker that was written last: all queues of a broker have one clock."""
    status = await admin.topics.status(topic)
    written = sorted(status.queues, key=lambda each: each.last_stored_at or 0.0)
    return {queue.queue.broker: queue for queue in written if queue.messages}


async def _skew(admin: AsyncAdmin, queue: Queue, offset: int, clock: Clock) -> str | None:
    page = await admin.messages.page(queue.topic, queues=(queue,), size=1, newest_first=True)
    for message in page.messages:
        # The time is read afterwards: a message stored meanwhile is not from the future.
        ahead = message.stored_at - clock.now()
        if ahead > TOLERANCE:
            return (
                f"the clock of broker {queue.broker} is {duration(ahead)} ahead of this machine's"
            )
        behind = message.born_at - message.stored_at
        if behind > TOLERANCE:
            return (
                f"the clock of broker {queue.broker} is {duration(behind)} behind that of a "
                f"producer of {queue.topic} (offset {offset})"
            )
    return None


class ClockWatch:
    """Compares clocks from time to time."""

    def __init__(self, admin: AsyncAdmin, clock: Clock) -> None:
        self._admin = admin
        self._clock = clock
        self.skews = ClockSkews()

    async def look(self, topics: Sequence[str]) -> None:
        """One comparison, by some of these topics; those that cannot be read are logged once."""
        before = self.skews.left_out.keys()
        some = topics[:_CLOCK_TOPICS_TRIED]
        self.skews = await compare_clocks(self._admin, some, self._clock, enough=_CLOCK_TOPICS)
        for topic in self.skews.left_out.keys() - before:
            reason = self.skews.left_out[topic]
            log.warning("clocks are compared without topic %s: %s", topic, reason)
