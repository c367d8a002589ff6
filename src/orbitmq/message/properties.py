"""Properties of a message: one string `name \x01 value \x02 name \x01 value \x02 ...`.

Every reader must parse it in the same way, so that all peers see the same properties:

* `\x02` ends an item; after the last item it may be missing.
* The first `\x01` of an item ends the name; a value may contain further ones, never a `\x02`.
* An item without a name, without a value or without `\x01` does not count.
* Of items with the same name the last one counts.

Brokers use the string as it is, because parsing and joining it again costs more than the rest of a
send: they find, append and remove single properties in it. These functions work on the text of a
request header and on the bytes of a record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, AnyStr, Final

from orbitmq.message.record import MAX_PROPERTIES, PropertiesRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


NAME_END: Final = "\x01"
ITEM_END: Final = "\x02"

_NAME_END_BYTE: Final = b"\x01"
_ITEM_END_BYTE: Final = b"\x02"
#: Replaces bytes that are not UTF-8.
_REPLACEMENT: Final = "\ufffd"


# ---- whole maps


def encode_properties(properties: Mapping[str, str | None]) -> bytes:
    """The stored bytes; entries without a value are left out, as every reader ignores them."""
    text = "".join([_item(name, value) for name, value in properties.items() if value])
    encoded = _utf8(text)
    check_properties_size(encoded)
    return encoded


def decode_properties(raw: bytes | str) -> dict[str, str]:
    """The properties in `raw`; bytes that are not UTF-8 become U+FFFD, as in every client."""
    if isinstance(raw, bytes):
        raw = raw.decode("utf-8", "replace")
    properties = {}
    for item in raw.split(ITEM_END):
        name, _, value = item.partition(NAME_END)
        if name and value:
            properties[name] = value
    return properties


def check_properties_size(raw: bytes) -> None:
    """Refuse more bytes than the 16-bit length in a record allows."""
    if len(raw) > MAX_PROPERTIES:
        text = f"the properties take {len(raw)} bytes; a message can hold {MAX_PROPERTIES}"
        raise PropertiesRefused(text)


# ---- single properties inside the string


def property_value(raw: AnyStr, name: str) -> str | None:
    """The value of `name` as `decode_properties` would return it, without parsing all of `raw`."""
    if isinstance(raw, bytes):
        if _REPLACEMENT in name:
            # Several byte sequences decode to this name, so all items must be decoded.
            return property_value(raw.decode("utf-8", "replace"), name)
        first, later = _needles(name)
        found = _last_value(raw, first, later, _ITEM_END_BYTE)
        value = None if found is None else found.decode("utf-8", "replace")
    else:
        first_text, later_text = _needle_texts(name)
        value = _last_value(raw, first_text, later_text, ITEM_END)
    if value == "":
        # An item with an empty value does not count, so an earlier one may. This is rare.
        return decode_properties(raw).get(name)
    return value


def append_property(raw: AnyStr, name: str, value: str) -> AnyStr:
    """`raw` with one more property at the end, which overrides an earlier one."""
    item = _item(name, value)
    if isinstance(raw, bytes):
        gap = b"" if not raw or raw.endswith(_ITEM_END_BYTE) else _ITEM_END_BYTE
        return raw + gap + _utf8(item)
    gap_text = "" if not raw or raw.endswith(ITEM_END) else ITEM_END
    return raw + gap_text + item


def remove_properties(raw: AnyStr, names: Collection[str]) -> AnyStr:
    """`raw` without the properties of these names."""
    if isinstance(raw, bytes):
        needles = tuple([_name_bytes(name) for name in names])
        items = raw.split(_ITEM_END_BYTE)
        if any(_REPLACEMENT in name for name in names):
            kept = [item for item in items if _name_of(item) not in names]
        elif any(needle in raw for needle in needles):
            kept = [item for item in items if not item.startswith(needles)]
        else:
            return raw
        return _ITEM_END_BYTE.join(kept)
    needle_texts = tuple([_name_text(name) for name in names])
    if not any(needle in raw for needle in needle_texts):
        return raw
    return ITEM_END.join([i for i in raw.split(ITEM_END) if not i.startswith(needle_texts)])


def replace_property(raw: AnyStr, name: str, value: str) -> AnyStr:
    """`raw` with `name` set to `value`, without earlier items of that name."""
    return append_property(remove_properties(raw, (name,)), name, value)


def _last_value(raw: AnyStr, first: AnyStr, later: AnyStr, item_end: AnyStr) -> AnyStr | None:
    """What follows the last `later`, or else `first` at the beginning, up to the item's end."""
    _, found, rest = raw.rpartition(later)
    if not found:
        if not raw.startswith(first):
            return None
        rest = raw[len(first) :]
    return rest.partition(item_end)[0]


def _name_of(item: bytes) -> str | None:
    name, end, _ = item.partition(_NAME_END_BYTE)
    return name.decode("utf-8", "replace") if end else None


def _item(name: str, value: str) -> str:
    if not value or ITEM_END in value:
        text = f"property {name!r} has a value that is empty or contains \\x02, which ends values"
        raise PropertiesRefused(text)
    return f"{_name_text(name)}{value}{ITEM_END}"


@lru_cache(maxsize=1024)
def _name_text(name: str) -> str:
    if not name or NAME_END in name or ITEM_END in name:
        text = f"a property's name must not be empty or contain \\x01 or \\x02, got {name!r}"
        raise PropertiesRefused(text)
    return name + NAME_END


@lru_cache(maxsize=1024)
def _name_bytes(name: str) -> bytes:
    return _utf8(_name_text(name))


@lru_cache(maxsize=1024)
def _needle_texts(name: str) -> tuple[str, str]:
    return _name_text(name), ITEM_END + _name_text(name)


@lru_cache(maxsize=1024)
def _needles(name: str) -> tuple[bytes, bytes]:
    return _name_bytes(name), _ITEM_END_BYTE + _name_bytes(name)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        refused = f"properties hold text that UTF-8 cannot express: {error.reason}"
        raise PropertiesRefused(refused) from error


# Names of the properties that have a meaning in RocketMQ.


# Set by producers.
KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
UNIQ_KEY: Final = "UNIQ_KEY"
SHARDING_KEY: Final = "__SHARDINGKEY"
INSTANCE_ID: Final = "INSTANCE_ID"
EXTEND_UNIQ_INFO: Final = "EXTEND_UNIQ_INFO"
DUP_INFO: Final = "DUP_INFO"
BORN_HOST: Final = "__BORNHOST"
BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
#: OrbitMQ's own: a broker stores one message of a topic with this id. Apache's broker ignores it.
DEDUP_ID: Final = "__DEDUP_ID"

# Transactions.
PRODUCER_GROUP: Final = "PGROUP"
TRANSACTION_PREPARED: Final = "TRAN_MSG"
TRANSACTION_ID: Final = "__transactionId__"
TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"

# The origin of a parked, retried or dead message.
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE_ID: Final = "REAL_QID"
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME: Final = "RECONSUME_TIME"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"

# Added by consumers, in memory only.
MIN_OFFSET: Final = "MIN_OFFSET"
MAX_OFFSET: Final = "MAX_OFFSET"
CONSUME_START_TIME: Final = "CONSUME_START_TIME"

# Added by brokers.
MSG_REGION: Final = "MSG_REGION"
TRACE_SWITCH: Final = "TRACE_ON"
CLUSTER: Final = "CLUSTER"
RECORD_CRC32: Final = "__CRC32#"

# Request and reply.
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
MESSAGE_TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"
ARRIVE_TIME: Final = "ARRIVE_TIME"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"

# Inner batches and light queues.
INNER_NUM: Final = "INNER_NUM"
INNER_BASE: Final = "INNER_BASE"
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"

# POP.
POP_CK: Final = "POP_CK"
POP_CK_OFFSET: Final = "POP_CK_OFFSET"
FIRST_POP_TIME: Final = "1ST_POP_TIME"

# Delivery at a given time.
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
TIMER_DELAY_LEVEL: Final = "TIMER_DELAY_LEVEL"
TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"

REDIRECT: Final = "REDIRECT"
TRACE_CONTEXT: Final = "TRACE_CONTEXT"
BUYER_ID: Final = "BUYER_ID"
TRANSFER_FLAG: Final = "TRANSFER_FLAG"
CORRECTION_FLAG: Final = "CORRECTION_FLAG"
MQ2_FLAG: Final = "MQ2_FLAG"


#: Names that the Java client refuses as names of user properties (`MessageConst`), and our own.
RESERVED: Final = frozenset(
    {
        TRACE_SWITCH,
        MSG_REGION,
        KEYS,
        TAGS,
        WAIT,
        DELAY,
        RETRY_TOPIC,
        REAL_TOPIC,
        REAL_QUEUE_ID,
        TRANSACTION_PREPARED,
        PRODUCER_GROUP,
        MIN_OFFSET,
        MAX_OFFSET,
        BUYER_ID,
        ORIGIN_MESSAGE_ID,
        TRANSFER_FLAG,
        CORRECTION_FLAG,
        MQ2_FLAG,
        RECONSUME_TIME,
        UNIQ_KEY,
        MAX_RECONSUME_TIMES,
        CONSUME_START_TIME,
        POP_CK,
        POP_CK_OFFSET,
        FIRST_POP_TIME,
        TRANSACTION_PREPARED_QUEUE_OFFSET,
        DUP_INFO,
        DEDUP_ID,
        EXTEND_UNIQ_INFO,
        INSTANCE_ID,
        CORRELATION_ID,
        REPLY_TO_CLIENT,
        MESSAGE_TTL,
        ARRIVE_TIME,
        PUSH_REPLY_TIME,
        CLUSTER,
        MESSAGE_TYPE,
        INNER_MULTI_QUEUE_OFFSET,
        TIMER_DELAY_MS,
        TIMER_DELAY_SEC,
        TIMER_DELIVER_MS,
        TIMER_ENQUEUE_MS,
        TIMER_DEQUEUE_MS,
        TIMER_ROLL_TIMES,
        TIMER_OUT_MS,
        TIMER_DEL_UNIQKEY,
        TIMER_DELAY_LEVEL,
        BORN_HOST,
        BORN_TIMESTAMP,
        DLQ_ORIGIN_TOPIC,
        DLQ_ORIGIN_MESSAGE_ID,
        RECORD_CRC32,
    }
)
