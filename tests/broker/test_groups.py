"""Consumer groups: who makes them, what they are forbidden, what is saved."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from orbitmq.broker.configfile import ConfigFile
from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import MADE_PER_SECOND, PREDEFINED_GROUPS, GroupTable
from orbitmq.broker.topics import PageRequest, version_text
from orbitmq.wire.bodies import SubscriptionGroupConfig, SubscriptionGroupTable
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
