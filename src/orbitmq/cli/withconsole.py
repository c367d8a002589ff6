"""A cluster with the web console beside it, in the same process: `orbitmq up --console`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orbitmq.cli.errors import CommandError
from orbitmq.cli.serving import Listening, Service
from orbitmq.client.settings import ClientSettings

if TYPE_CHECKING:
    from orbitmq.cli.console import ConsoleService


class WithConsole:
    """A service, and a console that shows it. The console is on loopback, and shows only."""

    def __init__(
        self,
        service: Service,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        history: Path | None = None,
    ) -> None:
        """Raises `CommandError` when what a console needs is not installed.

        That is found out here and not at the start, which makes folders and opens stores. `history`
        is the file in which the console keeps seven days.
        """
        self._service = service
        self._make = _maker(port, tls, history)
        self._console: ConsoleService | None = None

    async def start(self) -> None:
        await self._service.start()
        try:
            console = self._make(self._name_server())
            await console.start()
        except BaseException:
            await self._service.stop()
            raise
        self._console = console

    async def stop(self) -> None:
        console, self._console = self._console, None
        try:
            if console is not None:
                await console.stop()
        finally:
            await self._service.stop()

    def listening(self) -> Sequence[Listening]:
        shown = () if self._console is None else self._console.listening()
        return (*self._service.listening(), *shown)

    async def until_failed(self) -> CommandError:
        waiting = [asyncio.create_task(self._service.until_failed())]
        if self._console is not None:
            waiting.append(asyncio.create_task(self._console.until_failed()))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    def kill(self) -> None:
        self._service.kill()

    def _name_server(self) -> str:
        return next(
            each.address for each in self._service.listening() if each.role == "name server"
        )


def _maker(
    port: int, tls: ssl.SSLContext | None, history: Path | None
) -> Callable[[str], ConsoleService]:
    """What makes a console of a name server, once its address is known."""
    try:
        # Late: an extra of its own, and slow to import.
        from orbitmq.cli.console import ConsoleService  # noqa: PLC0415
        from orbitmq.console.settings import ConsoleSettings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the console needs {error.name}, which is not there; pip install 'orbitmq[console]'"
        ) from error

    def make(name_server: str) -> ConsoleService:
        client = ClientSettings(name_servers=(name_server,), tls=tls)
        settings = ConsoleSettings(client=client, port=port, history=history)
        # A cluster must not stay down because its console cannot remember.
        return ConsoleService(settings, "--console-port", needs_history=False)

    return make
