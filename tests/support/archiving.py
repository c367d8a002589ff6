"""A real pipeline beside a console: the ready one that archives a topic, as its own process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.command import environment
from tests.support.consoles import Browser
from tests.support.orbitmqcli import Running

#: Seconds until Spark has written its first batch, on a crowded machine.
PATIENCE = 180.0


@contextlib.asynccontextmanager
async def archiving(
    console: Browser, name_server: str, topic: str, name: str, folder: Path
) -> AsyncIterator[None]:
    """Archive a topic, to which messages must come; the console has heard of batches by then."""
    words = (
        *("pipeline", "run", "archive", "--name", name, "--json", "--trigger", "2s"),
        *("-o", f"topic={topic}", "-o", f"path={folder / 'lake'}"),
        *("--checkpoint", str(folder / "checkpoint"), "--spark-log", str(folder / "spark.log")),
        *("--master", "local[1]", "--console", console.console.url),
    )
    running = Running(words, environment({"ORBITMQ_NAME_SERVER": name_server}))
    try:
        async with asyncio.timeout(PATIENCE):
            while not any(
                _has_read(each, name) for each in (await console.get("/pipelines"))["pipelines"]
            ):
                assert running.process.poll() is None, running.errors
                await asyncio.sleep(0.2)
            # Its group is known when it has reported progress for the first time.
            group = f"/groups?search=archive-{topic}"
            while not (await console.get(group))["total"]:
                assert running.process.poll() is None, running.errors
                await asyncio.sleep(0.2)
        yield
    finally:
        # It tells the console, which is on this loop, how it ended.
        await asyncio.to_thread(_end, running)


def _has_read(pipeline: Mapping[str, Any], name: str) -> bool:
    return pipeline["name"] == name and (pipeline["batch"] or 0) > 0


def _end(running: Running) -> None:
    with running:
        running.stop(signal.SIGTERM)
