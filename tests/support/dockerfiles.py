"""Dockerfiles as values: enough of the language to look at ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """One `FROM`, and what follows it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [words for name, words in self.instructions if name == instruction]


def stages(path: Path) -> dict[str, Stage]:
    """The stages of a file by their names, in their order."""
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for instruction, words in _instructions(path.read_text()):
        if instruction == "FROM":
            base, _, name = words.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is not None:
            current.instructions.append((instruction, words))
    return found


def with_bases(found: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """What an image is made by: the instructions of a stage after those of the stages below it."""
    stage = found[name]
    below = with_bases(found, stage.base) if stage.base in found else []
    return [*below, *stage.instructions]


def environment(instructions: list[tuple[str, str]]) -> dict[str, str]:
    values: dict[str, str] = {}
    for instruction, words in instructions:
        if instruction == "ENV":
            values.update(dict(re.findall(r"(\w+)=(\S+)", words)))
    return values


def last(instructions: list[tuple[str, str]], wanted: str) -> str:
    return [words for instruction, words in instructions if instruction == wanted][-1]


def command(words: str) -> list[str]:
    """A command in the form that needs no shell."""
    return [str(word) for word in json.loads(words[words.index("[") :])]


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for statement in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if statement.strip():
            instruction, _, words = statement.strip().partition(" ")
            yield instruction.upper(), words.strip()
