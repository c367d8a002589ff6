"""Our producer with Apache's broker: what it sends, Apache's consumers and ours both get.

Every message is accounted for, as in the tests of the Java client with our broker.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.errors import RecallUnsupported, TimesUnsupported
from orbitmq.client.message import Message
from orbitmq.client.producer.core import Compression, SendSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.send import SendResult
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.wire.codes import TransactionState
from tests.interop.beside import (
    Beside,
    Line,
    Taken,
    eventually,
    java_count,
    number_in,
    number_of,
    until,
)
from tests.interop.session import body

if TYPE_CHECKING:
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.producer.producer import AsyncProducer

#: The row is a list of what works; it is shown when every test of these files has passed.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300), pytest.mark.feature("J4")]

COUNT = 20


def _message(topic: str, number: int, *, size: int = 0) -> Message:
    text = f"body-{number} ".ljust(size, "x") if size else f"body-{number}"
    return Message(
        topic,
        text,
        tags=("red", "blue")[number % 2],
        keys=[f"k{number}", f"also-{number}"],
        properties={"colour": "blau", "straße": "groß 👍"},
        flag=number,
    )


async def _await_each(producer: AsyncProducer, topic: str) -> list[SendResult]:
    return [await producer.send(_message(topic, number)) for number in range(COUNT)]


async def _submit(producer: AsyncProducer, topic: str) -> list[SendResult]:
    futures = [await producer.submit(_message(topic, number)) for number in range(COUNT)]
    return list(await asyncio.gather(*futures))


async def _one_way(producer: AsyncProducer, topic: str) -> list[SendResult]:
    for number in range(COUNT):
        await producer.send_one_way(_message(topic, number))
    return []


async def _batch(producer: AsyncProducer, topic: str) -> list[SendResult]:
    return await producer.send_batch([_message(topic, number) for number in range(COUNT)])


async def _large(producer: AsyncProducer, topic: str) -> list[SendResult]:
    return [await producer.send(_message(topic, number, size=9000)) for number in range(COUNT)]


async def _to_one_queue(producer: AsyncProducer, topic: str) -> list[SendResult]:
    queue = Queue(topic, "broker-a", 2)
    return [await producer.send(_message(topic, number), queue=queue) for number in range(COUNT)]


WAYS: dict[str, Callable[[AsyncProducer, str], Awaitable[list[SendResult]]]] = {
    "await": _await_each,
    "submit": _submit,
    "one-way": _one_way,
    "batch": _batch,
    "compressed": _large,
    "one-queue": _to_one_queue,
}


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_sent_is_consumed_once_in_both_languages(beside, way):
    topic = f"OurSent-{way}"
    await beside.create_topic(topic)
    taken = Taken()

    async with beside.producer() as producer:
        sent = await WAYS[way](producer, topic)
        async with (
            beside.java_consumer(topic, f"java-of-{way}") as java,
            beside.consumer(topic, f"ours-of-{way}", taken),
        ):
            lines = await java_count(java, COUNT)
            await taken.until_count(COUNT)

    _check_same(lines, taken.messages)
    assert Counter(number_of(line) for line in lines) == Counter(range(COUNT))
    for message in taken.messages:
        number = number_in(message.text())
        assert message.tags == ("red", "blue")[number % 2]
        assert message.keys == (f"k{number}", f"also-{number}")
        assert message.get("straße") == "groß 👍"
        assert (message.flag, message.reconsume_times) == (number, 0)
    _check_results(way, sent, taken.messages)
    for group in (f"java-of-{way}", f"ours-of-{way}"):
        await beside.until_all_consumed(group, topic)


def _check_same(lines: list[Line], messages: list[ReceivedMessage]) -> None:
    """Both consumers got the same messages and understand them alike."""
    of_java = {(line["queueId"], line["queueOffset"]): line for line in lines}
    of_ours = {(each.queue.id, each.queue_offset): each for each in messages}
    assert of_java.keys() == of_ours.keys()
    assert len(of_java) == len(lines) == len(messages)
    for place, line in of_java.items():
        message = of_ours[place]
        assert body(line) == message.text()
        assert line["msgId"] == message.msg_id
        assert line["topic"] == message.topic
        assert line["flag"] == message.flag
        assert line["bornTimestamp"] == message.stored.born_ms
        assert line["storeTimestamp"] == message.stored.store_ms
        # What clients put in themselves on arrival is left out.
        added = {"MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME"}
        of_line = {k: v for k, v in line["properties"].items() if k not in added}
        assert of_line == {k: v for k, v in message.properties.items() if k not in added}


def _check_results(way: str, sent: list[SendResult], messages: list[ReceivedMessage]) -> None:
    """What the producer was told is where its messages are, in the order of sending."""
    if way == "one-way":
        assert sent == []
        return
    by_number = {number_in(message.text()): message for message in messages}
    for number, result in enumerate(sent):
        message = by_number[number]
        assert result.is_ok
        assert result.msg_id == message.msg_id
        assert result.offset_id == message.offset_id
        assert (result.queue, result.queue_offset) == (message.queue, message.queue_offset)
    if way == "one-queue":
        assert {result.queue.id for result in sent} == {2}
    if way == "batch":
        assert len({result.queue for result in sent}) == 1


async def test_programs_without_a_loop_send(beside):
    await beside.create_topic("OurBlocking")

    def send_all():
        with Producer("our-blocking", client=beside.settings()) as producer:
            sent = [producer.send("OurBlocking", f"sent-{number}") for number in range(5)]
            later = [producer.submit("OurBlocking", f"later-{number}") for number in range(5)]
            sent += [each.result(10) for each in later]
            sent += producer.send_batch(
                [Message("OurBlocking", f"batch-{number}") for number in range(5)]
            )
            producer.send_one_way("OurBlocking", "away-0")
            return sent

    async with beside.java_consumer("OurBlocking", "java-of-blocking") as java:
        sent = await asyncio.to_thread(send_all)
        lines = await java_count(java, 16)

    ways = ("sent", "later", "batch")
    wanted = [f"{way}-{number}" for way in ways for number in range(5)]
    assert Counter(map(body, lines)) == Counter([*wanted, "away-0"])
    assert {result.msg_id for result in sent} < {line["msgId"] for line in lines}


async def test_a_topic_is_made_by_sending_to_it(beside):
    async with beside.producer() as producer:
        first = await producer.send("OurMadeBySending", "body-0")
        async with beside.java_consumer("OurMadeBySending", "java-of-made") as java:
            lines = await java_count(java, 1)

    assert first.is_ok
    assert [line["msgId"] for line in lines] == [first.msg_id]
    async with beside.admin() as admin:
        assert (await admin.topics.get("OurMadeBySending")).write_queues == 8


#: With hashes of both signs, the smallest one, and characters outside of the first plane.
KEYS = (
    "order-1", "order-2", "a", "Kunde Müller", "鍵", "👍🏽", "polygenelubricants", "customer/77",
    "GydZG_", "DESIGNING WORKHOUSES", "0", "-1", "2147483647", "-2147483648", "4294967296",
    "-9223372036854775808", "9007199254740993",
)  # fmt: skip


@pytest.mark.feature("K4")
async def test_a_key_means_the_same_queue_in_both_languages(beside):
    # Seven, so that neither the remainder nor its sign is right by chance.
    await beside.create_topic("OurKeys", queues=7)
    of_java = await beside.java_send("OurKeys", len(KEYS), hash=",".join(KEYS))

    async with beside.producer() as producer:
        ours = [await producer.send("OurKeys", "body-0", ordering_key=key) for key in KEYS]

    # The driver in Java makes numbers of what looks like one, and an ordering key is a text.
    texts = [key for key in KEYS if not key.lstrip("-").isdigit()]
    java = {key: line["queueId"] for key, line in zip(KEYS, of_java, strict=True)}
    python = {key: sent.queue.id for key, sent in zip(KEYS, ours, strict=True)}
    assert [python[key] for key in texts] == [java[key] for key in texts]
    assert len({java[key] for key in texts}) > 2


@pytest.mark.parametrize("level", [1, 3])
async def test_a_message_with_a_delay_level_comes_when_it_is_due(beside, level):
    topic = f"OurLevel-{level}"
    await beside.create_topic(topic, queues=2)
    taken = Taken()

    async with (
        beside.java_consumer(topic, f"java-level-{level}") as java,
        beside.consumer(topic, f"ours-level-{level}", taken),
        beside.producer() as producer,
    ):
        sent = [
            await producer.send(topic, f"body-{number}", delay_level=level, tags="late")
            for number in range(4)
        ]
        lines = await java_count(java, 4)
        await taken.until_count(4)

    _check_same(lines, taken.messages)
    assert Counter(number_of(line) for line in lines) == Counter(range(4))
    assert {line["msgId"] for line in lines} == {result.msg_id for result in sent}
    for line in lines:
        # This broker's level n is n seconds. Not before, and after it what a busy machine takes.
        waited = line["storeTimestamp"] - line["bornTimestamp"]
        assert level * 1000 - 50 <= waited < level * 1000 + 10_000


@pytest.mark.parametrize("how", ["delay", "deliver_at"])
async def test_a_message_comes_at_any_time_that_it_names(beside, how):
    topic = f"OurAnyTime-{how}"
    await beside.create_topic(topic, queues=2)
    if beside.release.is_old_line:
        await _check_refused(beside, topic, how)
        return
    async with (
        beside.java_consumer(topic, f"java-any-{how}") as java,
        beside.producer() as producer,
    ):
        sent = []
        for number in range(4):
            due = {"delay": 2.5} if how == "delay" else {"deliver_at": time.time() + 2.5}
            sent.append(await producer.send(Message(topic, f"body-{number}", **due)))  # type: ignore[arg-type]
        lines = await java_count(java, 4)

    assert all(result.is_ok for result in sent)
    assert Counter(number_of(line) for line in lines) == Counter(range(4))
    for line in lines:
        assert 2000 <= line["storeTimestamp"] - line["bornTimestamp"] < 12_500


async def _check_refused(beside: Beside, topic: str, how: str) -> None:
    """Brokers of the old line know delay levels only, and would deliver at once."""
    due = {"delay": 2.5} if how == "delay" else {"deliver_at": time.time() + 2.5}
    taken = Taken()
    async with beside.consumer(topic, f"ours-{topic}", taken), beside.producer() as producer:
        with pytest.raises(TimesUnsupported, match=r"4\.9.*delay_level"):
            await producer.send(Message(topic, "body-0", **due))  # type: ignore[arg-type]
        await producer.send(Message(topic, "body-1", delay_level=1))
        await taken.until_count(1)

    assert taken.texts == ["body-1"]


async def test_a_message_that_waits_is_taken_back(beside):
    await beside.create_topic("OurRecalled", queues=1)
    if beside.release.is_old_line:
        handle = base64.urlsafe_b64encode(b"v1 OurRecalled broker-a 1700000000000 7F00").decode()
        async with beside.producer() as producer:
            with pytest.raises(RecallUnsupported, match="takes no messages back"):
                await producer.recall("OurRecalled", handle)
        return
    async with (
        beside.java_consumer("OurRecalled", "java-recalled") as java,
        beside.producer() as producer,
    ):
        unwanted = await producer.send("OurRecalled", "body-0", delay=6.0)
        await producer.send("OurRecalled", "body-1", delay=8.0)
        assert unwanted.recall_handle is not None
        taken_back = await producer.recall("OurRecalled", unwanted.recall_handle)
        lines = await java_count(java, 1)
        with pytest.raises(BrokerRefused):
            await producer.recall("OurRecalled", unwanted.recall_handle)

    assert taken_back == unwanted.msg_id
    assert [body(line) for line in lines] == ["body-1"]


async def test_transactions_are_committed_rolled_back_and_checked(beside):
    await beside.create_topic("OurPaid", queues=3)
    checked: list[ReceivedMessage] = []

    async def check(message):
        checked.append(message)
        return number_in(message.text()) != 8

    def decide(message, _):
        states = (TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN)
        return states[number_in(message.body.decode()) % 3]

    async with (
        beside.java_consumer("OurPaid", "java-cashiers") as java,
        beside.producer("our-payers", check=check) as producer,
    ):
        ended = [
            await producer.send_in_transaction(
                Message("OurPaid", f"body-{number}", keys=f"paid-{number}"), decide
            )
            for number in range(9)
        ]
        lines = await java_count(java, 5)
        await until(lambda: {number_in(each.text()) for each in checked} >= {2, 5, 8})

    # 0, 3 and 6 are committed; 1, 4 and 7 rolled back; asked about 2, 5 and 8, it drops the last.
    assert Counter(number_of(line) for line in lines) == Counter([0, 3, 6, 2, 5])
    assert {number_in(message.text()) for message in checked} == {2, 5, 8}
    by_number = {number: each.sent for number, each in enumerate(ended)}
    for line in lines:
        number = number_of(line)
        assert line["msgId"] == by_number[number].msg_id
        assert line["properties"]["KEYS"] == f"paid-{number}"
        assert line["sysFlag"] & 0xC == 0x8
    for message in checked:
        assert message.msg_id == by_number[number_in(message.text())].msg_id
        assert message.topic == "OurPaid"

    async def are_all_ended():
        async with beside.admin() as admin:
            return (await admin.topics.status("OurPaid")).messages == 5

    await eventually(are_all_ended)


async def test_requests_and_replies_pass_between_the_languages(beside):
    await beside.create_topic("OurQuestions", queues=2)
    async with (
        beside.java_consumer("OurQuestions", "java-repliers", reply="") as java,
        beside.producer("our-askers") as producer,
    ):
        replies = [
            await producer.request("OurQuestions", f"question-{number}", timeout=20)
            for number in range(5)
        ]
        lines = await java_count(java, 5)

    assert [each.text() for each in replies] == [f"question-{n}"[::-1] for n in range(5)]
    asked = Counter(body(line) for line in lines)
    assert asked == Counter(f"question-{number}" for number in range(5))
    assert len({each.properties["CORRELATION_ID"] for each in replies}) == 5


async def test_we_reply_to_requests_of_both_languages(beside):
    await beside.create_topic("OurAnswers", queues=2)
    async with beside.producer("our-repliers") as producer:

        async def answer(message):
            await producer.reply(message, message.text()[::-1], properties={"by": "us"})

        consumer = beside.consumer("OurAnswers", "our-repliers", answer)
        async with consumer, beside.producer("our-askers") as asker:
            lines = await beside.java(
                "request", topic="OurAnswers", count=5, prefix="question-", patience=20_000
            )
            ours = await asker.request("OurAnswers", "ours", timeout=20)

    assert [line.get("refused") for line in lines] == [None] * 5
    assert [body(line) for line in lines] == [f"question-{number}"[::-1] for number in range(5)]
    assert {line["properties"]["by"] for line in lines} == {"us"}
    assert (ours.text(), ours.get("by")) == ("sruo", "us")


@pytest.mark.feature("K8")
@pytest.mark.parametrize("kind", list(Compression), ids=lambda kind: kind.name)
async def test_compressed_bodies_are_read_in_the_other_language(beside, kind):
    topic = f"OurSmall-{kind.name}"
    await beside.create_topic(topic, queues=1)
    of_java, of_ours = Taken(), Taken()

    # The new line reads what it cannot; what was small stays as it is.
    async with beside.producer(sending=SendSettings(compression=kind)) as producer:
        large = "body-0 " + "many words and more " * 500
        small = f"body-1 {'x' * 100}"
        for text in (large, small):
            await producer.send(topic, text, tags="ours")
    await beside.java_send(topic, 1, size=9000, compression=kind.name, tag="java")
    async with (
        beside.java_consumer(topic, f"java-{kind.name}", expression="ours") as java,
        beside.consumer(topic, f"ours-j-{kind.name}", of_java, tags="java"),
        beside.consumer(topic, f"ours-o-{kind.name}", of_ours, tags="ours"),
    ):
        lines = await java_count(java, 2)
        await of_java.until_count(1)
        await of_ours.until_count(2)

    assert {body(line) for line in lines} == set(of_ours.texts) == {large, small}
    (made,) = of_java.messages
    assert len(made.body) >= 9000
    assert made.text().startswith("body-0 and on ")
    assert _compression(made) == kind
    by_size = sorted(of_ours.messages, key=lambda message: len(message.body))
    assert [_compression(message) for message in by_size] == [None, kind]
    assert len(made.stored.stored_body) < 9000


def _compression(message: ReceivedMessage) -> int | None:
    flag = message.stored.sys_flag
    return flag & 0x700 if flag & 1 else None
