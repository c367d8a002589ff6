"""Many held pulls: nobody is crowded out by others, and nobody has to wait while all are woken."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.groups import Peer
from orbitmq.broker.longpoll import AT_ONCE, HeldPull, HeldPulls, Kept
from orbitmq.broker.scheduler import CALLS, Pacing
from orbitmq.broker.settings import PullSettings
from orbitmq.broker.writes import Draft
from orbitmq.errors import SettingError
from orbitmq.filter.tags import parse_tags
from orbitmq.javahash import java_hash
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.broker import RawClient, bodies_in, pull_header, until

#: Far longer than any of these tests takes.
LONG = 60.0
#: Answers that one step of the loop may give: a turn of `Pacing` and a slice.
MOST_A_STEP = 2 * CALLS + AT_ONCE


def make_topic(broker: Broker, queues: int = 4) -> None:
    config = TopicConfig(topic_name="orders", read_queue_nums=queues, write_queue_nums=queues)
    broker.parts.topics.ensure(config, now=0.0)


def submit(client: RawClient, answers: list[Command], count: int, **fields: Any) -> None:
    """Ask for so many pulls at once; their answers go to the list."""

    def answered(outcome: object) -> None:
        if isinstance(outcome, Command):
            answers.append(outcome)

    for _ in range(count):
        header = pull_header("orders", **({"hold": LONG} | fields))
        client.connection.submit(RequestCode.PULL_MESSAGE, header, answered, timeout=LONG)


# Over sockets.


async def test_whoever_waits_for_little_is_held_however_much_others_wait_for(
    start_broker, open_client
):
    broker = await start_broker(pull=PullSettings(held_requests=400, short_hold=0.05))
    make_topic(broker)
    early: list[Command] = []
    greedy = [await open_client(broker) for _ in range(4)]
    for each in greedy:
        submit(each, early, 300, consumer_group="greedy")
    # 800 of 1200 find no room, and are told so soon.
    await until(lambda: len(early) == 800)
    assert len(broker.parts.held) == 400
    honest = await open_client(broker)

    waiting = [asyncio.ensure_future(honest.pull("orders", queue, hold=LONG)) for queue in range(4)]
    await until(lambda: len(early) == 804)
    held = len(broker.parts.held)
    await honest.stored("orders", b"for all", queue_id=3)
    answer = await asyncio.wait_for(waiting[3], 10)

    assert held == 400
    assert {each.code for each in early} == {ResponseCode.PULL_NOT_FOUND}
    assert bodies_in(answer) == [b"for all"]
    assert [each.done() for each in waiting] == [False, False, False, True]
    for pull in waiting[:3]:
        pull.cancel()


async def test_a_connection_may_have_so_many_held_and_the_next_is_answered_soon(
    start_broker, open_client
):
    broker = await start_broker(pull=PullSettings(held_per_connection=5, short_hold=0.05))
    make_topic(broker)
    one, other = await open_client(broker), await open_client(broker)
    answers: list[Command] = []

    submit(one, answers, 8)
    await until(lambda: len(answers) == 3)
    submit(other, answers, 5)
    await until(lambda: len(broker.parts.held) == 10)

    assert [each.code for each in answers] == [ResponseCode.PULL_NOT_FOUND] * 3


async def test_who_asks_again_as_soon_as_it_is_answered_does_not_go_round(
    start_broker, open_client
):
    """As Java's push consumer does after an empty answer."""
    broker = await start_broker(pull=PullSettings(held_per_connection=4, short_hold=0.25))
    make_topic(broker)
    client = await open_client(broker)
    loop = asyncio.get_running_loop()
    asked: list[float] = []

    def ask():
        asked.append(loop.time())
        header = pull_header("orders", hold=LONG)
        client.connection.submit(RequestCode.PULL_MESSAGE, header, answered, timeout=LONG)

    def answered(outcome):
        if isinstance(outcome, Command):
            ask()

    for _ in range(5):
        ask()
    await until(lambda: len(asked) == 8)

    # However slow the machine is, the fifth never comes round sooner; the clock may be coarse.
    pauses = [then - before for before, then in itertools.pairwise(asked[4:])]
    assert min(pauses) > 0.2
    assert len(broker.parts.held) == 4


async def test_who_is_put_off_finds_what_arrived_meanwhile(start_broker, open_client):
    broker = await start_broker(pull=PullSettings(held_per_connection=0, short_hold=0.3))
    make_topic(broker)
    client = await open_client(broker)
    answers: list[Command] = []

    submit(client, answers, 1)
    await until(lambda: broker.parts.held.deferred == 1)
    # In the same step of the loop: its short while is not over before.
    broker.parts.writes.put(Draft("orders", 0, b"meanwhile", b"", 0, broker.parts.store_host))
    broker.parts.writes.finish()
    await until(lambda: len(answers) == 1)

    assert bodies_in(answers[0]) == [b"meanwhile"]


async def test_a_pull_that_asks_for_less_than_the_short_while_is_answered_then(
    start_broker, open_client
):
    broker = await start_broker(pull=PullSettings(held_per_connection=0, short_hold=LONG))
    make_topic(broker)
    client = await open_client(broker)
    answers: list[Command] = []

    submit(client, answers, 1, hold=LONG)
    submit(client, answers, 1, hold=0.05)
    await until(lambda: len(answers) == 1)

    assert broker.parts.held.deferred == 1


async def test_who_wants_even_more_is_told_that_the_broker_is_busy_and_others_are_put_off(
    start_broker, open_client
):
    broker = await start_broker(
        pull=PullSettings(held_per_connection=5, put_off_per_connection=40, short_hold=LONG)
    )
    make_topic(broker)
    greedy, other = await open_client(broker), await open_client(broker)
    answers: list[Command] = []
    of_other: list[Command] = []

    submit(greedy, answers, 5 + 40 + 3)
    await until(lambda: len(answers) == 3)
    submit(other, of_other, 7)
    await until(lambda: broker.parts.held.deferred == 40 + 2)

    # Java's clients wait for seconds after this code, whichever consumer it is.
    assert {each.code for each in answers} == {ResponseCode.SYSTEM_BUSY}
    assert of_other == []
    assert broker.parts.held.refused == 3
    greedy.connection.abort()
    await until(lambda: broker.parts.held.deferred == 2)


async def test_all_together_are_put_off_up_to_a_limit_that_can_be_raised_while_the_broker_runs(
    start_broker, open_client
):
    broker = await start_broker(
        pull=PullSettings(held_per_connection=0, put_off_requests=6, short_hold=LONG)
    )
    make_topic(broker)
    first, second = await open_client(broker), await open_client(broker)
    answers: list[Command] = []
    submit(first, answers, 4)
    await until(lambda: broker.parts.held.deferred == 4)

    submit(second, answers, 4)
    await until(lambda: len(answers) == 2)
    changed = await first.connection.request(
        RequestCode.UPDATE_BROKER_CONFIG, body=b"putOffRequests=8\nputOffPerConnection=5"
    )
    submit(second, answers, 2)
    submit(first, answers, 1)
    await until(lambda: len(answers) == 3)

    assert changed.code == ResponseCode.SUCCESS
    assert {each.code for each in answers} == {ResponseCode.SYSTEM_BUSY}
    assert broker.parts.held.deferred == 8


async def test_a_stop_answers_those_who_are_put_off(start_broker, open_client):
    broker = await start_broker(
        pull=PullSettings(held_per_connection=5, short_hold=LONG), stop_grace=30.0
    )
    make_topic(broker)
    answers: list[Command] = []
    submit(await open_client(broker), answers, 300)
    await until(lambda: broker.parts.held.deferred == 295)

    await broker.stop()

    await until(lambda: len(answers) == 300)
    assert {each.code for each in answers} == {ResponseCode.PULL_NOT_FOUND}


async def test_a_client_that_waits_for_too_much_is_named_in_the_log_once(
    start_broker, open_client, caplog
):
    broker = await start_broker(pull=PullSettings(held_per_connection=5, short_hold=LONG))
    make_topic(broker)
    submit(await open_client(broker), [], 50)

    await until(lambda: broker.parts.held.deferred == 45)

    assert caplog.text.count("a client has more pulls waiting than there is room for") == 1


async def test_a_pull_with_much_in_it_counts_for_several(start_broker, open_client):
    broker = await start_broker(pull=PullSettings(held_per_connection=18, short_hold=0.05))
    make_topic(broker)
    client = await open_client(broker)
    answers: list[Command] = []

    # 20 KiB in each, which count for six, and a filter that counts for three: room for two, and
    # not for three.
    submit(client, answers, 3, subscription=" || ".join(f"tag{n:06}" for n in range(1600)))
    await until(lambda: len(answers) == 1)

    assert len(broker.parts.held) == 2


class Steps:
    """Numbers the steps of the running loop."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None

    def __enter__(self) -> Self:
        self._count()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        self._handle.cancel()

    def _count(self) -> None:
        self.now += 1
        self._handle = self._loop.call_soon(self._count)


async def many_held(broker: Broker, clients: list[RawClient], each: int) -> Counter[int]:
    """So many pulls of each client wait for one queue. Counts their answers by step of the loop."""
    for client in clients:
        submit(client, [], each)
    await until(lambda: len(broker.parts.held) == each * len(clients), 30)
    return Counter()


def count_answers(broker: Broker, steps: Steps, counts: Counter[int]) -> None:
    again = broker.parts.held.again

    def counting(pull: HeldPull) -> None:
        counts[steps.now] += 1
        again(pull)

    broker.parts.held.again = counting


@pytest.mark.parametrize("cause", ["a message", "a permission"])
async def test_while_thousands_are_woken_others_are_served(start_broker, open_client, cause):
    broker = await start_broker()
    make_topic(broker)
    usual = await open_client(broker)
    counts = await many_held(broker, [await open_client(broker) for _ in range(4)], 1500)

    with Steps() as steps:
        count_answers(broker, steps, counts)
        if cause == "a message":
            await usual.stored("orders", b"x")
        else:
            broker.parts.held.wake()
        assert (await usual.heartbeat("usual@1", producers=("p",))).code == 0
        at_the_heartbeat = counts.total()
        await until(lambda: counts.total() == 6000, 30)

    assert len(broker.parts.held) == 0
    assert at_the_heartbeat < 6000
    assert max(counts.values()) <= MOST_A_STEP


async def test_a_stop_answers_thousands_who_wait(start_broker, open_client):
    broker = await start_broker(stop_grace=30.0)
    make_topic(broker)
    answers: list[Command] = []
    submit(await open_client(broker), answers, 2000)
    await until(lambda: len(broker.parts.held) == 2000)

    await broker.stop()

    await until(lambda: len(answers) == 2000)
    assert {each.code for each in answers} == {ResponseCode.PULL_NOT_FOUND}


# Without sockets.


class StepLoop:
    """A loop that makes a step when it is told to; on it, a look at the clock takes time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.a_look = 0.001
        self._ready: list[Callable[[], None]] = []

    def time(self) -> float:
        self.now += self.a_look
        return self.now

    def call_soon(self, call: Callable[[], None]) -> None:
        self._ready.append(call)

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        return SimpleNamespace(when=lambda: when, cancel=lambda: None)

    def step(self) -> bool:
        ready, self._ready = self._ready, []
        for call in ready:
            call()
        return bool(ready)


class OneEnd:
    """As much of a connection as holding needs."""

    is_slow = False

    def __init__(self) -> None:
        self.context = Peer("c", b"")
        self.remote = Address("127.0.0.1", 1)

    def flush(self) -> None:
        pass


class Table:
    """Held pulls on a loop that makes steps by hand."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        pacing = Pacing(cast(Any, self.loop), 256 * 1024)
        room = PullSettings(held_per_connection=100_000)
        self.holding = HeldPulls(cast(Any, None), pacing, cast(Any, self.loop), room)
        self.woken: list[HeldPull] = []
        self.holding.again = self.woken.append

    def hold(
        self, count: int, tags: str = "*", queue: int = 0, offset: int = 0, topic: str = "T"
    ) -> list[HeldPull]:
        connection: Any = OneEnd()
        request = Command.request(11, opaque=1)
        pulls = [
            HeldPull(connection, request, topic, queue, "g", offset, parse_tags(tags))
            for _ in range(count)
        ]
        assert {self.holding.hold(pull, LONG) for pull in pulls} == {Kept.HELD}
        return pulls

    def arrive(self, *numbers: int, tag: str = "a", queue: int = 0) -> None:
        where = SimpleNamespace(topic="T", queue_id=queue)
        self.holding.arrived(cast(Any, [(where, n, java_hash(tag), 0, 1) for n in numbers]))

    def finish(self) -> int:
        """Make steps until nothing is left to do; how many there were."""
        steps = 0
        while self.loop.step():
            steps += 1
            assert steps < 100_000
        return steps


def test_a_step_looks_at_a_slice_of_those_who_wait_and_ends_by_the_clock():
    table = Table()
    table.hold(5000, tags="other")

    table.arrive(0)
    looked_at: list[int] = []
    while table.loop.step():
        judged = sum(pull.offset == 1 for pull in table.holding.table.of_queue("T", 0))
        looked_at.append(judged - sum(looked_at))

    assert table.woken == []
    assert sum(looked_at) == 5000
    # Looks at the clock, a thousandth of a second each, with 16 in between.
    assert max(looked_at) <= AT_ONCE + 16 * 6


def test_what_arrives_while_not_everybody_has_been_asked_is_asked_in_order():
    table = Table()
    nobody = table.hold(500, tags="other")
    somebody = table.hold(500, tags="b")

    table.arrive(0, tag="a")
    table.loop.step()
    table.arrive(1, tag="b")
    table.arrive(2, tag="a")
    table.finish()

    assert set(table.woken) == set(somebody)
    # Each goes on at the message that it wants.
    assert {pull.offset for pull in somebody} == {1}
    assert {pull.offset for pull in nobody} == {3}


def test_a_queue_that_is_too_far_behind_is_left_to_the_store():
    table = Table()
    pulls = table.hold(500, tags="other")

    table.arrive(0)
    for number in range(1, 400):
        table.arrive(number)
    table.finish()

    # None of these messages was wanted, but that was not found out for each of them.
    assert set(table.woken) == set(pulls)
    assert not table.holding._unjudged


def test_those_who_wait_for_another_queue_do_not_wait_behind_a_long_one():
    table = Table()
    table.hold(20_000, tags="other", queue=0)
    few = table.hold(3, queue=1)

    table.arrive(0, queue=0)
    table.arrive(0, queue=1)

    assert table.woken == few


def test_whoever_leaves_while_others_are_asked_is_not_answered():
    table = Table()
    leaving = table.hold(1000)
    staying = table.hold(1000)

    table.arrive(0)
    before = len(table.woken)
    table.holding.forget(leaving[0].connection)
    table.holding._pacing.forget(leaving[0].connection)
    table.finish()

    assert set(table.woken[before:]) == set(staying)
    assert len(table.holding) == 0


def test_all_whose_time_is_up_at_once_are_answered_in_steps():
    table = Table()
    pulls = table.hold(3000)
    table.loop.now += 2 * LONG

    table.holding._expire()
    at_once = len(table.woken)
    sizes: list[int] = []
    while table.loop.step():
        sizes.append(len(table.woken) - at_once - sum(sizes))

    assert at_once == AT_ONCE
    assert len(table.woken) == len(set(table.woken)) == len(pulls)
    assert max(sizes) <= MOST_A_STEP


class CountedName(str):  # noqa: SLOT000  # it has something to count with
    """A name that counts how often it is compared: once for everybody who is looked at."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    ("topic", "group"), [("other", None), (None, "other"), ("T", "other"), ("other", "g")]
)
def test_waking_looks_at_nobody_whom_it_does_not_concern(topic, group):
    table = Table()
    for queue in range(2000):
        table.hold(1, queue=queue)
    names = [CountedName(name) if name else None for name in (topic, group)]

    table.holding.wake(names[0], group=names[1])
    table.finish()

    assert table.woken == []
    assert sum(name.compared for name in names if name is not None) < 20


def test_waking_a_groups_part_of_a_topic_wakes_that_alone():
    table = Table()
    table.hold(100)
    mine = table.hold(3, topic="U")

    table.holding.wake("U", group="g")
    table.finish()

    assert table.woken == mine


@pytest.mark.parametrize(
    "limit", ["held_requests", "held_per_connection", "put_off_requests", "put_off_per_connection"]
)
def test_a_limit_below_zero_is_named(limit):
    below = cast(Any, {limit: -1})

    with pytest.raises(SettingError, match=rf"pull\.{limit} must not be negative, got -1"):
        PullSettings(**below)
