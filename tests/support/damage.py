"""What disks do to files: bits that flip, pages that are lost or come from somewhere else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

_PAGE = 512


def damage_some(folder: Path, dice: random.Random, *, but: Sequence[str] = ("lock",)) -> list[Path]:
    """Damage one file or a few; which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in but)
    damaged = []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        path = dice.choice(files)
        before = path.read_bytes()
        if before:
            path.write_bytes(damage(before, dice))
            damaged.append(path)
    return damaged


def damage(data: bytes, dice: random.Random) -> bytes:
    """The same data, damaged where something is written, or right behind it."""
    used = len(data.rstrip(b"\0"))
    at = dice.randrange(max(1, min(len(data), used + 20)))
    return dice.choice(_DAMAGES)(data, at, dice)


def _flip_a_bit(data: bytes, at: int, dice: random.Random) -> bytes:
    raw = bytearray(data)
    raw[at] ^= 1 << dice.randrange(8)
    return bytes(raw)


def _lose(data: bytes, at: int, dice: random.Random) -> bytes:
    size = min(dice.choice((1, 4, 8, 20, 100, _PAGE, 4096)), len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


def _lose_a_page(data: bytes, at: int, dice: random.Random) -> bytes:
    begin = at // _PAGE * _PAGE
    return data[:begin] + bytes(len(data[begin : begin + _PAGE])) + data[begin + _PAGE :]


def _garble(data: bytes, at: int, dice: random.Random) -> bytes:
    size = min(dice.randrange(1, 200), len(data) - at)
    return data[:at] + dice.randbytes(size) + data[at + size :]


def _repeat_a_page(data: bytes, at: int, dice: random.Random) -> bytes:
    """A page that was written in the wrong place."""
    begin, other = at // _PAGE * _PAGE, dice.randrange(len(data)) // _PAGE * _PAGE
    page = data[other : other + _PAGE].ljust(_PAGE, b"\0")[: len(data[begin : begin + _PAGE])]
    return data[:begin] + page + data[begin + _PAGE :]


def _lose_the_rest(data: bytes, at: int, dice: random.Random) -> bytes:
    """The file has its length, and its end was never written."""
    return data[:at].ljust(len(data), b"\0")


def _cut(data: bytes, at: int, dice: random.Random) -> bytes:
    return data[:at]


_DAMAGES: Sequence[Callable[[bytes, int, random.Random], bytes]] = (
    *(_flip_a_bit,) * 4,
    *(_lose,) * 2,
    _lose_a_page,
    _garble,
    _repeat_a_page,
    _lose_the_rest,
    _cut,
)
