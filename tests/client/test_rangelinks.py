"""The connections of a process to a cluster: whether anybody is there."""

from __future__ import annotations

import pytest

from orbitmq.client.errors import NoNameServer
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangelinks import RangeLinks
from orbitmq.testing import EmbeddedCluster


def test_a_name_server_that_has_answered_once_may_go_away() -> None:
    with EmbeddedCluster() as cluster:
        address = cluster.name_server
        access = RangeAccess(name_servers=(address,))
        early = RangeLinks(access)
        early.reach("a topic that nobody has")
        early.close()
    late = RangeLinks(access)

    early.reach()
    with pytest.raises(NoNameServer, match=address):
        late.reach()
