"""The commands that start servers, and the one that shows their settings."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import ssl
import string
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import WILDCARDS, BrokerSettings
from orbitmq.cli import settings as options
from orbitmq.cli.application import plain_command, section
from orbitmq.cli.main import (
    CommandError,
    Exposed,
    Misused,
    NotStopped,
    PortTaken,
    ProcessEnded,
    SettingRefused,
)
from orbitmq.cli.settings import (
    FILE_VARIABLE,
    USERS_VARIABLE,
    Configuration,
    LogLevel,
    Loop,
    SettingRecord,
    set_up_logging,
    show,
)
from orbitmq.client.settings import ClientSettings
from orbitmq.client.signals import unless
from orbitmq.cluster import Cluster
from orbitmq.errors import install_command
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import Address, ListenFailed
from orbitmq.remoting.tls import ServerTls, TlsMode
from orbitmq.store.files import raise_descriptor_limit

if TYPE_CHECKING:
    from orbitmq.cli.console import ConsoleService


app = section()
config_app = section()
app.add_typer(config_app, name="config")


log = logging.getLogger(__name__)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)


@plain_command(
    app,
    "up",
    examples=(
        "orbitmq up",
        "orbitmq up --data /var/lib/orbitmq --brokers 2",
        "orbitmq up --console",
        "orbitmq up --namesrv-port 0 --broker-port 0 --json",
        "orbitmq up --set broker.store.flush.policy=sync",
    ),
)
def up(
    flags: options.ServerFlags,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FOLDER",
            help="The folder for all data; ./orbitmq-data by default.",
        ),
    ] = None,
    brokers: Annotated[
        int | None,
        typer.Option(
            "--brokers",
            min=1,
            max=26,
            help="The number of brokers, 1 by default; several run in a process each.",
        ),
    ] = None,
    namesrv_port: Annotated[
        int | None,
        typer.Option(
            "--namesrv-port",
            min=0,
            max=options.LAST_PORT,
            help="9876 by default; 0: any free one.",
        ),
    ] = None,
    broker_port: Annotated[
        int | None,
        typer.Option(
            "--broker-port",
            min=0,
            max=options.LAST_PORT,
            help="10911 by default, each further broker 10 higher; 0: any free one.",
        ),
    ] = None,
    http_port: options.HttpPort = None,
    console: Annotated[
        bool,
        typer.Option(
            "--console",
            help="Also start a read-only web console; it keeps a history of seven days in FOLDER.",
        ),
    ] = False,
    console_port: Annotated[
        int,
        typer.Option(
            "--console-port",
            min=0,
            max=options.LAST_PORT,
            help="The console's port; 0: any free one.",
        ),
    ] = 8090,
    users: options.Users = None,
    mask: options.Mask = None,
    alerts: options.AlertsFile = None,
    advertise: options.Advertise = None,
    stop_with_input: options.StopWithInput = False,
) -> None:
    """Start a name server and brokers, for development on one machine."""
    if not console and (mask or alerts or (users and USERS_VARIABLE not in os.environ)):
        raise Misused("--users, --mask and --alerts are for the console: give --console as well")
    configuration = flags.configuration(
        {
            "--data": ("up.data", data),
            "--brokers": ("up.brokers", brokers),
            "--host": ("broker.host+namesrv.host", flags.host),
            "--namesrv-port": ("namesrv.port", namesrv_port),
            "--broker-port": ("broker.port", broker_port),
            "--http-port": ("broker.http.port", http_port),
            "--advertise": ("broker.advertised", advertise),
        }
    )
    warnings = check_cluster(
        configuration.name_server, configuration.broker, is_accepted=configuration.run.insecure
    )
    set_up_logging(configuration.log, LogLevel.WARNING)
    _warn(warnings)
    service = cluster_service(configuration)
    if console:
        service = WithConsole(
            service,
            console_port,
            client_tls(configuration),
            history=configuration.up.data / "console.sqlite",
            users=users,
            masked=tuple(mask or ()),
            alerts=alerts,
        )
    serve(
        service,
        configuration.run.loop,
        announcing(as_json=flags.as_json),
        stops_with_input=stop_with_input,
    )


@plain_command(
    app,
    "broker",
    examples=(
        "orbitmq broker --name-server 127.0.0.1:9876 --data /var/lib/orbitmq/broker-a",
        "orbitmq broker --name broker-b --port 10921 --name-server ns1:9876 --name-server ns2:9876",
    ),
)
def broker(
    flags: options.ServerFlags,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FOLDER",
            help="The folder for its data; ./orbitmq-data/NAME by default.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The broker's name in routes; broker-a by default.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The cluster's name; DefaultCluster by default.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=options.LAST_PORT, help="10911 by default; 0: any free one."
        ),
    ] = None,
    name_server: Annotated[
        list[str] | None,
        typer.Option(
            "--name-server",
            "-n",
            metavar="HOST:PORT",
            help="A name server to register with; may be repeated. None by default.",
        ),
    ] = None,
    http_port: options.HttpPort = None,
    advertise: options.Advertise = None,
    stop_with_input: options.StopWithInput = False,
) -> None:
    """Start one broker."""
    configuration = flags.configuration(
        {
            "--data": ("broker.root", data),
            "--name": ("broker.name", name),
            "--cluster": ("broker.cluster", cluster),
            "--host": ("broker.host", flags.host),
            "--port": ("broker.port", port),
            "--name-server": ("broker.name_servers", tuple(name_server) if name_server else None),
            "--http-port": ("broker.http.port", http_port),
            "--advertise": ("broker.advertised", advertise),
        }
    )
    settings = configuration.broker
    if not configuration.is_given("broker.root"):
        settings = replace(settings, root=configuration.up.data / settings.name)
    warnings = check_broker(settings, is_accepted=configuration.run.insecure)
    set_up_logging(configuration.log)
    _warn(warnings)
    serve(
        BrokerService(settings),
        configuration.run.loop,
        announcing(as_json=flags.as_json),
        stops_with_input=stop_with_input,
    )


@plain_command(
    app,
    "namesrv",
    examples=(
        "orbitmq namesrv",
        "orbitmq namesrv --port 9877 --data /var/lib/orbitmq/namesrv --log-format json",
    ),
)
def namesrv(
    flags: options.ServerFlags,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FOLDER",
            help="The folder for its configuration; by default none is kept.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=options.LAST_PORT, help="9876 by default; 0: any free one."
        ),
    ] = None,
) -> None:
    """Start a name server."""
    configuration = flags.configuration(
        {
            "--data": ("namesrv.home", data),
            "--host": ("namesrv.host", flags.host),
            "--port": ("namesrv.port", port),
        }
    )
    settings = configuration.name_server
    warnings = check_name_server(settings, is_accepted=configuration.run.insecure)
    set_up_logging(configuration.log)
    _warn(warnings)
    service = NameServerService(settings)
    serve(service, configuration.run.loop, announcing(as_json=flags.as_json))


@plain_command(
    config_app,
    "show",
    examples=(
        "orbitmq config show --config orbitmq.toml",
        "orbitmq config show broker.store.flush --describe",
        "ORBITMQ_BROKER_PORT=0 orbitmq config show --changed --json | jq -r .setting",
    ),
    prints=SettingRecord,
)
def config_show(
    under: Annotated[
        str,
        typer.Argument(
            metavar="[SETTING]", help="A setting, or a group of settings; by default all."
        ),
    ] = "",
    describe: Annotated[
        bool,
        typer.Option(
            "--describe", "-d", help="Print the meaning and the allowed values of each setting."
        ),
    ] = False,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Only settings whose value is not the default."),
    ] = False,
    config: options.ConfigFile = None,
    words: options.Words = None,
    as_json: options.AsJson = False,
) -> None:
    """Print settings, their values and the origins of the values; secrets are hidden."""
    configuration = options.configured(config, words, {})
    lines = show(
        configuration,
        under=under,
        only_changed=changed,
        with_descriptions=describe,
        as_json=as_json,
    )
    for line in lines:
        typer.echo(line)


#: The time limit for a broker process from its start to listening, recovery included.
_START_DEADLINE = 120.0
#: After this, a broker counts as ready although no name server has registered it.
_INTRODUCTION = 3.0
#: The time limit for a graceful shutdown; then a broker process is killed.
_STOP_DEADLINE = 30.0


class Service:
    """What `serve` starts, announces and stops."""

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    def listening(self) -> Sequence[Listening]:
        raise NotImplementedError

    async def until_failed(self) -> CommandError:
        """Returns when a part of it has ended unexpectedly; by default never."""
        waits: asyncio.Future[CommandError] = asyncio.get_running_loop().create_future()
        return await waits

    def kill(self) -> None:
        """Kill child processes, if it has any."""


class NameServerService(Service):
    """A name server in this process."""

    def __init__(self, settings: NameServerSettings) -> None:
        self._server = NameServer(settings)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    def listening(self) -> Sequence[Listening]:
        return (_name_server(self._server),)


class BrokerService(Service):
    """A broker in this process."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._broker = Broker(settings)

    async def start(self) -> None:
        await self._broker.start()
        # Clients that start when this is ready must find it.
        await self._broker.parts.registration.until_tried(_INTRODUCTION)
        if not self._settings.name_servers:
            log.warning("this broker registers with no name server; clients must know its address")

    async def stop(self) -> None:
        await self._broker.stop()

    def listening(self) -> Sequence[Listening]:
        return _broker(self._settings, self._broker)


class ClusterService(Service):
    """A name server and a broker in this process."""

    def __init__(self, name_server: NameServerSettings, broker: BrokerSettings) -> None:
        self._name_server = name_server
        self._settings = broker
        self._cluster = Cluster(name_server, (broker,))

    async def start(self) -> None:
        try:
            await self._cluster.start()
        except ListenFailed as error:
            raise PortTaken(error, self._option(error.address)) from error

    async def stop(self) -> None:
        await self._cluster.stop()

    def _option(self, address: Address) -> str:
        """The flag that chooses an address."""
        if address.port == self._name_server.server.port:
            return "--namesrv-port"
        return "--http-port" if address.port == self._settings.http.port else "--broker-port"

    def listening(self) -> Sequence[Listening]:
        (broker,) = self._cluster.brokers
        return (_name_server(self._cluster.name_server), *_broker(self._settings, broker))


class ProcessesService(Service):
    """A name server in this process, and a process for each broker."""

    def __init__(
        self,
        name_server: NameServerSettings,
        brokers: Mapping[str, Mapping[str, str]],
        name_servers: Sequence[str] = (),
    ) -> None:
        """`brokers` are names, each with the environment that holds its settings.

        `name_servers` are further name servers that the brokers register with.
        """
        self._cluster = Cluster(name_server)
        self._others = tuple(name_servers)
        self._processes = [
            ServerProcess(name, {**os.environ, **each}) for name, each in brokers.items()
        ]

    async def start(self) -> None:
        try:
            await self._cluster.start()
        except ListenFailed as error:
            raise PortTaken(error, "--namesrv-port") from error
        name_servers = ",".join((str(self._cluster.name_server_address), *self._others))
        try:
            await _all(
                process.start("broker", "--name-server", name_servers)
                for process in self._processes
            )
            await self._cluster.until_registered(process.name for process in self._processes)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        try:
            await _all(process.stop() for process in self._processes)
        finally:
            await self._cluster.stop()

    def listening(self) -> Sequence[Listening]:
        brokers = (each for process in self._processes for each in process.listening)
        return (_name_server(self._cluster.name_server), *brokers)

    async def until_failed(self) -> CommandError:
        """Log each broker that ends; the others go on. Returns when none is left."""
        left = len(self._processes)
        for wait in asyncio.as_completed([process.until_ended() for process in self._processes]):
            ended, left = await wait, left - 1
            if left:
                log.error(
                    "%s ended unexpectedly (%s); the other brokers go on; to have it back, press "
                    "Ctrl-C and run the same command again, which recovers its messages",
                    *(ended.name, ended.how),
                )
        return CommandError(f"{ended.name} ended unexpectedly ({ended.how}); no broker is left")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


class ServerProcess:
    """A server as a child process, which reports its addresses on standard output.

    It stops when its standard input ends, so that it never outlives this process.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.listening: list[Listening] = []
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *words: str) -> None:
        """Start it and wait until it listens. Raises `CommandError`."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orbitmq.cli", *words, "--json", "--stop-with-input"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            # Ctrl-C goes to the parent, which stops the children.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_DEADLINE):
                await self._listen(process)
        except TimeoutError:
            raise CommandError(
                f"{self.name} was not ready within {_START_DEADLINE:g} s; everything was stopped"
            ) from None

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None:
            async for line in process.stdout:
                event = json.loads(line)
                if event.pop("event") == "ready":
                    return
                self.listening.append(Listening(**event))
        raise ProcessEnded(self.name, await process.wait())

    async def stop(self) -> None:
        """Raises `NotStopped` when it did not shut down gracefully."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_DEADLINE):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
        if process.returncode:
            raise NotStopped(self.name, process.returncode)

    async def until_ended(self) -> ProcessEnded:
        """How it ended, after it was started."""
        return ProcessEnded(self.name, await self._process.wait() if self._process else 0)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _name_server(server: NameServer) -> Listening:
    return Listening("name server", "name server", str(server.address))


def _broker(settings: BrokerSettings, broker: Broker) -> Sequence[Listening]:
    found = [Listening("broker", settings.name, str(broker.address), str(settings.root))]
    for role, port in (("second port", broker.vip_address), ("replication", broker.ha_address)):
        if port is not None:
            address = str(Address(broker.address.host, port.port))
            found.append(Listening(role, f"{settings.name} {role}", address))
    if broker.http_address is not None:
        address = f"http://{broker.http_address}"
        found.append(Listening("metrics", f"{settings.name} metrics", address))
    return found


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, also when one fails, before any is stopped."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


# Running a service. The first Ctrl-C or SIGTERM shuts it down gracefully: requests are answered,
# everything is saved. During the start it cancels the start, and recovery is repeated next time. A
# second signal kills the process; acknowledged messages are as safe as after a crash.


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Ended by Ctrl-C (128 + SIGINT).
_HURRIED = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class Listening:
    """An address that accepts connections now."""

    role: str  #: `name server`, `broker`, `second port`, `replication` or `metrics`
    name: str
    address: str
    folder: str | None = None


def serve(
    service: Service,
    loop: Loop,
    announce: Callable[[Sequence[Listening]], None],
    *,
    stops_with_input: bool = False,
    limit: float | None = None,
) -> None:
    """Run until a signal, `limit` seconds at most; raises the failure that ended it otherwise."""
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=_factory(loop)) as runner:
        runner.run(_serve(service, announce, stops_with_input=stops_with_input, limit=limit))


async def _serve(
    service: Service,
    announce: Callable[[Sequence[Listening]], None],
    *,
    stops_with_input: bool,
    limit: float | None,
) -> None:
    loop = asyncio.get_running_loop()
    wanted = asyncio.Event()
    if limit is not None:
        loop.call_later(limit, wanted.set)

    def stop() -> None:
        if wanted.is_set():
            _hurry(service)
        wanted.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    if stops_with_input:
        _watch_input(loop, wanted.set)
    if not await _started(wanted, service):
        log.info("stopped while starting")
        return
    try:
        if not wanted.is_set():
            announce(service.listening())
        failure = await unless(wanted, service.until_failed())
    finally:
        await service.stop()
    if failure is not None:
        raise failure


async def _started(wanted: asyncio.Event, service: Service) -> bool:
    """Start it; False if a signal came first. Raises what the start raises."""
    stop = asyncio.create_task(wanted.wait())
    start = asyncio.create_task(service.start())
    await asyncio.wait((stop, start), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.wait((start,))
    stop.cancel()
    if start.cancelled():
        return False
    start.result()
    return True


def _watch_input(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    """Stop when standard input ends, which the parent process holds open."""

    def look() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended()

    loop.add_reader(0, look)


def _hurry(service: Service) -> NoReturn:
    service.kill()
    sys.stderr.write("orbitmq: ended without saving; the next start repairs what is open\n")
    sys.stderr.flush()
    os._exit(_HURRIED)


def _factory(loop: Loop) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop is Loop.ASYNCIO:
        return asyncio.new_event_loop
    try:
        import uvloop  # noqa: PLC0415  # an extra
    except ImportError:
        if loop is Loop.UVLOOP:
            raise CommandError(
                f"run.loop is uvloop, which is not installed; {install_command('speed')}"
            ) from None
        return asyncio.new_event_loop
    return uvloop.new_event_loop


#: Between the ports of two brokers; Apache's brokers use the neighbouring ports, too.
PORT_STEP = 10


def cluster_service(configuration: Configuration) -> Service:
    """One process for everything, or one for each of several brokers."""
    configuration = _with_outward_tls(configuration)
    name_server = _embedded_name_server(configuration)
    count = configuration.up.brokers
    _check_ports(configuration, count)
    if count == 1:
        return ClusterService(name_server, _only_broker(configuration))
    for path in ("broker.root", "broker.name", "broker.broker_id"):
        if configuration.is_given(path):
            raise SettingRefused(
                f"{path} is for one broker, but up.brokers is {count}; names and folders are made "
                "from up.data then"
            )
    return ProcessesService(
        name_server,
        {name: _environment(configuration, name, place) for place, name in _names(count)},
        configuration.broker.name_servers,
    )


def client_tls(configuration: Configuration) -> ssl.SSLContext | None:
    """The TLS settings of clients in this process; None: without TLS."""
    outward = _with_outward_tls(configuration).broker.outward.tls
    if not _enforces(configuration.name_server.server.tls) or outward is None:
        return None
    context = outward.context()
    own = configuration.broker.server.tls
    if own is not None and outward.verify:
        context.load_verify_locations(own.certificate)
    return context


def _with_outward_tls(configuration: Configuration) -> Configuration:
    """Make brokers speak TLS to their name server if it requires TLS.

    They trust its certificate only, whatever host name it has.
    """
    tls = configuration.name_server.server.tls
    if tls is None or not _enforces(tls) or configuration.broker.outward.tls is not None:
        return configuration
    wanted = "set broker.outward.tls.authority to the certificates that brokers are to trust"
    if tls.client_authority is not None:
        raise SettingRefused(
            "namesrv.tls.mode is enforcing and namesrv.tls.client_authority asks brokers for a "
            f"certificate as well; {wanted}, and broker.outward.tls.certificate and "
            "broker.outward.tls.key to their own"
        )
    if configuration.broker.name_servers:
        raise SettingRefused(
            "namesrv.tls.mode is enforcing, and broker.name_servers names others that brokers "
            f"speak to in the same way; {wanted}"
        )
    return configuration.with_values(
        {
            "broker.outward.tls.authority": tls.certificate,
            "broker.outward.tls.verify_host": False,
        }
    )


def _enforces(tls: ServerTls | None) -> bool:
    return tls is not None and tls.mode is TlsMode.ENFORCING


def _names(count: int) -> list[tuple[int, str]]:
    return [(place, f"broker-{string.ascii_lowercase[place]}") for place in range(count)]


def _check_ports(configuration: Configuration, count: int) -> None:
    """Refuse a broker's port that is the name server's."""
    names = configuration.name_server.server
    brokers = configuration.broker.server
    ports = {_port(brokers.port, place) for place in range(count)}
    if names.port and names.port in ports:
        raise SettingRefused(
            f"namesrv.port and broker.port lead to the same port, {names.port}: the name server "
            f"takes one port, each broker the next {PORT_STEP} from its own on"
            if count > 1
            else f"namesrv.port and broker.port are both {names.port}; each needs its own"
        )


def _embedded_name_server(configuration: Configuration) -> NameServerSettings:
    settings = configuration.name_server
    if configuration.is_given("namesrv.home"):
        return settings
    return replace(settings, home=configuration.up.data / "namesrv")


def _only_broker(configuration: Configuration) -> BrokerSettings:
    settings = configuration.broker
    if configuration.is_given("broker.root"):
        return settings
    return replace(settings, root=configuration.up.data / settings.name)


def _environment(configuration: Configuration, name: str, place: int) -> dict[str, str]:
    broker = configuration.broker
    advertised = broker.advertised
    if advertised is not None and advertised.rpartition("]")[2].count(":"):
        raise SettingRefused(
            f"broker.advertised is {advertised!r}, but every broker has its own port; leave it out"
        )
    own = configuration.with_values(
        {
            "broker.name": name,
            "broker.root": configuration.up.data / name,
            "broker.port": _port(broker.server.port, place),
            "broker.http.port": _port(broker.http.port, place),
            "log.level": configuration.log.level or LogLevel.WARNING,
        }
    )
    # The values of the file are included already.
    return {**own.as_environment(), FILE_VARIABLE: ""}


def _port(first: int | None, place: int) -> int | None:
    """The port of the broker at an index; None and 0 stay."""
    return first + PORT_STEP * place if first else first


class WithConsole(Service):
    """A service with a read-only web console on loopback, in the same process."""

    def __init__(
        self,
        service: Service,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        history: Path | None = None,
        users: Path | None = None,
        masked: tuple[str, ...] = (),
        alerts: Path | None = None,
    ) -> None:
        """Raises `CommandError` when the console's dependencies are missing.

        Checked here, before the start creates folders and opens stores. `history` is the file of
        the console's history of seven days; `users` and `alerts` are files as well.
        """
        self._service = service
        self._make = _maker(port, tls, alerts, history=history, users=users, masked=masked)
        self._console: ConsoleService | None = None

    async def start(self) -> None:
        await self._service.start()
        try:
            console = self._make(self._name_server())
            await console.start()
        except BaseException:
            await self._service.stop()
            raise
        self._console = console

    async def stop(self) -> None:
        console, self._console = self._console, None
        try:
            if console is not None:
                await console.stop()
        finally:
            await self._service.stop()

    def listening(self) -> Sequence[Listening]:
        shown = () if self._console is None else self._console.listening()
        return (*self._service.listening(), *shown)

    async def until_failed(self) -> CommandError:
        waiting = [asyncio.create_task(self._service.until_failed())]
        if self._console is not None:
            waiting.append(asyncio.create_task(self._console.until_failed()))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    def kill(self) -> None:
        self._service.kill()

    def _name_server(self) -> str:
        return next(
            each.address for each in self._service.listening() if each.role == "name server"
        )


def _maker(
    port: int, tls: ssl.SSLContext | None, alerts: Path | None, **fields: object
) -> Callable[[str], ConsoleService]:
    """Creates the console when the name server's address is known."""
    try:
        # Late: an extra, and slow to import.
        from orbitmq.cli.console import (  # noqa: PLC0415
            ConsoleService,
            alerts_of,
            console_settings,
        )
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the console needs {error.name}, which is not there; {install_command('console')}"
        ) from error

    fields |= {"port": port, "alerts": alerts_of(alerts)}
    # What cannot work is refused now.
    console_settings(client=ClientSettings(), **fields)

    def make(name_server: str) -> ConsoleService:
        client = ClientSettings(name_servers=(name_server,), tls=tls)
        settings = console_settings(client=client, **fields)
        # The cluster starts also if the console's history cannot be opened.
        return ConsoleService(settings, "--console-port", needs_history=False)

    return make


# Exposure. A server listens beyond loopback only with protection or with `--insecure`:
#
#     a broker                accounts, or TLS with client certificates
#     a name server           TLS with client certificates; beside a broker with accounts a warning
#     the replication port    no protection exists: every connection receives the whole log
#     the HTTP pages          no protection exists


_ACCOUNTS = "set broker.access.accounts"
_CERTIFICATES = "{0}.tls.mode to enforcing and {0}.tls.client_authority"


def check_cluster(
    name_server: NameServerSettings, broker: BrokerSettings, *, is_accepted: bool
) -> list[str]:
    """The warnings for a name server and brokers in one command. Raises `Exposed`."""
    warnings = check_broker(broker, is_accepted=is_accepted)
    host = name_server.server.host
    if is_accepted or is_loopback(host) or broker.access.accounts is None:
        return warnings + check_name_server(name_server, is_accepted=is_accepted)
    if not _wants_certificates(name_server.server.tls):
        warnings.append(
            f"namesrv.host is {host!r}: the accounts do not guard the name server, where others "
            f"could register brokers; set {_CERTIFICATES.format('namesrv')}"
        )
    return warnings


def check_broker(settings: BrokerSettings, *, is_accepted: bool) -> list[str]:
    """The warnings. Raises `Exposed` for an unprotected address."""
    if is_accepted:
        return []
    http, server, replication = settings.http, settings.server, settings.replication
    if http.port is not None and not is_loopback(http.host):
        raise Exposed("broker.http.host", http.host, "see what the broker does", "")
    if is_loopback(server.host):
        return []
    warnings: list[str] = []
    if not _wants_certificates(server.tls):
        if settings.access.accounts is None:
            remedy = f"{_ACCOUNTS}, or {_CERTIFICATES.format('broker')}"
            raise Exposed("broker.host", server.host, "read and delete messages", remedy)
        if problem := _tls_problem(server.tls):
            warnings.append(
                f"broker.host is {server.host!r}: there are accounts, but {problem}, so that "
                "messages can be read on their way"
            )
    if replication.serve:
        raise Exposed(
            "replication.serve is set and broker.host",
            server.host,
            "be sent the whole log by the port for slaves, which knows no accounts",
            "",
        )
    return warnings


def check_name_server(settings: NameServerSettings, *, is_accepted: bool) -> list[str]:
    """The warnings. Raises `Exposed` for an unprotected address."""
    server = settings.server
    if is_accepted or is_loopback(server.host) or _wants_certificates(server.tls):
        return []
    remedy = f"set {_CERTIFICATES.format('namesrv')}"
    raise Exposed("namesrv.host", server.host, "register brokers and delete topics", remedy)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host in WILDCARDS:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        # An invalid address; listening reports it.
        return True
    return all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found
    )


def _wants_certificates(tls: ServerTls | None) -> bool:
    return tls is not None and tls.mode is TlsMode.ENFORCING and tls.client_authority is not None


def _tls_problem(tls: ServerTls | None) -> str:
    if tls is None or tls.mode is TlsMode.DISABLED:
        return "TLS is not set up (broker.tls.certificate, broker.tls.key)"
    if tls.mode is TlsMode.PERMISSIVE:
        return "TLS is left to the clients (broker.tls.mode is permissive)"
    return ""


Announce = Callable[[Sequence[Listening]], None]


def announcing(*, as_json: bool) -> Announce:
    return _as_json if as_json else _as_text


def _as_text(listening: Sequence[Listening]) -> None:
    width = max(len(one.name) for one in listening)
    for one in listening:
        folder = f"  data in {one.folder}" if one.folder else ""
        typer.echo(f"{one.name:<{width}}  {one.address}{folder}")
    typer.echo("ready; Ctrl-C stops")


def _as_json(listening: Sequence[Listening]) -> None:
    for one in listening:
        typer.echo(json.dumps({"event": "listening", **asdict(one)}))
    typer.echo(json.dumps({"event": "ready"}))
