"""Has py-spy watch a hot path: samples of all Python processes of its tree, while they work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from benchmarks.profiling.paths import HotPath
from benchmarks.profiling.workload import Broken, Missing, Outcome
from benchmarks.runner import NotAtHand

ROOT = Path(__file__).parents[2]
#: Samples a second. Each stops the process that is looked at for about a millisecond.
RATE = 100
#: Longer than anything takes to set itself up and to clean up; the samples come on top of it.
_DEADLINE = 600.0
#: Samples are counted: on a busy machine a second of them takes longer than a second.
_SLOWEST = 20.0
#: How long what was interrupted may take to remove its files.
_END_DEADLINE = 60.0
#: Lines that are shown of what somebody said who failed.
_LAST = 5

_RESTING = "import sys; print('ready', flush=True); sys.stdin.read()"
_REMEDY = (
    "a container needs the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE), "
    "macOS needs root, and /proc/sys/kernel/yama/ptrace_scope must be 0 or 1"
)


class NotTraced(Exception):
    """There is no profile, and this is why."""


def py_spy() -> str | None:
    """Where it is: in this environment, or on the path."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


def refusal(profiler: str | None) -> str | None:
    """Why nothing can be traced here; nothing if it can be."""
    if profiler is None:
        return "py-spy is not installed; run: make setup"
    resting = [sys.executable, "-c", _RESTING]
    try:
        status, said = _launched([profiler, "dump"], resting, _END_DEADLINE)
    except NotTraced as failure:
        return f"py-spy cannot be used here: {failure}"
    if status == 0:
        return None
    return f"py-spy may not trace processes here ({_last_of(said, 1)}): {_REMEDY}"


def record(path: HotPath, seconds: int, profiler: str) -> bytes:
    """A profile in the format of speedscope. Raises `NotTraced`, or `NotAtHand`."""
    with tempfile.TemporaryDirectory(prefix="orbitmq-profile-") as folder:
        profile, outcome = Path(folder) / "profile.json", Path(folder) / "outcome.json"
        _, said = _launched(
            [
                *(profiler, "record", "--subprocesses", "--function", "--rate", str(RATE)),
                *("--duration", str(seconds), "--format", "speedscope", "--output", str(profile)),
                *(() if path.stands_still else ("--nonblocking",)),
            ],
            [sys.executable, "-m", "benchmarks.profiling.workload", path.name, str(outcome)],
            _DEADLINE + _SLOWEST * seconds,
        )
        if not outcome.exists():
            raise NotTraced(f"it ended before its time: {_last_of(said)}")
        match msgspec.json.decode(outcome.read_bytes(), type=Outcome):
            case Missing(reason):
                raise NotAtHand(reason)
            case Broken(reason):
                raise NotTraced(reason)
        if not profile.exists():
            raise NotTraced(f"py-spy made no profile: {_last_of(said)}")
        return profile.read_bytes()


def _launched(profiler: Sequence[str], program: Sequence[str], deadline: float) -> tuple[int, str]:
    """How the profiler ended, when all that was started has ended too, and what they said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.profiling.launching", *profiler, "--", *program],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # The whole tree has it. It ends with the last of them, whom nobody else can wait for.
        stderr=subprocess.STDOUT,
        # So that all can be ended together, and Ctrl-C lets them clean up.
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired as error:
        raise NotTraced(f"it was not done after {deadline:.0f} s") from error
    finally:
        _end(process)
    return process.returncode, said.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the profiler the input of its program ends, which then cleans up and ends by itself."""
    assert process.stdout is not None
    if process.stdout.closed:
        return  # the usual way: all have ended
    process.kill()
    try:
        process.communicate(timeout=_END_DEADLINE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
    process.wait()


def _last_of(said: str, count: int = _LAST) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "nothing was said"
