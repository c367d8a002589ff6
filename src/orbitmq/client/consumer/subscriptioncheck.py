"""Asks brokers whether they can serve a subscription, before anything depends on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from orbitmq.client.errors import BrokerRefused, ClientError, NoRoute
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.bodies.membership import CheckClientRequest
from orbitmq.wire.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.client.engine import Engine

log = logging.getLogger(__name__)


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

    A topic that nobody serves yet is checked by whoever will serve it, with the first pull.
    """
    for subscription in subscriptions:
        if not subscription.is_by_tags:
            await _check(engine, group, subscription)


async def _check(engine: Engine, group: str, subscription: Subscription) -> None:
    body = CheckClientRequest(
        client_id=engine.client_id, group=group, subscription_data=subscription.to_data()
    )
    try:
        where = await engine.routes.broker_of(subscription.topic)
        await engine.ask(where, RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body))
    except NoRoute as error:
        log.warning(
            "the subscription of group %s to %s was not checked: %s",
            group,
            subscription.topic,
            error,
            extra={"group": group, "topic": subscription.topic},
        )
    except BrokerRefused as refused:
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
