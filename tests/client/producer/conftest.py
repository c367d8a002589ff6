"""A producer of the cluster."""

from __future__ import annotations

import pytest

from orbitmq.client.producer.producer import AsyncProducer


@pytest.fixture
async def producer(cluster):
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        yield producer
