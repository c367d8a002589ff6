"""Words after `orbitmq` that make no sense: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from orbitmq.cli.application import WORDS, app, load
from orbitmq.errors import OrbitError
from tests.support.fuzzing import fuzz_seed, note_inputs, rounds
from tests.support.mutations import ODD_TEXTS

SEED = fuzz_seed(7)
ROUNDS = rounds(60)

#: Those that serve, or show something until somebody ends them.
ENDLESS = {"up", "broker", "namesrv", "console", "top", "consume", "pipeline", "bench"}
#: Nobody listens there.
NOWHERE = "127.0.0.1:1"
VALUES = ("orders", "billing", "0", "-1", "1.5", "1h", "now", "json", "{}", "2020-01-01", "a=b")


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that ends by itself, by its words."""
    for word in WORDS:
        if word not in ENDLESS:
            yield from _below((word,), load(word))


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _below((*words, name), each)
    else:
        yield words, command


@pytest.mark.timeout(300 + 2 * ROUNDS)
def test_whatever_is_typed_there_is_a_sentence_and_an_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORBITMQ_NAME_SERVER", NOWHERE)
    chance = random.Random(SEED)
    known = list(commands())
    codes = set()
    for _ in range(ROUNDS):
        words, command = chance.choice(known)
        typed = [*words, *typed_for(command, chance)]

        result = CliRunner().invoke(app, typed, input="")

        error = result.exception
        if error is not None and not isinstance(error, (SystemExit, OrbitError, OSError)):
            raise AssertionError(f"orbitmq {typed!r}: {error!r}") from error
        codes.add(result.exit_code)
        if isinstance(error, SystemExit) and result.exit_code:
            assert result.output.strip(), typed
    assert len(known) > 20
    assert codes - {0}
    note_inputs(ROUNDS)


def typed_for(command: Any, chance: random.Random) -> list[str]:
    """Some of the options that a command has, and words that it may or may not want."""
    options = [each for each in command.params if each.param_type_name == "option"]
    typed: list[str] = []
    for option in chance.sample(options, chance.randrange(min(4, len(options) + 1))):
        typed.append(chance.choice(option.opts))
        if not option.is_flag or chance.random() < 0.05:
            typed.append(text(chance))
    wanted = sum(each.param_type_name == "argument" for each in command.params)
    count = chance.choice((wanted, wanted, wanted, wanted + 1, max(0, wanted - 1)))
    typed += [text(chance) for _ in range(count)]
    return typed


def text(chance: random.Random) -> str:
    found = chance.choice((*VALUES, *VALUES, *ODD_TEXTS))
    return found.replace("\0", "")[:500]  # no system passes these on
