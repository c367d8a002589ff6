"""Everything that was seen of a cluster, and everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orbitmq.console import commandlines
from orbitmq.console.checks.faults import Fault, sorted_faults
from orbitmq.console.checks.groups import Inside, of_groups
from orbitmq.console.checks.pipelines import of_pipelines
from orbitmq.console.checks.servers import of_clocks, of_servers, of_topics
from orbitmq.console.pipelines import Pipeline
from orbitmq.console.samples import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What checks look at."""

    snapshot: Snapshot
    now: float
    #: What members of groups say.
    inside: Mapping[str, Inside] = field(default_factory=dict, hash=False)
    #: Brokers whose clocks are wrong, in words.
    skews: Mapping[str, str] = field(default_factory=dict, hash=False)
    pipelines: tuple[Pipeline, ...] = ()
    #: Whose cluster it is; empty: the one that commands ask by themselves.
    name_servers: tuple[str, ...] = ()
    #: The groups that were asked about; empty: all.
    only: frozenset[str] = frozenset()


def find_faults(seen: Seen) -> tuple[Fault, ...]:
    """Everything that is wrong, the worst first."""
    snapshot = seen.snapshot
    found = sorted_faults(
        (
            *of_servers(snapshot.cluster, snapshot.unreachable),
            *of_topics(each.topic for each in snapshot.topics.values()),
            *of_clocks(seen.skews),
            *of_groups(snapshot.groups.values(), seen.inside, _told(snapshot, seen.only)),
            *of_pipelines(seen.pipelines, seen.now),
        )
    )
    return tuple(aimed(fault, seen.name_servers) for fault in found)


def aimed(fault: Fault, name_servers: tuple[str, ...]) -> Fault:
    """The same fault, with a command for its cluster."""
    if fault.command is None:
        return fault
    return replace(fault, command=commandlines.aimed(fault.command, name_servers))


def _told(snapshot: Snapshot, only: frozenset[str]) -> dict[str, str | None]:
    """What brokers say of their groups, with the name of the group if it is known."""
    texts: dict[str, str | None] = {}
    for each in snapshot.cluster.brokers:
        for text in () if each.runtime is None else each.runtime.findings:
            match = re.search(r"group '([^']+)'", text)
            group = match[1] if match and match[1] in snapshot.groups else None
            if not only or group in only:
                texts[text] = group
    return texts
