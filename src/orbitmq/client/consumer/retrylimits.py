"""How often a message of a group may be tried, as a broker has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.topics import GroupRequest

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine


async def retries_allowed(engine: Engine, group: str, broker: str, *, timeout: float) -> int:  # noqa: ASYNC109
    """The retries that a broker allows a group, which Apache's makes by being asked for it.

    Raises `OrbitError` where it cannot be had: the broker is away or has no such group, or the
    account may not ask.
    """
    answer = await engine.ask(
        engine.routes.master(broker),
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        GroupRequest(group=group),
        timeout=timeout,
    )
    # Below 0, nothing is tried again either.
    return max(0, decode_body(SubscriptionGroupConfig, answer.body).retry_max_times)
