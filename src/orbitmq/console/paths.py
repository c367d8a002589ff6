"""One message's path: when it was sent, stored, given to groups and finished, as far as known.

What everybody knows is in the message itself and in its copies. What only the clients know, how
long a handler took and whether it failed, is in the trace topic when they write there, as Java's do
with `enableMsgTrace`: records end with U+0002 and their fields with U+0001. Clients of ours trace
with OpenTelemetry instead, whose context travels with the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from orbitmq.client.admin import AsyncMessages, Track
from orbitmq.client.errors import ClientError
from orbitmq.client.received import ReceivedMessage
from orbitmq.console.words import several

TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
#: The header in which W3C's trace context travels.
TRACE_CONTEXT = "traceparent"
#: Records that are read of one message; each attempt of each group makes two.
_MOST_RECORDS = 200
_RECORD, _FIELD = "\x02", "\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something that happened to a message."""

    at: float
    what: str
    #: A host, a queue or a client's group.
    where: str = ""
    group: str | None = None
    #: Seconds that it took; None: not known.
    took: float | None = None
    is_bad: bool = False


def known_steps(message: ReceivedMessage, tracks: Iterable[Track]) -> Iterator[Step]:
    """What the message and its copies tell."""
    yield Step(at=message.born_at, what="sent", where=_host(message.stored.born_host))
    is_copy = message.reconsume_times > 0
    yield Step(
        at=message.stored_at,
        what="this copy stored" if is_copy else "stored",
        where=str(message.queue),
        took=None if is_copy else max(0.0, message.stored_at - message.born_at),
    )
    for track in tracks:
        copy = track.copy
        if copy is not None and copy.offset_id != message.offset_id:
            yield Step(
                at=copy.stored_at,
                what=f"{track.fate.value}, after {several(track.failures, 'attempt')}",
                where=str(copy.queue),
                group=track.group,
                is_bad=track.fate.name == "DEAD",
            )


async def traced_steps(messages: AsyncMessages, message: ReceivedMessage) -> list[Step]:
    """What clients wrote into the trace topic; nothing where there is none."""
    steps: list[Step] = []
    seen = 0
    try:
        async with aclosing(messages.by_key(TRACE_TOPIC, message.msg_id)) as found:
            async for each in found:
                seen += 1
                steps += parsed(each.text(), message.msg_id)
                if seen == _MOST_RECORDS:
                    break
    except ClientError:
        # No such topic, or what is in it is no trace: the message itself tells enough.
        return steps
    return steps


def parsed(text: str, message_id: str) -> Iterator[Step]:
    """The records about a message. A batch of records has those of others, too.

    A receipt of a handler (SubAfter) of older clients has neither time nor group.
    """
    begun: dict[str, tuple[float, str]] = {}
    for record in text.split(_RECORD):
        kind, *fields = record.split(_FIELD)
        try:
            match kind:
                case "Pub" if fields[4] == message_id:
                    took, is_ok = int(fields[9]) / 1000, fields[-1] != "false"
                    yield Step(
                        at=int(fields[0]) / 1000,
                        what="send began" if is_ok else "send failed",
                        where=f"by {fields[2]}",
                        took=took,
                        is_bad=not is_ok,
                    )
                case "SubBefore" if fields[4] == message_id:
                    at, group, again = int(fields[0]) / 1000, fields[2], int(fields[5])
                    begun[fields[3]] = (at, group)
                    what = f"given to a handler, attempt {again + 1}"
                    yield Step(at=at, what=what, group=group)
                case "SubAfter" if fields[1] == message_id:
                    took, is_ok = int(fields[2]) / 1000, fields[3] == "true"
                    known = begun.get(fields[0])
                    if len(fields) >= 8 and fields[6].isdecimal():
                        at, group = int(fields[6]) / 1000, fields[7]
                    elif known is not None:
                        at, group = known[0] + took, known[1]
                    else:
                        continue
                    yield Step(
                        at=at,
                        what="finished" if is_ok else "handler failed",
                        group=group,
                        took=took,
                        is_bad=not is_ok,
                    )
        except (ValueError, IndexError):
            # Another client's way of writing it.
            continue


def _host(host: tuple[object, ...]) -> str:
    return ":".join(map(str, host))
