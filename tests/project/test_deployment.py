"""The image, the compose file and the chart: what they promise, as far as no engine is needed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from orbitmq import Consumer, Producer, ReceivedMessage
from orbitmq.cli.settings import by_variable
from orbitmq.spark.pipelines.load import load
from tests.support import deployment

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
STAGES = deployment.stages_of(DOCKERFILE)
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
#: Variables of clients and of the console, which are no settings of a server.
OF_CLIENTS = {
    "ORBITMQ_NAME_SERVER",
    "ORBITMQ_ACCESS_KEY",
    "ORBITMQ_SECRET_KEY",
    "ORBITMQ_CONSOLE_PASSWORD",
    "ORBITMQ_CONSOLE_TOKEN",
}
PATIENCE = 30.0


# ---- the image


@pytest.mark.parametrize("image", ["broker", "pipeline"])
def test_an_image_runs_as_nobody_in_particular_with_one_volume(image):
    made_by = deployment.with_bases(STAGES, image)

    assert deployment.last_words(made_by, "USER") == "10001:10001"
    assert [words for name, words in made_by if name == "VOLUME"] == ['["/var/lib/orbitmq"]']
    assert deployment.exec_form(deployment.last_words(made_by, "ENTRYPOINT")) == ["orbitmq"]
    assert "-slim" in STAGES["base"].base
    # What runs as root comes before, and after it nothing is installed.
    names = [name for name, _ in made_by]
    assert "RUN" not in names[names.index("USER") :]


def test_images_are_made_of_files_and_extras_that_are_there():
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    project = (ROOT / "pyproject.toml").read_text()

    for stage in STAGES.values():
        for words in stage.all("COPY"):
            if "--from=" in words:
                continue
            for source in [word for word in words.split()[:-1] if not word.startswith("--")]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source
        for words in stage.all("RUN"):
            for extras in re.findall(r'"\.\[(.+?)\]"', words):
                for extra in extras.split(","):
                    assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_every_variable_is_one_that_the_program_knows():
    named: set[str] = set()
    for image in ("broker", "pipeline"):
        named |= set(deployment.environment(deployment.with_bases(STAGES, image)))
    for service in COMPOSE["services"].values():
        named |= set(service.get("environment", {}))
    for variant in deployment.VARIANTS:
        for _, container in deployment.containers(deployment.kept(variant)[1]):
            named |= {variable["name"] for variable in container.get("env", ())}

    ours = {name for name in named if name.startswith("ORBITMQ_")}
    assert {"ORBITMQ_BROKER_ADVERTISED", "ORBITMQ_RUN_INSECURE"} <= ours
    assert ours - set(by_variable()) <= OF_CLIENTS


@pytest.fixture
def container(tmp_path):
    """The command of the image with the variables of the image; as a user without rights, if
    this one may become one and such a user can start this Python.
    """
    made_by = deployment.with_bases(STAGES, "broker")
    data = tmp_path / "data"
    data.mkdir()
    changes_user = os.geteuid() == 0 and can_be_started_by_others(sys.executable)
    if changes_user:
        os.chown(data, 10001, 10001)
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(folder.stat().st_mode | 0o011)
    settings = {
        **deployment.environment(made_by),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "ORBITMQ_UP_DATA": str(data),
        # Ports that are free here; in a container all are.
        "ORBITMQ_BROKER_PORT": "0",
        "ORBITMQ_NAMESRV_PORT": "0",
        "ORBITMQ_BROKER_HTTP_PORT": "0",
        # As in the compose file.
        "ORBITMQ_BROKER_ADVERTISED": "127.0.0.1",
        "ORBITMQ_RUN_INSECURE": "true",
    }
    words = [
        *deployment.exec_form(deployment.last_words(made_by, "ENTRYPOINT")),
        *deployment.exec_form(deployment.last_words(made_by, "CMD")),
    ]
    process = subprocess.Popen(
        [*words, "--json"],
        executable=Path(sys.executable).parent / words[0],
        env=settings,
        cwd=data,
        user=10001 if changes_user else None,
        group=10001 if changes_user else None,
        extra_groups=[] if changes_user else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stop = threading.Timer(PATIENCE * 2, process.kill)
    stop.start()
    try:
        assert process.stdout is not None
        addresses: dict[str, str] = {}
        for line in process.stdout:
            said = json.loads(line)
            if said["event"] == "ready":
                break
            addresses[said["role"]] = said["address"]
        assert "broker" in addresses, process.communicate(timeout=PATIENCE)[1]
        yield process, addresses
    finally:
        stop.cancel()
        process.kill()
        process.communicate(timeout=PATIENCE)


def test_what_the_image_runs_serves_a_client_outside_and_ends_when_told(container):
    process, addresses = container
    name_server = f"127.0.0.1:{addresses['name server'].rpartition(':')[2]}"
    consumer = Consumer("billing", name_server=name_server, consume_from="first")
    billed = threading.Event()
    bodies: list[bytes] = []

    @consumer.on("orders")
    def bill(message: ReceivedMessage) -> None:
        bodies.append(message.body)
        billed.set()

    with Producer("shop", name_server=name_server) as producer:
        sent = producer.send("orders", b"one", timeout=PATIENCE)
    with consumer:
        assert billed.wait(PATIENCE)
    assert sent.is_ok
    assert bodies == [b"one"]

    pages = next(address for role, address in addresses.items() if role not in SERVERS)
    assert health(pages_url(pages, "healthz")) == (0, "")
    assert health(pages_url(pages, "readyz")) == (0, "")
    assert health(name_server) == (0, "")

    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert health(pages_url(pages, "healthz"))[0] == 1


SERVERS = ("broker", "name server")


def can_be_started_by_others(program: str) -> bool:
    path = Path(program).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def pages_url(address: str, page: str) -> str:
    return f"http://127.0.0.1:{address.rstrip('/').rpartition(':')[2].partition('/')[0]}/{page}"


def health(target: str) -> tuple[int, str]:
    """What the health check of the image says."""
    done = subprocess.run(
        [sys.executable, "-I", DOCKER / "health.py", target],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stderr


def test_the_image_refuses_to_listen_openly_unless_that_is_accepted(tmp_path):
    settings = deployment.environment(deployment.with_bases(STAGES, "broker"))

    done = subprocess.run(
        [Path(sys.executable).parent / "orbitmq", "up"],
        env={**settings, "PATH": "/usr/bin:/bin", "ORBITMQ_UP_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode != 0
    assert "ORBITMQ_RUN_INSECURE" in done.stderr or "--insecure" in done.stderr


def test_health_checks_ask_pages_of_the_image():
    made_by = deployment.with_bases(STAGES, "broker")
    port = deployment.environment(made_by)["ORBITMQ_BROKER_HTTP_PORT"]
    script = next(words.split()[-1] for words in STAGES["base"].all("COPY") if "health.py" in words)

    asked = [
        deployment.exec_form(deployment.last_words(made_by, "HEALTHCHECK")),
        COMPOSE["services"]["broker"]["healthcheck"]["test"][1:],
        COMPOSE["services"]["console"]["healthcheck"]["test"][1:],
    ]
    assert [words[:2] for words in asked] == [["python", script]] * 3
    assert [words[2] for words in asked] == [
        f"http://127.0.0.1:{port}/healthz",
        f"http://127.0.0.1:{port}/readyz",
        "http://127.0.0.1:8090/health",
    ]


# ---- the compose file


def test_compose_has_a_broker_a_console_and_a_pipeline():
    services = COMPOSE["services"]

    assert list(services) == ["broker", "console", "pipeline"]
    for name, service in services.items():
        assert set(service) <= KEYS_OF_A_SERVICE, name
        assert service["cap_drop"] == ["ALL"]
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DOCKER / source).exists(), mount
        if "build" in service:
            build = service["build"]
            assert (DOCKER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]) == DOCKERFILE
            assert build["target"] in STAGES
    assert set(COMPOSE) == {"name", "services", "volumes"}


KEYS_OF_A_SERVICE = {
    *("image", "build", "command", "environment", "ports", "volumes", "network_mode"),
    *("depends_on", "healthcheck", "stop_grace_period", "restart", "read_only", "tmpfs"),
    *("cap_drop", "security_opt"),
}


def test_a_client_on_the_host_reaches_the_broker_by_the_address_that_it_is_given():
    broker = COMPOSE["services"]["broker"]
    published = [port.split(":")[-2:] for port in broker["ports"]]

    # The address is the host's own, and ports are the same inside and outside.
    assert broker["environment"]["ORBITMQ_BROKER_ADVERTISED"].endswith(":-127.0.0.1}")
    assert ["9876", "9876"] in published
    assert ["10911", "10911"] in published
    assert all(outside == inside for outside, inside in published)
    # By default nobody else reaches them.
    assert all(re.match(r"(\$\{\w+:-)?127\.0\.0\.1\}?:", port) for port in broker["ports"])
    # The others reach it by the same address, being in its network.
    for name in ("console", "pipeline"):
        service = COMPOSE["services"][name]
        assert service["network_mode"] == "service:broker"
        assert service["environment"]["ORBITMQ_NAME_SERVER"] == "127.0.0.1:9876"
        assert service["depends_on"] == {"broker": {"condition": "service_healthy"}}


@pytest.mark.parametrize("where", ["compose", "chart"])
def test_the_pipeline_is_one_that_can_be_run(where, tmp_path):
    values = yaml.safe_load((deployment.CHART / "values.yaml").read_text())
    text = (DOCKER / "pipeline.toml").read_text()
    file = tmp_path / "pipeline.toml"
    file.write_text(text if where == "compose" else values["pipeline"]["definition"])

    definition, plan = load(str(file))

    assert definition.values(plan.options)["topic"] == "orders"
    # What it keeps between its runs is in the volume.
    assert str(plan.checkpoint).startswith("/var/lib/orbitmq/")
    assert str(plan.options["path"]).startswith("/var/lib/orbitmq/")


def test_no_secret_stands_in_a_file():
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"(?i)(password|secret_?key|token)\s*[:=]\s*[\"']?\w{8,}", text), (
                path
            )


# ---- the chart


@pytest.mark.parametrize("variant", deployment.VARIANTS)
def test_what_is_kept_of_the_chart_is_what_it_makes_now(variant):
    made_from, _ = deployment.kept(variant)

    assert made_from == deployment.digest(), f"the chart was changed; run: {deployment.COMMAND}"


@pytest.mark.parametrize("variant", deployment.VARIANTS)
def test_every_pod_of_the_chart_has_no_rights_that_it_does_not_need(variant):
    for pod, container in deployment.containers(deployment.kept(variant)[1]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        # Kubernetes would write ORBITMQ_BROKER_PORT=tcp://... for a service of that name.
        assert pod["enableServiceLinks"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        # The root is read-only: what is written to must be mounted.
        assert "/var/lib/orbitmq" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("variant", deployment.VARIANTS)
def test_the_objects_of_the_chart_find_each_other(variant):
    _, objects = deployment.kept(variant)
    workloads = [each for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}

    for workload in workloads:
        spec = workload["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        pod = spec["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        volumes |= {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        for volume in pod.get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in names
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in names
        if workload["kind"] == "StatefulSet":
            assert ("Service", spec["serviceName"]) in names
    for service in [each for each in objects if each["kind"] == "Service"]:
        (target,) = [
            each
            for each in workloads
            if service["spec"]["selector"].items()
            <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        ports = {
            port["name"] for port in target["spec"]["template"]["spec"]["containers"][0]["ports"]
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert all("namespace" not in each["metadata"] for each in objects)


def test_brokers_of_the_chart_keep_their_names_and_their_data():
    _, objects = deployment.kept("everything")
    (broker,) = [each for each in objects if each["kind"] == "StatefulSet"]
    (pod, container), *_ = deployment.containers([broker])
    variables = {each["name"]: each for each in container["env"]}

    assert variables["ORBITMQ_BROKER_NAME"]["valueFrom"] == {
        "fieldRef": {"fieldPath": "metadata.name"}
    }
    assert variables["ORBITMQ_BROKER_ADVERTISED"]["valueFrom"] == {
        "fieldRef": {"fieldPath": "status.podIP"}
    }
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "data"]
    root = Path(variables["ORBITMQ_BROKER_ROOT"]["value"])
    assert root.is_relative_to(mount["mountPath"])
    assert [claim["metadata"]["name"] for claim in broker["spec"]["volumeClaimTemplates"]] == [
        "data"
    ]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert pod["terminationGracePeriodSeconds"] >= 30


def test_the_chart_uses_the_values_that_it_has_and_no_others():
    values = yaml.safe_load((deployment.CHART / "values.yaml").read_text())
    text = "\n".join(path.read_text() for path in (deployment.CHART / "templates").iterdir())

    used = {tuple(path.split(".")) for path in re.findall(r"\.Values\.([A-Za-z.]+)", text)}
    for path in used:
        place: Any = values
        for word in path:
            assert word in place, ".".join(path)
            place = place[word]
    for path in leaves(values):
        assert any(path[: len(each)] == each for each in used), ".".join(path)


def leaves(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name)


def test_the_chart_is_refused_before_somebody_has_decided_about_protection():
    values = yaml.safe_load((deployment.CHART / "values.yaml").read_text())
    names = (deployment.CHART / "templates" / "_names.tpl").read_text()

    assert values["insecure"] is False
    assert values["accounts"]["existingSecret"] == values["console"]["existingSecret"] == ""
    assert names.count("fail ") == 3
    assert (
        'include "orbitmq.check"' in (deployment.CHART / "templates" / "namesrv.yaml").read_text()
    )
