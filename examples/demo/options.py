"""What can be said on the command line of the demo."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

_ABOUT = """OrbitMQ at work: orders into a broker, billed by a Spark pipeline with retries and dead
letters, shipped by plain consumers whose members come and go; at the end a summary that adds up."""


_SECONDS = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run is like."""

    seconds: float  #: how long orders come
    #: Whether the console goes on afterwards, until a key is pressed.
    stays: bool
    rate: float  #: orders per second
    seed: int  #: which orders they are
    folder: Path
    keep: bool
    picture: Path | None


def parsed() -> Options:
    """The options of this process; one that makes no sense ends it with a sentence."""
    parser = argparse.ArgumentParser(prog="make demo", description=_ABOUT)
    parser.add_argument(
        "--seconds",
        type=float,
        help="how long orders come (35); without it a terminal keeps the console until a key",
    )
    parser.add_argument("--rate", type=float, default=400.0, help="orders per second (400)")
    parser.add_argument("--seed", type=int, default=7, help="which orders they are (7)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/demo"), help="a new or an earlier demo's folder"
    )
    parser.add_argument("--keep", action="store_true", help="keep the broker's data when done")
    parser.add_argument("--picture", type=Path, help="write the chart to this SVG file as well")
    given = vars(parser.parse_args())
    stays = given["seconds"] is None and sys.stdin.isatty() and sys.stdout.isatty()
    seconds = _SECONDS if given["seconds"] is None else given["seconds"]
    options = Options(**given | {"seconds": seconds, "stays": stays})
    for name in ("seconds", "rate"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            parser.error(f"--{name} must be positive, got {value:g}")
    if options.picture is not None and not options.picture.parent.is_dir():
        parser.error(f"--picture needs a folder that exists, got {options.picture.parent}")
    return options
