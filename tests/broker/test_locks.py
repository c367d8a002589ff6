"""Order locks: one owner at a time, however long anybody is paused."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.broker.locks import BROKER_LOCK_LIFE, CLIENT_LOCK_LIFE, OrderLocks
from orbitmq.wire.bodies import MessageQueue

QUEUES = tuple(MessageQueue(broker_name="b", queue_id=number, topic="T") for number in range(3))


def test_a_queue_is_given_to_the_first_who_asks():
    locks = OrderLocks()

    assert locks.lock("g", "one", QUEUES[:2], now=0.0) == QUEUES[:2]
    assert locks.lock("g", "two", QUEUES, now=1.0) == QUEUES[2:]
    assert [locks.owner("g", queue, now=1.0) for queue in QUEUES] == ["one", "one", "two"]


def test_groups_do_not_disturb_each_other():
    locks = OrderLocks()
    locks.lock("g", "one", QUEUES, now=0.0)

    assert locks.lock("h", "two", QUEUES, now=0.0) == QUEUES
    assert locks.group_has_lock("g", now=0.0)
    assert not locks.group_has_lock("i", now=0.0)


def test_a_lock_lives_for_sixty_seconds_after_it_was_last_asked_for():
    locks = OrderLocks()
    locks.lock("g", "one", QUEUES[:1], now=0.0)
    locks.lock("g", "one", QUEUES[:1], now=20.0)

    assert locks.lock("g", "two", QUEUES[:1], now=20.0 + BROKER_LOCK_LIFE) == ()
    assert locks.group_has_lock("g", now=20.0 + BROKER_LOCK_LIFE)
    assert not locks.group_has_lock("g", now=20.1 + BROKER_LOCK_LIFE)
    assert locks.owner("g", QUEUES[0], now=20.1 + BROKER_LOCK_LIFE) is None
    assert locks.lock("g", "two", QUEUES[:1], now=20.1 + BROKER_LOCK_LIFE) == QUEUES[:1]


def test_a_client_gives_back_only_what_it_holds():
    locks = OrderLocks()
    locks.lock("g", "one", QUEUES[:2], now=0.0)

    locks.unlock("g", "two", QUEUES)
    locks.unlock("g", "one", QUEUES[:1])
    locks.unlock("nobody", "one", QUEUES)

    assert [locks.owner("g", queue, now=0.0) for queue in QUEUES] == [None, "one", None]
    assert locks.lock("g", "two", QUEUES[:1], now=0.0) == QUEUES[:1]


def test_expired_locks_do_not_take_memory_for_ever():
    locks = OrderLocks()
    locks.lock("g", "one", QUEUES, now=0.0)
    locks.lock("h", "two", QUEUES[:1], now=50.0)

    assert locks.forget_expired(now=61.0) == 3
    assert locks.forget_expired(now=61.0) == 0
    assert locks.owner("h", QUEUES[0], now=61.0) == "two"


def test_there_is_a_bound_for_all_locks_and_what_is_held_is_renewed():
    locks = OrderLocks(most=3)
    locks.lock("g", "one", QUEUES[:2], now=0.0)

    assert locks.lock("h", "two", QUEUES, now=0.0) == QUEUES[:1]
    assert (len(locks), locks.is_full) == (3, True)
    assert locks.lock("g", "one", QUEUES, now=1.0) == QUEUES[:2]
    assert locks.lock("i", "three", QUEUES, now=1.0) == ()
    locks.unlock("g", "one", QUEUES)
    assert (len(locks), locks.is_full) == (1, False)
    assert locks.lock("i", "three", QUEUES, now=2.0) == QUEUES[:2]
    locks.forget_expired(now=100.0)
    assert len(locks) == 0


def test_nothing_is_granted_while_owners_from_before_a_restart_may_still_consume():
    locks = OrderLocks(granting_from=100.0 + CLIENT_LOCK_LIFE)

    assert locks.lock("g", "two", QUEUES, now=129.9) == ()
    assert locks.lock("g", "two", QUEUES, now=130.0) == QUEUES


@dataclass
class OrderlyClient:
    """What a client knows: requests on their way, and until when it believes in each lock."""

    name: str
    sent: list[tuple[str, int, float]] = field(default_factory=list)
    answers: list[tuple[int, float, int]] = field(default_factory=list)
    believes_until: dict[int, float] = field(default_factory=dict)
    #: How often each queue was given back; an answer to something asked before that is stale.
    given_back: dict[int, int] = field(default_factory=dict)

    def consumes(self, queue: int, now: float) -> bool:
        return now <= self.believes_until.get(queue, -1.0)


clients = st.integers(0, 1)
#: Few of each, so that random steps meet.
MODEL_QUEUES = QUEUES[:2]
queues = st.integers(0, len(MODEL_QUEUES) - 1)


class PausedClients(RuleBasedStateMachine):
    """Clients that are paused anywhere: before the broker sees a request, or before its answer.

    Time passes between any two steps, so that every step may be late by any amount. A client's
    requests arrive in the order in which it sent them, as they do on one connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.locks = OrderLocks(most=len(MODEL_QUEUES))
        self.clients = [OrderlyClient(name) for name in ("one", "two")]

    @rule(
        seconds=st.sampled_from((0.1, 1.0, 10.0, 19.0, 29.9, 30.0, 30.1, 59.9, 60.0, 60.1, 300.0))
    )
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(client=clients, queue=queues)
    def asks(self, client: int, queue: int) -> None:
        self.clients[client].sent.append(("lock", queue, self.now))

    @rule(client=clients, queue=queues)
    def asks_and_is_answered_at_once(self, client: int, queue: int) -> None:
        self.asks(client, queue)
        while self.clients[client].sent:
            self.request_arrives(client)
        while self.clients[client].answers:
            self.answer_arrives(client)

    @rule(client=clients, queue=queues)
    def gives_back(self, client: int, queue: int) -> None:
        one = self.clients[client]
        one.believes_until.pop(queue, None)
        one.given_back[queue] = one.given_back.get(queue, 0) + 1
        one.sent.append(("unlock", queue, self.now))

    @rule(client=clients)
    def request_arrives(self, client: int) -> None:
        one = self.clients[client]
        if not one.sent:
            return
        what, number, sent_at = one.sent.pop(0)
        queue = QUEUES[number]
        if what == "unlock":
            self.locks.unlock("g", one.name, [queue])
        elif self.locks.lock("g", one.name, [queue], self.now):
            pending = sum(1 for kind, other, _ in one.sent if (kind, other) == ("unlock", number))
            one.answers.append((number, sent_at, one.given_back.get(number, 0) - pending))

    @rule(client=clients)
    def answer_arrives(self, client: int) -> None:
        one = self.clients[client]
        if not one.answers:
            return
        number, sent_at, given_back = one.answers.pop(0)
        if given_back == one.given_back.get(number, 0):
            one.believes_until[number] = sent_at + CLIENT_LOCK_LIFE

    @rule()
    def memory_is_tidied(self) -> None:
        self.locks.forget_expired(self.now)

    @invariant()
    def nobody_overlaps(self) -> None:
        for number, queue in enumerate(MODEL_QUEUES):
            owners = [one.name for one in self.clients if one.consumes(number, self.now)]
            assert len(owners) <= 1
            if owners:
                assert self.locks.owner("g", queue, self.now) == owners[0]


PausedClients.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPausedClients = PausedClients.TestCase


def test_counting_from_the_answer_would_not_be_safe():
    """Why a client counts from the request: an answer may be read long after it was given."""
    locks = OrderLocks()
    locks.lock("g", "one", QUEUES[:1], now=0.0)
    answer_read_at = 45.0

    taken = locks.lock("g", "two", QUEUES[:1], now=61.0)

    assert taken == QUEUES[:1]
    assert answer_read_at + CLIENT_LOCK_LIFE > 61.0
    assert 0.0 + CLIENT_LOCK_LIFE < 61.0
