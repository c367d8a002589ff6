"""Bodies in Avro and Protobuf as columns: their types in Spark, decoding and encoding.

Types are those of Spark's own `from_avro` and `from_protobuf`. Times are read as numbers, so that
those beyond the calendar of Python are no error, and converted in Arrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from orbitmq.message.formats import (
    FormatRefused,
    Write,
    avro_reader,
    avro_schema,
    avro_writer,
    protobuf_class,
)

if TYPE_CHECKING:
    import pyarrow as pa

#: Decodes bodies without nulls; raises anything if one does not fit.
Decode = Callable[["pa.Array"], "pa.Array"]
#: Bodies that are decoded at once; fewer are faster one by one.
_FEWEST: Final = 16

# Avro

_AVRO: Final[Mapping[str, type[DataType]]] = {
    "boolean": BooleanType,
    "int": IntegerType,
    "long": LongType,
    "float": FloatType,
    "double": DoubleType,
    "bytes": BinaryType,
    "string": StringType,
    "fixed": BinaryType,
    "enum": StringType,
}
#: Logical types that are columns of their own, and the unit in which Avro has them.
_AVRO_LOGICAL: Final[Mapping[tuple[str, str], tuple[type[DataType], str]]] = {
    ("int", "date"): (DateType, "day"),
    ("long", "timestamp-millis"): (TimestampType, "ms"),
    ("long", "timestamp-micros"): (TimestampType, "us"),
    ("long", "timestamp-nanos"): (TimestampType, "ns"),
    ("long", "local-timestamp-millis"): (TimestampNTZType, "ms"),
    ("long", "local-timestamp-micros"): (TimestampNTZType, "us"),
    ("long", "local-timestamp-nanos"): (TimestampNTZType, "ns"),
}
#: Unions of numbers, and the type that holds both.
_AVRO_WIDER: Final[Mapping[frozenset[str], type[DataType]]] = {
    frozenset({"int", "long"}): LongType,
    frozenset({"float", "double"}): DoubleType,
}


class _AvroTypes:
    """The types of an Avro schema."""

    def __init__(self, schema: Any) -> None:
        self._named: dict[str, Any] = {}
        #: The names of the records around.
        self._open: list[str] = []
        self.spark = self._type(schema)

    def _type(self, schema: Any, path: str = "value") -> DataType:
        if isinstance(schema, list):
            return self._union(schema, path)
        if isinstance(schema, str):
            if schema in _AVRO:
                return _AVRO[schema]()
            if schema not in self._named:
                raise FormatRefused(f"{path} has the unknown type {schema!r}")
            return self._type(self._named[schema], path)
        name = schema["type"]
        if isinstance(name, dict | list):
            return self._type(name, path)
        if "name" in schema:
            self._named[schema["name"]] = schema
        if schema.get("logicalType") == "decimal":
            return DecimalType(schema["precision"], schema.get("scale", 0))
        logical = _AVRO_LOGICAL.get((name, schema.get("logicalType", "")))
        if logical is not None:
            return logical[0]()
        match name:
            case "record" | "error":
                return self._record(schema, path)
            case "array":
                return ArrayType(self._type(schema["items"], f"{path}[]"))
            case "map":
                return MapType(StringType(), self._type(schema["values"], f"{path}{{}}"))
            case _:
                return self._type(name, path)

    def _record(self, schema: Any, path: str) -> DataType:
        if schema["name"] in self._open:
            raise FormatRefused(
                f"{path} has a {schema['name']} in itself, which no column can have"
            )
        self._open.append(schema["name"])
        fields = [
            StructField(each["name"], self._type(each["type"], f"{path}.{each['name']}"))
            for each in schema["fields"]
        ]
        self._open.pop()
        return StructType(fields)

    def _union(self, schema: list[Any], path: str) -> DataType:
        kinds = [each for each in schema if each != "null"]
        if len(kinds) == 1:
            return self._type(kinds[0], path)
        names = frozenset(each for each in kinds if isinstance(each, str))
        if len(names) == len(kinds) and names in _AVRO_WIDER:
            return _AVRO_WIDER[names]()
        raise FormatRefused(f"{path} is a union of several types, which no column can have")


def avro_type(text: str) -> DataType:
    """The type of the values of a schema. Raises `FormatRefused`."""
    return _AvroTypes(avro_schema(text)).spark


def _without_times(schema: Any, *, keep: Sequence[str] = ("decimal",)) -> Any:
    """A schema without logical types, so that values are numbers."""
    if isinstance(schema, list):
        return [_without_times(each, keep=keep) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_times(each, keep=keep)
        if name in ("type", "items", "values")
        else [_without_times(field, keep=keep) for field in each]
        if name == "fields"
        else each
        for name, each in schema.items()
        if name != "logicalType" or each in keep
    }


def _numbered(schema: Any, kind: pa.DataType, named: dict[str, Any]) -> pa.DataType:
    """The Arrow type of values read without times: their numbers in Avro's unit."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    if isinstance(schema, list):
        (only, *more) = [each for each in schema if each != "null"]
        return kind if more else _numbered(only, kind, named)
    if isinstance(schema, str):
        return _numbered(named[schema], kind, named) if schema in named else kind
    name = schema["type"]
    if isinstance(name, dict | list):
        return _numbered(name, kind, named)
    if "name" in schema:
        named[schema["name"]] = schema
    logical = _AVRO_LOGICAL.get((name, schema.get("logicalType", "")))
    match name:
        case "record" | "error":
            return pa.struct(
                [
                    field.with_type(_numbered(each["type"], field.type, named))
                    for each, field in zip(schema["fields"], kind, strict=True)
                ]
            )
        case "array":
            inner = kind.value_field
            return pa.list_(inner.with_type(_numbered(schema["items"], inner.type, named)))
        case "map":
            inner = kind.item_field
            values = inner.with_type(_numbered(schema["values"], inner.type, named))
            return pa.map_(kind.key_field, values)
        case _ if logical is not None and logical[1] in ("ms", "ns"):
            return pa.timestamp(logical[1], kind.tz)
        case _ if name in named and name not in _AVRO:
            return _numbered(named[name], kind, named)
        case _:
            return kind


def avro_decode(text: str, kind: pa.DataType) -> Decode:
    """Decodes bodies of a schema to a type that `avro_type` gave."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    parsed = avro_schema(text)
    numbered = _numbered(parsed, kind, {})
    read = avro_reader(avro_schema(json.dumps(_without_times(json.loads(text)))))

    def each(bodies: pa.Array) -> pa.Array:
        return pa.array([read(body) for body in bodies.to_pylist()], numbered)

    by_columns = _by_columns(lambda module: module.avro_columns(parsed, numbered), each)

    def decode(bodies: pa.Array) -> pa.Array:
        found = by_columns(bodies)
        return found if numbered == kind else found.cast(kind, safe=False)

    return decode


def _by_columns(make: Callable[[Any], Callable[[Any], pa.Array]], each: Decode) -> Decode:
    """Decodes all bodies at once, and one by one what is unfit for that."""
    from orbitmq.spark import wirecolumns  # noqa: PLC0415  # tasks only

    try:
        read = make(wirecolumns)
    except wirecolumns.Unfit:
        return each

    def decode(bodies: pa.Array) -> pa.Array:
        if len(bodies) >= _FEWEST:
            with suppress(wirecolumns.Unfit):
                return read(wirecolumns.Cursor.over(bodies))
        return each(bodies)

    return decode


def avro_encode(text: str) -> Write:
    """Encodes values of rows by a schema."""
    return avro_writer(avro_schema(text))


# Protobuf

_PROTOBUF: Final[Mapping[str, type[DataType]]] = {
    "DOUBLE": DoubleType,
    "FLOAT": FloatType,
    "INT64": LongType,
    "INT32": IntegerType,
    "FIXED32": LongType,
    "UINT32": LongType,
    "BOOL": BooleanType,
    "STRING": StringType,
    "BYTES": BinaryType,
    "ENUM": StringType,
    "SFIXED32": IntegerType,
    "SFIXED64": LongType,
    "SINT32": IntegerType,
    "SINT64": LongType,
}
#: Messages that are columns of one value, and the units of their seconds and nanos.
_PROTOBUF_TIMES: Final[Mapping[str, type[DataType]]] = {
    "google.protobuf.Timestamp": TimestampType,
    "google.protobuf.Duration": DayTimeIntervalType,
}
#: `FieldDescriptor.TYPE_*` by number.
_PROTOBUF_NAMES: Final = (
    "",
    "DOUBLE",
    "FLOAT",
    "INT64",
    "UINT64",
    "INT32",
    "FIXED64",
    "FIXED32",
    "BOOL",
    "STRING",
    "GROUP",
    "MESSAGE",
    "BYTES",
    "UINT32",
    "ENUM",
    "SFIXED32",
    "SFIXED64",
    "SINT32",
    "SINT64",
)
_MESSAGES: Final = ("MESSAGE", "GROUP")


def protobuf_type(descriptor: bytes, message: str) -> DataType:
    """The type of a message type. Raises `FormatRefused`."""
    return _message_type(protobuf_class(descriptor, message).DESCRIPTOR, ())


def _message_type(message: Any, around: tuple[str, ...]) -> DataType:
    if message.full_name in _PROTOBUF_TIMES:
        return _PROTOBUF_TIMES[message.full_name]()
    if message.full_name in around:
        raise FormatRefused(
            f"a {message.full_name} may have another one in itself, which no column can have"
        )
    if not message.fields:
        raise FormatRefused(f"{message.full_name} has no fields, and a column needs one")
    around = (*around, message.full_name)
    return StructType(
        [StructField(each.name, _field_type(each, around)) for each in message.fields]
    )


def _field_type(field: Any, around: tuple[str, ...]) -> DataType:
    if _is_map(field):
        entry = field.message_type.fields_by_name
        return MapType(_single_type(entry["key"], around), _single_type(entry["value"], around))
    single = _single_type(field, around)
    return ArrayType(single) if field.is_repeated else single


def _single_type(field: Any, around: tuple[str, ...]) -> DataType:
    name = _PROTOBUF_NAMES[field.type]
    if name in _MESSAGES:
        return _message_type(field.message_type, around)
    # Spark has no unsigned numbers.
    return DecimalType(20, 0) if name in ("UINT64", "FIXED64") else _PROTOBUF[name]()


def _is_map(field: Any) -> bool:
    return bool(
        _PROTOBUF_NAMES[field.type] == "MESSAGE"
        and field.message_type.GetOptions().map_entry
        and field.is_repeated
    )


def protobuf_decode(descriptor: bytes, message: str, kind: pa.DataType) -> Decode:
    """Decodes bodies of a message type to the type that `protobuf_type` gave."""
    made = protobuf_class(descriptor, message)
    parse = made.FromString

    def each(bodies: pa.Array) -> pa.Array:
        return _messages(made.DESCRIPTOR, [parse(body) for body in bodies.to_pylist()], kind)

    return _by_columns(
        lambda module: module.protobuf_columns(made.DESCRIPTOR, kind, _PROTOBUF_NAMES), each
    )


def _messages(message: Any, found: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Messages, or None, column by column."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    if message.full_name in _PROTOBUF_TIMES:
        micros = [None if m is None else m.seconds * 1_000_000 + m.nanos // 1000 for m in found]
        return pa.array(micros, pa.int64()).cast(kind)
    columns = [
        _column(field, found, column.type)
        for field, column in zip(message.fields, kind, strict=True)
    ]
    absent = [each is None for each in found]
    mask = pa.array(absent) if any(absent) else None
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)


def _column(field: Any, found: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A field of messages. Without presence a field that was not sent has its default."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    name = field.name
    if _is_map(field):
        entry = field.message_type.fields_by_name
        maps = [() if m is None else tuple(getattr(m, name).items()) for m in found]
        keys = [key for each in maps for key, _ in each]
        values = [value for each in maps for _, value in each]
        return pa.MapArray.from_arrays(
            _starts(maps),
            _singles(entry["key"], keys, kind.key_type),
            _singles(entry["value"], values, kind.item_type),
            type=kind,
        )
    if field.is_repeated:
        lists = [() if m is None else getattr(m, name) for m in found]
        flat = _singles(field, [each for some in lists for each in some], kind.value_type)
        return pa.ListArray.from_arrays(_starts(lists), flat, type=kind)
    if field.has_presence:
        values = [getattr(m, name) if m is not None and m.HasField(name) else None for m in found]
    else:
        values = [None if m is None else getattr(m, name) for m in found]
    return _singles(field, values, kind)


def _starts(lists: Sequence[Sequence[Any]]) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    starts = [0]
    for each in lists:
        starts.append(starts[-1] + len(each))
    return pa.array(starts, pa.int32())


def _singles(field: Any, values: list[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    match _PROTOBUF_NAMES[field.type]:
        case "MESSAGE" | "GROUP":
            return _messages(field.message_type, values, kind)
        case "ENUM":
            names = {number: each.name for number, each in field.enum_type.values_by_number.items()}
            values = [None if v is None else names.get(v, str(v)) for v in values]
        case "UINT64" | "FIXED64":
            values = [None if value is None else Decimal(value) for value in values]
    return pa.array(values, kind)


def protobuf_encode(descriptor: bytes, message: str) -> Write:
    """Encodes values of rows as messages of a type."""
    made = protobuf_class(descriptor, message)

    def encode(value: Any) -> bytes:
        body: bytes = _filled(made(), value, "value").SerializeToString(deterministic=True)
        return body

    return encode


def _filled(made: Any, value: Mapping[str, Any], path: str) -> Any:
    fields = made.DESCRIPTOR.fields_by_name
    for name, each in value.items():
        at = f"{path}.{name}"
        if name not in fields:
            raise ValueError(f"{at} is no field of {made.DESCRIPTOR.full_name}")
        if each is None:
            continue
        field = fields[name]
        target = getattr(made, name)
        if _is_map(field):
            inner = field.message_type.fields_by_name["value"]
            for key, item in dict(each).items():
                if _PROTOBUF_NAMES[inner.type] in _MESSAGES:
                    _set_message(target[key], item, at)
                else:
                    target[key] = _number_of(inner, item)
        elif field.is_repeated:
            for item in each:
                if _PROTOBUF_NAMES[field.type] in _MESSAGES:
                    _set_message(target.add(), item, at)
                else:
                    target.append(_number_of(field, item))
        elif _PROTOBUF_NAMES[field.type] in _MESSAGES:
            target.SetInParent()
            _set_message(target, each, at)
        else:
            setattr(made, name, _number_of(field, each))
    return made


_EPOCH: Final = date(1970, 1, 1)


def _set_message(target: Any, value: Any, path: str) -> None:
    match value:
        case datetime():
            whole = value.timestamp() // 1
            target.seconds, target.nanos = int(whole), value.microsecond * 1000
        case timedelta():
            target.FromTimedelta(value)
        case date():
            target.seconds = (value - _EPOCH).days * 86_400
        case _:
            _filled(target, value, path)


def _number_of(field: Any, value: Any) -> Any:
    """A value as Protobuf takes it: enums by number."""
    if _PROTOBUF_NAMES[field.type] == "ENUM" and isinstance(value, str):
        found = field.enum_type.values_by_name.get(value)
        if found is None:
            raise ValueError(f"{value!r} is not in the enum {field.enum_type.full_name}")
        return found.number
    return int(value) if isinstance(value, Decimal) else value
