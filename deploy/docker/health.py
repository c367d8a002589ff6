# ruff: noqa: INP001  # a script, no part of a package
"""Asks a server whether it is well, for the health checks of containers.

python health.py http://127.0.0.1:5557/readyz     a page must answer with success
python health.py 127.0.0.1:9876                   a port must take connections

It ends with 0 if so; else with 1 and the reason. Nothing but the standard library: it starts fast.
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request

PATIENCE = 4.0


def main(words: list[str]) -> int:
    if len(words) != 1:
        sys.stderr.write(__doc__ or "")
        return 2
    (target,) = words
    try:
        if target.startswith("http://"):
            _ask(target)
        else:
            _connect(target)
    except urllib.error.HTTPError as error:
        # The page says why: {"status": "not ready", "reasons": [...]}
        sys.stderr.write(f"{target}: {error.code} {error.read(2000).decode(errors='replace')}\n")
        return 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{target}: {error}\n")
        return 1
    return 0


def _ask(url: str) -> None:
    # Not through a proxy: it is the server beside us.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PATIENCE) as answer:
        answer.read()


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE):
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
