"""Completion: a shell is told every word and every flag, and the scripts are ones it can read."""

from __future__ import annotations

import shutil
import subprocess

from orbitmq.cli.application import WORDS
from tests.support.command import environment
from tests.support.nursery import Nursery
from tools.cli_docs import Command, commands

COMMANDS = list(commands())


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


def test_no_sentence_of_a_flag_breaks_the_list_that_zsh_evaluates(nursery, tmp_path):
    answers = []
    for command in COMMANDS:
        asking = {
            "_ORBITMQ_COMPLETE": "complete_zsh",
            "_TYPER_COMPLETE_ARGS": f"orbitmq {command.name} -",
        }
        answers.append(nursery.run((), environment(asking), None).stdout)
    script = tmp_path / "script.zsh"
    script.write_text("\n".join(answers))
    # Words and quotes, which both shells read alike.
    shell = shutil.which("zsh") or "bash"

    ran = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)

    assert all(answer.startswith("_arguments '*: :((") for answer in answers)
    assert ran.returncode == 0, ran.stderr
