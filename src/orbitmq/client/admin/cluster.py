"""The state of a cluster: its brokers and name servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin.requests import AdminRequests, BrokerNode, Failed, Topology
from orbitmq.errors import BrokerRefused
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode, release_of
from orbitmq.wire.javajson import decode_body, parse_properties


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker and its state."""

    node: BrokerNode
    #: Whether it answers.
    is_up: bool
    #: None when it does not report it.
    runtime: RuntimeInfo | None
    #: Why not.
    problem: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that need attention."""
        if self.runtime is not None:
            return self.runtime.warnings
        if self.is_up:
            return (f"it does not tell how it is: {self.problem}",)
        return (f"it is registered and cannot be reached: {self.problem}",)


@dataclass(frozen=True, slots=True)
class NameServerStatus:
    """A name server and its registrations."""

    address: Address
    #: The brokers that are registered with it, as `name` or `name/id`.
    brokers: tuple[str, ...] = ()
    #: None when it does not report it.
    config: Mapping[str, str] | None = field(default=None, hash=False)
    problem: str | None = None

    @property
    def is_up(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Everything that a cluster consists of."""

    brokers: tuple[BrokerStatus, ...]
    name_servers: tuple[NameServerStatus, ...]

    @property
    def clusters(self) -> tuple[str, ...]:
        """The names of the brokers' clusters."""
        return tuple(sorted({each.node.cluster for each in self.brokers}))

    @property
    def is_healthy(self) -> bool:
        return not self.warnings

    @property
    def in_rate(self) -> float:
        return sum(each.runtime.in_rate or 0.0 for each in self.brokers if each.runtime)

    @property
    def out_rate(self) -> float:
        return sum(each.runtime.out_rate or 0.0 for each in self.brokers if each.runtime)

    @property
    def warnings(self) -> tuple[str, ...]:
        """All problems, each with the server's name."""
        found = [f"{each.node}: {text}" for each in self.brokers for text in each.warnings]
        masters = {each.node.broker for each in self.brokers if each.node.is_master}
        for name in sorted({each.node.broker for each in self.brokers} - masters):
            found.append(f"{name}: it has no master; nothing can be sent to it")
        everywhere = {str(each.node) for each in self.brokers}
        for server in self.name_servers:
            if server.problem is not None:
                found.append(f"name server {server.address}: {server.problem}")
            elif missing := sorted(everywhere - set(server.brokers)):
                found.append(
                    f"name server {server.address}: does not know {', '.join(missing)}; clients "
                    "that ask it miss their queues"
                )
        return tuple(found)


class ClusterView:
    """Reads the state of all servers."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking

    async def status(self) -> ClusterStatus:
        """All brokers and name servers; an unreachable one has a problem."""
        # Raises when no name server answers.
        topology = await self._asking.topology()
        servers = await self._asking.all(
            self._name_server(address) for address in self._asking.name_servers
        )
        nodes = {node for _, known in servers if known is not None for node in known.nodes}
        brokers = await self._asking.all(
            self._broker(node) for node in sorted(nodes | set(topology.nodes))
        )
        return ClusterStatus(tuple(brokers), tuple(status for status, _ in servers))

    async def runtime(self, broker: str) -> RuntimeInfo:
        """The state of one broker; `broker` is its name, `name/id`, or its address."""
        node = (await self._asking.topology()).find(broker)
        return await self._runtime(node)

    async def _broker(self, node: BrokerNode) -> BrokerStatus:
        try:
            return BrokerStatus(node, True, await self._runtime(node))
        except BrokerRefused as refused:
            # Apache's broker refuses for a second after its start, and without permission.
            return BrokerStatus(node, True, None, str(refused))
        except Failed as error:
            return BrokerStatus(node, False, None, str(error))

    async def _runtime(self, node: BrokerNode) -> RuntimeInfo:
        answer = await self._asking.ask(node.address, RequestCode.GET_BROKER_RUNTIME_INFO)
        return runtime_info(decode_body(KVTable, answer.body or b"{}").table, answer.version)

    async def _name_server(self, address: Address) -> tuple[NameServerStatus, Topology | None]:
        try:
            topology = await self._asking.topology(address)
        except Failed as error:
            return NameServerStatus(address, problem=str(error)), None
        brokers = tuple(str(node) for node in topology.nodes)
        try:
            answer = await self._asking.ask(address, RequestCode.GET_NAMESRV_CONFIG)
            config = parse_properties(bytes(answer.body).decode("utf-8", "replace"))
        except Failed:
            # A name server may serve clients without showing its settings.
            return NameServerStatus(address, brokers), topology
        return NameServerStatus(address, brokers, config), topology


# GET_BROKER_RUNTIME_INFO as typed values. Keys differ among releases, values may be missing or
# malformed: these are None, and `raw` has the original texts.


#: Above this share Apache's broker deletes files early and soon refuses messages.
DISK_WARNING = 0.85
#: More bytes that are not yet visible to consumers mean a slow disk.
BEHIND_WARNING = 64 * 1024 * 1024

_FINDING = re.compile(r"groupFinding_(\d+)")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The number of topics or groups, and the bound of automatic creation."""

    what: str  #: topics, or groups
    count: int
    most: int
    setting: str  #: the broker's setting for `most`

    @property
    def share(self) -> float:
        return self.count / self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """The state of a running broker. Rates are per second over the last 10 s."""

    version: str
    started_at: float | None
    in_rate: float | None
    out_rate: float | None
    in_today: int | None
    out_today: int | None
    #: Share of the disk that is in use, 0 to 1.
    disk_used: float | None
    #: Stored bytes that are not yet in a queue.
    dispatch_behind: int | None
    log_start: int | None
    log_end: int | None
    earliest_message_at: float | None
    #: Requests that wait.
    waiting_sends: int | None
    waiting_pulls: int | None
    #: Findings about groups; only OrbitMQ's broker has them.
    findings: tuple[str, ...]
    raw: Mapping[str, str] = field(hash=False)

    @property
    def is_orbitmq(self) -> bool:
        """Whether this is OrbitMQ's broker, not Apache's."""
        return is_orbitmq(self.raw)

    @property
    def name_conflicts(self) -> str:
        """Another broker that is registered by this one's name; empty without one."""
        return self.raw.get("nameConflicts", "")

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        """The bounds of the broker; only OrbitMQ's reports them."""
        table = _Table(self.raw)
        found = (
            (what, table.whole(what), table.whole(f"maxAuto{what.title()}"))
            for what in ("topics", "groups")
        )
        return tuple(
            Ceiling(what, count, most, f"broker.max_auto_{what}")
            for what, count, most in found
            if count is not None and most
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that need attention."""
        found: list[str] = []
        if self.disk_used is not None and self.disk_used >= DISK_WARNING:
            found.append(
                f"the disk is {self.disk_used:.0%} full; messages are refused when it is full: "
                "shorten the retention or add space"
            )
        if self.dispatch_behind is not None and self.dispatch_behind > BEHIND_WARNING:
            found.append(
                f"{self.dispatch_behind} bytes are stored and not yet visible to consumers"
            )
        if refusal := self.raw.get("storeRefusal"):
            found.append(f"it refuses messages: {refusal}")
        if lost := self.raw.get("unreachableNameServers"):
            found.append(f"it cannot reach the name servers {lost}")
        if self.name_conflicts:
            found.append(self.name_conflicts)
        if self.raw.get("brokerActive") == "false":
            found.append("it is not active")
        return (*found, *self.findings)


def is_orbitmq(raw: Mapping[str, str]) -> bool:
    """Whether runtime information is from OrbitMQ's broker."""
    return "groupFindings" in raw


def runtime_info(raw: Mapping[str, str], version: int) -> RuntimeInfo:
    """Decode the table of a broker with this version."""
    table = _Table(raw)
    release = release_of(version)
    described = raw.get("brokerVersionDesc", "").removeprefix("V").replace("_", ".")
    return RuntimeInfo(
        version=described or ("" if release is None else str(release)),
        started_at=table.time("bootTimestamp"),
        in_rate=table.rate("putTps"),
        # 4.x spells it with one r.
        out_rate=table.rate("getTransferredTps", "getTransferedTps"),
        in_today=table.difference("msgPutTotalTodayNow", "msgPutTotalTodayMorning"),
        out_today=table.difference("msgGetTotalTodayNow", "msgGetTotalTodayMorning"),
        disk_used=table.number("commitLogDiskRatio"),
        dispatch_behind=table.whole("dispatchBehindBytes"),
        log_start=table.whole("commitLogMinOffset"),
        log_end=table.whole("commitLogMaxOffset"),
        earliest_message_at=table.time("earliestMessageTimeStamp"),
        waiting_sends=table.whole("sendThreadPoolQueueSize"),
        waiting_pulls=table.whole("pullThreadPoolQueueSize"),
        findings=_findings(raw),
        raw=dict(raw),
    )


def _findings(raw: Mapping[str, str]) -> tuple[str, ...]:
    numbered = [
        (int(match[1]), text) for name, text in raw.items() if (match := _FINDING.fullmatch(name))
    ]
    return tuple(text for _, text in sorted(numbered))


class _Table:
    """Reads single values."""

    def __init__(self, raw: Mapping[str, str]) -> None:
        self._raw = raw

    def number(self, *names: str) -> float | None:
        for name in names:
            try:
                return float(self._raw[name].split()[0])
            except (KeyError, ValueError, IndexError):
                continue
        return None

    def rate(self, *names: str) -> float | None:
        """The first of the three numbers of a rate."""
        return self.number(*names)

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def time(self, name: str) -> float | None:
        value = self.number(name)
        return None if value is None or value <= 0 else value / 1000

    def difference(self, later: str, earlier: str) -> int | None:
        end, start = self.whole(later), self.whole(earlier)
        return None if end is None or start is None else max(0, end - start)
