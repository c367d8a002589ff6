"""The flags that several commands share, and what a flag has to do with a setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from orbitmq.cli.configuration import Configuration
from orbitmq.cli.schema import LogFormat, LogLevel, Loop
from orbitmq.cli.values import as_text

_SETTINGS = "Settings"
LAST_PORT = 65_535

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="A TOML file with settings. [env: ORBITMQ_CONFIG]",
        rich_help_panel=_SETTINGS,
    ),
]
Words: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING=VALUE",
        help="Any setting of `orbitmq config show`; may be repeated.",
        rich_help_panel=_SETTINGS,
    ),
]
Level: TypeAlias = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="Log from this weight on; info by default, of up: warning."),
]
Format: TypeAlias = Annotated[
    LogFormat | None, typer.Option("--log-format", help="How log lines look; text by default.")
]
LoopChoice: TypeAlias = Annotated[
    Loop | None,
    typer.Option("--loop", help="The event loop; auto by default: uvloop if installed."),
]
Insecure: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--insecure", help="Allow an address that other machines reach and that nothing protects."
    ),
]
Host: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="ADDRESS", help="The address to listen on; 127.0.0.1 by default."
    ),
]
Advertise: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST[:PORT]",
        help="The address that clients are given, if not the one listened on.",
    ),
]
HttpPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--http-port",
        min=0,
        max=LAST_PORT,
        help="Serve metrics and health by HTTP here; 0: any free one. Not by default.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
#: For whoever starts servers as children: none is left behind, however the parent ends.
StopWithInput: TypeAlias = Annotated[
    bool, typer.Option("--stop-with-input", hidden=True, help="Stop when the input ends.")
]


def shared(
    insecure: bool | None,
    log_level: LogLevel | None,
    log_format: LogFormat | None,
    loop: Loop | None,
) -> dict[str, tuple[str, Any]]:
    """The flags that every command which serves has, as `configured` takes them."""
    return {
        "--insecure": ("run.insecure", insecure),
        "--log-level": ("log.level", log_level),
        "--log-format": ("log.format", log_format),
        "--loop": ("run.loop", loop),
    }


def configured(
    config: Path | None, words: list[str] | None, flags: Mapping[str, tuple[str, Any]]
) -> Configuration:
    """The settings in force. `flags`: which flag is which setting, and its value if it was given.

    One flag may stand for several settings, joined by `+`.
    """
    given = {
        path: (as_text(value), flag)
        for flag, (paths, value) in flags.items()
        if value is not None
        for path in paths.split("+")
    }
    return Configuration.load(given, words or (), os.environ, config)
