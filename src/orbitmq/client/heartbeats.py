"""Heartbeats: they tell brokers which groups this client has, and their subscriptions.

A broker knows a client by its connection: when the connection ends, the client leaves its groups. A
heartbeat is therefore sent first on every new connection, before the request that needed the
connection. A lost connection is opened again even without a request, because all members rebalance
when a broker loses one.

Brokers are notified in parallel, each with its own deadline, so a broken one delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from orbitmq.client.errors import BrokerUnavailable, TimesUnsupported, refused_by
from orbitmq.client.routes import MASTER
from orbitmq.errors import OrbitError, SettingError
from orbitmq.remoting.settings import ConnectFailed, RemotingError
from orbitmq.wire.bodies import ConsumerData, HeartbeatData, ProducerData
from orbitmq.wire.codes import Release, RequestCode, ResponseCode, ordinal_of, release_of
from orbitmq.wire.command import Command
from orbitmq.wire.headers import UnregisterClientRequest
from orbitmq.wire.javajson import encode_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orbitmq.client.engine import Engine
    from orbitmq.remoting.connection import Connection
    from orbitmq.remoting.settings import Address


log = logging.getLogger(__name__)

#: The results of heartbeats, by broker.
_Outcome: TypeAlias = Command | RemotingError


class Member(Protocol):
    """A producer or consumer of this client."""

    @property
    def producer_group(self) -> str | None:
        """Its group as brokers know it, if it is a producer."""

    def consumer_data(self) -> ConsumerData | None:
        """Its entry in heartbeats, if it is a consumer."""


class _Greeting(NamedTuple):
    """A heartbeat that is being sent."""

    connection: Connection
    body: bytes
    outcome: asyncio.Future[_Outcome]


class Heartbeats:
    """The members of a client, and the brokers that know them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._members: list[Member] = []
        self._greetings: dict[Address, _Greeting] = {}
        #: Brokers in the routes, until they are dropped.
        self._known: set[Address] = set()
        #: Brokers that did not accept the last heartbeat.
        self._failing: dict[Address, OrbitError] = {}
        #: Brokers whose lost connection is being opened again.
        self._returning: set[Address] = set()
        self._versions: dict[Address, int] = {}

    @property
    def versions(self) -> Mapping[Address, int]:
        """The protocol version in each broker's answer."""
        return self._versions

    # ---- members

    def join(self, member: Member) -> None:
        """Add a member; the next heartbeat has it. A consumer group can be added only once."""
        data = member.consumer_data()
        if data is not None:
            _, consumers = self._groups()
            if data.group_name in consumers:
                raise SettingError(
                    f"consumer group {data.group_name!r} is used by this client already; "
                    "give the second consumer a client of its own"
                )
        self._members.append(member)

    async def leave(self, member: Member) -> None:
        """Remove a member; brokers are notified of groups that have no member left here."""
        if member not in self._members:
            return
        producers_before, consumers_before = self._groups()
        self._members.remove(member)
        producers, consumers = self._groups()
        await self._unregister(producers_before - producers, consumers_before - consumers)

    async def leave_all(self) -> None:
        """Remove all members; brokers are notified."""
        producers, consumers = self._groups()
        self._members.clear()
        await self._unregister(producers, consumers)

    def _groups(self) -> tuple[set[str], set[str]]:
        data = [member.consumer_data() for member in self._members]
        producers = {member.producer_group for member in self._members}
        return (
            {group for group in producers if group is not None},
            {each.group_name for each in data if each is not None},
        )

    async def _unregister(self, producers: set[str], consumers: set[str]) -> None:
        # A broker without a connection has removed the client already.
        notified = [
            self._tell_leaving(where, producer, consumer)
            for where in self._known
            if self._engine.open_connection(where) is not None
            for producer, consumer in (
                *((group, None) for group in sorted(producers)),
                *((None, group) for group in sorted(consumers)),
            )
        ]
        await asyncio.gather(*notified)

    async def _tell_leaving(
        self, where: Address, producer: str | None, consumer: str | None
    ) -> None:
        header = UnregisterClientRequest(
            client_id=self._engine.client_id, producer_group=producer, consumer_group=consumer
        )
        connection = self._engine.open_connection(where)
        if connection is None:
            return
        try:
            await connection.request(
                RequestCode.UNREGISTER_CLIENT,
                header,
                timeout=self._engine.settings.stop_timeout,
            )
        except RemotingError as error:
            log.info(
                "broker %s was not notified that %s leaves: %s",
                where,
                producer or consumer,
                error,
                extra={"broker": str(where)},
            )

    # ---- heartbeats

    async def beat(self) -> dict[Address, OrbitError]:
        """Send heartbeats to all brokers of the routes in use; returns the failures by broker."""
        wanted = self.addresses()
        self._drop_others(wanted)
        if not self._members:
            return {}
        await asyncio.gather(*(self._beat(where) for where in wanted))
        return {where: self._failing[where] for where in wanted if where in self._failing}

    def addresses(self) -> frozenset[Address]:
        """The brokers to notify: slaves matter to readers only."""
        has_consumer = any(member.consumer_data() is not None for member in self._members)
        return self._engine.routes.addresses(slaves=has_consumer)

    @property
    def has_strangers(self) -> bool:
        """Whether a broker of the routes in use has no heartbeat of this client yet."""
        return bool(self._members) and not self.addresses() <= self._known

    def connected(self, where: Address, connection: Connection) -> None:
        """A connection was opened: send a heartbeat first."""
        if self._members and where in self.addresses():
            self._greet(where, connection)

    def lost(self, where: Address) -> None:
        """A connection was lost: open it again, if the broker has to know this client."""
        is_wanted = self._members and where in self.addresses()
        if is_wanted and where not in self._returning and self._engine.is_running:
            self._returning.add(where)
            self._engine.spawn(self._return_to(where), f"return to {where}")

    async def _beat(self, where: Address) -> None:
        try:
            connection = await self._engine.connection(where, self._engine.settings.request_timeout)
        except RemotingError as error:
            self._heard(where, error)
            self.lost(where)
            return
        await asyncio.shield(self._greet(where, connection))
        if not connection.is_open:
            # It may have ended before it was registered, and then its end was not reported.
            self.lost(where)

    def _greet(self, where: Address, connection: Connection) -> asyncio.Future[_Outcome]:
        body = self._body()
        current = self._greetings.get(where)
        if (
            current is not None
            and current.connection is connection
            and current.body == body
            and not current.outcome.done()
        ):
            return current.outcome
        answered: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()

        def settle(outcome: _Outcome) -> None:
            self._heard(where, outcome)
            if isinstance(outcome, Command) and outcome.code == ResponseCode.GO_AWAY:
                self._engine.went_away(where, connection)
            answered.set_result(outcome)

        self._known.add(where)
        self._greetings[where] = _Greeting(connection, body, answered)
        try:
            connection.submit(
                RequestCode.HEART_BEAT,
                None,
                settle,
                body=body,
                timeout=self._engine.settings.request_timeout,
            )
        except RemotingError as error:
            # Several callers may wait for the connection that failed: all get this error.
            settle(error)
        return answered

    def _body(self) -> bytes:
        data = [member.consumer_data() for member in self._members]
        producers, _ = self._groups()
        return encode_body(
            HeartbeatData(
                client_id=self._engine.client_id,
                consumer_data_set=tuple(each for each in data if each is not None),
                producer_data_set=tuple(
                    ProducerData(group_name=name) for name in sorted(producers)
                ),
            )
        )

    def _heard(self, where: Address, outcome: _Outcome) -> None:
        if isinstance(outcome, Command):
            self._versions[where] = outcome.version
            if outcome.code == ResponseCode.SUCCESS:
                if self._failing.pop(where, None) is not None:
                    log.info(
                        "broker %s takes heartbeats again", where, extra={"broker": str(where)}
                    )
                return
            error: OrbitError = refused_by(outcome, where, RequestCode.HEART_BEAT)
        else:
            error = outcome
        if where not in self._failing:
            log.warning("heartbeat to %s failed: %s", where, error, extra={"broker": str(where)})
        self._failing[where] = error

    async def _return_to(self, where: Address) -> None:
        try:
            while self._members and where in self.addresses():
                try:
                    connection = await self._engine.connection(
                        where, self._engine.settings.request_timeout
                    )
                except ConnectFailed as error:
                    # The channel limits the attempts; while it refuses them, wait here.
                    await asyncio.sleep(error.retry_in)
                else:
                    if connection.is_open:
                        return  # `connected` has sent the heartbeat
        finally:
            self._returning.discard(where)

    def _drop_others(self, wanted: frozenset[Address]) -> None:
        """Close connections to brokers that are in no route any more."""
        for where in self._known - self._engine.routes.addresses():
            log.info("broker %s is in no route any more", where, extra={"broker": str(where)})
            self._engine.drop(where)
            self._failing.pop(where, None)
            self._greetings.pop(where, None)
            self._versions.pop(where, None)
        self._known &= self._engine.routes.addresses()
        self._known |= wanted


#: The first release with delivery at any time, which also reads whole batches.
_NEW_LINE: Final = ordinal_of(Release(5, 0, 0))


class BrokerVersions:
    """Whether brokers are of RocketMQ 4, from their answers to heartbeats.

    A broker before 5.0 accepts a message with a delivery time, keeps the time as an unknown
    property, and delivers the message immediately. A timed message is therefore only sent to a
    broker that is known to be 5.0 or later.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known = engine.broker_versions

    async def any_before_5(self, brokers: Iterable[str]) -> bool:
        """Whether any of them is older than 5.0, as far as known. Raises `OrbitError`."""
        masters = {self._engine.routes.master(broker) for broker in brokers}
        if not masters & self._known.keys():
            await self._engine.heartbeat()
        return any(self._known.get(where, _NEW_LINE) < _NEW_LINE for where in masters)

    def keeps_times(self, broker: str) -> bool:
        """Whether a broker is known to deliver at any time. May be called by any thread."""
        # The master decides: in a rolling upgrade its slaves are newer for a while.
        master = self._engine.routes.brokers.get(broker, {}).get(MASTER)
        return master is not None and self._known.get(master, 0) >= _NEW_LINE

    def is_before_5(self, broker: str) -> bool | None:
        """Whether a broker is of the old line; None if it has not said so yet."""
        master = self._engine.routes.brokers.get(broker, {}).get(MASTER)
        version = None if master is None else self._known.get(master)
        return None if version is None else version < _NEW_LINE

    async def check_times(self, broker: str, timed_by: str, within: float) -> None:
        """Raises `TimesUnsupported` for a broker before 5.0.

        A broker that does not answer within the time is unavailable for this message.
        """
        if self.keeps_times(broker):
            return
        master = self._engine.routes.master(broker)
        if master not in self._known:
            try:
                async with asyncio.timeout(max(0.0, within)):
                    failures = await self._engine.heartbeat()
            except TimeoutError:
                failures = {}
            if master not in self._known:
                why = f" ({failures[master]})" if master in failures else ""
                raise BrokerUnavailable(
                    broker,
                    "its version is unknown, so it gets no timed messages" + why,
                )
        version = self._known[master]
        if version < _NEW_LINE:
            raise TimesUnsupported(timed_by, broker, release_of(version))
