"""The orders of the demo: the same ones every time, decided by their numbers and a seed."""

from __future__ import annotations

import random

import msgspec

TOPIC = "orders"
QUEUES = 8
#: Consumes on Spark, with retries and dead letters.
BILLING = "billing"
#: Consumes with plain Python consumers that come and go.
SHIPPING = "shipping"
#: Attempts after the first, before an order is given up.
MAX_RETRIES = 2

CUSTOMERS = 1000
SEGMENTS = ("new", "regular", "gold")
COUNTRIES = ("DE", "FR", "IN", "JP", "US")
PAID = "paid"
TAGS = (PAID, PAID, PAID, "refunded")


class Order(msgspec.Struct, frozen=True):
    """What a body holds."""

    order: str
    customer: int
    country: str
    cents: int
    #: What happens to it at the bank: "fine", "busy" at the first attempt, or "unknown" for ever.
    account: str = "fine"


def make_order(number: int, seed: int) -> tuple[Order, str]:
    """The order with this number, and its tag."""
    chance = random.Random(seed * 1_000_003 + number)
    account = "fine"
    if chance.random() < 0.004:
        account = "unknown"
    elif chance.random() < 0.03:
        account = "busy"
    order = Order(
        order=f"order-{number}",
        customer=chance.randrange(CUSTOMERS),
        country=chance.choice(COUNTRIES),
        cents=chance.randrange(100, 100_000),
        account=account,
    )
    return order, chance.choice(TAGS)


def segment_of(customer: int) -> str:
    """What is known about a customer."""
    return SEGMENTS[customer % len(SEGMENTS)]


def number_of(order: str) -> int:
    """The number of the order that is called so."""
    return int(order.removeprefix("order-"))


def is_hopeless(number: int, seed: int) -> bool:
    """Whether the order ends as a dead letter."""
    return make_order(number, seed)[0].account == "unknown"
