"""Processes of the `orbitmq` command without the time that Python takes to start.

One process has imported everything and waits. For each command it forks a child, which gets the
words, the environment and the three standard files of whoever asks, and is the command from then
on: with its own exit code, streams and signals. Starting Python anew would take ten times as long.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Self

from tests.support.command import DEADLINE, environment

_PROGRAM = """
import gc, importlib, json, os, socket, sys, traceback
from orbitmq.cli.application import WORDS
from orbitmq.cli.main import main
import rich.console, rich.table, typer.rich_utils
for word in WORDS.values():
    importlib.import_module(word.module)

line = socket.socket(fileno=int(sys.argv[1]))
# What is imported when words are parsed is imported by parsing some, which are refused.
sys.argv = ["orbitmq", "topic", "list", "--timeout", "0"]
try:
    main()
except SystemExit:
    pass
gc.freeze()
while True:
    asked, files, _, _ = socket.recv_fds(line, 1 << 20, 3)
    if not asked:
        line.close()
        break
    asked = json.loads(asked)
    child = os.fork()
    if child == 0:
        line.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = ["orbitmq", *asked["words"]]
        code = 1
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Taking down all that was imported would take longer than the command.
        os._exit(code)
    for file in files:
        os.close(file)
    _, status = os.waitpid(child, 0)
    line.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
"""


class Nursery:
    """Runs commands, one at a time."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._line.settimeout(DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.wait(DEADLINE)

    def run(
        self, words: Sequence[str], env: Mapping[str, str], stdin: bytes | None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; without input it reads nothing."""
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        try:
            os.write(files[0], stdin or b"")
            os.lseek(files[0], 0, os.SEEK_SET)
            asked = json.dumps({"words": list(words), "environment": dict(env)}).encode()
            socket.send_fds(self._line, [asked], files)
            code = json.loads(self._line.recv(64))
            out, errors = (_content(file) for file in files[1:])
        finally:
            for file in files:
                os.close(file)
        return subprocess.CompletedProcess(words, code, out, errors)


def _content(file: int) -> str:
    size = os.lseek(file, 0, os.SEEK_END)
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, size).decode()
