"""Settings from files, variables and words that somebody got wrong: taken, or refused by name."""

from __future__ import annotations

import random
from typing import Any

from orbitmq.cli.settings import Configuration, all_settings
from orbitmq.errors import OrbitError
from tests.support.fuzzing import fuzz_seed, note_inputs, rounds
from tests.support.mutations import EDGES, ODD_TEXTS

SEED = fuzz_seed(7)
ROUNDS = rounds(400)

SETTINGS = tuple(all_settings().values())
VALUES = (
    *("true", "false", "1", "2.5", "1h", "10MiB", "sync", "a,b", "/tmp/x", "127.0.0.1:9876"),  # noqa: S108
    *map(str, EDGES),
    *ODD_TEXTS,
)


def made_of(configuration: Configuration) -> list[object]:
    """Everything that there is to make of it."""
    return [
        configuration.broker,
        configuration.name_server,
        configuration.up,
        configuration.log,
        configuration.run,
        list(configuration.rows()),
    ]


def test_words_and_variables_are_taken_or_refused():
    chance = random.Random(SEED)
    taken = refused = 0
    for _ in range(ROUNDS):
        words, variables = [], {}
        for _ in range(chance.randint(1, 4)):
            setting, value = chance.choice(SETTINGS), chance.choice(VALUES)
            if chance.random() < 0.5:
                words.append(f"{setting.path}{chance.choice(('=', '=', ' ', '=='))}{value}")
            else:
                variables[setting.variable] = value
        try:
            made_of(Configuration.load({}, words, variables))
            taken += 1
        except OrbitError as refusal:
            refused += 1
            is_named = any(setting.path in str(refusal) for setting in SETTINGS)
            is_named |= any(setting.variable in str(refusal) for setting in SETTINGS)
            if not is_named:
                is_named = any(word[:20] in str(refusal) for word in words)
            if not is_named:
                raise AssertionError(f"{words} {variables}: {refusal}") from refusal
    assert taken
    assert refused
    note_inputs(ROUNDS)


def test_files_are_taken_or_refused(tmp_path):
    chance = random.Random(SEED)
    file = tmp_path / "orbitmq.toml"
    taken = refused = 0
    for _ in range(ROUNDS):
        file.write_bytes(toml(chance))
        try:
            made_of(Configuration.load({}, (), {}, file))
            taken += 1
        except OrbitError as refusal:
            refused += 1
            if str(file) not in str(refusal) and "broker" not in str(refusal):
                raise AssertionError(str(refusal)) from refusal
    assert taken
    assert refused
    note_inputs(ROUNDS)


def toml(chance: random.Random) -> bytes:
    """A file of settings, some of them wrong, or not even that."""
    lines = []
    for _ in range(chance.randrange(4)):
        setting = chance.choice(SETTINGS)
        lines.append(f"{setting.path} = {literal(chance)}")
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    match chance.randrange(8):
        case 0:
            return text[: chance.randrange(len(text) + 1)]
        case 1:
            return text + chance.randbytes(5)
        case 2:
            return b"\n[broker]\n" + text
        case _:
            return text


def literal(chance: random.Random) -> str:
    value: Any = chance.choice(
        (True, False, 0, 1, -1, 1.5, 2**63, "sync", "x", "127.0.0.1:1", "1970-01-01", [], [1], {})
    )
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    return "{}" if value == {} else repr(value)
