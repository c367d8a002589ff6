"""The console as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

from orbitmq.clock import Clock, SystemClock
from orbitmq.console.access import Door
from orbitmq.console.answers import not_there, told
from orbitmq.console.api.routes import api
from orbitmq.console.pages import STATIC, Static, page_routes
from orbitmq.console.parts import Parts
from orbitmq.console.settings import ConsoleSettings
from orbitmq.errors import OrbitError


def make_app(settings: ConsoleSettings, *, clock: Clock | None = None) -> Starlette:
    """An application that looks at the cluster while it runs.

    It belongs to the event loop that starts it (its lifespan); any ASGI server can run it.
    """
    parts = Parts(settings, clock or SystemClock())

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        await parts.start()
        try:
            yield
        finally:
            await parts.stop()

    app = Starlette(
        routes=[
            api,
            Mount("/static", Static(directory=STATIC)),
            *page_routes(),
        ],
        middleware=[
            Middleware(
                Door,
                logins=parts.logins,
                allowed_hosts=settings.allowed_hosts,
                token=settings.token,
            ),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5),
        ],
        exception_handlers={OrbitError: told, HTTPException: not_there},
        lifespan=running,
    )
    app.state.parts = parts
    return app
