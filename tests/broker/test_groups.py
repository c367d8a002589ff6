"""Consumer groups: who makes them, what they are forbidden, what is saved."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from orbitmq.broker.config import ConfigFile
from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import (
    MADE_PER_SECOND,
    PREDEFINED_GROUPS,
    Client,
    ConsumerTable,
    DifferentSubscriptions,
    Disagreements,
    DuplicateClient,
    FindingEvent,
    GroupTable,
    Variant,
)
from orbitmq.broker.topics import PageRequest, version_text
from orbitmq.wire.bodies import (
    ConsumerData,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from orbitmq.wire.codes import ResponseCode

NOW = 1_700_000_000.0


def table(*, auto_create: bool = True) -> GroupTable:
    return GroupTable(auto_create=auto_create, now=NOW)


def test_a_broker_has_apaches_groups_from_the_start():
    assert {group.group_name for group in table()} == {
        "TOOLS_CONSUMER",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_RMQ_SYS_TRANS",
    }


def test_a_group_that_is_looked_for_is_made_with_apaches_defaults():
    groups = table()

    made = groups.find("g", now=NOW + 1)

    assert made is not None
    assert (made.retry_queue_nums, made.retry_max_times) == (1, 16)
    assert (made.consume_enable, made.consume_broadcast_enable) == (True, True)
    assert (made.broker_id, made.which_broker_when_consume_slowly) == (0, 1)
    assert made.notify_consumer_ids_changed_enable
    assert groups.data_version.counter == 1
    assert groups.find("g", now=NOW + 2) == made
    assert groups.data_version.counter == 1


def test_looking_whether_a_group_exists_does_not_make_it():
    groups = table()

    assert "g" not in groups
    assert groups.get("g") is None
    assert "g" not in groups


@pytest.mark.parametrize("name", ["", "  ", "a b", "g" * 121, "ä"])
def test_a_bad_name_makes_no_group(name):
    groups = table()

    assert groups.find(name, now=NOW) is None
    with pytest.raises(Refused) as refusal:
        groups.update(SubscriptionGroupConfig(group_name=name), now=NOW)
    assert refusal.value.code == ResponseCode.INVALID_PARAMETER
    assert len(groups) == len(PREDEFINED_GROUPS)


def test_without_auto_creation_only_groups_of_the_system_are_made():
    groups = table(auto_create=False)

    assert groups.find("g", now=NOW) is None
    assert groups.find("CID_RMQ_SYS_x", now=NOW) is not None


def test_from_a_number_of_groups_on_only_administration_makes_more(caplog):
    groups = GroupTable(max_auto=len(PREDEFINED_GROUPS) + 2, now=NOW)
    assert groups.find("a", now=NOW) is not None
    assert groups.find("b", now=NOW) is not None

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        refused = [groups.find(f"g{number}", now=NOW + number) for number in range(500)]

    assert refused == [None] * 500
    assert len(caplog.records) == 1
    assert groups.find("a", now=NOW) is not None
    groups.update(SubscriptionGroupConfig(group_name="c"), now=NOW)
    assert groups.find("c", now=NOW) is not None
    groups.delete("a", now=NOW)
    groups.delete("b", now=NOW)
    assert groups.find("g0", now=NOW) is not None


@pytest.mark.parametrize(
    ("groups", "name", "words"),
    [
        (
            GroupTable(max_auto=len(PREDEFINED_GROUPS), now=NOW),
            "billing",
            r"\[billing\].*max_auto_groups is 8.*orbitmq group create billing",
        ),
        (
            GroupTable(auto_create=False, now=NOW),
            "billing",
            r"auto_create_group is off.*orbitmq group create billing",
        ),
        (GroupTable(now=NOW), "no group", r"illegal characters.*choose another name"),
    ],
)
def test_who_needs_a_group_that_is_not_made_is_told_why_and_what_to_do(groups, name, words):
    with pytest.raises(Refused, match=words) as refused:
        groups.require(name, now=NOW)

    assert refused.value.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert name not in groups


@pytest.mark.parametrize(
    "name",
    ["x\n2026-01-31 12:00:00.000 ERROR   all is lost", "x\r\x1b[2J\x9b", "x" * 100_000, "\n" * 2],
)
def test_a_name_that_is_refused_cannot_forge_a_line(name):
    text = str(GroupTable(now=NOW).missing(name))

    assert text.isprintable()
    assert len(text) < 2000


def test_a_group_that_is_only_made_a_second_later_is_a_matter_of_coming_again():
    groups = GroupTable(now=NOW)
    for number in range(MADE_PER_SECOND):
        groups.require(f"g{number}", now=NOW)

    with pytest.raises(Refused, match="come again") as refused:
        groups.require("billing", now=NOW)

    assert refused.value.code == ResponseCode.SYSTEM_BUSY
    assert groups.missing("billing") is None
    assert groups.require("billing", now=NOW + 1).group_name == "billing"


def test_groups_that_come_too_many_at_once_are_made_later():
    groups = table()
    named = [f"g{number}" for number in range(MADE_PER_SECOND + 5)]

    at_once = [name for name in named if groups.find(name, now=NOW) is not None]
    later = [name for name in named if groups.find(name, now=NOW + 1) is not None]

    assert len(at_once) == MADE_PER_SECOND
    assert later == named


def test_a_group_is_changed_and_deleted():
    groups = table()
    stopped = SubscriptionGroupConfig(group_name="g", consume_enable=False)

    groups.update(stopped, now=NOW)
    groups.update(stopped, now=NOW)
    assert groups.data_version.counter == 1
    assert groups.delete("g", now=NOW) == stopped
    assert groups.delete("g", now=NOW) is None
    assert groups.data_version.counter == 2


def test_groups_know_no_attributes_yet():
    with pytest.raises(Refused, match="known are none"):
        table().update(SubscriptionGroupConfig(group_name="g", attributes={"+a": "1"}), now=NOW)


def test_a_group_can_be_forbidden_one_topic():
    groups = table()

    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    groups.forbid("g", "U", is_forbidden=True, now=NOW)
    groups.forbid("g", "T", is_forbidden=False, now=NOW)

    assert not groups.is_forbidden("g", "T")
    assert groups.is_forbidden("g", "U")
    assert not groups.is_forbidden("h", "U")
    assert not groups.is_forbidden("g", "U", bit=1)
    assert groups.file().forbidden_table == {"g": {"U": 4}}
    assert groups.data_version.counter == 3


def test_forbidding_twice_is_no_change():
    groups = table()
    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    revision = groups.revision

    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    groups.forbid("g", "U", is_forbidden=False, now=NOW)

    assert groups.revision == revision


def test_a_deleted_group_is_forbidden_nothing():
    groups = table()
    groups.find("g", now=NOW)
    groups.forbid("g", "T", is_forbidden=True, now=NOW)

    groups.delete("g", now=NOW)

    assert not groups.is_forbidden("g", "T")


def test_the_file_brings_everything_back(tmp_path):
    groups = table()
    groups.find("g", now=NOW)
    groups.update(SubscriptionGroupConfig(group_name="h", retry_max_times=3), now=NOW)
    groups.forbid("g", "T", is_forbidden=True, now=NOW)
    file = ConfigFile(tmp_path / "subscriptionGroup.json", SubscriptionGroupTable)
    file.save(groups.file())

    loaded = file.load().value
    assert loaded is not None
    again = table()
    again.load(loaded)

    assert list(again) == list(groups)
    assert again.is_forbidden("g", "T")
    assert again.data_version == groups.data_version
    document = json.loads((tmp_path / "subscriptionGroup.json").read_text())
    assert set(document) == {"dataVersion", "forbiddenTable", "subscriptionGroupTable"}
    assert document["subscriptionGroupTable"]["h"]["groupRetryPolicy"] == {"type": "CUSTOMIZED"}


def test_the_file_of_an_old_broker_lacks_much():
    old = '{"subscriptionGroupTable":{"g":{"consumeEnable":false,"groupName":"g"}}}'
    groups = table()

    groups.load(msgspec.json.decode(old, type=SubscriptionGroupTable))

    found = groups.get("g")
    assert found is not None
    assert not found.consume_enable
    assert found.retry_max_times == 16


def test_a_slave_becomes_a_copy_of_its_master():
    master, slave = table(), table()
    master.find("g", now=NOW + 1)
    slave.find("old", now=NOW + 2)

    slave.replace(master.file())

    assert list(slave) == list(master)
    assert slave.data_version == master.data_version


def test_pages_carry_what_their_groups_are_forbidden():
    groups = table()
    for name in ("zz1", "zz2"):
        groups.find(name, now=NOW)
        groups.forbid(name, "T", is_forbidden=True, now=NOW)
    quoted = version_text(groups.data_version)

    last = groups.page(PageRequest(9, quoted, 5))

    assert last.total == 10
    assert set(last.table.subscription_group_table) == {"zz2"}
    assert last.table.forbidden_table == {"zz2": {"T": 4}}
    assert len(groups.page(PageRequest()).table.subscription_group_table) == 10


class Group:
    """A group whose members say things."""

    def __init__(self) -> None:
        self.consumers = ConsumerTable()
        self.disagreements = Disagreements(self.consumers)
        self.now = 0.0

    def beat(
        self, client: str, *said: tuple[str, str] | tuple[str, str, str], channel: str | None = None
    ) -> None:
        self.now += 1.0
        channel = channel or client
        self.consumers.heartbeat(
            channel,
            Client(client, address=channel),
            ConsumerData(
                group_name="g",
                subscription_data_set=tuple(
                    SubscriptionData(
                        topic=entry[0],
                        sub_string=entry[1],
                        expression_type=entry[2] if len(entry) > 2 else "TAG",
                        # Versions differ even among members that agree.
                        sub_version=int(self.now),
                    )
                    for entry in said
                ),
            ),
            now=self.now,
        )

    def check(self) -> tuple[FindingEvent, ...]:
        return self.disagreements.check(self.now)


@pytest.fixture
def group():
    return Group()


def test_members_that_agree_are_not_mentioned(group):
    group.beat("one", ("T", "A || B"), ("U", "*"), ("S", "a > 1", "SQL92"))
    group.beat("two", ("U", ""), ("T", "B||A||A"), ("S", " a > 1", "SQL92"))

    assert group.check() == ()
    assert group.disagreements.open_findings() == ()


def test_different_tags_are_reported_with_both_members(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))

    finding = DifferentSubscriptions(
        "g", "T", (Variant("A", "TAG", ("one",)), Variant("B", "TAG", ("two",)))
    )
    assert group.check() == (FindingEvent(finding, group.now, is_resolved=False),)
    assert group.disagreements.open_findings("g") == (finding,)
    assert str(finding) == (
        "members of group 'g' subscribe differently to topic 'T': one with TAG 'A', "
        "two with TAG 'B'; messages will be missed until they agree"
    )


def test_a_topic_that_not_everybody_wants_is_reported(group):
    group.beat("one", ("T", "*"), ("U", "*"))
    group.beat("two", ("T", "*"))
    group.beat("three", ("T", "*"))

    (event,) = group.check()

    assert event.finding == DifferentSubscriptions(
        "g", "U", (Variant("*", "TAG", ("one",)), Variant(None, None, ("three", "two")))
    )
    assert "three and 1 more without it" in str(event.finding)


def test_another_language_is_another_subscription(group):
    group.beat("one", ("T", "a"))
    group.beat("two", ("T", "a", "SQL92"))

    assert len(group.check()) == 1


def test_a_finding_is_reported_once_and_its_end_once(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    (began,) = group.check()
    for _ in range(5):
        group.beat("one", ("T", "A"))
        group.beat("two", ("T", "B"))
        assert group.check() == ()

    group.beat("two", ("T", "A"))
    (ended,) = group.check()

    assert ended == FindingEvent(began.finding, began.first_seen, is_resolved=True)
    assert group.check() == ()
    assert group.disagreements.open_findings() == ()


def test_a_finding_goes_on_while_its_members_change(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    (began,) = group.check()

    group.beat("three", ("T", "B"))

    assert group.check() == ()
    (finding,) = group.disagreements.open_findings("g")
    assert isinstance(finding, DifferentSubscriptions)
    assert finding.variants[1].clients == ("three", "two")
    group.consumers.close("one")
    (ended,) = group.check()
    assert ended.is_resolved
    assert ended.first_seen == began.first_seen


def test_a_group_that_is_gone_has_no_findings(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    group.check()

    group.consumers.close("one")
    group.consumers.close("two")

    assert [event.is_resolved for event in group.check()] == [True]


def test_a_member_that_has_not_said_yet_what_it_wants_is_not_blamed(group):
    group.beat("one", ("T", "A"))
    group.consumers.heartbeat(
        "two",
        Client("two"),
        ConsumerData(group_name="g"),
        now=5.0,
        fingerprint=1,
        without_subscriptions=True,
    )

    assert group.check() == ()


def test_a_bad_expression_is_compared_by_its_text(group):
    group.beat("one", ("T", "||"))
    group.beat("two", ("T", "||"))
    assert group.check() == ()

    group.beat("two", ("T", "A"))
    assert len(group.check()) == 1


def test_one_id_on_two_live_connections_is_reported(group):
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    group.beat("same", ("T", "*"), channel="10.0.0.2:2")
    assert group.check() == ()
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    assert group.check() == ()
    group.beat("same", ("T", "*"), channel="10.0.0.2:2")

    (event,) = group.check()

    assert event.finding == DuplicateClient("g", "same", ("10.0.0.1:1", "10.0.0.2:2"))
    assert "'same' (10.0.0.1:1, 10.0.0.2:2)" in str(event.finding)
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    assert group.check() == ()

    group.consumers.close("10.0.0.2:2")
    assert [entry.is_resolved for entry in group.check()] == [True]


def test_a_client_that_reconnects_is_no_duplicate(group):
    group.beat("one", ("T", "*"), channel="old connection")
    group.beat("one", ("T", "*"), channel="old connection")

    for _ in range(4):
        group.beat("one", ("T", "*"), channel="new connection")
        assert group.check() == ()
    group.consumers.close("old connection")
    assert group.check() == ()


def test_groups_in_which_nothing_happened_are_not_looked_at(group, monkeypatch):
    group.beat("one", ("T", "*"))
    group.check()
    looked_at: list[str] = []

    def note(name):
        looked_at.append(name)
        return ()

    monkeypatch.setattr(group.consumers, "members", note)

    group.check()

    assert looked_at == []
