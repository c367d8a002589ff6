"""Transactions: half messages, their ends, the questions about them, and crashes in between."""

from __future__ import annotations

import errno
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orbitmq.broker import transactions
from orbitmq.broker.settings import SendSettings, TransactionSettings
from orbitmq.broker.transactions import Verdict, judge
from orbitmq.broker.writes import Draft
from orbitmq.message.stored import StoredMessage
from orbitmq.store.settings import DiskFull, FlushPolicy
from orbitmq.wire.codes import RequestCode, ResponseCode, TransactionState
from orbitmq.wire.headers import (
    CheckTransactionStateRequest,
    ResumeCheckHalfMessageRequest,
    SendMessageResponse,
)
from tests.support.broker import SMALL_STORE, until
from tests.support.delivery import (
    AskedProducer,
    HandBroker,
    end_header,
    hand_broker,
    record_of,
    send_half,
)
from tests.support.slowdisk import GatedFiles
from tests.support.store import FailingFiles, HandClock, with_policy

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
OP = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP = "TRANS_CHECK_MAX_TIME_TOPIC"
COMMIT = TransactionState.COMMIT
ROLLBACK = TransactionState.ROLLBACK
INTERVAL = 30.0


@pytest.fixture
async def broker(tmp_path):
    async with hand_broker(tmp_path) as (broker, _):
        yield broker


@pytest.fixture
async def producer(broker):
    producer = await AskedProducer.join(broker.broker)
    yield producer
    await producer.close()


def check(broker: HandBroker) -> None:
    """Let half a minute pass, and go through the half queue."""
    broker.clock.advance(INTERVAL)
    checks = broker.parts.transactions
    for _ in range(1000):
        position = checks.halves.position
        again = checks.step(broker.clock.now())
        broker.parts.writes.finish()
        is_due = again is not None and again <= broker.clock.now()
        if not is_due and position == checks.halves.position:
            break
    broker.parts.store.settle()
    broker.parts.store.wait_flushed(broker.parts.store.statistics().log_end)


async def asked(producer: AskedProducer) -> list[bytes]:
    """The messages that a producer has been asked about, once all questions have arrived."""
    await producer.heartbeat("producer@1", producers=("makers",))
    return [record_of(question).body for question in producer.questions]


# Half messages and their ends.


async def test_a_committed_message_is_seen_as_it_was_sent(broker, producer):
    half = await send_half(producer, "T", b"x", broker, KEYS="k", TAGS="a", colour="red")
    prepared = broker.messages(HALF)[0]

    answer = await producer.end(end_header(half, COMMIT))
    message = broker.messages("T")[0]

    assert answer.code == ResponseCode.SUCCESS
    assert message.body == b"x"
    assert (message.keys, message.tags, message.unique_id) == ("k", "a", half.transaction_id)
    assert message.transaction_type == COMMIT
    assert message.prepared_offset == prepared.physical_offset
    assert (message.born_ms, message.born_host) == (prepared.born_ms, prepared.born_host)
    assert (message.properties["colour"], message.properties["TRAN_MSG"]) == ("red", "true")
    assert not {"REAL_TOPIC", "REAL_QID"} & set(message.properties)
    assert [(op.body, op.tags) for op in broker.messages(OP)] == [(b"0,", "d")]


async def test_a_delay_does_not_take_a_half_message_out_of_its_transaction(broker, producer):
    half = await send_half(producer, "T", b"x", broker, DELAY="3", TIMER_DELAY_SEC="9")

    await producer.end(end_header(half, COMMIT))

    assert broker.bodies("T") == [b"x"]


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"producer_group": "others"}, ResponseCode.SYSTEM_ERROR, "producer group"),
        ({"tran_state_table_offset": 7}, ResponseCode.SYSTEM_ERROR, "table offset"),
        ({"commit_log_offset": 1 << 40}, ResponseCode.SYSTEM_ERROR, "prepared"),
        ({"commit_log_offset": 1}, ResponseCode.SYSTEM_ERROR, "prepared"),
    ],
)
async def test_an_end_that_does_not_fit_is_refused(broker, producer, fields, code, text):
    half = await send_half(producer, "T", b"x", broker)

    answer = await producer.end(end_header(half, COMMIT, **fields))

    assert answer.code == code
    assert text in (answer.remark or "")
    assert broker.messages("T") == []


async def test_an_ordinary_message_cannot_be_committed(broker, producer):
    sent = await producer.stored("T", b"x", properties={"PGROUP": "makers"})

    answer = await producer.end(end_header(sent, COMMIT))

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert len(broker.messages("T")) == 1


async def test_an_end_that_is_not_known_yet_is_not_answered(broker, producer):
    half = await send_half(producer, "T", b"x", broker)
    unanswered: list[object] = []
    producer.connection.submit(
        RequestCode.END_TRANSACTION, end_header(half, 0), unanswered.append, timeout=0.05
    )

    await until(lambda: unanswered)

    assert "RequestTimedOut" in repr(unanswered[0])
    assert broker.messages(OP) == []


async def test_transactions_can_be_switched_off(tmp_path):
    async with hand_broker(tmp_path, send=SendSettings(reject_transactions=True)) as (_, client):
        answer = await client.send("T", properties={"TRAN_MSG": "true", "PGROUP": "makers"})

        assert answer.code == ResponseCode.NO_PERMISSION


async def test_a_late_end_of_a_message_with_its_own_time_has_to_wait_to_be_asked(broker, producer):
    half = await send_half(producer, "T", b"x", broker, CHECK_IMMUNITY_TIME_IN_SECONDS="5")
    broker.clock.advance(5.001)

    late = await producer.end(end_header(half, COMMIT))
    asked = await producer.end(end_header(half, COMMIT, from_transaction_check=True))

    assert late.code == ResponseCode.ILLEGAL_OPERATION
    assert asked.code == ResponseCode.SUCCESS


async def test_a_commit_that_the_disk_refuses_leaves_the_transaction_open(tmp_path):
    files = FailingFiles()
    async with hand_broker(tmp_path, files=files) as (broker, _):
        producer = await AskedProducer.join(broker.broker)
        half = await send_half(producer, "T", b"x", broker)
        files.fail("pwrite", errno.ENOSPC)
        refused = await producer.end(end_header(half, COMMIT))
        files.heal()

        before = broker.bodies("T")
        again = await producer.end(end_header(half, COMMIT))
        await producer.close()

        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert before == []
        assert again.code == ResponseCode.SUCCESS
        assert broker.bodies("T") == [b"x"]


async def test_a_commit_whose_mark_fails_stores_nothing(broker, producer):
    half = await send_half(producer, "T", b"x", broker)
    real = broker.parts.unique_ids

    def fail_once():
        broker.parts.unique_ids = real
        raise DiskFull("no room for the mark")

    broker.parts.unique_ids = fail_once
    refused = await producer.end(end_header(half, COMMIT))
    before = broker.bodies("T")
    again = await producer.end(end_header(half, COMMIT))

    assert (refused.code, again.code) == (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SUCCESS)
    assert (before, broker.bodies("T")) == ([], [b"x"])


async def test_a_producer_cannot_end_the_transaction_of_another_in_its_name(broker, producer):
    """Which transaction a half message belongs to is for the broker to say."""
    victim = await send_half(producer, "T", b"money", broker)
    claim = {"TRAN_PREPARED_QUEUE_OFFSET": str(victim.queue_offset)}
    other = await send_half(producer, "other", b"other", broker, **claim)

    rolled_back = await producer.end(end_header(other, ROLLBACK))
    committed = await producer.end(end_header(victim, COMMIT))

    assert (rolled_back.code, committed.code) == (ResponseCode.SUCCESS, ResponseCode.SUCCESS)
    assert broker.bodies("T") == [b"money"]
    assert "TRAN_PREPARED_QUEUE_OFFSET" not in broker.messages(HALF)[1].properties


async def test_what_was_committed_after_a_question_can_be_forwarded_in_a_transaction(
    broker, producer
):
    """Whoever copies the properties of a message copies nothing of its transaction."""
    await send_half(producer, "T", b"x", broker)
    check(broker)
    await until(lambda: producer.questions)
    await producer.answer_question(producer.questions[0], COMMIT)
    received = broker.messages("T")[0].properties
    forwarded = await send_half(producer, "further", b"x", broker, **received)

    answer = await producer.end(end_header(forwarded, COMMIT))

    assert not {"TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES"} & set(received)
    assert answer.code == ResponseCode.SUCCESS
    assert broker.bodies("further") == [b"x"]


# Questions.


async def test_a_producer_is_asked_about_what_it_left_open(broker, producer):
    half = await send_half(producer, "T", b"x", broker, TAGS="a")

    check(broker)
    await until(lambda: producer.questions)
    question = producer.questions[0]
    header = question.header(CheckTransactionStateRequest)
    message = record_of(question)
    copy = broker.messages(HALF)[1]
    answer = await producer.answer_question(question, COMMIT)

    assert question.is_one_way
    assert header.topic == HALF
    assert header.msg_id == header.transaction_id == half.transaction_id
    assert header.offset_msg_id == copy.offset_id
    assert (header.tran_state_table_offset, header.commit_log_offset) == (1, copy.physical_offset)
    assert (message.topic, message.queue_id, message.body, message.tags) == ("T", 0, b"x", "a")
    assert copy.properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert answer.code == ResponseCode.SUCCESS
    assert broker.bodies("T") == [b"x"]


async def test_questions_go_round_among_the_producers_of_a_group(broker, producer):
    other = await AskedProducer.join(broker.broker, "producer@2")
    for number in range(4):
        await send_half(producer, "T", b"%d" % number, broker)

    check(broker)
    await until(lambda: len(producer.questions) + len(other.questions) == 4)
    await other.close()

    assert len(producer.questions) == len(other.questions) == 2


async def test_without_a_producer_the_question_counts_all_the_same_and_operators_are_told(
    broker, caplog
):
    gone = await AskedProducer.join(broker.broker)
    await send_half(gone, "T", b"x", broker)
    await gone.close()
    await until(lambda: not broker.parts.producers.is_online("makers"))

    check(broker)

    check(broker)

    assert broker.messages(HALF)[1].properties["TRANSACTION_CHECK_TIMES"] == "1"
    told = [line for line in caplog.messages if "no producer to ask" in line]
    assert len(told) == 1  # not every half minute
    unique_id = broker.messages(HALF)[0].unique_id
    assert "of group makers: no producer of the group is connected" in told[0]
    assert f"message {unique_id} to T (keys none)" in told[0]
    assert "check 1 of 15" in told[0]
    assert "given up and never delivered" in told[0]


async def test_a_message_that_belongs_nowhere_is_not_taken_for_one_without_a_producer(
    tmp_path, caplog
):
    once = TransactionSettings(check_max=1)
    async with hand_broker(tmp_path, transactions=once) as (broker, _):
        born_ms = round(broker.clock.now() * 1000)
        properties = b"PGROUP\x01makers\x02UNIQ_KEY\x01U\x02"
        draft = Draft(HALF, 0, b"x", properties, born_ms, broker.parts.store_host)
        broker.parts.writes.put(draft, transform=False)
        broker.parts.writes.finish()
        check(broker)
        check(broker)

    told = [line for line in caplog.messages if "message U to no topic" in line]
    assert len(told) == 2  # about the question, and about the end
    for line in told:
        assert "does not say to which topic and queue it belongs" in line
        assert "connected" not in line
        assert "questions" not in line


async def test_a_message_is_given_up_after_the_last_question_and_can_be_resumed(
    broker, producer, caplog
):
    half = await send_half(producer, "T", b"x", broker)
    for _ in range(15):
        check(broker)
    await until(lambda: len(producer.questions) == 15)
    kept = broker.messages(GIVEN_UP)

    check(broker)
    given_up = broker.messages(GIVEN_UP)
    questions = len(producer.questions)
    answer = await producer.connection.request(
        RequestCode.RESUME_CHECK_HALF_MESSAGE,
        ResumeCheckHalfMessageRequest(msg_id=given_up[0].offset_id),
    )
    check(broker)
    await until(lambda: len(producer.questions) == questions + 1)
    await producer.answer_question(producer.questions[-1], COMMIT)

    assert kept == []
    assert [message.unique_id for message in given_up] == [half.transaction_id]
    assert f"message {half.transaction_id} to T (keys none) is not delivered" in caplog.text
    assert questions == 15
    assert answer.code == ResponseCode.SUCCESS
    assert broker.bodies("T") == [b"x"]


@pytest.mark.parametrize(
    "msg_id", [None, "0" * 32, "no id"], ids=["ordinary", "missing", "nonsense"]
)
async def test_only_a_half_message_can_be_resumed(broker, producer, msg_id):
    sent = await producer.stored("T", b"x")

    answer = await producer.connection.request(
        RequestCode.RESUME_CHECK_HALF_MESSAGE,
        ResumeCheckHalfMessageRequest(msg_id=msg_id or sent.msg_id),
    )

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert broker.messages(HALF) == []


@pytest.mark.parametrize(
    ("first", "then", "seen"), [(COMMIT, ROLLBACK, [b"x"]), (ROLLBACK, COMMIT, [])]
)
async def test_the_first_end_of_a_transaction_counts(broker, producer, first, then, seen):
    """The producer was slow: it answers the question, and its own end arrives as well."""
    half = await send_half(producer, "T", b"x", broker)
    check(broker)
    await until(lambda: producer.questions)

    answered = await producer.answer_question(producer.questions[0], first)
    late = await producer.end(end_header(half, first))
    contradiction = await producer.end(end_header(half, then))

    assert (answered.code, late.code) == (ResponseCode.SUCCESS, ResponseCode.SUCCESS)
    assert contradiction.code == ResponseCode.ILLEGAL_OPERATION
    assert broker.bodies("T") == seen


async def test_a_round_that_the_disk_refuses_skips_nothing(tmp_path):
    files = FailingFiles()
    async with hand_broker(tmp_path, files=files) as (broker, _):
        producer = await AskedProducer.join(broker.broker)
        for number in range(3):
            await send_half(producer, "T", b"%d" % number, broker)
        files.fail("pwrite", errno.ENOSPC)
        check(broker)
        position = broker.parts.transactions.halves.position
        files.heal()

        check(broker)
        await until(lambda: len(producer.questions) == 3)
        await producer.close()

        assert position == 0


async def test_one_message_that_cannot_be_dealt_with_does_not_stop_the_others(
    broker, producer, monkeypatch, caplog
):
    for body in (b"0", b"1", b"2"):
        await send_half(producer, "T", body, broker)

    def judge_or_fail(half, **limits):
        if half.body == b"1":
            raise RuntimeError("a bug")
        return judge(half, **limits)

    monkeypatch.setattr(transactions, "judge", judge_or_fail)
    check(broker)

    assert await asked(producer) == [b"0", b"2"]
    assert broker.bodies(GIVEN_UP) == [b"1"]
    assert "is dropped" in caplog.text


async def test_a_jump_over_millions_of_half_messages_is_quick(broker):
    begun = time.thread_time()
    broker.parts.transactions.halves.pass_to(50_000_000)

    # Number by number it was seconds.
    assert time.thread_time() - begun < 0.5


# The table of verdicts.


def half_message(*, born: int = 0, stored: int = 0, **properties: str) -> StoredMessage:
    return StoredMessage.build(
        topic=HALF, stored_body=b"x", properties=properties, born_ms=born, store_ms=stored
    )


@pytest.mark.parametrize(
    ("half", "verdict"),
    [
        (half_message(born=93_999, stored=93_999), Verdict.ASK),
        (half_message(born=94_000, stored=94_000), Verdict.STOP),
        (half_message(born=10, stored=100_000), Verdict.STOP),
        (half_message(born=10, stored=99_999), Verdict.ASK),
        # A producer whose clock is an hour ahead.
        (half_message(born=3_700_000, stored=93_999), Verdict.ASK),
        (half_message(born=3_700_000, stored=94_000), Verdict.STOP),
        (half_message(TRANSACTION_CHECK_TIMES="14"), Verdict.ASK),
        (half_message(TRANSACTION_CHECK_TIMES="15"), Verdict.GIVE_UP),
        (half_message(TRANSACTION_CHECK_TIMES="15", stored=100_000), Verdict.STOP),
        (half_message(born=-900_001), Verdict.GIVE_UP),
        (half_message(CHECK_IMMUNITY_TIME_IN_SECONDS="100"), Verdict.PUT_BACK),
        (half_message(CHECK_IMMUNITY_TIME_IN_SECONDS="99"), Verdict.ASK),
        (half_message(CHECK_IMMUNITY_TIME_IN_SECONDS="soon"), Verdict.ASK),
        (half_message(CHECK_IMMUNITY_TIME_IN_SECONDS="100", stored=100_000), Verdict.STOP),
    ],
)
def test_the_verdict_about_an_open_half_message(half, verdict):
    given = judge(
        half, now_ms=100_000, round_ms=100_000, timeout_ms=6000, check_max=15, keep_ms=1_000_000
    )

    assert given is verdict


# Crashes.


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_passed", [False, True])
async def test_who_commits_again_after_a_restart_commits_once(tmp_path, *, is_asked, is_passed):
    """Whether the half message lies before the progress by then, or not."""
    async with hand_broker(tmp_path) as (broker, _):
        producer = await AskedProducer.join(broker.broker)
        half = await send_half(producer, "T", b"x", broker)
        if is_asked:
            check(broker)
            await until(lambda: producer.questions)
            await producer.answer_question(producer.questions[0], COMMIT)
        else:
            await producer.end(end_header(half, COMMIT))
        if is_passed:
            check(broker)
        await producer.close()

        await broker.restart()
        again = await AskedProducer.join(broker.broker)
        log_end = broker.parts.store.statistics().log_end
        answer = await again.end(end_header(half, COMMIT))
        await again.close()

        assert answer.code == ResponseCode.SUCCESS
        assert broker.bodies("T") == [b"x"]
        assert broker.parts.store.statistics().log_end == log_end


async def test_op_messages_of_other_brokers_are_understood(tmp_path):
    """4.9 writes one offset without a comma, 5.x several with one behind each."""
    async with hand_broker(tmp_path) as (broker, _):
        producer = await AskedProducer.join(broker.broker)
        for number in range(4):
            await send_half(producer, "T", b"%d" % number, broker)
        for body in (b"0", b"1,3,"):
            draft = Draft(OP, 0, body, b"TAGS\x01d\x02", 0, broker.parts.store_host)
            broker.parts.writes.put(draft, transform=False)
            broker.parts.writes.finish()

        await broker.crash()
        again = await AskedProducer.join(broker.broker)
        check(broker)
        questions = await asked(again)
        await again.close()
        await producer.close()

        assert questions == [b"2"]


@settings(max_examples=15)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.just(0)),
            st.tuples(st.just("commit"), st.integers(0, 50)),
            st.tuples(st.just("rollback"), st.integers(0, 50)),
            st.tuples(st.just("check"), st.just(0)),
            st.tuples(st.just("crash"), st.just(0)),
            st.tuples(st.just("restart"), st.just(0)),
        ),
        max_size=25,
    )
)
@example(steps=[("send", 0), ("check", 0), ("crash", 0)])
async def test_a_message_is_seen_exactly_if_its_transaction_was_committed(steps):
    """Against a model, with crashes at every step; what is open in the end is asked about."""
    with tempfile.TemporaryDirectory() as folder:
        async with hand_broker(Path(folder), HandClock()) as (broker, _):
            producer = await AskedProducer.join(broker.broker)
            open_ones: dict[bytes, SendMessageResponse] = {}
            committed: list[bytes] = []
            sent = 0
            for what, which in steps:
                if what == "send":
                    body = b"%d" % sent
                    sent += 1
                    open_ones[body] = await send_half(producer, "T", body, broker)
                elif what in ("commit", "rollback") and open_ones:
                    body = list(open_ones)[which % len(open_ones)]
                    state = COMMIT if what == "commit" else ROLLBACK
                    answer = await producer.end(end_header(open_ones.pop(body), state))
                    assert answer.code == ResponseCode.SUCCESS
                    if state is COMMIT:
                        committed.append(body)
                elif what == "check":
                    check(broker)
                elif what in ("crash", "restart"):
                    await (broker.crash() if what == "crash" else broker.restart())
                    producer = await AskedProducer.join(broker.broker)
                assert broker.bodies("T") == committed
            await asked(producer)
            producer.questions.clear()
            check(broker)
            questions = await asked(producer)
            await producer.close()

            assert sorted(questions) == sorted(open_ones)


@pytest.fixture
def disk():
    return GatedFiles()


@pytest.fixture
async def slow(tmp_path, disk):
    store = with_policy(SMALL_STORE, FlushPolicy.SYNC)
    async with hand_broker(tmp_path, store=store, files=disk) as (slow, _):
        yield slow
        # Before the broker is stopped, which flushes.
        disk.gate.set()


@pytest.fixture
async def slow_producer(slow):
    slow_producer = await AskedProducer.join(slow.broker)
    yield slow_producer
    await slow_producer.close()


def begin_round(slow: HandBroker) -> None:
    """Let half a minute pass, and begin a round, without waiting for the disk."""
    slow.clock.advance(INTERVAL)
    slow.parts.transactions.step(slow.clock.now())
    slow.parts.writes.finish()


async def flushed(slow: HandBroker, disk: GatedFiles) -> None:
    """The disk takes everything that there is."""
    disk.gate.set()
    statistics = slow.parts.store.statistics
    await until(lambda: statistics().dispatched == statistics().log_end)


async def test_a_question_may_be_answered_before_its_copy_is_on_the_disk(slow, slow_producer, disk):
    await send_half(slow_producer, "T", b"x", slow)
    disk.gate.clear()

    begin_round(slow)
    await until(lambda: slow_producer.questions)
    answer = await slow_producer.answer_question(slow_producer.questions[0], COMMIT)
    is_seen_early = slow.bodies("T") != []
    await flushed(slow, disk)
    begin_round(slow)
    await flushed(slow, disk)

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)
    assert not is_seen_early
    assert slow.bodies("T") == [b"x"]
    assert len(slow_producer.questions) == 1
    assert slow.bodies("TRANS_CHECK_MAX_TIME_TOPIC") == []


@pytest.mark.parametrize(("state", "seen"), [(COMMIT, [b"x"]), (ROLLBACK, [])])
async def test_a_half_message_that_does_not_wait_can_be_ended_at_once(
    slow, slow_producer, disk, state, seen
):
    disk.gate.clear()

    half = await send_half(slow_producer, "T", b"x", slow, WAIT="false")
    answer = await slow_producer.end(end_header(half, state))
    await flushed(slow, disk)

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)
    assert slow.bodies("T") == seen
