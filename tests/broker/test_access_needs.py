"""Which permissions requests need, and that exactly those let them pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.access import NEEDS, Access, Grant, Kind, Need
from orbitmq.broker.groups import Peer
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, Refused
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import sign
from tests.support.access import LOG, LOOKING, PUB_T, REQUESTS, SUB_G, SUB_H, SUB_T, SUB_U, account

DENIED = int(ResponseCode.NO_PERMISSION)
TAKER = account("taker-key", "taker-s3cr3t")


@pytest.mark.parametrize(
    ("asked", "needs"), REQUESTS + LOOKING, ids=lambda value: getattr(value, "code", "")
)
def test_every_request_needs_exactly_these_permissions(asked, needs):
    assert set(NEEDS[asked.code](asked, LOG.get)) == needs


ALL_NEEDS = [PUB_T, SUB_T, SUB_U, SUB_G, SUB_H]


@given(
    case=st.sampled_from([case for case in REQUESTS if case[0].code not in (36, 37)]),
    granted=st.sets(st.sampled_from(ALL_NEEDS)),
)
def test_a_signed_request_passes_if_and_only_if_all_its_needs_are_granted(
    tmp_path_factory, case, granted
):
    asked, needs = case
    access = access_with(tmp_path_factory.mktemp("accounts"), granted)
    connection = cast(Connection, OneEnd())

    def passes(command):
        try:
            access.check(connection, command)
        except Refused as refused:
            return refused.code != DENIED
        return True

    assert passes(sign(asked, TAKER)) is (needs <= granted)
    assert not passes(asked)


class OneEnd:
    """As much of a connection as access needs."""

    def __init__(self) -> None:
        self.remote = Address("10.0.0.1", 4711)
        self.context = Peer(str(self.remote), b"")
        self.is_open = True


def access_with(folder: Path, granted: set[Need]) -> Access:
    def listed(kind: Kind) -> list[str]:
        grants: dict[str, Grant] = {}
        for need in granted:
            if need.kind is kind:
                grants[need.name] = grants.get(need.name, Grant.DENY) | need.grant
        return [f"{name}={grant.words}" for name, grant in grants.items()]

    file = folder / "accounts.toml"
    file.write_text(
        f'[[accounts]]\naccessKey = "{TAKER.access_key}"\nsecretKey = "{TAKER.secret_key}"\n'
        f"topicPerms = {listed(Kind.TOPIC)}\ngroupPerms = {listed(Kind.GROUP)}\n"
    )
    store: Any = None  # none of the requests looks into the log
    return Access(file, store)
