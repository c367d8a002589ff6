"""One run of a command that asks a cluster: its client, its output, and whom to ask for consent."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import typer

from orbitmq.cli.errors import FAILED, NeedsConsent
from orbitmq.cli.printing import Printer
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.listing import Unreachable
from orbitmq.client.admin.topology import Topology
from orbitmq.client.engine import Engine


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with."""

    engine: Engine
    admin: AsyncAdmin
    out: Printer
    says_yes: bool = False
    is_dry_run: bool = False

    def may(self, what: str) -> bool:
        """Whether to go on with `what`, a sentence about what will be changed.

        False for a dry run, and when the person at the terminal declines. Without a terminal it
        raises `NeedsConsent` unless `--yes` was given.
        """
        if self.is_dry_run:
            self.out.note("dry run: nothing was changed")
            return False
        if self.says_yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NeedsConsent(what)
        if typer.confirm(f"{what}. Go on?", err=True):
            return True
        self.out.note("nothing was changed")
        raise typer.Exit(FAILED)

    async def masters(
        self, brokers: Collection[str] | None, cluster: str | None = None
    ) -> tuple[str, ...]:
        """The brokers that a change is for: those named, those of a cluster, or all.

        Raises `BrokerNotFound` or `BrokerUnavailable`, as the change would.
        """
        status = await self.admin.cluster()
        found = Topology(tuple(broker.node for broker in status.brokers))
        return tuple(node.broker for node in found.masters(brokers or None, cluster=cluster))

    def missing(self, servers: Iterable[Unreachable]) -> None:
        """Say whose part of an answer is missing; the command then ends as one that failed."""
        found = tuple(servers)
        for server in found:
            self.out.note(
                f"orbitmq: incomplete, {server.server} could not be asked: {server.reason}"
            )
        if found:
            raise typer.Exit(FAILED)
