"""Configurations of topics as single brokers have them.

Brokers of 4.9 cannot be asked for one topic: there the whole table is read.
"""

from __future__ import annotations

import msgspec

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.topology import BrokerNode
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.route import TopicList
from orbitmq.wire.bodies.topics import TopicConfig, TopicConfigDetail, TopicConfigTable
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.topics import TopicRequest

_ANSWERS = frozenset(
    {
        int(ResponseCode.SUCCESS),
        int(ResponseCode.TOPIC_NOT_EXIST),
        int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
    }
)


class TopicConfigs:
    """Reads them."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def all(self, node: BrokerNode) -> tuple[tuple[TopicConfig, ...], frozenset[str]]:
        """The topics of a broker, and the names that it calls its own."""
        return await self._table(node), await self._own(node)

    async def one(self, node: BrokerNode, topic: str) -> TopicConfig | None:
        """One topic of a broker; None when it has no such topic."""
        answer = await self._asking.ask(
            node.address, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic=topic), accept=_ANSWERS
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            configs = await self._table(node)
            return next((each for each in configs if each.topic_name == topic), None)
        fields = msgspec.structs.asdict(decode_body(TopicConfigDetail, answer.body))
        fields.pop("topic_queue_mapping_detail")
        return TopicConfig(**fields)

    async def _table(self, node: BrokerNode) -> tuple[TopicConfig, ...]:
        table = await self._asking.told(
            TopicConfigTable, node.address, RequestCode.GET_ALL_TOPIC_CONFIG
        )
        return tuple(table.topic_config_table.values())

    async def _own(self, node: BrokerNode) -> frozenset[str]:
        names = await self._asking.told(
            TopicList, node.address, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        )
        return frozenset(names.topic_list)
