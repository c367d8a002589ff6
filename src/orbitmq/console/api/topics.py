"""Topics: the list, one topic, changes, and a test message."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin.topics import Permission, Topic, TopicStatus
from orbitmq.client.message import Message
from orbitmq.client.routes import Queue
from orbitmq.console.collect import TopicSample
from orbitmq.console.http import Row, answer, pick, read_body, window
from orbitmq.console.roles import Right
from orbitmq.console.settings import BadInput
from orbitmq.console.state import actor_of, check_right, state_of
from orbitmq.console.words import Action

_COLUMNS = (
    "name", "kind", "queues", "in_rate", "messages", "lag", "groups", "span", "last_stored_at",
)  # fmt: skip


class TopicChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings for a new or a changed topic."""

    name: str = ""
    queues: int | None = None
    write_queues: int | None = None
    read_queues: int | None = None
    permission: str | None = None
    #: None: unchanged, or the default.
    ordered: bool | None = None
    #: Return the command only.
    dry_run: bool = False


def topic_row(sample: TopicSample) -> dict[str, Any]:
    topic = sample.topic
    worst = sample.worst
    return pick(
        sample,
        "name in_rate messages first_stored_at last_stored_at",
        kind=topic.kind,
        queues=topic.read_queues,
        permission=_permission(topic),
        span=_span(sample),
        lag=sum(sample.groups.values()),
        groups=len(sample.groups),
        worst_group=worst[0] if worst and worst[1] else None,
        worst_lag=worst[1] if worst else 0,
    )


def _span(sample: TopicSample) -> float | None:
    """Seconds between the oldest and the newest message; None: the topic is empty."""
    if sample.first_stored_at is None or sample.last_stored_at is None:
        return None
    return max(0.0, sample.last_stored_at - sample.first_stored_at)


def _permission(topic: Topic) -> str:
    """The permission, or several where brokers differ."""
    return "/".join(dict.fromkeys(part.permission.letters for part in topic.brokers))


def _is_kind(row: Row, choice: str) -> bool:
    if choice == "own":
        return row["kind"] not in ("retry", "dlq", "system")
    return bool(row["kind"] == choice)


async def topics(request: Request) -> Response:
    """The list; `filter` is a kind, or `own` for those of applications."""
    snapshot = state_of(request).snapshot
    rows = map(topic_row, snapshot.topics.values())
    content = window(request, rows, columns=_COLUMNS, default="name", matches=_is_kind)
    return answer({**content, "at": snapshot.at})


async def topic(request: Request) -> Response:
    """One topic: its queues, its groups, and its configuration on each broker."""
    state = state_of(request)
    name = request.path_params["topic"]
    found = await state.admin.topics.get(name)
    status = await state.admin.topics.status(name)
    snapshot = state.collector.snapshot
    sample = None if snapshot is None else snapshot.topics.get(name)
    groups = await state.admin.topics.groups(name)
    rates = {} if snapshot is None else {
        group: part
        for group in groups
        if group in snapshot.groups
        for part in snapshot.groups[group].parts
        if part.topic == name
    }  # fmt: skip
    return answer(
        {
            "name": name,
            "kind": found.kind,
            "permission": _permission(found),
            "is_ordered": any(part.is_ordered for part in found.brokers),
            "brokers": found.brokers,
            "queues": _queues(status),
            "messages": status.messages,
            "first_stored_at": status.first_stored_at,
            "last_stored_at": status.last_stored_at,
            "in_rate": status.in_rate if sample is None else sample.in_rate,
            "groups": [
                {
                    "name": group,
                    "lag": rates[group].lag if group in rates else None,
                    "lag_seconds": rates[group].lag_seconds if group in rates else None,
                    "out_rate": rates[group].out_rate if group in rates else None,
                    "pace": None if snapshot is None or group not in snapshot.groups
                    else snapshot.groups[group].pace,
                }
                for group in groups
            ],
            "commands": {
                "delete": state.command(Action.DELETE_TOPIC, name),
                "update": state.command(
                    Action.UPDATE_TOPIC,
                    name,
                    queues=max((part.write_queues for part in found.brokers), default=8),
                ),
            },
            "unreachable": status.unreachable,
        }
    )  # fmt: skip


def _queues(status: TopicStatus) -> list[dict[str, Any]]:
    names = "min_offset max_offset messages first_stored_at last_stored_at"
    return [pick(each, names, **pick(each.queue, "broker id")) for each in status.queues]


def queue_named(topic: str, text: str) -> Queue:
    """The queue of a topic that is named like `broker-a:3`."""
    broker, _, number = text.rpartition(":")
    return Queue(topic, broker, int(number) if number.isdecimal() else -1)


async def create(request: Request) -> Response:
    """Make a topic: `name`, `queues` or `write_queues` and `read_queues`, `permission`, `ordered`.

    With `dry_run` the answer has the command only.
    """
    change = await read_body(request, TopicChange)
    return await _apply(request, change.name, change, is_new=True)


async def update(request: Request) -> Response:
    """Change a topic; what is not given stays."""
    change = await read_body(request, TopicChange)
    return await _apply(request, request.path_params["topic"], change, is_new=False)


async def _apply(request: Request, name: str, change: TopicChange, *, is_new: bool) -> Response:
    state = state_of(request)
    permission = None if change.permission is None else Permission.of(change.permission).letters
    command = state.command(
        Action.CREATE_TOPIC if is_new else Action.UPDATE_TOPIC,
        name,
        queues=change.queues,
        write_queues=change.write_queues,
        read_queues=change.read_queues,
        permission=permission,
        ordered=change.ordered,
        unordered=change.ordered is False,
    )
    if change.dry_run:
        return answer({"command": command})
    check_right(request, Right.TOPICS, command)
    topics = state.admin.topics
    if is_new:
        made = await topics.create(
            name,
            queues=8 if change.queues is None else change.queues,
            write_queues=change.write_queues,
            read_queues=change.read_queues,
            permission=permission or "rw",
            ordered=bool(change.ordered),
        )
    else:
        made = await topics.update(
            name,
            queues=change.queues,
            write_queues=change.write_queues,
            read_queues=change.read_queues,
            permission=permission,
            ordered=change.ordered,
        )
    outcome = (
        f"{made.write_queues} queues to write, {made.read_queues} to read, {_permission(made)}"
    )
    await state.audit.note(actor_of(request), command, outcome)
    state.collector.look_soon()
    return answer({"command": command, "outcome": outcome, "brokers": made.brokers})


async def delete(request: Request) -> Response:
    """Delete a topic, with its messages and the progress in it."""
    state = state_of(request)
    name = request.path_params["topic"]
    command = state.command(Action.DELETE_TOPIC, name)
    check_right(request, Right.TOPICS, command)
    await state.admin.topics.delete(name)
    await state.audit.note(actor_of(request), command, "deleted")
    state.collector.look_soon()
    return answer({"command": command, "outcome": "deleted"})


class SendRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to send."""

    topic: str
    body: str = ""
    #: Instead of `body`, for what is not text.
    body_base64: str | None = None
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    #: Seconds until it is delivered.
    delay: float | None = None
    #: `broker-a:3`; none: any.
    queue: str | None = None
    dry_run: bool = False


async def send(request: Request) -> Response:
    """Send a message and answer where it is stored; with `dry_run` only the command."""
    state = state_of(request)
    wanted = await read_body(request, SendRequest)
    message = Message(
        wanted.topic,
        _body(wanted),
        tags=wanted.tags or None,
        keys=wanted.keys,
        properties=wanted.properties,
        delay=wanted.delay or None,
    )
    command = state.command(
        Action.PRODUCE,
        wanted.topic,
        wanted.body,
        tag=wanted.tags or None,
        keys=wanted.keys,
        property=wanted.properties,
        delay=f"{wanted.delay:g}s" if wanted.delay else None,
    )
    if wanted.dry_run:
        return answer({"command": command})
    check_right(request, Right.SEND, command)
    result = await state.producer.send(message, queue=_queue(wanted))
    await state.audit.note(
        actor_of(request),
        state.command(Action.PRODUCE, wanted.topic),
        f"sent as {result.msg_id} to {result.queue}",
    )
    state.collector.look_soon(configuration=False)
    return answer(
        {
            "command": command,
            "status": result.status.name.lower(),
            "id": result.msg_id,
            "offset_id": result.offset_id,
            "broker": result.queue.broker,
            "queue": result.queue.id,
            "offset": result.queue_offset,
            "topic": wanted.topic,
        }
    )


def _body(wanted: SendRequest) -> bytes:
    if wanted.body_base64 is None:
        return wanted.body.encode()
    try:
        return base64.b64decode(wanted.body_base64, validate=True)
    except binascii.Error as error:
        raise BadInput("body_base64 is not base64") from error


def _queue(wanted: SendRequest) -> Queue | None:
    if not wanted.queue:
        return None
    broker, _, number = wanted.queue.rpartition(":")
    if not number.isdecimal():
        raise BadInput(f"a queue is named like broker-a:3, got {wanted.queue[:80]!r}")
    return Queue(wanted.topic, broker, int(number))


routes = [
    Route("/topics", topics, methods=["GET"]),
    Route("/topics", create, methods=["POST"]),
    Route("/topics/{topic}", topic, methods=["GET"]),
    Route("/topics/{topic}", update, methods=["PATCH"]),
    Route("/topics/{topic}", delete, methods=["DELETE"]),
    Route("/send", send, methods=["POST"]),
]
