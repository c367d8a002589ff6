"""`orbitmq cluster`: brokers and name servers, and their state."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import Session, command
from orbitmq.cli.main import FAILED
from orbitmq.cli.output import Columns, rate
from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus
from orbitmq.console.words import NOTHING, duration, share
from orbitmq.parsing import fill

app = section()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRecord:
    """A broker."""

    cluster: str
    broker: str
    id: int  #: 0 is the master
    address: str
    is_up: bool  #: whether it answers
    version: str | None = None
    is_orbitmq: bool | None = None  #: false for Apache's; null when it does not answer
    started_at: float | None = None
    in_rate: float | None = None  #: messages per second that are stored, over the last 10 s
    out_rate: float | None = None  #: messages per second that consumers pull, over the last 10 s
    in_today: int | None = None
    out_today: int | None = None
    disk_used: float | None = None  #: share of the disk, 0 to 1
    earliest_message_at: float | None = None
    warnings: tuple[str, ...]  #: problems that need attention

    @classmethod
    def of(cls, status: BrokerStatus) -> BrokerRecord:
        return fill(cls, status.node, status, status.runtime, address=str(status.node.address))

    @property
    def kind(self) -> str:
        if self.is_orbitmq is None:
            return NOTHING
        if not self.is_orbitmq:
            return f"Apache {self.version}".strip()
        # The version is the RocketMQ release whose protocol OrbitMQ speaks.
        return f"OrbitMQ, speaks {self.version}" if self.version else "OrbitMQ"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerRecord:
    """A name server."""

    address: str
    is_up: bool
    brokers: tuple[str, ...]  #: registered with it, as `name` or `name/id`
    problem: str | None  #: why it cannot be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """Everything that a cluster consists of."""

    clusters: tuple[str, ...]
    is_healthy: bool
    brokers: tuple[BrokerRecord, ...]
    name_servers: tuple[NameServerRecord, ...]

    @classmethod
    def of(cls, status: ClusterStatus) -> ClusterRecord:
        return fill(
            cls,
            status,
            brokers=tuple(map(BrokerRecord.of, status.brokers)),
            name_servers=tuple(
                fill(NameServerRecord, each, address=str(each.address))
                for each in status.name_servers
            ),
        )


@command(
    app,
    "show",
    examples=(
        "orbitmq cluster show",
        "orbitmq cluster show --name-server ns1:9876 --name-server ns2:9876 --json",
    ),
    prints=ClusterRecord,
)
async def show(session: Session) -> None:
    """Show all brokers and name servers; the exit code is 1 when one needs attention."""
    out = session.out
    record = ClusterRecord.of(await session.admin.cluster())
    if out.is_json:
        out.record(record)
    else:
        now = out.clock.now()
        out.table(
            Columns[BrokerRecord]()
            .text("broker", _name)
            .text("cluster", lambda each: each.cluster)
            .text("address", lambda each: each.address)
            .text(
                "state",
                lambda each: "up" if each.is_up else "down",
                bad=lambda each: not each.is_up,
            )
            .text("version", lambda each: each.kind)
            .number(
                "up for",
                lambda each: duration(None if each.started_at is None else now - each.started_at),
            )
            .number("in/s", lambda each: rate(each.in_rate))
            .number("pulled/s", lambda each: rate(each.out_rate))
            .number("disk", lambda each: share(each.disk_used)),
            record.brokers,
            empty="no broker is registered",
        )
        out.table(
            Columns[NameServerRecord]()
            .text("address", lambda each: each.address)
            .text(
                "state",
                lambda each: "up" if each.is_up else "down",
                bad=lambda each: not each.is_up,
            )
            .text("brokers", lambda each: ", ".join(each.brokers)),
            record.name_servers,
            title="Name servers",
        )
        for broker in record.brokers:
            for warning in broker.warnings:
                out.line(f"! {_name(broker)}: {warning}")
        for server in record.name_servers:
            if server.problem is not None:
                out.line(f"! {server.address}: {server.problem}")
    if not record.is_healthy:
        raise typer.Exit(FAILED)


def _name(broker: BrokerRecord) -> str:
    return broker.broker if broker.id == 0 else f"{broker.broker}/{broker.id}"
