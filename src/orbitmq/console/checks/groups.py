"""What can be wrong with consumer groups: by their lag, by their members, by what members say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orbitmq.client.admin.membervalues import Finding, FindingKind
from orbitmq.console import commandlines
from orbitmq.console.checks.balance import Uneven
from orbitmq.console.checks.faults import Check, Fault, Weight, page_of
from orbitmq.console.samples import GroupSample, Pace
from orbitmq.console.words import duration, several

#: Seconds that messages may wait before a group without members is worth a word.
SILENT_AFTER = 60.0
#: And before one that is falling behind is.
BEHIND_AFTER = 120.0


#: The checks that are about a group.
OF_GROUPS = frozenset(
    {
        *(Check.SUBSCRIPTIONS, Check.CLIENT_IDS, Check.STUCK_QUEUES, Check.UNBALANCED),
        *(Check.ENDLESS_RETRIES, Check.UNATTENDED, Check.FALLING_BEHIND),
        *(Check.DEAD_LETTERS, Check.GROUP_SETTINGS),
    }
)


@dataclass(frozen=True, slots=True)
class Inside:
    """What members of a group say, as far as something is wrong with it."""

    findings: tuple[Finding, ...] = ()
    #: A member that works in order and never gives a message up.
    endless: str | None = None
    #: Topics whose queues have not been shared evenly for some time.
    uneven: tuple[Uneven, ...] = ()


_NOTHING = Inside()


def of_groups(
    groups: Iterable[GroupSample], inside: Mapping[str, Inside], told: Mapping[str, str | None]
) -> Iterator[Fault]:
    """Everything that is wrong with groups.

    `told` is what brokers say of their groups, with the name of the group if it is known.
    """
    said: set[str] = set()
    for group in groups:
        within = inside.get(group.name, _NOTHING)
        findings = {
            (each.kind, each.topic, each.client_id, each.queue): each
            for each in (*within.findings, *group.findings)
        }
        said.update(each.text for each in findings.values())
        ruled = list(_by_rules(group))
        if any(fault.kind == Pace.STALLED for fault in ruled):
            # That says it of all queues together.
            findings = {key: each for key, each in findings.items() if key[0] not in _STALLED}
        yield from map(of_findings, _by_kind(findings.values()))
        if within.endless is not None:
            yield _endless(group.name, within.endless)
        if within.uneven:
            yield _unbalanced(group.name, within.uneven)
        yield from ruled
    for text, name in sorted(told.items()):
        if text not in said:
            yield _told(text, name)


# What is found among the members.


@dataclass(frozen=True, slots=True)
class _Mistake:
    check: Check
    remedy: str
    command: Callable[[Finding], str]


#: What to do about what is found among the members of a group, and with which command.
_MISTAKES: Mapping[FindingKind, _Mistake] = {
    FindingKind.DIFFERENT_SUBSCRIPTIONS: _Mistake(
        Check.SUBSCRIPTIONS,
        "let all members subscribe alike, or give those that differ a group of their own",
        lambda finding: commandlines.clone_group(finding.group, f"{finding.group}-2", None),
    ),
    FindingKind.DUPLICATE_CLIENT: _Mistake(
        Check.CLIENT_IDS,
        "give each process an instance name of its own (ClientSettings.instance), or none at all",
        lambda finding: commandlines.show_group(finding.group),
    ),
    FindingKind.UNOWNED_QUEUE: _Mistake(
        Check.STUCK_QUEUES,
        "check that all members subscribe to the topic and use one allocation strategy",
        lambda finding: commandlines.show_group(finding.group),
    ),
    FindingKind.STALLED_QUEUE: _Mistake(
        Check.STUCK_QUEUES,
        "see where its handler hangs",
        lambda finding: commandlines.show_member(finding.group, finding.client_id, stack=True),
    ),
}


_STALLED = (FindingKind.STALLED_QUEUE,)


def _by_kind(findings: Iterable[Finding]) -> Iterable[list[Finding]]:
    """Findings about queues by kind: six that nobody pulls are one thing that happened."""
    piles: dict[object, list[Finding]] = {}
    for each in findings:
        piles.setdefault(each.kind if each.queue else each, []).append(each)
    return piles.values()


def of_findings(alike: list[Finding]) -> Fault:
    """Findings of one kind in a group as one fault."""
    fault, more = of_finding(alike[0]), len(alike) - 1
    if not more:
        return fault
    return replace(fault, text=f"{fault.text}, and likewise in {several(more, 'more queue')}")


def of_finding(finding: Finding) -> Fault:
    """What is wrong among the members of a group, apart from what to do about it."""
    mistake = _MISTAKES[finding.kind]
    return Fault(
        check=mistake.check,
        kind=finding.kind.value,
        weight=Weight.BAD,
        subject=finding.group,
        link=page_of("groups", finding.group),
        text=finding.text.rpartition("; ")[0] or finding.text,
        remedy=mistake.remedy,
        command=mistake.command(finding),
    )


def _told(text: str, group: str | None) -> Fault:
    return Fault(
        check=Check.SUBSCRIPTIONS,
        kind="members disagree",
        weight=Weight.BAD,
        subject=group or "a group",
        link=page_of("groups", group) if group else "/groups",
        text=text,
        remedy="start all members of the group with the same subscriptions and an id each",
        command=commandlines.show_group(group) if group else commandlines.command("group", "list"),
    )


def _endless(group: str, client_id: str) -> Fault:
    return Fault(
        check=Check.ENDLESS_RETRIES,
        kind="endless retries",
        weight=Weight.WARN,
        subject=group,
        link=page_of("groups", group),
        text=f"{client_id} of group {group!r} consumes in order and retries for ever: one message "
        "that cannot be processed stops its queue",
        remedy="limit its retries: max_retries=16 in Python, setMaxReconsumeTimes in Java",
        command=commandlines.show_member(group, None),
    )


def _unbalanced(group: str, uneven: Sequence[Uneven]) -> Fault:
    first, more = uneven[0], len(uneven) - 1
    likewise = f", and likewise {several(more, 'more topic')}" if more else ""
    return Fault(
        check=Check.UNBALANCED,
        kind="unbalanced",
        weight=Weight.WARN,
        subject=group,
        link=page_of("consumers", group),
        text=f"the members of group {group!r} do not share topic {first.topic!r} evenly: "
        f"{first.text}{likewise}",
        remedy="start all members with one allocation strategy and the same name servers; if they "
        "have those, restart the member that has too many: the others take over within 20 s",
        command=commandlines.show_group(group),
    )


# What lag and settings say.


@dataclass(frozen=True, slots=True)
class _Rule:
    """A kind of fault of a group."""

    check: Check
    kind: str
    weight: Weight
    applies: Callable[[GroupSample], bool]
    text: Callable[[GroupSample], str]
    remedy: str
    command: Callable[[GroupSample], str]
    place: str = "groups"


def _waits(group: GroupSample) -> str:
    """`1,200 messages wait, the oldest for 3 min`"""
    age = group.lag_seconds
    since = f", the oldest for {duration(age)}" if age else ""
    return several(group.lag, "message waits", "messages wait") + since


def _age(group: GroupSample) -> float:
    return group.lag_seconds or 0.0


def dead_letters(group: GroupSample) -> str:
    """`5 dead letters are open, 4 were resent`; at least so many while some had no turn yet."""
    resent = group.resent
    least = "at least " if group.unknown_letters else ""
    said = f"{least}{several(group.open_letters, 'dead letter is', 'dead letters are')} open"
    if not resent.count:
        return said
    return f"{said}, {least}{several(resent.count, 'was', 'were')} resent"


def _died(group: GroupSample) -> str:
    """`2 messages died in the last hour and wait for somebody`, as far as that is known."""
    waiting, unknown = group.open_last_hour, group.unknown_last_hour
    if not waiting:
        were = "it was" if unknown == 1 else "they were"
        died = several(unknown, "message")
        return f"{died} died in the last hour, and it is not known whether {were} resent"
    least = "at least " if unknown else ""
    wait = "waits" if waiting == 1 else "wait"
    return (
        f"{least}{several(waiting, 'message')} died in the last hour and {wait} for somebody; "
        f"{dead_letters(group)}"
    )


_RULES: tuple[_Rule, ...] = (
    _Rule(
        Check.STUCK_QUEUES,
        "stalled",
        Weight.BAD,
        lambda group: group.pace is Pace.STALLED and bool(group.members),
        lambda group: (
            f"{_waits(group)}, and none was finished for {duration(group.still)} although "
            f"{several(group.members or 0, 'member is', 'members are')} online"
        ),
        "look at what its members do: a handler that hangs, or an orderly queue that tries one "
        "message over and over, shows in their stack",
        lambda group: (
            commandlines.show_member(group.name, None, stack=True)
            # With several, somebody has to say whose.
            if group.members == 1
            else commandlines.show_group(group.name)
        ),
    ),
    _Rule(
        Check.UNATTENDED,
        "nobody consumes",
        Weight.WARN,
        lambda group: group.pace is Pace.SILENT and _age(group) >= SILENT_AFTER,
        lambda group: f"{_waits(group)}, and no member is online",
        # Who reports for a group is not known once he is away.
        "start its consumers; or skip what waits, if nobody needs it (a Spark stream goes on from "
        "its checkpoint all the same)",
        lambda group: commandlines.skip_backlog(group.name, None, dry_run=True),
    ),
    _Rule(
        Check.UNATTENDED,
        "paused",
        Weight.WARN,
        lambda group: group.pace is Pace.PAUSED,
        lambda group: f"it is paused, and {_waits(group)}",
        "let it go on when the reason for the pause is gone",
        lambda group: commandlines.pause_group(group.name, resume=True),
    ),
    _Rule(
        Check.FALLING_BEHIND,
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
        Check.DEAD_LETTERS,
        "dead letters",
        Weight.WARN,
        # Whatever is not known to be resent waits for somebody, who may be the one to find out.
        lambda group: group.open_last_hour + group.unknown_last_hour > 0,
        _died,
        "see why they died, mend that, and send some of them again",
        lambda group: commandlines.count_dead_letters(group.name),
        "dead-letters",
    ),
    _Rule(
        Check.GROUP_SETTINGS,
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
                remedy=rule.remedy,
                command=rule.command(group),
            )
