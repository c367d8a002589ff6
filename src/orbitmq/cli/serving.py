"""Runs a service from its start to the signal that ends it.

The first Ctrl-C or SIGTERM stops cleanly: what was asked is answered, everything is saved. While
the service is still starting nothing was asked, and it gives the start up: the repair of a store
begins anew the next time. A second signal ends the process at once; what was acknowledged is as
safe as after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from orbitmq.cli.errors import CommandError
from orbitmq.cli.schema import Loop
from orbitmq.store.descriptors import raise_descriptor_limit

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: What a shell reports for a program that Ctrl-C ended.
_HURRIED = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class Listening:
    """Something that clients can connect to now."""

    role: str  #: `name server`, `broker`, `second port`, `replication` or `metrics`
    name: str
    address: str
    folder: str | None = None


class Service(Protocol):
    """What can be started, told about, and stopped."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def listening(self) -> Sequence[Listening]: ...

    async def until_failed(self) -> CommandError:
        """Returns when a part of it has ended by itself."""

    def kill(self) -> None:
        """End at once what would outlive this process."""


def serve(
    service: Service,
    loop: Loop,
    announce: Callable[[Sequence[Listening]], None],
    *,
    stops_with_input: bool = False,
) -> None:
    """Run until a signal comes; raises what made it end otherwise."""
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=_factory(loop)) as runner:
        runner.run(_serve(service, announce, stops_with_input=stops_with_input))


async def _serve(
    service: Service,
    announce: Callable[[Sequence[Listening]], None],
    *,
    stops_with_input: bool,
) -> None:
    loop = asyncio.get_running_loop()
    wanted = asyncio.Event()

    def stop() -> None:
        if wanted.is_set():
            _hurry(service)
        wanted.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    if stops_with_input:
        _watch_input(loop, wanted.set)
    if not await _started(wanted, service):
        log.info("stopped while starting")
        return
    try:
        if not wanted.is_set():
            announce(service.listening())
        failure = await _first(wanted, service)
    finally:
        await service.stop()
    if failure is not None:
        raise failure


async def _started(wanted: asyncio.Event, service: Service) -> bool:
    """Start it; whether it is started: not if the wish to stop came first. Raises what it does."""
    stop = asyncio.create_task(wanted.wait())
    start = asyncio.create_task(service.start())
    await asyncio.wait((stop, start), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.wait((start,))
    stop.cancel()
    if start.cancelled():
        return False
    start.result()
    return True


async def _first(wanted: asyncio.Event, service: Service) -> CommandError | None:
    """Wait for the wish to stop, or for the failure that is returned."""
    stop = asyncio.create_task(wanted.wait())
    failed = asyncio.create_task(service.until_failed())
    await asyncio.wait((stop, failed), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if failed.done():
        return failed.result()
    failed.cancel()
    return None


def _watch_input(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    """Stop when standard input ends: whoever started this process holds its other side."""

    def look() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended()

    loop.add_reader(0, look)


def _hurry(service: Service) -> NoReturn:
    service.kill()
    sys.stderr.write("orbitmq: ended without saving; the next start repairs what is open\n")
    sys.stderr.flush()
    os._exit(_HURRIED)


def _factory(loop: Loop) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop is Loop.ASYNCIO:
        return asyncio.new_event_loop
    try:
        import uvloop  # noqa: PLC0415  # an extra
    except ImportError:
        if loop is Loop.UVLOOP:
            raise CommandError(
                "run.loop is uvloop, which is not installed; pip install 'orbitmq[speed]'"
            ) from None
        return asyncio.new_event_loop
    return uvloop.new_event_loop
