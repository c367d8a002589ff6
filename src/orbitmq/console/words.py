"""Numbers as people say them, and the words that the console and the command line share.

One word for one thing, in tables, faults and pages alike:

| word | what it is |
|---|---|
| lag | messages that wait for a group: stored, and not finished |
| oldest | the age of the oldest of them |
| in flight | of the lag, what members have pulled and not finished |
| retries | of the lag, what failed before and is due again |
| later | what failed and waits for the delay before its next attempt; not in the lag |
| empty in | how long until none waits, at the present pace |
| finished up to | when the last message was stored that a group has finished |
| in, out | messages per second that are stored, and that are finished |
| pulled | messages per second that brokers hand out, by their own count |
| dead letters | messages that a group gave up; `dlq` is only typed |
| resend | to send a dead letter again; what that was done to is resent |
| member | a consumer that is online in a group |
| pipeline | what runs on Spark and reports to a console |
| unread | messages that the source of a pipeline has not read |
| failing | a pipeline whose messages come back |
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

from orbitmq.client.admin import DeadLetterFilter
from orbitmq.client.admin.deadletters import LONGEST_NAME, UNKNOWN_REASON
from orbitmq.client.routes import Queue
from orbitmq.clock import milliseconds
from orbitmq.parsing import Moment, epoch, moment

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


# The `orbitmq` command that does what a button does: shown beside every action.
#
# The one place where the console spells commands; words are quoted for a shell. They are spelled
# without a cluster; `aimed` names it, because nobody knows which one the shell asks that runs them.


ALL = DeadLetterFilter()
#: Commands that ask no cluster, or say themselves which.
_ASK_NOBODY = ("up", "namesrv", "broker", "pipeline status", "pipeline forget")


def aimed(text: str, name_servers: Iterable[str]) -> str:
    """The same command for the cluster of these name servers, wherever it is run.

    What is no command of ours, or asks no cluster, stays as it is; and so does any without servers.
    """
    words, servers = shlex.split(text), tuple(name_servers)
    asks = " ".join(words[1:3])
    if words[0] != "orbitmq" or not servers:
        return text
    if any(asks == each or asks.startswith(f"{each} ") for each in _ASK_NOBODY):
        return text
    flags = [word for server in servers for word in ("--name-server", server)]
    end = words.index("--") if "--" in words else len(words)
    return shlex.join([*words[:end], *flags, *words[end:]])


def command(*words: str, **options: object) -> str:
    """`orbitmq` with words and options; those that are None or False are left out.

    A value that begins with a dash must not be taken for an option; nor may a word.
    """
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.rstrip("_").replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(flag)
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            text = f"{each:g}" if isinstance(each, float) else str(each)
            is_like_flag = isinstance(each, str) and text.startswith("-")
            flags += [f"{flag}={text}"] if is_like_flag else [flag, text]
    first = next((place for place, word in enumerate(words) if word.startswith("-")), None)
    if first is not None:
        return shlex.join(["orbitmq", *words[:first], *flags, "--", *words[first:]])
    return shlex.join(["orbitmq", *words, *flags])


def create_topic(
    topic: str,
    *,
    queues: int | None = None,
    write_queues: int | None = None,
    read_queues: int | None = None,
    permission: str | None = None,
    ordered: bool | None = None,
    is_new: bool = True,
) -> str:
    """`ordered` is None where it stays as it is, or as topics usually are."""
    return command(
        "topic",
        "create" if is_new else "update",
        topic,
        queues=queues,
        write_queues=write_queues,
        read_queues=read_queues,
        permission=permission,
        ordered=ordered,
        unordered=ordered is False,
    )


def delete_topic(topic: str) -> str:
    return command("topic", "delete", topic)


def show_message(message_id: str, topic: str | None) -> str:
    return command("message", "show", message_id, topic=topic)


def track_message(message_id: str, topic: str | None) -> str:
    return command("message", "track", message_id, topic=topic)


def find_messages(topic: str, key: str, *, limit: int | None = None) -> str:
    return command("message", "find", topic, key, limit=limit)


def browse_messages(
    topic: str,
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    queues: Iterable[Queue] = (),
    offset: int | None = None,
    expression: str | None = None,
    is_sql: bool = False,
    newest: bool = False,
    limit: int | None = None,
) -> str:
    """`offset` is where to begin in the only one of `queues`."""
    return command(
        "message",
        "browse",
        topic,
        since=_time(since),
        until=_time(until),
        queue=[f"{queue.broker}:{queue.id}" for queue in queues],
        offset=offset,
        **_expression(expression, is_sql=is_sql),
        newest=newest,
        limit=limit,
    )


def follow_topic(topic: str, *, expression: str | None = None, is_sql: bool = False) -> str:
    return command("consume", topic, follow=True, **_expression(expression, is_sql=is_sql))


def _expression(expression: str | None, *, is_sql: bool) -> dict[str, object]:
    return {"sql" if is_sql else "tags": expression}


def show_group(group: str) -> str:
    return command("group", "show", group)


def pause_group(group: str, *, resume: bool = False) -> str:
    return command("group", "resume" if resume else "pause", group)


def show_member(group: str, client_id: str | None, *, stack: bool = False) -> str:
    words = () if client_id is None else (client_id,)
    return command("group", "member", group, *words, stack=stack)


def reset_group(
    group: str,
    topic: str,
    *,
    to_begin: bool = False,
    to_end: bool = False,
    to_time: str | None = None,
    to_offset: int | None = None,
    by: int | None = None,
    queues: Iterable[Queue] = (),
) -> str:
    return command(
        "group",
        "reset",
        group,
        topic,
        to_begin=to_begin,
        to_end=to_end,
        to_time=to_time,
        to_offset=to_offset,
        by=by,
        queue=[f"{queue.broker}:{queue.id}" for queue in queues],
    )


def skip_backlog(group: str, topic: str | None, *, dry_run: bool = False) -> str:
    words = () if topic is None else (topic,)
    return command("group", "skip", group, *words, dry_run=dry_run)


def clone_group(source: str, target: str, topic: str | None) -> str:
    return command("group", "clone", source, target, topic=topic)


def list_dead_letters(
    group: str,
    where: DeadLetterFilter = ALL,
    *,
    newest: bool = False,
    limit: int | None = None,
) -> str:
    return command("dlq", "list", group, **_choice(where), newest=newest, limit=limit)


def count_dead_letters(group: str, where: DeadLetterFilter = ALL) -> str:
    return command("dlq", "summary", group, **_choice(where))


def resend_dead_letters(
    group: str,
    where: DeadLetterFilter = ALL,
    *,
    limit: int | None = None,
    rate: float | None = None,
    to: str = "retry",
    again: bool = False,
    dry_run: bool = False,
) -> str:
    return command(
        "dlq",
        "resend",
        group,
        **_choice(where),
        limit=limit,
        rate=rate,
        to=to,
        again=again,
        dry_run=dry_run,
    )


def export_dead_letters(group: str, file: str, where: DeadLetterFilter = ALL) -> str:
    return command("dlq", "export", group, file, **_choice(where))


def _choice(where: DeadLetterFilter) -> dict[str, object]:
    """Which dead letters, as options."""
    return {
        "since": _time(where.since),
        "until": _time(where.until),
        "key": list(where.keys),
        "topic": where.topic,
        "reason": where.reason,
        "pile": where.pile,
        "min_attempts": where.min_attempts,
        "max_attempts": where.max_attempts,
        "id": list(where.ids),
    }


def _time(moment: Moment | None) -> str | None:
    """A time with its zone: whoever runs the command may be in another one."""
    if moment is None or isinstance(moment, str):
        return moment
    text = datetime.fromtimestamp(epoch(moment, "a time"), UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def show_pipeline(name: str, console: str = "URL") -> str:
    """`console` is where it reports to; a console does not know by which name it is reached."""
    return command("pipeline", "status", name, console=console)


def forget_pipeline(name: str, console: str = "URL") -> str:
    return command("pipeline", "forget", name, console=console)


def start_name_server(port: int) -> str:
    return command("namesrv", port=port)


def start_broker(
    name: str | None,
    name_servers: Iterable[str],
    *,
    data: str | None = None,
    port: int | None = None,
    advertise: str | None = None,
    setting: str | None = None,
) -> str:
    """`data` is where its messages are; `setting` is one as in `broker.port=0`."""
    return command(
        "broker",
        name=name,
        data=data,
        port=port,
        name_server=list(name_servers),
        advertise=advertise,
        set=setting,
    )


def produce(
    topic: str,
    body: str,
    *,
    tags: str | None = None,
    keys: Iterable[str] = (),
    properties: Mapping[str, str] | None = None,
    delay: float | None = None,
) -> str:
    return command(
        "produce",
        topic,
        body,
        tag=tags,
        key=list(keys),
        property=[f"{name}={value}" for name, value in (properties or {}).items()],
        delay=None if delay is None else f"{delay:g}s",
    )


# PySpark snippets: what the page shows, in a notebook, with the filter filled in.


def dead_letter_snippet(
    name_servers: Iterable[str], group: str, where: DeadLetterFilter, pile: str | None = None
) -> str:
    """Reads the dead letters of a group; texts are Python literals, whatever is in them."""
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
    """What chooses the letters, as expressions of Spark."""
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
