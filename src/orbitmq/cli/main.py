"""Where the `orbitmq` command begins, and how it ends: an error is a sentence and an exit code."""

from __future__ import annotations

import sys

from orbitmq.cli.errors import FAILED, CommandError
from orbitmq.errors import OrbitError


def main() -> None:
    """Run the command."""
    try:
        _run()
    except CommandError as error:
        _end(str(error), error.exit_code)
    except (OrbitError, OSError) as error:
        _end(str(error), FAILED)
    except KeyboardInterrupt:
        # Only until signals are listened to.
        _end("interrupted before anything was started", FAILED)


def _run() -> None:
    try:
        # Late, because the base install, which has this command too, lacks what it needs.
        from orbitmq.cli.commands import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the command needs {error.name}, which is not installed; pip install 'orbitmq[broker]'"
        ) from error
    app(prog_name="orbitmq")


def _end(sentence: str, code: int) -> None:
    sys.stderr.write(f"orbitmq: {sentence}\n")
    sys.exit(code)
