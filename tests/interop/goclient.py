"""The Go client, and a process that runs it.

It comes from the Go module proxy; `ORBITMQ_GO_CLIENT` names the folder of its source instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.clients import DrivenClient, Launch
from tests.support.maven import Unavailable, make_whole, tool

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "go" / "driver.go"

MODULE = "github.com/apache/rocketmq-client-go/v2"
VERSION = "v2.1.2"
_BUILD_DEADLINE = 300.0


def obtain_go_client() -> Launch:
    """What starts a process with the Go client; its program is built once. Raises `Unavailable`."""
    source = os.environ.get("ORBITMQ_GO_CLIENT")
    kept = ROOT / "build" / "interop" / "go" / (f"source-{VERSION}" if source else VERSION)
    is_older = (kept / "driver").exists() and _changed(kept / "driver") < _changed(DRIVER)
    if is_older:
        shutil.rmtree(kept)
    if not kept.exists():
        make_whole(kept, lambda folder: _build(folder, source))
    return lambda home: DrivenClient([str(kept / "driver")], {}, home)


def _build(folder: Path, source: str | None) -> None:
    replaced = f"\nreplace {MODULE} => {source}\n" if source else ""
    (folder / "go.mod").write_text(
        f"module orbitmq/driver\n\ngo 1.21\n\nrequire {MODULE} {VERSION}\n{replaced}"
    )
    shutil.copy(DRIVER, folder)
    command = [tool("go"), "build", "-mod=mod", "-o", "driver", "driver.go"]
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=_BUILD_DEADLINE
        )
    except subprocess.TimeoutExpired as late:
        raise Unavailable(f"go build did not end within {_BUILD_DEADLINE:g} s") from late
    except subprocess.CalledProcessError as failed:
        why = failed.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise Unavailable(f"{MODULE} {VERSION} could not be built here: {why[0]}") from failed


def _changed(file: Path) -> float:
    return file.stat().st_mtime
