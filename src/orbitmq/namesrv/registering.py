"""A registration as it comes over the wire, in whichever of its forms, as a value."""

from __future__ import annotations

from orbitmq.namesrv.registration import Registration
from orbitmq.remoting.errors import Refused
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.registration import body_crc32, decompress_registration
from orbitmq.wire.bodies.topics import DataVersion, RegisterBroker, TopicConfigTable
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.namesrv import RegisterBrokerRequest
from orbitmq.wire.versions import Release, ordinal_of

#: The field in which a broker names its zone.
ZONE_NAME = "__ZONE_NAME"

#: Before this release the body is the table of topics alone.
_WHOLE_BODY = ordinal_of(Release(3, 0, 11))


def read_registration(request: Command, default_timeout: float) -> Registration:
    """What REGISTER_BROKER says. Raises `HeaderError`, `BodyError` or `Refused`."""
    header = request.header(RegisterBrokerRequest)
    if header.body_crc32 and body_crc32(request.body) != header.body_crc32:
        raise Refused(ResponseCode.SYSTEM_ERROR, "crc32 not match")
    body = _read_body(request, is_compressed=header.compressed)
    table = body.topic_config_serialize_wrapper
    millis = header.heartbeat_timeout_millis
    return Registration(
        cluster=header.cluster_name,
        name=header.broker_name,
        id=header.broker_id,
        address=header.broker_addr,
        ha_address=header.ha_server_addr,
        zone=request.ext_fields.get(ZONE_NAME),
        timeout=default_timeout if millis is None else millis / 1000,
        acting_master=header.enable_acting_master,
        version=table.data_version or DataVersion(),
        topics=tuple(table.topic_config_table.values()),
        mappings=table.topic_queue_mapping_info_map or {},
        filter_servers=body.filter_server_list,
    )


def _read_body(request: Command, *, is_compressed: bool) -> RegisterBroker:
    if not request.body:
        return RegisterBroker()
    if request.version < _WHOLE_BODY:
        table = decode_body(TopicConfigTable, request.body)
        return RegisterBroker(topic_config_serialize_wrapper=table)
    if is_compressed:
        return decompress_registration(request.body, request.version)
    return decode_body(RegisterBroker, request.body)
