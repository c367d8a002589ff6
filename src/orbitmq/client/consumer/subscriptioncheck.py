"""Asks brokers whether they can serve a subscription, before anything depends on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import BrokerRefused, ClientError, NoRoute
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.bodies.membership import CheckClientRequest
from orbitmq.wire.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.client.engine import Engine

log = logging.getLogger(__name__)

#: Seconds before a broker that is busy is asked again; twice as long each time.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0


class SubscriptionRefused(ClientError):
    """A broker cannot serve a subscription: it does not understand it, or does not filter so."""

    def __init__(self, topic: str, expression: str, reason: str) -> None:
        self.topic = topic
        self.expression = expression
        self.reason = reason
        super().__init__(f"the broker refuses {expression!r} for topic {topic!r}: {reason}")


async def check_subscriptions(
    engine: Engine, group: str, subscriptions: Iterable[Subscription]
) -> None:
    """Have one broker of each topic look at what is not about tags. Raises `SubscriptionRefused`.

    A topic that nobody serves yet is checked by whoever will serve it, with the first pull; so is
    one whose broker is busy for longer than a request may take (`request_timeout`).
    """
    for subscription in tuple(subscriptions):
        if not subscription.is_by_tags:
            await _check(engine, group, subscription)


async def _check(engine: Engine, group: str, subscription: Subscription) -> None:
    body = CheckClientRequest(
        client_id=engine.client_id, group=group, subscription_data=subscription.to_data()
    )
    try:
        await _ask(engine, subscription.topic, encode_body(body))
    except NoRoute as error:
        _was_not_checked(group, subscription.topic, error)
    except BrokerRefused as refused:
        if refused.code == ResponseCode.SYSTEM_BUSY:
            _was_not_checked(group, subscription.topic, refused)
            return
        if refused.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            log.info(
                "the broker of %s is too old to check the subscription of group %s",
                subscription.topic,
                group,
                extra={"group": group, "topic": subscription.topic},
            )
            return
        reason = refused.remark or refused.name
        raise SubscriptionRefused(subscription.topic, subscription.expression, reason) from refused


async def _ask(engine: Engine, topic: str, body: bytes) -> None:
    """Ask a broker of a topic until it is not busy, for as long as a request may take."""
    until = engine.clock.monotonic() + engine.settings.request_timeout
    pause = _FIRST_PAUSE
    while True:
        where = await engine.routes.broker_of(topic)
        try:
            await engine.ask(where, RequestCode.CHECK_CLIENT_CONFIG, body=body)
        except BrokerRefused as refused:
            is_busy = refused.code == ResponseCode.SYSTEM_BUSY
            if not is_busy or engine.clock.monotonic() + pause > until:
                raise
        else:
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _was_not_checked(group: str, topic: str, why: ClientError) -> None:
    log.warning(
        "the subscription of group %s to %s was not checked: %s",
        group,
        topic,
        why,
        extra={"group": group, "topic": topic},
    )
