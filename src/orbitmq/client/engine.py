"""One client: its connections, routes, heartbeats and timers, all on one event loop.

Producers, consumers and admins are built on an engine and may share one. All background work is a
task of the engine. A stop notifies the brokers and leaves no task, timer or socket behind.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Self, TypeAlias, TypeVar

from orbitmq.client.errors import UsedAfterFork, refused_by
from orbitmq.client.heartbeats import Heartbeats, Member
from orbitmq.client.routes import NameServers, Routes
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import NotRunning, OrbitError, SettingError, WrongUse
from orbitmq.remoting.channels import Channels
from orbitmq.remoting.connection import Answer, Connection, Prepare
from orbitmq.remoting.dispatch import Dispatcher, Result
from orbitmq.remoting.settings import Address, Refused, RequestTimedOut
from orbitmq.wire.bodies import TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, sign
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import GetRouteInfoRequest, Header
from orbitmq.wire.javajson import decode_body

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The codes of successful answers.
SUCCESS: Final = frozenset({int(ResponseCode.SUCCESS)})
_ROUTE: Final = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})

Connected: TypeAlias = Callable[[Address], None]


class _State(enum.Enum):
    NEW = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class AsyncLife:
    """Makes `start` and `stop` an asynchronous context manager."""

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Engine(AsyncLife):
    """What producers, consumers and admins of one client share."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        stable: bool = False,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """`stable` keeps the client id across restarts, which broadcasting needs."""
        if not settings.name_servers:
            raise SettingError("client.name_servers must name at least one host:port, got none")
        self.settings = settings
        self.clock: Clock = clock or SystemClock()
        self._own_chance = random.Random()  # noqa: S311  # spreads load, guards nothing
        self.chance = chance or self._own_chance
        self._is_stable = stable
        self.client_id = make_client_id(settings, stable=stable)
        self._name_servers = NameServers(settings.addresses, self.chance)
        self.routes = Routes(
            self._look_up,
            lambda: self._name_servers.addresses,
            refresh=settings.route_refresh,
            clock=self.clock,
            chance=self.chance,
            spawn=self.spawn,
        )
        self._heartbeats = Heartbeats(self)
        self._serving = Serving(Dispatcher({}))
        self._channels = Channels(
            settings.channel,
            owner=self._serving.dispatcher,
            tls=settings.tls,
            prepare=_signing(settings.credentials),
            clock=self.clock,
            chance=self.chance,
        )
        self._open: dict[Address, Connection] = {}
        self._on_connected: list[Connected] = []
        self._background = BackgroundTasks()
        self._check_process = ProcessCheck("this client", from_start=True)
        self._state = _State.NEW
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._heartbeat_timer: Periodic | None = None
        self._guard: AsyncGenerator[None] | None = None

    # ---- life

    async def start(self) -> None:
        """Bind to the running loop. No connection is made yet."""
        if self._check_process.begin() and self._state is _State.NEW:
            # Created before a fork, perhaps of several workers: each process is a client of its
            # own.
            self.client_id = make_client_id(self.settings, stable=self._is_stable)
            self._own_chance.seed()
        if self._state is _State.RUNNING:
            raise WrongUse("this client is running already; one start is enough")
        if self._state is not _State.NEW:
            raise NotRunning("this client", was_stopped=True)
        self._loop = asyncio.get_running_loop()
        self._state = _State.RUNNING
        settings = self.settings
        self.every(settings.route_refresh, self.routes.refresh, name="refresh routes")
        self._heartbeat_timer = self.every(settings.heartbeat, self._beat, name="heartbeat")
        self.routes.on_change(self._route_changed)
        self._guard = self._outlast_nothing()
        await anext(self._guard)

    async def _outlast_nothing(self) -> AsyncGenerator[None]:
        """Closes the connections when a program ends its loop without a stop.

        Loops close their asynchronous generators after all tasks are done, also after tasks that
        stop clients gracefully; a task of ours would be cancelled together with them.
        """
        try:
            yield
        finally:
            if self._state is not _State.STOPPED and self._check_process.is_same:
                self._channels.abort()
                self._has_stopped()

    def _has_stopped(self) -> None:
        self._state = _State.STOPPED
        self._stopped.set()

    async def stop(self) -> None:
        """Notify brokers, end all tasks, close connections. Bounded in time; may be repeated."""
        if self._state in (_State.NEW, _State.STOPPED):
            self._state = _State.STOPPED
            return
        self._check()
        if self._state is _State.STOPPING:
            await self._stopped.wait()
            return
        self._state = _State.STOPPING
        try:
            async with asyncio.timeout(self.settings.stop_timeout):
                await self._heartbeats.leave_all()
        except TimeoutError:
            log.info(
                "not all brokers were notified of the stop of %s",
                self.client_id,
                extra={"client": self.client_id},
            )
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Stop without notifying the brokers, which see the connections close."""
        self._state = _State.STOPPING
        try:
            await self._background.end(self.settings.stop_timeout)
            await self.routes.stop()
            await self._serving.dispatcher.stop()
            await self._channels.close()
        finally:
            # A cancelled stop must not leave resources or waiters behind.
            self._channels.abort()
            self._has_stopped()
            if self._guard is not None:
                await self._guard.aclose()

    @property
    def is_running(self) -> bool:
        return self._state is _State.RUNNING

    # ---- requests

    async def ask(
        self,
        where: Address,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # for connecting and answering together
        accept: frozenset[int] = SUCCESS,
    ) -> Command:
        """Ask a server. Raises `BrokerRefused` for a code beyond `accept`, and `RemotingError`.

        A server that is about to stop answers GO_AWAY. The request is then repeated once, on a new
        connection, where its successor may listen.
        """
        if timeout is None:
            timeout = self.settings.request_timeout
        deadline = self.clock.monotonic() + timeout
        answer = await self._ask_once(where, code, header, body, extra, timeout, deadline)
        if answer.code == ResponseCode.GO_AWAY:
            answer = await self._ask_once(where, code, header, body, extra, timeout, deadline)
        if answer.code not in accept:
            raise refused_by(answer, where, code)
        return answer

    async def _ask_once(
        self,
        where: Address,
        code: int,
        header: Header | None,
        body: Bytes,
        extra: Mapping[str, str] | None,
        timeout: float,  # noqa: ASYNC109
        deadline: float,
    ) -> Command:
        connection = await self.connection(where, max(0.0, deadline - self.clock.monotonic()))
        left = deadline - self.clock.monotonic()
        if left <= 0:
            raise RequestTimedOut(where, code, timeout)
        answer = await connection.request(code, header, body=body, extra=extra, timeout=left)
        if answer.code == ResponseCode.GO_AWAY:
            self.went_away(where, connection)
        return answer

    async def tell(
        self,
        where: Address,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Send a server a one-way request. Raises `RemotingError`."""
        connection = await self.connection(where)
        connection.notify(code, header, body=body, extra=extra)

    async def ask_name_server(
        self,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        timeout: float | None = None,  # noqa: ASYNC109  # for each of the name servers
        accept: frozenset[int] = SUCCESS,
    ) -> Command:
        """Ask any name server. Raises `BrokerRefused`, or `NoNameServer` when none answers."""
        return await self._name_servers.ask(
            lambda where: self.ask(where, code, header, body=body, timeout=timeout, accept=accept)
        )

    @property
    def name_servers(self) -> tuple[Address, ...]:
        """The name servers, beginning with the one that is asked next."""
        return self._name_servers.addresses

    # ---- connections

    async def connection(self, where: Address, timeout: float | None = None) -> Connection:  # noqa: ASYNC109  # it becomes part of the error
        """The connection to a server, opened if there is none. Raises `ConnectFailed`.

        A caller that sends requests on it must check for GO_AWAY and call `went_away`.
        """
        self._check()
        connection = self._open.get(where)
        if connection is not None and connection.is_open:
            return connection
        connection = await self._channels.get(where, timeout=timeout)
        # Several callers may have waited for it; the first one announces it.
        if self._open.get(where) is not connection and connection.is_open:
            self._connected(where, connection)
        return connection

    def open_connection(self, where: Address) -> Connection | None:
        """The connection to a server, if there is one."""
        connection = self._open.get(where)
        return connection if connection is not None and connection.is_open else None

    def on_connected(self, callback: Connected) -> Callable[[], None]:
        """Call `callback` with the address of each broker after a connection or reconnection.

        Returns a function that ends this. The heartbeat is sent before the callback.
        """
        self._on_connected.append(callback)
        return lambda: self._on_connected.remove(callback)

    def went_away(self, where: Address, connection: Connection) -> None:
        """A server answered GO_AWAY: use another connection for later requests."""
        if self._open.get(where) is connection:
            del self._open[where]
        self._channels.retire(where, connection)
        if self._state is _State.RUNNING:
            self._heartbeats.lost(where)

    def drop(self, where: Address) -> None:
        """Close the connection to a server that is no longer used."""
        self._open.pop(where, None)
        self._channels.drop(where)

    def _connected(self, where: Address, connection: Connection) -> None:
        self._open[where] = connection
        connection.on_close(lambda ended: self._lost(where, ended))
        if where in self._name_servers.addresses or self._state is not _State.RUNNING:
            return
        self._heartbeats.connected(where, connection)
        for callback in tuple(self._on_connected):
            try:
                callback(where)
            except Exception:
                log.exception(
                    "a callback failed on the connection to %s", where, extra={"broker": str(where)}
                )

    def _lost(self, where: Address, connection: Connection) -> None:
        if self._open.get(where) is not connection:
            return
        del self._open[where]
        if self._state is _State.RUNNING:
            self._heartbeats.lost(where)

    # ---- members

    def join(self, member: Member) -> None:
        """Add a producer or consumer. Brokers are notified soon; `heartbeat` waits for that."""
        self._check()
        self._heartbeats.join(member)
        if self._heartbeat_timer is not None and self._heartbeats.versions:
            self._heartbeat_timer.wake()  # further brokers are notified when they are connected

    async def leave(self, member: Member) -> None:
        """Remove a producer or consumer and notify brokers, in bounded time."""
        self._check()
        await self._heartbeats.leave(member)

    async def heartbeat(self) -> dict[Address, OrbitError]:
        """Send heartbeats to all brokers of the routes in use; returns the failures by broker."""
        self._check()
        return await self._heartbeats.beat()

    @property
    def broker_versions(self) -> Mapping[Address, int]:
        """The protocol versions that brokers answered heartbeats with."""
        return self._heartbeats.versions

    async def _beat(self) -> None:
        await self._heartbeats.beat()

    def _route_changed(self, _topic: str, _route: object) -> None:
        if self._heartbeat_timer is not None and self._heartbeats.has_strangers:
            self._heartbeat_timer.wake()

    # ---- requests of brokers

    def serve(self, code: int, handler: MemberHandler) -> Callable[[], None]:
        """Register a handler for requests of brokers; returns a function that removes it.

        The members of a client share its connections. The handlers of a code are called in turn
        until one does not return `NOT_MINE`.
        """
        return self._serving.serve(code, handler)

    # ---- background work

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine as a task until the stop. Errors are logged, unless it is awaited."""
        try:
            self._check()
            if self._state is not _State.RUNNING:
                raise NotRunning("this client", was_stopped=True)
        except OrbitError:
            coroutine.close()
            raise
        return self._background.spawn(coroutine, name)

    def every(
        self, interval: float, work: Work, *, first: float | None = None, name: str
    ) -> Periodic:
        """Call `work` repeatedly, with pauses of `interval`; `first` is the pause before."""
        periodic = Periodic(interval, work, first=first, name=name)
        periodic.start(self.spawn)
        return periodic

    # ---- inside

    async def _look_up(self, topic: str) -> TopicRouteData | None:
        # Older name servers write bare keys, which we read as well; newer ones honour this flag.
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        answer = await self.ask_name_server(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, header, accept=_ROUTE
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST or not answer.body:
            return None
        return decode_body(TopicRouteData, answer.body)

    def _check(self) -> None:
        """Refuse use while stopped, in another process, or on another loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        # No check of the process: after a fork no loop is running, or another one.
        if loop is not None and loop is self._loop and self._state is not _State.STOPPED:
            return
        self._check_process()
        if self._state is not _State.RUNNING:
            raise NotRunning("this client", was_stopped=self._state is not _State.NEW)
        raise WrongUse(
            "this client belongs to another event loop, the one that it was started on; "
            "make one for each loop, or use the sync face from other threads"
        )


def _signing(credentials: Credentials | None) -> Prepare | None:
    if credentials is None:
        return None
    return lambda request: sign(request, credentials)


# ---- background tasks


class BackgroundTasks:
    """The tasks of one client."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine until the end. Errors are logged, unless it is awaited."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self, patience: float) -> None:
        """Cancel all tasks except the caller's, and wait for them up to the timeout."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, unwilling = await asyncio.wait(tasks, timeout=patience)
            for task in unwilling:
                log.error("task %r does not end", task.get_name())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task %r failed", task.get_name(), exc_info=error)


# ---- periodic work


#: The repeated work; a number that it returns is the next pause.
Work: TypeAlias = Callable[[], Awaitable[float | None]]


class Periodic:
    """Repeated work and its timer. It never runs twice at a time; an error does not end it.

    The pause begins at the end of the work. A wake-up ends the pause. A wake-up while the work is
    running makes it run once more, because it may have read the state too early.
    """

    def __init__(self, interval: float, work: Work, *, first: float | None, name: str) -> None:
        """`first` is the pause before the first run; None: the ordinary pause."""
        self._interval = interval
        self._work = work
        self._first = interval if first is None else first
        self._name = name
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]) -> None:
        """Begin, as a task created by `spawn`."""
        self._task = spawn(self._run(), self._name)

    def wake(self) -> None:
        """Run the work now, or once more if it is running."""
        self._is_due.set()

    def stop(self) -> None:
        """End the repetition; running work is cancelled."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        pause = self._first
        while True:
            await self._until_due(pause)
            self._is_due.clear()
            pause = self._interval
            try:
                wanted = await self._work()
            except Exception:
                log.exception("%s failed, next time in %g s", self._name, pause)
            else:
                if wanted is not None:
                    pause = wanted

    async def _until_due(self, pause: float) -> None:
        if pause <= 0 or self._is_due.is_set():
            # Lets other tasks run even if there is always work to do.
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(pause):
                await self._is_due.wait()
        except TimeoutError:
            pass


# ---- requests of brokers, dispatched to the member that they are meant for


class NotMine(enum.Enum):
    """The type of `NOT_MINE`."""

    NOT_MINE = enum.auto()


#: What a handler returns for a request that is meant for another member.
NOT_MINE: Final = NotMine.NOT_MINE

_Handled: TypeAlias = Result | Coroutine[object, object, Answer | None]
MemberHandler: TypeAlias = Callable[[Connection, Command], _Handled | NotMine]


class Serving:
    """The handlers of a client's members, by request code."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._handlers: dict[int, list[MemberHandler]] = {}

    def serve(self, code: int, handler: MemberHandler) -> Callable[[], None]:
        """Add a handler; returns a function that removes it."""
        if code not in self._handlers:
            self._handlers[code] = []
            self.dispatcher.serve(code, partial(self._handle, int(code)))
        self._handlers[code].append(handler)
        return lambda: self._handlers[code].remove(handler)

    def _handle(self, code: int, connection: Connection, request: Command) -> _Handled:
        for handler in tuple(self._handlers[code]):
            result = handler(connection, request)
            if not isinstance(result, NotMine):
                return result
        raise Refused(ResponseCode.SYSTEM_ERROR, f"no member of this client handles request {code}")


# ---- identity: the client id, and the process


#: The instance of a client with a stable id: broadcasting stores its offsets under that id.
STABLE_INSTANCE: Final = "DEFAULT"

#: Addresses reserved for documentation: only looked up in the routing table, never connected to.
_ELSEWHERE: Final = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9)),
)


def make_client_id(settings: ClientSettings, *, stable: bool = False) -> str:
    """`ip@instance`, followed by `@unit` if there is one.

    A client without an instance name gets a unique one; with `stable` it is the same after a
    restart, which broadcasting needs.
    """
    instance = settings.instance or (STABLE_INSTANCE if stable else unique_instance())
    parts = [settings.client_ip or own_ip(), instance]
    if settings.unit:
        parts.append(settings.unit)
    return "@".join(parts)


def unique_instance() -> str:
    """The process and a number, in the form of Java clients.

    Java uses a time, which can be equal in two containers with process 1; ours is random.
    """
    return f"{os.getpid()}#{secrets.randbits(52)}"


def own_ip() -> str:
    """This machine's address on the way to other machines; loopback without a network."""
    for family, elsewhere in _ELSEWHERE:
        try:
            # Connecting a datagram socket sends nothing; it only selects a local address.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(elsewhere)
                host = str(probe.getsockname()[0])
        except OSError:
            continue
        return f"[{host}]" if family == socket.AF_INET6 else host
    return "127.0.0.1"


class ProcessCheck:
    """Remembers the process that an object belongs to, and refuses its use in another.

    This is the process that created it or, with `from_start`, the one that started it. Before its
    start an object has no thread and no connection that a fork would break: programs create
    clients when modules are imported, and fork their workers afterwards.
    """

    __slots__ = ("_made_in", "_what", "pid")

    def __init__(self, what: str, *, from_start: bool = False) -> None:
        self._what = what
        self._made_in = os.getpid()
        #: The process that it belongs to. Hot paths compare it themselves first.
        self.pid: int | None = None if from_start else self._made_in

    def begin(self) -> bool:
        """A start: from now on it belongs to this process. Returns whether another one created it.

        Raises `UsedAfterFork` if another process started it.
        """
        self()
        self.pid = os.getpid()
        return self.pid != self._made_in

    def __call__(self) -> None:
        """Raise `UsedAfterFork` in any other process."""
        if self.pid is not None and os.getpid() != self.pid:
            raise UsedAfterFork(self._what, self.pid, os.getpid())

    def owner(self) -> int:
        """The process that it belongs to; call it where that was just checked."""
        return self._made_in if self.pid is None else self.pid

    @property
    def is_same(self) -> bool:
        return self.pid is None or os.getpid() == self.pid
