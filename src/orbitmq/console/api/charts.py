"""Numbers over time, and the stream of what is new."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.console.answers import answer, number
from orbitmq.console.errors import BadInput
from orbitmq.console.events import stream
from orbitmq.console.historyfile import STEP
from orbitmq.console.parts import Parts, is_let_in, parts_of
from orbitmq.console.series import FINE, thinned

_WEEK = 7 * 24 * 60
_MOST_SERIES = 40
_POINTS = 360


async def charts(request: Request) -> Response:
    """The points of some series: `series` repeated, `minutes` back from now."""
    parts = parts_of(request)
    minutes = number(request, "minutes", 60, 1, _WEEK)
    names = request.query_params.getlist("series")
    if not 1 <= len(names) <= _MOST_SERIES:
        raise BadInput(f"1 to {_MOST_SERIES} series can be asked for, got {len(names)}")
    now = parts.clock.now()
    start = now - minutes * 60
    content = {name: thinned(await points(parts, name, start), _POINTS) for name in names}
    return answer({"from": start, "to": now, "series": content})


async def points(parts: Parts, name: str, start: float) -> list[tuple[float, float]]:
    """Coarse ones from the file up to where the fine ones begin."""
    fine = parts.fine.since(name, start)
    if start >= parts.clock.now() - FINE and fine and fine[0][0] <= start + 60:
        return fine
    begins = fine[0][0] if fine else float("inf")
    coarse = await parts.file.since(name, start)
    # A coarse point stands for what follows it: those that reach into the fine ones say it twice.
    return [point for point in coarse if point[0] + STEP <= begins] + fine


async def events(request: Request) -> Response:
    """Server-sent events: `sample` after every look, `replay`, `pipeline`, `audit`."""
    return stream(parts_of(request).events.listen(), is_let_in(request))


routes = [Route("/charts", charts), Route("/events", events)]
