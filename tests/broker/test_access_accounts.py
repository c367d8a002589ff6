"""The file of accounts, and the patterns of hosts in it."""

from __future__ import annotations

import ipaddress
import logging
import os
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orbitmq.broker.access import (
    AccountsFile,
    AccountsUnreadable,
    Grant,
    Kind,
    PatternError,
    parse_accounts,
    parse_patterns,
    read_accounts,
)

FULL = """
globalWhiteRemoteAddresses = ["10.10.103.*", "192.168.0.{1,2}"]

[[accounts]]
accessKey = "RocketMQ"
secretKey = "12345678"
whiteRemoteAddress = "192.168.1.1-100"
admin = false
defaultTopicPerm = "DENY"
defaultGroupPerm = "SUB"
topicPerms = ["topicA=DENY", "topicB=PUB|SUB", "topicC=SUB", "topicD = SUB | PUB", "topicE=PUB"]
groupPerms = ["groupA=DENY", "groupB=PUB|SUB"]

[[accounts]]
accessKey = "rocketmq2"
secretKey = "87654321"
admin = true
"""

ACCOUNT = '[[accounts]]\naccessKey = "someone"\nsecretKey = "s3cr3t-word"\n'


# The file.


def test_a_file_with_the_words_of_plain_acl_is_understood():
    accounts = parse_accounts(FULL)

    plain, admin = accounts.by_key["RocketMQ"], accounts.by_key["rocketmq2"]
    assert "10.10.103.7" in accounts.white_hosts
    assert "192.168.0.2" in accounts.white_hosts
    assert "192.168.0.3" not in accounts.white_hosts
    assert "192.168.1.100" in plain.white_hosts
    assert "192.168.1.101" not in plain.white_hosts
    assert "192.168.1.100" not in admin.white_hosts
    assert (plain.secret_key, plain.is_admin, admin.is_admin) == ("12345678", False, True)


@pytest.mark.parametrize(
    ("kind", "name", "may_publish", "may_subscribe"),
    [
        (Kind.TOPIC, "topicA", False, False),
        (Kind.TOPIC, "topicB", True, True),
        (Kind.TOPIC, "topicC", False, True),
        (Kind.TOPIC, "topicD", True, True),
        (Kind.TOPIC, "topicE", True, False),
        (Kind.TOPIC, "other", False, False),
        (Kind.GROUP, "groupA", False, False),
        (Kind.GROUP, "groupB", True, True),
        (Kind.GROUP, "other", False, True),
        # A topic's permission is not that of a group of the same name.
        (Kind.GROUP, "topicE", False, True),
    ],
)
def test_what_is_listed_comes_before_the_default(kind, name, may_publish, may_subscribe):
    account = parse_accounts(FULL).by_key["RocketMQ"]

    assert account.may(kind, name, Grant.PUB) is may_publish
    assert account.may(kind, name, Grant.SUB) is may_subscribe


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "rmq_sys_wheel_timer",
    ],
)
def test_defaults_do_not_open_topics_that_hold_messages_of_others(topic):
    text = ACCOUNT + 'defaultTopicPerm = "PUB|SUB"\n'

    by_default = parse_accounts(text).by_key["someone"]
    by_name = parse_accounts(text + f'topicPerms = ["{topic}=SUB"]').by_key["someone"]

    assert by_default.may(Kind.TOPIC, "anything", Grant.SUB)
    assert not by_default.may(Kind.TOPIC, topic, Grant.SUB)
    assert by_name.may(Kind.TOPIC, topic, Grant.SUB)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("accounts = 5", "accounts"),
        ("[[accounts]]\naccessKey = 'someone'", "secretKey"),
        ("[[accounts]]\nsecretKey = 's3cr3t-word'", "accessKey"),
        ("[[accounts]]\naccessKey = 'six666'\nsecretKey = 's3cr3t-word'", "accessKey"),
        ("[[accounts]]\naccessKey = 'someone'\nsecretKey = 's3cr3t'", "someone"),
        (ACCOUNT + ACCOUNT, "someone"),
        (ACCOUNT + "adnim = true", "adnim"),
        (ACCOUNT + "admin = 'yes'", "admin"),
        (ACCOUNT + "defaultTopicPerm = 'ALL'", "defaultTopicPerm"),
        (ACCOUNT + "topicPerms = ['orders']", "topicPerms"),
        (ACCOUNT + "topicPerms = ['=SUB']", "topicPerms"),
        (ACCOUNT + "groupPerms = ['billing=SBU']", "SBU"),
        (ACCOUNT + "whiteRemoteAddress = '300.1.1.1'", "300.1.1.1"),
        ("globalWhiteRemoteAddresses = ['nonsense']", "nonsense"),
        (ACCOUNT + "not TOML", "TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_a_text_that_names_the_mistake_and_no_secret(
    tmp_path, text, named
):
    file = tmp_path / "accounts.toml"
    file.write_text(text)

    with pytest.raises(AccountsUnreadable) as caught:
        read_accounts(file)

    assert named in str(caught.value)
    assert str(file) in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_secret_is_not_part_of_what_an_account_shows():
    assert "s3cr3t" not in repr(parse_accounts(ACCOUNT))


# Changes of the file.


def rewritten(path: Path, text: str) -> None:
    """Replace a file so that the change can be seen, however coarse the disk's times are."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path):
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNT)
    file = AccountsFile(path)
    before = file.accounts

    was_read_unchanged = file.refresh()
    same = file.accounts is before
    rewritten(path, FULL)

    assert (was_read_unchanged, same) == (False, True)
    assert file.refresh()
    assert set(file.accounts.by_key) == {"RocketMQ", "rocketmq2"}


def test_a_broken_or_missing_file_keeps_the_accounts_and_is_logged_once(tmp_path, caplog):
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNT)
    file = AccountsFile(path)

    with caplog.at_level(logging.ERROR):
        rewritten(path, ACCOUNT + "broken")
        broken = [file.refresh() for _ in range(3)]
        path.unlink()
        missing = [file.refresh() for _ in range(3)]

    assert broken == missing == [False] * 3
    assert set(file.accounts.by_key) == {"someone"}
    assert len(caplog.records) == 2
    assert "stay in force" in caplog.text
    assert "s3cr3t" not in caplog.text


# Hosts.


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["1.2.3.4", "::1"], ["not an address", ""]),
        ("*.*.*.*", ["1.2.3.4"], ["::1"]),
        ("192.168.0.1", ["192.168.0.1", "::ffff:192.168.0.1"], ["192.168.0.10", "192.168.0.2"]),
        ("192.168.*.*", ["192.168.0.1", "192.168.255.255"], ["192.169.0.1", "19.168.0.1"]),
        ("192.168.1-20.*", ["192.168.1.9", "192.168.20.9"], ["192.168.0.9", "192.168.21.9"]),
        ("192.168.0.{7,9}", ["192.168.0.7", "192.168.0.9"], ["192.168.0.8", "192.168.0.79"]),
        ("10.0.0.1, 10.0.0.{3,4},10.1.*.*", ["10.0.0.1", "10.0.0.4", "10.1.2.3"], ["10.0.0.2"]),
        ("::1", ["::1", "0:0:0:0:0:0:0:1"], ["::2", "0.0.0.1"]),
        ("2001:db8::1-ff", ["2001:db8::1", "2001:db8::ff"], ["2001:db8::100", "2001:db8:1::1"]),
        ("2001:db8:1:2:3:4:1-200:*", ["2001:db8:1:2:3:4:200:9"], ["2001:db8:1:2:3:4:201:9"]),
        ("fe80::*", ["fe80::7", "fe80::7%eth0"], ["fe80::1:7"]),
        ("", [], ["127.0.0.1", "::1", ""]),
    ],
)
def test_a_pattern_means_these_hosts_and_no_others(pattern, inside, outside):
    hosts = parse_patterns(pattern)

    assert [host for host in inside if host not in hosts] == []
    assert [host for host in outside if host in hosts] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "localhost",
        "1.2.3",
        "1.2.3.4.5",
        "1.2.3.256",
        "1.2.3.-1",
        "1.2.3.9-3",
        "1.2.3.+4",
        "1.2.3.1_0",
        "1.2.3.٣",
        "1.2.{3,4}.5",
        "1.2.3.{}",
        "1.2.3.{1,}",
        "1:2:3",
        "::1::2",
        "1:2:3:4:5:6:7::8",
        "::10000",
        "::g",
    ],
)
def test_a_pattern_that_means_nothing_is_refused(pattern):
    with pytest.raises(PatternError, match=r"192\.168\.0\.1"):
        parse_patterns(pattern)


@given(st.ip_addresses())
def test_an_address_is_a_pattern_of_itself_alone(address):
    # Sockets show those as IPv4, and so does a white list.
    assume(isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is None)
    neighbour = type(address)(int(address) ^ 1)

    hosts = parse_patterns(str(address))

    assert str(address) in hosts
    assert str(neighbour) not in hosts


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text):
    try:
        hosts = parse_patterns(text)
    except PatternError:
        return

    assert "not an address" not in hosts
