"""The application as a whole: its description, its files, its settings, any server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orbitmq.client.settings import ClientSettings
from orbitmq.console.app import STATIC, VIEWS
from orbitmq.console.settings import ConsoleSettings
from orbitmq.errors import SettingError


async def test_the_interface_describes_itself(desk):
    content = await desk.browser.get("/")

    paths = {(method, each["path"]) for each in content["routes"] for method in each["methods"]}
    assert content["version"] == 1
    assert {("GET", "/api/v1/now"), ("POST", "/api/v1/pipelines/{name}")} <= paths
    assert all(each["about"] for each in content["routes"])


async def test_the_page_has_what_the_first_view_shows_and_nothing_that_runs(desk):
    page = (await desk.browser.ask("GET", "/topics/some%2Fname")).body.decode()

    scripts = re.findall(r"<script([^>]*)>", page)
    assert scripts == [' type="application/json" id="boot"', ' type="module" src="/static/main.js"']
    assert '"brokers":[' in page
    assert " onclick" not in page
    assert "style=" not in page


async def test_addresses_that_mean_no_view_are_not_there(desk):
    async def asked(path, accept="*/*"):
        answer = await desk.browser.ask("GET", path, headers={"accept": accept})
        return answer.status, answer.headers["content-type"].partition(";")[0]

    for path in ("/nosuch", "/metrics", "/topics/a/b", "/consumers/a/b/c", "/favicon.ico"):
        assert await asked(path) == (404, "application/json"), path
        # Somebody who mistyped an address is shown the page, which says so.
        assert await asked(path, "text/html,*/*;q=0.8") == (404, "text/html"), path
    metrics = (await desk.browser.ask("GET", "/metrics")).body.decode()
    assert "--http-port" in metrics
    for path in VIEWS:
        here = path.replace("{", "").replace("}", "%2F%25RETRY%25")
        assert await asked(here) == (200, "text/html"), here
        assert await asked(here + "?filter=behind") == (200, "text/html"), here


def test_the_views_are_those_of_the_script():
    text = (STATIC / "main.js").read_text()
    table = re.search(r"const VIEWS = \[(.*?)\n\];", text, re.DOTALL)

    assert table is not None
    drawn = re.findall(r'\["(/[^"]*)",', table[1])
    assert tuple(re.sub(r":(\w+)", r"{\1}", each) for each in drawn) == VIEWS


async def test_every_file_is_served_and_unchanged_ones_are_not_sent_again(desk):
    for path in STATIC.rglob("*.*"):
        name = path.relative_to(STATIC).as_posix()
        answer = await desk.browser.ask("GET", f"/static/{name}")
        assert answer.status == 200, name
        again = await desk.browser.ask(
            "GET", f"/static/{name}", headers={"if-none-match": answer.headers["etag"]}
        )
        assert again.status == 304

    assert (await desk.browser.ask("GET", "/static/../app.py")).status == 404
    assert (await desk.browser.ask("GET", "/static/..%2fapp.py")).status == 404


def test_scripts_never_make_markup_of_texts():
    for path in STATIC.rglob("*.js"):
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, path


def test_nothing_is_fetched_from_elsewhere():
    for path in Path(STATIC).rglob("*.*"):
        text = path.read_text()
        found = [link for link in re.findall(r"https?://[^\s\"'`)]+", text) if "w3.org" not in link]
        assert found == [], path


CLIENT = ClientSettings(name_servers=("127.0.0.1:9876",))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"port": 70000}, "console.port"),
        ({"every": 0}, "console.every"),
        ({"session": -1}, "console.session"),
        ({"attempts": 0}, "console.attempts"),
        ({"password": "short"}, "console.password"),
        ({"host": "0.0.0.0"}, "console.host"),  # noqa: S104
        ({"host": "console.example.org"}, "console.host"),
        ({"certificate": Path("a.pem")}, "console.private_key"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(fields, named):
    with pytest.raises(SettingError, match=named.replace(".", r"\.")):
        ConsoleSettings(client=CLIENT, **fields)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_password(host):
    assert ConsoleSettings(client=CLIENT, host=host).password is None


def test_no_secret_is_shown():
    settings = ConsoleSettings(client=CLIENT, password="correct horse", token="battery staple")  # noqa: S106

    assert "correct horse" not in repr(settings)
    assert "battery staple" not in repr(settings)
