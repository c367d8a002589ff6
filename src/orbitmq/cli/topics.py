"""`orbitmq topic`: topics, listed and looked into; changing them is in `topicchanging`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from orbitmq.cli import topicchanging
from orbitmq.cli.choosing import TopicName
from orbitmq.cli.declaring import command, section
from orbitmq.cli.session import Session
from orbitmq.cli.tables import Columns
from orbitmq.cli.topicrecords import TopicDetails, TopicRecord, details_of
from orbitmq.cli.wording import NOTHING, count, rate, several, size
from orbitmq.client.admin.topicvalues import (
    NOT_LISTED,
    Permission,
    QueueStatus,
    Rate,
    RouteBroker,
    Topic,
    TopicKind,
)

app = section("List, make, change and delete topics.")


@command(
    app,
    "list",
    examples=(
        "orbitmq topic list",
        "orbitmq topic list --kind retry --kind dlq",
        "orbitmq topic list --status --json | jq -r 'select(.messages > 0) | .topic'",
    ),
    prints=TopicRecord,
)
async def list_topics(
    session: Session,
    kind: Annotated[
        list[TopicKind] | None,
        typer.Option("--kind", "-k", help="Only topics of this kind; may be repeated."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Those of the system, too.")] = False,
    status: Annotated[
        bool, typer.Option("--status", "-s", help="What is in each; asks for every topic.")
    ] = False,
) -> None:
    """List topics; those of the system, for retries and dead letters if asked for."""
    wanted = set(kind or TopicKind) if every or kind else set(TopicKind) - NOT_LISTED
    found = await session.admin.topics.list(kinds=wanted)
    records = [TopicRecord.of(topic) for topic in found]
    if status:
        # The admin itself limits how many requests wait at a time.
        statuses = await asyncio.gather(
            *(session.admin.topics.status(record.topic) for record in records)
        )
        records = [record.with_status(each) for record, each in zip(records, statuses, strict=True)]
    out = session.out
    if out.is_json:
        out.records(records)
    else:
        columns = (
            Columns[TopicRecord]()
            .text("topic", lambda each: each.topic)
            .text("kind", lambda each: each.kind)
            .number("write", lambda each: count(each.write_queues))
            .number("read", lambda each: count(each.read_queues))
            .text("may", lambda each: each.permission)
            .text("brokers", lambda each: ", ".join(each.brokers))
        )
        if status:
            columns = (
                columns.number("messages", lambda each: count(each.messages))
                .number("in/s", lambda each: rate(each.in_rate))
                .text("oldest", lambda each: out.moment(each.first_stored_at))
                .text("latest", lambda each: out.moment(each.last_stored_at))
            )
        none = "no topics; orbitmq topic list --all shows all kinds"
        out.table(columns, records, empty="" if found.unreachable else none)
    session.missing(found.unreachable)


@command(
    app,
    "show",
    examples=("orbitmq topic show orders", "orbitmq topic show orders --json | jq .messages"),
    prints=TopicDetails,
)
async def show(session: Session, topic: TopicName) -> None:
    """Show a topic: its settings, queues, route, rates and who consumes it."""
    admin, out = session.admin.topics, session.out
    found = await admin.get(topic)
    status = await admin.status(topic)
    route = await admin.route(topic)
    rates = await admin.rates(topic)
    if out.is_json:
        out.record(details_of(found, status, route, rates))
    else:
        out.facts(
            ("topic", found.name),
            ("kind", found.kind),
            ("may be", _permission(found)),
            ("order kept", "yes" if found.is_ordered else "no"),
            ("queues", f"{found.write_queues} to write, {found.read_queues} to read"),
            ("messages", count(status.messages)),
            ("oldest", out.moment(status.first_stored_at)),
            ("latest", out.moment(status.last_stored_at)),
            ("in", _rate(rates.incoming)),
        )
        out.table(
            Columns[RouteBroker]()
            .text("broker", lambda each: each.broker)
            .text("cluster", lambda each: each.cluster)
            .text("addresses", _addresses)
            .number("write", lambda each: count(each.write_queues))
            .number("read", lambda each: count(each.read_queues))
            .text("may", lambda each: each.permission.letters),
            route.brokers,
            title="Where clients find it",
        )
        out.table(
            Columns[QueueStatus]()
            .text("queue", lambda each: f"{each.queue.broker}:{each.queue.id}")
            .number("first", lambda each: count(each.min_offset))
            .number("next", lambda each: count(each.max_offset))
            .number("messages", lambda each: count(each.messages))
            .text("oldest", lambda each: out.moment(each.first_stored_at))
            .text("latest", lambda each: out.moment(each.last_stored_at)),
            status.queues,
            title="What is in it",
        )
        out.table(
            Columns[tuple[str, Rate]]()
            .text("group", lambda each: each[0])
            .number("pulled/s", lambda each: rate(each[1].messages))
            .number("today", lambda each: count(each[1].messages_today)),
            sorted(rates.outgoing.items()),
            title="Who consumes it",
            empty="nobody",
        )
    session.missing(status.unreachable)


def _permission(topic: Topic) -> str:
    return {
        "rw": "written and read",
        "r": "read only",
        "w": "written only",
    }.get(Permission(topic.permission & 6).letters, "neither written nor read")


def _addresses(broker: RouteBroker) -> str:
    return ", ".join(
        address if number == 0 else f"{address} (slave {number})"
        for number, address in sorted(broker.addresses.items())
    )


def _rate(incoming: Rate) -> str:
    if not incoming.messages_today and not incoming.messages:
        return NOTHING
    return (
        f"{rate(incoming.messages)} messages/s, {size(incoming.bytes)}/s over the last minute; "
        f"{several(incoming.messages_today, 'message')} today"
    )


app.add_typer(topicchanging.app)
