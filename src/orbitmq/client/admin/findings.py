"""What is wrong inside a group, found before messages are missed.

A broker of ours compares the heartbeats of members and tells (field `findings` of the answer to
GET_CONSUMER_CONNECTION_LIST). Apache's does not: there the members themselves are asked what they
subscribe to, which takes a request for each, and connections are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from orbitmq.client.admin.groupvalues import GroupProgress
from orbitmq.client.admin.membervalues import (
    Finding,
    FindingKind,
    Members,
    RunningInfo,
    Variant,
)
from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.tags import parse_tags

#: Owned, with messages waiting, and not pulled for so long: its consumer does not work on it.
STALLED_AFTER = 120.0


class _VariantText(msgspec.Struct, rename="camel"):
    clients: tuple[str, ...] = ()
    expression: str | None = None
    expression_type: str | None = None


class _FindingText(msgspec.Struct, rename="camel"):
    kind: str
    group: str
    text: str
    topic: str | None = None
    variants: tuple[_VariantText, ...] = ()
    client_id: str | None = None
    addresses: tuple[str, ...] = ()


def told_findings(texts: Iterable[str]) -> tuple[Finding, ...]:
    """What brokers say, each finding once."""
    found: dict[object, Finding] = {}
    for text in texts:
        try:
            entries = msgspec.json.decode(text, type=tuple[_FindingText, ...])
        except msgspec.MsgspecError:
            # Another version's way of saying it: better nothing than an error in its place.
            continue
        for entry in entries:
            if entry.kind not in tuple(FindingKind):
                continue
            finding = Finding(
                FindingKind(entry.kind),
                entry.group,
                entry.text,
                entry.topic,
                tuple(
                    Variant(each.clients, each.expression, each.expression_type)
                    for each in entry.variants
                ),
                entry.client_id,
                entry.addresses,
            )
            found.setdefault((finding.kind, finding.topic, finding.client_id), finding)
    return tuple(found.values())


def duplicate_clients(members: Members) -> tuple[Finding, ...]:
    """Client ids with more than one connection to a single broker."""
    addresses: dict[str, list[str]] = {}
    for client in members.clients:
        addresses.setdefault(client.client_id, []).append(client.address)
    return tuple(
        Finding(
            FindingKind.DUPLICATE_CLIENT,
            members.group,
            f"group {members.group!r} has {len(where)} consumers with the client id "
            f"{client_id!r} ({', '.join(where)}): they consume the same queues; give each an "
            "instance name of its own",
            client_id=client_id,
            addresses=tuple(where),
        )
        for client_id, where in addresses.items()
        if len(where) > 1
    )


def different_subscriptions(group: str, running: Mapping[str, RunningInfo]) -> tuple[Finding, ...]:
    """The topics that not all members, by their own account, subscribe to in the same way."""
    topics = {each.topic for info in running.values() for each in info.subscriptions}
    found = []
    for topic in sorted(topics):
        variants: dict[object, list[tuple[str, str | None, str | None]]] = {}
        for client_id, info in sorted(running.items()):
            mine = next((each for each in info.subscriptions if each.topic == topic), None)
            expression = None if mine is None else mine.expression
            kind = None if mine is None else mine.expression_type
            key = None if expression is None else (kind, _meaning(kind, expression))
            variants.setdefault(key, []).append((client_id, expression, kind))
        if len(variants) > 1:
            found.append(_difference(group, topic, tuple(variants.values())))
    return tuple(found)


def _difference(
    group: str, topic: str, variants: Sequence[Sequence[tuple[str, str | None, str | None]]]
) -> Finding:
    shown = tuple(
        Variant(tuple(client for client, _, _ in same), same[0][1], same[0][2]) for same in variants
    )
    texts = (
        f"{', '.join(each.clients)} "
        + (
            "without it"
            if each.expression is None
            else f"with {each.expression_type} {each.expression!r}"
        )
        for each in shown
    )
    return Finding(
        FindingKind.DIFFERENT_SUBSCRIPTIONS,
        group,
        f"members of group {group!r} subscribe differently to topic {topic!r}: "
        f"{'; '.join(texts)}; messages will be missed until they agree",
        topic,
        shown,
    )


def _meaning(kind: str | None, expression: str) -> object:
    """Equal for expressions that select the same messages."""
    if kind not in (None, "", "TAG"):
        return expression.strip()
    try:
        parsed = parse_tags(expression)
    except InvalidFilter:
        return expression
    return (parsed.tags, parsed.matches_all)


def queue_findings(
    progress: GroupProgress, running: Mapping[str, RunningInfo], now: float
) -> tuple[Finding, ...]:
    """Queues with messages that nobody has, or whose owner does not pull them."""
    group = progress.group
    owned = {
        each.queue: (client_id, each)
        for client_id, info in running.items()
        for each in info.queues
        if not each.is_dropped
    }
    found = []
    for place in progress.queues:
        if not place.lag:
            continue
        if place.queue not in owned:
            found.append(
                Finding(
                    FindingKind.UNOWNED_QUEUE,
                    group,
                    f"{place.lag} messages wait in {place.queue} and no member of {group!r} has "
                    "it; check that all members subscribe to the topic and use one strategy",
                    place.queue.topic,
                    queue=place.queue,
                )
            )
            continue
        client_id, held = owned[place.queue]
        if held.last_pull_at is not None and now - held.last_pull_at > STALLED_AFTER:
            found.append(
                Finding(
                    FindingKind.STALLED_QUEUE,
                    group,
                    f"{place.lag} messages wait in {place.queue}, and {client_id} has not pulled "
                    f"it for {now - held.last_pull_at:.0f} s; its handler may hang: ask for its "
                    "stack",
                    place.queue.topic,
                    client_id=client_id,
                    queue=place.queue,
                )
            )
    return tuple(found)


def retries_for_ever(info: RunningInfo) -> bool:
    """Whether a consumer works in order and never gives a message up."""
    text = info.properties.get("maxReconsumeTimes", "")
    if not info.is_orderly or not text.lstrip("-").isdecimal():
        return False
    # Java counts up to its largest number when nothing is set, which is -1.
    return int(text) < 0 or int(text) >= 2**31 - 1
