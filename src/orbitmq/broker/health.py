"""Whether a broker is alive and can be used, as orchestrators ask.

`/healthz` says that the process lives and its loop turns: one that does not answer should be
started again. That is also true while the store is opened, after a crash perhaps for long; then it
says "starting". `/readyz` says whether to send clients here: not while messages cannot be stored,
nor what is known about topics, groups and their progress: a restart would forget it. Nor as long as
no name server knows the broker, or one lists another by its name. A restart mends none of it, and
it ends by itself with its cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus

from orbitmq.broker.endpoint import Answer, Page, json_answer
from orbitmq.broker.metrics import CONTENT_TYPE, Metrics
from orbitmq.broker.parts import Parts

#: A loop that needs longer than this for one round, in seconds, serves nobody.
SLOWEST_ROUND = 5.0

_STARTING = "the broker is starting"


def pages_of(parts: Callable[[], Parts | None]) -> Mapping[str, Page]:
    """The pages of a broker, whose parts are there when it is started."""
    metrics: list[tuple[Parts, Metrics]] = []

    async def show_metrics() -> Answer:
        current = parts()
        if current is None:
            return _not_ready([_STARTING])
        if not metrics or metrics[0][0] is not current:
            metrics[:] = [(current, Metrics(current))]
        return Answer(HTTPStatus.OK, await metrics[0][1].text(), CONTENT_TYPE)

    async def show_readiness() -> Answer:
        current = parts()
        reasons = [_STARTING] if current is None else why_not_ready(current)
        return _not_ready(reasons) if reasons else json_answer(HTTPStatus.OK, {"status": "ready"})

    async def show_health() -> Answer:
        return await _health("starting" if parts() is None else "alive")

    return {"/healthz": show_health, "/readyz": show_readiness, "/metrics": show_metrics}


def why_not_ready(parts: Parts) -> list[str]:
    """What keeps the broker from being used; nothing when it can be."""
    reasons = []
    refusal = parts.store.statistics().refusal
    if refusal:
        reasons.append(f"messages cannot be stored: {refusal}")
    reasons += [each.problem for each in parts.config_files if each.problem is not None]
    registration = parts.registration
    if registration.name_servers and not registration.is_registered:
        tried = ", ".join(map(str, registration.name_servers))
        reasons.append(f"no name server knows this broker yet; told are {tried}")
    reasons += registration.conflicts
    accept_from = parts.settings.send.accept_from
    if accept_from > parts.clock.now():
        reasons.append(f"messages are accepted from {accept_from:.3f} on (seconds since the epoch)")
    return reasons


async def _health(status: str) -> Answer:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await asyncio.sleep(0)
    took = loop.time() - begin
    if took > SLOWEST_ROUND:
        return json_answer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            {"status": "slow", "reasons": [f"one round of the event loop took {took:.1f} s"]},
        )
    return json_answer(HTTPStatus.OK, {"status": status, "loopSeconds": round(took, 6)})


def _not_ready(reasons: list[str]) -> Answer:
    return json_answer(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "reasons": reasons})
