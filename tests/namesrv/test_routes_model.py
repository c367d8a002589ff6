"""Random lives of brokers, checked against a model that knows only who was last heard of when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orbitmq.namesrv.routes import Registration, RouteTable
from orbitmq.wire.bodies import DataVersion
from tests.support.namesrv import topic

NAMES = ("a", "b", "c")
TOPICS = ("orders", "payments", "refunds", "audit")
TIMEOUT = 30.0

names = st.sampled_from(NAMES)
ids = st.sampled_from([0, 1])
topic_sets = st.sets(st.sampled_from(TOPICS), min_size=2)


@dataclass
class _Member:
    seen: float
    connection: int


class BrokersComeAndGo(RuleBasedStateMachine):
    """Every member has one address, so that who is alive is all that the model needs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable()
        self.now = 0.0
        self.counter = 0
        self.members: dict[tuple[str, int], _Member] = {}
        #: What masters have said since their group last became empty.
        self.topics: dict[str, set[str]] = {}

    @initialize()
    def begin(self) -> None:
        assert self.table.topics().topic_list == ()

    @rule(name=names, broker_id=ids, topics=topic_sets, connection=st.integers(0, 3))
    def register(self, name: str, broker_id: int, topics: set[str], connection: int) -> None:
        self.counter += 1
        self.table.register(
            Registration(
                cluster=f"cluster-of-{name}",
                name=name,
                id=broker_id,
                address=_address(name, broker_id),
                ha_address="ha",
                timeout=TIMEOUT,
                version=DataVersion(counter=self.counter),
                topics=tuple(topic(each) for each in sorted(topics)),
            ),
            self.now,
            connection,
        )
        self.members[name, broker_id] = _Member(self.now, connection)
        if broker_id == 0:
            self.topics.setdefault(name, set()).update(topics)

    @rule(name=names, broker_id=ids)
    def unregister(self, name: str, broker_id: int) -> None:
        self.table.unregister(f"cluster-of-{name}", _address(name, broker_id), name)
        self.members.pop((name, broker_id), None)

    @rule(name=names, broker_id=ids)
    def heartbeat(self, name: str, broker_id: int) -> None:
        self.table.touch(f"cluster-of-{name}", _address(name, broker_id), self.now)
        if (name, broker_id) in self.members:
            self.members[name, broker_id].seen = self.now

    @rule(connection=st.integers(0, 3))
    def lose_connection(self, connection: int) -> None:
        self.table.connection_closed(connection)
        self.members = {k: m for k, m in self.members.items() if m.connection != connection}

    @rule(seconds=st.sampled_from([1.0, 10.0, TIMEOUT, TIMEOUT + 1]))
    def wait_and_scan(self, seconds: float) -> None:
        self.now += seconds
        expired = self.table.expire(self.now)
        late = {key for key, member in self.members.items() if member.seen + TIMEOUT < self.now}
        assert {each.key.address for each in expired} == {_address(*key) for key in late}
        for key in late:
            del self.members[key]

    @invariant()
    def routes_lead_to_living_brokers_and_to_all_of_them(self) -> None:
        alive = {name for name, _ in self.members}
        self.topics = {name: topics for name, topics in self.topics.items() if name in alive}
        for each in TOPICS:
            route = self.table.route(each)
            expected = {name for name, topics in self.topics.items() if each in topics}
            found = {} if route is None else {b.broker_name: b for b in route.broker_datas}
            assert found.keys() == expected
            for name, broker in found.items():
                assert broker.broker_addrs == self._addresses(name)
            if route is not None:
                assert {queues.broker_name for queues in route.queue_datas} == expected

    @invariant()
    def the_lists_agree(self) -> None:
        alive = {name for name, _ in self.members}
        clusters = self.table.clusters()
        assert clusters.broker_addr_table.keys() == alive
        assert clusters.cluster_addr_table == {f"cluster-of-{n}": (n,) for n in alive}
        known = {each for topics in self.topics.values() for each in topics}
        assert set(self.table.topics().topic_list) == known
        for name in NAMES:
            assert self.table.members("c", name).broker_addrs == self._addresses(name)
            for broker_id in (0, 1):
                version = self.table.version_of(f"cluster-of-{name}", _address(name, broker_id))
                assert (version is not None) == ((name, broker_id) in self.members)

    def _addresses(self, name: str) -> dict[int, str]:
        return {i: _address(n, i) for n, i in sorted(self.members) if n == name}


def _address(name: str, broker_id: int) -> str:
    return f"{name}-{broker_id}:10911"


TestBrokersComeAndGo = BrokersComeAndGo.TestCase
TestBrokersComeAndGo.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
