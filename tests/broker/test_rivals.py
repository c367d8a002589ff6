"""Two brokers that were given one name: both say so, and when one goes the other is found."""

from __future__ import annotations

import logging

import pytest

from orbitmq.broker import registration
from orbitmq.broker.broker import Broker
from orbitmq.broker.health import why_not_ready
from orbitmq.broker.registration import FORGOTTEN_AFTER, LOOK, LOOK_CLOSELY, Place
from orbitmq.broker.settings import RegistrationSettings
from orbitmq.client.admin.cluster import runtime_info
from orbitmq.namesrv.server import NameServer
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body
from tests.support.broker import until

OURS, THEIRS = "10.0.0.1:10911", "10.0.0.2:10911"

#: Nothing in these tests is to come from the usual interval, unless it is asked for.
RARE = RegistrationSettings(interval=60.0)


def test_somebody_else_in_our_place_is_a_rival_until_the_place_is_free():
    place = Place(OURS)

    seen = []
    for now, listed in enumerate((OURS, THEIRS, OURS, THEIRS, None, OURS)):
        is_free = place.saw(listed, float(now))
        seen.append((place.rival, place.pause, is_free))

    assert seen == [
        (None, LOOK, False),
        (THEIRS, LOOK_CLOSELY, False),
        # Its next registration will come.
        (THEIRS, LOOK_CLOSELY, False),
        (THEIRS, LOOK_CLOSELY, False),
        (None, LOOK, True),
        (None, LOOK, False),
    ]


def test_a_rival_that_does_not_register_any_more_is_gone_after_a_while():
    place = Place(OURS)
    place.saw(THEIRS, 100.0)

    place.saw(OURS, 100.0 + FORGOTTEN_AFTER)
    at_first = place.rival
    place.saw(OURS, 100.1 + FORGOTTEN_AFTER)

    assert (at_first, place.rival) == (THEIRS, None)


def listed(server: NameServer) -> dict[int, str]:
    return dict(server.service.routes.members("DefaultCluster", "broker-a").broker_addrs)


async def registered(broker: Broker) -> None:
    await until(lambda: broker.parts.registration.is_registered, 10)


@pytest.fixture
def often(monkeypatch):
    """Brokers look all the time."""
    monkeypatch.setattr(registration, "LOOK", 0.02)
    monkeypatch.setattr(registration, "LOOK_CLOSELY", 0.02)


@pytest.mark.usefixtures("often")
async def test_a_broker_that_was_displaced_says_by_whom_and_is_back_when_that_one_goes(
    start_broker, open_client, name_server, caplog
):
    told = {"name_servers": (str(name_server.address),), "registration": RARE}
    first = await start_broker(root="one", **told)
    await registered(first)
    second = await start_broker(root="two", **told)
    other = str(second.address)
    await until(lambda: listed(name_server) == {0: other}, 10)

    await until(lambda: why_not_ready(first.parts), 10)
    (reason,) = why_not_ready(first.parts)
    client = await open_client(first)
    answer = await client.connection.request(RequestCode.GET_BROKER_RUNTIME_INFO)
    info = runtime_info(decode_body(KVTable, answer.body).table, answer.version)
    await second.stop()

    await until(lambda: listed(name_server) == {0: str(first.address)}, 10)
    await until(lambda: not why_not_ready(first.parts), 10)
    assert other in reason
    assert str(first.address) in reason
    assert "another broker.name" in reason
    assert any(reason in warning for warning in info.warnings)
    by_broker = [each for each in caplog.records if each.name == "orbitmq.broker.registration"]
    assert sum(each.levelno == logging.ERROR for each in by_broker) == 1
    (by_server,) = [each for each in caplog.messages if "two brokers claim" in each]
    assert str(first.address) in by_server
    assert other in by_server


@pytest.mark.usefixtures("often")
async def test_brokers_that_displace_each_other_again_and_again_both_know_and_stay_unready(
    start_broker, name_server, caplog
):
    told = {
        "name_servers": (str(name_server.address),),
        "registration": RegistrationSettings(interval=0.2),
    }
    brokers = [await start_broker(root=root, **told) for root in ("one", "two")]

    await until(lambda: all(why_not_ready(each.parts) for each in brokers), 20)
    places = [each.parts.registration.conflicts for each in brokers]

    assert str(brokers[1].address) in places[0][0]
    assert str(brokers[0].address) in places[1][0]
    # The name server says it once a minute, however often it happens.
    assert sum("two brokers claim" in text for text in caplog.messages) == 1


@pytest.mark.usefixtures("often")
async def test_a_broker_that_a_name_server_has_lost_registers_at_once(start_broker, name_server):
    broker = await start_broker(name_servers=(str(name_server.address),), registration=RARE)
    await registered(broker)

    name_server.service.routes.unregister("DefaultCluster", str(broker.address), "broker-a")

    await until(lambda: listed(name_server) == {0: str(broker.address)}, 10)
    assert not why_not_ready(broker.parts)


@pytest.mark.usefixtures("often")
async def test_a_master_and_its_slave_are_no_rivals(start_broker, name_server):
    told = {"name_servers": (str(name_server.address),), "registration": RARE}
    master = await start_broker(root="one", **told)
    slave = await start_broker(root="two", broker_id=1, **told)
    await until(lambda: len(listed(name_server)) == 2, 10)
    looks = [0]
    members = name_server.service.routes.members

    def counted(cluster, broker):
        looks[0] += 1
        return members(cluster, broker)

    name_server.service.routes.members = counted
    await until(lambda: looks[0] >= 6, 10)

    assert master.parts.registration.conflicts == slave.parts.registration.conflicts == ()
