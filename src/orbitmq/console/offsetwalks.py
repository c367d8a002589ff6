"""Walking a queue from an offset on: what the page and `orbitmq message browse --offset` share."""

from __future__ import annotations

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.browsing import Cursor, Stretch
from orbitmq.client.admin.errors import BadRequest
from orbitmq.client.queue import Queue


async def cursor_at(
    admin: AsyncAdmin,
    queue: Queue,
    offset: int,
    *,
    newest_first: bool,
    expression: str,
    expression_type: str,
) -> str:
    """The cursor of a walk that begins at an offset, onwards or back. Raises `BadRequest`."""
    status = await admin.topics.status(queue.topic)
    place = next((each for each in status.queues if each.queue == queue), None)
    if place is None:
        raise BadRequest(f"topic {queue.topic!r} has no queue {queue.broker}:{queue.id}")
    if place.min_offset == place.max_offset:
        raise BadRequest(f"queue {queue.broker}:{queue.id} of {queue.topic!r} is empty")
    if not place.min_offset <= offset < place.max_offset:
        raise BadRequest(
            f"queue {queue.broker}:{queue.id} has the offsets {place.min_offset} to "
            f"{place.max_offset - 1}, not {offset}"
        )
    start, end = (place.min_offset, offset + 1) if newest_first else (offset, place.max_offset)
    stretch = Stretch(queue.broker, queue.id, start, end)
    return Cursor(queue.topic, newest_first, expression, expression_type, (stretch,)).text
