"""What all fuzzers share."""

from __future__ import annotations

import os

import pytest

from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from tests.support.repeating import tell_how_to_repeat


@pytest.fixture(autouse=True)
def repetition(request):
    seed = getattr(request.module, "SEED", None)
    if seed is not None:
        rounds = os.environ.get("ORBITMQ_ROUNDS", "200")
        tell_how_to_repeat(request, ORBITMQ_FUZZ_SEED=seed, ORBITMQ_ROUNDS=rounds)


@pytest.fixture
async def name_server():
    server = NameServer(NameServerSettings(server=ServerSettings(port=0)))
    await server.start()
    yield server
    await server.stop(grace=0)
