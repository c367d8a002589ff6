"""Spark queries report, and are shown."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from orbitmq.console.pipelines import LOST_AFTER
from orbitmq.console.words import client_name
from orbitmq.spark.consolelink import QueryReport, TopicProgress

REPORT = {
    "state": "running",
    "batch": 17,
    "rows_per_second": 4000.5,
    "batch_seconds": 1.5,
    "trigger_seconds": 1.0,
    "group": "billing",
    "topics": ["orders"],
    "output": ["results"],
    "lag": {"orders@broker-a:0": 12, "orders@broker-b:1": 3},
    "later_field": {"is": "ignored"},
}


async def test_a_report_is_shown_with_what_is_unread_and_its_line_over_time(desk):
    page = desk.browser
    await page.post("/pipelines/orders%20by%20city", REPORT, 204)

    found = await page.get("/pipelines/orders%20by%20city")
    now = await page.get("/now")
    curve = await page.until(
        "/charts?series=pipeline/orders%20by%20city/lag",
        lambda found: found["series"]["pipeline/orders by city/lag"],
    )

    assert (found["batch"], found["unread"], found["is_late"]) == (17, 15, True)
    assert found["unread_by_queue"] == REPORT["lag"]
    # Whoever reads the old names goes on.
    assert (found["lag_total"], found["lag"]) == (15, REPORT["lag"])
    assert now["pipelines"][0]["name"] == "orders by city"
    assert curve["series"]["pipeline/orders by city/lag"][-1][1] == 15.0


async def test_every_field_that_a_driver_sends_is_taken_and_given_out(desk):
    sent = QueryReport(
        state="running",
        batch=4,
        rows=900,
        rows_per_second=450.0,
        input_rows_per_second=600.0,
        batch_seconds=2.0,
        group="billing",
        topics=("orders",),
        by_topic=(TopicProgress(topic="orders", num_input_rows=900, lag=12),),
        lag={"orders@broker-a:0": 12},
        done=700,
        retried=190,
        dead=10,
        failed_share=0.25,
        error="ValueError: no such city",
        url="http://127.0.0.1:4040",
    )
    # A field that is left at its default here would be shown by nobody's proof.
    assert all(getattr(sent, each.name) != each.default for each in msgspec.structs.fields(sent))
    body = msgspec.json.encode(sent)
    headers = {"content-type": "application/json"}
    # A query may be named with a slash.
    answer = await desk.browser.ask(
        "POST", "/api/v1/pipelines/orders%2Fby%20city", body=body, headers=headers
    )
    shown = await desk.browser.get("/pipelines/orders%2Fby%20city")

    assert answer.status == 204
    assert {name: shown[name] for name in msgspec.to_builtins(sent)} == json.loads(body)
    assert shown["name"] == "orders/by city"
    assert shown["is_slow"]


async def test_a_query_that_fails_or_is_silent_is_a_fault(desk):
    page = desk.browser
    await page.post("/pipelines/failed", {"state": "failed", "error": "no space left"}, 204)
    await page.post("/pipelines/silent", {"state": "waiting"}, 204)
    await page.post("/pipelines/stopped", {"state": "stopped"}, 204)
    desk.cluster.advance(LOST_AFTER + 1)

    faults = (await page.get("/faults"))["faults"]

    texts = {fault["subject"]: fault["text"] for fault in faults}
    assert texts.keys() == {"failed", "silent"}
    assert "no space left" in texts["failed"]
    assert "not been heard of for 1 min 1 s" in texts["silent"]
    states = {each["name"]: each["state"] for each in (await page.get("/pipelines"))["pipelines"]}
    assert states == {"failed": "failed", "silent": "lost", "stopped": "stopped"}


async def test_a_report_that_is_none_is_refused(desk):
    cases: list[Any] = [
        {},
        {"state": "dancing"},
        {"state": "lost"},
        {"state": "running", "batch": "x"},
        {"state": "running", "url": "javascript:alert(1)"},
        {"state": "running", "lag": {"q": "many"}},
    ]
    for report in cases:
        assert (await desk.browser.post("/pipelines/q", report, 400))["error"]
    assert (await desk.browser.get("/pipelines"))["pipelines"] == []


async def test_topology_joins_topics_groups_and_queries(desk):
    from orbitmq.client.routes import Queue

    queue = Queue("orders", "broker-a", 0)
    await desk.world.fill(queue, 2)
    for group in ("billing", "shipping"):
        await desk.world.admin.groups.create(group)
        await desk.world.report(queue, 1, group=group)
    await desk.browser.post("/pipelines/q", REPORT, 204)

    def are_read(found):
        return found["edges"] and found["pipelines"][0]["lag"] is not None

    found = await desk.browser.until("/topology", are_read)
    none = await desk.browser.get("/topology?search=nothing-like-it")

    assert [each["name"] for each in found["topics"]] == ["orders"]
    (edge,) = found["edges"]
    assert (edge["topic"], edge["group"], edge["lag"]) == ("orders", "shipping", 1)
    # The group that the pipeline consumes as is that pipeline, and not a reader besides.
    assert [each["name"] for each in found["groups"]] == ["shipping"]
    (pipeline,) = found["pipelines"]
    assert (pipeline["group"], pipeline["lag"], pipeline["topics"]) == ("billing", 1, ["orders"])
    assert pipeline["output"] == ["results"]
    assert none["topics"] == []


async def test_a_pipeline_that_ended_has_no_rate_and_keeps_its_queues_and_topics(desk):
    page = desk.browser
    await page.post("/pipelines/q", REPORT | {"rows_per_second": 50.0}, 204)
    await page.until(
        "/charts?series=pipeline/q/rows", lambda found: found["series"]["pipeline/q/rows"]
    )
    await page.post("/pipelines/q", {"state": "stopped"}, 204)

    found = await page.get("/pipelines/q")
    curve = await page.until(
        "/charts?series=pipeline/q/rows",
        lambda found: found["series"]["pipeline/q/rows"][-1][1] is None,
    )
    drawn = await page.get("/topology")

    assert (found["rows_per_second"], found["state"]) == (None, "stopped")
    assert found["topics"] == REPORT["topics"]
    assert found["output"] == REPORT["output"]
    assert found["unread_by_queue"] == REPORT["lag"]
    # The line ends: what comes after its last value is a gap.
    assert curve["series"]["pipeline/q/rows"][0][1] == 50.0
    assert drawn["pipelines"][0]["rate"] is None


async def test_idle_topics_are_counted_and_drawn_when_asked_for(desk):
    await desk.browser.until("/topology", lambda found: found["idle"] == 1)

    shown = await desk.browser.get("/topology?idle=1")

    assert [each["name"] for each in shown["topics"]] == ["orders"]
    assert shown["idle"] == 0


@pytest.mark.parametrize(
    ("language", "version", "told", "name"),
    [
        ("java", "5.5.0", "", "Java 5.5.0"),
        ("python", "5.3.3", "0.1.0", "OrbitMQ 0.1.0"),
        ("python", "5.3.3", "", "OrbitMQ"),
        ("python", "4.9.2", "", "Python 4.9.2"),
        ("go", "4.5.2", "", "Go 2"),
        ("cpp", "3.1.8", "", "C++ 1"),
        ("node_js", "613", "", "Node.js"),
        ("", "", "", "unknown client"),
    ],
)
def test_a_client_is_named_in_words(language, version, told, name):
    assert client_name(language, version, told) == name
