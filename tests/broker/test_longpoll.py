"""Long polling over a socket: who is woken by what, and what ends the waiting otherwise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import PullSettings
from orbitmq.broker.writes import Draft
from orbitmq.message.properties import encode_properties
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.outgoing import Outgoing
from orbitmq.remoting.settings import ServerSettings
from orbitmq.store.settings import FlushPolicy, ReadFailed, RetentionSettings
from orbitmq.store.store import Store
from orbitmq.testing.cluster import MovableClock
from orbitmq.wire.bodies import MessageModel, SubscriptionData, SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CloneGroupOffsetRequest,
    CreateTopicRequest,
    DeleteGroupRequest,
    PullFlag,
    ResetOffsetRequest,
    TopicRequest,
    UpdateGroupForbiddenRequest,
)
from orbitmq.wire.javajson import encode_body
from tests.support.broker import GROUP, SMALL_STORE, RawClient, bodies_in, pull_header, until
from tests.support.replication import SERVING, following, slave_of, until_copied, until_rounds

#: Far longer than any of these tests takes.
LONG = 60.0
#: For what does not wait for its time: far below that time, and far above what a machine that does
#: other things as well takes for it.
SOON = 20.0


@pytest.fixture
def orders(broker):
    """A topic with four empty queues."""
    return _make(broker)


def _make(broker: Broker) -> str:
    broker.parts.topics.ensure(
        TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4), now=0.0
    )
    return "orders"


def begin(client: RawClient, topic: str, *args: Any, **fields: Any) -> asyncio.Task[Command]:
    """Begin a pull that the broker may keep."""
    return asyncio.ensure_future(client.pull(topic, *args, **({"hold": LONG} | fields)))


async def held(broker: Broker, count: int = 1) -> None:
    await until(lambda: len(broker.parts.held) == count)


# Woken by a message.


async def test_a_pull_waits_for_the_first_message_of_a_queue(broker, client, open_client, orders):
    waiting = begin(client, orders)
    await held(broker)

    await (await open_client(broker)).stored(orders, b"first")
    answer = await asyncio.wait_for(waiting, SOON)

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, "FOUND")
    assert bodies_in(answer) == [b"first"]
    assert answer.ext_fields["nextBeginOffset"] == "1"
    assert len(broker.parts.held) == 0


async def test_a_pull_is_woken_in_the_turn_in_which_its_message_is_written(
    broker, client, open_client, orders
):
    begin(client, orders)
    await held(broker)
    order: list[str] = []
    again, write = broker.parts.held.again, broker.parts.store.write

    def watch_again(pull):
        order.append("woken")
        again(pull)

    def watch_write():
        end = write()
        order.append("written")
        return end

    broker.parts.held.again = watch_again
    broker.parts.store.write = watch_write
    await (await open_client(broker)).stored(orders)

    # The write itself announces what arrived.
    assert order == ["woken", "written"]


@pytest.mark.parametrize("queues", [(0,), (0, 1, 2)])
async def test_those_of_a_connection_who_are_woken_get_one_write_within_the_turn(
    broker, client, orders, monkeypatch, queues
):
    writes, counts = broker.parts.writes, broker.parts.counters.group(orders, GROUP)
    waiting = [begin(client, orders, queue_id) for queue_id in queues]
    await held(broker, len(queues))
    for queue_id in queues:
        writes.append(Draft(orders, queue_id, b"new", b"", 0, broker.parts.store_host))
    written: list[tuple[int, int]] = []
    flush = Outgoing.flush

    def watched(outgoing):
        size = flush(outgoing)
        written.append((size, counts.gets))
        return size

    monkeypatch.setattr(Outgoing, "flush", watched)
    writes.finish()

    # Who is alone does not even wait for being counted.
    assert [gets for size, gets in written if size] == [0 if len(queues) == 1 else len(queues)]
    answers = await asyncio.wait_for(asyncio.gather(*waiting), LONG)
    assert [bodies_in(answer) for answer in answers] == [[b"new"]] * len(queues)
    assert counts.gets == len(queues)


async def test_with_synchronous_flushing_a_pull_is_woken_when_the_message_is_safe(
    start_broker, open_client
):
    flush = replace(SMALL_STORE.flush, policy=FlushPolicy.SYNC)
    broker = await start_broker(store=replace(SMALL_STORE, flush=flush))
    consumer, producer = await open_client(broker), await open_client(broker)
    waiting = begin(consumer, _make(broker))
    await held(broker)

    await producer.stored("orders", b"safe")

    assert bodies_in(await asyncio.wait_for(waiting, SOON)) == [b"safe"]


async def test_a_batch_wakes_a_pull_which_gets_all_of_it(broker, client, open_client, orders):
    producer = await open_client(broker)
    waiting = begin(client, orders)
    await held(broker)

    await asyncio.gather(*(producer.stored(orders, b"%d" % number) for number in range(20)))

    answer = await asyncio.wait_for(waiting, SOON)
    assert bodies_in(answer)[0] == b"0"


async def test_only_those_who_wait_for_the_queue_are_woken(broker, client, orders):
    waiting = [begin(client, orders, queue) for queue in range(4)]
    await held(broker, 4)

    await client.stored(orders, queue_id=2)
    await asyncio.wait_for(waiting[2], SOON)

    assert [task.done() for task in waiting] == [False, False, True, False]
    assert len(broker.parts.held) == 3


async def test_several_pulls_of_one_queue_are_all_woken(broker, open_client, orders):
    clients = [await open_client(broker) for _ in range(5)]
    waiting = [begin(client, orders) for client in clients for _ in range(2)]
    await held(broker, 10)

    await clients[0].stored(orders, b"for all")

    answers = await asyncio.wait_for(asyncio.gather(*waiting), SOON)
    assert [bodies_in(answer) for answer in answers] == [[b"for all"]] * 10


async def test_a_pull_from_beyond_the_end_does_not_wait(broker, client, orders):
    await client.stored(orders)

    answer = await asyncio.wait_for(begin(client, orders, 0, 5), SOON)

    assert answer.code == ResponseCode.PULL_OFFSET_MOVED


# Filters.


@pytest.mark.parametrize(
    "subscription",
    [
        {"subscription": "mine || ours"},
        {"subscription": "TAGS = 'mine'", "expression_type": "SQL92"},
        {"subscription": "price > 5 AND TAGS IS NOT NULL", "expression_type": "SQL92"},
    ],
    ids=["tags", "sql on tags", "sql"],
)
async def test_a_pull_sleeps_through_what_its_filter_refuses(broker, client, orders, subscription):
    waiting = begin(client, orders, **subscription)
    await held(broker)

    for _ in range(10):
        await client.stored(orders, b"other", properties={"TAGS": "other", "price": "1"})
    assert len(broker.parts.held) == 1
    assert not waiting.done()
    await client.stored(orders, b"mine", properties={"TAGS": "mine", "price": "10"})

    answer = await asyncio.wait_for(waiting, SOON)
    assert bodies_in(answer) == [b"mine"]
    assert answer.ext_fields["nextBeginOffset"] == "11"


async def test_a_pull_that_times_out_has_moved_over_what_its_filter_refused(broker, client, orders):
    host = broker.parts.store_host
    waiting = begin(client, orders, subscription="mine", hold=0.3)
    await held(broker)

    # All in one step of the loop: its time is not up before.
    for _ in range(10):
        broker.parts.writes.put(Draft(orders, 0, b"x", b"TAGS\x01other\x02", 0, host))
    broker.parts.writes.finish()

    answer = await asyncio.wait_for(waiting, SOON)
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert answer.ext_fields["nextBeginOffset"] == "10"
    assert answer.ext_fields["maxOffset"] == "10"


async def test_a_registered_filter_judges_for_pulls_that_bring_none(broker, client, orders):
    await client.heartbeat("c1", SubscriptionData(topic=orders, sub_string="mine"))
    waiting = begin(client, orders, sys_flag=int(PullFlag.SUSPEND))
    await held(broker)

    await client.stored(orders, properties={"TAGS": "other"})
    assert len(broker.parts.held) == 1
    await client.stored(orders, b"mine", properties={"TAGS": "mine"})

    assert bodies_in(await asyncio.wait_for(waiting, SOON)) == [b"mine"]


# Time.


@pytest.mark.feature("B6")
async def test_a_pull_whose_time_is_up_is_answered_empty_and_may_be_asked_again(
    broker, client, orders, caplog
):
    await client.stored(orders)
    caplog.set_level(logging.INFO)
    loop = asyncio.get_running_loop()
    began = loop.time()

    first = await client.pull(orders, 0, 1, hold=0.2)
    took = loop.time() - began
    second = await client.pull(orders, 0, 1, hold=0.05)
    third = await client.pull(orders, 0, 0, hold=LONG)

    assert (first.code, first.remark) == (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE")
    assert first.ext_fields["nextBeginOffset"] == "1"
    assert took >= 0.2
    assert second.code == ResponseCode.PULL_NOT_FOUND
    assert bodies_in(third) == [b"hello"]
    assert client.connection.is_open
    spoke = [each.name for each in caplog.records if each.levelno > logging.DEBUG]
    assert not [name for name in spoke if not name.startswith("orbitmq.store")]


async def test_pulls_end_in_the_order_of_their_deadlines(broker, client, orders):
    ended: list[float] = []

    async def pull(hold):
        await client.pull(orders, hold=hold)
        ended.append(hold)

    await asyncio.gather(*(pull(hold) for hold in (0.3, 0.1, 0.2, 0.05)))

    assert ended == [0.05, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("hold", [0.0, -1.0])
async def test_a_pull_that_allows_no_time_is_answered_at_once(client, orders, hold):
    flag = int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)

    answer = await asyncio.wait_for(begin(client, orders, hold=hold, sys_flag=flag), SOON)

    assert answer.code == ResponseCode.PULL_NOT_FOUND


async def test_without_long_polling_every_pull_waits_for_a_short_time(start_broker, open_client):
    broker = await start_broker(pull=PullSettings(long_polling=False, short_hold=0.05))
    client = await open_client(broker)

    answer = await asyncio.wait_for(begin(client, _make(broker)), SOON)

    assert answer.code == ResponseCode.PULL_NOT_FOUND


async def test_no_pull_waits_longer_than_is_allowed(start_broker, open_client):
    broker = await start_broker(pull=PullSettings(longest_hold=0.05))
    client = await open_client(broker)

    answer = await asyncio.wait_for(begin(client, _make(broker)), SOON)

    assert answer.code == ResponseCode.PULL_NOT_FOUND


# Once.


async def test_the_progress_of_a_held_pull_is_committed_when_it_comes_and_only_then(
    broker, client, orders
):
    flag = int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND | PullFlag.COMMIT_OFFSET)
    for _ in range(5):
        await client.stored(orders)
    waiting = begin(client, orders, 0, 5, sys_flag=flag, commit_offset=2)
    await held(broker)
    assert broker.parts.progress.stored(orders, GROUP, 0) == 2
    await client.report(orders, 4)

    await client.stored(orders)
    await asyncio.wait_for(waiting, SOON)

    assert broker.parts.progress.stored(orders, GROUP, 0) == 4


async def test_a_woken_pull_is_checked_again(broker, client, orders):
    waiting = begin(client, orders)
    await held(broker)
    broker.parts.change_settings(replace(broker.parts.settings, permission=2))

    await client.stored(orders)

    assert (await asyncio.wait_for(waiting, SOON)).code == ResponseCode.NO_PERMISSION


async def test_taking_the_brokers_read_permission_away_wakes_everybody_who_waits(
    broker, client, open_client, orders
):
    await client.stored("others")
    mine = begin(client, orders)
    others = begin(client, "others", 0, 1, consumer_group="others")
    await held(broker, 2)
    admin = await open_client(broker)

    answer = await admin.connection.request(
        RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=2\n"
    )

    assert answer.code == ResponseCode.SUCCESS
    for waiting in (mine, others):
        assert (await asyncio.wait_for(waiting, SOON)).code == ResponseCode.NO_PERMISSION
    assert len(broker.parts.held) == 0


async def test_switching_a_group_off_wakes_its_pulls_and_no_others(
    broker, client, open_client, orders
):
    mine = begin(client, orders)
    others = begin(client, orders, consumer_group="others")
    await held(broker, 2)
    admin = await open_client(broker)
    off = SubscriptionGroupConfig(group_name=GROUP, consume_enable=False)

    await admin.connection.request(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(off)
    )

    assert (await asyncio.wait_for(mine, SOON)).code == ResponseCode.NO_PERMISSION
    assert not others.done()


async def test_taking_queues_away_wakes_those_who_wait_there(broker, client, orders):
    topic = broker.parts.topics.get(orders)
    assert topic is not None
    last = begin(client, orders, topic.read_queue_nums - 1)
    await held(broker)
    header = CreateTopicRequest(
        topic=orders,
        default_topic="TBW102",
        read_queue_nums=1,
        write_queue_nums=1,
        perm=topic.perm,
        topic_filter_type="SINGLE_TAG",
    )

    await client.connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    assert (await asyncio.wait_for(last, SOON)).code == ResponseCode.INVALID_PARAMETER


async def test_a_reset_can_wake_those_whom_it_concerns(broker, client, orders):
    mine = begin(client, orders)
    others = begin(client, orders, consumer_group="others")
    await held(broker, 2)
    broker.parts.progress.reset(orders, GROUP, 0, 7)

    broker.parts.held.wake(orders, 0, GROUP)

    answer = await asyncio.wait_for(mine, SOON)
    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert not others.done()


async def test_a_pull_that_fails_when_it_is_woken_does_not_hurt_the_sender(
    broker, client, orders, caplog
):
    begin(client, orders)
    await held(broker)

    def fail(_):
        raise RuntimeError("a bug")

    broker.parts.held.again = fail
    place = await client.stored(orders)

    assert place.queue_offset == 0
    assert "could not be answered" in caplog.text


async def test_a_pull_that_cannot_be_counted_is_answered_and_let_go_of_once(
    broker, client, orders, monkeypatch, caplog
):
    waiting = begin(client, orders)
    await held(broker)
    released: list[Command] = []
    release = Connection.release

    def watched(connection, request):
        if request.code == RequestCode.PULL_MESSAGE:
            released.append(request)
        release(connection, request)

    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Connection, "release", watched)
    monkeypatch.setattr(broker.parts.progress, "note_pull", fail)
    broker.parts.writes.append(Draft(orders, 0, b"new", b"", 0, broker.parts.store_host))
    broker.parts.writes.finish()
    answer = await asyncio.wait_for(waiting, LONG)

    assert bodies_in(answer) == [b"new"]
    assert len(released) == 1
    assert "could not be counted" in caplog.text
    assert "could not be answered" not in caplog.text


async def test_a_pull_whose_answer_cannot_be_sent_is_let_go_of_once(
    broker, client, orders, monkeypatch, caplog
):
    waiting = begin(client, orders)
    await held(broker)
    released: list[Command] = []

    def fail(*_, **__):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "send_pieces", fail)
        patched.setattr(Connection, "release", lambda _, request: released.append(request))
        broker.parts.writes.append(Draft(orders, 0, b"new", b"", 0, broker.parts.store_host))
        broker.parts.writes.finish()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert [request.code for request in released] == [RequestCode.PULL_MESSAGE]
    assert "could not be answered" in caplog.text


async def test_a_pull_that_has_to_wait_for_its_turn_is_not_alone_any_more(broker, client, orders):
    waiting = begin(client, orders)
    await held(broker)
    again, alone = broker.parts.held.again, list[bool]()

    def watched(pull):
        alone.append(pull.is_alone)
        again(pull)

    broker.parts.held.again = watched
    broker.parts.pacing.spent = broker.parts.pacing.limit
    broker.parts.writes.append(Draft(orders, 0, b"new", b"", 0, broker.parts.store_host))
    broker.parts.writes.finish()
    at_once = list(alone)
    answer = await asyncio.wait_for(waiting, LONG)

    assert bodies_in(answer) == [b"new"]
    assert (at_once, alone) == ([], [False])


async def test_a_message_that_was_judged_when_it_came_is_read_without_the_filter(
    broker, client, orders, monkeypatch
):
    waiting = begin(client, orders, subscription="paid")
    await held(broker)
    reading = Store.read
    filters: list[object] = []

    def watched(store, *args, **options):
        filters.append(args[4])
        return reading(store, *args, **options)

    pulling = broker.parts.held.again.__self__
    monkeypatch.setattr(pulling, "_read", partial(watched, broker.parts.store))
    host = broker.parts.store_host
    for body, tag in ((b"no", "open"), (b"yes", "paid")):
        properties = encode_properties({"TAGS": tag})
        broker.parts.writes.append(Draft(orders, 0, body, properties, 0, host))
        broker.parts.writes.finish()
    answer = await asyncio.wait_for(waiting, LONG)

    assert bodies_in(answer) == [b"yes"]
    assert answer.ext_fields["nextBeginOffset"] == "2"
    assert filters == [None]


async def test_a_pull_gets_what_has_come_by_the_time_of_its_turn(broker, client, orders):
    """Not only the message that woke it, and of the others those that it wants."""
    waiting = begin(client, orders, subscription="paid")
    await held(broker)
    host = broker.parts.store_host
    broker.parts.pacing.spent = broker.parts.pacing.limit
    for body, tag in ((b"1", "paid"), (b"2", "open"), (b"3", "paid")):
        properties = encode_properties({"TAGS": tag})
        broker.parts.writes.append(Draft(orders, 0, body, properties, 0, host))
        broker.parts.writes.finish()
    answer = await asyncio.wait_for(waiting, LONG)

    assert bodies_in(answer) == [b"1", b"3"]
    assert answer.ext_fields["nextBeginOffset"] == "3"


async def test_those_who_are_woken_by_several_messages_get_them_all(broker, client, orders):
    waiting = begin(client, orders, subscription="paid")
    await held(broker)
    host = broker.parts.store_host
    for body, tag in ((b"1", "paid"), (b"2", "open"), (b"3", "paid")):
        properties = encode_properties({"TAGS": tag})
        broker.parts.writes.append(Draft(orders, 0, body, properties, 0, host))
    broker.parts.writes.finish()
    answer = await asyncio.wait_for(waiting, LONG)

    assert bodies_in(answer) == [b"1", b"3"]
    assert answer.ext_fields["nextBeginOffset"] == "3"


# Those who leave, and those who are too many.


async def test_the_pulls_of_a_closed_connection_are_forgotten_at_once(broker, open_client, orders):
    leaving, staying = await open_client(broker), await open_client(broker)
    lost = [begin(leaving, orders, queue) for queue in range(4)]
    kept = begin(staying, orders)
    await held(broker, 5)

    leaving.connection.abort()
    await held(broker, 1)

    await staying.stored(orders, b"still here")
    assert bodies_in(await asyncio.wait_for(kept, SOON)) == [b"still here"]
    await asyncio.gather(*lost, return_exceptions=True)


async def test_more_pulls_than_may_be_held_are_answered_after_a_short_while(
    start_broker, open_client
):
    broker = await start_broker(pull=PullSettings(held_requests=3, short_hold=0.05))
    client = await open_client(broker)
    orders = _make(broker)
    waiting = [begin(client, orders) for _ in range(3)]
    await held(broker, 3)

    answer = await asyncio.wait_for(begin(client, orders), SOON)

    assert answer.code == ResponseCode.PULL_NOT_FOUND
    await client.stored(orders)
    await asyncio.wait_for(asyncio.gather(*waiting), SOON)


async def test_thousands_of_pulls_are_held_and_only_the_right_one_is_woken(
    start_broker, open_client
):
    broker = await start_broker()
    broker.parts.topics.ensure(
        TopicConfig(topic_name="wide", read_queue_nums=5000, write_queue_nums=5000), now=0.0
    )
    clients = [await open_client(broker) for _ in range(4)]
    waiting = [begin(clients[queue % 4], "wide", queue) for queue in range(5000)]
    await until(lambda: len(broker.parts.held) == 5000, 20)

    await clients[0].stored("wide", b"one", queue_id=4321)
    answer = await asyncio.wait_for(waiting[4321], SOON)

    assert bodies_in(answer) == [b"one"]
    assert len(broker.parts.held) == 4999
    for client in clients:
        client.connection.abort()
    await asyncio.gather(*waiting, return_exceptions=True)
    await held(broker, 0)


async def test_a_stop_answers_all_who_wait(start_broker, open_client):
    broker = await start_broker()
    client = await open_client(broker)
    waiting = [begin(client, _make(broker)) for _ in range(10)]
    await held(broker, 10)

    await asyncio.wait_for(broker.stop(grace=LONG), SOON)

    answers = await asyncio.wait_for(asyncio.gather(*waiting), SOON)
    assert {answer.code for answer in answers} == {ResponseCode.PULL_NOT_FOUND}


async def test_deadlines_of_pulls_that_are_gone_do_not_pile_up(broker, client, orders):
    offset = 0
    for _ in range(400):
        waiting = begin(client, orders, 0, offset)
        await held(broker)
        await client.stored(orders)
        offset = int((await waiting).ext_fields["nextBeginOffset"])

    assert len(broker.parts.held._deadlines) < 300


async def test_a_held_pull_that_is_asked_one_way_is_not_kept(broker, client, orders):
    client.connection.notify(RequestCode.PULL_MESSAGE, pull_header(orders, hold=LONG))

    await client.max_offset(orders)

    assert len(broker.parts.held) == 0


async def test_a_pull_that_fails_when_it_is_woken_is_refused(broker, client, orders, monkeypatch):
    waiting = begin(client, orders)
    await held(broker)

    def fail(*_, **__):
        raise ReadFailed("the disk does not give it out")

    monkeypatch.setattr(broker.parts.progress, "pending_reset", fail)
    broker.parts.writes.append(Draft(orders, 0, b"new", b"", 0, broker.parts.store_host))
    broker.parts.writes.finish()
    answer = await asyncio.wait_for(waiting, SOON)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "the disk does not give it out" in (answer.remark or "")


async def test_who_is_woken_already_is_answered_if_another_cannot_be_judged(
    broker, client, orders, monkeypatch
):
    waiting = begin(client, orders, 0)
    await held(broker)
    other = begin(client, orders, 1)
    await held(broker, 2)
    judge = broker.parts.held._is_woken

    def fail(pull, *arguments):
        if pull.queue_id == 1:
            raise RuntimeError("a bug")
        return judge(pull, *arguments)

    monkeypatch.setattr(broker.parts.held, "_is_woken", fail)
    for queue_id in (0, 1):
        draft = Draft(orders, queue_id, b"new", b"", 0, broker.parts.store_host)
        broker.parts.writes.append(draft)
    broker.parts.writes.finish()
    answer = await asyncio.wait_for(waiting, SOON)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)

    assert bodies_in(answer) == [b"new"]


#: Far longer than any of these tests waits for an answer.
HOLD = 100.0
DEADLINE = 30.0
OTHERS = "others"


class Waiting(NamedTuple):
    """A pull that may be told something, and one that is none of its business."""

    mine: asyncio.Task[Command]
    other: asyncio.Task[Command]

    async def answer(self) -> Command:
        found = await asyncio.wait_for(self.mine, DEADLINE)
        assert not self.other.done()
        return found


def topic_of(broker: Broker, name: str) -> None:
    broker.parts.topics.ensure(
        TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4), now=0.0
    )


async def wait_for(
    broker: Broker, client: RawClient, *, queue_id: int = 0, other: str = "payments", **fields: Any
) -> Waiting:
    """Have two pulls held: one of `orders`, and one of another topic and group."""
    for name in {"orders", other}:
        topic_of(broker, name)
    mine = asyncio.ensure_future(client.pull("orders", queue_id, hold=HOLD, **fields))
    beside = asyncio.ensure_future(client.pull(other, hold=HOLD, consumer_group=OTHERS))
    await until(lambda: len(broker.parts.held) == 2, DEADLINE)
    return Waiting(mine, beside)


@pytest.fixture
async def admin(broker, open_client):
    return await open_client(broker)


async def ask(client: RawClient, code: RequestCode, header: Any = None, **fields: Any) -> Command:
    answer = await client.connection.request(code, header, timeout=DEADLINE, **fields)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer


def changed_topic(**changes: Any) -> CreateTopicRequest:
    given: dict[str, Any] = {
        "topic": "orders",
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    return CreateTopicRequest(**(given | changes))


# Topics.


async def test_deleting_a_topic(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic="orders"))

    assert (await waiting.answer()).code == ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"read_queue_nums": 2}, ResponseCode.INVALID_PARAMETER),
        ({"perm": 2}, ResponseCode.NO_PERMISSION),
    ],
    ids=["queues", "permission"],
)
async def test_changing_a_topic(broker, client, admin, changes, code):
    waiting = await wait_for(broker, client, queue_id=3)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_TOPIC, changed_topic(**changes))

    assert (await waiting.answer()).code == code


async def test_a_change_that_concerns_no_reader_wakes_nobody(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_TOPIC, changed_topic(write_queue_nums=2))
    await client.max_offset("orders")

    assert not waiting.mine.done()
    assert len(broker.parts.held) == 2


# Groups.


async def test_switching_a_group_off(broker, client, admin):
    waiting = await wait_for(broker, client, other="orders")
    off = SubscriptionGroupConfig(group_name=GROUP, consume_enable=False)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(off))

    assert (await waiting.answer()).code == ResponseCode.NO_PERMISSION


async def test_forbidding_a_group_to_broadcast(broker, client, admin):
    subscription = SubscriptionData(topic="orders", sub_string="*")
    await client.heartbeat("c", subscription, message_model=MessageModel.BROADCASTING)
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND))
    off = SubscriptionGroupConfig(group_name=GROUP, consume_broadcast_enable=False)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(off))

    assert (await waiting.answer()).code == ResponseCode.NO_PERMISSION


async def test_forbidding_a_group_a_topic(broker, client, admin):
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="*"))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND))
    header = UpdateGroupForbiddenRequest(group=GROUP, topic="orders", readable=False)

    await ask(admin, RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, header)

    assert (await waiting.answer()).code == ResponseCode.NO_PERMISSION


async def test_deleting_a_group_that_may_not_be_made_by_consuming(start_broker, open_client):
    broker = await start_broker(auto_create_group=False)
    client, admin = await open_client(broker), await open_client(broker)
    for name in (GROUP, OTHERS):
        broker.parts.groups.update(SubscriptionGroupConfig(group_name=name), now=0.0)
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest(group_name=GROUP))

    assert (await waiting.answer()).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_a_deleted_group_is_not_made_again_by_waking_who_waits(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest(group_name=GROUP))
    await client.max_offset("orders")

    assert not waiting.mine.done()
    assert GROUP not in broker.parts.groups


async def test_a_group_that_wants_something_else(broker, client):
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="old", sub_version=1))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND), sub_version=1)
    await client.stored("orders", b"unwanted", properties={"TAGS": "none"})

    # Without being woken the pull would go on by the old filter, and pass the message over.
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="new", sub_version=2))
    woken = await waiting.answer()
    await client.stored("orders", b"wanted", properties={"TAGS": "new"})
    following_offset = int(woken.ext_fields["nextBeginOffset"])
    found = await client.pull(
        "orders", offset=following_offset, sys_flag=int(PullFlag.SUSPEND), sub_version=2
    )

    # The new filter has judged the message as well.
    assert (woken.code, following_offset) == (ResponseCode.PULL_RETRY_IMMEDIATELY, 1)
    assert bodies_in(found) == [b"wanted"]


async def test_what_came_while_a_group_wanted_something_else_is_judged_again(broker, client):
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="old", sub_version=1))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND), sub_version=1)
    await client.stored("orders", b"unwanted then", properties={"TAGS": "new"})

    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="new", sub_version=2))
    woken = await waiting.answer()

    assert bodies_in(woken) == [b"unwanted then"]


async def test_a_member_that_comes_and_wants_the_same_wakes_nobody(broker, client, admin):
    subscription = SubscriptionData(topic="orders", sub_string="*")
    await client.heartbeat("c", subscription)
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND))

    await admin.heartbeat("d", subscription)
    await client.max_offset("orders")

    assert not waiting.mine.done()


@pytest.mark.parametrize("kind", ["TAG", "SQL92"])
async def test_a_member_that_starts_later_and_wants_the_same_wakes_nobody(
    broker, client, admin, kind
):
    wish: dict[str, Any] = {"topic": "orders", "expression_type": kind}
    wish["sub_string"] = "paid" if kind == "TAG" else "TAGS = 'paid'"
    await client.heartbeat("c", SubscriptionData(**wish, sub_version=1))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND), sub_version=1)

    await admin.heartbeat("d", SubscriptionData(**wish, sub_version=2))
    await client.heartbeat("c", SubscriptionData(**wish, sub_version=3))
    # The later version is known all the same.
    of_later = await client.pull("orders", sys_flag=0, sub_version=3)
    was_woken = waiting.mine.done()
    await admin.stored("orders", b"wanted", properties={"TAGS": "paid"})

    assert of_later.code == ResponseCode.PULL_NOT_FOUND, of_later.remark
    assert not was_woken
    assert bodies_in(await waiting.answer()) == [b"wanted"]


# Progress.


async def test_a_reset(broker, client, admin):
    for _ in range(3):
        await client.stored("orders")
    waiting = await wait_for(broker, client, queue_id=1)
    mine = asyncio.ensure_future(client.pull("orders", offset=3, hold=HOLD))
    await until(lambda: len(broker.parts.held) == 3, DEADLINE)

    header = ResetOffsetRequest(
        topic="orders", group=GROUP, queue_id=0, offset=1, timestamp=-1, is_force=True
    )
    await ask(admin, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    answer = await asyncio.wait_for(mine, DEADLINE)

    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert answer.ext_fields["nextBeginOffset"] == "1"
    assert not waiting.mine.done()
    assert not waiting.other.done()


async def test_the_progress_of_another_group(broker, client, admin):
    for _ in range(3):
        await client.stored("orders")
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="*"))
    broker.parts.groups.find("source", now=0.0)
    assert (await client.report("orders", 2, consumer_group="source")).code == 0
    mine = asyncio.ensure_future(client.pull("orders", offset=3, hold=HOLD))
    await until(lambda: len(broker.parts.held) == 1, DEADLINE)

    header = CloneGroupOffsetRequest(
        src_group="source", dest_group=GROUP, topic="orders", offline=True
    )
    await ask(admin, RequestCode.CLONE_GROUP_OFFSET, header)
    answer = await asyncio.wait_for(mine, DEADLINE)

    assert answer.code == ResponseCode.PULL_OFFSET_MOVED
    assert answer.ext_fields["nextBeginOffset"] == "2"


# The broker.


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"brokerPermission=2", ResponseCode.NO_PERMISSION),
        (b"brokerPermission=4", ResponseCode.PULL_NOT_FOUND),
        (b"litePullMessageEnable=false", ResponseCode.NO_PERMISSION),
        (b"rejectPullConsumerEnable=true", ResponseCode.SUBSCRIPTION_NOT_EXIST),
        (b"longPollingEnable=false", ResponseCode.PULL_NOT_FOUND),
    ],
)
async def test_another_setting_of_the_broker(broker, client, admin, text, code):
    topic_of(broker, "orders")
    waiting = asyncio.ensure_future(
        client.pull("orders", hold=HOLD, code=RequestCode.LITE_PULL_MESSAGE)
    )
    await until(lambda: len(broker.parts.held) == 1, DEADLINE)

    await ask(admin, RequestCode.UPDATE_BROKER_CONFIG, body=text)

    assert (await asyncio.wait_for(waiting, DEADLINE)).code == code


async def test_a_setting_that_concerns_no_reader_wakes_nobody(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=1000000")
    await client.max_offset("orders")

    assert not waiting.mine.done()


async def test_a_stop(start_broker, open_client):
    broker = await start_broker()
    client = await open_client(broker)
    waiting = await wait_for(broker, client)

    await asyncio.wait_for(broker.stop(), DEADLINE)

    for each in waiting:
        assert (await asyncio.wait_for(each, DEADLINE)).code == ResponseCode.PULL_NOT_FOUND


async def test_cleaning_up_leaves_who_waits_at_the_end_where_he_is(start_broker, open_client):
    clock = MovableClock()
    retention = RetentionSettings(keep=1.0, expired_ratio=0.99, forced_ratio=0.99, full_ratio=0.99)
    store = replace(SMALL_STORE, file_size=64 * 1024, retention=retention)
    broker = await start_broker(store=store, parts={"clock": clock})
    client, admin = await open_client(broker), await open_client(broker)
    for _ in range(8):
        await client.stored("orders", b"x" * 20_000)
    waiting = asyncio.ensure_future(client.pull("orders", offset=8, hold=HOLD))
    await until(lambda: len(broker.parts.held) == 1, DEADLINE)

    clock.advance(100)
    await ask(admin, RequestCode.DELETE_EXPIRED_COMMITLOG)
    await ask(admin, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)
    assert broker.parts.store.min_offset("orders", 0) > 0
    assert not waiting.done()
    await admin.stored("orders", b"next")

    answer = await asyncio.wait_for(waiting, DEADLINE)
    assert bodies_in(answer) == [b"next"]
    assert answer.ext_fields["nextBeginOffset"] == "9"


# A slave.


Act = Callable[[Broker], None]


def delete_topic(master: Broker) -> None:
    master.parts.topics.delete("orders", now=1.0)


def switch_group_off(master: Broker) -> None:
    off = SubscriptionGroupConfig(group_name=GROUP, consume_enable=False)
    master.parts.groups.update(off, now=1.0)


@pytest.mark.parametrize(
    ("act", "code"),
    [(delete_topic, ResponseCode.TOPIC_NOT_EXIST), (switch_group_off, ResponseCode.NO_PERMISSION)],
)
async def test_what_a_slave_hears_of_its_master(start_broker, open_client, act, code):
    master = await start_broker(root="master", replication=SERVING)
    for name in ("orders", "payments"):
        topic_of(master, name)
    for group in (GROUP, OTHERS):
        master.parts.groups.find(group, now=0.0)
    slave = await start_broker(
        root="slave",
        pull=PullSettings(slave_read_enable=True),
        **slave_of(master, state_interval=0.05),
    )
    await until_rounds(slave)
    waiting = await wait_for(slave, await open_client(slave))

    act(master)

    assert (await waiting.answer()).code == code


async def test_a_master_that_is_back(start_broker, open_client):
    master = await start_broker(root="master", replication=SERVING)
    await (await open_client(master)).stored("orders")
    slave = await start_broker(root="slave", **slave_of(master, state_interval=0.05))
    await until_copied(master, slave)
    await until_rounds(slave)
    address, ha_address = master.address, master.ha_address
    assert ha_address is not None
    await master.stop()
    await until(lambda: following(slave).is_alone, DEADLINE)
    client = await open_client(slave)
    waiting = asyncio.ensure_future(client.pull("orders", offset=1, hold=HOLD))
    await until(lambda: len(slave.parts.held) == 1, DEADLINE)

    await start_broker(
        root="master",
        server=ServerSettings(port=address.port),
        replication=replace(SERVING, port=ha_address.port),
    )

    # Not served here any more: the master is to be asked.
    assert (await asyncio.wait_for(waiting, 30)).code == ResponseCode.SYSTEM_BUSY
