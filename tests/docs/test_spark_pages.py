"""What pages show of Spark is run, one page after the other, as one program with one session.

The blocks build on each other, as cells of a notebook do. What a block makes
is used behind it, so that lazy frames are computed, streams take something and end.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.walkthrough import ROOT, blocks, expected

DECLARATIVE = ROOT / "examples" / "pipelines" / "declarative" / "transformations" / "orders.py"


@dataclass(frozen=True, slots=True)
class Use:
    """What a test does before and behind a block."""

    before: str = ""
    behind: str = ""


AS_IT_IS = Use()
#: It is the text of an example, which tests/spark/test_declarative.py runs by Spark's own command.
AN_EXAMPLE = Use()

ONE_MORE = """
with Producer("orders-svc", name_server="localhost:9876") as producer:
    producer.send("orders", '{"cents": %d}', tags="paid", keys="order-%d")
"""
#: When all is done. (Spark has an idea of its own of Ctrl-C, which cancels all jobs.)
END_IT = """
import os, signal, threading
from orbitmq import Admin

def end_it():
    with Admin(name_server="localhost:9876") as admin:
        for _ in range(1200):
            if not admin.groups.progress("billing").lag:
                break
            threading.Event().wait(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_it, daemon=True).start()
"""
ASK_THE_CONSOLE = """
import json, urllib.request
for _ in range(1200):
    with urllib.request.urlopen("http://localhost:8090/api/v1/pipelines", timeout=60) as answer:
        told = {each["name"]: each for each in json.load(answer)["pipelines"]}
    if told.get("pipeline", {}).get("rows"):
        break
    threading.Event().wait(0.1)
print("the console has rows:", told["pipeline"]["rows"] > 0)  # the console has rows: True
"""

#: The pages, and for each of their blocks what it takes to see that it works.
PAGES: dict[str, list[Use]] = {
    "docs/spark.md": [
        AS_IT_IS,
        Use(behind="print(orders.columns)  # ['keys', 'body', 'storeTimestamp']"),
        AS_IT_IS,
        Use(
            behind="""
seen = spark.read.format("rocketmq").option("nameServer", "localhost:9876")
seen = seen.options(subscribe="orders-seen", bodyFormat="json", bodySchema="shop STRING").load()
print([row.value.shop for row in seen.collect()])  # ['shop-1', 'shop-1']
"""
        ),
        Use(
            behind="""
def stored(topic):
    reading = spark.read.format("rocketmq").option("nameServer", "localhost:9876")
    rows = reading.option("subscribe", topic).load().collect()
    return sorted(f"{row.keys} {row.tags}" for row in rows)

print(stored("orders-tagged"))  # ['order-1 from-spark', 'order-2 from-spark']
"""
        ),
        Use(behind="print(stored('orders-copied'))  # ['order-1 None', 'order-2 None']"),
        AS_IT_IS,
        Use(behind='print("orders_tagged" in names)  # True'),
        Use(
            behind="""
query.processAllAvailable()
query.stop()
print(spark.read.parquet("billed").count(), "billed")  # 1 billed
from orbitmq.spark import dead_letters
letters = dead_letters(spark, "billing", name_server="localhost:9876")
print([row.reason for row in letters.collect()])  # ['a negative amount']
"""
        ),
        Use(
            before=ONE_MORE % (7, 3) + END_IT,
            behind="""
with Admin(name_server="localhost:9876") as admin:
    print("left to do:", admin.groups.progress("billing").lag)  # left to do: 0
""",
        ),
        AS_IT_IS,
        AS_IT_IS,
        Use(behind="print(spark.sparkContext.master[:6])  # local["),
        AS_IT_IS,
    ],
    "README.md": [AS_IT_IS],
    "docs/howto/exactly-once.md": [
        AS_IT_IS,
        Use(behind="print(stored.count(), before)  # 20 20"),
        AS_IT_IS,
        AS_IT_IS,
    ],
    "docs/scaling.md": [AS_IT_IS],
    "docs/reference/errors.md": [AS_IT_IS],
    "docs/pipelines.md": [
        Use(
            behind="""
query.processAllAvailable()
print(spark.read.parquet("lake/orders").count(), "archived")  # 3 archived
"""
            + ASK_THE_CONSOLE
            + "query.stop()"
        ),
        Use(
            behind="""
query = run.start(pipeline(run, path=Path("countries")), "countries", once=True)
print("ended:", query.awaitTermination(120))  # ended: True
print(spark.read.parquet("countries").count(), "kept")  # 3 kept
"""
        ),
        AN_EXAMPLE,
    ],
}


@pytest.mark.feature("P7")
@pytest.mark.timeout(400)
def test_what_pages_show_of_spark_runs_as_one_program(reader):
    program = "\n".join(
        f"{use.before}\n{text}\n{use.behind}"
        for page, uses in PAGES.items()
        for text, use in zip(shown(page), uses, strict=True)
        if use is not AN_EXAMPLE
    )

    said = reader.run_program(program)

    assert said.splitlines() == expected(program)
    assert list((reader.folder / "orders").glob("*.parquet"))


def test_what_a_page_shows_of_declarative_pipelines_is_the_example():
    (text,) = [
        text
        for page, uses in PAGES.items()
        for text, use in zip(shown(page), uses, strict=True)
        if use is AN_EXAMPLE
    ]

    # Behind what the file says of itself.
    assert DECLARATIVE.read_text().partition('"""\n\n')[2] == text


def test_no_page_shows_something_of_spark_that_is_not_run():
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        if any(block.language == "py" for block in blocks(path))
    }
    assert found == PAGES.keys()


def shown(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / page) if block.language == "py"]
