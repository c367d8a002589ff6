"""The name server: which broker serves which topic, for clients, brokers and administrators.

`NameServer` listens on a port. `NameService` answers the requests and has no sockets, so its table
of handlers can be served elsewhere, too. `KvConfig` keeps RocketMQ's `kvConfig.json`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import SettingError
from orbitmq.logonce import LogAtIntervals
from orbitmq.namesrv.routes import FLAG_UNIT, FLAG_UNIT_SUB, Registration, RouteTable, only_zone
from orbitmq.namesrv.settings import (
    KV_FILE,
    BlackListed,
    Configuration,
    FileUnusable,
    NameServerSettings,
    RegisterAllFirst,
    read_file,
    replace_file,
)
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher, Handler
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import Address, Refused
from orbitmq.wire import headers
from orbitmq.wire.bodies import (
    BrokerMemberGroupResponse,
    DataVersion,
    KVTable,
    RegisterBroker,
    TopicConfigTable,
    TopicList,
    TopicRouteData,
    body_crc32,
    decompress_registration,
)
from orbitmq.wire.codes import BodyError, Gate, Release, RequestCode, ResponseCode, ordinal_of
from orbitmq.wire.command import Command
from orbitmq.wire.headers import RegisterBrokerRequest
from orbitmq.wire.javajson import Body, decode_body, encode_body

log = logging.getLogger(__name__)

#: Set by a client that wants brokers of its own zone only.
ZONE_MODE = "__ZONE_MODE"

_SEE_ALSO = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."

_SUCCESS = int(ResponseCode.SUCCESS)

#: The field in which a broker names its zone.
ZONE_NAME = "__ZONE_NAME"

#: Before this release the body is the table of topics alone.
_WHOLE_BODY = ordinal_of(Release(3, 0, 11))

#: The namespace in which brokers and clients look for the queues of ordered topics.
ORDER_TOPICS = "ORDER_TOPIC_CONFIG"

#: The flag of the topics in a list, and the one that they lack.
_FLAGS: Mapping[int, tuple[int, int]] = {
    RequestCode.GET_UNIT_TOPIC_LIST: (FLAG_UNIT, 0),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: (FLAG_UNIT_SUB, 0),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: (FLAG_UNIT_SUB, FLAG_UNIT),
}

Tables = dict[str, dict[str, str]]


class NameServer:
    """One name server. It does not talk to others: brokers register with all of them."""

    def __init__(
        self, settings: NameServerSettings | None = None, *, clock: Clock | None = None
    ) -> None:
        settings = settings or NameServerSettings()
        self.service = NameService(settings, clock=clock)
        dispatcher = Dispatcher(self.service.handlers, closed=self.service.connection_closed)
        self._server = Server(dispatcher, settings.server, clock=clock)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> Address:
        """The listening address, with the actual port."""
        return self._server.address

    async def start(self) -> None:
        """Load the persisted state, then listen.

        Raises `FileUnusable`, `SettingError` or `ListenFailed`.
        """
        self.service.load()
        await self._server.start()
        self._scan_later()

    async def stop(self, grace: float | None = None) -> None:
        """Answer pending requests, within `grace` seconds if given, and stop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._server.stop(grace)

    def _scan_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.service.settings.scan_interval, self._scan)

    def _scan(self) -> None:
        self.service.scan()
        self._scan_later()


class NameService:
    """The tables of a name server and the requests about them."""

    def __init__(self, settings: NameServerSettings, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._configuration = Configuration(settings)
        home = settings.home
        self._kv = KvConfig(home / KV_FILE if home is not None else None)
        self.routes = RouteTable()
        self._apply_settings()
        self._started = self._clock.monotonic()
        self._rivals = LogAtIntervals()
        self.handlers: Mapping[int, Handler] = self._handlers()

    def load(self) -> None:
        """Load the persisted state. Raises `FileUnusable` or `SettingError`."""
        self._configuration.load()
        self._kv.load()
        self._apply_settings()
        self._started = self._clock.monotonic()

    @property
    def settings(self) -> NameServerSettings:
        """The settings in force."""
        return self._configuration.settings

    def scan(self) -> None:
        """Remove brokers without a heartbeat in time, and close their connections."""
        for expired in self.routes.expire(self._clock.monotonic()):
            log.warning("broker expired", extra={"broker": expired.key.address})
            if isinstance(expired.connection, Connection):
                expired.connection.close("no heartbeat came in time")

    def connection_closed(self, connection: Connection) -> None:
        """Remove the brokers that registered over this connection."""
        for key in self.routes.connection_closed(connection):
            log.info("broker left with its connection", extra={"broker": key.address})

    def _apply_settings(self) -> None:
        self.routes.support_acting_master = self.settings.support_acting_master
        self.routes.delete_unregistered_topics = self.settings.delete_topic_with_broker_registration

    def _handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.QUERY_DATA_VERSION: self._query_version,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
            RequestCode.GET_BROKER_MEMBER_GROUP: self._members,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._clusters,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._all_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self._topics_by_flag,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self._topics_by_flag,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self._topics_by_flag,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._change_write_permission,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._change_write_permission,
            RequestCode.PUT_KV_CONFIG: self._put_kv,
            RequestCode.GET_KV_CONFIG: self._get_kv,
            RequestCode.DELETE_KV_CONFIG: self._delete_kv,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list_kv,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._update_config,
            RequestCode.GET_NAMESRV_CONFIG: self._get_config,
        }

    # Routes

    def _route(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.GetRouteInfoRequest)
        self._check_ready()
        route = self.routes.route(header.topic)
        if route is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {header.topic}{_SEE_ALSO}",
            )
        if self.settings.order_message_enable:
            route = _with_order(route, self._kv.get(ORDER_TOPICS, header.topic))
        fields = request.ext_fields
        if fields.get(ZONE_MODE, "").lower() == "true" and fields.get(ZONE_NAME, "").strip():
            route = only_zone(route, fields[ZONE_NAME])
        reads_quoted = request.version >= Gate.STANDARD_JSON or header.accept_standard_json_only
        return request.answer(_SUCCESS, body=encode_body(route, bare_integer_keys=not reads_quoted))

    def _check_ready(self) -> None:
        if not self.settings.need_wait_for_service:
            return
        if self._clock.monotonic() - self._started < self.settings.wait_for_service:
            raise Refused(ResponseCode.SYSTEM_ERROR, "name server not ready")

    def _clusters(self, _: Connection, request: Command) -> Command:
        body = encode_body(self.routes.clusters(), bare_integer_keys=True)
        return request.answer(_SUCCESS, body=body)

    def _members(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.GetBrokerMemberGroupRequest)
        members = self.routes.members(header.cluster_name, header.broker_name)
        body = BrokerMemberGroupResponse(broker_member_group=members)
        return request.answer(_SUCCESS, body=encode_body(body, bare_integer_keys=True))

    # Brokers

    def _register(self, connection: Connection, request: Command) -> Command:
        broker = read_registration(request, self.settings.heartbeat_timeout)
        is_new = self.routes.version_of(broker.cluster, broker.address) is None
        try:
            registered = self.routes.register(broker, self._clock.monotonic(), connection)
        except RegisterAllFirst as error:
            log.warning("registration refused: %s", error)
            raise Refused(ResponseCode.SYSTEM_ERROR, "register broker failed") from error
        self._log_rival(broker, registered.rival)
        if is_new:
            log.info("broker registered", extra={"broker": broker.name, "address": broker.address})
        table = self._kv.table(ORDER_TOPICS) if self.settings.return_order_topic_config else None
        return request.answer(
            _SUCCESS,
            headers.RegisterBrokerResponse(
                ha_server_addr=registered.ha_address, master_addr=registered.master_address
            ),
            body=b"" if table is None else encode_body(KVTable(table=dict(table))),
        )

    def _log_rival(self, broker: Registration, rival: str | None) -> None:
        """Two brokers with one name and id displace each other with every registration."""
        if rival is None:
            return
        who = f"{broker.name}/{broker.id}"
        if count := self._rivals.note(who, self._clock.monotonic()):
            log.warning(
                "two brokers claim id %d of broker %s: %s and %s; clients are sent to the one that "
                "registered last, so give one of them another name (broker.name, brokerName at "
                "Apache's) or id (time %d)",
                broker.id,
                broker.name,
                *sorted((rival, broker.address)),
                count,
            )

    def _unregister(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.BrokerRequest)
        self.routes.unregister(header.cluster_name, header.broker_addr, header.broker_name)
        log.info("broker unregistered", extra={"broker": header.broker_name})
        return request.answer(_SUCCESS)

    def _query_version(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.BrokerRequest)
        theirs = decode_body(DataVersion, request.body)
        ours = self.routes.version_of(header.cluster_name, header.broker_addr)
        self.routes.touch(header.cluster_name, header.broker_addr, self._clock.monotonic())
        return request.answer(
            _SUCCESS,
            headers.QueryDataVersionResponse(changed=theirs != ours),
            body=b"" if ours is None else encode_body(ours),
        )

    def _heartbeat(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.BrokerHeartbeatRequest)
        self.routes.touch(header.cluster_name, header.broker_addr, self._clock.monotonic())
        return request.answer(_SUCCESS)

    def _change_write_permission(self, connection: Connection, request: Command) -> Command:
        broker = request.header(headers.BrokerPermissionRequest).broker_name
        answer: headers.Header
        if request.code == RequestCode.WIPE_WRITE_PERM_OF_BROKER:
            count = self.routes.wipe_write_permission(broker)
            answer = headers.WipeWritePermResponse(wipe_topic_count=count)
        else:
            count = self.routes.add_write_permission(broker)
            answer = headers.AddWritePermResponse(add_topic_count=count)
        log.info(
            "write permission changed",
            extra={"broker": broker, "client": connection.remote, "topics": count},
        )
        return request.answer(_SUCCESS, answer)

    # Topics

    def _all_topics(self, _: Connection, request: Command) -> Command:
        if not self.settings.enable_all_topic_list:
            raise Refused(ResponseCode.SYSTEM_ERROR, "disable")
        return _topics(request, self.routes.topics())

    def _topics_of_cluster(self, _: Connection, request: Command) -> Command:
        if not self.settings.enable_topic_list:
            raise Refused(ResponseCode.SYSTEM_ERROR, "disable")
        cluster = request.header(headers.GetTopicsByClusterRequest).cluster
        return _topics(request, self.routes.topics_of_cluster(cluster))

    def _system_topics(self, _: Connection, request: Command) -> Command:
        return _topics(request, self.routes.system_topics())

    def _topics_by_flag(self, _: Connection, request: Command) -> Command:
        if not self.settings.enable_topic_list:
            raise Refused(ResponseCode.SYSTEM_ERROR, "disable")
        wanted, unwanted = _FLAGS[request.code]
        return _topics(request, self.routes.topics_by_flag(wanted, unwanted))

    def _delete_topic(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.DeleteTopicInNamesrvRequest)
        self.routes.delete_topic(header.topic, header.cluster_name)
        log.info("topic deleted", extra={"topic": header.topic, "cluster": header.cluster_name})
        return request.answer(_SUCCESS)

    def _register_topic(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.RegisterTopicRequest)
        if request.body:
            queues = decode_body(TopicRouteData, request.body).queue_datas
            self.routes.register_topic(header.topic, queues)
        return request.answer(_SUCCESS)

    # Key-value configuration

    def _put_kv(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.PutKVConfigRequest)
        try:
            self._kv.put(header.namespace, header.key, header.value)
        except FileUnusable as error:
            raise _not_kept(error) from error
        return request.answer(_SUCCESS)

    def _get_kv(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.KVConfigRequest)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {header.namespace} Key: {header.key}",
            )
        return request.answer(_SUCCESS, headers.GetKVConfigResponse(value=value))

    def _delete_kv(self, _: Connection, request: Command) -> Command:
        header = request.header(headers.KVConfigRequest)
        try:
            self._kv.delete(header.namespace, header.key)
        except FileUnusable as error:
            raise _not_kept(error) from error
        return request.answer(_SUCCESS)

    def _list_kv(self, _: Connection, request: Command) -> Command:
        namespace = request.header(headers.GetKVListRequest).namespace
        table = self._kv.table(namespace)
        if table is None:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return request.answer(_SUCCESS, body=encode_body(KVTable(table=dict(table))))

    # Configuration

    def _update_config(self, connection: Connection, request: Command) -> Command:
        try:
            text = bytes(request.body).decode()
        except UnicodeDecodeError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, "the configuration is not UTF-8") from error
        try:
            self._configuration.update(text)
        except BlackListed as error:
            raise Refused(ResponseCode.NO_PERMISSION, str(error)) from error
        except SettingError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        except FileUnusable as error:
            raise _not_kept(error) from error
        self._apply_settings()
        log.info("configuration changed", extra={"client": connection.remote})
        return request.answer(_SUCCESS)

    def _get_config(self, _: Connection, request: Command) -> Command:
        return request.answer(_SUCCESS, body=self._configuration.text().encode())


def _topics(request: Command, topics: TopicList) -> Command:
    return request.answer(_SUCCESS, body=encode_body(topics))


def _with_order(route: TopicRouteData, order: str | None) -> TopicRouteData:
    return replace(route, order_topic_conf=order)


def _not_kept(error: FileUnusable) -> Refused:
    log.error("nothing was changed: %s", error)
    return Refused(ResponseCode.SYSTEM_ERROR, f"nothing was changed: {error}")


def read_registration(request: Command, default_timeout: float) -> Registration:
    """Decode REGISTER_BROKER in each of its forms. Raises `HeaderError`, `BodyError`, `Refused`."""
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


class KvConfigFile(Body, frozen=True, kw_only=True):
    """The content of `kvConfig.json`."""

    config_table: Tables = field(default_factory=dict)


class KvConfig:
    """Texts by namespace and key, and the file that holds them; without a path they are in memory.

    A change is on the disk before it is visible. Only administrators change values, a few times a
    day, so the event loop may wait for the disk.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._tables: Tables = {}

    def load(self) -> None:
        """Load the file. Raises `FileUnusable`."""
        content = read_file(self._path) if self._path is not None else None
        if not content or self._path is None:
            return
        try:
            self._tables = decode_body(KvConfigFile, content).config_table
        except BodyError as error:
            raise FileUnusable(self._path, f"{error.problem}; repair or remove it") from error

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises `FileUnusable` and then changes nothing."""
        self._adopt({**self._tables, namespace: {**self._tables.get(namespace, {}), key: value}})

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value if it exists. Raises `FileUnusable` and then changes nothing."""
        table = self._tables.get(namespace)
        if table is not None and key in table:
            rest = {name: value for name, value in table.items() if name != key}
            self._adopt({**self._tables, namespace: rest})

    def get(self, namespace: str, key: str) -> str | None:
        return self._tables.get(namespace, {}).get(key)

    def table(self, namespace: str) -> Mapping[str, str] | None:
        """All values of a namespace; None if it does not exist."""
        return self._tables.get(namespace)

    def _adopt(self, tables: Tables) -> None:
        if self._path is not None:
            replace_file(self._path, encode_body(KvConfigFile(config_table=tables)))
        self._tables = tables
