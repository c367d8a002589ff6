"""Delta and Iceberg get every message once by the recipes of docs/howto/exactly-once.md."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from orbitmq.testing.cluster import EmbeddedCluster
from tests.chaos.test_spark_versions import ENVIRONMENTS, python_with, run_with
from tests.support.filling import fill, numbered

#: The newest line of Spark that both have releases for, and these releases.
SPARK = "4.1.4"
PACKAGES = (
    "io.delta:delta-spark_4.1_2.13:4.2.0",
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
)
CENTRAL = "https://repo1.maven.org/maven2/io/delta/delta-spark_4.1_2.13/4.2.0/delta-spark_4.1_2.13-4.2.0.pom"


@pytest.mark.feature("T4")
@pytest.mark.timeout(1500)
def test_a_repeated_batch_is_written_once_into_delta_and_iceberg(tmp_path):
    try:
        urllib.request.urlopen(CENTRAL, timeout=30).close()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"Maven Central cannot be reached here: {error}")
    python = python_with(SPARK)

    with EmbeddedCluster() as cluster:
        cluster.create_topic("clicks", queues=4)
        fill(cluster.broker_addresses[0], "clicks", numbered(500, queues=4))
        words = (cluster.name_server, ",".join(PACKAGES), str(ENVIRONMENTS / "ivy"), str(tmp_path))
        delta, iceberg = run_with(python, *words, module="sparklakes")

    assert sorted(delta) == sorted(iceberg) == list(range(500))
