"""Where the `orbitmq` command begins, and how it ends: an error is a sentence and an exit code."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from orbitmq.errors import OrbitError

#: Set by whoever looks for a mistake of ours.
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
            f"this is a mistake in OrbitMQ, please report it: {type(error).__name__}: {error} "
            f"({TRACEBACK}=1 shows where)",
            FAILED,
        )


def _run() -> None:
    try:
        # Late, because the base install, which has this command too, lacks what it needs.
        from orbitmq.cli.application import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the command needs {error.name}, which is not installed; pip install 'orbitmq[broker]'"
        ) from error
    app(prog_name="orbitmq")


def _sentence(error: OrbitError) -> str:
    """What is said of an error: its own words, or what they mean to somebody at a command line."""
    from orbitmq.client.errors import NoNameServer  # noqa: PLC0415  # quick starts need none

    if not isinstance(error, NoNameServer) or not all(
        "Connection refused" in reason for _, reason in error.tried
    ):
        return str(error)
    addresses = ", ".join(str(address) for address, _ in error.tried)
    return (
        f"nothing listens at {addresses}; start a cluster with: orbitmq up, or say where it is "
        "with --name-server"
    )


def _of_system(error: OSError) -> str:
    """What the system said, without its number."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _end_quietly(code: int) -> None:
    # Python would fail to write what is left when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _end(sentence: str, code: int) -> None:
    sys.stderr.write(f"orbitmq: {sentence}\n")
    sys.exit(code)


# What the command refuses to do, and the exit code that says so.


#: Something could not be started, or ended by itself.
FAILED = 1
#: What was asked for cannot work: a setting, a flag, an address. As every Unix tool has it.
MISUSED = 2
#: What a shell reports for a program that Ctrl-C ended.
INTERRUPTED = 130


class CommandError(OrbitError):
    """The command ends with this sentence."""

    exit_code: ClassVar[int] = FAILED


class Misused(CommandError):
    """Words and flags that cannot be meant like that."""

    exit_code: ClassVar[int] = MISUSED


class NeedsConsent(CommandError):
    """A change was to be made, and there is nobody at a terminal to ask."""

    exit_code: ClassVar[int] = MISUSED

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; there is no terminal to ask at: say --yes to do it, or --dry-run to see what "
            "would happen"
        )


class Unheard(CommandError):
    """Whoever read the output has left, as `head` does: nothing more can be said to it."""

    #: What a shell reports for a program that ends with it.
    exit_code: ClassVar[int] = 141


class SettingRefused(CommandError):
    """A setting is unknown or has a value that cannot work; says where it comes from."""

    exit_code: ClassVar[int] = MISUSED


class Exposed(CommandError):
    """An address that others reach was to be listened on without protection."""

    exit_code: ClassVar[int] = MISUSED

    def __init__(self, setting: str, host: str, danger: str, remedy: str) -> None:
        ways = f"{remedy}, listen" if remedy else "listen"
        super().__init__(
            f"{setting} is {host!r}, which other machines reach, and anybody there could {danger}; "
            f"{ways} on 127.0.0.1, or say --insecure if the network is trusted"
        )


class PortTaken(CommandError):
    """An address cannot be listened on; says which flag chooses another."""

    def __init__(self, problem: object, option: str) -> None:
        said = str(problem).partition("; ")[0]
        super().__init__(f"{said}; choose another port with {option}, or any free one with 0")


class ProcessEnded(CommandError):
    """A process that was to serve has ended by itself."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended by itself with exit code {code}; everything was stopped")


class NotStopped(CommandError):
    """A process did not save and close everything when it was stopped."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(
            f"{name} did not stop in order (exit code {code}); its next start repairs what is open"
        )
