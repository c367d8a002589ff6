"""The settings in force, with their origins: flag, then environment, file and default."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import inspect
import json
import logging
import os
import re
import textwrap
import time
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import typer

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.main import SettingRefused
from orbitmq.cli.output import line_of
from orbitmq.errors import OrbitError
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.parsing import Kind, NotAllowed, as_json, as_text, kind_of
from orbitmq.remoting.tls import ClientTls, ServerTls

# A setting, its default and its unit are defined once, as the field of a settings class. Its path
# in a file (`broker.store.flush.policy`) and its environment variable
# (`ORBITMQ_BROKER_STORE_FLUSH_POLICY`) follow from the field.


PREFIX = "ORBITMQ_"


class LogLevel(enum.Enum):
    """The least level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


class Loop(enum.Enum):
    """The event loop."""

    AUTO = "auto"  #: uvloop where it is installed
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Level and format of the log."""

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

#: Shorter paths: `broker.port` instead of `broker.server.port`.
_SHORTER = {"server.host": "host", "server.port": "port", "server.tls": "tls"}

#: Never printed.
_SECRET_WORDS = ("password", "secret")

#: Types that the settings modules import for type checking only.
_NAMES = {"Path": Path, "ServerTls": ServerTls, "ClientTls": ClientTls}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting."""

    path: str  #: as in a file, with its section
    fields: tuple[str, ...]  #: the names of the nested fields, without the section
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


@functools.cache
def types_of(settings_class: type) -> Mapping[str, Any]:
    """The declared type of every field."""
    return typing.get_type_hints(settings_class, localns=_NAMES)


def nested_class(declared: Any) -> type | None:
    """The settings class of a field, also of an optional one."""
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


#: Names the file; --config overrides it.
FILE_VARIABLE = PREFIX + "CONFIG"

S = TypeVar("S")

DEFAULT = "default"
_HIDDEN = "(hidden)"
#: Above this similarity an unknown variable is a typing error, not another program's.
_A_SLIP = 0.88
#: The similarity for a suggestion, and the bonus for the same last word.
_LIKELY = 0.8
_LAST_WORD = 0.2


@dataclass(frozen=True, slots=True)
class Given:
    """A given value and its origin."""

    setting: Setting
    value: Any
    origin: str


class Configuration:
    """All given values; of several for a setting the last one counts."""

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
        Raises `SettingRefused` for the first invalid value.
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
        """A copy with values of the command itself, by path."""
        own = [Given(_known(path), value, "orbitmq") for path, value in values.items()]
        return Configuration([*self._given.values(), *own])

    def is_given(self, path: str) -> bool:
        """Whether the setting was given."""
        return path in self._given

    def as_environment(self) -> dict[str, str]:
        """All given values as environment variables for a child process.

        Flags would show secrets in the list of processes.
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

    def rows(self) -> Iterator[SettingRecord]:
        """Every setting with its value and origin."""
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
            yield SettingRecord.of(setting, as_json(value), origin)

    def _section(self, section: str, settings_class: type[S]) -> S:
        given = [one for one in self._given.values() if one.setting.section == section]
        built: S = _build(settings_class, SECTIONS[section], given, ())
        return built


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
    """Whether an unknown variable is a typing error and not another program's variable."""
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
    """The end of a sentence with similar names, the most similar first."""
    last = re.split(r"[._]", name)[-1].lower()

    def likeness(candidate: str) -> float:
        # A path with a missing part, as broker.flush.policy, has the right last word.
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


def _build(
    settings_class: type, defaults: Any, given: Sequence[Given], above: tuple[str, ...]
) -> Any:
    """The settings object with the given values; `defaults` itself without any."""
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
    """The origins of the values that an error names."""
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


# Descriptions are read from the `#:` comments of the fields in the source files; without the
# sources they are empty.


_field = re.compile(r"    (\w+): .*?(?:#: ?(.*))?$").fullmatch
_comment = re.compile(r"    #: ?(.*)").fullmatch
#: Parts of comments for tools.
_remark = re.compile(r"\s*# .*")

#: Whole numbers of bytes whose names do not say so.
_BYTES = frozenset(
    {
        *("max_record", "preallocate_step", "recovery_chunk", "max_gap", "memory_distance"),
        *("tail_memory", "frame", "header", "ext_key", "ext_value", "inflated", "index_catch_up"),
        "index_step",
    }
)
_EPOCH = frozenset({"accept_from"})


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a setting."""

    meaning: str  #: empty without a comment
    allowed: str
    unit: str  #: empty where there is none


def describe(setting: Setting) -> Description:
    """The description of a setting."""
    *above, name = setting.fields
    holder: type = type(SECTIONS[setting.section])
    for step in above:
        holder = nested_class(types_of(holder)[step]) or holder
    return Description(comments_of(holder).get(name, ""), setting.kind.allowed, _unit(setting))


def _unit(setting: Setting) -> str:
    name, allowed = setting.fields[-1], setting.kind.allowed
    if name in _EPOCH:
        return "seconds since 1970"
    if name.endswith("ratio"):
        return "share, 0 to 1"
    if "whole number" in allowed:
        return "bytes" if name in _BYTES or {"bytes", "size"} & set(name.split("_")) else ""
    return "seconds" if "a number" in allowed else ""


@functools.cache
def comments_of(settings_class: type) -> Mapping[str, str]:
    """The comments of the fields."""
    try:
        lines = inspect.getsource(settings_class).splitlines()
    except (OSError, TypeError):
        return {}
    return dict(_comments(lines))


def _comments(lines: list[str]) -> Iterator[tuple[str, str]]:
    above: list[str] = []
    for line in lines:
        if (comment := _comment(line)) is not None:
            above.append(comment[1])
        elif (found := _field(line)) is not None:
            text = " ".join([*above, *([found[2]] if found[2] else [])])
            above = []
            if text := _remark.sub("", text).strip():
                yield found[1], _sentence(text)
        elif not line.strip():
            above = []


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


#: The column of values; longer values shift the origin.
_VALUE_WIDTH = 24
_TEXT_WIDTH = 96
_INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRecord:
    """A setting in force."""

    setting: str
    value: Any  #: null when there is none; a secret is hidden
    origin: str  #: default, a file, a variable of the environment or a flag
    variable: str  #: of the environment, which sets it
    meaning: str
    allowed: str
    unit: str

    @classmethod
    def of(cls, setting: Setting, value: Any, origin: str) -> SettingRecord:
        described = describe(setting)
        return cls(
            setting=setting.path,
            value=value,
            origin=origin,
            variable=setting.variable,
            meaning=described.meaning,
            allowed=described.allowed,
            unit=described.unit,
        )


def show(
    configuration: Configuration,
    *,
    under: str = "",
    only_changed: bool = False,
    with_descriptions: bool = False,
    as_json: bool = False,
) -> Iterator[str]:
    """The lines to print: a table, descriptions, or a JSON object for each setting.

    `under` is a setting, or a part of its path that names several. Raises `SettingRefused`.
    """
    rows = [
        row
        for row in configuration.rows()
        if _is_under(row.setting, under) and (not only_changed or row.origin != DEFAULT)
    ]
    if under and not any(_is_under(path, under) for path in all_settings()):
        raise SettingRefused(
            f"no setting is {under!r} or below it; orbitmq config show lists all of them"
        )
    if as_json:
        yield from map(line_of, rows)
    elif with_descriptions:
        yield from _as_text(rows)
    else:
        yield from _as_table(rows)


def _is_under(path: str, under: str) -> bool:
    return not under or path == under or path.startswith(under.rstrip(".") + ".")


def _as_text(rows: Sequence[SettingRecord]) -> Iterator[str]:
    for row in rows:
        yield f"{row.setting} = {json.dumps(row.value, ensure_ascii=False)}  ({row.origin})"
        for text in (row.meaning, f"{allowed(row)}; {row.variable}"):
            yield from textwrap.wrap(
                text, _TEXT_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
            )


def allowed(described: Description | SettingRecord) -> str:
    """The allowed values with the unit."""
    unit = f" ({described.unit})" if described.unit else ""
    return f"{described.allowed}{unit}"


def _as_table(rows: Sequence[SettingRecord]) -> Iterator[str]:
    cells = [("setting", "value", "origin")]
    cells += [(row.setting, json.dumps(row.value, ensure_ascii=False), row.origin) for row in rows]
    width = max(len(path) for path, _, _ in cells)
    for path, value, origin in cells:
        yield f"{path:<{width}}  {value:<{_VALUE_WIDTH}}  {origin}"


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
        help="A setting of `orbitmq config show`; may be repeated.",
        rich_help_panel=_SETTINGS,
    ),
]
Level: TypeAlias = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="The lowest level to log; info by default, warning for up."),
]
Format: TypeAlias = Annotated[
    LogFormat | None, typer.Option("--log-format", help="The format of log lines; text by default.")
]
LoopChoice: TypeAlias = Annotated[
    Loop | None,
    typer.Option("--loop", help="The event loop; auto by default: uvloop if installed."),
]
Insecure: TypeAlias = Annotated[
    bool | None,
    typer.Option("--insecure", help="Allow an unprotected address that other machines can reach."),
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
        help="The address for clients, if it differs from the one listened on.",
    ),
]
HttpPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--http-port",
        min=0,
        max=LAST_PORT,
        help="Serve metrics and health over HTTP on this port; 0: any free one. Off by default.",
    ),
]
#: The file of the console's users.
USERS_VARIABLE: Final = "ORBITMQ_CONSOLE_USERS"
Users: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--users",
        metavar="FILE",
        envvar=USERS_VARIABLE,
        help="The file of the console's users with roles, which `orbitmq user` makes.",
        rich_help_panel="Console",
    ),
]
Mask: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--mask",
        metavar="FIELD",
        help="A field of bodies that the console shows as ***, like card or customer.email; may "
        "be repeated.",
        rich_help_panel="Console",
    ),
]
AlertsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--alerts",
        metavar="FILE",
        help="Webhooks that are told what the console finds, as TOML.",
        rich_help_panel="Console",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
#: For servers as child processes, which must not outlive the parent.
StopWithInput: TypeAlias = Annotated[
    bool, typer.Option("--stop-with-input", hidden=True, help="Stop when standard input ends.")
]


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags of every server."""

    log_level: Level = None
    log_format: Format = None
    loop: LoopChoice = None
    config: ConfigFile = None
    words: Words = None
    as_json: AsJson = False

    def configuration(self, flags: Mapping[str, tuple[str, Any]]) -> Configuration:
        """The settings in force. `flags` maps a flag to the path of its setting and its value.

        A flag may stand for several settings, joined by `+`; None is a flag that was not given.
        """
        given = {
            "--log-level": ("log.level", self.log_level),
            "--log-format": ("log.format", self.log_format),
            "--loop": ("run.loop", self.loop),
        }
        return configured(self.config, self.words, {**flags, **given})


@dataclass(frozen=True, kw_only=True)
class _Address:
    host: Host = None
    insecure: Insecure = None


@dataclass(frozen=True, kw_only=True)
class ServerFlags(RunFlags, _Address):
    """The flags of brokers and name servers."""

    def configuration(self, flags: Mapping[str, tuple[str, Any]]) -> Configuration:
        """As in every server, with `--insecure`."""
        return super().configuration({"--insecure": ("run.insecure", self.insecure), **flags})


def configured(
    config: Path | None, words: list[str] | None, flags: Mapping[str, tuple[str, Any]]
) -> Configuration:
    """The settings in force by flags, environment, file and defaults."""
    given = {
        path: (as_text(value), flag)
        for flag, (paths, value) in flags.items()
        if value is not None
        for path in paths.split("+")
    }
    return Configuration.load(given, words or (), os.environ, config)


#: The loggers that are written to standard error. The root logger is left alone.
_LOGGERS = ("orbitmq", "asyncio")

#: Attributes of every record; the others are the fields of the event.
_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def set_up_logging(settings: LogSettings, default: LogLevel = LogLevel.INFO) -> None:
    """Set up logging to standard error."""
    level = (settings.level or default).name
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.format is LogFormat.JSON else TextLines())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO broker started broker=broker-a`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        event = _on_one_line(record.getMessage())
        line = f"{when}.{int(record.msecs):03} {record.levelname:<7} {event}{fields}"
        return f"{line}\n{self._trouble(record)}" if record.exc_info else line

    def _trouble(self, record: logging.LogRecord) -> str:
        """The indented traceback, so that no text of an error looks like a log line."""
        text = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join(f"  {_on_one_line(line)}" for line in text.split("\n"))


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        # The standard keys override fields of the same name.
        line = _fields(record) | line
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _USUAL}


def _on_one_line(text: str) -> str:
    """A text with control characters escaped: parts of it come from outside."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _word(value: object) -> str:
    text = str(value)
    return (
        json.dumps(text, ensure_ascii=False)
        if not text or not text.isprintable() or " " in text
        else text
    )
