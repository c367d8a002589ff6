"""The commands that start servers, and the one that shows their settings."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from orbitmq.cli import options
from orbitmq.cli.announcing import announcing
from orbitmq.cli.exposure import check_broker, check_cluster, check_name_server
from orbitmq.cli.logs import set_up_logging
from orbitmq.cli.schema import LogLevel
from orbitmq.cli.services import BrokerService, NameServerService
from orbitmq.cli.serving import serve
from orbitmq.cli.showing import SettingRecord, show
from orbitmq.cli.upping import client_tls, cluster_service
from orbitmq.cli.withconsole import WithConsole

app = typer.Typer(
    help="Start servers.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")


log = logging.getLogger(__name__)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)


@app.command(
    epilog="Examples:\n\n"
    "  orbitmq up\n\n"
    "  orbitmq up --data /var/lib/orbitmq --brokers 2\n\n"
    "  orbitmq up --console\n\n"
    "  orbitmq up --namesrv-port 0 --broker-port 0 --json\n\n"
    "  orbitmq up --set broker.store.flush.policy=sync"
)
def up(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FOLDER",
            help="Where everything is kept; ./orbitmq-data by default.",
        ),
    ] = None,
    brokers: Annotated[
        int | None,
        typer.Option(
            "--brokers",
            min=1,
            max=26,
            help="How many, 1 by default; above 1 each has its process.",
        ),
    ] = None,
    host: options.Host = None,
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
            help="10911 by default, the next brokers 10 further; 0: any free one.",
        ),
    ] = None,
    http_port: options.HttpPort = None,
    console: Annotated[
        bool,
        typer.Option(
            "--console",
            help="Start the web console as well, to look at; it keeps seven days in FOLDER.",
        ),
    ] = False,
    console_port: Annotated[
        int,
        typer.Option(
            "--console-port",
            min=0,
            max=options.LAST_PORT,
            help="Where the console listens; 0: any free one.",
        ),
    ] = 8090,
    advertise: options.Advertise = None,
    insecure: options.Insecure = None,
    log_level: options.Level = None,
    log_format: options.Format = None,
    loop: options.LoopChoice = None,
    config: options.ConfigFile = None,
    words: options.Words = None,
    as_json: options.AsJson = False,
    stop_with_input: options.StopWithInput = False,
) -> None:
    """Start a name server and brokers, all that a laptop needs."""
    configuration = options.configured(
        config,
        words,
        {
            "--data": ("up.data", data),
            "--brokers": ("up.brokers", brokers),
            "--host": ("broker.host+namesrv.host", host),
            "--namesrv-port": ("namesrv.port", namesrv_port),
            "--broker-port": ("broker.port", broker_port),
            "--http-port": ("broker.http.port", http_port),
            "--advertise": ("broker.advertised", advertise),
            **options.shared(insecure, log_level, log_format, loop),
        },
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
        )
    serve(
        service,
        configuration.run.loop,
        announcing(as_json=as_json),
        stops_with_input=stop_with_input,
    )


@app.command(
    epilog="Examples:\n\n"
    "  orbitmq broker --name-server 127.0.0.1:9876 --data /var/lib/orbitmq/broker-a\n\n"
    "  orbitmq broker --name broker-b --port 10921 --name-server ns1:9876 --name-server ns2:9876"
)
def broker(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FOLDER",
            help="Where its messages are kept; ./orbitmq-data/NAME by default.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Its name in routes; broker-a by default.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The cluster's name; DefaultCluster by default.")
    ] = None,
    host: options.Host = None,
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
            help="To register with; may be repeated. None by default.",
        ),
    ] = None,
    http_port: options.HttpPort = None,
    advertise: options.Advertise = None,
    insecure: options.Insecure = None,
    log_level: options.Level = None,
    log_format: options.Format = None,
    loop: options.LoopChoice = None,
    config: options.ConfigFile = None,
    words: options.Words = None,
    as_json: options.AsJson = False,
    stop_with_input: options.StopWithInput = False,
) -> None:
    """Start one broker."""
    configuration = options.configured(
        config,
        words,
        {
            "--data": ("broker.root", data),
            "--name": ("broker.name", name),
            "--cluster": ("broker.cluster", cluster),
            "--host": ("broker.host", host),
            "--port": ("broker.port", port),
            "--name-server": ("broker.name_servers", tuple(name_server) if name_server else None),
            "--http-port": ("broker.http.port", http_port),
            "--advertise": ("broker.advertised", advertise),
            **options.shared(insecure, log_level, log_format, loop),
        },
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
        announcing(as_json=as_json),
        stops_with_input=stop_with_input,
    )


@app.command(
    epilog="Examples:\n\n"
    "  orbitmq namesrv\n\n"
    "  orbitmq namesrv --port 9877 --data /var/lib/orbitmq/namesrv --log-format json"
)
def namesrv(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", "-d", metavar="FOLDER", help="Where it keeps its configuration; else nowhere."
        ),
    ] = None,
    host: options.Host = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=options.LAST_PORT, help="9876 by default; 0: any free one."
        ),
    ] = None,
    insecure: options.Insecure = None,
    log_level: options.Level = None,
    log_format: options.Format = None,
    loop: options.LoopChoice = None,
    config: options.ConfigFile = None,
    words: options.Words = None,
    as_json: options.AsJson = False,
) -> None:
    """Start a name server."""
    configuration = options.configured(
        config,
        words,
        {
            "--data": ("namesrv.home", data),
            "--host": ("namesrv.host", host),
            "--port": ("namesrv.port", port),
            **options.shared(insecure, log_level, log_format, loop),
        },
    )
    settings = configuration.name_server
    warnings = check_name_server(settings, is_accepted=configuration.run.insecure)
    set_up_logging(configuration.log)
    _warn(warnings)
    service = NameServerService(settings)
    serve(service, configuration.run.loop, announcing(as_json=as_json))


@config_app.command(
    "show",
    epilog="Examples:\n\n"
    "  orbitmq config show --config orbitmq.toml\n\n"
    "  orbitmq config show broker.store.flush --describe\n\n"
    "  ORBITMQ_BROKER_PORT=0 orbitmq config show --changed --json | jq -r .setting",
)
def config_show(
    under: Annotated[
        str,
        typer.Argument(metavar="[SETTING]", help="One setting, or all below it; else all."),
    ] = "",
    describe: Annotated[
        bool, typer.Option("--describe", "-d", help="Say what each one means and may be.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what was set somewhere.")
    ] = False,
    config: options.ConfigFile = None,
    words: options.Words = None,
    as_json: options.AsJson = False,
) -> None:
    """Print settings, their values and where these come from; secrets are hidden."""
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


config_show.prints = SettingRecord  # type: ignore[attr-defined]  # for the documentation
