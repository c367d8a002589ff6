"""Looking single messages up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from orbitmq.broker import scheduler
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.wire.codes import DEFAULT_LIMITS, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import QueryMessageRequest, QueryMessageResponse, ViewMessageRequest
from tests.support.admin import ask
from tests.support.broker import RawClient, bodies_in, until
from tests.support.store import put

ALWAYS = 2**63 - 1


async def by_key(
    client: RawClient,
    key: str,
    *,
    topic: str = "orders",
    most: int = 32,
    begin: int = 0,
    end: int = ALWAYS,
    is_unique: bool | None = None,
) -> Command:
    header = QueryMessageRequest(
        topic=topic,
        key=key,
        max_num=most,
        begin_timestamp=begin,
        end_timestamp=end,
        is_unique_key=is_unique,
    )
    return await ask(client, RequestCode.QUERY_MESSAGE, header)


async def test_messages_are_found_by_key_newest_first(client):
    for number in range(3):
        await client.stored("orders", b"%d" % number, properties={"KEYS": f"all one-{number}"})
    await client.stored("payments", b"other", properties={"KEYS": "all"})

    answer = await by_key(client, "all")

    assert answer.code == ResponseCode.SUCCESS
    assert bodies_in(answer) == [b"2", b"1", b"0"]
    assert bodies_in(await by_key(client, "one-1")) == [b"1"]


async def test_the_answer_says_how_far_the_index_has_come(broker, client):
    await client.stored("orders", properties={"KEYS": "k"})

    header = (await by_key(client, "k")).header(QueryMessageResponse)

    state = broker.parts.store.statistics()
    assert header.index_last_update_phyoffset == state.log_end
    assert header.index_last_update_timestamp == state.indexed_ms > 0


async def test_a_unique_id_finds_its_message_whatever_number_is_asked_for(client):
    sent = await client.stored("orders", b"found")
    assert sent.transaction_id is not None

    answer = await by_key(client, sent.transaction_id, most=0, is_unique=True)

    assert bodies_in(answer) == [b"found"]


async def test_no_message_in_the_time_asked_for_is_not_found(client):
    await client.stored("orders", properties={"KEYS": "k"})

    too_early = await by_key(client, "k", end=1000)
    unknown = await by_key(client, "nothing")

    assert too_early.code == unknown.code == ResponseCode.QUERY_NOT_FOUND
    assert too_early.remark == "can not find message, maybe time range not correct"
    assert int(unknown.ext_fields["indexLastUpdatePhyoffset"]) > 0


async def test_at_most_sixty_four_messages_are_brought(client):
    for _ in range(70):
        await client.stored("orders", properties={"KEYS": "many"})

    assert len(bodies_in(await by_key(client, "many", most=1000))) == 64
    assert len(bodies_in(await by_key(client, "many", most=5))) == 5


async def test_as_many_messages_are_brought_as_fit_into_an_answer_which_says_that_there_are_more(
    broker, client
):
    size = 3 * 1024 * 1024
    for number in range(7):
        await client.stored("orders", b"%d" % number + bytes(size), properties={"KEYS": "large"})
    store = broker.parts.store
    await until(lambda: store.statistics().indexed == store.statistics().log_end)

    answer = await by_key(client, "large")
    older = await by_key(client, "large", most=2)

    assert answer.code == ResponseCode.SUCCESS
    assert [body[:1] for body in bodies_in(answer)] == [b"6", b"5", b"4", b"3", b"2"]
    assert len(answer.body) + size + MIN_RECORD_SIZE > DEFAULT_LIMITS.frame
    assert answer.header(QueryMessageResponse).cut_short is True
    assert (answer.remark or "").startswith("the newest 5 messages are as much as")
    assert older.header(QueryMessageResponse).cut_short is None
    assert older.remark is None


async def test_others_are_served_while_a_key_is_looked_for_among_many_messages(
    broker, client, open_client, monkeypatch
):
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    await client.stored("orders", b"found", properties={"KEYS": "Aa"})
    for _ in range(3000):
        # Has the same hash.
        put(broker.parts.store, "orders", 0, b"x", {"KEYS": "BB"})
    broker.parts.store.write()
    other = await open_client(broker)
    looking = asyncio.ensure_future(by_key(client, "Aa"))
    await asyncio.sleep(0)  # it is sent now

    for _ in range(3):
        await other.stored("payments")

    assert not looking.done()
    async with asyncio.timeout(30):
        assert bodies_in(await looking) == [b"found"]


class LongLooks:
    """Looks for keys that take until a test ends them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.under_way = 0
        self.may_end = False

    def looking_up(self, _topic: str, key: str, *_times: int) -> Iterator[None]:
        self.begun.append(key)
        self.under_way += 1
        try:
            while not self.may_end:
                yield None
        finally:
            self.under_way -= 1


async def test_a_connection_has_a_few_questions_under_way_and_the_others_in_line(
    broker, open_client, monkeypatch
):
    eager, other = await open_client(broker), await open_client(broker)
    looks = LongLooks()
    monkeypatch.setattr(broker.parts.store, "looking_up", looks.looking_up)
    keys = [f"key-{number}" for number in range(40)]
    questions = [asyncio.ensure_future(by_key(eager, key)) for key in keys]
    await until(lambda: len(looks.begun) > 0)

    # What comes after them on the connection is answered when all of them have come.
    await eager.max_offset("orders")
    at_first = list(looks.begun)
    questions.append(asyncio.ensure_future(by_key(other, "other")))
    await until(lambda: "other" in looks.begun)
    looks.may_end = True
    answers = await asyncio.wait_for(asyncio.gather(*questions), 30)

    assert at_first == keys[:16]
    assert looks.begun == [*keys[:16], "other", *keys[16:]]
    assert {answer.code for answer in answers} == {ResponseCode.QUERY_NOT_FOUND}


async def test_questions_in_line_are_forgotten_with_their_connection(
    broker, open_client, monkeypatch
):
    leaving = await open_client(broker)
    looks = LongLooks()
    monkeypatch.setattr(broker.parts.store, "looking_up", looks.looking_up)
    questions = [asyncio.ensure_future(by_key(leaving, f"key-{n}")) for n in range(40)]
    await until(lambda: len(looks.begun) > 0)
    await leaving.max_offset("orders")

    await leaving.close()
    await asyncio.gather(*questions, return_exceptions=True)
    await until(lambda: looks.under_way == 0)

    looks.may_end = True
    stayed = await open_client(broker)
    assert (await by_key(stayed, "after")).code == ResponseCode.QUERY_NOT_FOUND
    assert looks.begun == [*(f"key-{n}" for n in range(16)), "after"]


async def test_a_message_is_viewed_by_the_offset_in_its_id(client):
    await client.stored("orders", b"first")
    sent = await client.stored("orders", b"second")

    answer = await ask(
        client,
        RequestCode.VIEW_MESSAGE_BY_ID,
        ViewMessageRequest(offset=int(sent.msg_id[-16:], 16)),
    )

    assert bodies_in(answer) == [b"second"]


@pytest.mark.parametrize("offset", [-1, 7, 10**9])
async def test_an_offset_without_a_message_is_refused(client, offset):
    await client.stored("orders")

    answer = await ask(client, RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset=offset))

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert (answer.remark or "").startswith(f"can not find message by the offset, {offset}")
