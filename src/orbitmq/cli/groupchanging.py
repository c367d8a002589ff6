"""The commands of `orbitmq group` that make, configure, pause and delete groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from orbitmq.cli.choosing import Broker, ClusterName, GroupName, seconds
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import CommandError, Misused
from orbitmq.cli.grouprecords import GroupChange, change_of
from orbitmq.cli.session import Session
from orbitmq.cli.suggesting import unknown
from orbitmq.cli.wording import several
from orbitmq.client.admin.errors import BadRequest, GroupNotFound
from orbitmq.client.admin.groupvalues import GroupSettings
from orbitmq.client.names import dead_letter_topic, retry_topic

app = section("Make, configure, pause and delete groups.")

MaxRetries = Annotated[
    int | None,
    typer.Option(
        "--max-retries", min=0, help="Attempts after the first, then it is a dead letter."
    ),
]
RetryQueues = Annotated[
    int | None,
    typer.Option("--retry-queues", min=0, help="Queues of its retry topic on each broker."),
]
Orderly = Annotated[
    bool | None, typer.Option("--orderly/--concurrent", help="Whether it consumes in order.")
]
MayBroadcast = Annotated[
    bool | None,
    typer.Option("--broadcast/--no-broadcast", help="Whether members may consume everything each."),
]
ConsumeTimeout = Annotated[
    str | None,
    typer.Option(
        "--consume-timeout", metavar="DURATION", help="How long a handler may take, as 15m."
    ),
]


@command(
    app,
    "create",
    examples=(
        "orbitmq group create billing",
        "orbitmq group create billing --max-retries 5 --if-missing",
    ),
    prints=GroupChange,
    changes=True,
)
async def create(
    session: Session,
    group: GroupName,
    max_retries: MaxRetries = None,
    retry_queues: RetryQueues = None,
    orderly: Orderly = None,
    may_broadcast: MayBroadcast = None,
    consume_timeout: ConsumeTimeout = None,
    broker: Broker = None,
    cluster: ClusterName = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Leave a group that is there as it is.")
    ] = False,
) -> None:
    """Make a group, on all brokers unless told otherwise.

    Where other brokers have it already, it is made as it is there, but for what is given.
    """
    before = await _before(session, group)
    chosen = await session.masters(broker, cluster)
    lacking = [name for name in chosen if name not in before]
    if not lacking:
        if not if_missing:
            raise CommandError(
                f"group {group!r} is there already; change it with: orbitmq group update {group}"
            )
        _tell(session, change_of("left", group, before))
        return
    if len(lacking) < len(chosen) and not if_missing:
        named = " ".join(f"--broker {name}" for name in lacking)
        raise CommandError(
            f"group {group!r} is there already on {', '.join(sorted(before))}; to have it on "
            f"{', '.join(lacking)} as well: orbitmq group create {group} {named}"
        )
    usual = before[min(before)] if before else GroupSettings(group)
    wanted = GroupSettings(
        group,
        max_retries=usual.max_retries if max_retries is None else max_retries,
        retry_queues=usual.retry_queues if retry_queues is None else retry_queues,
        is_orderly=usual.is_orderly if orderly is None else orderly,
        may_broadcast=usual.may_broadcast if may_broadcast is None else may_broadcast,
        is_enabled=usual.is_enabled,
        consume_timeout=usual.consume_timeout
        if consume_timeout is None
        else seconds(consume_timeout, "--consume-timeout"),
    )
    if session.is_dry_run:
        planned = f"{_described(wanted)}, on {', '.join(lacking)}"
        _tell(session, change_of("would be created", group, {}, planned))
        return
    after = await session.admin.groups.create(
        group,
        max_retries=wanted.max_retries,
        retry_queues=wanted.retry_queues,
        orderly=wanted.is_orderly,
        may_broadcast=wanted.may_broadcast,
        enabled=wanted.is_enabled,
        consume_timeout=wanted.consume_timeout,
        brokers=lacking,
    )
    _tell(session, change_of("created", group, after))


@command(
    app,
    "update",
    examples=(
        "orbitmq group update billing --max-retries 3",
        "orbitmq group update billing --consume-timeout 30m --dry-run",
    ),
    prints=GroupChange,
    changes=True,
)
async def update(
    session: Session,
    group: GroupName,
    max_retries: MaxRetries = None,
    retry_queues: RetryQueues = None,
    orderly: Orderly = None,
    may_broadcast: MayBroadcast = None,
    consume_timeout: ConsumeTimeout = None,
    broker: Broker = None,
) -> None:
    """Change settings of a group and leave the others."""
    timeout = None if consume_timeout is None else seconds(consume_timeout, "--consume-timeout")
    changes = {
        "max retries": max_retries,
        "retry queues": retry_queues,
        "in order": orderly,
        "may broadcast": may_broadcast,
        "handler may take": timeout,
    }
    words = [f"{name} {value}" for name, value in changes.items() if value is not None]
    if not words:
        raise Misused("nothing to change: give --max-retries or another setting")
    if session.is_dry_run:
        await session.masters(broker)
        before = await session.admin.groups.settings(group)
        _tell(session, change_of("would be changed", group, before, ", ".join(words)))
        return
    after = await session.admin.groups.update(
        group,
        max_retries=max_retries,
        retry_queues=retry_queues,
        orderly=orderly,
        may_broadcast=may_broadcast,
        consume_timeout=timeout,
        brokers=broker or None,
    )
    _tell(session, change_of("changed", group, after))


@command(
    app,
    "pause",
    examples=("orbitmq group pause billing", "orbitmq group pause billing --yes"),
    prints=GroupChange,
    changes=True,
)
async def pause(session: Session, group: GroupName) -> None:
    """Stop a group from pulling, on every broker; its members stay connected and wait."""
    before = await session.admin.groups.settings(group)
    if session.is_dry_run:
        _tell(session, change_of("would be paused", group, before))
    elif session.may(f"this stops group {group!r} from consuming until it is resumed"):
        _tell(session, change_of("paused", group, await session.admin.groups.pause(group)))


@command(
    app,
    "resume",
    examples=("orbitmq group resume billing",),
    prints=GroupChange,
    changes=True,
)
async def resume(session: Session, group: GroupName) -> None:
    """Let a group that was paused pull again."""
    before = await session.admin.groups.settings(group)
    if session.is_dry_run:
        _tell(session, change_of("would be resumed", group, before))
    else:
        _tell(session, change_of("resumed", group, await session.admin.groups.resume(group)))


@command(
    app,
    "delete",
    examples=(
        "orbitmq group delete billing",
        "orbitmq group delete billing --with-topics --yes",
    ),
    prints=GroupChange,
    changes=True,
)
async def delete(
    session: Session,
    group: GroupName,
    keep_progress: Annotated[
        bool, typer.Option("--keep-progress", help="A group of this name will go on from there.")
    ] = False,
    with_topics: Annotated[
        bool, typer.Option("--with-topics", help="Its retries and dead letters, too.")
    ] = False,
) -> None:
    """Delete a group and its progress; refused while members are online."""
    try:
        details = await session.admin.groups.describe(group)
    except GroupNotFound as error:
        raise await unknown(session.admin, error, "there is nothing to delete") from error
    try:
        # Before anybody is asked for consent, and in a dry run as well.
        await session.admin.groups.check_offline(group)
    except BadRequest as error:
        raise CommandError(str(error)) from error
    parts = ["its settings"]
    if not keep_progress:
        parts.append(f"its progress in {several(len(details.progress.queues), 'queue')}")
    if with_topics:
        letters = several(details.dead_letters, "dead letter")
        parts.append(f"{retry_topic(group)} and {dead_letter_topic(group)} with {letters}")
    loss = ", ".join(parts)
    if session.is_dry_run:
        _tell(session, change_of("would be deleted", group, details.settings, loss))
    elif session.may(f"this deletes group {group!r}: {loss}"):
        await session.admin.groups.delete(
            group, forget_progress=not keep_progress, delete_topics=with_topics
        )
        _tell(session, change_of("deleted", group, {}, loss))


async def _before(session: Session, group: str) -> Mapping[str, GroupSettings]:
    try:
        return await session.admin.groups.settings(group)
    except GroupNotFound:
        return {}


def _tell(session: Session, change: GroupChange) -> None:
    out = session.out
    if out.is_json:
        out.record(change)
        return
    where = ", ".join(each.broker for each in change.settings)
    about = change.remark or (f"on {where}" if where else "")
    out.line(f"group {change.group} {change.result}{': ' + about if about else ''}")


def _described(settings: GroupSettings) -> str:
    return (
        f"max retries {settings.max_retries}, retry queues {settings.retry_queues}, "
        f"{'in order' if settings.is_orderly else 'concurrent'}"
    )
