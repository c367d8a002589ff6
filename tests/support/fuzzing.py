"""JSON that is wrong somewhere, made from the declared bodies, and whole conversations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orbitmq.remoting.settings import Address
from orbitmq.wire.command import decode_command
from orbitmq.wire.frame import FrameReader
from tests.support.mutations import EDGES, ODD_TEXTS

_DEEPEST = 6
#: What ORBITMQ_ROUNDS is when nobody sets it.
_USUAL_ROUNDS = 200


def rounds(usual: int) -> int:
    """How often to try, `usual` times unless ORBITMQ_ROUNDS asks for more."""
    asked = int(os.environ.get("ORBITMQ_ROUNDS", _USUAL_ROUNDS))
    return max(1, usual * asked // _USUAL_ROUNDS)


def fuzz_seed(usual: int) -> int:
    """What the inputs follow from; ORBITMQ_FUZZ_SEED asks for others than the usual ones."""
    return int(os.environ.get("ORBITMQ_FUZZ_SEED", usual))


def note_inputs(count: int) -> None:
    """Tell whoever wants to know (ORBITMQ_COUNTS names a file) how many inputs were tried."""
    if path := os.environ.get("ORBITMQ_COUNTS"):
        with Path(path).open("a") as file:
            file.write(f"{count}\n")


def body_like(kind: type[msgspec.Struct], chance: random.Random) -> bytes:
    """The text of a document of this kind, with something wrong in it more often than not."""
    document = _struct(msgspec.inspect.type_info(kind), chance, 0)
    text = json.dumps(document).encode()
    match chance.randrange(12):
        case 0:
            return text[: chance.randrange(len(text) + 1)]
        case 1:
            at = chance.randrange(len(text) + 1)
            return text[:at] + chance.randbytes(chance.randint(1, 6)) + text[at:]
        case 2:
            return text + chance.choice((b"}", b",", b"\0", b" {}", text))
        case 3:
            return b"[" * chance.choice((1, 70, 100_000)) + text
        case 4:
            return chance.choice((b"", b"null", b"{", b"[]", b"0", b'"', b"{}", b"\xff\xfe{}"))
        case _:
            return text


def _value(info: Any, chance: random.Random, depth: int) -> Any:
    if chance.random() < 0.08 or depth > _DEEPEST:
        return anything(chance)
    for kind, make in _MAKERS.items():
        if isinstance(info, kind):
            return make(info, chance, depth)
    return anything(chance)


def _struct(info: Any, chance: random.Random, depth: int) -> Any:
    made = {
        field.encode_name: _value(field.type, chance, depth + 1)
        for field in info.fields
        if chance.random() < 0.9
    }
    if chance.random() < 0.1:
        made[chance.choice(ODD_TEXTS)] = anything(chance)
    return made


def _list(info: Any, chance: random.Random, depth: int) -> Any:
    return [_value(info.item_type, chance, depth + 1) for _ in range(chance.choice((0, 1, 1, 3)))]


def _tuple(info: Any, chance: random.Random, depth: int) -> Any:
    return [_value(each, chance, depth + 1) for each in info.item_types]


def _dict(info: Any, chance: random.Random, depth: int) -> Any:
    return {
        chance.choice(("orders", "0", "1", *ODD_TEXTS)): _value(info.value_type, chance, depth + 1)
        for _ in range(chance.choice((0, 1, 1, 3)))
    }


def _union(info: Any, chance: random.Random, depth: int) -> Any:
    return _value(chance.choice(info.types), chance, depth)


def anything(chance: random.Random) -> Any:
    """Some JSON value."""
    return chance.choice(
        (None, True, 0, -1, 1.5, 1e308, "x", {}, [], [None], {"a": {"b": []}}, *EDGES, *ODD_TEXTS)
    )


_Make = Callable[[Any, random.Random, int], Any]
_MAKERS: dict[type[Any], _Make] = {
    msgspec.inspect.StructType: _struct,
    msgspec.inspect.ListType: _list,
    msgspec.inspect.VarTupleType: _list,
    msgspec.inspect.SetType: _list,
    msgspec.inspect.FrozenSetType: _list,
    msgspec.inspect.TupleType: _tuple,
    msgspec.inspect.DictType: _dict,
    msgspec.inspect.UnionType: _union,
    msgspec.inspect.IntType: lambda info, chance, depth: chance.choice((0, 1, 2, 4, *EDGES)),
    msgspec.inspect.BoolType: lambda info, chance, depth: chance.choice((True, False)),
    msgspec.inspect.StrType: lambda info, chance, depth: chance.choice(
        ("orders", "billing", "TAG", "c@1", "*", *ODD_TEXTS)
    ),
    msgspec.inspect.NoneType: lambda info, chance, depth: None,
}


# ---- conversations

AT_ONCE = 16


async def converse_all(address: Address, cases: Iterator[bytes], *, ends_within: float) -> None:
    """Say them all, some at a time; fails when the server does not end one of them in time."""

    async def one_after_the_other() -> None:
        for case in cases:
            await _converse(address, case, ends_within)

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


async def _converse(address: Address, case: bytes, ends_within: float) -> None:
    """Say something, and listen until the server has ended the connection."""
    reader, writer = await asyncio.open_connection(*address)
    answers = FrameReader()
    try:
        async with asyncio.timeout(ends_within):
            with contextlib.suppress(ConnectionError):
                writer.write(case)
                writer.write_eof()
                while heard := await reader.read(65_536):
                    for frame in answers.feed(heard):
                        decode_command(frame)
    except TimeoutError:
        pytest.fail(f"the connection was not ended after {case!r}")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
