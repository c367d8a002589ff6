"""Settings of groups as single brokers have them."""

from __future__ import annotations

from collections.abc import Iterable

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.errors import GroupNotFound
from orbitmq.client.admin.groupvalues import GroupSettings
from orbitmq.client.admin.topology import BrokerNode
from orbitmq.client.names import check_group
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig, SubscriptionGroupTable
from orbitmq.wire.codes import RequestCode


class GroupConfigs:
    """Reads and writes them."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def all(self, node: BrokerNode) -> dict[str, SubscriptionGroupConfig]:
        """All groups of a broker."""
        # Asked for a single group, Apache's broker creates it: the table is read instead.
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await self._asking.told(SubscriptionGroupTable, node.address, code)
        return table.subscription_group_table

    async def of(
        self, nodes: Iterable[BrokerNode], group: str
    ) -> dict[BrokerNode, SubscriptionGroupConfig]:
        """Where a group is, and how it is configured there. Raises `GroupNotFound`."""
        check_group(group)
        outcomes = await self._asking.each(nodes, self.all)
        found = {node: table[group] for node, table in outcomes.done.items() if group in table}
        if not found:
            outcomes.check(f"looking group {group!r} up")
            raise GroupNotFound(group)
        return found

    async def put(self, node: BrokerNode, config: SubscriptionGroupConfig) -> None:
        """Make or change a group on a broker."""
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._asking.ask(node.address, code, body=encode_body(config))


def group_settings(config: SubscriptionGroupConfig) -> GroupSettings:
    """What people see of a configuration."""
    return GroupSettings(
        group=config.group_name,
        is_enabled=config.consume_enable,
        may_broadcast=config.consume_broadcast_enable,
        may_start_at_min=config.consume_from_min_enable,
        is_orderly=config.consume_message_orderly,
        retry_queues=config.retry_queue_nums,
        max_retries=config.retry_max_times,
        consume_timeout=config.consume_timeout_minute * 60.0,
        notifies_members=config.notify_consumer_ids_changed_enable,
        attributes=dict(config.attributes),
    )


def compared(config: SubscriptionGroupConfig) -> tuple[object, ...]:
    """What is compared among brokers, and after a change; 4.9 knows neither timeouts nor order."""
    return (
        config.consume_enable,
        config.consume_broadcast_enable,
        config.retry_queue_nums,
        config.retry_max_times,
    )
