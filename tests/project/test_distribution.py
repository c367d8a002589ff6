"""What `pip install orbitmq` brings, and what it does not."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
import zipfile
from importlib import metadata
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


#: A program of somebody who has installed OrbitMQ and nothing else.
FIRST_PROGRAM = """
import sys, threading
from orbitmq import Admin, Consumer, Producer, PullConsumer

name_server, billed = sys.argv[1], threading.Event()
with Producer("shop", name_server=name_server) as producer:
    print(producer.send("orders", b"one", keys="order-1", timeout=20).status.name)
consumer = Consumer("billing", name_server=name_server, consume_from="first")

@consumer.on("orders")
def bill(message):
    print(message.keys, message.text())
    billed.set()

with consumer:
    print(billed.wait(20))
with PullConsumer("reports", name_server=name_server, consume_from="first") as reports:
    reports.subscribe("orders")
    print([message.body for message in reports.poll(timeout=20)])
with Admin(name_server=name_server) as admin:
    print([group.group for group in admin.groups.list()])
print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "pyarrow", "lark"}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_pure_python_and_small(wheel):
    names = zipfile.ZipFile(wheel).namelist()

    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 2 << 20
    assert "orbitmq/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/"))]


def test_the_wheel_has_everything_that_is_not_code(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"

    wanted = {
        str(path.relative_to(source))
        for package in ("orbitmq", "pyspark_orbitmq")
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "orbitmq/console/static/index.html" in wanted
    assert wanted <= names


@pytest.mark.timeout(300)
@pytest.mark.feature("P1")
def test_a_fresh_environment_gets_it_without_building_and_can_send_and_receive(
    wheel, tmp_path, orbit_cluster, capsys
):
    index = tmp_path / "index"
    index.mkdir()
    (index / wheel.name).write_bytes(wheel.read_bytes())
    dependency = repacked("msgspec", index)
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60
    )
    python = environment / "bin" / "python"

    begin, worked = time.perf_counter(), cpu_time_of_children()
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", python, "--isolated", "install", "orbitmq"),
            *("--no-index", "--find-links", index, "--no-cache-dir", "--quiet"),
            *("--disable-pip-version-check", "--only-binary", ":all:"),
        ],
        check=True,
        timeout=110,
        cwd=tmp_path,
    )
    took, worked = time.perf_counter() - begin, cpu_time_of_children() - worked

    (packages,) = environment.glob("lib/python*/site-packages")
    code = [path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    installed = sum(path.stat().st_size for path in code)
    downloaded = wheel.stat().st_size + dependency.stat().st_size
    with capsys.disabled():
        print(f"\npip: {took:.1f} s ({worked:.1f} s of work)", end=", ")
        print(f"{downloaded / 1e6:.2f} MB, {installed / 1e6:.2f} MB unpacked")
    assert downloaded < 5_000_000
    assert {path.name.partition("-")[0] for path in packages.glob("*.dist-info")} == {
        "orbitmq",
        "msgspec",
    }
    assert not list((packages / "orbitmq").rglob("*.so"))

    ran = subprocess.run(
        [python, "-I", "-W", "error", "-c", FIRST_PROGRAM, orbit_cluster.name_server],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "OK",
        "('order-1',) one",
        "True",
        "[b'one']",
        "['billing', 'reports']",
        "[]",
    ]


def cpu_time_of_children() -> float:
    """Seconds that ended children have worked, whatever else the machine did meanwhile."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def repacked(name: str, folder: Path) -> Path:
    """The wheel that an installed distribution came from, so that pip need not fetch it."""
    found = metadata.distribution(name)
    tag = re.findall(r"^Tag: (\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)[0]
    target = folder / f"{name}-{found.version}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in found.files or ():
            own_to_the_installation = file.name in ("INSTALLER", "REQUESTED", "direct_url.json")
            if file.suffix != ".pyc" and not own_to_the_installation:
                archive.write(file.locate(), str(file))
    return target


@pytest.mark.feature("P2")
def test_a_users_type_checker_sees_every_type(tmp_path):
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
