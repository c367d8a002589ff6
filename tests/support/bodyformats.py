"""An Avro schema and a Protobuf descriptor of orders, for tests of bodies."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

ORDER_SCHEMA: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
        },
        {"name": "labels", "type": {"type": "map", "values": "int"}},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [
                        {"name": "sku", "type": "bytes"},
                        {
                            "name": "until",
                            "type": {"type": "long", "logicalType": "timestamp-micros"},
                        },
                    ],
                },
            },
        },
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "either", "type": ["int", "long"]},
    ],
}


#: What is decoded for all rows at once: no decimals, unions of a type and null alone.
PLAIN_SCHEMA: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Plain",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "paid", "type": "boolean"},
        {"name": "count", "type": ["int", "null"]},
        {"name": "half", "type": "float"},
        {"name": "ratio", "type": "double"},
        {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 3}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "labels", "type": {"type": "map", "values": ["null", "long"]}},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [
                        {"name": "sku", "type": "bytes"},
                        {"name": "sizes", "type": {"type": "array", "items": "int"}},
                    ],
                },
            },
        },
        {"name": "last", "type": ["null", "Item"]},
    ],
}
#: Types of numbers in `shop.Numbers`, each alone and as a list.
NUMBERS: Final = (
    *("INT32", "INT64", "UINT32", "UINT64", "SINT32", "SINT64", "BOOL"),
    *("FIXED32", "FIXED64", "SFIXED32", "SFIXED64", "FLOAT", "DOUBLE"),
)


def _descriptor() -> bytes:
    """What `protoc --include_imports -o FILE` makes of a file with orders and numbers."""
    pb2 = import_module("google.protobuf.descriptor_pb2")
    files = pb2.FileDescriptorSet()
    for name in ("timestamp", "duration"):
        import_module(f"google.protobuf.{name}_pb2").DESCRIPTOR.CopyToProto(files.file.add())
    file = files.file.add(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend([each.name for each in files.file if each.name != "shop.proto"])
    kinds = pb2.FieldDescriptorProto

    def field(message: Any, name: str, kind: int, type_name: str = "", **more: Any) -> None:
        message.field.add(
            name=name,
            number=len(message.field) + 1,
            type=kind,
            label=more.pop("label", kinds.LABEL_OPTIONAL),
            **({"type_name": type_name} if type_name else {}),
            **more,
        )

    state = file.enum_type.add(name="State")
    state.value.add(name="NEW", number=0)
    state.value.add(name="PAID", number=1)
    item = file.message_type.add(name="Item")
    field(item, "sku", kinds.TYPE_STRING)
    field(item, "count", kinds.TYPE_INT32)
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="LabelsEntry")
    entry.options.map_entry = True
    field(entry, "key", kinds.TYPE_STRING)
    field(entry, "value", kinds.TYPE_INT32)
    many = kinds.LABEL_REPEATED
    field(order, "id", kinds.TYPE_INT64)
    field(order, "at", kinds.TYPE_MESSAGE, ".google.protobuf.Timestamp")
    field(order, "took", kinds.TYPE_MESSAGE, ".google.protobuf.Duration")
    field(order, "state", kinds.TYPE_ENUM, ".shop.State")
    field(order, "items", kinds.TYPE_MESSAGE, ".shop.Item", label=many)
    field(order, "tags", kinds.TYPE_STRING, label=many)
    field(order, "labels", kinds.TYPE_MESSAGE, ".shop.Order.LabelsEntry", label=many)
    field(order, "big", kinds.TYPE_UINT64)
    order.oneof_decl.add(name="_note")
    field(order, "note", kinds.TYPE_STRING, oneof_index=0, proto3_optional=True)
    field(order, "first", kinds.TYPE_MESSAGE, ".shop.Item")
    numbers = file.message_type.add(name="Numbers")
    for name in NUMBERS:
        field(numbers, name.lower(), getattr(kinds, f"TYPE_{name}"))
        field(numbers, f"{name.lower()}s", getattr(kinds, f"TYPE_{name}"), label=many)
    numbers.oneof_decl.add(name="either")
    field(numbers, "text", kinds.TYPE_STRING, oneof_index=0)
    field(numbers, "item", kinds.TYPE_MESSAGE, ".shop.Item", oneof_index=0)
    field(numbers, "states", kinds.TYPE_ENUM, ".shop.State", label=many)
    field(numbers, "items", kinds.TYPE_MESSAGE, ".shop.Item", label=many)
    data: bytes = files.SerializeToString()
    return data


#: A FileDescriptorSet with `shop.Order`.
DESCRIPTOR: Final = _descriptor()
