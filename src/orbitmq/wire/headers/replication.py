"""Between brokers of one group."""

from __future__ import annotations

from orbitmq.wire.headers.base import Header, Int64


class ExchangeHAInfo(Header, frozen=True, kw_only=True, gc=False):
    """EXCHANGE_BROKER_HA_INFO, both ways."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class ResetMasterFlushOffsetRequest(Header, frozen=True, kw_only=True, gc=False):
    """RESET_MASTER_FLUSH_OFFSET."""

    master_flush_offset: Int64
