"""The `orbitmq` command that does what a button does: shown beside every action.

The one place where the console spells commands; words are quoted for a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from orbitmq.client.queue import Queue


def command(*words: str, **options: object) -> str:
    """`orbitmq` with words and options; those that are None or False are left out."""
    parts = ["orbitmq", *words]
    for name, value in options.items():
        flag = "--" + name.rstrip("_").replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            parts.append(flag)
        elif isinstance(value, list | tuple):
            for each in value:
                parts += [flag, str(each)]
        else:
            parts += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(parts)


def create_topic(
    topic: str,
    *,
    queues: int | None = None,
    write_queues: int | None = None,
    read_queues: int | None = None,
    permission: str | None = None,
    ordered: bool = False,
    is_new: bool = True,
) -> str:
    return command(
        "topic",
        "create" if is_new else "update",
        topic,
        queues=queues,
        write_queues=write_queues,
        read_queues=read_queues,
        permission=permission,
        ordered=ordered,
    )


def delete_topic(topic: str) -> str:
    return command("topic", "delete", topic)


def show_message(message_id: str, topic: str) -> str:
    return command("message", "get", message_id, topic=topic)


def show_group(group: str) -> str:
    return command("group", "show", group)


def pause_group(group: str, *, resume: bool = False) -> str:
    return command("group", "resume" if resume else "pause", group)


def show_member(group: str, client_id: str, *, stack: bool = False) -> str:
    return command("group", "member", group, client_id, stack=stack)


def reset_group(
    group: str,
    topic: str,
    *,
    to_begin: bool = False,
    to_end: bool = False,
    to_time: str | None = None,
    to_offset: int | None = None,
    by: int | None = None,
    queues: Iterable[Queue] = (),
) -> str:
    return command(
        "group",
        "reset",
        group,
        topic,
        to_begin=to_begin,
        to_end=to_end,
        to_time=to_time,
        to_offset=to_offset,
        by=by,
        queue=[f"{queue.broker}:{queue.id}" for queue in queues],
    )


def skip_backlog(group: str, topic: str | None) -> str:
    return command("group", "skip", group, *(() if topic is None else (topic,)))


def clone_group(source: str, target: str, topic: str | None) -> str:
    return command("group", "clone", source, target, topic=topic)


def list_dead_letters(group: str) -> str:
    return command("dlq", "list", group)


def resend_dead_letters(
    group: str,
    *,
    reason: str | None = None,
    topic: str | None = None,
    limit: int | None = None,
    rate: float | None = None,
    to: str = "retry",
    again: bool = False,
) -> str:
    return command(
        "dlq", "resend", group, reason=reason, topic=topic, limit=limit, rate=rate, to=to,
        again=again,
    )  # fmt: skip


def export_dead_letters(group: str, file: str) -> str:
    return command("dlq", "export", group, file)


def produce(
    topic: str,
    body: str,
    *,
    tags: str | None = None,
    keys: Iterable[str] = (),
    properties: Mapping[str, str] | None = None,
    delay: float | None = None,
) -> str:
    return command(
        "produce",
        topic,
        body,
        tag=tags,
        key=list(keys),
        property=[f"{name}={value}" for name, value in (properties or {}).items()],
        delay=None if delay is None else f"{delay:g}s",
    )
