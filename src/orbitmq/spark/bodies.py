"""Bodies as columns: `bodyFormat` of the `rocketmq` source and sink.

A body becomes `value`, decoded in Arrow a record batch at a time. A batch in which a body does not
fit is cut into ever smaller parts, so that only bad bodies are looked at one by one. They are null
in `value`, and `_corrupt` has the reason and the bytes; or the task fails, as `badBodies` says.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    VariantVal,
)

from orbitmq.message.formats import FormatRefused, avro_reader, avro_schema
from orbitmq.spark.options import (
    BodyOptions,
    OptionRefused,
    SchemaRefused,
    SourceError,
    body_options,
)
from orbitmq.spark.recordbodies import (
    Decode,
    avro_decode,
    avro_encode,
    avro_type,
    protobuf_decode,
    protobuf_encode,
    protobuf_type,
)

if TYPE_CHECKING:
    import pyarrow as pa

#: The columns of decoded bodies.
VALUE: Final = "value"
CORRUPT: Final = "_corrupt"
CORRUPT_TYPE: Final = StructType(
    [StructField("reason", StringType()), StructField("body", BinaryType())]
)
#: A body of which the reader has nothing.
_DAMAGED: Final = "the body is damaged, or cannot be expanded"
#: A part of a batch that does not fit is cut into so many; so few rows are decoded one by one.
_PARTS: Final = 16
_FEW: Final = 64
_LONGEST_REASON: Final = 300


class BodyRefused(SourceError):
    """A body does not fit `bodyFormat`, and `badBodies` is fail."""

    def __init__(self, place: str, form: str, reason: str) -> None:
        self.place = place
        self.reason = reason
        super().__init__(
            f"the body of {place} is not {form} as bodySchema says: {reason}; set badBodies to "
            "corrupt, which explains such bodies in the column _corrupt, or to null"
        )


# The types of `value`


def value_type(options: BodyOptions) -> DataType | str:
    """The type of `value`, for JSON as DDL. Raises `OptionRefused`."""
    match options.form:
        case "text":
            return StringType()
        case "variant":
            return VariantType()
        case "avro":
            return _checked(lambda: avro_type(options.schema or ""))
        case "protobuf":
            return _checked(lambda: protobuf_type(options.descriptor, options.message))
        case _:
            return _json_type(options)


def _checked(make: Callable[[], DataType]) -> DataType:
    try:
        return make()
    except FormatRefused as refused:
        raise SchemaRefused(f"the option bodySchema cannot be used: {refused}") from refused


_NAMED_TYPE: Final = re.compile(r"(struct|array|map)\s*<", re.IGNORECASE)


def _json_type(options: BodyOptions) -> DataType | str:
    text = options.schema
    if text is None:
        raise OptionRefused(
            "bodySchema", None, "the fields of the bodies as DDL, such as id BIGINT, name STRING"
        )
    if text.startswith("{"):
        try:
            return StructType.fromJson(json.loads(text))
        except Exception as error:  # whatever a wrong text makes PySpark raise
            raise OptionRefused("bodySchema", text, f"a schema of Spark ({error})") from error
    # Only the JVM can parse it.
    return text if _NAMED_TYPE.match(text) else f"STRUCT<{text}>"


def check_value_type(given: DataType, options: BodyOptions) -> None:
    """Refuse a type that bodies cannot be decoded to. Raises `SchemaRefused`."""
    if options.form != "json":
        kind = value_type(options)
        if given != kind:
            assert isinstance(kind, DataType)  # noqa: S101  # only that of JSON is text
            raise SchemaRefused(
                f"column 'value' is {kind.simpleString()}, the schema says {given.simpleString()}"
            )
        return
    if not isinstance(given, StructType | ArrayType | MapType):
        raise SchemaRefused(
            f"a body in JSON is a struct, an array or a map, the schema of 'value' says "
            f"{given.simpleString()}"
        )
    for path, kind, is_nullable in _within(given, "value"):
        if not is_nullable:
            raise SchemaRefused(
                f"field {path} cannot be NOT NULL: a body may lack it, or have null there"
            )
        if not isinstance(kind, (*_SCALARS, StructType, ArrayType, MapType, DecimalType)):
            raise SchemaRefused(f"field {path} cannot be {kind.simpleString()} in a body in JSON")
        if isinstance(kind, MapType) and not isinstance(kind.keyType, StringType):
            raise SchemaRefused(f"the keys of map {path} must be STRING: names in JSON are")


def _within(kind: DataType, path: str) -> Iterator[tuple[str, DataType, bool]]:
    """The types inside of a type, with their paths, and whether they may be null."""
    if isinstance(kind, StructType):
        for each in kind.fields:
            yield f"{path}.{each.name}", each.dataType, each.nullable
            yield from _within(each.dataType, f"{path}.{each.name}")
    elif isinstance(kind, ArrayType):
        yield f"{path}[]", kind.elementType, kind.containsNull
        yield from _within(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        yield f"{path}{{}}", kind.valueType, kind.valueContainsNull
        yield from _within(kind.valueType, f"{path}{{}}")


def _arrow_scalars() -> Mapping[type[DataType], pa.DataType]:
    import pyarrow as pa  # noqa: PLC0415  # planning needs no Arrow

    return {
        StringType: pa.string(),
        BinaryType: pa.binary(),
        BooleanType: pa.bool_(),
        ByteType: pa.int8(),
        ShortType: pa.int16(),
        IntegerType: pa.int32(),
        LongType: pa.int64(),
        FloatType: pa.float32(),
        DoubleType: pa.float64(),
        DateType: pa.date32(),
        TimestampType: pa.timestamp("us", "UTC"),
        TimestampNTZType: pa.timestamp("us"),
        DayTimeIntervalType: pa.duration("us"),
    }


_SCALARS: Final = (
    StringType,
    BinaryType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


def arrow_type(kind: DataType) -> pa.DataType:
    """A type of Spark as Spark wants it in Arrow."""
    import pyarrow as pa  # noqa: PLC0415  # planning needs no Arrow

    match kind:
        case StructType():
            fields = [pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in kind.fields]
            return pa.struct(fields)
        case ArrayType():
            return pa.list_(pa.field("element", arrow_type(kind.elementType), kind.containsNull))
        case MapType():
            key = pa.field("key", arrow_type(kind.keyType), nullable=False)
            return pa.map_(
                key, pa.field("value", arrow_type(kind.valueType), kind.valueContainsNull)
            )
        case DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case VariantType():
            tagged = pa.field("metadata", pa.binary(), nullable=False)
            return pa.struct(
                [
                    pa.field("value", pa.binary(), nullable=False),
                    tagged.with_metadata({"variant": "true"}),
                ]
            )
        case _:
            return _arrow_scalars()[type(kind)]


# Decoding


def value_in(schema: StructType) -> DataType | None:
    """The type to which a read decodes bodies; None if it wants no decoded ones."""
    kinds = {each.name: each.dataType for each in schema.fields}
    if CORRUPT in kinds and VALUE not in kinds:
        raise SchemaRefused("column '_corrupt' needs the column 'value' beside it")
    return kinds.get(VALUE)


@dataclass(frozen=True, slots=True)
class DecodedBodies:
    """The columns of some bodies."""

    value: pa.Array
    #: Why bodies do not fit, by row.
    problems: Mapping[int, str]

    def corrupt(self, bodies: pa.Array) -> pa.Array:
        """The column `_corrupt`."""
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        kind = arrow_type(CORRUPT_TYPE)
        if not self.problems:
            return pa.nulls(len(bodies), kind)
        found: list[dict[str, Any] | None] = [None] * len(bodies)
        for row, reason in self.problems.items():
            found[row] = {"reason": reason, "body": bodies[row].as_py()}
        return pa.array(found, kind)


class BodyDecoder:
    """Decodes bodies to one type."""

    def __init__(self, options: BodyOptions, kind: DataType) -> None:
        self._kind = arrow_type(kind)
        self._all: Decode
        #: Decodes a body to a value that Arrow takes.
        self._values: Callable[[bytes], Any] | None = None
        match options.form:
            case "text":
                self._all = self._texts
            case "variant":
                self._all = self._variants
            case "avro":
                self._all = avro_decode(options.schema or "", self._kind)
            case "protobuf":
                self._all = protobuf_decode(options.descriptor, options.message, self._kind)
            case _:
                self._all = _JsonDecode(kind, self._kind)
                self._values = self._all.value

    def decode(self, bodies: pa.Array) -> DecodedBodies:
        """Decode a column of bodies."""
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        problems: dict[int, str] = {}
        if not bodies.null_count:
            return DecodedBodies(_joined(self._parts(bodies, 0, problems), self._kind), problems)
        present = [row for row, is_there in enumerate(bodies.is_valid().to_pylist()) if is_there]
        found: dict[int, str] = {}
        dense = _joined(self._parts(bodies.drop_null(), 0, found), self._kind)
        problems = {present[row]: reason for row, reason in found.items()}
        places: list[int | None] = [None] * len(bodies)
        for place, row in enumerate(present):
            places[row] = place
        problems |= {row: _DAMAGED for row, place in enumerate(places) if place is None}
        return DecodedBodies(dense.take(pa.array(places, pa.int64())), problems)

    def _parts(self, bodies: pa.Array, first: int, problems: dict[int, str]) -> Iterator[pa.Array]:
        if not len(bodies):
            return
        try:
            yield self._all(bodies)
        except Exception:  # noqa: BLE001  # foreign bytes: packages raise what they like
            if len(bodies) > _FEW:
                size = max(_FEW, -(-len(bodies) // _PARTS))
                for start in range(0, len(bodies), size):
                    yield from self._parts(bodies.slice(start, size), first + start, problems)
            else:
                yield from self._rows(bodies, first, problems)

    def _rows(self, bodies: pa.Array, first: int, problems: dict[int, str]) -> Iterator[pa.Array]:
        """A few bodies, each on its own."""
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        if self._values is None:
            for row in range(len(bodies)):
                try:
                    yield self._all(bodies.slice(row, 1))
                except Exception as error:  # noqa: BLE001  # as above
                    problems[first + row] = reason_of(error)
                    yield pa.nulls(1, self._kind)
            return
        found: list[Any] = []
        for row, body in enumerate(bodies.to_pylist()):
            try:
                found.append(self._values(body))
            except Exception as error:  # noqa: BLE001  # as above
                problems[first + row] = reason_of(error)
                found.append(None)
        yield pa.array(found, self._kind)

    def _texts(self, bodies: pa.Array) -> pa.Array:
        return _utf8(bodies)

    def _variants(self, bodies: pa.Array) -> pa.Array:
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        found = [VariantVal.parseJson(text) for text in _utf8(bodies).to_pylist()]
        parts = [
            pa.array([each.value for each in found], pa.binary()),
            pa.array([each.metadata for each in found], pa.binary()),
        ]
        return pa.StructArray.from_arrays(parts, fields=list(self._kind))


def reason_of(error: Exception) -> str:
    """Why a body does not fit, in one line."""
    if isinstance(error, EOFError):
        return "it ends before its value does"
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:_LONGEST_REASON]


def _joined(parts: Iterator[pa.Array], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    found = list(parts)
    if len(found) == 1:
        return found[0]
    return pa.concat_arrays(found) if found else pa.nulls(0, kind)


def _utf8(bodies: pa.Array) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    try:
        return bodies.cast(pa.string())
    except pa.ArrowInvalid:
        raise ValueError("is no text in UTF-8") from None


# JSON


class _JsonDecode:
    """Decodes a batch with Arrow's parser, and single bodies with what it does not take."""

    def __init__(self, kind: DataType, final: pa.DataType) -> None:
        self._type = kind
        self._final = final
        kinds = [kind, *(each for _, each, _ in _within(kind, ""))]
        #: Arrow reads no other top level, no maps, and binary values not as base64.
        self._is_quick = isinstance(kind, StructType) and not any(
            isinstance(each, MapType | BinaryType) for each in kinds
        )
        #: Arrow reads dates only as numbers.
        self._read = arrow_type(_as_arrow_reads(kind)) if self._is_quick else final
        has_decimals = any(isinstance(each, DecimalType) for each in kinds)
        self._decoder = msgspec.json.Decoder(float_hook=Decimal if has_decimals else None)

    def __call__(self, bodies: pa.Array) -> pa.Array:
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        if self._is_quick:
            return self._quick(bodies)
        texts = _utf8(bodies)
        return pa.array([self._fitted(each) for each in texts.to_pylist()], self._final)

    def _quick(self, bodies: pa.Array) -> pa.Array:
        import pyarrow as pa  # noqa: PLC0415  # tasks only
        import pyarrow.compute as pc  # noqa: PLC0415
        from pyarrow import json as pj  # noqa: PLC0415

        texts = _utf8(bodies)
        if not _are_objects(texts):
            # Else two broken bodies could make a whole one, and rows would be shifted.
            raise ValueError("is no JSON object")
        lists = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
        data = pc.binary_join(lists, "\n")[0].as_buffer()
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=data.size + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(list(self._read)),
                unexpected_field_behavior="ignore",
                newlines_in_values=True,
            ),
        )
        if table.num_rows != len(texts):
            raise ValueError("has several values")
        columns = [_whole(table.column(place)) for place in range(table.num_columns)]
        found = pa.StructArray.from_arrays(columns, fields=list(self._read))
        return found if self._read == self._final else found.cast(self._final)

    def value(self, body: bytes) -> Any:
        """A single body as Arrow takes it. Raises `ValueError`."""
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise ValueError("is no text in UTF-8") from None
        return self._fitted(text)

    def _fitted(self, text: str) -> Any:
        try:
            value = self._decoder.decode(text)
        except msgspec.DecodeError as error:
            try:
                # Takes NaN and Infinity, as Arrow and Spark do.
                value = json.loads(text)
            except ValueError:
                raise ValueError(f"is no JSON: {error}") from None
        return _fit(value, self._type, "$")


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _are_objects(texts: pa.Array) -> bool:
    """Whether all texts begin and end with a curly bracket."""
    import pyarrow.compute as pc  # noqa: PLC0415  # tasks only

    def check(some: pa.Array) -> bool:
        both = pc.and_(pc.starts_with(some, "{"), pc.ends_with(some, "}"))
        return bool(pc.all(both).as_py())

    return check(texts) or check(pc.utf8_trim(texts, " \t\r\n"))


def _as_arrow_reads(kind: DataType) -> DataType:
    match kind:
        case DateType():
            return StringType()
        case DecimalType():
            # The parser lets a number be too long by the digits that its scale adds.
            return DecimalType(38, kind.scale)
        case StructType():
            return StructType(
                [
                    StructField(each.name, _as_arrow_reads(each.dataType), each.nullable)
                    for each in kind.fields
                ]
            )
        case ArrayType():
            return ArrayType(_as_arrow_reads(kind.elementType), kind.containsNull)
        case _:
            return kind


#: JSON as Spark writes it.
_PLAIN: Final = msgspec.json.Encoder(decimal_format="number").encode
_WHOLE: Final[Mapping[type[DataType], int]] = {
    ByteType: 1 << 7,
    ShortType: 1 << 15,
    IntegerType: 1 << 31,
    LongType: 1 << 63,
}
_SPECIAL: Final = ("NaN", "Infinity", "-Infinity", "+Infinity", "INF", "-INF", "+INF")


def _fit(value: Any, kind: DataType, path: str) -> Any:
    """A value of JSON as Arrow takes it for a type. Raises `ValueError`."""
    if value is None:
        return None
    match kind:
        case StructType():
            if isinstance(value, dict):
                return {
                    each.name: _fit(value.get(each.name), each.dataType, f"{path}.{each.name}")
                    for each in kind.fields
                }
        case ArrayType():
            if isinstance(value, list):
                return [
                    _fit(each, kind.elementType, f"{path}[{at}]") for at, each in enumerate(value)
                ]
        case MapType():
            if isinstance(value, dict):
                return [
                    (name, _fit(each, kind.valueType, f"{path}.{name}"))
                    for name, each in value.items()
                ]
        case StringType():
            return value if isinstance(value, str) else _PLAIN(value).decode()
        case _:
            found = _scalar(value, kind)
            if found is not None:
                return found
    shown = _PLAIN(value).decode()
    raise ValueError(f"{path} is {shown[:80]}, and must be {kind.simpleString()}")


def _scalar(value: Any, kind: DataType) -> Any:
    """The value, or None if it does not fit."""
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    match kind:
        case BooleanType():
            return value if isinstance(value, bool) else None
        case ByteType() | ShortType() | IntegerType() | LongType():
            limit = _WHOLE[type(kind)]
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return value if is_whole and -limit <= value < limit else None
        case FloatType() | DoubleType():
            if is_number or value in _SPECIAL:
                return float(value)
        case DecimalType():
            if is_number or isinstance(value, str):
                return _decimal(value, kind)
        case BinaryType() if isinstance(value, str):
            return base64.b64decode(value, validate=True)
        case DateType() if isinstance(value, str):
            return date.fromisoformat(value)
        case TimestampType() if isinstance(value, str):
            found = datetime.fromisoformat(value)
            # As Arrow reads it.
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        case TimestampNTZType() if isinstance(value, str):
            found = datetime.fromisoformat(value)
            return found if found.tzinfo is None else None
    return None


#: More digits than Spark's decimals.
_WIDE: Final = Context(prec=80)


def _decimal(value: Any, kind: DecimalType) -> Decimal | None:
    try:
        exact = Decimal(str(value))
        found = exact.quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP, _WIDE)
    except ArithmeticError:
        return None
    is_small = found.is_finite() and found.adjusted() < kind.precision - kind.scale
    return found if is_small or not found else None


# Encoding


class BodyEncoder:
    """Makes bodies of the column `value`, or else of all columns that messages do not have."""

    def __init__(self, options: BodyOptions, names: Sequence[str], of_messages: Collection[str]):
        """Raises `SchemaRefused`."""
        self._fields = [name for name in names if name not in of_messages]
        if VALUE in self._fields:
            self._fields = [VALUE]
        self._form = options.form
        #: Encodes one value; raises anything if it does not fit.
        self.encode: Callable[[Any], bytes]
        try:
            match options.form:
                case "avro":
                    self.encode = avro_encode(options.schema or "")
                case "protobuf":
                    self.encode = protobuf_encode(options.descriptor, options.message)
                case "text":
                    self.encode = _text_body
                case "variant":
                    self.encode = _variant_body
                case _:
                    self.encode = _PLAIN
        except FormatRefused as refused:
            raise SchemaRefused(f"the option bodySchema cannot be used: {refused}") from refused

    @property
    def names(self) -> list[str]:
        """The columns of which bodies are made."""
        return self._fields

    def encoded(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """The batch with a column `body`, and the rows that have no such body."""
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        columns = [batch.column(name) for name in self._fields]
        values = columns[0]
        if self._fields != [VALUE]:
            fields = [pa.field(n, c.type) for n, c in zip(self._fields, columns, strict=True)]
            values = pa.StructArray.from_arrays(columns, fields=fields)
        problems: dict[int, str] = {}
        bodies: list[bytes | None] = []
        shorten = _without_nulls(values.type) if self._form == "json" else None
        for row, value in enumerate(_as_python(values)):
            body = None
            try:
                if isinstance(value, Exception):
                    raise value  # noqa: TRY301  # treated like those of encoders
                if value is None:
                    problems[row] = "its value is null"
                else:
                    body = self.encode(value if shorten is None else shorten(value))
            except Exception as error:  # noqa: BLE001  # packages raise what they like
                problems[row] = f"its value does not fit {self._form}: {reason_of(error)}"
            bodies.append(body)
        rest = batch.drop_columns(self._fields)
        return rest.append_column("body", pa.array(bodies, pa.binary())), problems


def schema_with_body(
    schema: StructType, options: BodyOptions, of_messages: Collection[str]
) -> StructType:
    """What is written of a schema, with `body` in place of its value. Raises `SchemaRefused`."""
    for name in ("body", CORRUPT):
        if name in schema.names:
            raise SchemaRefused(
                f"bodyFormat makes the body of the column 'value', or of all that messages do not "
                f"have; leave column {name!r} out"
            )
    names = BodyEncoder(options, schema.names, of_messages).names
    if not names:
        raise SchemaRefused("bodyFormat needs a column 'value', or columns that become its fields")
    kind: DataType = StructType([each for each in schema.fields if each.name in names])
    if names == [VALUE]:
        kind = schema[VALUE].dataType
    wanted: tuple[type[DataType], ...] = (DataType,)
    match options.form:
        case "text":
            wanted = (StringType, BinaryType)
        case "variant":
            wanted = (VariantType,)
        case "json":
            wanted = (StructType, ArrayType, MapType)
        case "protobuf":
            wanted = (StructType,)
    if not isinstance(kind, wanted):
        allowed = " or ".join(each.typeName() for each in wanted)
        raise SchemaRefused(
            f"column 'value' must be {allowed} for bodyFormat {options.form}, it is "
            f"{kind.simpleString()}"
        )
    rest = [each for each in schema.fields if each.name not in names]
    return StructType([*rest, StructField("body", BinaryType())])


def _text_body(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _variant_body(value: Any) -> bytes:
    return VariantVal(value["value"], value["metadata"]).toJson().encode()


def _as_python(values: pa.Array) -> Iterable[Any]:
    """The values, or an error in place of one that Python cannot express."""
    try:
        found: list[Any] = values.to_pylist(maps_as_pydicts="strict")
    except Exception:  # noqa: BLE001  # looked at one by one
        return map(_single_value, values)
    return found


def _single_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py(maps_as_pydicts="strict")
    except Exception as error:  # noqa: BLE001  # refuses the row
        return error


def _without_nulls(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """A function that leaves out null fields, as `to_json` does; None if there is nothing to do."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    if pa.types.is_list(kind):
        item = _without_nulls(kind.value_type)
        if item is None:
            return None
        return lambda values: [None if each is None else item(each) for each in values]
    if pa.types.is_map(kind):
        held = _without_nulls(kind.item_type)
        if held is None:
            return None
        return lambda values: {
            name: None if each is None else held(each) for name, each in values.items()
        }
    if not pa.types.is_struct(kind):
        return None
    inners = {field.name: _without_nulls(field.type) for field in kind}

    def shorten(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: each if (inner := inners[name]) is None else inner(each)
            for name, each in values.items()
            if each is not None
        }

    return shorten


# Handlers


def body_serializer(form: str, schema: str) -> BodySerializer:
    """The serializer of a `bodyFormat` and its `bodySchema`, for `consume` and producers.

    `form` is avro or protobuf. Raises `OptionRefused` or `SchemaRefused`.
    """
    found = body_options({"bodyFormat": form, "bodySchema": schema})
    if found is None or found.form not in ("avro", "protobuf"):
        raise OptionRefused("bodyFormat", form, "avro or protobuf; json and msgpack are built in")
    return BodySerializer(found)


class BodySerializer:
    """Bodies as values for handlers; goes to Spark's workers without the parsed schema."""

    def __init__(self, options: BodyOptions) -> None:
        self._options = options
        self._kind = value_type(options)
        self._encode = BodyEncoder(options, [VALUE], ()).encode
        self._read: Callable[[bytes], Any] | None = None

    def __reduce__(self) -> tuple[type[BodySerializer], tuple[BodyOptions]]:
        return BodySerializer, (self._options,)

    def dumps(self, value: Any) -> bytes:
        """A mapping or a dataclass as a body."""
        return self._encode(asdict(value) if is_dataclass(type(value)) else value)

    def loads(self, body: bytes) -> Any:
        """A body as a `dict`."""
        if self._read is None:
            self._read = self._reader()
        return self._read(body)

    def _reader(self) -> Callable[[bytes], Any]:
        if self._options.form == "avro":
            return avro_reader(avro_schema(self._options.schema or ""))
        import pyarrow as pa  # noqa: PLC0415  # not for producers

        assert isinstance(self._kind, DataType)  # noqa: S101  # only that of JSON is text
        decode = protobuf_decode(
            self._options.descriptor, self._options.message, arrow_type(self._kind)
        )
        return lambda body: decode(pa.array([body], pa.binary()))[0].as_py(maps_as_pydicts="strict")
