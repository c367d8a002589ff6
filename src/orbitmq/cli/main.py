"""The entry of the `orbitmq` command, its errors and its exit codes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from orbitmq.errors import OrbitError, install_command

#: If set, an unexpected exception prints its traceback.
TRACEBACK = "ORBITMQ_TRACEBACK"


def main() -> None:
    """Run the command."""
    try:
        _run()
    except Unheard as error:
        _end_quietly(error.exit_code)
    except CommandError as error:
        _end(str(error), error.exit_code)
    except OrbitError as error:
        _end(_sentence(error), FAILED)
    except OSError as error:
        _end(_of_system(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        _end(
            f"this is a bug in OrbitMQ, please report it: {type(error).__name__}: {error} "
            f"({TRACEBACK}=1 shows where)",
            FAILED,
        )


def _run() -> None:
    try:
        # Late: the base install has this command, too, but not its dependencies.
        from orbitmq.cli.application import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the command needs {error.name}, which is not installed; {install_command('broker')}"
        ) from error
    app(prog_name="orbitmq")


def _sentence(error: OrbitError) -> str:
    """The sentence for an error, with the remedy on the command line."""
    from orbitmq.client.errors import NoNameServer  # noqa: PLC0415  # keeps the start fast

    if not isinstance(error, NoNameServer) or not all(
        "Connection refused" in reason for _, reason in error.tried
    ):
        return str(error)
    addresses = ", ".join(str(address) for address, _ in error.tried)
    from orbitmq.cli.context import name_in_force  # noqa: PLC0415  # as above

    if (context := name_in_force(sys.argv, os.environ)) is not None:
        return (
            f"nothing listens at {addresses}, where context {context!r} is; start that cluster, or "
            "choose another with: orbitmq context use NAME"
        )
    port = error.tried[0][0].port
    there = "" if len(error.tried) > 1 or port == 9876 else f" --namesrv-port {port}"
    return (
        f"nothing listens at {addresses}; start a cluster with: orbitmq up{there}, or give its "
        "address with --name-server"
    )


def _of_system(error: OSError) -> str:
    """The text of an OSError without the error number."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _end_quietly(code: int) -> None:
    # Otherwise Python fails to flush the rest at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _end(sentence: str, code: int) -> None:
    sys.stderr.write(f"orbitmq: {for_this_cluster(sentence, sys.argv)}\n")
    sys.exit(code)


#: Commands in a sentence that ask a cluster.
_commands = re.compile(
    r"\borbitmq (?:(?:cluster|topic|group|message|dlq) [a-z]+|produce|consume|top|doctor|console)\b"
)


def for_this_cluster(sentence: str, words: Sequence[str]) -> str:
    """A sentence whose commands name the cluster as the command line with these words does."""
    flags: list[str] = []
    for word, following in pairwise([*words, ""]):
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        if flag in ("-n", "--name-server", "--context") and (value or following):
            name = "--name-server" if flag == "-n" else flag
            flags += [name, shlex.quote(value if equals else following)]
        elif word.startswith("-n") and len(word) > 2:
            flags += ["--name-server", shlex.quote(word[2:])]
    if not flags or "--name-server" in sentence:
        return sentence
    return _commands.sub(lambda found: " ".join([found[0], *flags]), sentence)


#: Something failed, is incomplete or ended unexpectedly.
FAILED = 1
#: A setting, a flag or an address that cannot work.
MISUSED = 2
#: Ended by Ctrl-C (128 + SIGINT).
INTERRUPTED = 130


class CommandError(OrbitError):
    """The command ends with this sentence."""

    exit_code: ClassVar[int] = FAILED


class Misused(CommandError):
    """Arguments or flags that cannot work."""

    exit_code: ClassVar[int] = MISUSED


class NeedsConsent(CommandError):
    """A change needs consent, and there is no terminal to ask at."""

    exit_code: ClassVar[int] = MISUSED

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; there is no terminal to ask at: do it with --yes, or see what would happen "
            "with --dry-run"
        )


class Unheard(CommandError):
    """The reader of the output has closed it, as `head` does."""

    #: 128 + SIGPIPE.
    exit_code: ClassVar[int] = 141


class SettingRefused(CommandError):
    """A setting is unknown or has an invalid value. The text names its origin."""

    exit_code: ClassVar[int] = MISUSED


class Exposed(CommandError):
    """A server would listen unprotected on an address that other machines reach."""

    exit_code: ClassVar[int] = MISUSED

    def __init__(self, setting: str, host: str, danger: str, remedy: str) -> None:
        ways = f"{remedy}, listen" if remedy else "listen"
        super().__init__(
            f"{setting} is {host!r}, which other machines reach: they could {danger}; "
            f"{ways} on 127.0.0.1, or use --insecure if the network is trusted"
        )


class PortTaken(CommandError):
    """A port is in use. The text names the flag that chooses another."""

    def __init__(self, problem: object, option: str) -> None:
        said = str(problem).partition("; ")[0]
        super().__init__(f"{said}; choose another port with {option}, or any free one with 0")


class ProcessEnded(CommandError):
    """A server process has ended unexpectedly."""

    def __init__(self, name: str, code: int) -> None:
        self.name = name
        self.how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        super().__init__(f"{name} ended unexpectedly ({self.how}); everything was stopped")


class NotStopped(CommandError):
    """A server process did not shut down gracefully."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(
            f"{name} did not stop gracefully (exit code {code}); its next start recovers the log"
        )
