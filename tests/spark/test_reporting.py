"""Queries and groups on Spark in the console, through its API."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from orbitmq.spark import ProgressListener, consume, measured
from orbitmq.spark.consolelink import ConsoleLink, QueryReport
from orbitmq.spark.consuming.progress import Settled
from orbitmq.spark.health import QueryReports, SentBackCounts, report_queries
from orbitmq.spark.pipelines.run import Run, started
from tests.support.command import Started
from tests.support.filling import fill, numbered
from tests.support.prometheus import parse_metrics
from tests.support.sparkconsuming import QUICK, SOON, idle
from tests.support.sparking import until

FREE = ("--namesrv-port", "0", "--broker-port", "0", "--console", "--console-port", "0")
TOKEN = "t0ken"  # noqa: S105  # of a test


class Stage:
    """A broker and its console, as a process."""

    def __init__(self, up: Started) -> None:
        self.name_server = up.address("name server")
        self.broker = up.address("broker-a")
        self.console = up.address("console").rstrip("/")

    def pipeline(self, name: str) -> dict[str, Any]:
        """What the console says of a pipeline; empty as long as it knows none."""
        url = f"{self.console}/api/v1/pipelines/{urllib.parse.quote(name)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310  # ours
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 404:
                    raise
            return {}

    def get(self, what: str) -> Any:
        url = f"{self.console}/api/v1/{what}"
        with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310  # ours
            return json.load(answer)

    def until(self, name: str, **wanted: object) -> dict[str, Any]:
        """What it says when it says this."""
        until(
            lambda: wanted.items() <= self.pipeline(name).items(),
            f"{name} is {wanted}, last: {self.pipeline(name)}",
        )
        return self.pipeline(name)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with Started("up", *FREE, cwd=tmp_path_factory.mktemp("stage")) as up:
        yield Stage(up)


@pytest.mark.feature("M13")
def test_the_console_shows_the_progress_of_a_query_and_why_it_failed(spark, stage, tmp_path):
    fill(stage.broker, "orders", numbered(100, queues=4))
    reports = report_queries(spark, stage.console, groups={"archive of orders": "archive"})

    def sink(frame, batch):
        if frame.where("body = '150'").count():
            raise RuntimeError("the disk is full")

    query = (
        spark.readStream.format("rocketmq")
        .options(nameServer=stage.name_server, subscribe="orders", group="archive")
        .options(startingOffsets="earliest", maxOffsetsPerTrigger="60")
        .load()
        .writeStream.queryName("archive of orders")
        .foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        seen = stage.until("archive of orders", batch=2, lag_total=0, state="waiting")
        fill(stage.broker, "orders", numbered(60, queues=4, first=100))
        failed = stage.until("archive of orders", state="failed")
    finally:
        query.stop()
        reports.stop()

    assert seen["lag"] == {f"orders@broker-a:{number}": 0 for number in range(4)}
    assert (seen["rows"], seen["topics"], seen["group"]) == (40, ["orders"], "archive")
    assert seen["rows_per_second"] > 0
    assert seen["batch_seconds"] > 0
    assert "the disk is full" in failed["error"]
    assert (failed["batch"], failed["reported_at"] >= seen["reported_at"]) == (2, True)
    # The page of the group names the query.
    assert stage.get("groups/archive")["pipelines"] == ["archive of orders"]


@pytest.mark.feature("T9")
def test_the_console_and_prometheus_have_the_figures_of_the_listener(spark, stage, tmp_path):
    fill(stage.broker, "figures", numbered(30, queues=2))
    listener = ProgressListener()
    spark.streams.addListener(listener)
    reports = report_queries(spark, stage.console)
    source = {"nameServer": stage.name_server, "subscribe": "figures"}
    rows = (
        spark.readStream.format("rocketmq")
        .options(**source, startingOffsets="earliest", maxOffsetsPerTrigger="20")
        .load()
    )
    query = (
        measured(rows, "figures")
        .writeStream.format("noop")
        .queryName("figures")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        until(lambda: 'rows_total{query="figures",topic="figures"} 30' in listener.metrics(), "all")
        shown = stage.until("figures", batch=listener.latest["figures"].batch_id)
        running = parse_metrics(listener.metrics().encode())
    finally:
        query.stop()
        reports.stop()
    until(lambda: "lag" not in listener.metrics(), "the end is reported")
    ended = parse_metrics(listener.metrics().encode())
    spark.streams.removeListener(listener)

    (topic,) = shown["by_topic"]
    assert topic == json.loads(listener.latest["figures"].json)["topics"][0]
    assert (topic["numInputRows"], topic["lag"], topic["lagSeconds"]) == (10, 0, 0.0)
    values = {name: each.value(query="figures") for name, each in running.items()}
    assert values == {
        "orbitmq_stream_rows_total": 30,
        "orbitmq_stream_bytes_total": sum(len(str(number)) for number in range(30)),
        "orbitmq_stream_input_rows_per_second": topic["inputRowsPerSecond"],
        "orbitmq_stream_processed_rows_per_second": topic["processedRowsPerSecond"],
        "orbitmq_stream_lag_messages": 0,
        "orbitmq_stream_lag_seconds": 0,
        "orbitmq_stream_batch": shown["batch"],
        "orbitmq_stream_batch_seconds": listener.latest["figures"].batch_duration / 1000,
    }
    assert set(ended) == {"orbitmq_stream_rows_total", "orbitmq_stream_bytes_total"}


def test_a_run_tells_the_console_of_its_groups_and_one_whose_messages_all_fail_is_ill(spark, stage):
    fill(stage.broker, "doomed", numbered(12, queues=2))

    def refuse(message):
        raise ValueError("no account")

    link = ConsoleLink(stage.console)
    run = Run(spark, name="doom", name_server=stage.name_server, console=link)
    group = consume(
        spark,
        "doom",
        name_server=stage.name_server,
        consume_from="first",
        batch=QUICK,
        rebalance=SOON,
    )
    group.on("doomed")(refuse)
    (target,), _ = started(group, run)
    try:
        seen = stage.until("doom", state="failing", retried=12)
        own = target.look()
        faults = stage.get("faults")["faults"]
    finally:
        target.stop()
        link.stop()

    assert (seen["done"], seen["dead"], seen["failed_share"]) == (0, 0, 1.0)
    assert seen["error"] == "ValueError: no account"
    (fault,) = seen["faults"]
    assert "100 % of what it handled lately failed (12 retried" in fault["text"]
    assert fault["command"] == "orbitmq pipeline status doom --console URL"
    assert fault in faults
    assert (own.state, own.failed_share, own.retried) == ("failing", 1.0, 12)
    assert stage.until("doom", state="stopped")["faults"] == []


@pytest.mark.feature("M13")
def test_the_console_shows_a_group_on_spark(spark, stage):
    fill(stage.broker, "bills", numbered(40, queues=4))

    def bill(message):
        if message.text() == "7":
            raise ValueError("no account")

    run = consume(
        spark,
        "billing",
        name_server=stage.name_server,
        consume_from="first",
        batch=QUICK,
        rebalance=SOON,
        console=stage.console,
    )
    run.on("bills")(bill)
    with run:
        idle(run)
        seen = stage.until("billing", state="waiting", error="ValueError: no account")
    stopped = stage.until("billing", state="stopped")

    assert {f"bills@broker-a:{number}" for number in range(4)} <= seen["lag"].keys()
    assert (seen["lag_total"], seen["topics"], seen["group"]) == (0, ["bills"], "billing")
    assert seen["batch"] >= 1
    assert stopped["batch"] >= seen["batch"]


class Taking(http.server.BaseHTTPRequestHandler):
    """Takes reports, or refuses them."""

    def do_POST(self) -> None:  # its name there
        body = self.rfile.read(int(self.headers["content-length"]))
        server: Any = self.server
        is_known = self.headers.get("authorization") == f"Bearer {TOKEN}"
        server.taken.append((is_known, self.path, json.loads(body)))
        self.send_response(204 if is_known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def console():
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    server.taken = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_reports_bear_the_token_and_the_last_word_comes_through(console):
    link = ConsoleLink(f"http://127.0.0.1:{console.server_port}/", token=TOKEN)
    state = {"now": QueryReport(state="running", batch=0)}

    link.watch("a b/c", lambda: state["now"])
    until(lambda: console.taken, "the first report")
    for batch in range(1, 200):
        state["now"] = QueryReport(state="running", batch=batch)
        link.news()
    state["now"] = QueryReport(state="stopped", batch=199)
    link.stop()

    assert console.taken[0] == (
        True,
        "/api/v1/pipelines/a%20b%2Fc",
        {"state": "running", "batch": 0},
    )
    assert console.taken[-1][2] == {"state": "stopped", "batch": 199}
    # Not one for every batch: the newest counts.
    assert len(console.taken) <= 5


class LateBus:
    """The streams of a session whose one query is over, of which it tells when it is asked."""

    def __init__(self) -> None:
        self._listener: Any = None

    def addListener(self, listener: Any) -> None:  # noqa: N802  # Spark's names
        self._listener = listener

    def removeListener(self, _: Any) -> None:  # noqa: N802
        self._listener = None

    @property
    def active(self) -> list[Any]:
        ended = SimpleNamespace(id="1", runId="2", exception=None)
        threading.Thread(target=self._listener.onQueryTerminated, args=(ended,)).start()
        return []

    def start(self) -> None:
        self._listener.onQueryStarted(SimpleNamespace(id="1", runId="2", name="late"))


def test_the_end_of_a_query_is_reported_also_when_spark_tells_of_it_late(console):
    bus = LateBus()
    spark: Any = SimpleNamespace(streams=bus)
    reports = report_queries(spark, f"http://127.0.0.1:{console.server_port}", token=TOKEN)
    bus.start()
    until(lambda: console.taken, "the first report")

    reports.stop()

    assert console.taken[-1][2]["state"] == "stopped"


def test_rows_that_a_query_sends_back_are_in_its_reports():
    link: Any = SimpleNamespace(watched={}, news=lambda: None, stop=lambda: None)
    link.watch = link.watched.__setitem__
    counts = SentBackCounts()
    reports = QueryReports(SimpleNamespace(), link, {}, counts)  # type: ignore[arg-type]
    event: Any = SimpleNamespace(id="1", runId="2", name="billing")
    progress: Any = SimpleNamespace(
        id="1",
        runId="2",
        name="billing",
        timestamp="2026-11-18T09:00:00.000Z",
        batchDuration=0,
        batchId=0,
        numInputRows=15,
        durationMs={},
        processedRowsPerSecond=float("nan"),
        inputRowsPerSecond=1.0,
        sources=[],
    )

    reports.onQueryStarted(event)
    counts.add("1", Settled(retried=9, dead=3))
    reports.onQueryProgress(SimpleNamespace(progress=progress))  # type: ignore[arg-type]
    failing = link.watched["billing"]()
    reports.onQueryIdle(event)

    assert (failing.state, failing.failed_share, failing.rows_per_second) == ("failing", 0.8, None)
    assert (failing.done, failing.retried, failing.dead) == (3, 9, 3)
    assert link.watched["billing"]().state == "failing"


def test_a_refused_report_says_so_once_and_shows_no_token(console, caplog):
    link = ConsoleLink(f"http://127.0.0.1:{console.server_port}", token="wr0ng")  # noqa: S106  # none

    link.watch("a", lambda: QueryReport(state="running", batch=len(console.taken)))

    def is_tried_again():
        link.news()
        return len(console.taken) >= 2

    until(is_tried_again, "it tries again")
    link.stop()

    assert caplog.text.count("does not take reports: HTTP Error 401") == 1
    assert "wr0ng" not in caplog.text
