"""Bodies as columns without Spark: what fits, and what is said of the rest."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
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

from orbitmq.client.serialization import format_of
from orbitmq.message.formats import avro_reader, avro_schema, avro_writer, protobuf_class
from orbitmq.spark import body_serializer
from orbitmq.spark.bodies import BodyDecoder, BodyEncoder, arrow_type, schema_with_body, value_type
from orbitmq.spark.options import (
    BodyOptions,
    OptionRefused,
    SchemaRefused,
    batch_options,
    body_options,
    write_options,
)
from orbitmq.spark.source import arrow_schema, check_schema, schema_with_value
from orbitmq.spark.wirecolumns import Cursor, avro_columns
from tests.support.bodyformats import DESCRIPTOR, NUMBERS, ORDER_SCHEMA, PLAIN_SCHEMA

LEAST = {"nameServer": "127.0.0.1:9876", "subscribe": "orders"}
JSON = BodyOptions(form="json", schema="ignored BIGINT")


def struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


ITEM = struct(sku=StringType(), count=IntegerType())
ORDER = struct(
    id=LongType(),
    name=StringType(),
    rate=DoubleType(),
    price=DecimalType(10, 2),
    paid=BooleanType(),
    day=DateType(),
    at=TimestampType(),
    items=ArrayType(ITEM),
)


def decoded(kind: DataType, *bodies: bytes | None, options: BodyOptions = JSON) -> list[Any]:
    """The values of bodies, which all fit."""
    found = BodyDecoder(options, kind).decode(pa.array(bodies, pa.binary()))
    assert found.problems == {}
    assert found.value.type == arrow_type(kind)
    values: list[Any] = found.value.to_pylist()
    return values


def reason(kind: DataType, body: bytes | None, options: BodyOptions = JSON) -> str:
    """Why a body does not fit, among others that do."""
    found = BodyDecoder(options, kind).decode(pa.array([b"{}", body, b"{}"], pa.binary()))
    assert list(found.problems) == [1]
    assert found.value.is_valid().to_pylist() == [True, False, True]
    return found.problems[1]


@pytest.mark.feature("T1")
def test_json_becomes_nested_columns():
    whole = {
        "id": 7,
        "name": "Köln",
        "rate": 0.25,
        "price": 12.5,
        "paid": True,
        "day": "2026-11-18",
        "at": "2026-11-18T09:00:00.5+01:00",
        "items": [{"sku": "a", "count": 2, "more": [1]}, None, {}],
        "unknown": {"is": "ignored"},
    }

    first, second, third = decoded(ORDER, json.dumps(whole).encode(), b' {\n"id": 8 } ', b"null")

    assert first == {
        "id": 7,
        "name": "Köln",
        "rate": 0.25,
        "price": Decimal("12.50"),
        "paid": True,
        "day": date(2026, 11, 18),
        "at": datetime(2026, 11, 18, 8, 0, 0, 500_000, tzinfo=UTC),
        "items": [{"sku": "a", "count": 2}, None, {"sku": None, "count": None}],
    }
    assert second == {**dict.fromkeys(ORDER.names), "id": 8}
    assert third is None


#: What Arrow's parser leaves to the look at single bodies.
SINGLE: Mapping[str, tuple[DataType, bytes, Any]] = {
    "a map": (
        struct(m=MapType(StringType(), LongType())),
        b'{"m":{"a":1,"b":null}}',
        {"m": [("a", 1), ("b", None)]},
    ),
    "bytes": (struct(b=BinaryType()), b'{"b":"AAE="}', {"b": b"\x00\x01"}),
    "an array": (ArrayType(LongType()), b"[1,null,3]", [1, None, 3]),
    "rounding": (struct(p=DecimalType(5, 2)), b'{"p":1.255}', {"p": Decimal("1.26")}),
    "many digits": (
        struct(p=DecimalType(38, 20)),
        b'{"p":123456789012345678.12345678901234567890}',
        {"p": Decimal("123456789012345678.12345678901234567890")},
    ),
    "an object as text": (struct(t=StringType()), b'{"t":{"a":[1]}}', {"t": '{"a":[1]}'}),
    "a number as text": (struct(t=StringType()), b'{"t":1}', {"t": "1"}),
    "infinite": (struct(d=DoubleType()), b'{"d":"-Infinity"}', {"d": float("-inf")}),
    "a name twice": (struct(i=LongType()), b'{"i":1,"i":2}', {"i": 2}),
    "a local time": (
        struct(t=TimestampNTZType()),
        b'{"t":"2026-11-18T09:00:00"}',
        {"t": datetime(2026, 11, 18, 9, tzinfo=UTC).replace(tzinfo=None)},
    ),
    "a time without zone": (
        struct(t=TimestampType(), b=BinaryType()),
        b'{"t":"2026-11-18T09:00:00"}',
        {"t": datetime(2026, 11, 18, 9, tzinfo=UTC), "b": None},
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_what_one_body_needs_changes_no_other(name):
    kind, body, value = SINGLE[name]

    assert decoded(kind, b"null", body, b"null") == [None, value, None]


MISFITS: Mapping[str, tuple[bytes | None, str]] = {
    "no JSON": (b"nope", "is no JSON"),
    "nothing": (b"", "is no JSON"),
    "cut off": (b'{"id":1', "is no JSON"),
    "two values": (b'{"id":1} {"id":2}', "trailing characters"),
    "no object": (b"[1]", "must be struct"),
    "no UTF-8": (b'{"name":"\xff"}', "is no text in UTF-8"),
    "damaged": (None, "the body is damaged"),
    "text for a number": (b'{"id":"7"}', '$.id is "7", and must be bigint'),
    "a fraction for a number": (b'{"id":7.5}', "$.id is 7.5"),
    "too large": (b'{"id":9223372036854775808}', "and must be bigint"),
    "no date": (b'{"day":"18.11.2026"}', "18.11.2026"),
    "no time": (b'{"at":"now"}', "now"),
    "a number for a time": (b'{"at":1763542000}', "and must be timestamp"),
    "too many digits": (b'{"price":123456789.5}', "and must be decimal(10,2)"),
    "inside": (b'{"items":[{"sku":"a"},{"count":3000000000}]}', "$.items[1].count is 3000000000"),
}


@pytest.mark.feature("T1")
@pytest.mark.parametrize("name", MISFITS)
def test_a_body_that_does_not_fit_is_told_from_the_others_with_the_reason(name):
    body, words = MISFITS[name]

    assert words in reason(ORDER, body)


@given(
    bodies=st.lists(
        st.sampled_from([b'{"id":1}', b'{"id":{"a":1}', b"}", b'{"id":2} {"id":3}', b"{", b"x"]),
        max_size=40,
    )
)
def test_broken_bodies_never_shift_the_rows(bodies):
    found = BodyDecoder(JSON, struct(id=LongType())).decode(pa.array(bodies, pa.binary()))

    good = b'{"id":1}'
    assert found.value.to_pylist() == [{"id": 1} if each == good else None for each in bodies]
    assert set(found.problems) == {row for row, each in enumerate(bodies) if each != good}


def test_one_bad_body_in_a_large_batch_is_found():
    bodies = [b'{"id":%d}' % number for number in range(5000)]
    bodies[4321] = b"bad"

    found = BodyDecoder(JSON, struct(id=LongType())).decode(pa.array(bodies, pa.binary()))

    assert list(found.problems) == [4321]
    assert found.value[4999].as_py() == {"id": 4999}
    corrupt = found.corrupt(pa.array(bodies, pa.binary()))
    assert corrupt.null_count == 4999
    assert corrupt[4321].as_py() == {"reason": found.problems[4321], "body": b"bad"}


def test_text_and_variant_need_no_schema():
    text = BodyOptions(form="text")
    assert decoded(StringType(), "Köln".encode(), b"", options=text) == ["Köln", ""]
    found = BodyDecoder(text, StringType()).decode(pa.array([b"\xff"], pa.binary()))
    assert found.problems == {0: "is no text in UTF-8"}

    variant = BodyOptions(form="variant")
    kind = value_type(variant)
    assert isinstance(kind, DataType)
    (value,) = decoded(kind, b'{"a":[1,"x"]}', options=variant)
    assert VariantVal(value["value"], value["metadata"]).toPython() == {"a": [1, "x"]}


# ---- Avro and Protobuf

AVRO = BodyOptions(form="avro", schema=json.dumps(ORDER_SCHEMA))
AVRO_ORDER = {
    "id": 7,
    "name": None,
    "at": datetime(2026, 11, 18, 9, tzinfo=UTC),
    "day": date(2026, 11, 18),
    "price": Decimal("12.50"),
    "labels": {"a": 1},
    "items": [{"sku": b"\x01", "until": datetime(2026, 11, 19, tzinfo=UTC)}],
    "state": "PAID",
    "either": 3,
}


def of_avro() -> DataType:
    kind = value_type(AVRO)
    assert isinstance(kind, DataType)
    return kind


def avro(value: object) -> bytes:
    return avro_writer(avro_schema(AVRO.schema or ""))(value)


@pytest.mark.feature("T1")
def test_avro_becomes_nested_columns():
    assert of_avro().simpleString() == (
        "struct<id:bigint,name:string,at:timestamp,day:date,price:decimal(10,2),"
        "labels:map<string,int>,items:array<struct<sku:binary,until:timestamp>>,"
        "state:string,either:bigint>"
    )
    assert decoded(of_avro(), avro(AVRO_ORDER), options=AVRO) == [
        AVRO_ORDER | {"labels": [("a", 1)]}
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"", "it ends before its value does"), (avro(AVRO_ORDER) + b"\x00", "1 bytes are left")],
)
def test_avro_that_does_not_fit_says_why(body, words):
    found = BodyDecoder(AVRO, of_avro()).decode(pa.array([avro(AVRO_ORDER), body], pa.binary()))

    assert words in found.problems[1]
    assert found.value[0].is_valid


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"type":"record"', "not an Avro schema"),
        (
            {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]},
            "value.next has a N in itself",
        ),
        (
            {"type": "record", "name": "N", "fields": [{"name": "u", "type": ["int", "string"]}]},
            "value.u is a union of several types",
        ),
    ],
)
def test_an_avro_schema_that_is_no_column_is_refused(schema, words):
    text = schema if isinstance(schema, str) else json.dumps(schema)

    with pytest.raises(SchemaRefused, match=words):
        value_type(BodyOptions(form="avro", schema=text))


PROTOBUF = BodyOptions(form="protobuf", descriptor=DESCRIPTOR, message="shop.Order")
PROTO_ORDER = {
    "id": 7,
    "at": datetime(2026, 11, 18, 9, tzinfo=UTC),
    "took": timedelta(seconds=1.5),
    "state": "PAID",
    "items": [{"sku": "a", "count": 2}, {"sku": "b", "count": 0}],
    "tags": ["x", "y"],
    "labels": {"a": 1},
    "big": Decimal(2**64 - 1),
    "note": None,
    "first": {"sku": "a", "count": 1},
}


def of_protobuf() -> DataType:
    kind = value_type(PROTOBUF)
    assert isinstance(kind, DataType)
    return kind


@pytest.mark.feature("T1")
def test_protobuf_becomes_nested_columns():
    assert of_protobuf().simpleString() == (
        "struct<id:bigint,at:timestamp,took:interval day to second,state:string,"
        "items:array<struct<sku:string,count:int>>,tags:array<string>,labels:map<string,int>,"
        "big:decimal(20,0),note:string,first:struct<sku:string,count:int>>"
    )
    bodies = encoded({"value": PROTO_ORDER}, PROTOBUF, of_protobuf())

    assert decoded(of_protobuf(), *bodies, b"", options=PROTOBUF) == [
        PROTO_ORDER | {"labels": [("a", 1)]},
        # What was not sent has its default, or is null where the message knows that.
        {
            **dict.fromkeys(PROTO_ORDER),
            "id": 0,
            "state": "NEW",
            "items": [],
            "tags": [],
            "labels": [],
            "big": Decimal(0),
        },
    ]
    made = protobuf_class(DESCRIPTOR, "shop.Order").FromString(bodies[0])
    assert (made.id, made.big, made.labels["a"], made.HasField("note")) == (7, 2**64 - 1, 1, False)


def test_protobuf_that_does_not_fit_says_why():
    bodies = pa.array([b"", b"\xff\xff"], pa.binary())

    found = BodyDecoder(PROTOBUF, of_protobuf()).decode(bodies)

    assert found.value.is_valid().to_pylist() == [True, False]
    assert "Error parsing message" in found.problems[1]


# ---- many bodies at once

PLAIN = BodyOptions(form="avro", schema=json.dumps(PLAIN_SCHEMA))
IN_NUMBERS = BodyOptions(form="protobuf", descriptor=DESCRIPTOR, message="shop.Numbers")
INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.one_of(INTS, st.integers(-(2**63), 2**63 - 1))
FLOATS = st.floats(width=32, allow_nan=False)
ITEMS = st.fixed_dictionaries({"sku": st.text(max_size=3), "count": INTS})
AVRO_ITEMS = st.fixed_dictionaries(
    {"sku": st.binary(max_size=3), "sizes": st.lists(INTS, max_size=3)}
)
PLAIN_VALUES = st.fixed_dictionaries(
    {
        "id": LONGS,
        "name": st.none() | st.text(max_size=5),
        "paid": st.booleans(),
        "count": st.none() | INTS,
        "half": FLOATS,
        "ratio": FLOATS,
        "code": st.binary(min_size=3, max_size=3),
        "state": st.sampled_from(["NEW", "PAID"]),
        "labels": st.dictionaries(st.text(max_size=2), st.none() | LONGS, max_size=3),
        "items": st.lists(AVRO_ITEMS, max_size=3),
        "last": st.none() | AVRO_ITEMS,
    }
)


def of_number(name: str) -> st.SearchStrategy[Any]:
    if name == "BOOL":
        return st.booleans()
    if name in ("FLOAT", "DOUBLE"):
        return FLOATS
    if name.startswith(("U", "FIXED")):
        return st.integers(0, 2 ** int(name[-2:]) - 1)
    return INTS if name.endswith("32") else LONGS


NUMBERS_VALUES = st.fixed_dictionaries(
    {},
    optional={
        **{name.lower(): of_number(name) for name in NUMBERS},
        **{f"{name.lower()}s": st.lists(of_number(name), max_size=3) for name in NUMBERS},
        "states": st.lists(st.sampled_from(["NEW", "PAID"]), max_size=3),
        "items": st.lists(ITEMS, max_size=3),
    },
).flatmap(
    lambda value: st.sampled_from([value, value | {"text": "é"}, value | {"item": {"count": 1}}])
)
#: A row, a place in its body, and a byte for it, or where it is cut.
DAMAGES = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.none() | st.integers(0, 255))
)


@pytest.mark.parametrize(
    ("options", "values"), [(PLAIN, PLAIN_VALUES), (IN_NUMBERS, NUMBERS_VALUES)]
)
@given(data=st.data(), damages=st.just([]) | DAMAGES)
def test_bodies_decoded_at_once_are_as_if_decoded_one_by_one(options, values, data, damages):
    encode = BodyEncoder(options, ["value"], ()).encode
    some = [encode(each) for each in data.draw(st.lists(values, min_size=1, max_size=4))]
    bodies = [bytearray(some[row % len(some)]) for row in range(20)]
    for row, place, byte in damages:
        body = bodies[row % len(bodies)]
        body[place % (len(body) + 1) :] = b"" if byte is None else bytes([byte])
    column = pa.array([bytes(each) for each in bodies], pa.binary())
    kind = value_type(options)
    assert isinstance(kind, DataType)
    decoder = BodyDecoder(options, kind)

    found = decoder.decode(column)
    singles = [decoder.decode(column.slice(row, 1)) for row in range(len(column))]

    found.value.validate(full=True)
    assert found.value.equals(pa.concat_arrays([each.value for each in singles]))
    assert found.problems == {
        row: each.problems[0] for row, each in enumerate(singles) if each.problems
    }


def test_what_is_left_to_decode_one_by_one_is_the_exception():
    value = {
        "id": -1,
        "name": "é",
        "paid": True,
        "count": None,
        "half": 0.5,
        "ratio": 0.25,
        "code": b"abc",
        "state": "PAID",
        "labels": {"a": 1, "b": None},
        "last": None,
        "items": [{"sku": b"x", "sizes": [1, 2]}, {"sku": b"", "sizes": []}],
    }
    kind = value_type(PLAIN)
    assert isinstance(kind, DataType)
    bodies = pa.array([avro_writer(avro_schema(PLAIN.schema or ""))(value)] * 3, pa.binary())

    at_once = avro_columns(avro_schema(PLAIN.schema or ""), arrow_type(kind))(Cursor.over(bodies))
    orders = decoded(
        of_protobuf(),
        *encoded({"value": PROTO_ORDER}, PROTOBUF, of_protobuf()) * 20,
        options=PROTOBUF,
    )

    assert at_once.to_pylist(maps_as_pydicts="strict") == [value] * 3
    assert orders == [PROTO_ORDER | {"labels": [("a", 1)]}] * 20


def test_large_values_take_little_memory_while_they_are_decoded():
    text = json.dumps({"type": "record", "name": "R", "fields": [{"name": "t", "type": "string"}]})
    values = ["é" * size for size in (100_000, 200_000, 0, 1)] * 8
    options = BodyOptions(form="avro", schema=text)
    bodies = [BodyEncoder(options, ["value"], ()).encode({"t": each}) for each in values]
    kind = value_type(options)
    assert isinstance(kind, DataType)
    decoder, column = BodyDecoder(options, kind), pa.array(bodies, pa.binary())

    tracemalloc.start()
    found = decoder.decode(column)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found.value.field("t").to_pylist() == values
    assert most < 4 * column.nbytes


# ---- encoding


def encoded(row: Mapping[str, Any], options: BodyOptions, kind: DataType) -> list[bytes]:
    """The bodies of a row with the column `value` of a type."""
    schema = pa.schema([("value", arrow_type(kind))])
    batch = pa.RecordBatch.from_pylist([dict(row)], schema=schema)
    found, problems = BodyEncoder(options, ["value"], ()).encoded(batch)
    assert problems == {}
    bodies: list[bytes] = found.column("body").to_pylist()
    return bodies


@pytest.mark.feature("T1")
def test_what_is_encoded_is_decoded_to_the_same():
    values = {
        "id": 7,
        "name": "Köln",
        "rate": 0.5,
        "price": Decimal("12.50"),
        "paid": False,
        "day": date(2026, 11, 18),
        "at": datetime(2026, 11, 18, 9, tzinfo=UTC),
        "items": [{"sku": "a", "count": None}],
    }

    (body,) = encoded({"value": values}, JSON, ORDER)

    assert json.loads(body)["items"] == [{"sku": "a"}], "null fields are left out, as in to_json"
    assert json.loads(body)["price"] == 12.5
    assert decoded(ORDER, body) == [values]
    (body,) = encoded({"value": AVRO_ORDER}, AVRO, of_avro())
    assert avro_reader(avro_schema(AVRO.schema or ""))(body) == AVRO_ORDER


def test_columns_that_messages_do_not_have_become_fields():
    batch = pa.RecordBatch.from_pylist(
        [{"id": 7, "keys": "k", "name": None, "map": [("a", 1)]}],
        schema=pa.schema(
            [
                ("id", pa.int64()),
                ("keys", pa.string()),
                ("name", pa.string()),
                ("map", pa.map_(pa.string(), pa.int64())),
            ]
        ),
    )

    found, problems = BodyEncoder(JSON, batch.schema.names, ("keys",)).encoded(batch)

    assert problems == {}
    assert found.schema.names == ["keys", "body"]
    assert found.column("body").to_pylist() == [b'{"id":7,"map":{"a":1}}']


def test_a_value_that_does_not_fit_is_a_row_that_cannot_be_written():
    kind = struct(id=LongType(), typo=LongType())
    batch = pa.RecordBatch.from_pylist(
        [{"value": None}, {"value": {"id": 1, "typo": 2}}],
        schema=pa.schema([("value", arrow_type(kind))]),
    )

    _, problems = BodyEncoder(AVRO, ["value"], ()).encoded(batch)

    assert problems[0] == "its value is null"
    assert "its value does not fit avro: " in problems[1]


@dataclass
class Paid:
    id: int
    state: str


@pytest.mark.parametrize(("options", "values"), [(AVRO, AVRO_ORDER), (PROTOBUF, PROTO_ORDER)])
def test_handlers_get_the_same_values_as_columns(tmp_path, options, values):
    (tmp_path / "order.desc").write_bytes(DESCRIPTOR)
    schema = options.schema or f"{tmp_path}/order.desc#shop.Order"
    sent = body_serializer(options.form, schema)
    serializer = pickle.loads(pickle.dumps(sent))  # noqa: S301  # as to a worker

    assert serializer.loads(sent.dumps(values)) == values
    handled = format_of(serializer).decoder(Paid)(sent.dumps(values))
    assert handled == Paid(7, "PAID")


def test_a_handler_hears_of_a_body_that_does_not_fit():
    with pytest.raises(EOFError):
        body_serializer("avro", AVRO.schema or "").loads(b"")
    with pytest.raises(OptionRefused, match="avro or protobuf; json and msgpack are built in"):
        body_serializer("text", "")


def test_a_dataclass_is_a_body_too():
    body = body_serializer(
        "avro",
        '{"type":"record","name":"P","fields":['
        '{"name":"id","type":"long"},{"name":"state","type":"string"}]}',
    ).dumps(Paid(1, "NEW"))

    assert body == b"\x02\x06NEW"


# ---- schemas and options


@pytest.mark.parametrize("bad", ["corrupt", "null"])
@pytest.mark.parametrize("form", ["text", "variant", "avro", "protobuf"])
def test_the_columns_are_those_that_spark_expects(form, bad):
    body = replace({"avro": AVRO, "protobuf": PROTOBUF}.get(form, BodyOptions(form=form)), bad=bad)

    found = schema_with_value(body, include_properties=False)

    assert isinstance(found, StructType)
    assert (
        found.names[10:] == ["storeTimestamp", "value", "_corrupt"][: 3 if bad == "corrupt" else 2]
    )
    assert "body" not in found.names
    check_schema(found, body)
    assert arrow_schema(found) == to_arrow_schema(found, timezone="UTC")


def test_ddl_is_left_to_spark():
    body = BodyOptions(form="json", schema="id BIGINT, items ARRAY<STRUCT<sku STRING>>")

    found = schema_with_value(body, include_properties=True)

    assert isinstance(found, str)
    assert found.endswith(
        "value STRUCT<id BIGINT, items ARRAY<STRUCT<sku STRING>>>, "
        "_corrupt struct<reason:string,body:binary>"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            StructType([StructField("id", LongType(), nullable=False)]),
            "value.id cannot be NOT NULL",
        ),
        (struct(m=MapType(LongType(), LongType())), "keys of map value.m must be STRING"),
        (LongType(), "is a struct, an array or a map, the schema of 'value' says bigint"),
        (struct(d=VariantType()), "value.d cannot be variant"),
    ],
)
def test_a_type_that_json_cannot_have_is_refused(kind, words):
    with pytest.raises(SchemaRefused, match=words):
        check_schema(StructType([StructField("value", kind)]), JSON)


def test_a_schema_of_the_user_may_name_any_of_the_columns():
    wanted = struct(value=struct(id=ShortType()), topic=StringType())
    check_schema(wanted, JSON)
    assert arrow_schema(wanted).names == ["value", "topic"]

    with pytest.raises(SchemaRefused, match="'_corrupt' needs the column 'value'"):
        check_schema(struct(_corrupt=StringType()), JSON)
    with pytest.raises(SchemaRefused, match="no column 'value'"):
        check_schema(wanted)
    with pytest.raises(SchemaRefused, match="'value' is string, the schema says bigint"):
        check_schema(struct(value=LongType()), BodyOptions(form="text"))


OPTIONS_REFUSED: Mapping[str, tuple[dict[str, str], str]] = {
    "no format": ({"bodySchema": "id BIGINT"}, "'bodySchema' must be given with the option bodyF"),
    "a wrong one": ({"bodyFormat": "xml"}, "one of json, avro, protobuf, text, variant; got 'xml'"),
    "no Avro schema": ({"bodyFormat": "avro"}, "must be an Avro schema in JSON, or a file"),
    "no file": ({"bodyFormat": "avro", "bodySchema": "no.avsc"}, "a file that can be read"),
    "no message": (
        {"bodyFormat": "protobuf", "bodySchema": "orders.desc"},
        r"as in orders.desc#shop.Order; got 'orders.desc'",
    ),
    "a schema of text": (
        {"bodyFormat": "text", "bodySchema": "id BIGINT"},
        "left out with bodyFormat text",
    ),
    "a wrong choice": ({"bodyFormat": "text", "badBodies": "drop"}, "one of fail, null, corrupt"),
}


@pytest.mark.parametrize("name", OPTIONS_REFUSED)
def test_wrong_options_of_bodies_are_refused(name):
    options, words = OPTIONS_REFUSED[name]

    with pytest.raises(OptionRefused, match=words):
        batch_options(LEAST | options, {})


def test_the_files_of_schemas_are_read_on_the_driver(tmp_path):
    (tmp_path / "order.avsc").write_text(json.dumps(ORDER_SCHEMA))
    (tmp_path / "order.desc").write_bytes(DESCRIPTOR)

    avro = body_options({"bodyFormat": "avro", "bodySchema": str(tmp_path / "order.avsc")})
    protobuf = body_options(
        {"bodyFormat": "protobuf", "bodySchema": f"{tmp_path}/order.desc#shop.Order"}
    )

    assert avro is not None
    assert value_type(avro) == of_avro()
    assert protobuf is not None
    assert value_type(protobuf) == of_protobuf()
    assert write_options({"nameServer": "a:1", "bodyFormat": "json"}, {}).body == BodyOptions(
        form="json"
    )


def test_a_message_type_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(SchemaRefused, match=r"no message type 'shop.Bill'; it has .*shop.Order"):
        value_type(BodyOptions(form="protobuf", descriptor=DESCRIPTOR, message="shop.Bill"))


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    def without(name: str) -> Any:
        if name == "fastavro":
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr("orbitmq.message.formats.importlib.import_module", without)

    with pytest.raises(SchemaRefused, match=r"avro needs a package .* install .*\[formats\]"):
        value_type(AVRO)


@pytest.mark.parametrize(
    ("schema", "form", "words"),
    [
        (struct(body=BinaryType()), "json", "leave column 'body' out"),
        (struct(value=LongType()), "text", "must be string or binary for bodyFormat text"),
        (struct(topic=StringType()), "json", "needs a column 'value', or columns that become"),
        (struct(value=StringType()), "json", "must be struct or array or map for bodyFormat json"),
    ],
)
def test_a_schema_without_a_value_to_encode_is_refused(schema, form, words):
    with pytest.raises(SchemaRefused, match=words):
        schema_with_body(schema, BodyOptions(form=form), ("topic", "body"))
