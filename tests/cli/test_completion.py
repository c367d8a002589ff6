"""Completion: a shell is told every word and every flag, and the scripts are ones it can read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orbitmq.cli.application import WORDS
from orbitmq.cli.consume import Form
from orbitmq.cli.produce import Input
from tests.support.command import DEADLINE, environment, run
from tests.support.nursery import Nursery
from tools.cli_docs import Command, commands

COMMANDS = list(commands())
SHELLS = ("bash", "zsh", "fish")


def suggested(nursery: Nursery, *words: str) -> list[str]:
    """What bash is told when the last of these words is being typed."""
    asking = {
        "_ORBITMQ_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("orbitmq", *words)),
        "COMP_CWORD": str(len(words)),
    }
    ran = nursery.run((), environment(asking), None)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout.split()


def flags(command: Command) -> set[str]:
    """The flags of a command that its help shows."""
    return {
        flag
        for each in command.made.params
        if each.param_type_name == "option" and not each.hidden
        for flag in (*each.opts, *each.secondary_opts)
    }


def test_every_command_is_suggested(nursery):
    assert set(suggested(nursery, "")) == set(WORDS)
    assert suggested(nursery, "doc") == ["doctor"]
    for word in WORDS:
        inner = {
            command.name.removeprefix(f"{word} ")
            for command in COMMANDS
            if command.name.startswith(f"{word} ")
        }
        if inner:
            assert set(suggested(nursery, word, "")) == inner, word


def test_every_flag_of_every_command_is_suggested(nursery):
    asked = 0
    for command in COMMANDS:
        known = flags(command)
        asked += len(known)

        told = set(suggested(nursery, *command.name.split(), "-"))
        assert known <= told, f"{command.name}: {sorted(known - told)} are not suggested"
        assert told - known <= {"--help", "-h"}, command.name
    assert len(COMMANDS) > 40
    assert asked > 400


@pytest.mark.parametrize(
    ("words", "values"),
    [(("consume", "--format"), list(Form)), (("produce", "--input"), list(Input))],
    ids=["consume", "produce"],
)
def test_what_a_flag_may_be_given_is_suggested(words, values, nursery):
    assert suggested(nursery, *words, "") == [str(each) for each in values]


def test_bash_completes_with_the_script_that_it_is_given(tmp_path):
    script = tmp_path / "completion.sh"
    script.write_text(run(env={"_ORBITMQ_COMPLETE": "source_bash"}).stdout)
    # What bash does when somebody presses the tab key behind the words.
    pressed = f"""
source {script}
COMP_WORDS=(orbitmq topic cr) COMP_CWORD=2
_orbitmq_completion orbitmq cr topic
echo "${{COMPREPLY[@]}}"
complete -p orbitmq
"""

    ran = subprocess.run(
        ["bash", "--norc", "-e", "-c", pressed],
        env=environment({"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "create",
        "complete -o default -F _orbitmq_completion orbitmq",
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_for_a_shell_can_be_read(shell, nursery, tmp_path):
    made = nursery.run((), environment({"_ORBITMQ_COMPLETE": f"source_{shell}"}), None)

    assert made.returncode == 0, made.stderr
    assert f"complete_{shell}" in made.stdout
    assert "orbitmq" in made.stdout
    check_that_it_parses(shell, made.stdout, tmp_path)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_with_a_sentence_about_each(shell, nursery, tmp_path):
    answers = []
    # All for the one that evaluates what it is told; for the other one some are enough.
    for command in (None, *(COMMANDS if shell == "zsh" else COMMANDS[::8])):
        words = "orbitmq " if command is None else f"orbitmq {command.name} -"
        asking = {
            "_ORBITMQ_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        ran = nursery.run((), environment(asking), None)
        assert ran.returncode == 0, ran.stderr
        wanted = set(WORDS) if command is None else flags(command)
        separator = '":"' if shell == "zsh" else "\t"
        told = told_by(shell, ran.stdout, separator)
        assert wanted <= told, f"{words}: {sorted(wanted - told)}"
        answers.append(ran.stdout)
    if shell == "zsh":
        # It evaluates what it is told: a quote in a sentence of ours must not end the list.
        check_that_it_parses(shell, "\n".join(answers), tmp_path)


def told_by(shell: str, answer: str, separator: str) -> set[str]:
    lines: Sequence[str] = answer.splitlines()
    if shell == "zsh":
        assert answer.startswith("_arguments '*: :((")
        assert answer.rstrip().endswith("))'")
        lines = answer.removeprefix("_arguments '*: :((").rstrip().removesuffix("))'").splitlines()
    return {line.partition(separator)[0].strip('"') for line in lines}


def check_that_it_parses(shell: str, script: str, folder: Path) -> None:
    """By the shell itself where it is, else by bash: these scripts have no more than words, quotes
    and a function, which all three write alike.
    """
    file = folder / f"script.{shell}"
    file.write_text(script)
    ran = subprocess.run(
        [shutil.which(shell) or "bash", "-n", file],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
