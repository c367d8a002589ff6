"""What can be wrong with the servers of a cluster, as a person beside it would notice."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from orbitmq.cli.diagnosis import Found
from orbitmq.cli.wording import duration, share
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus
from orbitmq.client.admin.listing import Listing
from orbitmq.client.admin.runtime import DISK_WARNING
from orbitmq.client.admin.topicvalues import Permission, Topic, TopicKind
from orbitmq.client.queue import Queue

#: Clocks that differ by less are as good as equal for messages.
CLOCK_TOLERANCE = 2.0
#: Topics whose latest message is looked at; more would not tell more about clocks.
_SAMPLED_TOPICS = 20


def name_servers(cluster: ClusterStatus) -> Iterator[Found]:
    """Name servers that are down or know less than others."""
    everywhere = {str(broker.node) for broker in cluster.brokers}
    for server in cluster.name_servers:
        if server.problem is not None:
            yield Found(
                str(server.address),
                f"the name server {server.address} does not answer: {server.problem}",
                "start it, or leave it out of the name servers that clients are given",
            )
        elif missing := sorted(everywhere - set(server.brokers)):
            yield Found(
                str(server.address),
                f"the name server {server.address} does not know {', '.join(missing)}, so that "
                "clients which ask it miss their queues",
                "give all brokers the same list of name servers (broker.name_servers)",
            )


def brokers(cluster: ClusterStatus) -> Iterator[Found]:
    """Brokers that clients cannot use."""
    if not cluster.brokers:
        yield Found(
            "brokers",
            "no broker is registered",
            "start one with: orbitmq broker --name-server HOST:PORT, or orbitmq up",
        )
    masters = {each.node.broker for each in cluster.brokers if each.node.is_master}
    for name in sorted({each.node.broker for each in cluster.brokers} - masters):
        yield Found(
            name,
            f"broker {name} has no master, so that nothing can be sent to it",
            "start its master again",
        )
    for broker in cluster.brokers:
        if not broker.is_up:
            yield Found(
                str(broker.node),
                f"broker {broker.node} tells clients to connect to {broker.node.address}, which "
                f"cannot be reached from here: {broker.problem}",
                "if it runs, give it the address that clients reach (orbitmq broker --advertise "
                "HOST, brokerIP1 at Apache's); if not, start it",
            )


def addresses(cluster: ClusterStatus) -> Iterator[Found]:
    """Addresses that mean another machine to everybody else."""
    if all(_is_loopback(server.address.host) for server in cluster.name_servers):
        # Everything is on this machine.
        return
    for broker in cluster.brokers:
        if _is_loopback(broker.node.address.host):
            yield Found(
                str(broker.node),
                f"broker {broker.node} tells clients to connect to {broker.node.address}, and "
                "clients on other machines would connect to themselves",
                "start it with the address that they reach: orbitmq broker --advertise HOST "
                "(brokerIP1 at Apache's)",
            )


def disks(cluster: ClusterStatus) -> Iterator[Found]:
    """Disks that are nearly full."""
    for broker in cluster.brokers:
        used = None if broker.runtime is None else broker.runtime.disk_used
        if used is not None and used >= DISK_WARNING:
            yield Found(
                str(broker.node),
                f"the disk of broker {broker.node} is {share(used)} full, and messages are refused "
                "when it is full",
                "shorten the retention or add space",
            )


def health(cluster: ClusterStatus) -> Iterator[Found]:
    """What brokers say about themselves, besides disks and groups."""
    for broker in cluster.brokers:
        for warning in _own_warnings(broker):
            yield Found(
                str(broker.node),
                f"broker {broker.node}: {warning}",
                "look into its log around this time",
            )


def _own_warnings(broker: BrokerStatus) -> Iterator[str]:
    if broker.runtime is None:
        if broker.is_up:
            yield from broker.warnings
        return
    told = set(broker.runtime.findings)
    for warning in broker.runtime.warnings:
        # Groups and disks have checks of their own.
        if warning not in told and not warning.startswith("the disk is"):
            yield warning


def topics(listing: Listing[Topic]) -> Iterator[Found]:
    """Topics whose messages would not be consumed."""
    for topic in listing:
        for each in topic.brokers:
            if each.write_queues > each.read_queues and each.permission & Permission.WRITE:
                yield Found(
                    topic.name,
                    f"topic {topic.name} on {each.broker} is written to {each.write_queues} queues "
                    f"and read from {each.read_queues}, so that messages in the others wait for "
                    "ever",
                    f"orbitmq topic update {topic.name} --read-queues {each.write_queues}",
                )


async def clocks(
    admin: AsyncAdmin, listing: Listing[Topic], now: float
) -> tuple[int, Sequence[Found]]:
    """Brokers whose clock differs from this machine's or from producers': how many messages tell.

    A message cannot have been stored in the future, nor before it was sent.
    """
    found: dict[str, Found] = {}
    looked = 0
    sampled = [each for each in listing if each.kind is not TopicKind.SYSTEM][:_SAMPLED_TOPICS]
    for topic in sampled:
        status = await admin.topics.status(topic.name)
        for queue in status.queues:
            if not queue.messages:
                continue
            looked += 1
            if (problem := await _skew(admin, queue.queue, queue.max_offset - 1, now)) is not None:
                found.setdefault(
                    queue.queue.broker,
                    Found(
                        queue.queue.broker,
                        problem,
                        "keep the clocks of all machines in step (NTP): delays, retention and lag "
                        "in seconds depend on them",
                    ),
                )
    return looked, tuple(found.values())


async def _skew(admin: AsyncAdmin, queue: Queue, offset: int, now: float) -> str | None:
    page = await admin.messages.page(queue.topic, queues=(queue,), size=1, newest_first=True)
    for message in page.messages:
        ahead = message.stored_at - now
        if ahead > CLOCK_TOLERANCE:
            return (
                f"the clock of broker {queue.broker} is {duration(ahead)} ahead of this machine's"
            )
        behind = message.born_at - message.stored_at
        if behind > CLOCK_TOLERANCE:
            return (
                f"the clock of broker {queue.broker} is {duration(behind)} behind that of a "
                f"producer of {queue.topic} (offset {offset})"
            )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
