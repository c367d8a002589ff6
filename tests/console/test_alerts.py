"""Alerts: what webhooks are told, when, and what happens when they do not listen."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.message import ReceivedMessage
from orbitmq.console.alerts import KEPT, MOST_WAITING, SETTLED, AlertBook
from orbitmq.console.faults import Check, Fault, Severity
from orbitmq.console.webhooks import (
    Alert,
    AlertSettings,
    FixedSilence,
    Format,
    Happening,
    Level,
    NotDelivered,
    Webhook,
    body_of,
    post,
)
from orbitmq.errors import SettingError
from tests.console.conftest import QUEUE, read_only
from tests.support.client import quick_settings
from tests.support.consoles import console_of
from tests.support.consuming import until

PLACE = "T0K3N-in-the-path"


@dataclass
class Receiver:
    """A server that keeps what is posted to it."""

    posts: list[dict[str, Any]] = field(default_factory=list)
    #: What it answers: a status and a body.
    status: int = 200
    said: bytes = b"ok"
    refused: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{PLACE}"

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [alert for each in self.posts for alert in each["alerts"]]

    def told(self, kind: str = "") -> list[tuple[str, str]]:
        """What it was told of which subject, in order."""
        return [
            (each["event"], each["subject"]) for each in self.alerts if kind in ("", each["kind"])
        ]


@contextlib.contextmanager
def receiving(port: int = 0, receiver: Receiver | None = None) -> Iterator[Receiver]:
    """A receiver on loopback; with `port` one that comes back."""
    found = receiver or Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if found.status == 200:
                found.posts.append(content)
            else:
                found.refused += 1
            self.send_response(found.status)
            if found.status == 302:
                self.send_header("location", f"http://127.0.0.1:{found.port}/elsewhere")
            self.end_headers()
            self.wfile.write(found.said)

        def log_message(self, *_: Any) -> None:
            """Nothing is to be read in a test."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def receiver():
    with receiving() as found:
        yield found


def hook(url: str = "http://127.0.0.1:1/", **changes: Any) -> Webhook:
    usual: dict[str, Any] = {"name": "ops", "url": url, "wait": 0.0, "repeat": 0.0}
    return Webhook(**(usual | changes))


def told_to(*hooks: Webhook, **changes: Any) -> AlertSettings:
    return AlertSettings(webhooks=hooks, **changes)


def fault(subject: str = "billing", kind: str = "stalled", **changes: Any) -> Fault:
    usual: dict[str, Any] = {
        "check": Check.STUCK_QUEUES, "kind": kind, "weight": Severity.BAD, "subject": subject,
        "text": "7 messages wait", "remedy": "look at it", "impact": 7.0,
    }  # fmt: skip
    return Fault(**(usual | changes))


def waiting(book: AlertBook, name: str = "ops") -> list[tuple[str, str]]:
    """What waits for a webhook, which is then done."""
    found = book.pages.hooks[name].waiting
    book.done(name, found)
    return [(each.event.value, each.subject) for each in found]


# When a webhook is told.


def test_a_finding_that_lasts_is_told_repeated_and_resolved_once():
    book = AlertBook([hook(wait=60.0, repeat=600.0)])
    story = [
        (0.0, [fault()], []),
        (59.0, [fault(text="9 messages wait")], []),
        (60.0, [fault()], [("begin", "billing")]),
        (61.0, [fault()], []),
        (659.0, [fault()], []),
        (660.0, [fault()], [("repeat", "billing")]),
        (700.0, [], [("resolve", "billing")]),
        (701.0, [], []),
        # Another incident, which is over before it is due.
        (800.0, [fault()], []),
        (830.0, [], []),
    ]

    for now, faults, wanted in story:
        book.judge(faults, now)
        assert waiting(book) == wanted, now


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ["billing", "mailer", "broker-a/0"]),
        ({"severity": Level.CRITICAL}, ["billing", "broker-a/0"]),
        ({"subjects": ("mail*",)}, ["mailer"]),
        ({"subjects": ("!mail*",)}, ["billing", "broker-a/0"]),
        ({"subjects": ("*i*", "!mailer")}, ["billing"]),
    ],
)
def test_a_webhook_is_told_what_it_wants(changes, wanted):
    book = AlertBook([hook(**changes)])
    faults = [fault(), fault("mailer", weight=Severity.WARN), fault("broker-a/0")]

    book.judge(faults, 0.0)
    assert [subject for _, subject in waiting(book)] == wanted
    book.judge([], 1.0)
    assert [subject for _, subject in waiting(book)] == wanted


def test_what_is_not_seen_is_not_resolved():
    book = AlertBook([hook()])
    down = fault("broker-a/0", "broker down", check=Check.BROKERS)
    book.judge([fault()], 0.0)
    waiting(book)

    # A broker is down, so that the group is not known; then no name server answers.
    book.judge([down], 1.0, is_partial=True)
    assert waiting(book) == [("begin", "broker-a/0")]
    book.judge([], 2.0, problem="no name server answers")
    assert waiting(book) == [("begin", "cluster")]

    book.judge([fault()], 3.0)
    assert sorted(waiting(book)) == [("resolve", "broker-a/0"), ("resolve", "cluster")]


def test_a_restart_begins_nothing_again_and_resolves_only_what_it_could_have_seen():
    book = AlertBook([hook(wait=60.0)])
    book.judge([fault(), fault("mailer")], 0.0)
    book.judge([fault(), fault("mailer")], 60.0)
    waiting(book)
    pages = book.pages

    again = AlertBook([hook(wait=60.0), hook(name="new", wait=60.0)], pages, now=1000.0)
    again.judge([fault()], 1000.0)

    assert waiting(again) == []
    # A webhook that was not there before is told.
    assert waiting(again, "new") == [("begin", "billing")]
    again.judge([fault()], 1000.0 + SETTLED - 1)
    assert waiting(again) == []
    again.judge([fault()], 1000.0 + SETTLED)
    assert waiting(again) == [("resolve", "mailer")]


def test_a_silent_finding_is_told_when_the_silence_ends_and_resolved_if_it_was_told():
    book = AlertBook([hook(repeat=10.0)])
    book.judge([fault()], 0.0)
    waiting(book)

    def is_silent(subject: str, kind: str) -> bool:
        return True

    book.judge([fault(), fault("mailer")], 20.0, is_silent=is_silent)
    assert waiting(book) == []
    book.judge([fault("mailer")], 21.0, is_silent=is_silent)
    assert waiting(book) == [("resolve", "billing")]
    book.judge([fault("mailer")], 22.0)
    assert waiting(book) == [("begin", "mailer")]


def test_what_waits_is_bounded_and_a_repeat_waits_once():
    book = AlertBook([hook(repeat=1.0)])
    many = [fault(f"group-{number}") for number in range(MOST_WAITING + 5)]

    book.judge(many, 0.0)
    book.judge(many, 10.0)

    kept = book.pages.hooks["ops"]
    subjects = [each.subject for each in kept.waiting]
    assert subjects == [f"group-{number}" for number in range(5, MOST_WAITING + 5)]
    assert kept.lost == 5
    book.done("ops", kept.waiting[:10])
    book.judge(many, 20.0)
    # Those that made room are repeated.
    assert sorted(each.subject for each in kept.waiting[MOST_WAITING - 10 :]) == sorted(
        f"group-{number}" for number in [*range(5), *range(5, 10)]
    )
    assert book.batch("ops", 21.0 + KEPT) == ()
    assert kept.lost == 5 + MOST_WAITING


# What is posted.


def alert(event: Happening = Happening.BEGIN, **changes: Any) -> Alert:
    usual: dict[str, Any] = {
        "id": "a1", "incident": "i1", "event": event, "at": 120.0, "since": 60.0,
        "severity": "critical", "check": "stuck queues", "kind": "stalled", "subject": "billing",
        "text": "7 messages wait", "remedy": "look at it", "impact": 7.0, "link": "/groups/billing",
    }  # fmt: skip
    return Alert(**(usual | changes))


def test_the_json_body_is_stable():
    body = body_of(hook(), [alert(Happening.RESOLVE)], console="https://c/", cluster=["ns:9876"])

    assert json.loads(body) == {
        "version": 1,
        "cluster": ["ns:9876"], "cluster_name": None,
        "alerts": [
            {
                "id": "a1", "incident": "i1", "event": "resolve", "severity": "critical",
                "at": "1970-01-01T00:02:00Z", "since": "1970-01-01T00:01:00Z",
                "resolved": "1970-01-01T00:02:00Z", "check": "stuck queues", "kind": "stalled",
                "subject": "billing", "text": "7 messages wait", "remedy": "look at it",
                "command": None, "impact": 7.0, "url": "https://c/groups/billing",
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format_", "place"),
    [
        (Format.SLACK, ("text",)),
        (Format.FEISHU, ("content", "text")),
        (Format.DINGTALK, ("text", "content")),
    ],
)
def test_chats_get_a_text(format_, place):
    alerts = [alert(text="<b> & c"), alert(Happening.REPEAT), alert(Happening.RESOLVE)]
    content = json.loads(body_of(hook(format=format_), alerts, console="http://c", cluster=[]))
    for name in place:
        content = content[name]

    wanted = "&lt;b&gt; &amp; c" if format_ is Format.SLACK else "<b> & c"
    end = "http://c/groups/billing"
    assert [each.split("\n") for each in content.split("\n\n")] == [
        ["[OrbitMQ] Critical: billing: stalled", wanted, "look at it", end],
        ["[OrbitMQ] Critical: billing: stalled (for 1 min)", "7 messages wait", "look at it", end],
        ["[OrbitMQ] Resolved after 1 min: billing: stalled", end],
    ]


@pytest.mark.parametrize(
    ("format_", "status", "said", "reason"),
    [
        (Format.JSON, 200, b"whatever", None),
        (Format.JSON, 500, b"", "it answered 500"),
        (Format.SLACK, 404, b"no_service", "it answered 404"),
        # A secret must not be carried elsewhere.
        (Format.JSON, 302, b"", "it answered 302"),
        (Format.FEISHU, 200, b'{"code": 0}', None),
        (Format.FEISHU, 200, b'{"code": 19001, "msg": "bad"}', "it refused with code 19001"),
        (Format.DINGTALK, 200, b'{"errcode": 310000}', "it refused with errcode 310000"),
    ],
)
def test_an_answer_is_understood(receiver, format_, status, said, reason):
    receiver.status, receiver.said = status, said
    target = hook(receiver.url, format=format_)

    if reason is None:
        post(target, b"{}")
        return
    with pytest.raises(NotDelivered, match=f"^{reason}$") as found:
        post(target, b"{}")
    assert found.value.is_refused == (status < 500)


def test_a_receiver_without_a_known_certificate_is_refused(receiver):
    # It does not even speak TLS.
    with pytest.raises(NotDelivered) as found:
        post(hook(receiver.url.replace("http:", "https:")), b"{}")
    assert PLACE not in str(found.value)


# The file.

FILE = f"""
console = "https://console.example.org"

[webhooks.ops]
url = "https://chat.example.org/{PLACE}"
format = "slack"
severity = "critical"
subjects = ["payments-*", "!payments-test"]
for = "2m"
repeat = 3600

[webhooks.all]
url = "http://127.0.0.1:8080/"

[[silences]]
subject = "test-*"
reason = "load tests"
"""


def test_a_file_is_read(tmp_path):
    file = tmp_path / "alerts.toml"
    file.write_text(FILE)

    settings = AlertSettings.load(file)

    ops, everything = settings.webhooks
    assert (ops.wait, ops.repeat, ops.format, ops.severity) == (
        120.0, 3600.0, Format.SLACK, Level.CRITICAL
    )  # fmt: skip
    assert ops.subjects == ("payments-*", "!payments-test")
    assert ops.host == "chat.example.org"
    assert (everything.wait, everything.repeat) == (60.0, 14400.0)
    assert settings.silences[0].subject == "test-*"
    assert PLACE not in repr(settings)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x =", "is not TOML"),
        ("wehooks = 1", "wehooks is not known; there are console, webhooks, silences"),
        ("webhooks = 1", r"webhooks must be tables with a name, such as \[webhooks.ops\]"),
        ("[webhooks.a]\nformat = 'json'", "webhooks.a needs url"),
        ("[webhooks.a]\nurl = 'ftp://SECRET'", "webhooks.a.url must begin with https:// or"),
        ("[webhooks.a]\nurl = 'http://SECRET:x/'", "webhooks.a.url must have a port"),
        ("[webhooks.a]\nurl = 'http://u:SECRET@h/'", "webhooks.a.url must not have a user"),
        ("[webhooks.a]\nurl = 'http://h/SEC RET'", "webhooks.a.url must be an address without"),
        ("[webhooks.a]\nurl = ['http://SECRET']", "webhooks.a.url must be a text"),
        ("[webhooks.a]\nurl = 'http://h'\nformat = 'xml'", "webhooks.a.format must be json, slack"),
        ("[webhooks.a]\nurl = 'http://h'\nfor = 'x'", "webhooks.a.for must be a duration such as"),
        ("[webhooks.a]\nurl = 'http://h'\nwait = 1", "webhooks.a.wait is not known; there are url"),
        ("[[silences]]\nsubject = 'a'", "silences needs reason"),
        ("[[silences]]\nsubject = 'a'\nreason = 'b'\nuntil = 'x'", "silences.until must be like"),
        ("console = 'c'", "console must be an address with http"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_its_addresses(tmp_path, text, reason):
    file = tmp_path / "alerts.toml"
    file.write_text(text)

    with pytest.raises(SettingError, match=reason) as found:
        AlertSettings.load(file)
    assert "SECRET" not in str(found.value)
    assert str(file) in str(found.value)


# A console, a broker and a receiver.


async def _nobody_consumes(desk, messages: int = 3) -> None:
    """Messages that wait for a group without members, for more than a minute."""
    await desk.world.admin.groups.create("billing")
    await desk.world.report(QUEUE, 0, "billing")
    await desk.world.fill(QUEUE, messages)
    desk.cluster.advance(90.0)


async def _consume(desk, messages: int) -> None:
    """Consume in the group until so many messages are finished."""
    found: list[bytes] = []
    client = quick_settings(desk.cluster.name_server)
    consumer = AsyncConsumer("billing", client=client, consume_from="earliest")

    @consumer.on("orders")
    async def bill(message: ReceivedMessage) -> None:
        found.append(message.body)

    async with consumer:
        await until(lambda: len(found) == messages)


@pytest.mark.feature("F7")
async def test_a_group_that_nobody_consumes_is_told_and_resolved(desk, receiver, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "orbitmq")
    settings = told_to(hook(receiver.url, subjects=("bill*",)), console="http://console")
    changes: dict[str, Any] = {"alerts": settings, "history": tmp_path / "console.sqlite"}
    async with console_of(desk.cluster, **changes) as page:
        await _nobody_consumes(desk)
        await until(lambda: receiver.told() == [("begin", "billing")])
        (begun,) = receiver.alerts
        assert begun["kind"] == "nobody consumes"
        assert begun["text"].startswith("3 messages wait, the oldest for 1 min 3")
        assert begun["url"] == "http://console/groups/billing"
        assert "orbitmq group show billing" in begun["command"]
        shown = await page.until("/alerts", lambda content: content["webhooks"][0]["posted"] == 1)
        assert (shown["webhooks"][0]["host"], shown["webhooks"][0]["lasting"]) == ("127.0.0.1", 1)
        assert PLACE not in json.dumps(shown)

    # After a restart it goes on, and begins nothing again.
    async with console_of(desk.cluster, **changes) as page:
        await page.until("/now", lambda content: content["fault_count"] == 1)
        again = page.console.state.alerts
        await until(lambda: again.waiting["ops"].told != {})
        await _consume(desk, 3)
        await until(lambda: len(receiver.alerts) == 2)

    assert receiver.told() == [("begin", "billing"), ("resolve", "billing")]
    assert receiver.alerts[1]["incident"] == begun["incident"]
    assert PLACE not in caplog.text


async def test_of_several_clusters_each_tells_the_webhooks_that_want_it(desk, receiver):
    lab, shop = (
        hook(receiver.url, clusters=("la*",)),
        hook(receiver.url, name="shop", clusters=("shop",)),
    )
    nowhere = quick_settings("127.0.0.1:1")
    clusters = {"shop": quick_settings(desk.cluster.name_server), "la b": nowhere}
    alerts = told_to(lab, shop, console="http://console/")
    async with console_of(desk.cluster, alerts=alerts, clusters=clusters) as page:
        await until(lambda: receiver.posts != [])
        shown = {name: await page.within(name).get("/alerts") for name in clusters}

    assert receiver.posts[0]["cluster"] == ["127.0.0.1:1"]
    assert {each["cluster_name"] for each in receiver.posts} == {"la b"}
    assert receiver.alerts[0]["kind"] == "cluster does not answer"
    assert receiver.alerts[0]["url"] == "http://console/clusters/la%20b/"
    assert [shown[name]["webhooks"][0]["name"] for name in clusters] == ["shop", "ops"]


async def test_a_receiver_that_is_down_is_told_when_it_is_back(desk):
    with receiving() as gone:
        pass
    async with console_of(desk.cluster, alerts=told_to(hook(gone.url))) as page:
        await _nobody_consumes(desk)
        shown = await page.until("/alerts", lambda content: content["webhooks"][0]["failures"] >= 2)
        (row,) = shown["webhooks"]
        assert row["waiting"] == 1
        assert row["problem"] == "it cannot be reached: Connection refused"
        assert row["next_at"] is not None
        assert shown["posts"][0]["first"] == "begin billing: nobody consumes"
        # The collector goes on meanwhile.
        before = (await page.get("/now"))["at"]
        await page.until("/now", lambda content: content["at"] > before)

        with receiving(gone.port) as back:
            await until(lambda: back.told() == [("begin", "billing")], deadline=20)
            await page.until("/alerts", lambda content: not content["webhooks"][0]["problem"])


async def test_a_post_that_is_refused_is_given_up(desk, receiver, monkeypatch):
    monkeypatch.setattr("orbitmq.console.alerts.FIRST_WAIT", 0.01)
    receiver.status = 400
    async with console_of(desk.cluster, alerts=told_to(hook(receiver.url))) as page:
        await _nobody_consumes(desk)
        shown = await page.until("/alerts", lambda content: content["webhooks"][0]["lost"] == 1)
        assert (shown["webhooks"][0]["waiting"], receiver.refused) == (0, 5)

        receiver.status = 200
        await page.post("/alerts/ops/test", status=202)
        await until(lambda: receiver.told() == [("test", "test")])
        assert (await page.get("/audit"))["lines"][0]["command"] == "test of webhook ops"
        assert (await page.send("POST", "/alerts/nosuch/test", {}, 404))["kind"] == "NotThere"


async def test_a_silence_is_listed_audited_kept_and_ended(desk, receiver, tmp_path):
    changes: dict[str, Any] = {
        "alerts": told_to(hook(receiver.url)),
        "history": tmp_path / "console.sqlite",
    }
    wish = {"subject": "bill*", "kind": "nobody consumes", "for": 3600, "reason": "maintenance"}
    async with console_of(desk.cluster, **changes) as page:
        made = await page.post("/silences", wish, 201)
        await _nobody_consumes(desk)
        now = await page.until("/now", lambda content: content["silenced"])
        assert now["silenced"][0]["subject"] == "billing"
        (line,) = (await page.get("/audit"))["lines"]
        assert line["command"] == "silence bill* (nobody consumes)"
        assert line["outcome"] == "silent for 1 h: maintenance"

    async with console_of(desk.cluster, **changes) as page:
        (kept,) = (await page.get("/silences"))["silences"]
        assert (kept["id"], kept["reason"]) == (made["id"], "maintenance")
        await page.until("/now", lambda content: content["silenced"])
        assert receiver.alerts == []
        await page.send("DELETE", f"/silences/{made['id']}")
        await until(lambda: receiver.told() == [("begin", "billing")])
        await page.send("DELETE", f"/silences/{made['id']}", None, 404)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"subject": "a", "for": 60, "reason": " "}, "needs a reason"),
        ({"subject": " ", "for": 60, "reason": "b"}, "subject must be a name"),
        ({"subject": "a", "reason": "b"}, "either `for` in seconds or `until`"),
        ({"subject": "a", "for": 1, "until": "2999-01-01", "reason": "b"}, "either `for`"),
        ({"subject": "a", "for": -1, "reason": "b"}, "must end in the future"),
        ({"subject": "a", "until": "yesterday", "reason": "b"}, "until must be like"),
        ({"subject": "a", "hours": 1, "reason": "b"}, "unknown field `hours`"),
    ],
)
async def test_a_silence_that_makes_no_sense_is_refused(desk, wish, reason):
    said = await desk.browser.send("POST", "/silences", wish, 400)

    assert reason in said["error"]


async def test_a_console_that_only_shows_silences_nothing(desk):
    read_only(desk.browser)

    wish = {"subject": "a", "for": 60, "reason": "b"}
    assert (await desk.browser.send("POST", "/silences", wish, 403))["kind"] == "ReadOnly"


async def test_silences_of_the_file_cannot_be_removed(desk):
    settings = told_to(silences=(FixedSilence(subject="test-*", reason="load tests"),))
    async with console_of(desk.cluster, alerts=settings) as page:
        (each,) = (await page.get("/silences"))["silences"]
        assert (each["subject"], each["until"], each["is_fixed"]) == ("test-*", None, True)
        said = await page.send("DELETE", f"/silences/{each['id']}", None, 400)
        assert "remove it there" in said["error"]
