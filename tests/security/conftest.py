"""Fixtures of the tests of security: those of the broker."""

from __future__ import annotations

from tests.broker.conftest import broker, open_client, start_broker, started

__all__ = ["broker", "open_client", "start_broker", "started"]
