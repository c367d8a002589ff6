"""How much one connection, and one host, may have compiled, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress

import pytest

from orbitmq.broker import filters as compiledfilters
from orbitmq.broker.broker import Broker
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filters import (
    BURST,
    HOST_SHARES,
    LONGEST_WAIT,
    RATE,
    CompileAllowances,
    Expression,
    FilterTable,
    Postponed,
)
from orbitmq.filter.tags import compile_filter
from orbitmq.wire.bodies import CheckClientRequest, SubscriptionData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import encode_body
from tests.broker.conftest import OpenClient
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.store import HandClock

NOW = 1_700_000_000.0


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The SQL expressions that were compiled."""
    done: list[str] = []

    def counted(text: str, kind: str, *, lenient: bool) -> object:
        if kind == "SQL92":
            done.append(text)
        return compile_filter(text, kind, lenient=lenient)

    monkeypatch.setattr(compiledfilters, "compile_filter", counted)
    return done


def long(number: int, size: int = 5_000) -> str:
    """An expression of about `size` characters that accepts one size."""
    return f"size = {number} OR name = '{'x' * size}'"


def sql(number: int) -> Expression:
    return f"size = {number}", "SQL92"


def wants(text: str, topic: str = "orders", version: int = 1) -> SubscriptionData:
    return SubscriptionData(
        topic=topic, sub_string=text, sub_version=version, expression_type="SQL92"
    )


@pytest.fixture
def clock() -> HandClock:
    return HandClock(NOW)


@pytest.fixture
def filters(clock: HandClock) -> FilterTable:
    return FilterTable(is_enabled=True, monotonic=clock.monotonic)


# What is allowed.


def test_an_allowance_is_used_up_and_comes_back(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic)

    first = [allowances.take("one", BURST // 2) for _ in range(3)]
    other = allowances.take("two", BURST * 4)
    clock.advance(1.0)
    later = [allowances.take("one", BURST // 2), allowances.take("two", 1)]
    allowances.forget("one")
    allowances.forget("two")

    assert first == [True, True, False]
    assert other  # although it is longer than any allowance, which leaves a debt
    assert later == [True, RATE >= 3 * BURST]
    assert len(allowances) == 0


def test_who_waits_has_reserved_and_too_long_a_wait_is_refused(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic)
    most = 1 + int(LONGEST_WAIT * RATE / BURST)

    waits = [allowances.reserve("one", sql(number), BURST) for number in range(most)]
    with pytest.raises(SystemBusy):
        allowances.reserve("one", sql(most), BURST)
    clock.advance(BURST / RATE)
    waits.append(allowances.reserve("one", sql(most), BURST))

    assert waits[:-1] == [number * BURST / RATE for number in range(most)]
    assert waits[-1] == pytest.approx(waits[-2])


def test_who_has_reserved_an_expression_does_not_pay_for_it_again(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic)
    allowances.reserve("one", sql(0), BURST)

    waits = [allowances.reserve("one", sql(1), BURST) for _ in range(100)]
    clock.advance(BURST / RATE / 2)
    halfway = allowances.reserve("one", sql(1), BURST)
    next_one = allowances.reserve("one", sql(2), BURST)
    allowances.settle("one", sql(1))
    anew = allowances.reserve("one", sql(1), BURST)
    others = allowances.reserve("two", sql(1), BURST)

    assert waits == [BURST / RATE] * 100
    assert halfway == pytest.approx(BURST / RATE / 2)
    assert next_one == pytest.approx(halfway + BURST / RATE)
    assert anew == pytest.approx(next_one + BURST / RATE)
    assert others == 0


def test_what_was_reserved_and_never_compiled_is_forgotten(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic)

    for number in range(1000):
        allowances.reserve("one", sql(number), 100)
        clock.advance(1.0)
    kept = [number for number in range(1000) if allowances.has_reserved("one", sql(number))]
    allowances.forget("one")

    assert 1 <= len(kept) <= LONGEST_WAIT + 2
    assert not any(allowances.has_reserved("one", sql(number)) for number in range(1000))


def test_nothing_comes_back_while_something_is_compiled(clock: HandClock) -> None:
    """On a slow machine one heartbeat would otherwise go on and on."""
    allowances = CompileAllowances(clock.monotonic)
    assert allowances.take("one", BURST)

    with allowances.compiling("one"):
        clock.advance(60.0)

    assert not allowances.take("one", BURST)
    clock.advance(BURST / RATE)
    assert allowances.take("one", BURST)


def first_letter(channel: Hashable) -> str:
    """A host for tests."""
    return str(channel)[0]


def test_the_connections_of_a_host_have_a_few_times_the_allowance_of_one(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic, host_of=first_letter)

    taken = [allowances.take(f"a{number}", BURST) for number in range(10)]
    other = allowances.take("b", BURST)
    for number in range(10):
        allowances.forget(f"a{number}")
    anew = allowances.take("a", BURST)
    clock.advance(BURST / RATE)
    later = [allowances.take(f"a{number}", BURST) for number in range(10)]

    assert taken == [number < HOST_SHARES for number in range(10)]
    assert other
    assert not anew  # coming back with another connection is no help
    assert later == taken


def test_who_waits_waits_for_others_of_its_host_and_not_of_another(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic, host_of=first_letter)
    most = HOST_SHARES * (1 + int(LONGEST_WAIT * RATE / BURST))

    waits = [allowances.reserve(f"a{number}", sql(1), BURST) for number in range(most)]
    with pytest.raises(SystemBusy):
        allowances.reserve("a", sql(1), BURST)

    assert waits[:HOST_SHARES] == [0] * HOST_SHARES
    assert waits == sorted(waits)
    assert LONGEST_WAIT - BURST / RATE < waits[-1] <= LONGEST_WAIT
    assert allowances.reserve("b", sql(1), BURST) == 0


def test_nothing_comes_back_to_a_host_while_something_is_compiled_for_it(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic, host_of=first_letter)
    for number in range(HOST_SHARES):
        assert allowances.take(f"a{number}", BURST)

    with allowances.compiling("a0"):
        clock.advance(60.0)

    assert not allowances.take("a", BURST)


def test_hosts_that_have_all_of_their_allowance_are_not_remembered(clock: HandClock) -> None:
    allowances = CompileAllowances(clock.monotonic, host_of=lambda channel: channel)

    for number in range(5_000):
        assert allowances.take(number, BURST)
        allowances.forget(number)
        clock.advance(0.01)

    assert len(allowances) == 0
    assert len(allowances._hosts) < 2_000


# Heartbeats.


def test_a_heartbeat_has_little_compiled_and_each_pull_one_more(
    filters: FilterTable, clock: HandClock, compilations: list[str]
) -> None:
    said = {f"t{number}": wants(long(number), f"t{number}") for number in range(60)}

    filters.register("g", said.values(), NOW, "one")
    at_once = len(compilations)
    for number, (topic, subscription) in enumerate(said.items()):
        clock.advance(10.0)
        before = len(compilations)
        found = filters.of_group("g", topic, subscription, 1, "one")
        again = filters.of_group("g", topic, subscription, 1, "one")

        assert len(compilations) - before == (0 if number == 0 else 1)
        assert found is again
        assert found.accepts_properties({"size": str(number)})
    assert at_once == 1


def test_what_was_compiled_before_costs_nothing(
    filters: FilterTable, compilations: list[str]
) -> None:
    said = [wants(f"size = {number}", f"t{number}") for number in range(300)]
    filters.register("g", said, NOW)

    filters.register("h", said, NOW, "one")
    filters.register("h", [wants(long(1))], NOW, "one")

    assert len(compilations) == 301


def test_short_expressions_are_all_compiled_at_once(
    filters: FilterTable, compilations: list[str]
) -> None:
    filters.register("g", [wants(f"size = {n}", f"t{n}") for n in range(100)], NOW, "one")

    assert len(compilations) == 100


def test_an_expression_that_turns_out_wrong_at_the_pull_is_refused_with_the_reason(
    filters: FilterTable, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    filters.register("g", [wants(long(1, 20_000))], NOW, "one")
    wrong = wants("size >", "wrong")
    filters.register("g", [wants(long(1, 20_000)), wrong], NOW, "one")
    assert len(compilations) == 1

    refusals = []
    for _ in range(3):
        with pytest.raises(Refused) as refusal:
            filters.of_group("g", "wrong", wrong, 1)
        refusals.append(refusal.value)

    assert {each.code for each in refusals} == {ResponseCode.FILTER_DATA_NOT_EXIST}
    assert "ends too early" in str(refusals[0])
    assert all("did not compile" in str(each) for each in refusals)
    assert len(compilations) == 2  # not again with every pull
    assert "subscription does not compile" in caplog.text


def test_of_a_long_file_only_those_that_left_last_are_compiled_at_the_start(
    filters: FilterTable, compilations: list[str]
) -> None:
    said = {f"t{number:02}": wants(long(number, 30_000), f"t{number:02}") for number in range(20)}
    for number in range(20):
        filters.register("g", list(said.values())[number:], NOW + number, "one")
    compilations.clear()
    loaded = FilterTable(is_enabled=True)

    loaded.load(filters.file(), NOW + 100)
    at_start = len(compilations)

    assert 0 < at_start < 10
    assert compilations == [long(number, 30_000) for number in range(19, 19 - at_start, -1)]
    for number, (topic, subscription) in enumerate(said.items()):
        found = loaded.of_group("g", topic, subscription, 1)
        assert found.accepts_properties({"size": str(number)})


# Pulls.


def test_pulls_with_ever_new_expressions_are_put_off_and_then_refused(
    filters: FilterTable, compilations: list[str]
) -> None:
    filters.of_pull(long(0), "SQL92", "one")
    with pytest.raises(Postponed) as postponed:
        filters.of_pull(long(1), "SQL92", "one")
    with suppress(Postponed):
        filters.of_pull(long(2, 30_000), "SQL92", "one")
    with suppress(Postponed):
        filters.of_pull(long(3, 30_000), "SQL92", "one")
    with suppress(Postponed):
        filters.of_pull(long(4, 30_000), "SQL92", "one")
    with pytest.raises(SystemBusy) as refused:
        filters.of_pull(long(5, 30_000), "SQL92", "one")
    filters.of_pull(long(0), "SQL92", "one")
    filters.of_pull(long(1000), "SQL92", "another")

    assert 0 < postponed.value.seconds < 1
    assert not isinstance(refused.value, Postponed)
    assert compilations == [long(0), long(1000)]


def test_pulls_for_many_queues_pay_once_for_the_expression_that_they_share(
    filters: FilterTable, clock: HandClock, compilations: list[str]
) -> None:
    said = {f"t{number}": wants(long(number, 1_000), f"t{number}") for number in range(60)}
    filters.register("g", said.values(), NOW, "one")
    at_once = len(compilations)

    waits: dict[str, set[float]] = {}
    for topic, subscription in list(said.items())[at_once:]:
        for _queue in range(16):
            with pytest.raises(Postponed) as postponed:
                filters.of_group("g", topic, subscription, 1, "one")
            waits.setdefault(topic, set()).add(postponed.value.seconds)
    clock.advance(max(max(each) for each in waits.values()))
    for topic in waits:
        for _queue in range(16):
            filters.of_group("g", topic, said[topic], 1, "one", has_waited=True)

    assert 0 < at_once < 10
    assert all(len(each) == 1 for each in waits.values())
    assert max(max(each) for each in waits.values()) < 60 * 1_100 / RATE
    assert len(compilations) == 60
    assert not any(filters.allowances.has_reserved("one", (each, "SQL92")) for each in compilations)


def test_who_has_waited_for_one_expression_pays_for_another(
    filters: FilterTable, compilations: list[str]
) -> None:
    filters.of_pull(long(0), "SQL92", "one")
    with pytest.raises(Postponed):
        filters.of_pull(long(1), "SQL92", "one")

    with pytest.raises(Postponed) as other:
        filters.of_pull(long(2), "SQL92", "one", has_waited=True)
    filters.of_pull(long(1), "SQL92", "one", has_waited=True)

    assert other.value.seconds > 0
    assert compilations == [long(0), long(1)]


def test_the_end_of_an_expression_that_is_ignored_is_logged_once_and_not_with_every_pull(
    filters: FilterTable, caplog: pytest.LogCaptureFixture
) -> None:
    said = wants(f"{long(1, 700)} trailing words")
    filters.register("g", [said], NOW, "one")

    for _ in range(100):
        filters.of_group("g", "orders", said, 1, "one")

    assert caplog.text.count("the end of a subscription is ignored") == 1


def test_the_end_that_is_ignored_is_logged_by_the_first_pull_if_nobody_compiled_it_before(
    filters: FilterTable, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    said = wants(f"{long(1, 700)} trailing words")
    filters.register("g", [wants(long(0, 8_000), "other"), said], NOW, "one")
    before = caplog.text.count("the end of a subscription is ignored")
    clock.advance(10.0)

    for _ in range(100):
        filters.of_group("g", "orders", said, 1, "one")

    assert before == 0
    assert caplog.text.count("the end of a subscription is ignored") == 1


def test_a_pull_waits_while_others_have_something_compiled(
    filters: FilterTable, compilations: list[str]
) -> None:
    filters.must_wait = lambda: True

    with pytest.raises(Postponed) as postponed:
        filters.of_pull("size = 1", "SQL92", "one")
    filters.of_pull("A || B", "TAG", "one")

    assert postponed.value.seconds == 0
    assert compilations == []
    filters.of_pull("size = 1", "SQL92")
    filters.of_pull("size = 1", "SQL92", "one")
    assert compilations == ["size = 1"]


def test_an_expression_that_is_too_long_costs_no_more_than_the_longest(
    filters: FilterTable, clock: HandClock
) -> None:
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.of_pull("x" * 10_000_000, "SQL92", "one")

    clock.advance(32_768 / RATE)
    filters.of_pull(long(1), "SQL92", "one")


# Checks before a consumer begins.


def test_a_check_waits_for_its_share_and_tells_what_is_wrong_then(filters: FilterTable) -> None:
    filters.check(long(0, BURST), "SQL92", "one")
    with pytest.raises(Postponed) as postponed:
        filters.check("size >", "SQL92", "one")

    with pytest.raises(Refused, match="ends too early") as refusal:
        filters.check("size >", "SQL92", "one", has_waited=True)

    assert 0 < postponed.value.seconds < 1
    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_a_check_that_would_wait_too_long_passes_unread(
    filters: FilterTable, compilations: list[str]
) -> None:
    filters.check(long(0, 30_000), "SQL92", "one")
    with suppress(Postponed):
        filters.of_pull(long(1, 30_000), "SQL92", "one")

    for number in range(2, 10):
        filters.check(long(number, 30_000), "SQL92", "one")
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.check("x" * 40_000, "SQL92", "one")
    filters.is_enabled = False
    with pytest.raises(Refused, match="enablePropertyFilter"):
        filters.check(long(11, 30_000), "SQL92", "one")

    assert compilations == [long(0, 30_000)]


# Over the wire.


@pytest.fixture
async def still(broker: Broker) -> Broker:
    """A broker in which no allowance comes back by itself."""
    broker.parts.filters.allowances = CompileAllowances(lambda: 0.0)
    return broker


async def checked(client: RawClient, subscription: SubscriptionData) -> Command:
    asked = CheckClientRequest(
        client_id="c1", group=GROUP, subscription_data=subscription, namespace=""
    )
    body = encode_body(asked)
    return await asyncio.wait_for(
        client.connection.request(RequestCode.CHECK_CLIENT_CONFIG, body=body), 30
    )


async def test_a_heartbeat_with_many_long_expressions_leaves_them_to_pulls(
    still: Broker, client: RawClient, compilations: list[str]
) -> None:
    for number in range(3):
        await client.stored(f"t{number}", b"seen", properties={"size": str(number)})
    said = [wants(long(number), f"t{number}") for number in range(60)]

    beaten = await client.heartbeat("c1", *said)
    at_once = len(compilations)
    pulled = [await client.pull(f"t{number}", sys_flag=0) for number in range(3)]

    assert beaten.code == ResponseCode.SUCCESS
    assert at_once == 1
    assert [bodies_in(answer) for answer in pulled] == [[b"seen"]] * 3
    assert len(compilations) in {3, 4}


async def test_pulls_that_come_together_are_compiled_in_turns_and_all_answered(
    still: Broker, open_client: OpenClient, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [await open_client(still) for _ in range(3)]
    await clients[0].stored("orders", b"seen", properties={"size": "7"})
    writes: list[int] = []
    pacing = still.parts.pacing
    end_judging = pacing._end_judging

    def ended() -> None:
        writes.append(len(compilations))
        end_judging()

    monkeypatch.setattr(pacing, "_end_judging", ended)
    pulls = [
        client.pull("orders", subscription=text, expression_type="SQL92")
        for client in clients
        for text in (f"size = 7 AND size <> {id(client)}", f"size <> {id(client)}", long(7))
    ]

    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    assert [bodies_in(answer) for answer in answers] == [[b"seen"]] * 9
    assert len(compilations) == 7
    before = [0, *writes]
    assert all(then - now <= 1 for now, then in zip(before, writes, strict=False))


async def test_many_pulls_that_wait_for_the_same_expression_are_all_answered(
    still: Broker, client: RawClient, compilations: list[str]
) -> None:
    await client.stored("orders", b"seven", properties={"size": "7"})
    await client.heartbeat("c1", wants(long(1), "other"), wants(long(7)))
    at_once = len(compilations)

    pulls = [client.pull("orders", sys_flag=0) for _ in range(40)]
    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    assert at_once == 1
    assert [bodies_in(answer) for answer in answers] == [[b"seven"]] * 40
    assert len(compilations) == 2


async def test_a_pull_that_is_held_gets_the_expression_that_could_not_be_compiled_at_once(
    still: Broker, client: RawClient, compilations: list[str]
) -> None:
    await client.stored("orders", b"seven", properties={"size": "7"})
    await client.heartbeat("c1", wants("size = 8"))
    held = asyncio.ensure_future(client.pull("orders", hold=20.0, sys_flag=2, offset=1))
    try:
        await until(lambda: len(still.parts.held) == 1)
        await client.heartbeat("c1", wants(long(1, 6_000), "other"), group="g")
        await client.heartbeat("c1", wants(long(7), version=2))
        not_yet = len(compilations)
        answer = await asyncio.wait_for(held, 30)
    finally:
        held.cancel()

    assert not_yet == 2
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert compilations[2] == long(7)
    assert bodies_in(await client.pull("orders", sys_flag=0)) == [b"seven"]


async def test_of_pulls_that_are_held_those_for_the_last_topics_of_a_heartbeat_are_refused(
    still: Broker, client: RawClient
) -> None:
    topics = [f"t{number * 5 % 12}" for number in range(12)]
    for topic in topics:
        await client.stored(topic)
    await client.heartbeat("c1", *(wants("size = 1", topic) for topic in topics))
    pulls = {
        topic: asyncio.ensure_future(client.pull(topic, hold=20.0, sys_flag=2, offset=1))
        for topic in topics
    }
    try:
        await until(lambda: len(still.parts.held) == len(topics))

        # Of so long expressions four are compiled in time.
        said = [wants(long(at, 25_000), topic, version=2) for at, topic in enumerate(topics)]
        await client.heartbeat("c1", *said)
        answers = await asyncio.wait_for(
            asyncio.gather(*(pulls[topic] for topic in topics[4:])), 30
        )
        others = [pulls[topic].result().code for topic in topics[:4] if pulls[topic].done()]
    finally:
        for pull in pulls.values():
            pull.cancel()

    assert {answer.code for answer in answers} == {ResponseCode.SYSTEM_BUSY}
    assert ResponseCode.SYSTEM_BUSY not in others


async def test_a_consumer_with_much_sql_is_told_that_it_can_begin(
    broker: Broker, client: RawClient, compilations: list[str]
) -> None:
    said = [wants(long(number, 650), f"t{number}") for number in range(30)]

    answers = [await checked(client, each) for each in said]

    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    assert len(compilations) == 30


async def test_a_check_beyond_the_allowance_is_answered_later_and_tells_what_is_wrong(
    still: Broker, client: RawClient, compilations: list[str]
) -> None:
    await client.heartbeat("c1", wants(long(1, BURST)))

    fine = await checked(client, wants("size = 7 OR size = 8 OR size = 9 OR size = 10"))
    wrong = await checked(client, wants("size = 7 OR size = 8 OR size = 9 OR size ="))

    assert fine.code == ResponseCode.SUCCESS
    assert wrong.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "ends too early" in (wrong.remark or "")
    assert len(compilations) == 3


async def test_many_connections_of_a_host_have_little_compiled(
    still: Broker, open_client: OpenClient, compilations: list[str]
) -> None:
    for number in range(10):
        each = await open_client(still)
        said = wants(long(number, BURST - 100), f"t{number}")
        assert (await each.heartbeat("c1", said, group=f"g{number}")).code == ResponseCode.SUCCESS

    assert len(compilations) == HOST_SHARES


async def test_a_connection_that_ends_leaves_no_allowance(
    broker: Broker, open_client: OpenClient
) -> None:
    passing = await open_client(broker)
    await passing.heartbeat("c1", wants("size = 7"))
    noted = len(broker.parts.filters.allowances)

    await passing.close()

    await until(lambda: len(broker.parts.filters.allowances) == 0)
    assert noted == 1
