"""The board for Grafana that comes with the project, against what a live broker exposes.

Prometheus' own parser reads the page. A name or a label in the board that no broker has would be a
panel that stays empty for ever, and nobody would know whether that is good news.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orbitmq.broker.settings import HttpSettings
from tests.support.delivery import AskedProducer, hand_broker
from tests.support.metrics import use_in_every_way

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "orbitmq.json"
#: What Apache's 5.5.0 exposes.
RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "5.5.0-metrics.json"

_METRIC = re.compile(r"\b((?:rocketmq|orbitmq)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)(?:=~|=|!=|!~)\"")
_BY = re.compile(r"\bby \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")
_VARIABLE = re.compile(r"\$\{?(\w+)")
#: Variables that Grafana has by itself.
_BUILT_IN = {"__rate_interval", "__range"}


class Query(NamedTuple):
    """What one line of a panel, or a variable, asks for."""

    where: str
    expression: str
    legend: str


@pytest.fixture(scope="module")
def board():
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def queries(board: dict[str, Any]) -> Iterator[Query]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"], target["legendFormat"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield Query(f"${variable['name']}", variable["query"]["query"], "")


async def exposed(root: Path) -> dict[str, set[str]]:
    """The samples of a live broker, as Prometheus reads them over HTTP, with their labels."""
    async with hand_broker(root, http=HttpSettings(port=0)) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        await use_in_every_way(hand, client, producer)
        page = f"http://{hand.broker.http_address}/metrics"
        text = await asyncio.to_thread(_get, page)
        await producer.close()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def _get(page: str) -> str:
    with urllib.request.urlopen(page, timeout=20) as answer:  # noqa: S310  # the broker's own
        text: str = answer.read().decode()
        return text


@pytest.mark.feature("O1")
async def test_every_metric_and_label_of_the_board_is_exposed_by_a_broker(board, tmp_path):
    labels = await exposed(tmp_path)

    asked = list(queries(board))
    assert len(asked) > 40
    for query in asked:
        found = _METRIC.findall(query.expression)
        assert found, query
        for metric, matchers in found:
            assert metric in labels, query
            assert set(_MATCHER.findall(matchers)) <= labels[metric], query
        shared = set.intersection(*(labels[metric] for metric, _ in found))
        grouped = {
            name.strip() for names in _BY.findall(query.expression) for name in names.split(",")
        }
        assert grouped <= shared, query
        # What is summed up by some labels has no others left to be shown.
        assert set(_LEGEND.findall(query.legend)) <= (grouped or shared), query


def test_what_the_board_takes_for_rocketmqs_is_there_in_apaches_broker(board):
    theirs = json.loads(RECORDING.read_text())
    parts = {f"{name}_{part}": name for name in theirs for part in ("bucket", "count", "sum")}

    for query in queries(board):
        for metric, matchers in _METRIC.findall(query.expression):
            if metric.startswith("rocketmq_"):
                name = parts.get(metric, metric)
                assert name in theirs, query
                assert set(_MATCHER.findall(matchers)) <= {*theirs[name]["labels"], "le"}, query


def test_the_board_is_one_that_grafana_can_import(board):
    panels = board["panels"]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = {name for query in queries(board) for name in _VARIABLE.findall(query.expression)}
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert (board["uid"], board["title"]) == ("orbitmq", "OrbitMQ")
    assert used - _BUILT_IN <= variables
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len(set(cells)) == len(cells), "panels lie on one another"
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["description"], panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references), panel["title"]
