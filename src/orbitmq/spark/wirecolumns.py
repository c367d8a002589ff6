"""Bodies in Avro and Protobuf decoded for all rows of a batch at once, with NumPy.

A cursor has a place in each body. Each step reads one field of all bodies and moves on. Rare cases
(decimals, long lists, fields that come twice) and bodies that do not fit raise `Unfit`. The caller
then decodes the bodies one by one, which also finds the reason.

Invariant: the result is what the packages `fastavro` and `protobuf` decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s: TypeAlias = npt.NDArray[np.int64]
Uint64s: TypeAlias = npt.NDArray[np.uint64]
#: Reads a value of each row of a cursor.
Read: TypeAlias = Callable[["Cursor"], pa.Array]

#: Steps through lists; with more of them it is faster to decode one by one.
_MOST_STEPS: Final = 256
_PADDING: Final = 32
#: Bytes of a mean value from which on values are copied one by one: the places of all bytes would
#: take sixteen times their memory, and more time.
_LONG: Final = 64
_HIGH: Final = np.uint64(0x8080808080808080)
_LOW: Final = np.uint64(0x7F7F7F7F7F7F7F7F)
_ONE: Final = np.uint64(1)
#: Pairs of groups of bits that move together, to close the gaps of 1, 2 and 4 bits.
_CLOSE: Final = tuple(
    (np.uint64(shift), np.uint64(upper), np.uint64(lower))
    for shift, upper, lower in (
        (1, 0x7F007F007F007F00, 0x007F007F007F007F),
        (2, 0x3FFF00003FFF0000, 0x00003FFF00003FFF),
        (4, 0x0FFFFFFF00000000, 0x000000000FFFFFFF),
    )
)


class Unfit(Exception):
    """These bodies, or their schema, have to be decoded one by one."""


class Cursor:
    """A place in each body."""

    __slots__ = ("_data", "_words", "at", "end")

    def __init__(
        self, data: npt.NDArray[np.uint8], words: Uint64s, at: Int64s, end: Int64s
    ) -> None:
        self._data = data
        #: The eight bytes from each place on.
        self._words = words
        self.at = at
        self.end = end

    @staticmethod
    def over(bodies: pa.Array) -> Cursor:
        """At the beginning of bodies without nulls."""
        _, offsets, content = bodies.buffers()
        places = np.frombuffer(offsets, np.int32)[bodies.offset : bodies.offset + len(bodies) + 1]
        first, last = int(places[0]), int(places[-1])
        data = np.zeros(last - first + _PADDING, np.uint8)
        if content is not None:
            data[: last - first] = np.frombuffer(content, np.uint8)[first:last]
        words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        at = places.astype(np.int64) - first
        return Cursor(data, words, at[:-1].copy(), at[1:])

    def __len__(self) -> int:
        return len(self.at)

    def part(self, rows: npt.NDArray[Any]) -> Cursor:
        """A cursor of its own over some rows."""
        return Cursor(self._data, self._words, self.at[rows], self.end[rows])

    def inside(self, starts: Int64s, lengths: Int64s) -> Cursor:
        """A cursor over parts of bodies."""
        return Cursor(self._data, self._words, starts, starts + lengths)

    def move(self, by: Int64s | int) -> None:
        self.at = self.at + by
        if (self.at > self.end).any():
            raise Unfit

    def words(self, size: int) -> Uint64s:
        """The next bytes, in the lower part of a word."""
        found = self._words[self.at]
        self.move(size)
        return found

    def varints(self) -> Uint64s:
        """Numbers of seven bits a byte, the lowest first."""
        found = self._words[self.at]
        stop = ~found & _HIGH
        last = stop & (~stop + _ONE)
        value = found & ((last << _ONE) - _ONE) & _LOW
        for shift, upper, lower in _CLOSE:
            value = ((value & upper) >> shift) | (value & lower)
        size = np.frexp(last.astype(np.float64))[1].astype(np.int64) >> 3
        if not last.all():
            long = np.flatnonzero(last == 0)
            rest = self._words[self.at[long] + 8]
            ninth, tenth = rest & np.uint64(255), (rest >> np.uint64(8)) & np.uint64(255)
            has_tenth = ninth >= 128
            if (tenth[has_tenth] > 1).any():
                raise Unfit
            value[long] |= (ninth & np.uint64(127)) << np.uint64(56)
            value[long] |= np.where(has_tenth, tenth << np.uint64(63), np.uint64(0))
            size[long] = 9 + has_tenth
        self.move(size)
        return value

    def zigzags(self) -> Int64s:
        """Varints in which the lowest bit is the sign."""
        value = self.varints()
        return (value >> _ONE).view(np.int64) ^ -(value & _ONE).view(np.int64)

    def spans(self, lengths: Int64s) -> tuple[Int64s, Int64s]:
        """Where the next bytes are, and how many."""
        if (lengths < 0).any() or (lengths > self.end - self.at).any():
            raise Unfit
        starts = self.at
        self.move(lengths)
        return starts, lengths

    def gathered(self, starts: Int64s, lengths: Int64s, kind: pa.DataType) -> pa.Array:
        """Bytes or texts."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] >= 2**31:
            raise Unfit
        if offsets[-1] > _LONG * len(lengths):
            data, stops = self._data.data, (starts + lengths).tolist()
            cuts = zip(starts.tolist(), stops, strict=True)
            content: Any = b"".join([data[start:stop] for start, stop in cuts])
        else:
            places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
            content = self._data[places]
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content)]
        found = pa.Array.from_buffers(pa.binary(), len(lengths), buffers)
        try:
            return found.cast(kind)
        except pa.ArrowInvalid:
            raise Unfit from None  # no text in UTF-8


def _numbers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Numbers as a type; a time has the bits of its number."""
    found = pa.array(values)
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return found.view(kind)
    try:
        return found.cast(kind)
    except pa.ArrowInvalid:
        raise Unfit from None  # beyond the type


def _spread(values: pa.Array, present: npt.NDArray[np.bool_]) -> pa.Array:
    """Values of some rows, and null for the others."""
    if len(values) == len(present):
        return values
    places = np.cumsum(present) - 1
    return values.take(pa.array(places, pa.int64(), mask=~present))


def _listed(
    values: Sequence[pa.Array], rows: Sequence[Int64s], count: int, kind: pa.DataType
) -> pa.Array:
    """Lists or maps of values that were found in the order of their places in the lists."""
    owners = np.concatenate([*rows, np.empty(0, np.int64)])
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(owners, minlength=count), out=offsets[1:])
    order = pa.array(np.argsort(owners, kind="stable"))
    is_map = pa.types.is_map(kind)
    item = pa.struct([kind.key_field, kind.item_field]) if is_map else kind.value_type
    flat = pa.concat_arrays(values).take(order) if values else pa.nulls(0, item)
    starts = pa.array(offsets)
    if not is_map:
        return pa.ListArray.from_arrays(starts, flat, type=kind)
    keys, items = flat.flatten() if values else (pa.nulls(0, f.type) for f in item)
    if len(keys):
        encoded = keys.dictionary_encode()
        codes = np.asarray(encoded.indices).astype(np.int64)
        owned = np.sort(owners, kind="stable") * len(encoded.dictionary) + codes
        if len(np.unique(owned)) < len(owned):
            raise Unfit  # of two entries with a key the last one counts
    return pa.MapArray.from_arrays(starts, keys, items, type=kind)


# Avro


def avro_columns(schema: Any, kind: pa.DataType) -> Read:
    """Reads values of a parsed schema; times are numbers of `kind`. Raises `Unfit`."""
    read = _avro(schema, kind, {})

    def read_all(cursor: Cursor) -> pa.Array:
        found = read(cursor)
        if (cursor.at != cursor.end).any():
            raise Unfit
        return found

    return read_all


def _avro(schema: Any, kind: pa.DataType, named: dict[str, Any]) -> Read:
    if isinstance(schema, list):
        return _avro_union(schema, kind, named)
    name = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(name, dict | list):
        return _avro(name, kind, named)
    if isinstance(schema, dict):
        if "name" in schema:
            named[schema["name"]] = schema
        if schema.get("logicalType") == "decimal":
            raise Unfit
    match name:
        case "boolean":
            return _avro_flags
        case "int":
            return lambda cursor: _numbers(_narrow(cursor.zigzags()), kind)
        case "long":
            return lambda cursor: _numbers(cursor.zigzags(), kind)
        case "float":
            return lambda cursor: pa.array(cursor.words(4).astype(np.uint32).view(np.float32))
        case "double":
            return lambda cursor: pa.array(cursor.words(8).view(np.float64))
        case "bytes" | "string":
            return lambda cursor: cursor.gathered(*cursor.spans(cursor.zigzags()), kind)
        case "fixed":
            size = schema["size"]
            return lambda cursor: cursor.gathered(
                *cursor.spans(np.full(len(cursor), size, np.int64)), kind
            )
        case "enum":
            return _avro_enum(pa.array(schema["symbols"], kind))
        case "record" | "error":
            readers = [
                _avro(each["type"], field.type, named)
                for each, field in zip(schema["fields"], kind, strict=True)
            ]
            return lambda cursor: pa.StructArray.from_arrays(
                [read(cursor) for read in readers], fields=list(kind)
            )
        case "array":
            return _avro_list(_avro(schema["items"], kind.value_type, named), kind)
        case "map":
            key = _avro("string", kind.key_type, named)
            value = _avro(schema["values"], kind.item_type, named)
            fields = [kind.key_field, kind.item_field]
            return _avro_list(
                lambda cursor: pa.StructArray.from_arrays(
                    [key(cursor), value(cursor)], fields=fields
                ),
                kind,
            )
        case _ if name in named:
            return _avro(named[name], kind, named)
    raise Unfit


def _narrow(values: Int64s) -> npt.NDArray[np.int32]:
    found = values.astype(np.int32)
    if (found != values).any():
        raise Unfit
    return found


def _avro_flags(cursor: Cursor) -> pa.Array:
    found = cursor.words(1) & np.uint64(255)
    if (found > 1).any():
        raise Unfit
    return pa.array(found.astype(np.bool_))


def _avro_enum(symbols: pa.Array) -> Read:
    def read(cursor: Cursor) -> pa.Array:
        found = cursor.zigzags()
        if (found < 0).any() or (found >= len(symbols)).any():
            raise Unfit
        return symbols.take(pa.array(found))

    return read


def _avro_union(schema: list[Any], kind: pa.DataType, named: dict[str, Any]) -> Read:
    """A type or null, in either order."""
    if len(schema) != 2 or "null" not in schema:
        raise Unfit
    place = 1 - schema.index("null")
    inner = _avro(schema[place], kind, named)

    def read(cursor: Cursor) -> pa.Array:
        branch = cursor.zigzags()
        present = branch == place
        if (branch[~present] != 1 - place).any():
            raise Unfit
        if present.all():
            return inner(cursor)
        some = cursor.part(present)
        values = inner(some)
        cursor.at = cursor.at.copy()
        cursor.at[present] = some.at
        return _spread(values, present)

    return read


def _avro_list(inner: Read, kind: pa.DataType) -> Read:
    def read(cursor: Cursor) -> pa.Array:
        values: list[pa.Array] = []
        rows: list[Int64s] = []
        still = np.arange(len(cursor))
        at = cursor.at.copy()
        # Blocks of items; the last one is empty.
        while len(still):
            block = cursor.part(still)
            block.at = at[still]
            counts = block.zigzags()
            if (counts < 0).any():
                raise Unfit  # blocks with their size, which few writers make
            if counts.max() > _MOST_STEPS:
                raise Unfit
            for place in range(int(counts.max())):
                have = np.flatnonzero(counts > place)
                item = block.part(have)
                values.append(inner(item))
                rows.append(still[have])
                block.at[have] = item.at
            at[still] = block.at
            still = still[counts > 0]
        cursor.at = at
        return _listed(values, rows, len(cursor), kind)

    return read


# Protobuf

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
#: How each type is on the wire, by its name without the width's unit.
_WIRE: Final[Mapping[str, int]] = {
    **dict.fromkeys(("INT64", "UINT64", "INT32", "UINT32", "BOOL", "ENUM"), _VARINT),
    **dict.fromkeys(("SINT32", "SINT64"), _VARINT),
    **dict.fromkeys(("FIXED64", "SFIXED64", "DOUBLE"), _EIGHT),
    **dict.fromkeys(("FIXED32", "SFIXED32", "FLOAT"), _FOUR),
    **dict.fromkeys(("STRING", "BYTES", "MESSAGE"), _BYTES),
}


def _raw(cursor: Cursor, wire: int) -> Uint64s:
    """The next numbers as they are on the wire."""
    return cursor.varints() if wire == _VARINT else cursor.words(8 if wire == _EIGHT else 4)


def _typed(raw: Uint64s, name: str) -> npt.NDArray[Any]:
    """Numbers of the wire as those of a type."""
    match name:
        case "INT64" | "SFIXED64":
            return raw.view(np.int64)
        case "INT32" | "SFIXED32" | "ENUM":
            return raw.astype(np.uint32).view(np.int32)
        case "UINT32" | "FIXED32":
            return raw.astype(np.uint32)
        case "SINT32":
            low = raw.astype(np.uint32)
            return (low >> np.uint32(1)).view(np.int32) ^ -(low & np.uint32(1)).view(np.int32)
        case "SINT64":
            return (raw >> _ONE).view(np.int64) ^ -(raw & _ONE).view(np.int64)
        case "BOOL":
            return raw.astype(np.bool_)
        case "DOUBLE":
            return raw.view(np.float64)
        case "FLOAT":
            return raw.astype(np.uint32).view(np.float32)
    return raw


class _Field:
    """How a field of a message becomes a column."""

    __slots__ = (
        "_names",
        "_read",
        "_single",
        "has_presence",
        "is_repeated",
        "kind",
        "oneof",
        "type",
    )

    def __init__(
        self, field: Any, type_name: str, kind: pa.DataType, types: Sequence[str], *, of_entry: bool
    ) -> None:
        if type_name not in _WIRE or field.is_required:
            raise Unfit
        self.type = type_name
        self.kind = kind
        self.is_repeated = bool(field.is_repeated)
        #: Fields of a map's entry have their default when they were not sent.
        self.has_presence = bool(field.has_presence) and not of_entry
        self.oneof = field.containing_oneof.name if field.containing_oneof else None
        is_map = pa.types.is_map(kind)
        self._single = kind.value_type if self.is_repeated and not is_map else kind
        if is_map:
            self._single = pa.struct([kind.key_field, kind.item_field])
        self._names: dict[int, str] = {}
        self._read: Read | None = None
        if type_name == "ENUM":
            values = field.enum_type.values_by_number
            self._names = {number: each.name for number, each in values.items()}
        if type_name == "MESSAGE":
            self._read = protobuf_columns(field.message_type, self._single, types, is_entry=is_map)

    @property
    def wire(self) -> int:
        return _WIRE[self.type]

    def column(self, cursor: Cursor, found: Sequence[_Found]) -> pa.Array:
        """The column of what was found in the rows of a cursor."""
        count = len(cursor)
        rows = np.concatenate([np.empty(0, np.int64), *(each.rows for each in found)])
        raw = np.concatenate([np.empty(0, np.uint64), *(each.raw for each in found)])
        lengths = np.concatenate([np.empty(0, np.int64), *(each.lengths for each in found)])
        if self.is_repeated:
            values = [self._values(cursor, raw, lengths)] if len(rows) else []
            return _listed(values, [rows], count, self.kind)
        present = np.zeros(count, np.bool_)
        present[rows] = True
        if np.count_nonzero(present) < len(rows):
            raise Unfit  # a field that comes twice
        all_raw, all_lengths = np.zeros(count, np.uint64), np.zeros(count, np.int64)
        all_raw[rows], all_lengths[rows] = raw, lengths
        if not self.has_presence:
            return self._values(cursor, all_raw, all_lengths)
        return _spread(self._values(cursor, all_raw[present], all_lengths[present]), present)

    def _values(self, cursor: Cursor, raw: Uint64s, lengths: Int64s) -> pa.Array:
        """Numbers, or the parts of bodies that begin there, as values."""
        if self._read is not None:
            return self._read(cursor.inside(raw.view(np.int64), lengths))
        if self.wire == _BYTES:
            return cursor.gathered(raw.view(np.int64), lengths, self._single)
        found = _typed(raw, self.type)
        if self.type != "ENUM":
            return _numbers(found, self._single)
        numbers, places = np.unique(found, return_inverse=True)
        if not self._names.keys() >= set(numbers.tolist()):
            raise Unfit
        names = [self._names[number] for number in numbers.tolist()]
        return pa.array(names, pa.string()).take(pa.array(places))


class _Found(NamedTuple):
    """A field that some rows have: its number, or where its bytes begin and how many they are."""

    rows: Int64s
    raw: Uint64s
    lengths: Int64s


def protobuf_columns(
    message: Any, kind: pa.DataType, types: Sequence[str], *, is_entry: bool = False
) -> Read:
    """Reads messages. `types` are the names of types by their number. Raises `Unfit`."""
    if not pa.types.is_struct(kind):
        return _times(message, kind, types)
    fields = {
        field.number: _Field(field, types[field.type], column.type, types, of_entry=is_entry)
        for field, column in zip(message.fields, kind, strict=True)
    }

    def read(cursor: Cursor) -> pa.Array:
        found = _fields_of(cursor, fields, has_unknown=not is_entry)
        columns = [field.column(cursor, found[number]) for number, field in fields.items()]
        return pa.StructArray.from_arrays(columns, fields=list(kind))

    return read


def _fields_of(
    cursor: Cursor, fields: Mapping[int, _Field], *, has_unknown: bool
) -> Mapping[int, list[_Found]]:
    """The fields of messages in their order; `has_unknown` allows unknown ones."""
    found: dict[int, list[_Found]] = {number: [] for number in fields}
    chosen_in: dict[str, npt.NDArray[np.bool_]] = {}
    still = np.flatnonzero(cursor.at < cursor.end)
    at = cursor.at.copy()
    for _ in range(_MOST_STEPS):
        if not len(still):
            cursor.at = at
            return found
        now = cursor.part(still)
        now.at = at[still]
        tags = now.varints()
        others = np.arange(len(tags))
        while len(others):
            tag = tags[others[0]]
            is_it = tags[others] == tag
            chosen, others = others[is_it], others[~is_it]
            group, rows = now.part(chosen), still[chosen]
            if not has_unknown and int(tag) >> 3 not in fields:
                raise Unfit
            for number, each in _field_at(group, int(tag), fields):
                found[number].append(each._replace(rows=rows[each.rows]))
                if (oneof := fields[number].oneof) is not None:
                    taken = chosen_in.setdefault(oneof, np.zeros(len(cursor), np.bool_))
                    if taken[rows].any():
                        raise Unfit  # the last one counts
                    taken[rows] = True
            now.at[chosen] = group.at
        at[still] = now.at
        still = still[now.at < now.end]
    raise Unfit


def _field_at(
    group: Cursor, tag: int, fields: Mapping[int, _Field]
) -> Iterator[tuple[int, _Found]]:
    """The next field, which has the same tag in all rows; nothing of an unknown one."""
    number, wire = tag >> 3, tag & 7
    if not number or wire not in (_VARINT, _EIGHT, _BYTES, _FOUR):
        raise Unfit
    rows, lengths = np.arange(len(group)), np.zeros(len(group), np.int64)
    if wire == _BYTES:
        starts, lengths = group.spans(group.varints().view(np.int64))
        raw = starts.view(np.uint64)
    else:
        raw = _raw(group, wire)
    if (field := fields.get(number)) is None:
        return
    if wire == field.wire:
        yield number, _Found(rows, raw, lengths)
    elif wire == _BYTES and field.is_repeated and field.wire != _BYTES:
        yield from ((number, each) for each in _packed(group.inside(starts, lengths), field.wire))
    else:
        raise Unfit


def _packed(cursor: Cursor, wire: int) -> Iterator[_Found]:
    """The numbers of packed lists: the first of each list, the second, and so on."""
    rows = np.flatnonzero(cursor.at < cursor.end)
    now = cursor.part(rows)
    for _ in range(_MOST_STEPS):
        if not len(rows):
            return
        yield _Found(rows, _raw(now, wire), np.zeros(len(rows), np.int64))
        more = now.at < now.end
        rows, now = rows[more], now.part(more)
    raise Unfit


#: Beyond that, microseconds do not fit 64 bits.
_MOST_SECONDS: Final = 9 * 10**12


def _times(message: Any, kind: pa.DataType, types: Sequence[str]) -> Read:
    """Timestamps and durations."""
    fields = [pa.field("seconds", pa.int64()), pa.field("nanos", pa.int32())]
    inner = protobuf_columns(message, pa.struct(fields), types)

    def read(cursor: Cursor) -> pa.Array:
        seconds, nanos = (np.asarray(each) for each in inner(cursor).flatten())
        if (np.abs(seconds) > _MOST_SECONDS).any():
            raise Unfit
        return pa.array(seconds * 1_000_000 + nanos // 1000).cast(kind)

    return read
