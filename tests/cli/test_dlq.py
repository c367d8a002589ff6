"""`orbitmq dlq`: triage of dead letters from the command line."""

from __future__ import annotations

import json

import pyarrow.parquet as parquet
import pytest

from orbitmq.client.message import ReceivedMessage
from orbitmq.testing import EmbeddedCluster
from tests.cli.conftest import consumer_of


class CardDeclined(Exception):
    """What the handler of these tests fails with."""


@pytest.fixture
def dead(cluster, names):
    """A group that gave up three messages of its topic for two reasons; nobody is online."""
    name = next(names)
    cluster.create_topic(name, queues=1)
    for key, body in (("a", b"declined"), ("b", b"\x00\xff"), ("c", b"declined"), ("d", b"fine")):
        cluster.send(name, body, keys=key)
    die(cluster, name)
    assert len(cluster.messages(f"%DLQ%{name}")) == 3
    return name


def die(cluster: EmbeddedCluster, name: str) -> None:
    """Have the group consume its topic, and give up what it cannot handle."""

    def handle(message: ReceivedMessage) -> None:
        if message.body == b"declined":
            raise CardDeclined("no money \x1b[31mleft")
        if message.body != b"fine":
            raise ValueError("not text")

    with consumer_of(cluster, name, name, handle, max_retries=0):
        cluster.until_consumed(name, name)


def test_letters_are_listed_and_filtered(cli, dead):
    def keys(*words):
        return sorted(each["keys"][0] for each in cli.records("dlq", "list", dead, *words))

    letters = cli.records("dlq", "list", dead)
    assert {each["topic"] for each in letters} == {dead}
    assert {each["attempts"] for each in letters} == {1}
    assert min(each["reason"] for each in letters).startswith("CardDeclined")
    assert keys() == ["a", "b", "c"]
    assert keys("--reason", "carddeclined") == ["a", "c"]
    assert keys("--key", "a", "--key", "b") == ["a", "b"]
    assert keys("--min-attempts", "2") == []
    assert keys("--max-attempts", "1", "--since", "1h", "--topic", dead) == ["a", "b", "c"]
    assert keys("--until", "1h") == []
    assert keys("--id", letters[0]["id"]) == letters[0]["keys"]
    assert len(keys("--limit", "2")) == 2


def test_every_id_that_is_printed_can_be_pasted_and_a_message_has_one(cluster, cli, dead):
    sent = {each["keys"][0]: each["id"] for each in cli.records("message", "browse", dead)}
    letters = cli.records("dlq", "list", dead)
    tables = cli.text("dlq", "list", dead) + cli.text("message", "browse", dead)
    sample = cli.record("dlq", "summary", dead)["by_reason"][0]["sample_id"]
    (resent,) = cli.records("dlq", "resend", dead, "--key", "a", "--yes")

    assert {each["keys"][0]: each["id"] for each in letters} == {
        key: sent[key] for key in ("a", "b", "c")
    }
    assert resent["id"] == sent["a"]
    assert sample in sent.values()
    assert all(tables.count(sent[key]) == 2 for key in ("a", "b", "c"))
    for letter in letters:
        shown = [
            cli.record("message", "show", letter[name])["id"]
            for name in ("id", "offset_id", "origin_id")
        ]
        assert set(shown) == {letter["id"]}
        assert cli.record("dlq", "show", dead, letter["id"])["offset_id"] == letter["offset_id"]
        assert cli.record("dlq", "show", dead, letter["offset_id"])["id"] == letter["id"]
    assert cli.record("message", "show", resent["sent_as"])["id"] == sent["a"]


def test_an_id_is_not_broken_at_a_narrow_terminal(cli, dead):
    (letter,) = cli.records("dlq", "list", dead, "--key", "a")

    with cli.at_terminal("dlq", "list", dead, columns=90) as terminal:
        terminal.wait()

    assert letter["id"] in terminal.screen


def test_letters_are_counted_by_reason_and_over_all_groups(cli, dead):
    everything = {each["group"]: each["count"] for each in cli.records("dlq", "summary")}
    one = cli.record("dlq", "summary", dead)
    text = cli.text("dlq", "summary", dead)

    assert everything[dead] == 3
    assert [each["count"] for each in one["by_reason"]] == [2, 1]
    assert [each["name"] for each in one["by_topic"]] == [dead]
    assert [each["name"] for each in one["by_age"]] == ["last hour"]
    assert "By reason" in text


def test_one_letter_is_shown_and_a_reason_cannot_colour_the_terminal(cli, dead):
    latest = cli.record("dlq", "show", dead)
    (letter, *_) = cli.records("dlq", "list", dead, "--reason", "CardDeclined")

    assert latest["group"] == dead
    with cli.at_terminal("dlq", "show", dead, letter["id"]) as terminal:
        terminal.wait()
    assert "CardDeclined" in terminal.screen
    assert "[31mleft" in terminal.screen.replace("\\x1b", "")
    assert "\x1b[31mleft" not in terminal.screen
    assert "has no dead letter 'x'" in cli.refusal("dlq", "show", dead, "x", code=1)


@pytest.mark.feature("F7")
def test_letters_are_sent_again_with_an_outcome_for_each(cluster, cli, dead):
    def outcomes(*words):
        return cli.records("dlq", "resend", dead, *words)

    planned = outcomes("--dry-run")
    assert [each["result"] for each in planned] == ["would be sent"] * 3
    assert cluster.messages(f"%RETRY%{dead}") == []
    assert "sends 3 dead letters" in cli.refusal("dlq", "resend", dead, code=2)

    ten = outcomes("--reason", "CardDeclined", "--limit", "1", "--yes")
    assert [each["result"] for each in ten] == ["sent"]
    rest = outcomes("--rate", "5", "--yes")
    assert sorted(each["result"] for each in rest) == ["already sent", "sent", "sent"]
    times = sorted(each.stored_at for each in cluster.messages(f"%RETRY%{dead}"))
    assert len(times) == 3
    assert times[2] - times[1] >= 0.19
    again = outcomes("--to", "origin", "--key", "b", "--yes")
    assert [each["result"] for each in again] == ["already sent"]
    assert [each["sent_as"] for each in again] == [
        each["sent_as"] for each in rest if each["offset_id"] == again[0]["offset_id"]
    ]
    origin = outcomes("--to", "origin", "--key", "b", "--again", "--yes")
    assert [(each["result"], each["topic"]) for each in origin] == [("sent", dead)]
    assert [bytes(each.body) for each in cluster.messages(dead)].count(b"\x00\xff") == 2


def test_only_the_letters_are_sent_that_were_there_when_somebody_agreed(cluster, cli, dead):
    with cli.at_terminal("dlq", "resend", dead) as terminal:
        terminal.until("[y/N]")
        cluster.send(dead, b"declined", keys="late")
        die(cluster, dead)
        terminal.press("y\r")
        assert terminal.wait() == 0

    assert len(cluster.messages(f"%DLQ%{dead}")) == 4
    sent = [each.keys for each in cluster.messages(f"%RETRY%{dead}")]
    assert sorted(sent) == ["a", "b", "c"]


def test_letters_are_exported_as_json_lines_and_parquet(cli, dead, tmp_path):
    lines, columns = tmp_path / "dead.jsonl", tmp_path / "dead.parquet"

    first = cli.record("dlq", "export", dead, str(lines))
    cli.record("dlq", "export", dead, str(columns), "--reason", "CardDeclined")

    assert first["count"] == 3
    listed = cli.records("dlq", "list", dead)
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["id"] for each in written] == [each["id"] for each in listed]
    # The same fields as in the list, so that a script reads both.
    assert set(written[0]) <= set(listed[0])
    assert parquet.read_table(columns).num_rows == 2
    assert "overwrite it with --replace" in cli.refusal("dlq", "export", dead, str(lines), code=1)
    assert cli.record("dlq", "export", dead, str(lines), "--replace")["count"] == 3
    assert "does not say which" in cli.refusal("dlq", "export", dead, str(tmp_path / "x"), code=2)


def test_a_group_without_dead_letters_is_told_from_one_that_nobody_knows(cli):
    cli.record("group", "create", "lucky")

    assert cli.records("dlq", "list", "lucky") == []
    assert "has no such dead letters" in cli.text("dlq", "list", "lucky")
    summary = cli.record("dlq", "summary", "lucky")
    assert (summary["count"], summary["resent"]) == (0, 0)
    for words in (("list",), ("show",), ("summary",), ("resend", "--yes")):
        said = cli.refusal("dlq", words[0], "zzz", *words[1:], code=1)
        assert "no broker knows group 'zzz'" in said


def test_letters_that_were_sent_again_are_told_from_those_that_wait(cli, dead):
    cli.records("dlq", "resend", dead, "--key", "a", "--yes")
    cli.records("dlq", "resend", dead, "--key", "b", "--to", "origin", "--yes")

    letters = {each["keys"][0]: each for each in cli.records("dlq", "list", dead)}

    assert {key for key, each in letters.items() if each["resent_at"] is not None} == {"a", "b"}
    assert letters["a"]["resent_at"] > letters["a"]["died_at"]
    copy = cli.record("message", "get", letters["a"]["resent_as"])
    assert copy["unique_id"] == letters["a"]["unique_id"]
    assert f"as {letters['a']['resent_as']}" in cli.text("dlq", "show", dead, letters["a"]["id"])
    one = cli.record("dlq", "summary", dead)
    everything = {each["group"]: each for each in cli.records("dlq", "summary")}
    assert (one["count"], one["resent"], everything[dead]["resent"]) == (3, 2, 2)
    assert "has 3 dead letters: 1 open, 2 resent" in cli.text("dlq", "summary", dead)
