"""Pages of the documentation that are made from the code: written, or only compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def keep_current(
    page: Path,
    made: Callable[[], str],
    module: str,
    about: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """The command of a module that makes a page; 1 when `--check` finds another one than it would.

    `about` is the module's docstring.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    text = made()
    is_current = page.exists() and page.read_text() == text
    if options.check:
        if not is_current:
            print(f"{page.name} is not current; python -m {module}", file=sys.stderr)
        return 0 if is_current else 1
    if not is_current:
        fresh = page.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(page)
    return 0
