"""Registration of a broker and its topics with the name servers.

Each name server has a task of its own: it gets all topics at the start and every 30 seconds, and
changes immediately. It gets everything again after it lost the connection, or refused a change
because it was restarted. Failed attempts back off up to 30 seconds. An outage is logged once, and
once more at its end.

In between the task checks whether the name server lists this broker (`Place`), and registers again
when it lists none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.errors import Refused
from orbitmq.broker.settings import HA_DISTANCE
from orbitmq.broker.topics import TopicTable
from orbitmq.clock import Clock
from orbitmq.errors import OrbitError
from orbitmq.remoting.channels import Channels
from orbitmq.remoting.connection import Connection, Prepare
from orbitmq.remoting.settings import Address, RemotingError, RequestTimedOut
from orbitmq.wire.bodies import (
    BrokerMemberGroupResponse,
    KVTable,
    RegisterBroker,
    TopicRouteData,
    body_crc32,
)
from orbitmq.wire.codes import RequestCode, ResponseCode, named
from orbitmq.wire.command import Command, Credentials, sign
from orbitmq.wire.headers import (
    BrokerRequest,
    GetBrokerMemberGroupRequest,
    GetRouteInfoRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
)
from orbitmq.wire.javajson import decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.broker.settings import BrokerSettings, OutwardSettings


log = logging.getLogger(__name__)

#: How long a stop waits for the name servers.
_GOODBYE = 2.0
#: After the first of several failures; doubles with each further one.
_FIRST_PAUSE = 1.0
#: How long a name server may take to answer which broker is listed.
_LOOK_PATIENCE = 1.0
#: After this many failures the request is not repeated: name servers before 5.0 do not know it.
_ENOUGH_SILENCES = 3


class _NameServer:
    """The state of registration with one name server."""

    def __init__(self, address: Address, ours: Address) -> None:
        """`ours` is the address to register."""
        self.address = address
        self.place = Place(str(ours))
        #: The connection of the last registration, until it ends.
        self.connection: Connection | None = None
        #: Topics to register; None: all.
        self.news: set[str] | None = None
        self.has_news = asyncio.Event()
        #: Failed attempts and lost connections since it was last quiet for a whole interval.
        self.troubles = 0
        #: Whether it got the whole table since it was last unreachable.
        self.knows_all = False
        #: Failed questions for the listed broker in a row, on this connection.
        self.silences = 0
        #: None before the first attempt.
        self.is_reachable: bool | None = None
        self.is_tried = asyncio.Event()
        #: Why the last attempt failed; empty when it did not.
        self.problem = ""

    def add_news(self, topics: frozenset[str] | None) -> None:
        """Register these topics soon; None: all."""
        if topics is None:
            self.news = None
        elif self.news is not None:
            self.news |= topics
        elif not self.has_news.is_set():
            self.news = set(topics)
        self.has_news.set()

    def take_news(self) -> frozenset[str] | None:
        """Take the topics to register now; None: all."""
        news, self.news = self.news, None
        self.has_news.clear()
        return None if news is None else frozenset(news)

    def pause(self, interval: float) -> float:
        """Seconds before the next attempt, by the recent failures."""
        return float(min(interval, _FIRST_PAUSE * 2 ** min(self.troubles - 1, 16)))


class Registration:
    """Keeps all name servers informed."""

    def __init__(
        self,
        settings: Callable[[], BrokerSettings],
        topics: TopicTable,
        address: Address,
        clock: Clock,
        channels: Channels | None = None,
    ) -> None:
        """`settings` returns the present ones: the permission of the broker may change."""
        self._settings = settings
        self._topics = topics
        self._address = address
        self._clock = clock
        self._channels = channels or outward_channels(settings().outward, clock)
        self._servers = [_NameServer(each, address) for each in settings().name_server_addresses()]
        self._tasks: list[asyncio.Task[None]] = []
        #: Where slaves may connect.
        self.ha_port = address.port + HA_DISTANCE
        #: Called with the addresses of the master and of its replication port.
        self.on_master: Callable[[str | None, str | None], None] | None = None
        #: The revision of the topics that was last noticed.
        self._revision = topics.revision

    def start(self) -> None:
        """Begin to register; returns immediately."""
        if self._servers:
            self._topics.take_changed()
        for server in self._servers:
            for work in (self._keep_informed(server), self._look_around(server)):
                task = asyncio.get_running_loop().create_task(work)
                task.add_done_callback(_log_failure)
                self._tasks.append(task)

    async def until_tried(self, patience: float) -> None:
        """Wait, for a limited time, until every name server was tried once."""
        try:
            async with asyncio.timeout(patience):
                for server in self._servers:
                    await server.is_tried.wait()
        except TimeoutError:
            log.debug("a name server takes its time")

    def notice(self) -> None:
        """Register soon if the topics have changed; cheap when they have not."""
        if self._topics.revision != self._revision:
            self._revision = self._topics.revision
            self._add_news(self._topics.take_changed() or None)

    def register_all(self) -> None:
        """Register everything soon, after a change that concerns all topics."""
        self._topics.take_changed()
        self._add_news(None)

    @property
    def name_servers(self) -> tuple[Address, ...]:
        return tuple(server.address for server in self._servers)

    @property
    def is_registered(self) -> bool:
        """Whether any name server knows this broker, as of the last attempt."""
        return any(server.is_reachable for server in self._servers)

    @property
    def unreachable(self) -> tuple[Address, ...]:
        """The name servers that did not answer the last time."""
        return tuple(server.address for server in self._servers if server.is_reachable is False)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why name servers do not know this broker, as of the last attempt."""
        return tuple(f"{each.address}: {each.problem}" for each in self._servers if each.problem)

    @property
    def conflicts(self) -> tuple[str, ...]:
        """Other brokers with this broker's name and id, by name server."""
        return tuple(self._conflict(each) for each in self._servers if each.place.rival is not None)

    def _conflict(self, server: _NameServer) -> str:
        settings = self._settings()
        return (
            f"{server.place.rival} is registered with name server {server.address} as "
            f"{settings.name} with id {settings.broker_id}, as this broker {self._address} is: "
            "clients find only one of the two; give one of them another broker.name"
        )

    async def route(self, topic: str) -> TopicRouteData | None:
        """The route of a topic, from a name server; None when there is none to ask.

        Raises `Refused` when none of them gives a route, with the code of the last one that
        refused, or when none answers.
        """
        problem: OrbitError | None = None
        for server in sorted(self._servers, key=lambda each: each.is_reachable is not True):
            try:
                answer = await self._channels.request(
                    server.address,
                    RequestCode.GET_ROUTEINFO_BY_TOPIC,
                    GetRouteInfoRequest(topic=topic),
                    timeout=_LOOK_PATIENCE,
                )
                if answer.code == ResponseCode.SUCCESS:
                    return decode_body(TopicRouteData, answer.body)
            except OrbitError as error:
                problem = problem or Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"no name server says where topic {names.shown(topic)} is: {error}",
                )
            else:
                problem = Refused(
                    answer.code,
                    f"name server {server.address} gives no route of topic {names.shown(topic)}: "
                    f"{answer.remark or named(ResponseCode, answer.code)}",
                )
        if problem is not None:
            raise problem
        return None

    async def stop(self, patience: float = _GOODBYE) -> None:
        """Unregister from all name servers, within `patience` and a short time at most."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        known = [server for server in self._servers if server.is_reachable]
        if known and patience > 0:
            patience = min(patience, _GOODBYE)
            await asyncio.gather(*(self._unregister(server, patience) for server in known))
        await self._channels.close()

    def _add_news(self, topics: frozenset[str] | None) -> None:
        for server in self._servers:
            server.add_news(topics)

    async def _keep_informed(self, server: _NameServer) -> None:
        """Register with one name server periodically; the others do not wait for a slow one."""
        interval = self._settings().registration.interval
        while True:
            await self._register(server, self._only(server.take_news()))
            server.is_tried.set()
            pause = interval
            if not server.is_reachable:
                server.take_news()  # everything is registered the next time
                server.troubles += 1
                pause = server.pause(interval)
            if not await self._has_news(server, pause):
                if server.is_reachable:
                    server.troubles = 0
                continue
            if server.is_reachable and server.connection is None and server.troubles > 1:
                # It ends every connection, so there is no hurry.
                await asyncio.sleep(server.pause(interval))

    async def _has_news(self, server: _NameServer, seconds: float) -> bool:
        """Wait for changes; False when it is time to register without any."""
        try:
            async with asyncio.timeout(seconds):
                await server.has_news.wait()
        except TimeoutError:
            # A rival that registers just before this broker each time shows only now.
            await self._is_unlisted(server)
            return False
        return True

    async def _look_around(self, server: _NameServer) -> None:
        """Check periodically which broker is listed, and register when none is.

        In a task of its own: a slow answer delays no registration.
        """
        while True:
            await asyncio.sleep(server.place.pause)
            if await self._is_unlisted(server):
                server.add_news(None)

    async def _is_unlisted(self, server: _NameServer) -> bool:
        """Check which broker is listed; whether none is."""
        if not server.is_reachable or server.connection is None:
            return False
        if server.silences >= _ENOUGH_SILENCES:
            return False
        settings = self._settings()
        header = GetBrokerMemberGroupRequest(
            cluster_name=settings.cluster, broker_name=settings.name
        )
        try:
            answer = await server.connection.request(
                RequestCode.GET_BROKER_MEMBER_GROUP, header, timeout=_LOOK_PATIENCE
            )
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                server.silences = _ENOUGH_SILENCES
            if answer.code != ResponseCode.SUCCESS:
                raise _NotRegistered(answer.remark or named(ResponseCode, answer.code))
            members = decode_body(BrokerMemberGroupResponse, answer.body).broker_member_group
        except RequestTimedOut as error:
            # Name servers of 4.x leave unknown requests without an answer.
            server.silences += 1
            log.debug(
                "the name server was not checked for conflicts: %s",
                error,
                extra={"name_server": str(server.address)},
            )
            return False
        except OrbitError as error:
            # The next registration shows whether it can be reached.
            log.debug(
                "the name server was not checked for conflicts: %s",
                error,
                extra={"name_server": str(server.address)},
            )
            return False
        server.silences = 0
        before = server.place.rival
        listed = None if members is None else members.broker_addrs.get(settings.broker_id)
        is_free = server.place.saw(listed, self._clock.monotonic())
        self._log_rival(server, before)
        return is_free

    def _log_rival(self, server: _NameServer, before: str | None) -> None:
        rival = server.place.rival
        if rival == before:
            return
        if rival is None:
            log.info(
                "no other broker has this name any more",
                extra={"name_server": str(server.address), "former": before},
            )
        else:
            log.error("%s", self._conflict(server))

    def _only(self, news: frozenset[str] | None) -> frozenset[str] | None:
        """The topics to register; None for all of them."""
        # A deleted topic is registered by the table without it.
        if news is None or any(name not in self._topics for name in news):
            return None
        return news

    def _lost(self, server: _NameServer, connection: Connection) -> None:
        """The name server forgets the broker when the connection ends."""
        if server.connection is connection:
            server.connection = None
            server.knows_all = False
            if server.is_reachable:  # else it is tried again anyway
                server.troubles += 1
                server.add_news(None)

    async def _register(self, server: _NameServer, only: frozenset[str] | None) -> None:
        """Register some topics, or all, with a name server."""
        problem: OrbitError | None = None
        if only is not None and server.knows_all:
            problem = await self._notify(server, only)
            if problem is None:
                return
            log.info(
                "registered all topics: %s", problem, extra={"name_server": str(server.address)}
            )
        problem = await self._notify(server, None)
        server.knows_all = problem is None
        self._note(server, is_reachable=problem is None, problem=problem)

    async def _notify(self, server: _NameServer, only: frozenset[str] | None) -> OrbitError | None:
        """Make one attempt; the reason when it failed."""
        settings = self._settings()
        table = self._topics.registration(settings.permission, only)
        body = encode_body(RegisterBroker(topic_config_serialize_wrapper=table))
        life = settings.registration.heartbeat_timeout
        header = RegisterBrokerRequest(
            broker_name=settings.name,
            broker_addr=str(self._address),
            cluster_name=settings.cluster,
            ha_server_addr=str(Address(self._address.host, self.ha_port)),
            broker_id=settings.broker_id,
            heartbeat_timeout_millis=None if life is None else round(life * 1000),
            body_crc32=body_crc32(body),
        )
        try:
            timeout = settings.registration.timeout
            began = self._clock.monotonic()
            connection = await self._channels.get(server.address, timeout=timeout)
            if server.connection is not connection:
                server.connection = connection
                server.silences = 0
                connection.on_close(lambda ended: self._lost(server, ended))
            left = max(0.0, timeout - (self._clock.monotonic() - began))
            answer = await connection.request(
                RequestCode.REGISTER_BROKER, header, body=body, timeout=left
            )
            if answer.code != ResponseCode.SUCCESS:
                raise _NotRegistered(answer.remark or named(ResponseCode, answer.code))
            self._learn(answer)
        except OrbitError as error:
            return error
        return None

    def _learn(self, answer: Command) -> None:
        """The answer names the master, and the order topics."""
        if self.on_master is not None:
            found = answer.header(RegisterBrokerResponse)
            self.on_master(found.master_addr, found.ha_server_addr)
        if answer.body:
            table = decode_body(KVTable, answer.body)
            self._topics.apply_order_config(table.table, now=self._clock.now())

    def _note(
        self, server: _NameServer, *, is_reachable: bool, problem: OrbitError | None = None
    ) -> None:
        before, server.is_reachable = server.is_reachable, is_reachable
        server.problem = "" if problem is None else str(problem)
        if is_reachable and not before:
            log.info("registered", extra={"name_server": str(server.address)})
        elif not is_reachable and before is not False:
            log.warning(
                "not registered with name server %s: %s; it is tried again, at least every %g s",
                server.address,
                problem,
                self._settings().registration.interval,
            )

    async def _unregister(self, server: _NameServer, patience: float) -> None:
        settings = self._settings()
        header = BrokerRequest(
            broker_name=settings.name,
            broker_addr=str(self._address),
            cluster_name=settings.cluster,
            broker_id=settings.broker_id,
        )
        try:
            await self._channels.request(
                server.address, RequestCode.UNREGISTER_BROKER, header, timeout=patience
            )
        except RemotingError as error:
            log.info("not unregistered: %s", error, extra={"name_server": str(server.address)})


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("registration ended; name servers will forget this broker", exc_info=error)


class _NotRegistered(OrbitError):
    """A name server refused the registration."""


# Rivals: brokers with the same name and id, such as the default name on two machines. A name server
# lists one address for them, and each registration displaces the other, so clients are sent to one
# or the other by chance. When one of them unregisters, none is listed until the other registers
# again. So a broker checks from time to time which one is listed. A rival counts as gone when none
# is listed, or when this broker was listed for as long as two registrations may take.


#: Seconds between two checks.
LOOK = 5.0
#: The same while there is a rival: when it goes, clients should find this broker soon.
LOOK_CLOSELY = 1.0
#: A rival without a sign of it for this time is gone; brokers register every 60 s or more often.
FORGOTTEN_AFTER = 70.0


class Place:
    """The listing at one name server. Instants are seconds of a monotonic clock."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._seen = 0.0
        #: The address of the broker with the same name and id; None when there is none.
        self.rival: str | None = None

    @property
    def pause(self) -> float:
        """Seconds until the next check."""
        return LOOK if self.rival is None else LOOK_CLOSELY

    def saw(self, listed: str | None, now: float) -> bool:
        """Note the listed address, or None; whether this broker should register now."""
        if listed is None:
            self.rival = None
            return True
        if listed != self._ours:
            self.rival = listed
            self._seen = now
        elif self.rival is not None and now - self._seen > FORGOTTEN_AFTER:
            self.rival = None
        return False


# Connections to others: name servers, the master.


def outward_channels(settings: OutwardSettings, clock: Clock) -> Channels:
    """Connections as the settings say. Raises `SettingError` for a certificate of no use."""
    tls = None if settings.tls is None else settings.tls.context()
    return Channels(tls=tls, prepare=_signing(settings), clock=clock)


def _signing(settings: OutwardSettings) -> Prepare | None:
    if settings.access_key is None or settings.secret_key is None:
        return None
    credentials = Credentials(access_key=settings.access_key, secret_key=settings.secret_key)

    def prepare(request: Command) -> Command:
        return sign(request, credentials)

    return prepare
