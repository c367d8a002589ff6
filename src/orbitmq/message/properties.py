"""Properties of a message: one string `name \\x01 value \\x02 name \\x01 value \\x02 ...`.

How every reader must take it apart, so that all peers see the same properties:

* `\\x02` ends an item; after the last item it may be missing.
* The first `\\x01` of an item ends the name; a value may contain further ones, never a `\\x02`.
* An item without a name, without a value or without `\\x01` does not count.
* Of items with the same name the last one counts.

Brokers handle the string as it is, because taking it apart and joining it again costs more than
all the rest of a send: they find, append and remove single properties in it. These functions work
alike on the text of a request header and on the bytes of a record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, AnyStr, Final

from orbitmq.message.errors import PropertiesRefused
from orbitmq.message.record import MAX_PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

NAME_END: Final = "\x01"
ITEM_END: Final = "\x02"

_NAME_END_BYTE: Final = b"\x01"
_ITEM_END_BYTE: Final = b"\x02"
#: What stands in a text for bytes that were none.
_REPLACEMENT: Final = "\ufffd"


# ---- whole maps


def encode_properties(properties: Mapping[str, str | None]) -> bytes:
    """The stored bytes; entries without a value are left out, as no reader would see them."""
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
    """Refuse more bytes than the 16-bit length of a record can count."""
    if len(raw) > MAX_PROPERTIES:
        text = f"the properties take {len(raw)} bytes; a message can hold {MAX_PROPERTIES}"
        raise PropertiesRefused(text)


# ---- single properties inside the string


def property_value(raw: AnyStr, name: str) -> str | None:
    """The value of `name` as `decode_properties` would give it, without taking `raw` apart."""
    if isinstance(raw, bytes):
        if _REPLACEMENT in name:
            # Several runs of bytes are read as this name, so they must be read to be found.
            return property_value(raw.decode("utf-8", "replace"), name)
        first, later = _needles(name)
        found = _last_value(raw, first, later, _ITEM_END_BYTE)
        value = None if found is None else found.decode("utf-8", "replace")
    else:
        first_text, later_text = _needle_texts(name)
        value = _last_value(raw, first_text, later_text, ITEM_END)
    if value == "":
        # An item with an empty value does not count, so one before it may: this is rare.
        return decode_properties(raw).get(name)
    return value


def append_property(raw: AnyStr, name: str, value: str) -> AnyStr:
    """`raw` with one more property at its end, where it wins over an earlier one."""
    item = _item(name, value)
    if isinstance(raw, bytes):
        gap = b"" if not raw or raw.endswith(_ITEM_END_BYTE) else _ITEM_END_BYTE
        return raw + gap + _utf8(item)
    gap_text = "" if not raw or raw.endswith(ITEM_END) else ITEM_END
    return raw + gap_text + item


def remove_properties(raw: AnyStr, names: Collection[str]) -> AnyStr:
    """`raw` without the properties of these names; the other items stay as they are."""
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
    """`raw` with `name` set to `value`, and no earlier item of that name left in it."""
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
