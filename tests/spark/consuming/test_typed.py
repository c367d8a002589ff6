"""The annotations of a `Consumer`'s handlers on Spark: the same values, the same verdicts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest

from orbitmq.client.message import ReceivedMessage
from orbitmq.errors import SettingError
from orbitmq.spark import process
from tests.support.filling import Sent, fill, make_topic
from tests.support.sparkconsuming import idle
from tests.support.sparking import read, until


@dataclass
class Order:
    number: int


class Payment(msgspec.Struct):
    cents: int


BODIES = [b'{"number":1}', b'{"number":"two"}', b'{"number":3}', b"4"]


def send(cluster, topic, bodies, properties=None):
    cluster.create_topic(topic, queues=1)
    fill(cluster.broker_addresses[0], topic, [Sent(each, 0, properties or {}) for each in bodies])


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_values_reach_the_handler_and_a_mismatch_is_a_dead_letter_at_once(
    pipeline, orbit_cluster, tmp_path, ordered, batch
):
    send(orbit_cluster, "orders", BODIES)
    notes = tmp_path / "notes"
    run = pipeline(ordered=ordered)

    def note(order: Order) -> None:
        with notes.open("a") as file:
            file.write(f"{type(order).__name__} {order.number}\n")

    def ship(order: Order, message: ReceivedMessage) -> None:
        assert message.json()["number"] == order.number
        note(order)

    def ship_all(orders: list[Order]) -> None:
        for each in orders:
            note(each)

    run.on("orders")(ship_all if batch else ship)
    with run:
        idle(run)
        until(lambda: len(orbit_cluster.messages("%DLQ%billing")) == 2, "dead letters")
        until(lambda: notes.read_text().count("\n") == 2, "the others")

    assert notes.read_text() == "Order 1\nOrder 3\n"
    dead = {
        each.body: each.get_property("DLQ_REASON")
        for each in orbit_cluster.messages("%DLQ%billing")
    }
    assert set(dead) == {b'{"number":"two"}', b"4"}
    if not batch:
        assert dead[b'{"number":"two"}'].endswith(
            "ship takes Order: Expected `int`, got `str` - at `$.number`"
        )


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_rows_are_judged_by_their_values(spark, cluster, topic, batch):
    make_topic(cluster, topic, 0, queues=1)
    fill(cluster.broker_addresses[0], topic, [Sent(each, 0) for each in BODIES])

    def ship(order: Order) -> None:
        if order.number == 3:
            raise ValueError("no address")

    def ship_all(orders: list[Order]) -> None:
        assert [each.number for each in orders] == [1, 3]

    found = process(read(spark, cluster, topic), ship_all if batch else ship)

    rows = {bytes(row.body): row for row in found.collect()}
    assert [rows[body].outcome for body in BODIES] == [
        "ok",
        "dead",
        "ok" if batch else "retry",
        "dead",
    ]
    assert not any(row.isHeld for row in rows.values())
    if not batch:
        assert rows[BODIES[1]].error.endswith("Expected `int`, got `str` - at `$.number`")


def test_what_a_handler_returns_is_sent(pipeline, orbit_cluster):
    orbit_cluster.create_topic("invoices", queues=1)
    send(orbit_cluster, "orders", [b'{"number":1}'], {"KEYS": "order-1", "__SHARDINGKEY": "c-7"})
    run = pipeline(serializer="json")

    @run.on("orders", publish="invoices")
    def bill(order: Order):
        return {"cents": 100 * order.number}

    with run:
        idle(run)
        until(lambda: orbit_cluster.messages("invoices"), "the invoice")

    (invoice,) = orbit_cluster.messages("invoices")
    assert (invoice.body, invoice.keys) == (b'{"cents":100}', "order-1")
    assert invoice.get_property("__SHARDINGKEY") == "c-7"


def test_a_struct_that_would_lose_its_fields_on_the_way_is_refused(pipeline):
    class Local(msgspec.Struct):
        cents: int

    def pay(payment: Local) -> None: ...

    pay.__annotations__["payment"] = list[Local]
    run = pipeline()

    with pytest.raises(SettingError, match=r"Local cannot be sent to Spark's workers; define it"):
        run.on("orders", batch=False)(pay)


PROGRAM = """
from __future__ import annotations
import sys, threading
from dataclasses import dataclass, field
import pydantic
from orbitmq.spark import consume, process
from orbitmq.spark.session import local_session

class Item(pydantic.BaseModel):
    sku: str = "chair"

@dataclass
class Order:
    number: int
    items: list[Item] = field(default_factory=list)
    note: str = ""

spark = local_session("typed", cores=1)
run = consume(spark, "shipping", name_server=sys.argv[1], consume_from="earliest")

@run.on("orders", publish="shipped")
def ship(order: Order):
    return {"shipped": order.number, "item": order.items[0].sku, "note": order.note}

with run:
    run.until_idle(60)

def check(order: Order): ...

rows = spark.read.format("rocketmq").option("nameServer", sys.argv[1])
rows = rows.option("subscribe", "orders").option("group", "checks").load()
print(sorted(row.outcome for row in process(rows, check).collect()))
spark.stop()
"""


def test_a_class_of_the_program_itself_travels_with_its_handler(orbit_cluster, tmp_path):
    orbit_cluster.create_topic("shipped", queues=1)
    send(orbit_cluster, "orders", [b'{"number":1,"items":[{}]}', b"{}"])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    done = subprocess.run(
        [sys.executable, str(program), orbit_cluster.name_server],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )

    assert done.stdout.splitlines()[-1] == "['dead', 'ok']"

    assert [each.body for each in orbit_cluster.messages("shipped")] == [
        b'{"shipped":1,"item":"chair","note":""}'
    ]
    (dead,) = orbit_cluster.messages("%DLQ%shipping")
    assert dead.get_property("DLQ_REASON") == (
        "ship takes Order: Object missing required field `number`"
    )
