"""Spoilt conversations with a name server: only who says such things loses a connection.

What is said to brokers in the same way: see tests/broker/test_fuzz.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random

import pytest

from orbitmq.remoting.channels import connect
from orbitmq.wire.codes import RequestCode, ResponseCode
from tests.support.fuzzing import converse_all, fuzz_seed, note_inputs, rounds
from tests.support.mutations import Corpus

SEED = fuzz_seed(20)
CONVERSATIONS = rounds(1500)
#: For the server to end a connection whose peer has said everything.
ENDS_WITHIN = 30.0


@pytest.mark.timeout(1200)
async def test_nonsense_costs_nobody_but_the_one_who_says_it(name_server, caplog):
    caplog.set_level(logging.WARNING)
    healthy = await connect(name_server.address)
    corpus, chance = Corpus(), random.Random(SEED)
    cases = (corpus.mutated(chance) for _ in range(CONVERSATIONS))
    tasks = len(asyncio.all_tasks())

    for some in iter(lambda: list(itertools.islice(cases, 200)), []):
        await converse_all(name_server.address, iter(some), ends_within=ENDS_WITHIN)
        answer = await healthy.request(RequestCode.GET_BROKER_CLUSTER_INFO, timeout=ENDS_WITHIN)
        assert answer.code == ResponseCode.SUCCESS

    assert healthy.is_open
    note_inputs(CONVERSATIONS)
    async with asyncio.timeout(ENDS_WITHIN):
        while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110  # tasks have no event
            await asyncio.sleep(0.01)
    # Whoever registered is gone with its connection.
    assert name_server.service.routes.clusters().broker_addr_table == {}
    healthy.close()
    await healthy.wait_closed()
    unexpected = [each for each in caplog.records if each.exc_info or each.name == "asyncio"]
    assert [caplog.handler.format(each)[-2000:] for each in unexpected] == []
