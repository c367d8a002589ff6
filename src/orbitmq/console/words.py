"""Numbers as text, and the commands and snippets that the page shows beside an action.

The console and the command line use one word for one thing; docs/console.md lists the words.
"""

from __future__ import annotations

import enum
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

from orbitmq.client.admin.deadletters import LONGEST_NAME, UNKNOWN_REASON, DeadLetterFilter
from orbitmq.client.routes import Queue
from orbitmq.clock import milliseconds
from orbitmq.parsing import Moment, epoch, moment
from orbitmq.wire.codes import OUR_VERSION, release_of

NOTHING = "-"

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def several(number: int, one: str, many: str | None = None) -> str:
    """`1 message`, `3 messages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float | None) -> str:
    """The two largest units that matter: `2 h 5 min`, `3 min 20 s`, `4.2 s`, `350 ms`."""
    if seconds is None:
        return NOTHING
    if seconds <= 0:
        return "0 s"
    if seconds < 1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if math.isinf(seconds):
        return "for ever"
    left = round(seconds)
    parts: list[str] = []
    for unit, length in _UNITS:
        number, left = divmod(left, length)
        if number:
            parts.append(f"{number} {unit}")
        if parts and (len(parts) == 2 or not number):
            break
    return " ".join(parts)


def share(part: float | None) -> str:
    """`85 %` of 0.85."""
    return NOTHING if part is None else f"{part * 100:.0f} %"


class Action(enum.StrEnum):
    """What the page does or suggests, and the command that does the same."""

    START_CLUSTER = "up"
    START_NAME_SERVER = "namesrv"
    START_BROKER = "broker"
    START_CONSOLE = "console"
    SHOW_CLUSTER = "cluster show"
    CREATE_TOPIC = "topic create"
    UPDATE_TOPIC = "topic update"
    DELETE_TOPIC = "topic delete"
    PRODUCE = "produce"
    CONSUME = "consume"
    SHOW_MESSAGE = "message show"
    TRACK_MESSAGE = "message track"
    FIND_MESSAGES = "message find"
    BROWSE_MESSAGES = "message browse"
    LIST_GROUPS = "group list"
    SHOW_GROUP = "group show"
    SHOW_MEMBER = "group member"
    UPDATE_GROUP = "group update"
    PAUSE_GROUP = "group pause"
    RESUME_GROUP = "group resume"
    RESET_GROUP = "group reset"
    SKIP_BACKLOG = "group skip"
    CLONE_GROUP = "group clone"
    LIST_DEAD_LETTERS = "dlq list"
    COUNT_DEAD_LETTERS = "dlq summary"
    RESEND_DEAD_LETTERS = "dlq resend"
    EXPORT_DEAD_LETTERS = "dlq export"
    RUN_PIPELINE = "pipeline run"
    SHOW_PIPELINE = "pipeline status"
    FORGET_PIPELINE = "pipeline forget"
    ADD_USER = "user add"
    REMOVE_USER = "user remove"
    SET_PASSWORD = "user password"  # noqa: S105  # a command, not a password
    SET_ROLE = "user role"


#: Commands that take no `--name-server`, or name it themselves.
_WITHOUT_CLUSTER = (
    Action.START_CLUSTER,
    Action.START_NAME_SERVER,
    Action.START_BROKER,
    Action.SHOW_PIPELINE,
    Action.FORGET_PIPELINE,
    Action.ADD_USER,
    Action.REMOVE_USER,
    Action.SET_PASSWORD,
    Action.SET_ROLE,
)


def command(
    action: Action, *arguments: str | None, where: DeadLetterFilter | None = None, **options: object
) -> str:
    """The command of an action, quoted for a shell, without a cluster.

    Arguments and options that are None are left out, and options that are False. `where` becomes
    the options that choose dead letters.
    """
    words = [each for each in arguments if each is not None]
    flags = [
        text for name, value in (_choice(where) | options).items() for text in _flag(name, value)
    ]
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    # A word that begins with a dash must not be taken for an option.
    last = ["--", *words[first:]] if first < len(words) else []
    return shlex.join(["orbitmq", *action.split(), *words[:first], *flags, *last])


def _flag(name: str, value: object) -> Iterator[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return
    if value is True:
        yield flag
        return
    if isinstance(value, Mapping):
        value = [f"{key}={each}" for key, each in value.items()]
    for each in value if isinstance(value, list | tuple) else (value,):
        text = _text(each)
        if isinstance(each, str) and text.startswith("-"):
            yield f"{flag}={text}"
        else:
            yield from (flag, text)


def _text(value: object) -> str:
    if isinstance(value, Queue):
        return f"{value.broker}:{value.id}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choice(where: DeadLetterFilter | None) -> dict[str, object]:
    if where is None:
        return {}
    return {
        "since": instant(where.since),
        "until": instant(where.until),
        "key": list(where.keys),
        "topic": where.topic,
        "reason": where.reason,
        "pile": where.pile,
        "min_attempts": where.min_attempts,
        "max_attempts": where.max_attempts,
        "id": list(where.ids),
    }


def instant(moment: Moment | None) -> str | None:
    """A time with its zone: the shell that runs the command may be in another one."""
    if moment is None or isinstance(moment, str):
        return moment
    text = datetime.fromtimestamp(epoch(moment, "a time"), UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


#: Languages of clients, as the page names them.
_CLIENTS: Mapping[str, str] = {
    "java": "Java", "cpp": "C++", "dotnet": ".NET", "go": "Go", "node_js": "Node.js",
    "rust": "Rust", "php": "PHP", "ruby": "Ruby", "erlang": "Erlang", "delphi": "Delphi",
    "http": "HTTP", "oms": "OpenMessaging", "python": "Python",
}  # fmt: skip
#: Clients that announce one release for ever, and the releases of their own that do so.
_FIXED: Mapping[tuple[str, str], str] = {("go", "4.5.2"): "2", ("cpp", "3.1.8"): "1"}
_OURS = str(release_of(OUR_VERSION))


def client_name(language: str, version: str, told: str = "") -> str:
    """`Java 5.5.0`, `OrbitMQ 0.1.0`, `Go 2`: which client it is.

    `told` is the release of OrbitMQ in the client's own report. An unknown number is left out.
    """
    if language == "python" and (told or version == _OURS):
        return f"OrbitMQ {told}".strip()
    name = _CLIENTS.get(language, language or "unknown client")
    known = _FIXED.get((language, version), version)
    if not known or (known.isdecimal() and (language, version) not in _FIXED):
        return name
    return f"{name} {known}"


def for_cluster(text: str, name_servers: Iterable[str]) -> str:
    """The command for the cluster of these name servers, wherever it is run.

    Without name servers, and for commands that are not ours or need no cluster, the text itself.
    """
    words, servers = shlex.split(text), tuple(name_servers)
    action = " ".join(words[1:3])
    if words[0] != "orbitmq" or not servers:
        return text
    if any(action == each or action.startswith(f"{each} ") for each in _WITHOUT_CLUSTER):
        return text
    flags = [word for server in servers for word in ("--name-server", server)]
    end = words.index("--") if "--" in words else len(words)
    return shlex.join([*words[:end], *flags, *words[end:]])


def dead_letter_snippet(
    name_servers: Iterable[str], group: str, where: DeadLetterFilter, pile: str | None = None
) -> str:
    """A PySpark snippet that reads the chosen dead letters of a group."""
    conditions = "".join(
        f"letters = letters.where({each})\n" for each in _conditions(where, pile or where.pile)
    )
    return f"""import pyspark_orbitmq
from orbitmq.spark import dead_letters
from pyspark.sql import SparkSession, functions as F

spark = SparkSession.builder.getOrCreate()
spark.dataSource.register(pyspark_orbitmq.DefaultSource)
letters = dead_letters(spark, {group!r}, name_server={";".join(name_servers)!r})
{conditions}letters.select(
    "storedAt", "topic", "keys", "attempts", "reason", F.col("body").cast("string")
).orderBy(F.desc("storedAt")).show(20, truncate=80)
"""


def _conditions(where: DeadLetterFilter, pile: str | None) -> Iterator[str]:
    """The filter as Spark expressions; texts are Python literals."""
    if where.since is not None:
        yield f'F.col("storedAt") >= F.timestamp_millis(F.lit({_millis(where.since)}))'
    if where.until is not None:
        yield f'F.col("storedAt") < F.timestamp_millis(F.lit({_millis(where.until)}))'
    if where.topic is not None:
        yield f'F.col("topic") == {where.topic!r}'
    if where.keys:
        wanted = ", ".join(f"F.lit({key!r})" for key in where.keys)
        yield f'F.arrays_overlap(F.split("keys", " "), F.array({wanted}))'
    if where.min_attempts is not None:
        yield f'F.col("attempts") >= {where.min_attempts}'
    if where.max_attempts is not None:
        yield f'F.col("attempts") <= {where.max_attempts}'
    if where.reason is not None:
        yield f'F.lower("reason").contains({where.reason.lower()!r})'
    if pile == UNKNOWN_REASON:
        yield f'F.coalesce("reason", F.lit({UNKNOWN_REASON!r})) == {UNKNOWN_REASON!r}'
    elif pile is not None:
        first = r'F.trim(F.substring_index(F.trim("reason"), "\n", 1))'
        yield f"F.substring({first}, 1, {LONGEST_NAME}) == {pile!r}"


def _millis(value: object) -> int:
    return milliseconds(moment(value))
