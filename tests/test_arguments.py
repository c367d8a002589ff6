"""Misspelled and former names of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from orbitmq import (
    Admin,
    AsyncConsumer,
    AsyncProducer,
    ClientSettings,
    Consumer,
    Message,
    Producer,
    PullConsumer,
    SendSettings,
)
from orbitmq.errors import MessageRefused
from orbitmq.spark import consume
from orbitmq.testing import EmbeddedCluster

Call = Callable[..., Any]


def _create(**names: Any) -> None:
    with Admin() as admin:
        admin.topics.create("orders", **names)


def _send(**names: Any) -> None:
    with Producer("svc") as producer:
        producer.send("orders", **names)


@pytest.mark.parametrize(
    ("called", "wrong", "meant"),
    [
        (lambda **names: Producer("svc", **names), "bootstrap_servers", "name_server"),
        (lambda **names: AsyncProducer("svc", **names), "namesrv_addr", "name_server"),
        (Consumer, "group_id", "group"),
        (lambda **names: Consumer("billing", **names), "servers", "name_server"),
        (lambda **names: Consumer("billing", **names), "auto_offset_reset", "consume_from"),
        (lambda **names: Consumer("billing").on("orders", **names), "tag", "tags"),
        (lambda **names: AsyncConsumer("billing").on("orders", **names), "tgas", "tags"),
        (lambda **names: PullConsumer("billing", **names), "bootstrap_server", "name_server"),
        (lambda **names: PullConsumer("billing").subscribe("orders", **names), "tag", "tags"),
        (Admin, "server", "name_server"),
        (_create, "partitions", "queues"),
        (lambda **names: Message("orders", b"x", **names), "headers", "properties"),
        (SendSettings, "retires", "retries"),
        (lambda **names: Producer("svc", **names), "value_serializer", "serializer"),
        (lambda **names: Producer("svc", **names), "nam", "name_server"),
        (ClientSettings, "name_server", "name_servers"),
        (_send, "value", "body"),
        (_send, "idempotency_key", "dedup_id"),
        (lambda **names: consume(cast("Any", None), "svc", **names), "nameServer", "name_server"),
    ],
)
def test_a_wrong_name_is_answered_with_the_one_that_was_meant(called: Call, wrong, meant):
    with pytest.raises(TypeError, match=rf"\(\) has no argument '{wrong}'; did you mean '{meant}'"):
        called(**{wrong: "x"})


def test_the_number_of_a_partition_is_refused_as_a_queue():
    with pytest.raises(
        MessageRefused, match=r"queue must be one of producer\.queues\(topic\), got 0"
    ):
        _send(body=b"x", queue=cast("Any", 0))


@pytest.mark.parametrize("method", ["send", "submit", "send_one_way", "request", "send_batch"])
@pytest.mark.parametrize("body", ["x", "x" * 200_000])
async def test_the_error_names_the_method_that_was_called(method, body):
    wrong: Any = {"timeot": 3}
    message = Message("orders", body)
    given = ([message],) if method == "send_batch" else (message,)
    expected = rf"Producer\.{method}\(\) has no argument 'timeot'; did you mean 'timeout'"

    with EmbeddedCluster() as cluster:
        with (
            Producer("svc", name_server=cluster.name_server) as producer,
            pytest.raises(TypeError, match=f"^{expected}"),
        ):
            getattr(producer, method)(*given, **wrong)
        async with AsyncProducer("svc", name_server=cluster.name_server) as asynchronous:
            with pytest.raises(TypeError, match=f"^Async{expected}"):
                await getattr(asynchronous, method)(*given, **wrong)


def test_a_setting_of_other_clients_that_is_not_needed_is_explained():
    with pytest.raises(TypeError, match="no argument 'acks': a send returns when the broker has"):
        Producer("svc", acks="all")  # type: ignore[call-arg]


def test_a_name_like_no_other_is_answered_with_all_names():
    wrong: Any = {"colour": "red"}

    with pytest.raises(TypeError, match=r"^SendSettings\(\) has no argument 'colour'; it takes "):
        SendSettings(**wrong)


def test_an_error_of_a_callback_stays_as_it_is():
    def local(message: Message, _: str) -> bool:
        raise TypeError("of the callback")

    with (
        EmbeddedCluster() as cluster,
        Producer("svc", name_server=cluster.name_server) as producer,
        pytest.raises(TypeError, match="of the callback"),
    ):
        producer.send_in_transaction(Message("orders", b"x"), local)


def test_tag_is_another_name_of_tags():
    assert Message("orders", b"x", tag="paid") == Message("orders", b"x", tags="paid")
    with pytest.raises(MessageRefused, match="tag is another name of tags"):
        Message("orders", b"x", tag="paid", tags="paid")


@pytest.mark.parametrize("former", ["key", "sharding_key"])
def test_a_former_name_works_and_warns_where_it_is_written(former):
    name: Any = {former: "order-1"}

    with EmbeddedCluster() as cluster, Producer("svc", name_server=cluster.name_server) as producer:
        cluster.create_topic("orders", queues=8)
        present = producer.send("orders", b"x", ordering_key="order-1")
        with pytest.warns(DeprecationWarning, match="use ordering_key=") as warned:
            sent = producer.send("orders", b"x", **name)

    assert sent.queue == present.queue
    assert {each.filename for each in warned} == {__file__}


def test_the_name_server_is_the_environments_or_the_usual_one(monkeypatch):
    with EmbeddedCluster() as cluster:
        monkeypatch.setenv("ORBITMQ_NAME_SERVER", cluster.name_server)
        with Admin() as admin:
            assert admin.cluster().is_healthy
