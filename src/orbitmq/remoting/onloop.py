"""A call that any thread leaves to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object
) -> None:
    """Have the loop call it soon; nothing happens when the loop is closed already."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise  # not of the loop: what interrupts a thread can have any type
