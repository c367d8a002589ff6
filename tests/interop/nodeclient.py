"""The Node client from the npm registry, and a process that runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.clients import DrivenClient, Launch
from tests.support.maven import Unavailable, make_whole, tool

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "node" / "driver.js"

#: Speaks the remoting protocol; what Apache publishes speaks gRPC, or wraps the C++ client.
PACKAGE = "ali-ons@3.12.0"
_INSTALL_DEADLINE = 120.0


def obtain_node_client() -> Launch:
    """What starts a process with the Node client, which is installed once. Raises `Unavailable`."""
    folder = ROOT / "build" / "interop" / "node" / PACKAGE
    if not folder.exists():
        make_whole(folder, _install)
    found = {"NODE_PATH": str(folder / "node_modules")}
    return lambda home: DrivenClient([tool("node"), str(DRIVER)], found, home)


def _install(folder: Path) -> None:
    command = [
        *(tool("npm"), "install", "--prefix", str(folder), "--no-save", "--no-fund", "--no-audit"),
        *("--ignore-scripts", "--silent", PACKAGE),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_DEADLINE)
    except subprocess.TimeoutExpired as late:
        message = f"the npm registry did not answer within {_INSTALL_DEADLINE:g} s"
        raise Unavailable(message) from late
    except subprocess.CalledProcessError as failed:
        raise Unavailable(f"{PACKAGE} could not be installed with npm here") from failed
