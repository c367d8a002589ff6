"""Held pulls against a model: none is missed, none is answered twice, whatever happens.

The machine looks at two who wait at once and at the others in slices, so that nearly everything is
done in slices; time passes before it compares.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.broker.groups import Peer
from orbitmq.broker.longpoll import HeldPull, HeldPulls, Kept
from orbitmq.broker.scheduler import Pacing
from orbitmq.broker.settings import PullSettings
from orbitmq.filter.tags import parse_tags
from orbitmq.javahash import java_hash
from orbitmq.remoting.settings import Address
from orbitmq.wire.command import Command

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


class OneEnd:
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
        self.connections: list[Any] = [OneEnd(number) for number in range(CONNECTIONS)]
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
