"""Writes requirements/dev.txt: the exact version and the hashes of everything, and no address."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements" / "dev.txt"
#: Named one by one: `all` refers to the project itself, which a lock cannot hold.
EXTRAS = (
    *("arrow", "broker", "spark", "celery", "faststream", "formats", "oidc"),
    *("otel", "lz4", "zstd", "speed"),
)
HEAD = "# Made by `make lock`: exact versions with hashes. Edit dev.in or pyproject.toml instead.\n"


def main() -> None:
    resolver = ROOT / "build" / "lock-venv"
    if not (resolver / "bin" / "pip-compile").exists():
        print("Installing the resolver into build/lock-venv")
        venv.create(resolver, with_pip=True)
        subprocess.run([resolver / "bin" / "pip", "install", "--quiet", "pip-tools"], check=True)
    print("Resolving; hashing every wheel takes some minutes")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    subprocess.run(
        [
            resolver / "bin" / "pip-compile",
            *("--quiet", "--generate-hashes", "--reuse-hashes", "--strip-extras", "--allow-unsafe"),
            *("--no-emit-options", "--no-header", "--no-annotate", *sys.argv[1:], *extras),
            *("--output-file", LOCK, "pyproject.toml", "requirements/dev.in"),
        ],
        cwd=ROOT,
        check=True,
    )
    LOCK.write_text(HEAD + LOCK.read_text().removeprefix(HEAD))
    if leak := re.search(r".*(?:://|file:).*", LOCK.read_text()):
        sys.exit(f"the lock must hold no address, but has: {leak[0]}")


if __name__ == "__main__":
    main()
