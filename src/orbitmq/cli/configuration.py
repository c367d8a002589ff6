"""The settings in force: flags over environment over file over default, and who said what."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.errors import SettingRefused
from orbitmq.cli.schema import (
    PREFIX,
    SECTIONS,
    LogSettings,
    RunSettings,
    Setting,
    UpSettings,
    all_settings,
    by_variable,
    nested_class,
    types_of,
)
from orbitmq.cli.values import NotAllowed, as_text, shown
from orbitmq.errors import OrbitError
from orbitmq.namesrv.settings import NameServerSettings

#: Names the file; the flag --config is stronger.
FILE_VARIABLE = PREFIX + "CONFIG"

S = TypeVar("S")

DEFAULT = "default"
_HIDDEN = "(hidden)"
#: How alike a variable must be to one of ours to count as a slip and not as somebody else's.
_A_SLIP = 0.88
#: How alike a name must be to be suggested, and what the same last word adds.
_LIKELY = 0.8
_LAST_WORD = 0.2


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave, and who."""

    setting: Setting
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Row:
    """A setting as `orbitmq config show` has it; secrets are already hidden."""

    path: str
    value: Any
    origin: str
    variable: str


class Configuration:
    """Everything that was set. The weakest origin comes first, the last one counts."""

    def __init__(self, given: Sequence[Given] = ()) -> None:
        self._given = {one.setting.path: one for one in given}

    @classmethod
    def load(
        cls,
        flags: Mapping[str, tuple[str, str]],
        words: Sequence[str],
        environment: Mapping[str, str],
        file: Path | None = None,
    ) -> Configuration:
        """Merge all origins.

        `flags` maps a setting's path to its text and the flag's name; `words` are `path=value`.
        Raises `SettingRefused` for the first thing that cannot be.
        """
        named = environment.get(FILE_VARIABLE)
        if file is None and named:
            file = Path(named)
        return cls(
            [
                *(_from_file(file) if file is not None else ()),
                *_from_environment(environment),
                *_from_words(words),
                *(_read_text(_known(path), text, flag) for path, (text, flag) in flags.items()),
            ]
        )

    def with_values(self, values: Mapping[str, Any]) -> Configuration:
        """A copy in which the command itself gives values, by their paths."""
        own = [Given(_known(path), value, "orbitmq") for path, value in values.items()]
        return Configuration([*self._given.values(), *own])

    def is_given(self, path: str) -> bool:
        """Whether the setting has anything but its default."""
        return path in self._given

    def as_environment(self) -> dict[str, str]:
        """Everything that was given, for another process.

        Not as flags: those would show secrets to everybody who lists processes.
        """
        return {one.setting.variable: as_text(one.value) for one in self._given.values()}

    @functools.cached_property
    def broker(self) -> BrokerSettings:
        return self._section("broker", BrokerSettings)

    @functools.cached_property
    def name_server(self) -> NameServerSettings:
        return self._section("namesrv", NameServerSettings)

    @functools.cached_property
    def up(self) -> UpSettings:
        return self._section("up", UpSettings)

    @functools.cached_property
    def log(self) -> LogSettings:
        return self._section("log", LogSettings)

    @functools.cached_property
    def run(self) -> RunSettings:
        return self._section("run", RunSettings)

    def rows(self) -> Iterator[Row]:
        """Every setting, its value and where that comes from."""
        built = {
            "broker": self.broker,
            "namesrv": self.name_server,
            "up": self.up,
            "log": self.log,
            "run": self.run,
        }
        for path, setting in all_settings().items():
            value: Any = built[setting.section]
            for name in setting.fields:
                value = getattr(value, name) if value is not None else None
            if setting.is_secret and value is not None:
                value = _HIDDEN
            given = self._given.get(path)
            origin = DEFAULT if given is None else given.origin
            yield Row(path, shown(value), origin, setting.variable)

    def _section(self, section: str, settings_class: type[S]) -> S:
        given = [one for one in self._given.values() if one.setting.section == section]
        built: S = _build(settings_class, SECTIONS[section], given, ())
        return built


# Where values come from.


def _from_file(file: Path) -> Iterator[Given]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingRefused(f"the file {file} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingRefused(f"the file {file} is not TOML: {error}") from error
    for path, value in _leaves(content, ()):
        setting = _known(path, f"in {file}")
        try:
            yield Given(setting, setting.kind.from_toml(value), str(file))
        except NotAllowed:
            raise _refused(setting, value, str(file)) from None


def _leaves(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield ".".join((*above, key)), value


def _from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    known = by_variable()
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name == FILE_VARIABLE:
            continue
        if name in known:
            yield _read_text(known[name], text, name)
        elif _is_meant_for_us(name):
            near = _nearest(name, known)
            raise SettingRefused(f"the environment variable {name} is not known{near}")


def _is_meant_for_us(name: str) -> bool:
    """Variables of other programs may begin with our prefix too; a slip of ours must not pass."""
    of_a_section = name.startswith(tuple(f"{PREFIX}{section.upper()}_" for section in SECTIONS))
    return of_a_section or bool(difflib.get_close_matches(name, by_variable(), 1, _A_SLIP))


def _from_words(words: Sequence[str]) -> Iterator[Given]:
    for word in words:
        path, equals, text = word.partition("=")
        if not equals:
            raise SettingRefused(
                f"--set takes a setting and a value, as in broker.port=0; got {word!r}"
            )
        yield _read_text(_known(path.strip()), text, "--set")


def _read_text(setting: Setting, text: str, origin: str) -> Given:
    try:
        return Given(setting, setting.kind.from_text(text), origin)
    except NotAllowed:
        raise _refused(setting, text, origin) from None


def _known(path: str, where: str = "") -> Setting:
    setting = all_settings().get(path)
    if setting is None:
        place = f" {where}" if where else ""
        raise SettingRefused(
            f"the setting {path!r}{place} is not known{_nearest(path, all_settings())}"
        )
    return setting


def _nearest(name: str, known: Mapping[str, Setting]) -> str:
    """Names that were possibly meant, the likeliest first."""
    last = re.split(r"[._]", name)[-1].lower()

    def likeness(candidate: str) -> float:
        # Who leaves a word out, as in broker.flush.policy, has the last one right.
        has_last = last != "" and candidate.lower().endswith(last)
        return difflib.SequenceMatcher(None, name, candidate).ratio() + _LAST_WORD * has_last

    alike = sorted(known, key=likeness, reverse=True)[:3]
    likely = [candidate for candidate in alike if likeness(candidate) >= _LIKELY]
    if not likely:
        return "; orbitmq config show lists all of them"
    return f"; did you mean {' or '.join(likely)}?"


def _refused(setting: Setting, value: Any, origin: str) -> SettingRefused:
    got = _HIDDEN if setting.is_secret else repr(value)
    hint = ""
    if isinstance(value, str) and value.startswith("tcp://"):
        hint = (
            "; Kubernetes sets such variables for a service of that name unless the pod says "
            "enableServiceLinks: false"
        )
    return SettingRefused(
        f"{setting.path} must be {setting.kind.allowed}, got {got} (from {origin}){hint}"
    )


# Making the objects.


def _build(
    settings_class: type[Any], defaults: Any, given: Sequence[Given], above: tuple[str, ...]
) -> Any:
    """The object with what was given, from the inside out; `defaults` itself if nothing was."""
    if not given:
        return defaults
    declared = types_of(settings_class)
    depth = len(above)
    changes: dict[str, Any] = {
        one.setting.fields[depth]: one.value
        for one in given
        if len(one.setting.fields) == depth + 1
    }
    for name in dict.fromkeys(one.setting.fields[depth] for one in given):
        inner = nested_class(declared[name])
        if inner is not None:
            inside = [one for one in given if one.setting.fields[depth] == name]
            default = (
                getattr(defaults, name) if defaults is not None else _default(settings_class, name)
            )
            changes[name] = _build(inner, default, inside, (*above, name))
    own = [one for one in given if len(one.setting.fields) == depth + 1]
    try:
        if defaults is not None:
            return dataclasses.replace(defaults, **changes)
        return settings_class(**changes)
    except OrbitError as error:
        raise SettingRefused(f"{error}{_blame(str(error), own or given)}") from error
    except TypeError as error:
        raise SettingRefused(_incomplete(settings_class, changes, own or given)) from error


def _default(settings_class: type[Any], name: str) -> Any:
    (field,) = (each for each in dataclasses.fields(settings_class) if each.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _blame(text: str, given: Sequence[Given]) -> str:
    """Who gave the values that an error speaks of."""
    words = set(re.findall(r"\w+", text))
    guilty = [one for one in given if one.setting.fields[-1] in words] or given
    return "".join(f" ({one.setting.path} comes from {one.origin})" for one in guilty)


def _incomplete(
    settings_class: type[Any], changes: Mapping[str, Any], given: Sequence[Given]
) -> str:
    missing = [
        field.name
        for field in dataclasses.fields(settings_class)
        if field.name not in changes
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    one = given[0]
    section = one.setting.path.rpartition(".")[0]
    needed = " and ".join(f"{section}.{name}" for name in missing)
    return f"{one.setting.path} (from {one.origin}) needs {needed} as well"
