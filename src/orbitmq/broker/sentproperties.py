"""What a broker looks for in the properties of every message, without taking them apart."""

from __future__ import annotations

from orbitmq.message.properties import property_value
from orbitmq.message.wellknown import UNIQ_KEY, WAIT

_UNIQ_KEY = UNIQ_KEY + "\x01"
_ITEM_END = "\x02"


def unique_id_of(properties: str) -> str | None:
    """The unique id in a property string; None when there is none."""
    before, name, rest = properties.partition(_UNIQ_KEY)
    if not name:
        return None
    if (before and before[-1] != _ITEM_END) or _UNIQ_KEY in rest:
        # In a value, or more than once: the careful way.
        return property_value(properties, UNIQ_KEY)
    return rest.partition(_ITEM_END)[0] or None


def waits_for_flush(properties: str) -> bool:
    """Whether the sender of a message wants to know that it is on the disk."""
    wait = property_value(properties, WAIT)
    return wait is None or wait.lower() == "true"
