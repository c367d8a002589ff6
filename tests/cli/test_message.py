"""`orbitmq message`: by id, key, place and time, and what became of one."""

from __future__ import annotations

import json

import pytest

from orbitmq.wire.codes import RequestCode


@pytest.fixture(scope="module")
def sent(cluster, cli):
    cluster.create_topic("orders", queues=2)
    words = (
        "--keys",
        "order-1",
        "--tag",
        "paid",
        "--property",
        "amount=7",
        "--queue",
        "broker-a:0",
    )
    return cli.records("produce", "orders", '{"n":1}', "two", *words) + cli.records(
        *("produce", "orders", "--input", "whole", "--queue", "broker-b:1"), stdin=b"\x00\xff"
    )


def test_one_message_is_shown_by_its_id_its_place_and_its_offset_id(cli, sent):
    by_id = cli.record("message", "get", sent[0]["id"], "--topic", "orders")
    by_offset_id = cli.record("message", "get", sent[0]["offset_id"])
    by_place = cli.record("message", "at", "orders", "broker-a:0", "0")

    assert by_id == by_offset_id == by_place
    assert by_id["body"] == '{"n":1}'
    assert (by_id["tags"], by_id["keys"]) == ("paid", ["order-1"])
    assert by_id["properties"]["amount"] == "7"
    assert (by_id["broker"], by_id["queue_id"], by_id["queue_offset"]) == ("broker-a", 0, 0)


def test_bodies_are_shown_as_text_json_or_hex(cli, sent):
    place = ("message", "at", "orders", "broker-a:0")

    assert '{\n  "n": 1\n}' in cli.text(*place, "0")
    assert '{"n":1}' in cli.text(*place, "0", "--format", "text")
    assert "7b 22 6e 22" in cli.text(*place, "0", "--format", "hex")
    assert "is not JSON" in cli.refusal_after(*place, "1", "--format", "json", code=2)
    binary = cli.record("message", "at", "orders", "broker-b:1", "0")
    assert (binary["body"], binary["body_base64"]) == (None, "AP8=")


def test_messages_are_found_by_key(cli, sent):
    found = cli.records("message", "find", "orders", "order-1")
    one = cli.records("message", "find", "orders", "order-1", "--limit", "1")
    past = cli.run("message", "find", "orders", "order-1", "--until", "1h")

    assert [each["body"] for each in found] == ["two", '{"n":1}']
    assert [each["body"] for each in one] == ["two"]
    assert past.returncode == 1
    assert "no message of topic 'orders' has the key 'order-1'" in past.stderr


def test_a_topic_is_walked_through_page_by_page(cli, sent):
    everything = cli.records("message", "browse", "orders", "--limit", "0")
    first = cli.run("message", "browse", "orders", "--limit", "2", "--json")
    cursor = first.stderr.partition("--cursor ")[2].strip()
    second = cli.records("message", "browse", "orders", "--limit", "2", "--cursor", cursor)
    newest = cli.records("message", "browse", "orders", "--newest", "--limit", "1")

    assert [each["id"] for each in everything] == [each["id"] for each in sent]
    assert len(first.stdout.splitlines()) == 2
    assert [each["id"] for each in second] == [sent[2]["id"]]
    assert newest[0]["id"] == sent[2]["id"]


def test_a_walk_without_a_limit_prints_each_message_when_it_is_found(cluster, cli, monkeypatch):
    cluster.create_topic("long", queues=1)
    cluster.send("long", *[b"x"] * 100)
    for broker in cluster.brokers:
        assert broker.dispatcher is not None
        handlers = broker.dispatcher.handlers

        def pull(connection, request, usual=handlers[RequestCode.PULL_MESSAGE]):
            # Only the beginning of a queue is answered.
            return None if int(request.ext_fields["queueOffset"]) else usual(connection, request)

        monkeypatch.setitem(handlers, RequestCode.PULL_MESSAGE, pull)

    words = ("message", "browse", "long", "--limit", "0", "--json", "--request-timeout", "0.5")
    with cli.start(*words) as browsing:
        browsing.wait()

    assert "did not answer" in browsing.errors
    assert json.loads(browsing.lines[0])["queue_offset"] == 0


def test_a_walk_is_limited_to_queues_tags_conditions_and_times(cli, sent):
    def bodies(*words):
        return [each["body"] for each in cli.records("message", "browse", "orders", *words)]

    assert bodies("--queue", "broker-b:1") == [None]
    assert bodies("--tags", "paid || x") == ['{"n":1}', "two"]
    assert bodies("--sql", "amount > 6") == ['{"n":1}', "two"]
    assert bodies("--sql", "amount > 7") == []
    assert bodies("--until", "1h") == []
    assert len(bodies("--since", "1h")) == 3


def test_a_message_is_tracked_through_the_groups(cluster, cli, sent):
    cli.record("group", "create", "early")
    cli.record("group", "reset", "early", "orders", "--to", "latest", "--yes")
    cli.record("group", "create", "late")
    cli.record("group", "reset", "late", "orders", "--to", "earliest", "--yes")

    tracks = cli.records("message", "track", sent[0]["id"], "--topic", "orders")
    text = cli.text("message", "track", sent[0]["id"], "--topic", "orders")

    assert {each["group"]: each["fate"] for each in tracks} == {
        "early": "consumed",
        "late": "waiting",
    }
    assert "not consumed yet" in text


def test_the_id_that_sending_prints_is_found_without_its_topic_and_after_it(cli, sent):
    unique_id = sent[0]["id"]

    alone = cli.record("message", "get", unique_id)
    after = cli.record("message", "get", "orders", unique_id)

    assert alone == after
    assert alone["body"] == '{"n":1}'
    assert unique_id in cli.text("message", "track", "orders", unique_id)


def test_an_id_that_nobody_has_is_told_with_what_else_it_may_be(cli, sent):
    unknown = sent[0]["id"][:-4] + "FFFF"

    assert "no topic has a message with this unique id" in cli.refusal(
        "message", "get", unknown, code=1
    )
    twice = ("message", "track", "orders", unknown, "--topic", "orders")
    assert "ID --topic orders" in cli.refusal(*twice, code=2)
