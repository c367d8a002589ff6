"""`python -m orbitmq.cli` is the `orbitmq` command."""

from __future__ import annotations

from orbitmq.cli.main import main

if __name__ == "__main__":
    main()
