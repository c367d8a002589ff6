"""The settings of a running name server under RocketMQ's names: shown, changed, kept.

One table says how each setting is called, how its text is read and written, and whether it can be
changed while the server runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orbitmq.namesrv.errors import FileUnusable, SettingError
from orbitmq.namesrv.files import read_file, replace_file
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.wire.bodies.properties import format_properties, parse_properties

KV_FILE = "kvConfig.json"
CONFIG_FILE = "namesrv.properties"

#: Never changed by a request, whatever the settings say.
BLACK_LIST = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})


class BlackListed(SettingError):
    """A setting that requests must not change."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a value becomes text and back."""

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
        """Take over changes of earlier runs. Raises `FileUnusable` or `SettingError`."""
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
        """Change settings given as `key=value` lines; names that nobody knows are left alone.

        Raises `BlackListed`, `SettingError` or `FileUnusable`, and then nothing has changed.
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
