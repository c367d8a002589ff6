"""What Apache's brokers registered and its name server answered, replayed against ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orbitmq.namesrv.server import NameServer
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import GetRouteInfoRequest, RegisterBrokerRequest
from tests.support.namesrv import name_server
from tests.support.remoting import RawPeer

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "recordings"
RUNS = [(version, form) for version in ("4.9.7", "5.5.0") for form in ("json", "binary")]

_ADDRESS = re.compile(rb"127\.0\.0\.2:\d+")


def _commands(name: str) -> list[Command]:
    data = (RECORDINGS / name).read_bytes()
    return [decode_command(frame) for frame in FrameReader().feed(data)]


def _recorded_routes(version: str, form: str) -> list[tuple[Command, Command]]:
    """Requests for a route with Apache's answers, where the opaque tells which that is."""
    pairs = []
    for path in sorted(RECORDINGS.glob(f"{version}-*-{form}-to-server.frames")):
        requests = _commands(path.name)
        answers = _commands(path.name.replace("to-server", "to-client"))
        for request in requests:
            if request.code != RequestCode.GET_ROUTEINFO_BY_TOPIC:
                continue
            same = [each for each in answers if each.opaque == request.opaque and each.is_response]
            askers = [each for each in requests if each.opaque == request.opaque]
            if len(same) == len(askers) == 1:
                pairs.append((request, same[0]))
    return pairs


async def _register(peer: RawPeer, version: str, form: str) -> bytes:
    """Replay the broker's registrations; returns its address."""
    requests = _commands(f"{version}-register-{form}-to-server.frames")
    for request in requests:
        await peer.send(request)
        if not request.is_one_way:
            answer = await peer.receive()
            assert (answer.code, answer.opaque) == (0, request.opaque)
            assert answer.serialization is request.serialization
    return requests[0].header(RegisterBrokerRequest).broker_addr.encode()


@pytest.mark.parametrize(("version", "form"), RUNS)
async def test_routes_of_recorded_brokers_are_those_that_apache_answered(version, form):
    compared: list[str] = []
    async with name_server() as server, RawPeer.connected(server.address) as peer:
        address = await _register(peer, version, form)
        for request, theirs in _recorded_routes(version, form):
            topic = request.header(GetRouteInfoRequest).topic
            if theirs.code == 0 and _knows(server, topic):
                ours = await peer.ask(request)
                expected = _ADDRESS.sub(address, bytes(theirs.body))

                assert ours.code == 0
                assert _without_5_x_keys(bytes(ours.body), version) == expected
                compared.append(topic)
            elif theirs.code == 17 and not _knows(server, topic):
                ours = await peer.ask(request)

                assert ours.code == 17
                # 4.9 links to another page; ours has no `%`.
                expected_remark = (theirs.remark or "").replace("%RETRY%", "RETRY of ")
                assert version == "4.9.7" or ours.remark == expected_remark
                compared.append("17")

    assert {"Orders", "TBW102", "17"} <= set(compared) or version == "5.5.0"
    assert {"Orders", "17"} <= set(compared)
    assert len(compared) >= 10


@pytest.mark.parametrize(("version", "form"), RUNS)
async def test_the_cluster_of_a_recorded_broker_is_what_apache_answered(version, form):
    requests = _commands(f"{version}-admin-{form}-to-server.frames")
    answers = _commands(f"{version}-admin-{form}-to-client.frames")
    (request,) = [r for r in requests if r.code == RequestCode.GET_BROKER_CLUSTER_INFO]
    (theirs,) = [a for a in answers if a.opaque == request.opaque]
    async with name_server() as server, RawPeer.connected(server.address) as peer:
        address = await _register(peer, version, form)
        ours = await peer.ask(request)

    expected = _ADDRESS.sub(address, bytes(theirs.body))
    assert _without_5_x_keys(bytes(ours.body), version) == expected


def _knows(server: NameServer, topic: str) -> bool:
    return server.service.routes.route(topic) is not None


def _without_5_x_keys(body: bytes, version: str) -> bytes:
    """4.9 does not know acting masters, and reads over the key."""
    return body.replace(b',"enableActingMaster":false', b"") if version == "4.9.7" else body
