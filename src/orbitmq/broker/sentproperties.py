"""What a broker looks for in the properties of every message, without taking them apart."""

from __future__ import annotations

from orbitmq.message.properties import property_value
from orbitmq.message.wellknown import UNIQ_KEY, WAIT

_UNIQ_KEY = UNIQ_KEY + "\x01"
_ITEM_END = "\x02"


def unique_id_of(properties: str) -> str | None:
    """The unique id in a property string; None when there is none."""
    at = properties.find(_UNIQ_KEY)
    if at < 0:
        return None
    begin = at + len(_UNIQ_KEY)
    if (at and properties[at - 1] != _ITEM_END) or properties.find(_UNIQ_KEY, begin) >= 0:
        # In a value, or more than once: the careful way.
        return property_value(properties, UNIQ_KEY)
    end = properties.find(_ITEM_END, begin)
    return (properties[begin:end] if end >= 0 else properties[begin:]) or None


def waits_for_flush(properties: str) -> bool:
    """Whether the sender of a message wants to know that it is on the disk."""
    wait = property_value(properties, WAIT)
    return wait is None or wait.lower() == "true"
