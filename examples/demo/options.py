"""What can be said on the command line of the demo."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

_ABOUT = """OrbitMQ at work: orders into a broker, billed by a Spark pipeline with retries and dead
letters, shipped by plain consumers whose members come and go; at the end a summary that adds up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run is like."""

    seconds: float  #: how long orders come
    rate: float  #: orders per second
    seed: int  #: which orders they are
    folder: Path
    keep: bool
    picture: Path | None


def parsed() -> Options:
    """The options of this process; one that makes no sense ends it with a sentence."""
    parser = argparse.ArgumentParser(prog="make demo", description=_ABOUT)
    parser.add_argument("--seconds", type=float, default=35.0, help="how long orders come (35)")
    parser.add_argument("--rate", type=float, default=400.0, help="orders per second (400)")
    parser.add_argument("--seed", type=int, default=7, help="which orders they are (7)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/demo"), help="a new or an earlier demo's folder"
    )
    parser.add_argument("--keep", action="store_true", help="keep the broker's data when done")
    parser.add_argument("--picture", type=Path, help="write the screen to this SVG file as well")
    options = Options(**vars(parser.parse_args()))
    for name in ("seconds", "rate"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            parser.error(f"--{name} must be positive, got {value:g}")
    if options.picture is not None and not options.picture.parent.is_dir():
        parser.error(f"--picture needs a folder that exists, got {options.picture.parent}")
    return options
