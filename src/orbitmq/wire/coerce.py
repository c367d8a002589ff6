"""Values of any JSON type into declared ones, as forgivingly as peers have come to rely on.

msgspec converts at C speed what is nearly right. What it refuses comes here: numbers in quotes or
for strings, `"0"` and `"1"` for booleans, enumerations by place instead of name, nulls for absent
fields, objects in the place of keys. The rules follow from the declared types and so hold for every
header and body alike. What cannot be meant is refused with the field, what is allowed there, and
what was found.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from orbitmq.wire.errors import WireError
from orbitmq.wire.fastjson import JsonError, ObjectKey, Value, parse
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits

S = TypeVar("S", bound=msgspec.Struct)


class Mismatch(WireError):
    """A value that does not fit the declared type, with the way to it."""

    def __init__(self, allowed: str, got: str) -> None:
        self.allowed = allowed
        self.got = got
        self.path: list[str] = []
        super().__init__(allowed, got)

    @property
    def field(self) -> str:
        return ".".join(reversed(self.path)) or "(all)"

    def __str__(self) -> str:
        return f"{self.field!r} must be {self.allowed}, got {self.got}"


class Budget:
    """How many values a conversion may still visit: references can make a small body large."""

    __slots__ = ("left", "limits")

    def __init__(self, limits: WireLimits) -> None:
        self.limits = limits
        self.left = limits.body_values

    def spend(self, values: int) -> None:
        self.left -= values
        if self.left < 0:
            raise Mismatch(f"at most {self.limits.body_values} values", "more by references")


Convert = Callable[[Any, Budget], Any]


def coerce(
    kind: type[S], value: Value | Mapping[str, str], limits: WireLimits = DEFAULT_LIMITS
) -> S:
    """`value` as a `kind`; raises `Mismatch`."""
    converted: S = _converter_of(kind)(value, Budget(limits))
    return converted


@functools.cache
def _converter_of(kind: type[msgspec.Struct]) -> Convert:
    return _converter(inspect.type_info(kind))


def _converter(declared: inspect.Type) -> Convert:
    return _BUILDERS[type(declared)](declared)


def _struct(declared: inspect.StructType) -> Convert:
    fields = [(field, _converter(field.type), _is_text(field.type)) for field in declared.fields]
    make = declared.cls

    def convert(value: Any, budget: Budget) -> Any:
        if isinstance(value, ObjectKey):
            value = dict(value)
        if not isinstance(value, Mapping):
            raise Mismatch("an object", _shown(value))
        budget.spend(len(fields))
        found: dict[str, Any] = {}
        for field, converter, is_text in fields:
            entry = value.get(field.encode_name)
            if entry is None or (entry == "" and not is_text and not field.required):
                if field.required:
                    raise _at(Mismatch("present", "nothing"), field.encode_name)
                continue
            try:
                found[field.name] = converter(entry, budget)
            except Mismatch as mismatch:
                raise _at(mismatch, field.encode_name) from None
        return make(**found)

    return convert


def _is_text(declared: inspect.Type) -> bool:
    """Whether an empty string is a value here, and not just the absence of one."""
    if isinstance(declared, inspect.UnionType):
        return any(_is_text(part) for part in declared.types)
    return isinstance(declared, inspect.StrType | inspect.AnyType)


def _union(declared: inspect.UnionType) -> Convert:
    inner = [part for part in declared.types if not isinstance(part, inspect.NoneType)]
    converter = _converter(inner[0])

    def convert(value: Any, budget: Budget) -> Any:
        return None if value is None else converter(value, budget)

    return convert


def _many(declared: inspect.VarTupleType) -> Convert:
    converter = _converter(declared.item_type)

    def convert(value: Any, budget: Budget) -> Any:
        if not isinstance(value, list):
            raise Mismatch("an array", _shown(value))
        budget.spend(len(value))
        found = []
        for place, entry in enumerate(value):
            try:
                found.append(converter(entry, budget))
            except Mismatch as mismatch:
                raise _at(mismatch, f"[{place}]") from None
        return tuple(found)

    return convert


def _mapping(declared: inspect.DictType) -> Convert:
    key_of = _converter(declared.key_type)
    value_of = _converter(declared.value_type)
    by_object = isinstance(declared.key_type, inspect.StructType)

    def convert(value: Any, budget: Budget) -> Any:
        if not isinstance(value, dict):
            raise Mismatch("an object", _shown(value))
        budget.spend(len(value))
        found = {}
        for key, entry in value.items():
            if entry is None:
                continue
            try:
                if by_object and isinstance(key, str):
                    key = _key_in_text(key, budget)
                found[key_of(key, budget)] = value_of(entry, budget)
            except Mismatch as mismatch:
                raise _at(mismatch, str(key)[:40]) from None
        return found

    return convert


def _key_in_text(key: str, budget: Budget) -> Value:
    """An object key that was put into quotes, with its own quotes escaped."""
    try:
        return parse(key, budget.limits)
    except JsonError:
        raise Mismatch("an object", _shown(key)) from None


def _text(_: inspect.StrType) -> Convert:
    def convert(value: Any, _: Budget) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return str(value)
        raise Mismatch("a string", _shown(value))

    return convert


_integer = re.compile(r"[+-]?[0-9]{1,20}").fullmatch


def _whole(declared: inspect.IntType) -> Convert:
    low, high = declared.ge, declared.le
    allowed = "an integer" if low is None or high is None else f"an integer from {low} to {high}"

    def convert(value: Any, _: Budget) -> int:
        if isinstance(value, str):
            is_whole = _integer(value) is not None
        else:
            is_whole = type(value) in (int, float) and value % 1 == 0
        if not is_whole:
            raise Mismatch(allowed, _shown(value))
        number = int(value)
        if (low is not None and number < low) or (high is not None and number > high):
            raise Mismatch(allowed, _shown(value))
        return number

    return convert


def _fraction(_: inspect.FloatType) -> Convert:
    def convert(value: Any, _: Budget) -> float:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
        raise Mismatch("a number", _shown(value))

    return convert


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _truth(_: inspect.BoolType) -> Convert:
    def convert(value: Any, _: Budget) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str | int) and (found := _TRUTH.get(str(value).lower())) is not None:
            return found
        raise Mismatch("true or false (or 1 or 0)", _shown(value))

    return convert


def _choice(declared: inspect.EnumType) -> Convert:
    members = list(declared.cls)
    names = {member.name.upper(): member for member in members}
    allowed = "one of " + ", ".join(names)

    def convert(value: Any, _: Budget) -> Any:
        if isinstance(value, str) and (found := names.get(value.upper())) is not None:
            return found
        text = str(value)
        # `isdecimal` knows digits that `int` reads and nobody means.
        if isinstance(value, str | int) and text.isascii() and text.isdigit() and len(text) < 4:
            place = int(text)
            if place < len(members):
                return members[place]
        raise Mismatch(allowed, _shown(value))

    return convert


def _anything(_: inspect.AnyType) -> Convert:
    def convert(value: Any, _: Budget) -> Any:
        return value

    return convert


_BUILDERS: Mapping[type[inspect.Type], Callable[[Any], Convert]] = {
    inspect.StructType: _struct,
    inspect.UnionType: _union,
    inspect.VarTupleType: _many,
    inspect.DictType: _mapping,
    inspect.StrType: _text,
    inspect.IntType: _whole,
    inspect.FloatType: _fraction,
    inspect.BoolType: _truth,
    inspect.EnumType: _choice,
    inspect.AnyType: _anything,
}


def _at(mismatch: Mismatch, place: str) -> Mismatch:
    mismatch.path.append(place)
    return mismatch


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
