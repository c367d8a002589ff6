"""Routes of topics: what name servers tell clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orbitmq.client.admin.asking import Asking, Failed
from orbitmq.client.admin.errors import NotEffective
from orbitmq.client.admin.topicvalues import Permission, Route, RouteBroker
from orbitmq.remoting.address import Address
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.route import TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.namesrv import GetRouteInfoRequest

#: How long name servers may take to show a change.
VISIBLE_WITHIN = 10.0
_LOOK_AGAIN = 0.05

_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})


class TopicRoutes:
    """Looks routes up."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def look(self, topic: str, address: Address | None = None) -> TopicRouteData | None:
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        if address is None:
            answer = await self._asking.ask_name_server(code, header, accept=_FOUND_OR_NOT)
        else:
            answer = await self._asking.ask(address, code, header, accept=_FOUND_OR_NOT)
        if answer.code != ResponseCode.SUCCESS:
            return None
        return decode_body(TopicRouteData, answer.body or b"{}")

    async def until_seen(
        self,
        what: str,
        topic: str,
        problem: Callable[[TopicRouteData | None], str | None],
    ) -> None:
        """Wait until every name server that answers gives a route without a problem."""
        deadline = self._asking.clock.monotonic() + VISIBLE_WITHIN
        for address in self._asking.name_servers:
            while True:
                try:
                    found = problem(await self.look(topic, address))
                except Failed:
                    # One that is away gives routes to nobody.
                    break
                if found is None:
                    break
                if self._asking.clock.monotonic() >= deadline:
                    raise NotEffective(what, [f"name server {address}: {found}"])
                await asyncio.sleep(_LOOK_AGAIN)


def route_of(topic: str, data: TopicRouteData) -> Route:
    """What people see of a route."""
    brokers = {each.broker_name: each for each in data.broker_datas}
    return Route(
        topic,
        tuple(
            RouteBroker(
                queues.broker_name,
                brokers[queues.broker_name].cluster or "",
                dict(brokers[queues.broker_name].broker_addrs),
                queues.write_queue_nums,
                queues.read_queue_nums,
                Permission(queues.perm & 7),
            )
            for queues in sorted(data.queue_datas, key=lambda each: each.broker_name)
            if queues.broker_name in brokers
        ),
        data.order_topic_conf,
    )
