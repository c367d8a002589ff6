"""Where the time goes: `python -m benchmarks.profiling [PATH ...] [--seconds N]`.

Runs our side of the benches of the hot paths under a sampling profiler, all processes of each, and
prints which functions have the largest shares. Leaves a file for each path in `build/profile`,
which https://www.speedscope.app (or `npx speedscope FILE`) shows as a flame graph.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.profiling.paths import PATHS, HotPath
from benchmarks.profiling.shares import read_profile
from benchmarks.profiling.table import print_profile
from benchmarks.profiling.tracing import ROOT, NotTraced, py_spy, record, refusal
from benchmarks.runner import NotAtHand


def main(arguments: Sequence[str] | None = None, *, profiler: str | None = None) -> int:
    """Ends with 1 when a path failed, and with 2 when nothing can be profiled."""
    parser = _parser()
    options = parser.parse_args(arguments)
    known = {path.name: path for path in PATHS}
    if unknown := [name for name in options.paths if name not in known]:
        parser.error(f"no path {', '.join(unknown)}; there are: {', '.join(known)}")
    if options.seconds < 1:
        parser.error(f"--seconds must be positive, got {options.seconds}")
    chosen = [known[name] for name in options.paths] or list(PATHS)
    profiler = profiler or py_spy()
    try:
        if reason := refusal(profiler):
            print(reason, file=sys.stderr)
            return 2
        assert profiler is not None
        are_done = [_profiled(path, options.seconds, profiler, options.to) for path in chosen]
    except KeyboardInterrupt:
        return 130
    return 0 if all(are_done) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(path.name for path in PATHS)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"{names}; all of them by default")
    parser.add_argument("--seconds", type=int, default=10, help="of samples for each path")
    parser.add_argument(
        "--to", type=Path, default=ROOT / "build" / "profile", help="the folder of the files"
    )
    return parser


def _profiled(path: HotPath, seconds: int, profiler: str, folder: Path) -> bool:
    """Whether nothing failed."""
    print(f"{path.name}: set up, then sampled for {seconds} s", file=sys.stderr, flush=True)
    try:
        profile = read_profile(record(path, seconds, profiler), path)
    except NotAtHand as reason:
        print(f"{path.name}: not at hand: {reason}", file=sys.stderr)
        return True
    except NotTraced as failure:
        print(f"{path.name}: failed: {failure}", file=sys.stderr)
        return False
    print_profile(path, profile, seconds, Console(width=None if sys.stdout.isatty() else 180))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{path.name}.speedscope.json"
    file.write_bytes(msgspec.json.encode(profile.graph) + b"\n")
    print(f"{path.name}: {file}", file=sys.stderr)
    return True


def _end_orderly(*_: object) -> None:
    """What was started is ended, and what it stored removed, on the way out."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_orderly)
    sys.exit(main())
