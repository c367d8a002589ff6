"""Every PySpark from 4.0 to 4.3, in an environment of its own, classic and through Connect.

Environments are made with pip, once, under `build/spark-versions`, about 0.9 GB for each version.
A version that the index does not give is skipped; one that it gives must work.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "spark-versions"
#: The last release of each line that was seen; `~=` takes later ones.
VERSIONS = ("4.0.5", "4.1.4", "4.2.1", "4.3.0")
NEEDED = ("pandas>=2.2,<3", "numpy>=1.26", "pyarrow>=15", "msgspec>=0.19", "lark>=1.2")
INSTALL_DEADLINE = 900
RUN_DEADLINE = 600

pytestmark = pytest.mark.timeout(INSTALL_DEADLINE + RUN_DEADLINE + 60)


def python_with(version: str) -> Path:
    """An interpreter that has this PySpark; skips the test when it cannot be installed."""
    folder = ENVIRONMENTS / version
    python, stamp = folder / "bin" / "python", folder / ".ready"
    if stamp.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    done = subprocess.run(
        [
            *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *(f"pyspark[connect]=={version}", *NEEDED),
        ],
        capture_output=True,
        text=True,
        timeout=INSTALL_DEADLINE,
        check=False,
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"PySpark {version} cannot be installed here: {reason}")
    stamp.touch()
    return python


def run_with(python: Path, *words: str, module: str = "sparkversion") -> Any:
    """What a module of `tests.support` says with this interpreter."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    }
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [python, "-m", f"tests.support.{module}", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["classic", "connect", "plain"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.feature("M14")
@pytest.mark.feature("M20")
def test_everything_works_with_this_version(version, kind, tmp_path, monkeypatch):
    """`plain`: as a version that OrbitMQ does not know."""
    monkeypatch.setenv("ORBITMQ_SPARK_PLAIN", str(kind == "plain").lower())
    has_it = version == installed()
    python = Path(sys.executable) if has_it else python_with(version)

    with EmbeddedCluster() as cluster:
        check(cluster, python, version, kind, tmp_path)


def installed() -> str:
    import pyspark

    found: str = pyspark.__version__
    return found


def check(cluster: EmbeddedCluster, python: Path, version: str, kind: str, folder: Path) -> None:
    for topic in ("numbers", "work"):
        cluster.create_topic(topic, queues=4)
        fill(cluster.broker_addresses[0], topic, numbered(500, queues=4))
    for topic in ("copies", "streamed"):
        cluster.create_topic(topic, queues=2)

    said = run_with(python, cluster.name_server, str(folder), kind)

    assert said["version"] == version
    assert said["is_known"] == (kind != "plain")
    assert ("connect" in said["kind"]) == (kind == "connect")
    assert (said["rows"], said["narrow"], said["columns"]) == (500, 500, ["queueId"])
    for topic in ("copies", "streamed"):
        bodies = sorted(int(each.body) for each in cluster.messages(topic))
        assert bodies == list(range(500)), topic
    assert (said["into_topic"], said["archived"], said["archived_rows"]) == (500, 500, 500)
    assert (said["lag"] or 0, said["followed"]) == (0, 0)
    # Before 4.2 a run that ends asks the source nothing after its last batch, which is therefore
    # not reported; a stream that goes on reports it.
    if version >= "4.2":
        assert sum(cluster.progress("archive-numbers", "numbers").values()) == 500
    assert (said["good"], said["dead"], said["reasons"]) == (18, 2, ["no such customer"])
    assert (said["is_idle"], said["worked"], said["given_up"]) == (True, 498, 2)
