"""Faults: their words and commands, and what one thorough examination calls a fault."""

from __future__ import annotations

import asyncio
import contextlib
from types import MappingProxyType

import pytest

from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus, NameServerStatus, runtime_info
from orbitmq.client.admin.groups import GroupSettings
from orbitmq.client.admin.members import Finding, FindingKind
from orbitmq.client.admin.requests import BrokerNode
from orbitmq.client.admin.topics import Permission, Topic, TopicKind, TopicOnBroker
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.console import faults
from orbitmq.console.collect import (
    STALLED_AFTER,
    GroupSample,
    MemberFindings,
    Snapshot,
    TopicPart,
    TopicSample,
    Uneven,
)
from orbitmq.console.faults import (
    Check,
    Observation,
    Severity,
    cards,
    examine,
    find_faults,
    gathered,
)
from orbitmq.console.pipelines import Pipeline, PipelineReport, PipelineState
from orbitmq.console.resends import Resent
from orbitmq.remoting.settings import Address
from tests.console.conftest import QUEUE
from tests.support.client import quick_settings
from tests.support.orbitmqcli import parsed

NODE = BrokerNode("c", "a", 0, Address("127.0.0.1", 10911))
DEADLINE = 30.0


def up(**raw):
    """A broker that answers with these figures."""
    return BrokerStatus(NODE, True, runtime_info(raw, 0))


CLUSTER = ClusterStatus((up(),), ())


def group(name, lag=0, age=0.0, **fields):
    rates = (fields.pop("came", 0.0), fields.pop("went", 0.0))
    part = TopicPart("orders", lag, 4, *rates, age)
    fields.setdefault("settings", GroupSettings(name))
    return GroupSample(name=name, brokers=("a",), parts=(part,), **fields)


def snapshot(*groups, cluster=CLUSTER, topics=MappingProxyType({}), unreachable=()):
    return Snapshot(
        at=0.0,
        cluster=cluster,
        topics=topics,
        groups={each.name: each for each in groups},
        unreachable=unreachable,
    )


def faults_of(*groups, **fields):
    return find_faults(Observation(snapshot=snapshot(*groups, **fields), now=0.0))


def faults_of_broker(broker):
    return faults_of(cluster=ClusterStatus((broker,), ()))


def test_a_group_that_is_well_is_no_fault():
    well = (
        group("done"),
        group("keeping", 5, 1.0, members=2, came=10.0, went=10.0),
        group("draining", 5000, 900.0, members=2, came=10.0, went=100.0),
        group("just-behind", 5, 30.0, members=1, came=20.0, went=10.0),
        group("idle-without-members", members=0),
    )

    assert faults_of(*well) == ()


@pytest.mark.parametrize(
    ("sick", "kind", "text"),
    [
        (
            group("g", 12, 300.0, members=1, still=240.0),
            "stalled",
            "12 messages wait, the oldest for 5 min, and none was finished for 4 min",
        ),
        (group("g", 1, 300.0, members=0), "nobody consumes", "1 message waits"),
        (
            group("g", 700, 300.0, members=2, came=50.0, went=20.0),
            "falling behind",
            "50 come in each second and 20 are finished",
        ),
        (group("g", 3, 10.0, settings=GroupSettings("g", is_enabled=False)), "paused", "paused"),
        (group("g", is_uniform=False), "settings differ", "different settings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_problem_of_a_group_has_its_kind_its_words_and_a_command(sick, kind, text):
    (fault,) = faults_of(sick)

    assert (fault.subject, fault.kind, fault.link) == ("g", kind, "/groups/g")
    assert text in fault.text
    assert parsed(fault.command)


@pytest.mark.parametrize(
    ("dead", "counts", "text"),
    [
        (
            9,
            (9, 0, 2),
            "2 messages died in the last hour and were not resent; 9 dead letters are open",
        ),
        (
            9,
            (9, 5, 1, 1),
            (
                "1 message died in the last hour and was not resent; 4 dead letters are open, "
                "5 were resent"
            ),
        ),
        (9, (9, 7, 0, 2), None),
        # Letters of the last hour count, whatever is not known of older ones.
        (5000, (100, 100, 0, 2), None),
        (
            5000,
            (),
            "2 messages died in the last hour, and it is not known whether they were resent",
        ),
        (
            5000,
            (100, 100, 0, 1),
            "1 message died in the last hour, and it is not known whether it was resent",
        ),
        (
            5000,
            (100, 1, 1),
            (
                "at most 2 messages died in the last hour and were not resent; at most 4,999 dead "
                "letters are open, at least 1 was resent"
            ),
        ),
    ],
)
def test_dead_letters_of_the_last_hour_are_a_fault_unless_they_were_resent(dead, counts, text):
    found = faults_of(group("g", dead_letters=dead, dead_last_hour=2, resent=Resent(*counts)))

    assert [fault.text for fault in found] == ([] if text is None else [text])
    assert [fault.link for fault in found] == ["/dead-letters/g"] * len(found)


@pytest.mark.parametrize(
    ("age", "still", "patience", "is_stalled"),
    [
        (90.0, 61.0, 60.0, True),
        (90.0, 5.0, 60.0, False),
        (90.0, 1.5, 1.0, True),
        (3.0, 1.5, 1.0, False),
        (90.0, 0.5, 1.0, False),
    ],
)
def test_a_group_is_stalled_only_when_its_oldest_message_has_waited(
    age, still, patience, is_stalled
):
    sample = group("g", 5, age, members=1, still=still, patience=patience)

    assert any(fault.kind == "stalled" for fault in faults_of(sample)) is is_stalled


LITTLE, NONE = Severity.WARN, Severity.BAD


@pytest.mark.parametrize(
    ("topics", "groups", "found"),
    [
        ("7", "7", []),
        ("8", "7", [("little room for topics", LITTLE)]),
        ("7", "10", [("no room for groups", NONE)]),
        ("11", "9", [("no room for topics", NONE), ("little room for groups", LITTLE)]),
    ],
)
def test_a_broker_that_soon_creates_no_more_topics_or_groups_is_a_fault(topics, groups, found):
    faults = faults_of_broker(
        up(topics=topics, groups=groups, maxAutoTopics="10", maxAutoGroups="10")
    )

    assert [(fault.kind, fault.weight) for fault in faults] == found
    for fault in faults:
        assert fault.check is Check.ROOM
        assert "broker.max_auto_" in fault.command
        assert parsed(fault.command)
    assert faults_of_broker(up(topics="99", groups="99")) == ()


def test_the_worst_comes_first_and_forty_faults_of_one_kind_are_gathered():
    many = [group(f"left-{number}", 1, 300.0, members=0) for number in range(40)]
    faults = faults_of(*many, group("hangs", 1, 300.0, members=1, still=99.0))

    kinds = gathered(faults)

    assert faults[0].weight is Severity.BAD
    counts = [(kind["kind"], kind["count"]) for kind in kinds]
    assert counts == [("stalled", 1), ("nobody consumes", 40)]
    assert kinds[1]["faults"] == list(faults[1:6])


def test_cards_are_ranked_by_severity_and_by_the_messages_that_they_concern():
    faults = faults_of(
        group("small", 3, 300.0, members=0),
        group("large", 900, 300.0, members=0, dead_letters=5, dead_last_hour=5),
        group("hangs", 2, 300.0, members=1, still=99.0),
        group("hangs too", 70, 300.0, members=1, still=99.0),
    )

    found = cards(faults)

    assert [each.subject for each in found] == ["hangs too", "hangs", "large", "small"]
    assert [each.weight for each in found] == [Severity.BAD] * 2 + [Severity.WARN] * 2
    # One card for a group, whatever is wrong with it, the worst of it first.
    assert [each.kind for each in found[2].faults] == ["nobody consumes", "dead letters"]


def test_advice_begins_with_repair_and_giving_up_comes_last():
    (fault,) = faults_of(group("g", 3, 300.0, members=0))

    assert 'Consumer("g")' in fault.remedy
    assert "skip" not in fault.remedy
    assert fault.command.startswith("orbitmq group show g")
    assert fault.otherwise.startswith("only if")
    assert fault.otherwise_command.startswith("orbitmq group skip g --dry-run")
    assert parsed(fault.otherwise_command)


def pipeline(name, state, **fields):
    return Pipeline(name, PipelineReport(state=state, **fields), 0.0)


def everything_wrong():
    """One fault of every check that is made of a cluster."""
    far = NameServerStatus(Address("10.0.0.7", 9876), ("a",))
    down = NameServerStatus(Address("10.0.0.8", 9876), problem="refused")
    refusing = BrokerNode("c", "b", 1, Address("10.0.0.9", 10911))
    raw = {"storeRefusal": "no space", "groups": "9", "maxAutoGroups": "10"}
    ill = BrokerStatus(refusing, True, runtime_info(raw, 0))
    topic = Topic("hidden", TopicKind.NORMAL, (TopicOnBroker("a", 4, 2, Permission.WRITE, False),))
    groups = (
        group("differs", findings=(Finding(FindingKind.DIFFERENT_SUBSCRIPTIONS, "differs", "so"),)),
        group("twins"),
        group("hangs", 12, 300.0, members=1, still=240.0),
        group("left", 1, 300.0, members=0),
        group("slow", 700, 300.0, members=2, came=50.0, went=20.0),
        group("dies", dead_letters=9, dead_last_hour=2, resent=Resent(9, 0, 2)),
        group("odd", is_uniform=False),
    )
    twin = Finding(FindingKind.DUPLICATE_CLIENT, "twins", "two are one", client_id="x@1")
    return Observation(
        snapshot=snapshot(
            *groups,
            cluster=ClusterStatus((up(commitLogDiskRatio="0.93"), ill), (far, down)),
            topics={"hidden": TopicSample(topic=topic)},
        ),
        now=10.0,
        findings={
            "twins": MemberFindings((twin,), endless="x@1"),
            "odd": MemberFindings(uneven=(Uneven("orders", (("x@1", 4), ("y@2", 0))),)),
        },
        skews={"a": "the clock of broker a is 1 h ahead of this machine's"},
        pipelines=(pipeline("enrich", PipelineState.FAILED, error="no space left"),),
    )


def test_every_check_of_a_cluster_finds_its_fault_with_words_and_a_command_that_works():
    faults = find_faults(everything_wrong())

    assert {fault.check for fault in faults} == set(Check) - {Check.JAVA, Check.WORKERS}
    for fault in faults:
        assert fault.text, fault
        assert fault.remedy, fault
        assert fault.command, fault
        if fault.command.startswith("orbitmq "):
            assert parsed(fault.command), fault


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_of_finding_in_a_group_is_a_fault_apart_from_its_remedy(kind):
    finding = Finding(kind, "billing", "this is so; do that")
    seen = snapshot(group("billing", findings=(finding,)))

    (fault,) = find_faults(
        Observation(snapshot=seen, now=0.0, findings={"billing": MemberFindings((finding,))})
    )

    assert (fault.text, fault.subject) == ("this is so", "billing")
    assert fault.remedy
    assert fault.command
    assert parsed(fault.command)


@pytest.mark.parametrize(
    ("broker", "kind", "command"),
    [
        (up(commitLogDiskRatio="0.93"), "disk nearly full", "broker.store.retention.keep=86400"),
        (
            BrokerStatus(NODE, False, None, "refused"),
            "broker down",
            "--name a --data FOLDER --port 10911",
        ),
        (
            up(nameConflicts="10.0.0.2:10911 is registered as a with id 0"),
            "name given twice",
            "--name NAME",
        ),
    ],
)
def test_a_broker_is_started_again_with_its_own_folder_and_port(broker, kind, command):
    (fault,) = faults_of_broker(broker)

    assert (fault.kind, fault.subject) == (kind, str(NODE))
    # Without a folder it would open the store of another broker.
    assert "--data FOLDER" in fault.command
    assert command in fault.command
    assert parsed(fault.command)


@pytest.mark.parametrize(
    ("name_server", "found"), [("10.0.0.7", ["a"]), ("127.0.0.1", []), ("localhost", [])]
)
def test_an_advertised_loopback_address_is_a_fault_when_the_name_server_is_elsewhere(
    name_server, found
):
    server = NameServerStatus(Address(name_server, 9876), ("a",))

    faults = faults_of(cluster=ClusterStatus(CLUSTER.brokers, (server,)))

    assert [each.subject for each in faults if each.check is Check.ADDRESSES] == found


async def examined(watch, *, seconds, only=()):
    async with asyncio.timeout(DEADLINE):
        clock = watch.cluster.clock
        return await examine(watch.engine, watch.admin, clock, watch=seconds, only=only)


@contextlib.asynccontextmanager
async def hanging(watch):
    """A group that received messages long ago and has finished none."""
    client = quick_settings(watch.cluster.name_server)
    impatient = RebalanceSettings(handover=0.2)
    has_begun = asyncio.Event()
    consumer = AsyncConsumer("hanging", client=client, consume_from="first", rebalance=impatient)

    @consumer.on("orders")
    async def hang(_):
        has_begun.set()
        await asyncio.Event().wait()

    # Subscribed to a topic that does not exist, too.
    @consumer.on("missing")
    async def ignore(_):
        """Never called."""

    async with consumer:
        for _ in range(2):
            await watch.world.send(QUEUE)
        async with asyncio.timeout(DEADLINE):
            await has_begun.wait()
        watch.cluster.advance(STALLED_AFTER + 30)
        yield


def stalled(found):
    return [fault for fault in find_faults(found.seen) if fault.kind == "stalled"]


async def test_a_group_whose_handlers_hang_is_found_although_it_has_finished_nothing(
    watch, monkeypatch
):
    monkeypatch.setattr(faults, "PATIENCE", 0.5)
    async with hanging(watch):
        found = await examined(watch, seconds=0.6)

    (fault,) = stalled(found)
    assert "none was finished for" in fault.text
    assert "2 messages wait" in fault.text
    assert fault.command == "orbitmq group member hanging --stack"
    assert found.watched == {"hanging"}
    assert found.seconds >= 0.6
