"""Every setting there is, taken from the classes that hold them.

The classes of the rooms are the one place where a setting, its default and its unit stand. From
each field follow its path in a file (`broker.store.flush.policy`) and its environment variable
(`ORBITMQ_BROKER_STORE_FLUSH_POLICY`); nothing is listed twice.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.errors import SettingRefused
from orbitmq.cli.values import Kind, kind_of
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.tls import ClientTls, ServerTls

PREFIX = "ORBITMQ_"


class LogLevel(enum.Enum):
    """From which weight on something is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    """How a log line looks."""

    TEXT = "text"
    JSON = "json"


class Loop(enum.Enum):
    """Which event loop runs."""

    AUTO = "auto"  #: uvloop where it is installed
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is logged, and how."""

    level: LogLevel | None = None  #: None: info; of `orbitmq up`: warning
    format: LogFormat = LogFormat.TEXT  #: a line for people, or an object for programs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a process runs."""

    loop: Loop = Loop.AUTO  #: the event loop; auto: uvloop where it is installed
    insecure: bool = False  #: whether addresses may be listened on that other machines reach


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `orbitmq up` starts."""

    data: Path = Path("orbitmq-data")  #: a folder for each broker, and one for the name server
    brokers: int = 1  #: more than one: a process each

    def __post_init__(self) -> None:
        if not 1 <= self.brokers <= 26:
            raise SettingRefused(f"up.brokers must be from 1 to 26, got {self.brokers}")


#: The sections of a file. Each value is an instance with the defaults.
SECTIONS: Mapping[str, Any] = {
    "broker": BrokerSettings(root=UpSettings().data / "broker-a"),
    "namesrv": NameServerSettings(),
    "up": UpSettings(),
    "log": LogSettings(),
    "run": RunSettings(),
}

#: Where people look for these: with the role, not with the sockets of the role.
_SHORTER = {"server.host": "host", "server.port": "port", "server.tls": "tls"}

#: Never printed.
_SECRET_WORDS = ("password", "secret")

#: Types that the rooms name for the type checker only.
_NAMES = {"Path": Path, "ServerTls": ServerTls, "ClientTls": ClientTls}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that can be set."""

    path: str  #: as in a file, with its section
    fields: tuple[str, ...]  #: the way to it through the classes, without the section
    kind: Kind

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def variable(self) -> str:
        return PREFIX + self.path.replace(".", "_").upper()

    @property
    def is_secret(self) -> bool:
        return any(word in self.fields[-1] for word in _SECRET_WORDS)


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its path."""
    return {
        setting.path: setting
        for section, defaults in SECTIONS.items()
        for setting in _settings(section, type(defaults), ())
    }


@functools.cache
def by_variable() -> Mapping[str, Setting]:
    """Every setting by its environment variable."""
    return {setting.variable: setting for setting in all_settings().values()}


def types_of(settings_class: type) -> Mapping[str, Any]:
    """The declared type of every field."""
    return typing.get_type_hints(settings_class, localns=_NAMES)


def nested_class(declared: Any) -> type | None:
    """The class of settings that a field holds, also when it may hold none."""
    candidates = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    for candidate in candidates:
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _settings(section: str, settings_class: type, above: tuple[str, ...]) -> Iterator[Setting]:
    declared = types_of(settings_class)
    for field in dataclasses.fields(settings_class):
        way = (*above, field.name)
        inner = nested_class(declared[field.name])
        if inner is not None:
            yield from _settings(section, inner, way)
        else:
            yield Setting(f"{section}.{_short('.'.join(way))}", way, kind_of(declared[field.name]))


def _short(name: str) -> str:
    for long, short in _SHORTER.items():
        if name == long or name.startswith(long + "."):
            return short + name[len(long) :]
    return name
