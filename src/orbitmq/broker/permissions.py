"""What may be done with a topic or a broker: bits on the wire, letters for people."""

from __future__ import annotations

import enum


class Perm(enum.IntFlag):
    """Bits of a permission. Any other bit is kept as it is and means nothing."""

    #: Topics made by sending take this one as their template.
    INHERIT = 1
    WRITE = 2
    READ = 4
    PRIORITY = 8


READ_WRITE = int(Perm.READ | Perm.WRITE)

#: The place of the read bit in a group's forbidden bits.
READ_BIT = 2

_READ = int(Perm.READ)
_WRITE = int(Perm.WRITE)
_INHERIT = int(Perm.INHERIT)


def may_read(perm: int) -> bool:
    """Whether consumers may pull."""
    return perm & _READ != 0


def may_write(perm: int) -> bool:
    """Whether producers may send."""
    return perm & _WRITE != 0


def is_inherited(perm: int) -> bool:
    """Whether it is a template for topics made by sending."""
    return perm & _INHERIT != 0


def perm_text(perm: int) -> str:
    """`RWX` with a dash for what is not allowed."""
    return (
        ("R" if may_read(perm) else "-")
        + ("W" if may_write(perm) else "-")
        + ("X" if is_inherited(perm) else "-")
    )
