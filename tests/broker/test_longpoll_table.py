"""Many held pulls: nobody is crowded out by others, and nobody has to wait while all are woken."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.broker.broker import Broker
from orbitmq.broker.groups import Peer
from orbitmq.broker.longpoll import AT_ONCE, HeldPull, HeldPulls, Kept, WaitingTable
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


QUEUES = (0, 1)
TAGS = ("a", "b", "c")
CONNECTIONS = 3
LIMIT = 8
LIMIT_OF_ONE = 6
PUT_OFF = 3
PUT_OFF_OF_ONE = 2
SHORT_HOLD = 1.0


class HandLoop:
    """A loop whose time moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Any]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        timer = SimpleNamespace(is_cancelled=False, call=call)
        timer.when = lambda: when
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_at(self.now, call)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if not timer.is_cancelled:
                timer.call()
        self.now = until


class NumberedEnd:
    """As much of a connection as holding needs."""

    is_slow = False

    def __init__(self, number: int) -> None:
        self.context = Peer(f"c{number}", b"")
        self.remote = Address("127.0.0.1", number)

    def flush(self) -> None:
        pass


class HoldingMachine(RuleBasedStateMachine):
    """Random pulls, messages, moments and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = HandLoop()
        pacing = Pacing(cast(Any, self.loop), 1 << 60)
        self.holding = HeldPulls(
            cast(Any, None),
            pacing,
            cast(Any, self.loop),
            PullSettings(
                held_requests=LIMIT,
                held_per_connection=LIMIT_OF_ONE,
                short_hold=SHORT_HOLD,
                put_off_requests=PUT_OFF,
                put_off_per_connection=PUT_OFF_OF_ONE,
            ),
            at_once=2,
        )
        self.holding.again = self._answered
        self.connections: list[Any] = [NumberedEnd(number) for number in range(CONNECTIONS)]
        self.ends = dict.fromkeys(QUEUES, 0)
        #: What the model says is held: the tags it wants and when its time is up.
        self.held: dict[HeldPull, tuple[frozenset[str], float]] = {}
        #: What it says is put off, and until when.
        self.put_off: dict[HeldPull, float] = {}
        self.answers: list[HeldPull] = []

    def _answered(self, pull: HeldPull) -> None:
        self.answers.append(pull)

    def _take_answers(self) -> set[HeldPull]:
        answers, self.answers = self.answers, []
        assert len(answers) == len(set(answers)), "answered twice"
        return set(answers)

    @rule(
        who=st.integers(0, CONNECTIONS - 1),
        queue=st.sampled_from(QUEUES),
        tags=st.sets(st.sampled_from(TAGS), max_size=2),
        seconds=st.sampled_from((0.5, 1.0, 1.5, 5.0)),
    )
    def hold(self, who: int, queue: int, tags: set[str], seconds: float) -> None:
        # No tags stand for all messages.
        wanted = parse_tags("||".join(sorted(tags)))
        request = Command.request(11, opaque=1)
        pull = HeldPull(self.connections[who], request, "T", queue, "g", self.ends[queue], wanted)
        of_each = Counter(each.connection for each in self.held)
        mine = of_each[self.connections[who]]
        share = LIMIT // len({self.connections[who], *of_each})
        is_full = len(self.held) == LIMIT
        has_room = mine < LIMIT_OF_ONE and (not is_full or mine < share)
        can_be_put_off = self._can_be_put_off(self.connections[who])

        kept = self.holding.hold(pull, seconds)
        self.loop.advance(0)

        otherwise = Kept.DEFERRED if can_be_put_off else Kept.NOT
        assert kept is (Kept.HELD if has_room else otherwise)
        gave_way = [each for each in self.held if not each.is_held]
        assert len(gave_way) == (is_full and has_room)
        answered = self._take_answers()
        for other in gave_way:
            # Somebody with more than a share, and the one of theirs that has waited longest.
            assert of_each[other.connection] > share
            theirs = [each for each in self.held if each.connection is other.connection]
            assert other is theirs[0]
            _, deadline = self.held.pop(other)
            if self._can_be_put_off(other.connection):
                self.put_off[other] = min(deadline, self.loop.now + SHORT_HOLD)
            else:
                answered.remove(other)
        assert not answered
        if kept is Kept.HELD:
            self.held[pull] = (frozenset(tags) or frozenset(TAGS), self.loop.now + seconds)
        elif kept is Kept.DEFERRED:
            self.put_off[pull] = self.loop.now + min(seconds, SHORT_HOLD)

    def _can_be_put_off(self, connection: Any) -> bool:
        mine = [each for each in self.put_off if each.connection is connection]
        return len(self.put_off) < PUT_OFF and len(mine) < PUT_OFF_OF_ONE

    @rule(
        messages=st.lists(
            st.tuples(st.sampled_from(QUEUES), st.sampled_from(TAGS)), min_size=1, max_size=4
        )
    )
    def arrive(self, messages: list[tuple[int, str]]) -> None:
        arrivals = []
        expected: dict[HeldPull, int] = {}
        for queue, tag in messages:
            number = self.ends[queue]
            self.ends[queue] = number + 1
            arrivals.append(
                (SimpleNamespace(topic="T", queue_id=queue), number, java_hash(tag), 0, 1)
            )
            for pull, (tags, _) in self.held.items():
                if pull.key == ("T", queue) and tag in tags:
                    expected.setdefault(pull, number)

        self.holding.arrived(cast(Any, arrivals))
        self.loop.advance(0)

        assert self._take_answers() == set(expected)
        for pull, first_wanted in expected.items():
            # It reads on from the first message that it wants, and has seen all before that.
            assert pull.offset == first_wanted
            del self.held[pull]

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 4.0)))
    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

        late = {pull for pull, (_, deadline) in self.held.items() if deadline <= self.loop.now}
        soon = {pull for pull, until in self.put_off.items() if until <= self.loop.now}
        assert self._take_answers() == late | soon
        for pull in late:
            assert pull.offset == self.ends[pull.key[1]]
            del self.held[pull]
        for pull in soon:
            del self.put_off[pull]

    @rule(who=st.integers(0, CONNECTIONS - 1))
    def close(self, who: int) -> None:
        self.holding.forget(self.connections[who])

        assert not self._take_answers()
        for pull in [pull for pull in self.held if pull.connection is self.connections[who]]:
            del self.held[pull]
        for pull in [pull for pull in self.put_off if pull.connection is self.connections[who]]:
            del self.put_off[pull]

    @precondition(lambda self: self.held)
    @rule(queue=st.sampled_from(QUEUES))
    def wake(self, queue: int) -> None:
        self.holding.wake("T", queue)
        self.loop.advance(0)

        woken = {pull for pull in self.held if pull.key == ("T", queue)}
        assert self._take_answers() == woken
        for pull in woken:
            del self.held[pull]

    @invariant()
    def the_same_are_held(self) -> None:
        assert len(self.holding) == len(self.held)
        assert self.holding.deferred == len(self.put_off)
        for number, connection in enumerate(self.connections):
            mine = {pull for pull in self.held if pull.connection is self.connections[number]}
            assert set(connection.context.held) == mine
            assert connection.context.held_weight == len(mine)

    @invariant()
    def everybody_has_judged_every_message(self) -> None:
        for pull in self.held:
            assert pull.offset == self.ends[pull.key[1]]

    def teardown(self) -> None:
        self.holding.stop()
        self.loop.advance(0)
        assert self._take_answers() == {*self.held, *self.put_off}
        assert len(self.holding) == self.holding.deferred == 0


TestHolding = HoldingMachine.TestCase
TestHolding.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TOPICS = ("T", "U")
GROUPS = ("g", "h")


def pull_of(topic: str, queue_id: int, group: str, tags: str = "*") -> HeldPull:
    connection: Any = None
    request = Command.request(11, opaque=1, body=tags.encode())
    return HeldPull(connection, request, topic, queue_id, group, 0, parse_tags(tags))


pulls = st.builds(
    pull_of, st.sampled_from(TOPICS), st.sampled_from(QUEUES), st.sampled_from(GROUPS)
)


@given(st.lists(pulls, max_size=20), st.sets(st.integers(0, 19)))
def test_those_are_found_who_wait_and_whom_it_concerns(added, leaving):
    table = WaitingTable()
    for pull in added:
        table.add(pull)
    for number in leaving:
        if number < len(added):
            table.remove(added[number])
    there = [pull for number, pull in enumerate(added) if number not in leaving]

    assert bool(table) == bool(there)
    for topic in (None, *TOPICS):
        for queue_id in (None, *QUEUES):
            for group in (None, *GROUPS):
                found = list(table.find(topic, queue_id, group))
                assert len(found) == len(set(found))
                assert set(found) == {
                    pull
                    for pull in there
                    if topic in (None, pull.topic)
                    and queue_id in (None, pull.queue_id)
                    and group in (None, pull.group)
                }


@given(st.lists(pulls, max_size=20))
def test_those_who_wait_for_a_queue_are_listed_as_they_came(added):
    table = WaitingTable()
    for pull in added:
        table.add(pull)

    for topic in TOPICS:
        for queue_id in QUEUES:
            expected = [pull for pull in added if pull.key == (topic, queue_id)]
            assert list(table.of_queue(topic, queue_id)) == expected


@given(st.lists(pulls, max_size=20))
def test_who_leaves_while_others_are_looked_for_does_no_harm(added):
    table = WaitingTable()
    for pull in added:
        table.add(pull)
    seen: list[HeldPull] = []

    for pull in table.find(None, None, None):
        seen.append(pull)
        table.remove(pull)

    assert set(seen) == set(added)
    assert not table
    # Nothing is left behind for names that nobody waits for any more.
    assert table.__dict__ == WaitingTable().__dict__


def test_one_that_waits_with_a_large_filter_counts_for_several():
    usual = pull_of("T", 0, "g", "red || blue")
    large = pull_of("T", 0, "g", "||".join(map(str, range(4_000))))

    assert usual.weight == 1
    assert large.weight == 1 + 22_888 // 4096 + 160_128 // 16_384
