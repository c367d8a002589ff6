"""Which topic was perhaps meant."""

from __future__ import annotations

import asyncio
import difflib
import threading
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client import similartopics
from orbitmq.client.engine import Engine
from orbitmq.client.similartopics import most_similar, similar_topic
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings


@pytest.mark.parametrize("slip", ["ordesr", "order", "orderss", "0rders", "Orders", "xorders"])
def test_a_slip_of_a_name_is_seen_through(slip: str) -> None:
    assert most_similar(slip, ["invoices", "orders", "payments"]) == "orders"


def test_a_name_of_its_own_is_no_slip_of_another() -> None:
    assert most_similar("refunds", ["invoices", "orders", "payments", "refunds"]) is None


@pytest.mark.parametrize(
    "other",
    ["%RETRY%orders", "%DLQ%orders", "shop%orders", "rmq_sys_orders", "SELF_TEST_TOPIC"],
)
def test_nobody_means_what_belongs_to_a_group_the_system_or_another_namespace(other: str) -> None:
    slip = other.rpartition("%")[2].replace("rmq_", "rm_")[:-1]

    assert most_similar(slip, [other]) is None
    assert most_similar(slip, [other, slip + "x"]) == slip + "x"


def test_in_a_namespace_its_own_topics_are_meant() -> None:
    known = ["ordesrs", "orders", "shop%orders", "shops%ordesrs", "%RETRY%shop%ordesrs"]

    assert most_similar("shop%ordesr", known) == "shop%orders"


@given(
    meant=st.text("abcdefgh-", min_size=6, max_size=20),
    place=st.integers(0, 18),
    others=st.lists(st.text("mnopqrstuvw", min_size=1, max_size=20), max_size=300),
)
def test_a_swap_of_two_letters_is_found_among_any_number_of_other_names(
    meant: str, place: int, others: list[str]
) -> None:
    place %= len(meant) - 1
    swapped = meant[:place] + meant[place + 1] + meant[place] + meant[place + 2 :]

    assert most_similar(swapped, [*others, meant]) == (meant if swapped != meant else None)


def test_of_many_names_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    usual = difflib.get_close_matches

    def counted(word: str, names: Iterable[str], most: int, least: float) -> list[str]:
        names = list(names)
        compared.append(len(names))
        return usual(word, names, most, least)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    known = [f"service-{number % 97}-events-{number:05}" for number in range(10_000)]

    assert most_similar("service-4-evnets-00101", known) == "service-4-events-00101"
    assert compared == [similartopics._COMPARED]


async def test_the_event_loop_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(topic: str, known: Iterable[str]) -> str | None:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(20)
        return most_similar(topic, known)

    monkeypatch.setattr(similartopics, "most_similar", slowly)
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=1)
        async with Engine(quick_settings(cluster.name_server)) as engine:
            asking = asyncio.create_task(similar_topic(engine, "ordesr"))
            try:
                async with asyncio.timeout(20):
                    await begun.wait()  # here it would hang if the loop did the work
            finally:
                may_end.set()
            async with asyncio.timeout(20):
                found = await asking

    assert found == "orders"
