"""What can be wrong with the servers of a cluster, as a person beside it would notice."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping

from orbitmq.client.admin import Unreachable
from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus
from orbitmq.client.admin.runtime import DISK_WARNING
from orbitmq.client.admin.topicvalues import Permission, Topic
from orbitmq.console import commandlines
from orbitmq.console.checks.faults import Check, Fault, Weight, page_of
from orbitmq.console.words import share

_PAGE = "/brokers"
#: The share of what a broker makes by itself from which on it is worth a word.
NEARLY_FULL = 0.8


def of_servers(cluster: ClusterStatus, unreachable: Iterable[Unreachable] = ()) -> Iterator[Fault]:
    """Everything that the status of a cluster tells."""
    yield from of_name_servers(cluster)
    yield from of_brokers(cluster)
    yield from of_names(cluster)
    yield from of_addresses(cluster)
    yield from of_disks(cluster)
    yield from of_health(cluster, unreachable)
    yield from of_room(cluster)


def of_name_servers(cluster: ClusterStatus) -> Iterator[Fault]:
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
                commandlines.start_name_server(server.address.port),
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


def of_brokers(cluster: ClusterStatus) -> Iterator[Fault]:
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


def of_names(cluster: ClusterStatus) -> Iterator[Fault]:
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


def of_addresses(cluster: ClusterStatus) -> Iterator[Fault]:
    """Addresses that mean another machine to everybody else."""
    if all(_is_loopback(server.address.host) for server in cluster.name_servers):
        # Everything is on this machine.
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


def of_disks(cluster: ClusterStatus) -> Iterator[Fault]:
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


def of_health(cluster: ClusterStatus, unreachable: Iterable[Unreachable] = ()) -> Iterator[Fault]:
    """What brokers say about themselves besides disks and groups, and those that say nothing."""
    remedy = "look into its log around this time, and whether its machine is reachable"
    command = commandlines.command("cluster", "show")
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
    told = {*broker.runtime.findings, broker.runtime.name_conflicts}
    for warning in broker.runtime.warnings:
        # Groups, names and disks have checks of their own.
        if warning not in told and not warning.startswith("the disk is"):
            yield warning


def of_room(cluster: ClusterStatus) -> Iterator[Fault]:
    """Brokers that soon make no more topics or groups for those who just use them."""
    for broker in cluster.brokers:
        for each in () if broker.runtime is None else broker.runtime.ceilings:
            if each.share < NEARLY_FULL:
                continue
            one = each.what.removesuffix("s")
            is_full = each.count >= each.most
            who = "producers" if one == "topic" else "consumers"
            yield Fault(
                check=Check.ROOM,
                kind=f"no room for {each.what}" if is_full else f"little room for {each.what}",
                weight=Weight.BAD if is_full else Weight.WARN,
                subject=str(broker.node),
                link=_PAGE,
                text=f"broker {broker.node} has {each.count:,} {each.what}, and from "
                f"{each.most:,} on it makes no more for {who} that name a new one "
                f"({each.setting})",
                remedy=f"delete those that nobody needs (orbitmq {one} delete), make new ones by "
                f"hand (orbitmq {one} create), or raise the setting: stop the broker, and start it "
                "again as it was started, with its own folder and other flags",
                command=_start(
                    cluster,
                    broker.node.broker,
                    broker.node.address.port,
                    setting=f"{each.setting}={2 * each.most}",
                ),
            )


def of_topics(topics: Iterable[Topic]) -> Iterator[Fault]:
    """Topics whose messages would not be consumed."""
    for topic in topics:
        for each in topic.brokers:
            if each.write_queues > each.read_queues and each.permission & Permission.WRITE:
                yield Fault(
                    check=Check.TOPICS,
                    kind="hidden queues",
                    weight=Weight.BAD,
                    subject=topic.name,
                    link=page_of("topics", topic.name),
                    text=f"topic {topic.name} on {each.broker} is written to {each.write_queues} "
                    f"queues and read from {each.read_queues}, so that messages in the others "
                    "wait for ever",
                    remedy="let all queues be read that are written to",
                    command=commandlines.create_topic(
                        topic.name, read_queues=each.write_queues, is_new=False
                    ),
                )


def of_clocks(skews: Mapping[str, str]) -> Iterator[Fault]:
    """Brokers whose clock is wrong; `skews` says by how much, and against whose."""
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
        weight=Weight.BAD,
        subject=subject,
        link=_PAGE,
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
    return commandlines.start_broker(
        broker,
        [str(server.address) for server in cluster.name_servers],
        # One that has run has messages, and only who started it knows where.
        data=None if broker is None else "FOLDER",
        port=port,
        advertise="HOST" if advertise else None,
        setting=setting,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
