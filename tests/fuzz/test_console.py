"""Requests of all kinds at every address of the console's API: answered, and never by a failure."""

from __future__ import annotations

import json
import logging
import random
import urllib.parse

import pytest
from starlette.routing import compile_path

from orbitmq.console import app
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consoles import Answer, Browser, console_of
from tests.support.fuzzing import anything, fuzz_seed, note_inputs, rounds
from tests.support.mutations import ODD_TEXTS

ROUNDS = rounds(10)
SEED = fuzz_seed(7)

#: Every address of the API with each of its methods.
ADDRESSES = sorted(
    (method, route.path) for route in app.ROUTES for method in (route.methods or set()) - {"HEAD"}
)
#: Answers that go on for ever: their beginning is all there is to check.
ENDLESS = {"/events"}
#: What requests may say besides their path.
WORDS = (
    *("topic", "group", "queue", "offset", "limit", "key", "body", "tags", "broker", "from", "to"),
    *("since", "until", "sort", "cursor", "count", "name", "id", "confirm", "dry_run", "page", "q"),
)
VALUES = ("orders", "billing", "0", "1", "-1", "99999999999999999999", "broker-a", "true", "now")


@pytest.fixture
async def browser():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=2)
        async with console_of(cluster) as browser:
            await browser.begin()
            yield browser


@pytest.mark.timeout(1200)
async def test_every_address_answers_whatever_is_asked(browser, caplog):
    caplog.set_level(logging.WARNING)
    chance = random.Random(SEED)
    for method, path in ADDRESSES:
        if path in ENDLESS:
            continue
        for _ in range(ROUNDS):
            asked = made_up(path, chance)
            answer = await browser.ask(
                method, asked, headers=odd_headers(chance), body=odd_body(method, chance)
            )
            check(answer, f"{method} {asked}")
    await assert_alive(browser)
    note_inputs(len(ADDRESSES) * ROUNDS)
    assert [record for record in caplog.records if record.exc_info] == []


def made_up(path: str, chance: random.Random) -> str:
    """An address with something for each of its parameters, and some questions."""
    _, template, parameters = compile_path(path)
    filled = template.format(**{name: part(chance) for name in parameters})
    words = [
        f"{urllib.parse.quote(word(chance))}={part(chance)}" for _ in range(chance.randrange(4))
    ]
    return f"{app.PREFIX}{filled}" + (f"?{'&'.join(words)}" if words else "")


def part(chance: random.Random) -> str:
    text = chance.choice((*VALUES, *VALUES, *ODD_TEXTS))[:2000]
    return urllib.parse.quote(text.encode("utf-8", "surrogatepass"), safe="") or "%20"


def word(chance: random.Random) -> str:
    return chance.choice((*WORDS, *WORDS, "x" * 300, "\x00"))


def odd_headers(chance: random.Random) -> dict[str, str]:
    kinds = ("application/json", "application/json", "text/plain", "multipart/form-data", "", "x/y")
    return {"content-type": chance.choice(kinds)}


def odd_body(method: str, chance: random.Random) -> bytes:
    if method == "GET":
        return b""
    document = {word(chance): anything(chance) for _ in range(chance.randrange(6))}
    text = json.dumps(chance.choice((document, document, anything(chance)))).encode()
    return chance.choice((text, text, text[: len(text) // 2], chance.randbytes(40), b""))


def check(answer: Answer, asked: str) -> None:
    assert 200 <= answer.status < 500, f"{asked}: {answer.status} {answer.body[:500]!r}"
    if answer.body and answer.headers.get("content-type", "").startswith("application/json"):
        json.loads(answer.body)


async def assert_alive(browser: Browser) -> None:
    topics = await browser.get("/topics")
    assert "orders" in json.dumps(topics)


@pytest.mark.timeout(600)
async def test_addresses_that_nobody_thought_of_are_not_there(browser):
    chance = random.Random(SEED)
    known = [path for _, path in ADDRESSES]
    for _ in range(10 * ROUNDS):
        path = chance.choice(known)
        begin = chance.randrange(len(path))
        odd = urllib.parse.quote(path[:begin] + chance.choice(ODD_TEXTS)[:100] + path[begin:])
        method = chance.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"))
        check(await browser.ask(method, app.PREFIX + odd), f"{method} {odd}")
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        answer = await browser.ask("GET", path)
        assert answer.status in (400, 404), path
    await assert_alive(browser)
    note_inputs(10 * ROUNDS)
