"""Apache RocketMQ of each version, or a skip that says why it cannot be had.

``ORBITMQ_INTEROP_VERSIONS=4.9.8,5.3.3 make interop`` asks for other versions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.interop.apache import VERSIONS, Broker, NameServer, Release
from tests.interop.beside import Beside
from tests.interop.session import Session
from tests.support.maven import Unavailable

if TYPE_CHECKING:
    pass


ASKED_FOR = os.environ.get("ORBITMQ_INTEROP_VERSIONS", ",".join(VERSIONS)).split(",")


@pytest.fixture(scope="session", params=ASKED_FOR)
def release(request):
    try:
        return Release.obtain(request.param)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def name_server(release, tmp_path_factory):
    with NameServer.running(release, tmp_path_factory.mktemp("names")) as running:
        yield running


@pytest.fixture(scope="session")
def beside(release, name_server, tmp_path_factory):
    """Apache's broker, with Apache's client and ours; tests have topics and groups of their own."""
    home = tmp_path_factory.mktemp("beside")
    # A broker refuses what has waited for 200 ms unless told otherwise, which on a busy machine is
    # nothing.
    settings = {"recallMessageEnable": "true", "waitTimeMillsInSendQueue": 10_000}
    with (
        Broker.running(release, home / "broker", name_server.address, settings=settings),
        Session.running(release, home / "client", name_server.address) as session,
    ):
        yield Beside(release, name_server.address, session)
