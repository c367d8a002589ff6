"""What a name server answers, request by request. No sockets: see `server`.

The table of handlers can be given to a server of its own, or be joined with a broker's, so that one
port serves both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from orbitmq.clock import Clock, SystemClock
from orbitmq.namesrv.configuration import KV_FILE, BlackListed, Configuration
from orbitmq.namesrv.errors import FileUnusable, RegisterAllFirst, SettingError
from orbitmq.namesrv.kvconfig import ORDER_TOPICS, KvConfig
from orbitmq.namesrv.registering import ZONE_NAME, read_registration
from orbitmq.namesrv.registration import Registration
from orbitmq.namesrv.routes import FLAG_UNIT, FLAG_UNIT_SUB, RouteTable
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.namesrv.shaping import only_zone
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.errors import Refused
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.route import (
    BrokerMemberGroupResponse,
    KVTable,
    TopicList,
    TopicRouteData,
)
from orbitmq.wire.bodies.topics import DataVersion
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import namesrv as headers
from orbitmq.wire.versions import Gate

log = logging.getLogger(__name__)

#: Set by a client that wants brokers of its own zone only.
ZONE_MODE = "__ZONE_MODE"

_SEE_ALSO = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."

_SUCCESS = int(ResponseCode.SUCCESS)


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
        self._rivals = Reminders()
        self.handlers: Mapping[int, Handler] = self._handlers()

    def load(self) -> None:
        """Take over what earlier runs kept. Raises `FileUnusable` or `SettingError`."""
        self._configuration.load()
        self._kv.load()
        self._apply_settings()
        self._started = self._clock.monotonic()

    @property
    def settings(self) -> NameServerSettings:
        """The settings in force."""
        return self._configuration.settings

    def scan(self) -> None:
        """Remove brokers that were not heard of for too long, and close their connections."""
        for expired in self.routes.expire(self._clock.monotonic()):
            log.warning("broker expired", extra={"broker": expired.key.address})
            if isinstance(expired.connection, Connection):
                expired.connection.close("no heartbeat came in time")

    def connection_closed(self, connection: Connection) -> None:
        """Remove the brokers that registered by this connection."""
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
            RequestCode.GET_UNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self._unit_sub_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self._unit_sub_only_topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_permission,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write_permission,
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
        self._tell_of_rivals(broker, registered.rival)
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

    def _tell_of_rivals(self, broker: Registration, rival: str | None) -> None:
        """Two brokers with one name and id displace each other with every registration."""
        if rival is None:
            return
        who = f"{broker.name}/{broker.id}"
        if count := self._rivals.note(who, self._clock.monotonic()):
            log.warning(
                "two brokers claim id %d of broker %s: %s and %s; clients are sent to whoever "
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

    def _wipe_write_permission(self, connection: Connection, request: Command) -> Command:
        broker = request.header(headers.BrokerPermissionRequest).broker_name
        count = self.routes.wipe_write_permission(broker)
        log.info("write permission wiped", extra={"broker": broker, "client": connection.remote})
        return request.answer(_SUCCESS, headers.WipeWritePermResponse(wipe_topic_count=count))

    def _add_write_permission(self, connection: Connection, request: Command) -> Command:
        broker = request.header(headers.BrokerPermissionRequest).broker_name
        count = self.routes.add_write_permission(broker)
        log.info("write permission added", extra={"broker": broker, "client": connection.remote})
        return request.answer(_SUCCESS, headers.AddWritePermResponse(add_topic_count=count))

    # Topics

    def _all_topics(self, _: Connection, request: Command) -> Command:
        if not self.settings.enable_all_topic_list:
            raise Refused(ResponseCode.SYSTEM_ERROR, "disable")
        return _topics(request, self.routes.topics())

    def _topics_of_cluster(self, _: Connection, request: Command) -> Command:
        self._check_topic_lists()
        cluster = request.header(headers.GetTopicsByClusterRequest).cluster
        return _topics(request, self.routes.topics_of_cluster(cluster))

    def _system_topics(self, _: Connection, request: Command) -> Command:
        return _topics(request, self.routes.system_topics())

    def _unit_topics(self, _: Connection, request: Command) -> Command:
        self._check_topic_lists()
        return _topics(request, self.routes.topics_by_flag(FLAG_UNIT))

    def _unit_sub_topics(self, _: Connection, request: Command) -> Command:
        self._check_topic_lists()
        return _topics(request, self.routes.topics_by_flag(FLAG_UNIT_SUB))

    def _unit_sub_only_topics(self, _: Connection, request: Command) -> Command:
        self._check_topic_lists()
        return _topics(request, self.routes.topics_by_flag(FLAG_UNIT_SUB, unwanted=FLAG_UNIT))

    def _check_topic_lists(self) -> None:
        if not self.settings.enable_topic_list:
            raise Refused(ResponseCode.SYSTEM_ERROR, "disable")

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
