"""Every setting of the name server, with RocketMQ's default, and the files that persist them.

`Configuration` has the settings in force under RocketMQ's names: it shows them to `mqadmin`,
changes those that may change while the server runs, and writes `namesrv.properties`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orbitmq import atomicfile
from orbitmq.errors import OrbitError, SettingError
from orbitmq.remoting.settings import ServerSettings
from orbitmq.wire.javajson import format_properties, parse_properties

DEFAULT_PORT = 9876


KV_FILE = "kvConfig.json"
CONFIG_FILE = "namesrv.properties"

#: Settings that a request can never change.
BLACK_LIST = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})


class NameServerError(OrbitError):
    """A problem of a name server."""


class RegisterAllFirst(NameServerError):
    """A broker registered a single topic before it registered all of them."""

    def __init__(self, broker: str, address: str) -> None:
        self.broker = broker
        self.address = address
        super().__init__(
            f"broker {broker!r} at {address} must register all its topics before a single one"
        )


class FileUnusable(NameServerError):
    """A file of the name server cannot be read or written."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerSettings:
    """How a name server behaves, and where it persists its state."""

    #: The folder of `kvConfig.json` and `namesrv.properties`; None: in memory only.
    home: Path | None = None
    scan_interval: float = 5.0  #: seconds between two checks for expired brokers
    heartbeat_timeout: float = 120.0  #: for brokers that do not name one
    order_message_enable: bool = False  #: routes carry the order configuration of their topic
    return_order_topic_config: bool = True  #: registrations are answered with all of it
    enable_all_topic_list: bool = True  #: whether all topics may be listed
    enable_topic_list: bool = True  #: whether topics of a cluster or kind may be listed
    need_wait_for_service: bool = False  #: give no routes for `wait_for_service` after the start
    wait_for_service: float = 45.0  #: see `need_wait_for_service`
    support_acting_master: bool = False  #: show the first slave as master where there is none
    delete_topic_with_broker_registration: bool = False  #: topics not registered again vanish
    #: Further settings that requests must not change.
    config_black_list: tuple[str, ...] = ()
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=DEFAULT_PORT))

    def __post_init__(self) -> None:
        for name in ("scan_interval", "heartbeat_timeout"):
            if not getattr(self, name) > 0:
                raise SettingError(
                    f"name server: {name} must be positive, got {getattr(self, name)}"
                )
        if self.wait_for_service < 0:
            raise SettingError(
                f"name server: wait_for_service must not be negative, got {self.wait_for_service}"
            )


class BlackListed(SettingError):
    """A setting that requests must not change."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Conversion of a value to text and back."""

    text: Callable[[Any], str]
    value: Callable[[str], Any]
    allowed: str


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


_BOOLEAN = _Kind(lambda value: "true" if value else "false", _boolean, "true or false")
_SECONDS = _Kind(lambda value: str(int(value)), lambda text: float(int(text)), "whole seconds")
_MILLIS = _Kind(
    lambda value: str(round(value * 1000)), lambda text: int(text) / 1000, "whole milliseconds"
)

#: What can be changed while the server runs: RocketMQ's name, ours, and the kind of value.
_CHANGEABLE: Mapping[str, tuple[str, _Kind]] = {
    "deleteTopicWithBrokerRegistration": ("delete_topic_with_broker_registration", _BOOLEAN),
    "enableAllTopicList": ("enable_all_topic_list", _BOOLEAN),
    "enableTopicList": ("enable_topic_list", _BOOLEAN),
    "needWaitForService": ("need_wait_for_service", _BOOLEAN),
    "orderMessageEnable": ("order_message_enable", _BOOLEAN),
    "returnOrderTopicConfigToBroker": ("return_order_topic_config", _BOOLEAN),
    "scanNotActiveBrokerInterval": ("scan_interval", _MILLIS),
    "supportActingMaster": ("support_acting_master", _BOOLEAN),
    "waitSecondsForService": ("wait_for_service", _SECONDS),
}


class Configuration:
    """The settings in force."""

    def __init__(self, settings: NameServerSettings) -> None:
        self.settings = settings
        self._black_list = BLACK_LIST | set(settings.config_black_list)

    @property
    def _path(self) -> Path | None:
        home = self.settings.home
        return home / CONFIG_FILE if home is not None else None

    def load(self) -> None:
        """Load persisted changes. Raises `FileUnusable` or `SettingError`."""
        if self._path is None:
            return
        content = read_file(self._path)
        if content is None:
            return
        try:
            kept = parse_properties(content.decode())
        except UnicodeDecodeError as error:
            raise FileUnusable(self._path, "is not UTF-8; repair or remove it") from error
        self.settings = _changed(self.settings, kept)

    def text(self) -> str:
        """All settings as `key=value` lines."""
        return format_properties({**_fixed(self.settings), **_changeable(self.settings)})

    def update(self, text: str) -> None:
        """Change settings given as `key=value` lines; unknown names are ignored.

        Raises `BlackListed`, `SettingError` or `FileUnusable`, and then changes nothing.
        """
        wanted = parse_properties(text)
        if not self._black_list.isdisjoint(wanted):
            raise BlackListed("Can not update config in black list.")
        current = _fixed(self.settings)
        for name, value in wanted.items():
            if name in current and current[name] != value:
                raise SettingError(f"{name} can only be changed by a restart")
        settings = _changed(self.settings, wanted)
        if self._path is not None:
            replace_file(self._path, format_properties(_changeable(settings)).encode())
        self.settings = settings


def _changed(settings: NameServerSettings, wanted: Mapping[str, str]) -> NameServerSettings:
    changes: dict[str, Any] = {}
    for name, text in wanted.items():
        if name not in _CHANGEABLE:
            continue
        attribute, kind = _CHANGEABLE[name]
        try:
            changes[attribute] = kind.value(text)
        except (ValueError, KeyError) as error:
            raise SettingError(f"{name} must be {kind.allowed}, got {text!r}") from error
    return replace(settings, **changes)


def _changeable(settings: NameServerSettings) -> dict[str, str]:
    return {
        name: kind.text(getattr(settings, attribute))
        for name, (attribute, kind) in _CHANGEABLE.items()
    }


def _fixed(settings: NameServerSettings) -> dict[str, str]:
    server = settings.server
    home = settings.home
    return {
        "bindAddress": server.host,
        "configBlackList": ";".join(settings.config_black_list),
        "configStorePath": str(home / CONFIG_FILE) if home is not None else "",
        "kvConfigPath": str(home / KV_FILE) if home is not None else "",
        "listenPort": str(server.port),
        "serverChannelMaxIdleTimeSeconds": str(int(server.idle)),
        "serverSocketBacklog": str(server.backlog),
    }


def read_file(path: Path) -> bytes | None:
    """The content of a file; None if it does not exist. Raises `FileUnusable`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileUnusable(path, f"cannot be read: {error.strerror}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably. Raises `FileUnusable`."""
    try:
        atomicfile.replace_file(path, content)
    except OSError as error:
        raise FileUnusable(path, f"cannot be written: {error.strerror}") from error
