"""The routes that a client knows, kept fresh.

Lookups of one topic share one request. A route stays in use until it is replaced, so a name server
that has lost its data or cannot be reached stops no client that knows its brokers. Routes that are
not tracked are dropped after a while.

A broker that restarts disappears from the routes and is back seconds later, long before the next
refresh. So a vanished broker is looked up every one or two seconds for a while, with one request at
a time, however many topics have lost it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from orbitmq.client.errors import BrokerUnavailable, NoNameServer, NotANameServer
from orbitmq.errors import BrokerRefused, NoRoute, NotRunning, OrbitError, SettingError
from orbitmq.logonce import LogEveryNth
from orbitmq.names import AUTO_CREATE_TOPIC, is_application_topic, most_similar
from orbitmq.remoting.settings import Address, AddressError, RemotingError, parse_address
from orbitmq.wire.bodies import BrokerData, QueueData, TopicList, TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.clock import Clock


# ---- the route of a topic: its brokers, and the queues that can be written and read
#
# Publish queues need a master, because only masters accept messages. Subscribe queues do not,
# because slaves serve readers while their master is down. A topic with an order configuration
# (`broker-a:4;broker-b:4`) has exactly the queues that it names, even if their brokers are down: a
# message whose order matters must not go to another queue meanwhile.


log = logging.getLogger(__name__)

#: The broker id of a master; slaves have others.
MASTER = 0
#: Bits of the permission of a topic.
WRITE = 2
READ = 4


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The route of one topic at one time. Equal to another when nothing has changed."""

    topic: str
    #: Addresses by broker name and broker id; the master has id 0.
    brokers: Mapping[str, Mapping[int, Address]] = field(hash=False)
    publish_queues: tuple[Queue, ...]
    subscribe_queues: tuple[Queue, ...]
    #: Whether an order configuration names the queues.
    is_ordered: bool = False
    #: Whether the topic does not exist yet and this is the route of the template topic.
    is_provisional: bool = False
    #: The cluster of each broker.
    clusters: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def addresses(self) -> frozenset[Address]:
        """The addresses of all its brokers, masters and slaves."""
        return frozenset(
            address for addresses in self.brokers.values() for address in addresses.values()
        )

    @property
    def summary(self) -> str:
        """For a log line."""
        return (
            f"{len(self.publish_queues)} queues to write, {len(self.subscribe_queues)} to read, "
            f"on {', '.join(sorted(self.brokers)) or 'no broker'}"
        )


def route_of(topic: str, data: TopicRouteData) -> TopicRoute:
    """The route in the answer of a name server."""
    brokers = {each.broker_name: _addresses(each) for each in data.broker_datas}
    # Java sorts by broker, and all members of a group must see the same order.
    queue_datas = sorted(data.queue_datas, key=lambda each: each.broker_name)
    order = data.order_topic_conf
    return TopicRoute(
        topic,
        MappingProxyType(brokers),
        _ordered_queues(topic, order) if order else _publish_queues(topic, queue_datas, brokers),
        _subscribe_queues(topic, queue_datas),
        is_ordered=bool(order),
        clusters=MappingProxyType(
            {each.broker_name: each.cluster for each in data.broker_datas if each.cluster}
        ),
    )


def provisional_route(topic: str, template: TopicRouteData, most_queues: int) -> TopicRoute:
    """The route of a topic that does not exist yet: the first send creates it from the template."""
    brokers = {each.broker_name: _addresses(each) for each in template.broker_datas}
    queue_datas = sorted(template.queue_datas, key=lambda each: each.broker_name)
    queues = tuple(
        Queue(topic, data.broker_name, place)
        for data in queue_datas
        if data.perm & WRITE and MASTER in brokers.get(data.broker_name, ())
        for place in range(min(most_queues, data.read_queue_nums))
    )
    return TopicRoute(topic, MappingProxyType(brokers), queues, (), is_provisional=True)


def _addresses(broker: BrokerData) -> Mapping[int, Address]:
    found = {}
    for number, text in sorted(broker.broker_addrs.items()):
        try:
            found[number] = parse_address(text)
        except AddressError as error:
            log.warning("broker %s has no usable address: %s", broker.broker_name, error)
    return MappingProxyType(found)


def _publish_queues(
    topic: str, datas: list[QueueData], brokers: Mapping[str, Mapping[int, Address]]
) -> tuple[Queue, ...]:
    return tuple(
        Queue(topic, data.broker_name, place)
        for data in datas
        if data.perm & WRITE and MASTER in brokers.get(data.broker_name, ())
        for place in range(data.write_queue_nums)
    )


def _subscribe_queues(topic: str, datas: list[QueueData]) -> tuple[Queue, ...]:
    return tuple(
        Queue(topic, data.broker_name, place)
        for data in datas
        if data.perm & READ
        for place in range(data.read_queue_nums)
    )


def _ordered_queues(topic: str, order: str) -> tuple[Queue, ...]:
    queues: list[Queue] = []
    for part in order.split(";"):
        broker, colon, count = part.strip().partition(":")
        if not broker:
            continue
        if not colon or not count.strip().isdecimal():
            log.warning("order configuration of %s: %r is not broker:count", topic, part)
            continue
        queues += [Queue(topic, broker, place) for place in range(int(count))]
    return tuple(queues)


#: How often a vanished broker is looked up at most; jitter makes the pause up to twice as long.
RETURN_PAUSE: Final = 1.0
#: For how long it is looked up.
RETURN_PATIENCE: Final = 60.0

#: Called with a topic and its new route.
Changed: TypeAlias = Callable[[str, TopicRoute], None]
#: Requests a route from a name server; None when it knows no such topic.
Lookup: TypeAlias = "Callable[[str], Awaitable[TopicRouteData | None]]"
#: Runs a coroutine in the background, under a name.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None], str], object]

#: Queues per broker of a topic that the first send creates.
DEFAULT_QUEUES: Final = 4
#: How long the template's route is used for a new topic, which exists after the first send.
PROVISIONAL_LIFE: Final = 1.0


#: A broker's name and id.
_Place: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Known:
    route: TopicRoute
    #: The time of the request, by the clock's `monotonic`.
    at: float


class Routes:
    """Routes by topic, and the brokers that they name."""

    def __init__(
        self,
        lookup: Lookup,
        name_servers: Callable[[], tuple[Address, ...]],
        *,
        refresh: float,
        clock: Clock,
        chance: random.Random,
        spawn: Spawn,
    ) -> None:
        """`spawn` runs the search for vanished brokers."""
        self._lookup = lookup
        self._name_servers = name_servers
        self._life = refresh
        self._clock = clock
        self._chance = chance
        self._known: dict[str, _Known] = {}
        self._brokers: dict[str, Mapping[int, Address]] = {}
        self._tracked: Counter[str] = Counter()
        self._asking: dict[str, asyncio.Task[TopicRouteData | OrbitError | None]] = {}
        self._on_change: list[Changed] = []
        self._failures = LogEveryNth()
        self._spawn = spawn
        #: Vanished brokers and the topics that have lost them; the next one to look up comes first.
        self._vanished: dict[_Place, dict[str, None]] = {}

    # ---- lookups

    async def get(self, topic: str, *, refresh: bool = False) -> TopicRoute:
        """The route of a topic. Raises `NoRoute`, or `NoNameServer` when none answers.

        With `refresh` it is requested even if the route is known.
        """
        known = None if refresh else self.known(topic)
        if known is not None and not known.is_provisional:
            return known
        data = await self._ask(topic)
        if data is None:
            raise NoRoute(topic, self._name_servers())
        return self._apply(route_of(topic, data))

    async def publish_route(
        self, topic: str, *, default_queues: int = DEFAULT_QUEUES
    ) -> TopicRoute:
        """The route of a topic, or that of the template when there is no such topic yet."""
        known = self.known(topic)
        if known is not None:
            return known
        try:
            return await self.get(topic)
        except NoRoute:
            if topic == AUTO_CREATE_TOPIC:
                raise
            template = await self._ask(AUTO_CREATE_TOPIC)
            known = self.known(topic)
            if known is not None and not known.is_provisional:
                return known  # its own route arrived during the request for the template's
            if template is None:
                raise
        return self._apply(provisional_route(topic, template, default_queues))

    async def subscribe_queues(self, topic: str) -> tuple[Queue, ...]:
        """Queues to read from. Raises `NoRoute` as `get` does."""
        return (await self.get(topic)).subscribe_queues

    async def broker_of(self, topic: str) -> Address:
        """Any broker of a topic, a master before a slave."""
        route = await self.get(topic)
        brokers = [addresses for addresses in route.brokers.values() if addresses]
        if not brokers:
            raise BrokerUnavailable(f"of topic {topic}", "the route names no address")
        addresses = self._chance.choice(brokers)
        return addresses.get(MASTER) or self._chance.choice(list(addresses.values()))

    # ---- known routes

    def known(self, topic: str) -> TopicRoute | None:
        """The known route of a topic, without a request; None when it has to be requested."""
        known = self._known.get(topic)
        if known is None:
            return None
        if known.route.is_provisional:
            is_fresh = self._age(known) < PROVISIONAL_LIFE
        else:
            is_fresh = topic in self._tracked or self._age(known) < self._life
        return known.route if is_fresh else None

    @property
    def brokers(self) -> Mapping[str, Mapping[int, Address]]:
        """Addresses of all brokers of the routes in use, by broker name and broker id."""
        return self._brokers

    def addresses(self, *, slaves: bool = True) -> frozenset[Address]:
        """The addresses of all brokers of the routes in use, with or without slaves."""
        return frozenset(
            address
            for addresses in self._brokers.values()
            for number, address in addresses.items()
            if slaves or number == MASTER
        )

    def master(self, broker: str) -> Address:
        """The address to send to. Raises `BrokerUnavailable`."""
        address = self._brokers.get(broker, {}).get(MASTER)
        if address is None:
            raise BrokerUnavailable(
                broker, "it has no master now" if broker in self._brokers else "no route names it"
            )
        return address

    def address(
        self, broker: str, *, wanted: int = MASTER, only: bool = False
    ) -> tuple[Address, int]:
        """The address to read from, and its broker id. Raises `BrokerUnavailable`.

        The wanted broker id; else another slave, if a slave was wanted; else any, unless `only`.
        """
        addresses = self._brokers.get(broker, {})
        choices = (wanted, wanted + 1) if wanted != MASTER else (wanted,)
        for number in choices:
            if number in addresses:
                return addresses[number], number
        if addresses and not only:
            number = min(addresses)
            return addresses[number], number
        role = "master" if wanted == MASTER else f"broker id {wanted}"
        raise BrokerUnavailable(broker, f"it has no {role} now" if addresses else "no route has it")

    # ---- refreshing

    def track(self, topic: str) -> None:
        """Keep the route of a topic fresh until `untrack` was called as often as this."""
        self._tracked[topic] += 1

    def untrack(self, topic: str) -> None:
        """One user less of a topic's route."""
        self._tracked[topic] -= 1
        if self._tracked[topic] <= 0:
            del self._tracked[topic]

    def on_change(self, callback: Changed) -> Callable[[], None]:
        """Call `callback` with each new or changed route; returns a function that ends this."""
        self._on_change.append(callback)
        return lambda: self._on_change.remove(callback)

    async def refresh(self) -> None:
        """Refresh all tracked routes. A route that cannot be fetched stays in use."""
        self._forget_unused()
        topics = tuple(self._tracked)
        results = await asyncio.gather(*map(self._refresh, topics))
        failed = [(topic, error) for topic, error in zip(topics, results, strict=True) if error]
        for topic, error in failed[:1]:
            if count := self._failures.note(type(error).__name__):
                log.warning(
                    "%d of %d routes stay as they were, %s for instance (%d times so far): %s",
                    len(failed),
                    len(topics),
                    topic,
                    count,
                    error,
                )

    async def _refresh(self, topic: str) -> OrbitError | None:
        try:
            await self.get(topic, refresh=True)
        except NoRoute as error:
            # No caller waits for a topic that does not exist yet.
            known = self._known.get(topic)
            return error if known is not None and not known.route.is_provisional else None
        except OrbitError as error:
            return error
        return None

    def _forget_unused(self) -> None:
        for topic, known in tuple(self._known.items()):
            if topic not in self._tracked and self._age(known) >= self._life:
                del self._known[topic]
        self._collect_brokers()

    # ---- inside

    async def _ask(self, topic: str) -> TopicRouteData | None:
        task = self._asking.get(topic)
        if task is None:
            task = asyncio.get_running_loop().create_task(
                self._outcome(topic), name=f"route of {topic}"
            )
            self._asking[topic] = task
            task.add_done_callback(lambda _: self._asking.pop(topic, None))
        # A caller that stops waiting must not cancel the request for the others.
        await asyncio.wait((task,))
        if task.cancelled():
            raise NotRunning("this client", was_stopped=True)
        outcome = task.result()
        if isinstance(outcome, OrbitError):
            raise copy.copy(outcome)  # a copy each: tracebacks are added to it
        return outcome

    async def _outcome(self, topic: str) -> TopicRouteData | OrbitError | None:
        try:
            return await self._lookup(topic)
        except OrbitError as error:
            return error

    def _apply(self, route: TopicRoute) -> TopicRoute:
        before = self._known.get(route.topic)
        now = self._clock.monotonic()
        if before is not None and before.route == route:
            # The same object again, so that caches keyed by a route stay valid.
            self._known[route.topic] = _Known(before.route, now)
            return before.route
        self._known[route.topic] = _Known(route, now)
        self._brokers.update(route.brokers)
        if route.is_provisional:
            return route  # the topic does not exist: it has no readers
        if before is not None:
            self._miss(route.topic, _places(before.route) - _places(route))
        log.info(
            "route of %s changed: %s",
            route.topic,
            route.summary,
            extra={"topic": route.topic, "route": route.summary},
        )
        for callback in tuple(self._on_change):
            try:
                callback(route.topic, route)
            except Exception:
                log.exception(
                    "a callback failed on the route of %s",
                    route.topic,
                    extra={"topic": route.topic},
                )
        return route

    def _miss(self, topic: str, vanished: frozenset[_Place]) -> None:
        """Look up brokers that have disappeared from a topic's route."""
        if topic not in self._tracked:
            return
        for place in sorted(vanished):
            if place not in self._vanished:
                self._vanished[place] = {}
                try:
                    self._spawn(self._look_for(place), f"return of {place[0]}")
                except NotRunning:
                    del self._vanished[place]  # about to stop
                    return
            self._vanished[place][topic] = None

    async def _look_for(self, place: _Place) -> None:
        """Look up the routes that have lost a broker, one by one, until one has it again."""
        until = self._clock.monotonic() + RETURN_PATIENCE
        topics = self._vanished[place]
        try:
            while topics and self._clock.monotonic() < until:
                await asyncio.sleep(RETURN_PAUSE * (1 + self._chance.random()))
                topic = next(iter(topics))
                del topics[topic]
                if topic not in self._tracked:
                    continue
                await self._refresh(topic)
                known = self._known.get(topic)
                if known is None or place not in _places(known.route):
                    topics[topic] = None
                    continue
                others = tuple(topics)
                topics.clear()
                await asyncio.gather(*map(self._refresh, others))
                # It may have disappeared again meanwhile.
                until = self._clock.monotonic() + RETURN_PATIENCE
        finally:
            del self._vanished[place]

    def _collect_brokers(self) -> None:
        """Drop brokers that no route names; keep the most recent of several addresses."""
        found: dict[str, Mapping[int, Address]] = {}
        for known in sorted(self._known.values(), key=lambda known: known.at):
            found.update(known.route.brokers)
        self._brokers = found

    def _age(self, known: _Known) -> float:
        return self._clock.monotonic() - known.at

    async def stop(self) -> None:
        """Stop all lookups."""
        tasks = tuple(self._asking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _places(route: TopicRoute) -> frozenset[_Place]:
    return frozenset((name, number) for name, found in route.brokers.items() for number in found)


# ---- name servers: each has all routes, so they are tried one after the other
#
# The one that answered last is asked first. Each client draws a random order; otherwise all clients
# would use the first one of the list.


#: Refusals caused by the state of one name server, not by the request: a name server that has just
#: started, for instance, refuses until brokers had the time to register.
NOT_NOW: Final = frozenset(
    {
        int(ResponseCode.SYSTEM_ERROR),
        int(ResponseCode.SYSTEM_BUSY),
        int(ResponseCode.SERVICE_NOT_AVAILABLE),
        int(ResponseCode.GO_AWAY),
    }
)

#: A request that every name server answers, in any version.
_BASIC: Final = frozenset(
    {int(RequestCode.GET_ROUTEINFO_BY_TOPIC), int(RequestCode.GET_BROKER_CLUSTER_INFO)}
)

#: Sends a request to one name server.
Ask: TypeAlias = Callable[[Address], Awaitable[Command]]


class NameServers:
    """The name servers of a cluster, and the order in which they are asked."""

    def __init__(self, addresses: Sequence[Address], chance: random.Random) -> None:
        self._order = list(addresses)
        chance.shuffle(self._order)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All of them, beginning with the one that is asked next."""
        return tuple(self._order)

    async def ask(self, ask: Ask) -> Command:
        """The first answer of any name server. Raises `NoNameServer`, or the refusal."""
        tried: list[tuple[Address, str]] = []
        refusal: BrokerRefused | None = None
        for address in self.addresses:
            try:
                answer = await ask(address)
            except (RemotingError, BrokerRefused) as error:
                if isinstance(error, BrokerRefused):
                    if _shows_no_name_server(error):
                        raise NotANameServer(error) from error
                    if error.code not in NOT_NOW:
                        raise
                    refusal = error
                tried.append((address, str(error)))
                self._put_last(address)
                continue
            if tried:
                log.warning("name server %s is used: %s", address, _reasons(tried))
            return answer
        raise refusal or NoNameServer(tried)

    def _put_last(self, address: Address) -> None:
        # Two callers may find the same one unreachable: the second one changes nothing.
        if self._order[0] == address:
            self._order.append(self._order.pop(0))


def _shows_no_name_server(refused: BrokerRefused) -> bool:
    return refused.request_code in _BASIC and refused.code in (
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        # Name servers need no permission for these; a broker with accounts does.
        ResponseCode.NO_PERMISSION,
    )


def _reasons(tried: list[tuple[Address, str]]) -> str:
    return "; ".join(reason for _, reason in tried)


# ---- queues: the unit of order, of ownership and of progress


@dataclass(frozen=True, slots=True, order=True)
class Queue:
    """One queue, named as brokers know it. Sorts as Java clients sort queues."""

    topic: str
    broker: str
    id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker}:{self.id}"

    @property
    def java_text(self) -> str:
        """The text of Java's `MessageQueue.toString`, which consistent hashing is computed on."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker}, queueId={self.id}]"


def each_queue(given: Iterable[Queue | Iterable[Queue]]) -> tuple[Queue, ...]:
    """Queues given as arguments, or as one list. Raises `SettingError`."""
    found: list[Queue] = []
    for part in given:
        several = [part] if isinstance(part, Queue) or not isinstance(part, Iterable) else part
        for queue in several:
            if not isinstance(queue, Queue):
                raise SettingError(f"a queue must be a Queue(topic, broker, id), got {queue!r}")
            found.append(queue)
    return tuple(found)


def queues_by_broker(queues: Iterable[Queue]) -> dict[str, list[Queue]]:
    """The queues of each broker, in their order."""
    found: dict[str, list[Queue]] = {}
    for queue in queues:
        found.setdefault(queue.broker, []).append(queue)
    return found


class AsksNameServers(Protocol):
    """A client or an admin that can ask name servers."""

    async def ask_name_server(self, code: int, /) -> Command: ...


async def similar_topic(asking: AsksNameServers, topic: str) -> str | None:
    """The existing topic most similar to this one; None without one, or without an answer."""
    if not is_application_topic(topic):
        return None
    try:
        answer = await asking.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        known = decode_body(TopicList, answer.body).topic_list
    except OrbitError:
        return None  # a suggestion is not worth another error
    # A cluster may have ten thousand topics: comparing them would block the loop.
    try:
        return await asyncio.to_thread(most_similar, topic, known)
    except RuntimeError:  # the interpreter ends and starts no threads any more
        return None
