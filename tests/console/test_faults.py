"""What is wrong, in words."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus, NameServerStatus, runtime_info
from orbitmq.client.admin.groups import GroupSettings
from orbitmq.client.admin.members import Finding, FindingKind
from orbitmq.client.admin.requests import BrokerNode, Unreachable
from orbitmq.client.admin.topics import Permission, Topic, TopicKind, TopicOnBroker
from orbitmq.console.checks import Check, Fault, Observation, Severity, find_faults, gathered
from orbitmq.console.collect import (
    GroupSample,
    MemberFindings,
    Snapshot,
    TopicPart,
    TopicSample,
    Uneven,
)
from orbitmq.console.pipelines import Pipeline, PipelineReport, PipelineState
from orbitmq.console.resends import Resent
from orbitmq.remoting.settings import Address
from tests.support.orbitmqcli import parsed

NODE = BrokerNode("c", "a", 0, Address("127.0.0.1", 10911))
CLUSTER = ClusterStatus((BrokerStatus(NODE, True, runtime_info({}, 0)),), ())


def group(name: str, lag: int = 0, age: float = 0.0, **fields: object) -> GroupSample:
    rates = (fields.pop("came", 0.0), fields.pop("went", 0.0))
    part = TopicPart("orders", lag, 4, *rates, age)  # type: ignore[arg-type]
    base = {"name": name, "settings": GroupSettings(name), "brokers": ("a",), "parts": (part,)}
    return GroupSample(**base | fields)  # type: ignore[arg-type]


def snapshot(*groups: GroupSample, **fields: object) -> Snapshot:
    base = {
        "at": 0.0,
        "cluster": CLUSTER,
        "topics": {},
        "groups": {each.name: each for each in groups},
    }
    return Snapshot(**base | fields)  # type: ignore[arg-type]


def faults_of(*groups: GroupSample, **fields: object) -> tuple[Fault, ...]:
    return find_faults(Observation(snapshot=snapshot(*groups, **fields), now=0.0))


def test_a_group_that_is_well_is_no_fault():
    well = (
        group("done"),
        group("keeping", 5, 1.0, members=2, came=10.0, went=10.0),
        group("draining", 5000, 900.0, members=2, came=10.0, went=100.0),
        group("just-behind", 5, 30.0, members=1, came=20.0, went=10.0),
        group("idle-without-members", members=0),
    )

    assert faults_of(*well) == ()


def test_each_trouble_has_its_kind_its_words_and_a_command():
    sick = (
        group("hangs", 12, 300.0, members=1, still=240.0),
        group("left", 1, 300.0, members=0),
        group("slow", 700, 300.0, members=2, came=50.0, went=20.0),
        group("off", 3, 10.0, settings=GroupSettings("off", is_enabled=False)),
        group("dies", dead_letters=9, dead_last_hour=2, resent=Resent(9, 0, 2)),
        group("odd", is_uniform=False),
    )

    faults = {fault.subject: fault for fault in faults_of(*sick)}

    assert {name: fault.kind for name, fault in faults.items()} == {
        "hangs": "stalled",
        "left": "nobody consumes",
        "slow": "falling behind",
        "off": "paused",
        "dies": "dead letters",
        "odd": "settings differ",
    }
    assert "12 messages wait, the oldest for 5 min, and none was finished for 4 min" in (
        faults["hangs"].text
    )
    assert faults["left"].text.startswith("1 message waits")
    assert "50 come in each second and 20 are finished" in faults["slow"].text
    assert faults["off"].command == "orbitmq group resume off"
    assert faults["dies"].link == "/dead-letters/dies"
    assert all(fault.command for fault in faults.values())


def test_dead_letters_that_were_sent_again_are_told_apart_and_are_no_fault():
    def text(*counts, dead=9):
        found = group("dies", dead_letters=dead, dead_last_hour=2, resent=Resent(*counts))
        return "".join(fault.text for fault in faults_of(found))

    assert text(9, 0, 2) == (
        "2 messages died in the last hour and were not resent; 9 dead letters are open"
    )
    assert text(9, 5, 1, 1) == (
        "1 message died in the last hour and was not resent; 4 dead letters are open, 5 were resent"
    )
    assert text(9, 7, 0, 2) == ""


def test_dead_letters_that_nobody_has_looked_up_are_a_fault_and_make_counts_a_lower_bound():
    def sample(*counts):
        return group("dies", dead_letters=5000, dead_last_hour=2, resent=Resent(*counts))

    (fault,) = faults_of(sample(100, 1, 1))
    (blind,) = faults_of(sample())
    (half,) = faults_of(sample(100, 100, 0, 1))

    # Those of the last hour are all sent again, whatever is not known of older ones.
    assert faults_of(sample(100, 100, 0, 2)) == ()
    assert blind.text == (
        "2 messages died in the last hour, and it is not known whether they were resent"
    )
    assert half.text == (
        "1 message died in the last hour, and it is not known whether it was resent"
    )
    assert fault.text.startswith("at least 1 message died in the last hour and was not resent")
    assert (sample(100, 1, 1).unknown_letters, sample(5000, 1, 1).unknown_letters) == (4900, 0)
    assert fault.text.endswith("at least 99 dead letters are open, at least 1 was resent")


@pytest.mark.parametrize(
    ("topics", "groups", "found"),
    [
        ("7", "7", []),
        ("8", "7", [("little room for topics", Severity.WARN)]),
        ("7", "10", [("no room for groups", Severity.BAD)]),
        (
            "11",
            "9",
            [("no room for topics", Severity.BAD), ("little room for groups", Severity.WARN)],
        ),
    ],
)
def test_a_broker_that_makes_no_more_topics_or_groups_is_found_in_time(topics, groups, found):
    raw = {"topics": topics, "groups": groups, "maxAutoTopics": "10", "maxAutoGroups": "10"}
    broker = BrokerStatus(NODE, True, runtime_info(raw, 0))

    faults = faults_of(cluster=ClusterStatus((broker,), ()))

    assert [(fault.kind, fault.weight) for fault in faults] == found
    for fault in faults:
        assert fault.check is Check.ROOM
        assert fault.command is not None
        assert "broker.max_auto_" in fault.command
        parsed(fault.command)


def test_a_broker_without_such_bounds_has_room():
    broker = BrokerStatus(NODE, True, runtime_info({"topics": "99", "groups": "99"}, 0))

    assert faults_of(cluster=ClusterStatus((broker,), ())) == ()


def test_the_worst_comes_first_and_forty_of_one_kind_are_one_line():
    many = [group(f"left-{number}", 1, 300.0, members=0) for number in range(40)]
    faults = faults_of(*many, group("hangs", 1, 300.0, members=1, still=99.0))

    kinds = gathered(faults)

    assert faults[0].weight is Severity.BAD
    assert [(kind["kind"], kind["count"]) for kind in kinds] == [
        ("stalled", 1),
        ("nobody consumes", 40),
    ]
    shown = kinds[1]["faults"]
    assert isinstance(shown, list)
    assert len(shown) == 5


def test_a_broker_whose_part_is_missing_is_named():
    (fault,) = faults_of(unreachable=(Unreachable("broker-b", "refused"),))

    assert (fault.subject, fault.weight) == ("broker-b", Severity.BAD)
    assert "refused" in fault.text


def pipeline(name: str, state: PipelineState, **fields: object) -> Pipeline:
    return Pipeline(name, PipelineReport(state=state, **fields), 0.0)  # type: ignore[arg-type]


_PIPELINE_RULES = {"storeRefusal": "no space", "groups": "9", "maxAutoGroups": "10"}


def everything_wrong() -> Observation:
    """One fault of every check that is made of a cluster."""
    far = NameServerStatus(Address("10.0.0.7", 9876), ("a",))
    down = NameServerStatus(Address("10.0.0.8", 9876), problem="refused")
    full = BrokerStatus(NODE, True, runtime_info({"commitLogDiskRatio": "0.93"}, 0))
    refusing = BrokerNode("c", "b", 1, Address("10.0.0.9", 10911))
    ill = BrokerStatus(refusing, True, runtime_info(_PIPELINE_RULES, 0))
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
            cluster=ClusterStatus((full, ill), (far, down)),
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
def test_every_kind_of_finding_inside_a_group_is_a_fault_apart_from_its_remedy(kind):
    finding = Finding(kind, "billing", "this is so; do that")

    (fault,) = find_faults(
        Observation(snapshot=snapshot(group("billing", findings=(finding,))), now=0.0,
             findings={"billing": MemberFindings((finding,))})
    )  # fmt: skip

    assert (fault.text, fault.subject) == ("this is so", "billing")
    assert fault.remedy
    assert fault.command
    assert parsed(fault.command)


def test_what_a_broker_says_of_a_group_stands_in_until_the_group_was_looked_into():
    text = "members of group 'billing' subscribe differently to topic 'orders'"
    broker = BrokerStatus(NODE, True, runtime_info({"groupFinding_0": text}, 0))
    cluster = ClusterStatus((broker,), ())
    found = Finding(FindingKind.DIFFERENT_SUBSCRIPTIONS, "billing", text)

    (before,) = faults_of(group("billing"), cluster=cluster)
    (after,) = faults_of(group("billing", findings=(found,)), cluster=cluster)

    assert (before.kind, before.link) == ("members disagree", "/groups/billing")
    assert after.kind == "different subscriptions"


def test_a_pipeline_whose_messages_come_back_is_ill_with_its_error():
    some = (
        pipeline("a/b", PipelineState.FAILING, error="KeyError: 'id'", failed_share=0.96,
                 retried=40, dead=8, group="billing"),
        pipeline("young", PipelineState.FAILING, error="KeyError: 'id'", failed_share=1.0),
        pipeline("well", PipelineState.RUNNING, error="KeyError: 'id'", failed_share=0.1),
    )  # fmt: skip

    faults = find_faults(Observation(snapshot=snapshot(), now=10.0, pipelines=some))

    ill = {fault.subject: fault for fault in faults}
    assert ill.keys() == {"a/b", "young"}
    assert ill["a/b"].text == (
        "96 % of what it handled lately failed (40 retried, 8 dead since it was started): "
        "KeyError: 'id'"
    )
    assert ill["a/b"].link == "/pipelines/a%2Fb"
    assert ill["a/b"].command == "orbitmq dlq summary billing"
    assert ill["young"].command == "orbitmq pipeline status young --console URL"
    assert all(fault.weight is Severity.BAD for fault in faults)


def test_a_group_is_stalled_only_when_its_oldest_message_has_waited():
    def is_stalled(age, still, patience):
        sample = group("g", 5, age, members=1, still=still, patience=patience)
        return any(fault.kind == "stalled" for fault in faults_of(sample))

    # A console has looked for a minute; who looks once has to be content with less.
    assert is_stalled(90.0, 61.0, 60.0)
    assert not is_stalled(90.0, 5.0, 60.0)
    assert is_stalled(90.0, 1.5, 1.0)
    assert not is_stalled(3.0, 1.5, 1.0)
    assert not is_stalled(90.0, 0.5, 1.0)


def test_a_broker_is_started_again_with_the_folder_and_the_port_that_it_has():
    full = BrokerStatus(NODE, True, runtime_info({"commitLogDiskRatio": "0.93"}, 0))
    down = BrokerStatus(NODE, False, None, "refused")

    (disk,) = faults_of(cluster=ClusterStatus((full,), ()))
    (gone,) = faults_of(cluster=ClusterStatus((down,), ()))

    for fault in (disk, gone):
        assert fault.command is not None
        # Without them it would open the store of another.
        assert "--name a --data FOLDER --port 10911" in fault.command
    assert disk.command is not None
    assert "broker.store.retention.keep=86400" in disk.command


def test_a_name_that_two_brokers_have_is_one_fault_with_a_command_that_works():
    text = "10.0.0.2:10911 is registered as a with id 0, as this broker 127.0.0.1:10911 is"
    broker = BrokerStatus(NODE, True, runtime_info({"nameConflicts": text}, 0))

    (fault,) = faults_of(cluster=ClusterStatus((broker,), ()))

    assert (fault.check, fault.kind, fault.subject) == (
        Check.BROKERS,
        "name given twice",
        str(NODE),
    )
    assert text in fault.text
    assert fault.command is not None
    assert "--name NAME" in fault.command
    parsed(fault.command)


def test_what_a_broker_says_of_groups_that_were_not_asked_about_is_left_out():
    texts = [f"members of group {name!r} subscribe differently" for name in ("billing", "mailer")]
    raw = {f"groupFinding_{place}": text for place, text in enumerate(texts)}
    cluster = ClusterStatus((BrokerStatus(NODE, True, runtime_info(raw, 0)),), ())
    seen = snapshot(group("billing"), cluster=cluster)

    everything = find_faults(Observation(snapshot=seen, now=0.0))
    chosen = find_faults(Observation(snapshot=seen, now=0.0, only=frozenset({"billing"})))

    assert len(everything) == 2
    assert [fault.subject for fault in chosen] == ["billing"]


def test_an_advertised_loopback_is_found_when_the_name_server_is_elsewhere():
    def found(name_server):
        server = NameServerStatus(Address(name_server, 9876), ("a",))
        faults = faults_of(cluster=ClusterStatus(CLUSTER.brokers, (server,)))
        return [each.subject for each in faults if each.check is Check.ADDRESSES]

    assert found("10.0.0.7") == ["a"]
    assert found("127.0.0.1") == []
    assert found("localhost") == []
