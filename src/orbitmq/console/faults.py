"""What is wrong, in words, with the command that looks into it or mends it.

The rules are one table: a kind of fault, how bad it is, and what to do. Faults of one kind are
gathered, because forty groups without consumers are one thing that happened and not forty.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orbitmq.client.admin.membervalues import Finding, FindingKind
from orbitmq.console import commandlines
from orbitmq.console.pipelines import Pipeline, PipelineState
from orbitmq.console.samples import GroupSample, Pace, Snapshot
from orbitmq.console.words import count, duration

#: Seconds that messages may wait before a group without members is worth a word.
SILENT_AFTER = 60.0
#: And before one that is falling behind is.
BEHIND_AFTER = 120.0


class Weight(enum.StrEnum):
    """How soon it needs a hand."""

    BAD = "bad"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    kind: str
    weight: Weight
    #: What it is about, and where the page shows it.
    subject: str
    link: str
    text: str
    #: What to do about it.
    remedy: str
    command: str | None = None


_NONE: Mapping[str, str] = MappingProxyType({})

#: What to do about what is found among the members of a group, and with which command.
_REMEDIES: Mapping[FindingKind, tuple[str, Callable[[Finding], str]]] = {
    FindingKind.DIFFERENT_SUBSCRIPTIONS: (
        "let all members subscribe alike, or give those that differ a group of their own",
        lambda finding: commandlines.clone_group(finding.group, f"{finding.group}-2", None),
    ),
    FindingKind.DUPLICATE_CLIENT: (
        "give each process an instance name of its own, or none at all",
        lambda finding: commandlines.show_group(finding.group),
    ),
    FindingKind.UNOWNED_QUEUE: (
        "check that all members subscribe to the topic and use one allocation strategy",
        lambda finding: commandlines.show_group(finding.group),
    ),
    FindingKind.STALLED_QUEUE: (
        "see where its handler hangs",
        lambda finding: commandlines.show_member(finding.group, finding.client_id, stack=True),
    ),
}


def explained(finding: Finding) -> dict[str, object]:
    """What is wrong among the members of a group, with what to do about it."""
    remedy, command = _REMEDIES[finding.kind]
    return {
        "kind": finding.kind,
        "text": finding.text.rpartition("; ")[0] or finding.text,
        "variants": finding.variants,
        "remedy": remedy,
        "command": command(finding),
    }


def find_faults(
    snapshot: Snapshot,
    pipelines: Iterable[Pipeline],
    now: float,
    endless: Mapping[str, str] = _NONE,
) -> tuple[Fault, ...]:
    """Everything that is wrong, the worst first.

    `endless` has the groups whose consumers retry for ever, and how that is said.
    """
    found = [
        *_of_servers(snapshot),
        *_of_findings(snapshot),
        *_of_endless(endless),
        *(fault for group in snapshot.groups.values() for fault in _of_group(group)),
        *_of_pipelines(pipelines, now),
    ]
    return tuple(sorted(found, key=lambda fault: (fault.weight, fault.kind)))


def _of_servers(snapshot: Snapshot) -> Iterator[Fault]:
    told = {
        finding
        for each in snapshot.cluster.brokers
        if each.runtime is not None
        for finding in each.runtime.findings
    }
    for warning in snapshot.cluster.warnings:
        subject, _, text = warning.partition(": ")
        if text in told:
            continue
        yield Fault(
            kind="server",
            weight=Weight.BAD,
            subject=subject,
            link="/brokers",
            text=text,
            remedy="look at its log, and whether its machine is reachable",
            command=commandlines.command("doctor"),
        )
    for missing in snapshot.unreachable:
        yield Fault(
            kind="server",
            weight=Weight.BAD,
            subject=missing.server,
            link="/brokers",
            text=f"its topics and groups are missing here: {missing.reason}",
            remedy="look at its log, and whether its machine is reachable",
            command=commandlines.command("doctor"),
        )


def _of_findings(snapshot: Snapshot) -> Iterator[Fault]:
    """What comparing the members of groups brought up, here or at the brokers."""
    texts: dict[str, str | None] = {}
    for each in snapshot.cluster.brokers:
        for text in () if each.runtime is None else each.runtime.findings:
            match = re.search(r"group '([^']+)'", text)
            texts[text] = match[1] if match and match[1] in snapshot.groups else None
    for sample in snapshot.groups.values():
        texts |= dict.fromkeys(sample.findings, sample.name)
    for text, group in sorted(texts.items()):
        yield Fault(
            kind="members disagree",
            weight=Weight.BAD,
            subject=group or "a group",
            link=f"/groups/{group}" if group else "/groups",
            text=text,
            remedy="start all members of the group with the same subscriptions and an id each",
            command=commandlines.show_group(group) if group else commandlines.command("doctor"),
        )


def _of_endless(groups: Mapping[str, str]) -> Iterator[Fault]:
    for group, text in sorted(groups.items()):
        yield Fault(
            kind="endless retries",
            weight=Weight.WARN,
            subject=group,
            link=f"/groups/{group}",
            text=text,
            remedy="limit its retries: max_retries=16 in Python, setMaxReconsumeTimes in Java",
            command=commandlines.show_member(group, None),
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    """A kind of fault of a group."""

    kind: str
    weight: Weight
    applies: Callable[[GroupSample], bool]
    text: Callable[[GroupSample], str]
    remedy: str
    command: Callable[[GroupSample], str]
    tab: str = ""


def _waits(group: GroupSample) -> str:
    """`1,200 messages wait, the oldest for 3 min`"""
    verb = "waits" if group.lag == 1 else "wait"
    age = group.lag_seconds
    since = f", the oldest for {duration(age)}" if age else ""
    return f"{count(group.lag, 'message')} {verb}{since}"


def _age(group: GroupSample) -> float:
    return group.lag_seconds or 0.0


_RULES: tuple[_Rule, ...] = (
    _Rule(
        "stalled",
        Weight.BAD,
        lambda group: group.pace is Pace.STALLED and bool(group.members),
        lambda group: (
            f"{_waits(group)}, and none was finished for {duration(group.still)} although "
            f"{count(group.members or 0, 'consumer')} {'is' if group.members == 1 else 'are'} "
            "online"
        ),
        "look at what its consumers do: a handler that hangs, or an orderly queue that tries one "
        "message over and over, shows in their stack",
        lambda group: (
            commandlines.show_member(group.name, None, stack=True)
            # With several, somebody has to say whose.
            if group.members == 1
            else commandlines.show_group(group.name)
        ),
    ),
    _Rule(
        "nobody consumes",
        Weight.WARN,
        lambda group: group.pace is Pace.SILENT and _age(group) >= SILENT_AFTER,
        lambda group: f"{_waits(group)}, and no consumer is online",
        "start its consumers; or skip what waits, if nobody needs it",
        lambda group: commandlines.skip_backlog(group.name, None) + " --dry-run",
    ),
    _Rule(
        "falling behind",
        Weight.WARN,
        lambda group: group.pace is Pace.GROWING and _age(group) >= BEHIND_AFTER,
        lambda group: (
            f"{_waits(group)}; {group.in_rate:,.0f} come in each second and {group.out_rate:,.0f} "
            "are finished"
        ),
        "start more consumers, as far as there are queues, or make the handler faster",
        lambda group: commandlines.show_group(group.name),
    ),
    _Rule(
        "paused",
        Weight.WARN,
        lambda group: group.pace is Pace.PAUSED and group.lag > 0,
        lambda group: f"it is paused, and {_waits(group)}",
        "let it go on when the reason for the pause is gone",
        lambda group: commandlines.pause_group(group.name, resume=True),
    ),
    _Rule(
        "dead letters",
        Weight.WARN,
        lambda group: group.dead_last_hour > 0,
        lambda group: (
            f"{count(group.dead_last_hour, 'message')} died in the last hour, "
            f"{group.dead_letters:,} in all"
        ),
        "see why they died, mend that, and send some of them again",
        lambda group: commandlines.list_dead_letters(group.name),
        "/dead-letters/",
    ),
    _Rule(
        "settings differ",
        Weight.WARN,
        lambda group: not group.is_uniform,
        lambda group: f"{', '.join(group.brokers)} have different settings for it",
        "set it again, on all brokers alike",
        lambda group: commandlines.command(
            "group", "update", group.name, max_retries=group.settings.max_retries
        ),
    ),
)


def _of_group(group: GroupSample) -> Iterator[Fault]:
    for rule in _RULES:
        if rule.applies(group):
            yield Fault(
                kind=rule.kind,
                weight=rule.weight,
                subject=group.name,
                link=(rule.tab or "/groups/") + group.name,
                text=rule.text(group),
                remedy=rule.remedy,
                command=rule.command(group),
            )


def _of_pipelines(pipelines: Iterable[Pipeline], now: float) -> Iterator[Fault]:
    for each in pipelines:
        state = each.state_at(now)
        if state not in (PipelineState.FAILED, PipelineState.LOST):
            continue
        silent = duration(now - each.reported_at)
        yield Fault(
            kind="pipeline",
            weight=Weight.BAD,
            subject=each.name,
            link=f"/pipelines/{each.name}",
            text=(
                f"it failed: {each.report.error or 'no reason was reported'}"
                if state is PipelineState.FAILED
                else f"it has not been heard of for {silent}; its driver may be gone"
            ),
            remedy="look at the driver's log; after a restart it goes on from its checkpoint",
            command=commandlines.command("pipeline", "run", "FILE"),
        )


def gathered(faults: Iterable[Fault], shown: int = 5) -> list[Mapping[str, object]]:
    """Faults by kind: how many there are, and the first of them."""
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    return [
        {"kind": kind, "weight": some[0].weight, "count": len(some), "faults": some[:shown]}
        for kind, some in kinds.items()
    ]
