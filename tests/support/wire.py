"""Hypothesis strategies that follow from the declarations of the wire room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from orbitmq.wire import bodies, headers
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import Body

if TYPE_CHECKING:
    from types import ModuleType

S = TypeVar("S", bound=msgspec.Struct)

texts = st.text(max_size=20)


def instances(kind: type[S]) -> st.SearchStrategy[S]:
    """Any value of a declared header or body."""
    return _values(inspect.type_info(kind))


def _values(declared: inspect.Type) -> st.SearchStrategy[Any]:
    match declared:
        case inspect.StructType():
            fields = {field.name: _values(field.type) for field in declared.fields}
            return st.builds(declared.cls, **fields)
        case inspect.UnionType():
            return st.one_of(*(_values(part) for part in declared.types))
        case inspect.VarTupleType():
            return st.lists(_values(declared.item_type), max_size=2).map(tuple)
        case inspect.DictType():
            return st.dictionaries(
                _values(declared.key_type), _values(declared.value_type), max_size=2
            )
        case inspect.EnumType():
            return st.sampled_from(list(declared.cls))
        case inspect.IntType():
            return st.integers(declared.ge, declared.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return texts
        case _:
            raise AssertionError(f"no strategy for {declared}")


def declared_in(module: ModuleType, base: type[S]) -> list[type[S]]:
    """Every class that a module declares, in the order of their names."""
    found = {
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    return sorted(found, key=lambda kind: kind.__name__)


HEADERS: list[type[Header]] = declared_in(headers, Header)
BODIES: list[type[Body]] = declared_in(bodies, Body)
