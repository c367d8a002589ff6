"""Long answers, made in steps and written by a thread, while others are served.

Looking at tens of thousands of queues, and writing what was found as JSON, takes a good part of a
second. The values are frozen, so a thread may write them; only the interpreter's lock is shared, in
slices of a few milliseconds.
"""

from __future__ import annotations

import asyncio

from orbitmq.wire.bodies.base import Body, encode_body
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.base import Header

#: Entries from which an answer is long; shorter ones are written in less than 2 ms.
LONG = 250
#: Entries that are looked at before others may run; likewise.
STEP = 250


class Steps:
    """Lets others run from time to time."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries = 0

    async def did(self, entries: int) -> None:
        """So much is done; if it is enough for a step, it is others' turn."""
        self._entries += entries
        if self._entries >= STEP:
            self._entries = 0
            await asyncio.sleep(0)


async def answered(
    request: Command,
    body: Body,
    header: Header | None = None,
    *,
    entries: int,
    remark: str | None = None,
) -> Command:
    """A success with a body of so many entries."""
    if entries < LONG:
        encoded = encode_body(body)
    else:
        encoded = await asyncio.to_thread(encode_body, body)
    return request.answer(ResponseCode.SUCCESS, header, remark=remark, body=encoded)
