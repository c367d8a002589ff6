"""A cluster of its own for a measurement: a process beside this one, gone with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator

from orbitmq.cli.errors import CommandError

_START_DEADLINE = 60.0
_STOP_DEADLINE = 20.0


@contextlib.asynccontextmanager
async def embedded_cluster() -> AsyncIterator[str]:
    """Where the name server of a new cluster listens. Its data is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="orbitmq-bench-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orbitmq.cli", "up", "--json", "--data", folder),
            *("--namesrv-port", "0", "--broker-port", "0"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Settings of this person's own brokers are not meant.
            env={k: v for k, v in os.environ.items() if not k.startswith("ORBITMQ_")},
            # Ctrl-C on the terminal is for this process, which then stops that one.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_DEADLINE):
                address = await _name_server(process)
        except TimeoutError:
            await _end(process)
            raise CommandError(
                f"the broker to measure was not ready within {_START_DEADLINE:g} s"
            ) from None
        except BaseException:
            await _end(process)
            raise
        try:
            yield address
        finally:
            await _end(process)


async def _name_server(process: asyncio.subprocess.Process) -> str:
    address = ""
    if process.stdout is not None:
        async for line in process.stdout:
            told = json.loads(line)
            if told["event"] == "ready":
                return address
            if told.get("role") == "name server":
                address = str(told["address"])
    raise CommandError("the broker to measure ended by itself before it was ready")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_DEADLINE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
