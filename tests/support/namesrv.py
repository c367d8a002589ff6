"""Brokers and questions for tests of the name server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from orbitmq.clock import Clock
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from orbitmq.wire import bodies
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetRouteInfoRequest, RegisterBrokerRequest
from orbitmq.wire.javajson import encode_body


@contextlib.asynccontextmanager
async def name_server(
    settings: NameServerSettings | None = None, *, clock: Clock | None = None
) -> AsyncIterator[NameServer]:
    """A name server on a free port for the time of the block."""
    settings = replace(settings or NameServerSettings(), server=ServerSettings(grace=1.0))
    server = NameServer(settings, clock=clock)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def topic(name: str, *, queues: int = 4, perm: int = 6, flags: int = 0) -> bodies.TopicConfig:
    return bodies.TopicConfig(
        topic_name=name,
        perm=perm,
        read_queue_nums=queues,
        write_queue_nums=queues,
        topic_sys_flag=flags,
    )


def registration(
    topics: Sequence[bodies.TopicConfig],
    *,
    name: str = "broker-a",
    broker_id: int = 0,
    address: str = "127.0.0.1:10911",
    cluster: str = "DefaultCluster",
    version: bodies.DataVersion | None = None,
    opaque: int = 1,
    acting_master: bool | None = False,
    timeout_millis: int | None = None,
    extra: dict[str, str] | None = None,
) -> Command:
    """REGISTER_BROKER as a broker of 5.x sends it."""
    table = bodies.TopicConfigTable(
        data_version=version or bodies.DataVersion(counter=1, timestamp=1_700_000_000_000),
        topic_config_table={each.topic_name: each for each in topics},
    )
    body = encode_body(bodies.RegisterBroker(topic_config_serialize_wrapper=table))
    header = RegisterBrokerRequest(
        broker_name=name,
        broker_addr=address,
        cluster_name=cluster,
        ha_server_addr=address.replace(":10911", ":10912"),
        broker_id=broker_id,
        heartbeat_timeout_millis=timeout_millis,
        enable_acting_master=acting_master,
        body_crc32=bodies.body_crc32(body),
    )
    return Command.request(
        RequestCode.REGISTER_BROKER, header, opaque=opaque, body=body, extra=extra
    )


def route_request(name: str, *, version: int = 479, standard_json: bool | None = None) -> Command:
    """GET_ROUTEINFO_BY_TOPIC from a client of that version."""
    header = GetRouteInfoRequest(topic=name, accept_standard_json_only=standard_json)
    request = Command.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, opaque=2)
    return Command(request.code, 2, version=version, _fields=request.ext_fields)
