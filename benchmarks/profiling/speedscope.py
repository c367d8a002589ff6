"""The part of speedscope's file format that py-spy writes and that we write again.

https://www.speedscope.app/file-format-schema.json
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function, by the line where it begins."""

    name: str
    file: str | None = None
    line: int | None = None


class Shared(msgspec.Struct, frozen=True):
    frames: list[Frame]


class Thread(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a thread did: in every sample the places of the frames, the outermost first."""

    type: Literal["sampled"] = "sampled"
    name: str
    unit: Literal["seconds"] = "seconds"
    start_value: float = 0.0
    end_value: float
    samples: list[list[int]]
    weights: list[float]


class Speedscope(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = msgspec.field(
        name="$schema", default="https://www.speedscope.app/file-format-schema.json"
    )
    name: str = ""
    shared: Shared
    profiles: list[Thread]
