"""What `pip install orbitmq` brings, and what it does not."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: A user's module under `mypy --strict`: every name is typed, nothing is Any.
TYPED_USE = """
from orbitmq.filter import parse_tags
from orbitmq.message import decode_messages
from orbitmq.wire import Command, RequestCode

codes: tuple[int, ...] = parse_tags("paid || refunded").codes
bodies: list[bytes] = [bytes(message.body) for message in decode_messages(b"")]
asked: int = Command.request(RequestCode.GET_MAX_OFFSET, opaque=1).code
wrong: str = asked
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_pure_python_and_small(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 2 << 20
    assert "orbitmq/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/"))]


def test_the_base_install_needs_msgspec_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        required = re.findall(
            r"^Requires-Dist: (.+)$", archive.read(metadata).decode(), re.MULTILINE
        )

    always = [one for one in required if "extra ==" not in one]
    assert [re.split(r"[^a-z]", one)[0] for one in always] == ["msgspec"]


def test_the_rooms_without_files_import_with_the_base_install_alone() -> None:
    blocked = ("numpy", "pyarrow", "lark", "lz4", "zstandard", "isal", "uvloop")
    program = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import orbitmq, orbitmq.filter, orbitmq.message, orbitmq.wire
print(len([name for name in sys.modules if name.startswith("orbitmq")]))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr


def test_importing_starts_nothing_and_reads_nothing() -> None:
    program = """
import logging, sys, threading
opened = []
import orbitmq.errors
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
import orbitmq, orbitmq.filter, orbitmq.message, orbitmq.store, orbitmq.wire
assert threading.active_count() == 1
assert not logging.getLogger("orbitmq").handlers
assert not logging.getLogger().handlers
code = (".py", ".pyc", ".so")
read = [name for name in opened if isinstance(name, str) and not name.endswith(code)]
assert not [name for name in read if "/proc/" not in name], read
"""
    ran = subprocess.run(
        [sys.executable, "-B", "-c", program], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr


@pytest.mark.feature("P2")
def test_a_users_type_checker_sees_every_type(tmp_path: Path) -> None:
    module = tmp_path / "uses_orbitmq.py"
    module.write_text(TYPED_USE)

    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            f"--cache-dir={tmp_path}",
            module,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    # The one wrong line, and nothing else: no missing stubs, no untyped call, no Any.
    (said,) = [line for line in ran.stdout.splitlines() if ": error:" in line]
    assert '"int", variable has type "str"' in said


def test_the_lock_holds_hashes_and_no_address() -> None:
    lock = (ROOT / "requirements" / "dev.txt").read_text()

    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==\S+ \\\n    --hash=sha256:", lock, re.MULTILINE)
    assert "msgspec" in pinned
    assert len(pinned) == len(re.findall(r"^[A-Za-z0-9]", lock, re.MULTILINE))
    assert "://" not in lock
