"""Whole conversations with a server, each over a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from orbitmq.remoting.settings import Address
from orbitmq.wire.command import decode_command
from orbitmq.wire.frame import FrameReader

AT_ONCE = 16


async def converse_all(address: Address, cases: Iterator[bytes], *, ends_within: float) -> None:
    """Say them all, some at a time; fails when the server does not end one of them in time."""

    async def one_after_the_other() -> None:
        for case in cases:
            await _converse(address, case, ends_within)

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


async def _converse(address: Address, case: bytes, ends_within: float) -> None:
    """Say something, and listen until the server has ended the connection."""
    reader, writer = await asyncio.open_connection(*address)
    answers = FrameReader()
    try:
        async with asyncio.timeout(ends_within):
            with contextlib.suppress(ConnectionError):
                writer.write(case)
                writer.write_eof()
                while heard := await reader.read(65_536):
                    for frame in answers.feed(heard):
                        decode_command(frame)
    except TimeoutError:
        pytest.fail(f"the connection was not ended after {case!r}")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
