"""No answer has a `%` in its remark: clients that hand remarks to `printf` end at one.

Retry and dead-letter topics have one in their names, and whatever a client sends may have it too.
Every request is made with such names in every field and in its body.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import Address, RequestTimedOut
from orbitmq.wire.codes import RequestCode
from tests.support.wire import BODIES, HEADERS

NAMES = ("%RETRY%billing", "%DLQ%billing", "50%s%n", "%")
#: How long an answer is waited for.
PATIENCE = 2.0


def _fields(name: str) -> dict[str, str]:
    """Every field there is: a name where a text is expected, else a number."""
    return {
        field.encode_name: name if "str" in str(field.type) else "1"
        for kind in HEADERS
        for field in msgspec.structs.fields(kind)
    } | dict.fromkeys("abci", name)


def _bodies(name: str) -> Iterator[bytes]:
    """Nothing, no JSON, and every body there is with that name in it."""
    yield b""
    yield name.encode()
    yield json.dumps([name]).encode()
    whole: dict[str, Any] = {}
    for kind in BODIES:
        for field in msgspec.structs.fields(kind):
            if "str" in str(field.type) and "dict" not in str(field.type):
                is_list = "tuple" in str(field.type)
                whole[field.encode_name] = [name] if is_list else name
    subscription = {"topic": name, "subString": name, "expressionType": name}
    group = {"groupName": name, "subscriptionDataSet": [subscription]}
    queue = {"topic": name, "brokerName": name, "queueId": 0}
    whole |= {
        "mqSet": [queue],
        "consumerDataSet": [group],
        "producerDataSet": [group],
        "subscriptionData": subscription,
        "topicConfigTable": {name: {"topicName": name}},
        "messageModel": "CLUSTERING",
    }
    yield json.dumps(whole).encode()


async def _remarks(address: Address) -> list[tuple[int, str]]:
    """What is said in answer to everything."""
    connection = await connect(address)
    found = []

    async def ask(code: RequestCode, fields: dict[str, str], body: bytes) -> None:
        # Some requests are made one-way as a rule, and their senders are told nothing.
        with contextlib.suppress(RequestTimedOut):
            answer = await connection.request(code, extra=fields, body=body, timeout=PATIENCE)
            if answer.remark:
                found.append((int(code), answer.remark))

    said = [(_fields(name), body) for name in NAMES for body in _bodies(name)]
    # Together, because one-way requests are waited for until the time is up.
    await asyncio.gather(*(ask(code, *each) for each in said for code in RequestCode))
    connection.close()
    await connection.wait_closed()
    return found


def _count(remarks: list[tuple[int, str]], is_so: Callable[[str], bool]) -> int:
    """How many request codes had such a remark."""
    return len({code for code, remark in remarks if is_so(remark)})


async def test_no_remark_of_a_broker_has_a_percent_sign(broker):
    remarks = await _remarks(broker.address)

    assert [said for said in remarks if "%" in said[1]] == []
    # Else the names would not have been looked at.
    assert _count(remarks, lambda remark: "RETRY of billing" in remark) > 5
    assert _count(remarks, lambda remark: "(percent)" in remark) > 10


async def test_no_remark_of_a_name_server_has_a_percent_sign(name_server):
    remarks = await _remarks(name_server.address)

    assert [said for said in remarks if "%" in said[1]] == []
    assert _count(remarks, lambda remark: "RETRY of billing" in remark) > 0
    assert _count(remarks, lambda remark: "(percent)" in remark) > 0
