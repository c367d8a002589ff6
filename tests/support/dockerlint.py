"""Rules for Dockerfiles, for machines without hadolint: those of its rules that ours could break.

Each rule says in its docstring what is wrong where it finds something, with hadolint's number.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.dockerfiles import Stage, stages

Found = Iterator[str]
Rule = Callable[[Mapping[str, Stage]], Found]

INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def wrong(path: Path) -> list[str]:
    """What the rules say about a file."""
    found = stages(path)
    return [f"{rule.__doc__}: {what}" for rule in RULES for what in rule(found)]


def _unknown(found: Mapping[str, Stage]) -> Found:
    """there is no such instruction (DL1000)"""
    for _, name, words in _all(found):
        if name not in INSTRUCTIONS:
            yield f"{name} {words}"


def _base_without_version(found: Mapping[str, Stage]) -> Found:
    """a base image needs a version that is not latest (DL3006, DL3007)"""
    for stage in found.values():
        image, _, tag = stage.base.partition(":")
        if image not in found and tag in ("", "latest"):
            yield stage.base


def _unknown_stage(found: Mapping[str, Stage]) -> Found:
    """files are copied from a stage that is not above (DL3022, DL3023)"""
    names = list(found)
    for stage, name, words in _all(found):
        source = re.search(r"--from=(\S+)", words) if name == "COPY" else None
        if source and source[1] not in names[: names.index(stage.name)]:
            yield words


def _relative(found: Mapping[str, Stage]) -> Found:
    """a working directory must be absolute (DL3000)"""
    for _, name, words in _all(found):
        if name == "WORKDIR" and not words.startswith("/"):
            yield words


def _through_a_shell(found: Mapping[str, Stage]) -> Found:
    """a command must be a list, else a shell is in the way of signals (DL3025)"""
    for _, name, words in _all(found):
        command = words if name in ("CMD", "ENTRYPOINT") else ""
        if name == "HEALTHCHECK" and words != "NONE":
            command = words.partition("CMD")[2].strip()
        if command and not command.startswith("["):
            yield f"{name} {words}"


def _said_twice(found: Mapping[str, Stage]) -> Found:
    """only the last one of a stage counts (DL4003, DL4004, DL3012)"""
    for stage in found.values():
        for name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
            if len(stage.all(name)) > 1:
                yield f"{name} of {stage.name}"


def _add(found: Mapping[str, Stage]) -> Found:
    """files are copied with COPY (DL3020)"""
    for _, name, words in _all(found):
        if name == "ADD":
            yield words


def _own_variable(found: Mapping[str, Stage]) -> Found:
    """a variable cannot be used in the instruction that sets it (DL3044)"""
    for _, name, words in _all(found):
        set_here = set(re.findall(r"(?:^|\s)(\w+)=", words)) - {"PATH"} if name == "ENV" else set()
        for used in re.findall(r"\$\{?(\w+)", words):
            if used in set_here:
                yield f"{used} in {words}"


def _no_port(found: Mapping[str, Stage]) -> Found:
    """ports are between 1 and 65535 (DL3011)"""
    for _, name, words in _all(found):
        for port in words.split() if name == "EXPOSE" else ():
            number = port.partition("/")[0]
            if not (number.isdigit() and 0 < int(number) < 65536):
                yield port


def _careless(found: Mapping[str, Stage]) -> Found:
    """a command that hides a failure, keeps a cache or needs root's password"""
    for _, name, words in _all(found):
        if name != "RUN":
            continue
        for step in re.split(r"&&|;", words):
            called = shlex.split(step)
            if called[0] in ("sudo", "cd", "ssh", "top", "kill"):  # DL3004, DL3003, DL3001
                yield step.strip()
            if called[:2] == ["pip", "install"] and "--no-cache-dir" not in called:  # DL3042
                yield step.strip()
            if called[0] in ("apt", "apt-get") and not _is_frugal(called):  # DL3008, DL3014, DL3015
                yield step.strip()
            if "|" in called:  # DL4006
                yield step.strip()


def _is_frugal(called: list[str]) -> bool:
    if "install" not in called:
        return called[0] == "apt-get"
    packages = [each for each in called[called.index("install") + 1 :] if not each.startswith("-")]
    return (
        called[0] == "apt-get"
        and {"-y", "--no-install-recommends"} <= set(called)
        and all("=" in each for each in packages)
    )


def _ends_as_root(found: Mapping[str, Stage]) -> Found:
    """the last user must not be root (DL3002)"""
    for stage in found.values():
        if stage.all("CMD") and (stage.all("USER") or ["root"])[-1].partition(":")[0] in (
            "root",
            "0",
        ):
            yield stage.name


RULES: tuple[Rule, ...] = (
    _unknown,
    _base_without_version,
    _unknown_stage,
    _relative,
    _through_a_shell,
    _said_twice,
    _add,
    _own_variable,
    _no_port,
    _careless,
    _ends_as_root,
)


def _all(found: Mapping[str, Stage]) -> Iterator[tuple[Stage, str, str]]:
    for stage in found.values():
        for name, words in stage.instructions:
            yield stage, name, words
