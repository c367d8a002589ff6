"""Handlers whose annotations decide what they get, and bodies that do not match."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypedDict

import msgspec
import pydantic
import pytest

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.verdict import DEAD, Retry
from orbitmq.client.idempotence import Idempotence
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.middleware import Delivery
from orbitmq.errors import SettingError
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consumers import consumer_of, producer_of, send
from tests.support.consuming import GROUP, called, received, until

QUEUE_COUNT = 1


@dataclass
class Order:
    number: int
    cents: int = 0


class Payment(msgspec.Struct, frozen=True):
    cents: int


class Item(pydantic.BaseModel):
    article: str = pydantic.Field(alias="sku")


class Row(TypedDict):
    number: int


@dataclass
class Basket:
    items: list[Item]


class Unknown:
    """Of no known form."""


class HasCents(Protocol):
    cents: int


# ---- what a handler gets


def unannotated(given) -> None: ...


def message(given: ReceivedMessage) -> None: ...


def anything(given: Any) -> None: ...


def raw(given: bytes) -> None: ...


def text(given: str) -> None: ...


def dictionary(given: dict[str, Any]) -> None: ...


def array(given: list) -> None: ...  # type: ignore[type-arg]  # as people write it


def dictionary_of(given: dict[str, int]) -> None: ...


def typed_dict(given: Row) -> None: ...


def order(given: Order) -> None: ...


def payment(given: Payment) -> None: ...


def item(given: Item) -> None: ...


def basket(given: Basket) -> None: ...


def maybe(given: Order | None) -> None: ...


def number(given: Annotated[int, msgspec.Meta(gt=0)]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "body", "value"),
    [
        (raw, b"\xff", b"\xff"),
        (text, "größer".encode(), "größer"),
        (dictionary, b'{"a":[1]}', {"a": [1]}),
        (array, b"[1,2]", [1, 2]),
        (dictionary_of, b'{"a":1}', {"a": 1}),
        (typed_dict, b'{"number":1}', {"number": 1}),
        (order, b'{"number":7}', Order(7)),
        (payment, b'{"cents":7}', Payment(7)),
        (item, b'{"sku":"chair"}', Item(sku="chair")),
        (basket, b'{"items":[{"sku":"chair"}]}', Basket([Item(sku="chair")])),
        (maybe, b"null", None),
        (number, b"3", 3),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_the_annotation_decides_what_the_handler_gets(handler, body, value):
    got = []

    @functools.wraps(handler)
    def keep(*given):
        got.append(given)

    outcome = called(bind_handler(keep, group=GROUP), [received(0, body=body)])

    assert not outcome.failed, outcome.failure
    assert got == [(value,)]
    assert type(got[0][0]) is type(value)


@pytest.mark.parametrize(
    "handler", [unannotated, message, anything], ids=lambda each: each.__name__
)
def test_without_a_type_of_a_value_the_handler_gets_the_message(handler):
    got = []
    binding = bind_handler(functools.wraps(handler)(lambda *given: got.append(given)), group=GROUP)
    one = received(0)

    called(binding, [one])

    assert got == [(one,)]


class Shop:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def with_message(self, given: Order, message: ReceivedMessage) -> None:
        self.got.append((given, message.queue_offset))

    async def awaited(self, given: Order, message: ReceivedMessage | None = None) -> None:
        assert message is not None
        self.got.append((given, message.queue_offset))

    def given_more(self, db: str, given: Order, message: ReceivedMessage) -> None:
        self.got.append((given, message.queue_offset))

    def batch(self, given: list[Order], messages: list[ReceivedMessage]) -> None:
        self.got += zip(given, [each.queue_offset for each in messages], strict=True)

    def __call__(self, given: Order, message: ReceivedMessage) -> None:
        self.with_message(given, message)


@pytest.mark.parametrize(
    "pick",
    [
        lambda shop: shop.with_message,
        lambda shop: shop.awaited,
        lambda shop: functools.partial(shop.given_more, "db"),
        lambda shop: shop.batch,
        lambda shop: shop,
        functools.partial,
    ],
)
def test_a_second_parameter_takes_the_message_as_well(pick):
    shop = Shop()

    outcome = called(bind_handler(pick(shop), group=GROUP), [received(5, body=b'{"number":7}')])

    assert not outcome.failed
    assert shop.got == [(Order(7), 5)]


def test_a_list_is_a_batch_unless_the_handler_or_its_second_parameter_says_otherwise():
    got: list[Any] = []

    def batch(given: list[Order]) -> None:
        got.append(given)

    def single(given: list[Order], message: ReceivedMessage) -> None:
        got.append(given)

    three = [received(offset, body=b'{"number":%d}' % offset) for offset in range(3)]
    called(bind_handler(batch, group=GROUP), three)
    for bind in (bind_handler(single, group=GROUP), bind_handler(batch, group=GROUP, batch=False)):
        called(bind, [received(0, body=b'[{"number":9}]')])

    assert got == [[Order(0), Order(1), Order(2)], [Order(9)], [Order(9)]]


def hopeless(given: Unknown) -> None: ...


def hopeless_inside(given: dict[str, Unknown]) -> None: ...


def unresolved(given: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # on purpose


def unresolved_batch(given: list[Nowhere]) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def structural(given: HasCents) -> None: ...


def for_sending(given: Message) -> None: ...


def two_unknown(given: Order, other: int) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "words"),
    [
        (
            hopeless,
            {},
            "hopeless takes Unknown: no body can be decoded to Unknown; use a dataclass",
        ),
        (hopeless_inside, {}, "no body can be decoded to Unknown"),
        (structural, {}, "no body can be decoded to HasCents"),
        (unresolved, {}, "given with Nowhere, which cannot be resolved: .*top of the handler's"),
        (unresolved_batch, {}, r"given with list\[Nowhere\], which cannot be resolved"),
        (for_sending, {}, "takes Message, which is for sending; annotate given with ReceivedMes"),
        (two_unknown, {}, "its second parameter is annotated ReceivedMessage: missing"),
        (order, {"batch": True}, r"order takes batches, .* given is annotated Order; write list\["),
        (order, {"publish": "a b"}, "publish: "),
        (order, {"serializer": "yaml"}, 'serializer must be "json", "msgpack"'),
    ],
)
def test_what_cannot_be_decoded_is_refused_when_the_handler_is_registered(
    handler, options, words, cluster
):
    serializer = options.pop("serializer", None)
    with pytest.raises(SettingError, match=words):
        consumer_of(cluster, serializer=serializer).on("orders", **options)(handler)


def test_a_batch_cannot_publish():
    def batch(given: list[Order]) -> None: ...

    with pytest.raises(SettingError, match="publish is for a handler of one message"):
        bind_handler(batch, group=GROUP, publish="invoices")


@pytest.mark.parametrize(
    ("serializer", "body"),
    [
        ("json", b'{"number":7,"cents":1}'),
        ("msgpack", msgspec.msgpack.encode(Order(7, 1))),
        (json, b'{"number":7,"cents":1}'),
        ((repr, lambda body: Order(*map(int, body.split(b",")))), b"7,1"),
    ],
)
def test_the_serializer_decodes_and_bytes_and_texts_stay(serializer, body):
    got: list[Any] = []

    def value(given: Order) -> None:
        got.append(given)

    def plain(given: bytes) -> None:
        got.append(given)

    for handler in (value, plain):
        called(bind_handler(handler, group=GROUP, serializer=serializer), [received(0, body=body)])

    assert got == [Order(7, 1), body]


# ---- bodies that do not match


@pytest.mark.parametrize(
    ("handler", "body", "reason"),
    [
        (order, b'{"number":"x"}', "order takes Order: Expected `int`, got `str` - at `$.number`"),
        (order, b"{", "order takes Order: Input data was truncated"),
        (text, b"\xff", "text takes str: 'utf-8' codec can't decode byte 0xff in position 0: in"),
        (item, b'{"sku":5}', "item takes Item: Input should be a valid string - at `$.sku`"),
        (basket, b'{"items":[{}]}', "basket takes Basket: Field required - at `$.sku` - at `$.it"),
        (number, b"0", "number takes int: Expected `int` >= 1"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_body_that_does_not_match_is_given_up_with_the_place_and_the_handler_not_called(
    handler, body, reason, is_async
):
    calls: list[Any] = []

    async def call_async(given):
        calls.append(given)

    def call(given):
        calls.append(given)

    function: Callable[..., Any] = functools.wraps(handler)(call_async if is_async else call)

    outcome = called(bind_handler(function, group=GROUP), [received(0, body=body)])

    assert calls == []
    assert (outcome.failure.level, len(outcome.failed)) == (DEAD, 1)
    assert reason in outcome.failure.reason


@pytest.mark.parametrize(
    ("error", "level"),
    [(OSError("registry is away"), 0), (Retry("later"), 0), (KeyError("schema 7"), DEAD)],
    ids=repr,
)
def test_what_says_nothing_about_the_body_is_tried_again(error, level):
    def loads(body: bytes) -> object:
        raise error

    binding = bind_handler(order, group=GROUP, serializer=(repr, loads))

    outcome = called(binding, [received(0, body=b"x")])

    assert outcome.failure.level == level


async def dead_letters(cluster: AsyncEmbeddedCluster, group: str, count: int) -> list[Any]:
    topic = f"%DLQ%{group}"
    await until(lambda: len(cluster.messages(topic)) == count)
    return sorted(cluster.messages(topic), key=lambda each: each.body)


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
async def test_a_mismatch_becomes_a_dead_letter_at_once_and_the_others_are_handled(
    cluster, ordered, batch
):
    bodies = [b'{"number":1}', b'{"number":"two"}', b'{"number":3}', b"4", b'{"number":5}']
    await send(cluster, "orders", bodies)
    consumer = consumer_of(cluster, ordered=ordered)
    got: list[int] = []

    def ship(given: Order) -> None:
        got.append(given.number)

    def ship_all(given: list[Order]) -> None:
        got.extend(each.number for each in given)

    consumer.on("orders")(ship_all if batch else ship)
    async with consumer:
        dead = await dead_letters(cluster, consumer.group, 2)
        await until(lambda: len(got) == 3)
        await until(lambda: sum(consumer.positions().values()) >= 5)

    assert got == [1, 3, 5] if ordered else sorted(got) == [1, 3, 5]
    assert [each.body for each in dead] == [b"4", b'{"number":"two"}']
    name = "ship_all takes Order: " if batch else "ship takes Order: "
    reasons = [(each.get_property("DLQ_REASON") or "").rpartition("<locals>.")[2] for each in dead]
    assert all(reason.startswith(name) for reason in reasons)
    if not batch:
        assert reasons[1] == name + "Expected `int`, got `str` - at `$.number`"
    assert cluster.messages(f"%RETRY%{consumer.group}") == []


def _first_key(message: ReceivedMessage) -> str:
    return message.keys[0]


async def test_middleware_sees_messages_and_a_repeated_one_is_still_known(cluster):
    seen: list[Any] = []
    got: list[int] = []

    class Watch:
        def before(self, delivery: Delivery) -> None:
            seen.append(type(delivery.message))

        def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
            failure = delivery.outcome.failure
            seen.append(failure.level if failure else None)

    async with producer_of(cluster) as producer:
        for body in (Order(1), Order(1), {"number": "x"}):
            await producer.send("orders", body, keys=str(body).split()[0])
    consumer = consumer_of(cluster, ordered=True, middleware=[Watch(), Idempotence(key=_first_key)])

    @consumer.on("orders")
    def ship(given: Order) -> None:
        got.append(given.number)

    async with consumer:
        await dead_letters(cluster, consumer.group, 1)

    assert got == [1]
    assert seen == [ReceivedMessage, ReceivedMessage, ReceivedMessage, DEAD]


# ---- publishing


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
async def test_what_a_handler_returns_is_sent_with_trace_and_keys(cluster, ordered, is_async):
    await cluster.create_topic("invoices", queues=2)
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    async with producer_of(cluster) as producer:
        for number in range(5):
            await producer.send(
                "orders",
                Order(number),
                keys=["order", str(number)],
                ordering_key="customer-7",
                properties=trace | {"own": "x"},
            )
    consumer = consumer_of(cluster, ordered=ordered)

    def bill(given: Order) -> Any:
        special: dict[int, Any] = {
            1: None,
            2: Message("invoices", b"as it is", tags="own"),
            3: [Message("invoices", b"a"), Message("invoices", b"b")],
            4: [],
        }
        return special.get(given.number, Payment(100))

    async def bill_async(given: Order) -> Any:
        return bill(given)

    consumer.on("orders", publish="invoices")(bill_async if is_async else bill)
    async with consumer:
        await until(lambda: sum(consumer.positions().values()) >= 5)

    sent = {each.body: each for each in cluster.messages("invoices")}
    assert set(sent) == {b'{"cents":100}', b"as it is", b"a", b"b"}
    value = sent[b'{"cents":100}']
    assert (value.keys, value.get_property("__SHARDINGKEY")) == ("order 0", "customer-7")
    assert value.get_property("traceparent") == trace["traceparent"]
    assert value.get_property("own") is None
    assert (sent[b"as it is"].tags, sent[b"as it is"].keys) == ("own", None)


async def test_a_result_that_cannot_be_sent_fails_the_message_and_is_sent_with_its_next_attempt(
    cluster, caplog
):
    await send(cluster, "orders", [b'{"number":1}'])
    consumer = consumer_of(cluster, ordered=True)
    calls: list[int] = []

    @consumer.on("orders", publish="invoices")
    def bill(given: Order) -> object:
        calls.append(given.number)
        return Unknown() if len(calls) == 1 else {"attempt": len(calls)}

    with caplog.at_level(logging.WARNING):
        async with consumer:
            await until(lambda: sum(consumer.positions().values()) == 1)

    assert len(calls) == 2
    assert [each.body for each in cluster.messages("invoices")] == [b'{"attempt":2}']
    assert "message.body (Unknown) cannot be encoded with JSON" in caplog.text


@pytest.mark.parametrize("answer", [True, False], ids=str)
async def test_a_truth_value_tells_of_the_message_and_is_not_sent(cluster, answer):
    await cluster.create_topic("invoices", queues=1)
    await send(cluster, "orders", [b"{}"])
    consumer = consumer_of(cluster, ordered=True)
    answers: list[bool] = [answer, True]

    @consumer.on("orders", publish="invoices")
    def bill(given: dict[str, Any]) -> bool:
        return answers.pop(0)

    async with consumer:
        await until(lambda: sum(consumer.positions().values()) == 1)

    assert len(answers) == (1 if answer else 0)
    assert cluster.messages("invoices") == []
