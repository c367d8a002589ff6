"""Bodies as the page shows them: decoded by topic, filtered by fields, masked."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
from importlib import import_module
from urllib.parse import quote

import fastavro
import msgspec
import pytest

from orbitmq.client.routes import Queue
from orbitmq.console.conditions import condition
from orbitmq.console.settings import BadInput, ConsoleSettings
from orbitmq.errors import SettingError, install_command
from tests.console.conftest import QUEUE, die
from tests.support.client import quick_settings
from tests.support.consoles import console_of

pytestmark = pytest.mark.feature("W5")

# There are no types of it.
descriptor_pb2 = import_module("google.protobuf.descriptor_pb2")
wrappers_pb2 = import_module("google.protobuf.wrappers_pb2")

ORDER = {"order": 7, "cents": 1500, "customer": {"country": "CH", "email": "eva@example.org"}}
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "order", "type": "int"}, {"name": "cents", "type": "long"}],
}


def avro(value):
    target = io.BytesIO()
    fastavro.schemaless_writer(target, fastavro.parse_schema(SCHEMA), value)
    return target.getvalue()


def descriptor():
    """The set of files in which the wrapper types of Protobuf are."""
    files = descriptor_pb2.FileDescriptorSet()
    wrappers_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    return base64.b64encode(files.SerializeToString()).decode()


async def choose(page, decoder, status=200):
    return await page.send("PUT", "/topics/orders/decoder", decoder, status)


@pytest.mark.parametrize(
    ("decoder", "body", "shown"),
    [
        ({}, b'{"a":1}', {"a": 1}),
        ({}, gzip.compress(b'{"a":1}', mtime=0), {"a": 1}),
        ({"format": "json", "skip": 2}, b'\x00\x01{"a":1}', {"a": 1}),
        ({"format": "msgpack"}, msgspec.msgpack.encode({"a": [1, b"\x00"]}), {"a": [1, "AA=="]}),
        (
            {"format": "msgpack"},
            gzip.compress(msgspec.msgpack.encode({1: True}), mtime=0),
            {"1": True},
        ),
        (
            {"format": "avro", "schema": json.dumps(SCHEMA)},
            avro({"order": 7, "cents": 1500}),
            {"order": 7, "cents": 1500},
        ),
        (
            {"format": "avro", "schema": json.dumps(SCHEMA), "skip": 5},
            b"\x00\x00\x00\x00\x09" + avro({"order": 7, "cents": 1500}),
            {"order": 7, "cents": 1500},
        ),
        (
            {
                "format": "protobuf",
                "descriptor": descriptor(),
                "message": "google.protobuf.StringValue",
            },
            wrappers_pb2.StringValue(value="Porto").SerializeToString(),
            "Porto",
        ),
    ],
    ids=["json", "gzip", "skip", "msgpack", "gzip msgpack", "avro", "registry", "protobuf"],
)
async def test_a_topic_s_bodies_are_shown_as_its_decoder_reads_them(desk, decoder, body, shown):
    page = desk.browser
    await choose(page, decoder)
    sent = await desk.world.send(QUEUE, body)

    one = await page.get(f"/messages/one?id={sent.msg_id}")
    saved = await page.ask("GET", f"/api/v1/messages/body?id={sent.msg_id}")

    if isinstance(shown, dict):
        assert json.loads(one["forms"]["json"]) == shown
    assert one["problem"] is None
    # What is saved are the bytes that were sent.
    assert saved.body == body


async def test_a_decoder_is_remembered_by_a_later_console(desk, tmp_path):
    history = tmp_path / "console.sqlite"
    sent = await desk.world.send(QUEUE, msgspec.msgpack.encode({"a": 1}))
    async with console_of(desk.cluster, history=history) as first:
        await choose(first, {"format": "msgpack"})

    async with console_of(desk.cluster, history=history) as second:
        known = await second.get("/topics/orders/decoder")
        row = await second.get(f"/messages/one?id={sent.msg_id}")

    assert known["decoder"]["format"] == "msgpack"
    assert {each["name"] for each in known["formats"]} >= {"avro", "protobuf", "msgpack", "json"}
    assert row["preview"] == '{"a":1}'


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        ({"format": "avro"}, "needs the schema"),
        ({"format": "avro", "schema": "{}"}, "not an Avro schema"),
        ({"format": "protobuf"}, "needs a descriptor"),
        ({"format": "protobuf", "descriptor": "AAAA", "message": "a.B"}, "not a descriptor"),
        ({"format": "protobuf", "descriptor": descriptor(), "message": "a.B"}, "StringValue"),
        ({"format": "xml"}, "xml"),
        ({"format": "json", "skip": -1}, "skip must be"),
    ],
)
async def test_a_decoder_that_cannot_work_is_refused_in_words(desk, decoder, text):
    answer = await choose(desk.browser, decoder, 400)

    assert text in answer["error"]


async def test_a_missing_package_is_named_with_what_installs_it(desk, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fastavro", None)

    known = await desk.browser.get("/topics/orders/decoder")
    refused = await choose(desk.browser, {"format": "avro", "schema": "{}"}, 400)

    missing = {each["name"]: each["missing"] for each in known["formats"]}
    assert missing["avro"] == install_command("formats")
    assert missing["json"] is None
    assert install_command("formats") in refused["error"]


async def test_a_body_that_its_decoder_cannot_read_is_shown_with_the_reason(desk):
    await choose(desk.browser, {"format": "msgpack"})
    sent = await desk.world.send(QUEUE, b"plain words")

    one = await desk.browser.get(f"/messages/one?id={sent.msg_id}")

    assert one["forms"]["text"] == "plain words"
    assert one["problem"].startswith("not msgpack")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("cents > 1000", True),
        ("cents > 1500 or cents < 3", False),
        ('cents > 1000 and customer.country = "CH"', True),
        ("customer.country != 'CH'", False),
        ("not (cents = 1500.0)", False),
        ("customer.country in ('DE', 'CH')", True),
        ("customer.country contains 'h'", True),
        ("customer.email endswith '.org'", True),
        ("tags[0] = 'new' and tags.1 = 'paid'", True),
        ("paid = true", True),
        ("paid = 1", False),
        ("note is null", True),
        ("nowhere is null", True),
        ("cents is not null", True),
        ("nowhere != 3", False),
        ("note exists", True),
        ("nowhere exists", False),
        ("cents > '1'", False),
        ("customer > 3", False),
    ],
)
def test_conditions_are_about_fields(text, holds):
    value = ORDER | {"tags": ["new", "paid"], "paid": True, "note": None}

    assert condition(text).test(value) is holds


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cents >", "at the end"),
        ("= 3", "'='"),
        ("cents > 3 4", "'4'"),
        ("cents ~ 3", "'~"),
        ("(cents = 3", "expected )"),
        ("cents = three", "'three'"),
        ("cents is 3", "expected null"),
        ("cents contains 3", "expected a text"),
        ("(" * 100 + "a = 1" + ")" * 100, "too many parentheses"),
        ("a" * 3000, "2000 characters"),
    ],
)
def test_a_wrong_condition_is_refused_with_its_place(text, place):
    with pytest.raises(BadInput, match=re.escape(place)):
        condition(text)


async def test_messages_are_filtered_by_fields_of_their_bodies(desk):
    for number in range(300):
        queue = Queue("orders", "broker-a", number % 2)
        country = "CH" if number % 100 == 99 else "DE"
        body = {"order": number, "customer": {"country": country}}
        await desk.world.send(queue, json.dumps(body).encode())
    where = quote('customer.country = "CH"')

    found = await desk.browser.get(f"/messages?topic=orders&newest=1&where={where}")
    wrong = await desk.browser.get("/messages?topic=orders&where=customer+%3D", 400)

    assert [json.loads(row["preview"])["order"] for row in found["rows"]] == [299, 199, 99]
    assert (found["looked"], found["cursor"]) == (300, None)
    assert "cents > 1000" in wrong["error"]


async def test_the_newest_come_first_whatever_queue_they_are_in(desk):
    for number in range(40):
        queue = Queue("orders", ("broker-a", "broker-b")[number % 3 == 0], number % 2)
        await desk.world.send(queue, str(number).encode())

    rows = (await desk.browser.get("/messages?topic=orders&newest=1"))["rows"]

    times = [row["stored_at"] for row in rows]
    assert times == sorted(times, reverse=True)
    by_broker = [int(row["preview"]) for row in rows if row["broker"] == "broker-a"]
    assert by_broker == sorted(by_broker, reverse=True)


@pytest.fixture
async def masked(desk):
    async with console_of(desk.cluster, masked=("email", "customer.card")) as browser:
        yield browser


async def test_masked_fields_are_stars_wherever_a_body_is_shown(desk, masked):
    body = {"Customer": {"card": "4111", "email": "eva@example.org"}, "card": "fine", "n": 1}
    sent = await desk.world.send(QUEUE, json.dumps(body).encode(), KEYS="k")
    await desk.world.die(QUEUE, json.dumps(body).encode(), "why", group="billing", KEYS="d")

    places = [
        f"/messages/one?id={sent.msg_id}",
        f"/messages/body?id={sent.msg_id}",
        f"/messages/body?id={sent.msg_id}&form=hex",
        f"/messages/track?id={sent.msg_id}",
        "/messages?topic=orders",
        "/messages?topic=orders&key=k",
        "/dead-letters/billing",
        "/dead-letters/billing/letters",
        "/dead-letters/billing/export?format=jsonl",
    ]
    answers = {each: (await masked.ask("GET", "/api/v1" + each)).body for each in places}
    parquet = await masked.ask("GET", "/api/v1/dead-letters/billing/export?format=parquet")

    for place, answer in answers.items():
        assert b"4111" not in answer, place
        assert b"eva@example" not in answer, place
        assert b"34 31 31 31" not in answer, place
    assert b"4111" not in parquet.body
    shown = json.loads(answers[f"/messages/body?id={sent.msg_id}"])
    assert shown == {"Customer": {"card": "***", "email": "***"}, "card": "fine", "n": 1}
    assert await masked.get("/messages?topic=orders&where=email+exists", 400)
    # A copy has all of it: what is hidden here is not lost.
    await masked.post("/messages/resend", {"id": sent.msg_id})
    assert desk.cluster.messages("orders")[-1].body == json.dumps(body).encode()


@pytest.mark.parametrize(
    ("body", "is_hidden"),
    [
        (b'{"email": "eva@example.org", ', True),
        (b"\x00\x81\xa5email", True),
        (b"page=3", False),
        (b"[1, 2]", False),
        (gzip.compress(b'{"email": "eva@example.org"}', mtime=0), True),
    ],
)
async def test_a_body_without_fields_is_hidden_when_it_may_have_masked_ones(
    desk, masked, body, is_hidden
):
    sent = await desk.world.send(QUEUE, body)

    row = await masked.get(f"/messages/one?id={sent.msg_id}")

    assert row["is_masked"] is is_hidden
    assert "hex" in row["forms"] or is_hidden
    assert "eva" not in json.dumps(row["forms"])


def test_a_masked_field_has_a_name():
    with pytest.raises(SettingError, match=r"card or customer\.email"):
        ConsoleSettings(client=quick_settings("127.0.0.1:9"), masked=("customer..email",))


async def test_a_message_is_sent_again_as_it_was(desk):
    sent = await desk.world.send(QUEUE, b"paid", KEYS="k-1 k-2", TAGS="paid", city="Porto")

    told = await desk.browser.post("/messages/resend", {"id": sent.msg_id, "dry_run": True})
    done = await desk.browser.post("/messages/resend", {"id": sent.msg_id})

    assert told["command"].startswith(
        "orbitmq produce orders paid --tag paid --keys k-1 --keys k-2"
    )
    copy = desk.cluster.messages("orders")
    assert len(copy) == 2
    (again,) = [each for each in copy if each.get_property("UNIQ_KEY") == done["id"]]
    assert (again.body, again.keys, again.get_property("city")) == (b"paid", "k-1 k-2", "Porto")


async def test_the_page_of_a_group_and_its_pile_have_one_number_of_dead_letters(desk):
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await die(desk.world, 5)
    page = desk.browser
    await page.until("/now", lambda found: found["open_letters"] == 5)
    begun = await page.post("/dead-letters/billing/replay", {"count": 2}, 202)
    await page.until(f"/replays/{begun['id']}", lambda found: not found["is_running"])

    now = await page.until("/now", lambda found: found["open_letters"] == 3)
    pile = await page.get("/dead-letters/billing")
    group = await page.get("/groups/billing")

    assert now["dying"][0]["open_letters"] == pile["open"] == 3
    assert sum(each["open"] for each in pile["reasons"]) == 3
    assert (group["sample"]["open_letters"], group["sample"]["resent"]) == (3, 2)
    assert pile["count"] == 5
