"""Webhooks: where alerts are posted, and the bodies that receivers understand.

An address is a secret: whoever has it can post. It is in no answer, log line or error; those name
the webhook and its host.
"""

from __future__ import annotations

import enum
import http.client
import ssl
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Final, TypeVar, get_type_hints
from urllib.parse import urlsplit

import msgspec

from orbitmq.console.words import duration
from orbitmq.errors import SettingError
from orbitmq.parsing import Duration, Kind, NotAllowed, kind_of, moment

#: Seconds for each step of a post: connect, send, receive.
TIMEOUT: Final = 10.0
#: Bytes of an answer that are looked at.
_LOOKED_AT: Final = 4096
#: Characters of one alert in a text.
_LONGEST: Final = 1500


class Format(enum.Enum):
    """The body that a receiver understands."""

    JSON = "json"
    SLACK = "slack"  #: also Mattermost, Rocket.Chat and Google Chat
    FEISHU = "feishu"  #: also Lark
    DINGTALK = "dingtalk"


class Level(enum.Enum):
    """The least severity that is posted."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A receiver of alerts."""

    name: str
    url: str = field(repr=False)  #: where alerts are posted, http:// or https://; never shown
    format: Format = Format.JSON  #: the body that the receiver understands
    severity: Level = Level.WARNING  #: the least severity that is posted
    #: names of groups, topics, pipelines and servers, with `*`; `!` in front excludes; empty: all
    subjects: tuple[str, ...] = ()
    wait: float = 60.0  #: how long a finding must last before it is posted
    repeat: float = 4 * 3600.0  #: the time between two posts while it lasts; 0: one post only
    #: names of clusters, with `*`, of a console of several; empty: all
    clusters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"webhooks.{self.name}"
        if not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise SettingError(f"{where}.url must be an address without spaces")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"{where}.url must begin with https:// or http:// and have a host")
        if parts.username is not None:
            raise SettingError(f"{where}.url must not have a user in it")
        try:
            _ = parts.port
        except ValueError:
            raise SettingError(f"{where}.url must have a port from 0 to 65535, or none") from None
        if self.wait < 0 or self.repeat < 0:
            raise SettingError(f"{where}: for and repeat must be 0 or more")

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        return urlsplit(self.url).hostname or ""

    def wants(self, subject: str, *, is_critical: bool) -> bool:
        """Whether it is told about findings of this subject."""
        if self.severity is Level.CRITICAL and not is_critical:
            return False
        wanted = [each for each in self.subjects if not each.startswith("!")]
        excluded = [each[1:] for each in self.subjects if each.startswith("!")]
        return (not wanted or matches_any(subject, wanted)) and not matches_any(subject, excluded)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSilence:
    """A silence in the file."""

    subject: str  #: the names that are silent, with `*`
    kind: str | None = None  #: one kind of finding, such as `nobody consumes`; else all
    until: str | None = None  #: a time such as `2026-11-18T09:00Z`; else for ever
    reason: str  #: why

    def __post_init__(self) -> None:
        if not self.subject or not self.reason.strip():
            raise SettingError("a silence must have a subject and a reason")
        if self.until is not None:
            moment(self.until, "silences.until")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """Who is told what the console finds."""

    #: the address of the console in a browser, for links in alerts
    console: str | None = None
    webhooks: tuple[Webhook, ...] = ()
    silences: tuple[FixedSilence, ...] = ()

    def of_cluster(self, name: str, prefix: str) -> AlertSettings:
        """The part for one of several clusters, whose addresses begin with `prefix`."""
        hooks = (
            each for each in self.webhooks if not each.clusters or matches_any(name, each.clusters)
        )
        console = None if self.console is None else self.console.rstrip("/") + prefix
        return replace(self, console=console, webhooks=tuple(hooks))

    def __post_init__(self) -> None:
        if self.console is not None and not self.console.startswith(("http://", "https://")):
            raise SettingError("console must be an address with http:// or https://")

    @classmethod
    def load(cls, file: Path) -> AlertSettings:
        """Read a TOML file. Raises `SettingError`, without the text of addresses."""
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the file {file} cannot be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise SettingError(f"the file {file} is not TOML: {error}") from error
        try:
            return cls._read(content)
        except SettingError as error:
            raise SettingError(f"{error} (in {file})") from None

    @classmethod
    def _read(cls, content: Mapping[str, Any]) -> AlertSettings:
        _check_names("", content, ("console", "webhooks", "silences"))
        webhooks, silences = content.get("webhooks", {}), content.get("silences", [])
        if not isinstance(webhooks, dict) or not all(
            isinstance(w, dict) for w in webhooks.values()
        ):
            raise SettingError("webhooks must be tables with a name, such as [webhooks.ops]")
        if not isinstance(silences, list) or not all(map(_is_table, silences)):
            raise SettingError("silences must be tables of a list: [[silences]]")
        console = content.get("console")
        if console is not None and not isinstance(console, str):
            raise SettingError("console must be an address with http:// or https://")
        return cls(
            console=console,
            webhooks=tuple(
                _table(Webhook, f"webhooks.{name}", table, name=name)
                for name, table in webhooks.items()
            ),
            silences=tuple(_table(FixedSilence, "silences", table) for table in silences),
        )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


#: Names of fields in the file that are words of Python.
IN_FILE: Final[Mapping[str, str]] = {"wait": "for"}

S = TypeVar("S", Webhook, FixedSilence)


def kind_in_file(declared: Any) -> Kind:
    """The values of a field in the file; numbers are durations."""
    return kind_of(Duration if declared is float else declared)


def _table(kind: type[S], where: str, table: Mapping[str, Any], **given: Any) -> S:
    declared = get_type_hints(kind)
    names = {IN_FILE.get(each.name, each.name): each.name for each in fields(kind)}
    _check_names(where, table, [name for name in names if name not in given])
    values = dict(given)
    for name, value in table.items():
        try:
            values[names[name]] = kind_in_file(declared[names[name]]).read(value)
        except NotAllowed as error:
            # Not the value: it may be an address.
            raise SettingError(f"{where}.{name} must be {error.allowed}") from None
    for each in fields(kind):
        if each.default is MISSING and each.name not in values:
            raise SettingError(f"{where} needs {each.name}")
    return kind(**values)


def _check_names(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in table:
        if name not in known:
            place = f"{where}.{name}" if where else name
            raise SettingError(f"{place} is not known; there are {', '.join(known)}")


class Happening(enum.StrEnum):
    """What an alert says of a finding."""

    BEGIN = "begin"
    REPEAT = "repeat"
    RESOLVE = "resolve"
    TEST = "test"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to tell; `incident` is the same from its beginning until it is resolved."""

    id: str
    incident: str
    event: Happening
    at: float
    since: float
    severity: str
    check: str
    kind: str
    subject: str
    text: str
    remedy: str
    command: str | None = None
    impact: float | None = None
    link: str = "/"


def body_of(
    webhook: Webhook,
    alerts: Iterable[Alert],
    *,
    console: str | None,
    cluster: Iterable[str],
    name: str = "",
) -> bytes:
    """The body of a post; `name` is that of the cluster among several."""
    if webhook.format is Format.JSON:
        content: object = {
            "version": 1,
            "cluster": list(cluster),
            "cluster_name": name or None,
            "alerts": [_shown(each, console) for each in alerts],
        }
    else:
        where = f"[OrbitMQ] {name}:" if name else "[OrbitMQ]"
        text = "\n\n".join(_line(each, console, where) for each in alerts)
        content = _TEXT[webhook.format](text)
    return msgspec.json.encode(content)


def _escaped(text: str) -> str:
    """Text without the mentions and links of Slack, in which names could be written."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_TEXT: Final[Mapping[Format, Any]] = {
    Format.SLACK: lambda text: {"text": _escaped(text)},
    Format.FEISHU: lambda text: {"msg_type": "text", "content": {"text": text}},
    Format.DINGTALK: lambda text: {"msgtype": "text", "text": {"content": text}},
}


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _shown(alert: Alert, console: str | None) -> dict[str, object]:
    ended = alert.at if alert.event is Happening.RESOLVE else None
    content: dict[str, object] = msgspec.to_builtins(alert)
    del content["link"]
    return content | {
        "at": _instant(alert.at),
        "since": _instant(alert.since),
        "resolved": None if ended is None else _instant(ended),
        "url": _link(alert, console),
    }


def _link(alert: Alert, console: str | None) -> str | None:
    return None if console is None else console.rstrip("/") + alert.link


def _line(alert: Alert, console: str | None, begin: str) -> str:
    """An alert for people. DingTalk's filter on a keyword finds OrbitMQ in it."""
    if alert.event is Happening.TEST:
        return f"{begin} {alert.text}"
    link = _link(alert, console)
    where = f"\n{link}" if link else ""
    lasted = duration(max(0.0, alert.at - alert.since))
    if alert.event is Happening.RESOLVE:
        text = f"{begin} Resolved after {lasted}: {alert.subject}: {alert.kind}"
        return text[:_LONGEST] + where
    still = f" (for {lasted})" if alert.event is Happening.REPEAT else ""
    said = f"{alert.subject}: {alert.kind}{still}\n{alert.text}\n{alert.remedy}"
    return f"{begin} {alert.severity.capitalize()}: {said}"[:_LONGEST] + where


class NotDelivered(Exception):
    """A post that failed, with a reason that has no address in it."""

    def __init__(self, reason: str, *, is_refused: bool = False) -> None:
        #: Whether the receiver will refuse it again.
        self.is_refused = is_refused
        super().__init__(reason)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another server must not receive what is meant for this one."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
        headers: http.client.HTTPMessage, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        return None


#: Answers of 400 to 499 after which the same post may succeed.
_LATER: Final = (408, 425, 429)


def post(webhook: Webhook, body: bytes) -> None:
    """Post a body and wait for the answer, at most `TIMEOUT` for each step.

    Raises `NotDelivered`. Proxies are those of the environment, certificates are verified.
    """
    request = urllib.request.Request(  # noqa: S310  # the settings allow http and https only
        webhook.url,
        body,
        {"content-type": "application/json; charset=utf-8", "user-agent": "OrbitMQ"},
        method="POST",
    )
    context = urllib.request.HTTPSHandler(context=ssl.create_default_context())
    opener = urllib.request.build_opener(context, _NoRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            said = answer.read1(_LOOKED_AT)
    except urllib.error.HTTPError as error:
        with error:
            is_refused = error.code < 500 and error.code not in _LATER
            raise NotDelivered(f"it answered {error.code}", is_refused=is_refused) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotDelivered(_reason(error)) from None
    _check(webhook.format, said)


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"it did not answer within {duration(TIMEOUT)}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {cause.verify_message}"
    if isinstance(cause, OSError):
        return f"it cannot be reached: {cause.strerror or type(cause).__name__}"
    # Other errors may quote the address.
    return f"it cannot be reached: {type(cause).__name__}"


def _check(format_: Format, said: bytes) -> None:
    """Feishu and DingTalk refuse with 200 and a code in the body."""
    name = {Format.FEISHU: "code", Format.DINGTALK: "errcode"}.get(format_)
    if name is None:
        return
    try:
        content = msgspec.json.decode(said)
    except msgspec.MsgspecError:
        return
    code = content.get(name, 0) if isinstance(content, dict) else 0
    if code != 0:
        raise NotDelivered(f"it refused with {name} {str(code)[:20]}", is_refused=True)
