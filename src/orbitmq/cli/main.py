"""Where the `orbitmq` command begins, and how it ends: an error is a sentence and an exit code."""

from __future__ import annotations

import os
import sys

from orbitmq.cli.errors import FAILED, INTERRUPTED, CommandError, Unheard
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
