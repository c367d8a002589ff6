"""The texts of the page: each has a translation, and each translation a text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orbitmq
from orbitmq.client.admin.members import FindingKind
from orbitmq.client.admin.topics import TopicKind
from orbitmq.console.app import STATIC
from orbitmq.console.collect import Pace
from orbitmq.console.faults import Check
from orbitmq.console.pipelines import PipelineState

SOURCES = Path(orbitmq.__file__).parent
#: Where texts come from that a page shows as the console made them.
FAULTS = ("console/faults.py",)
PARTS = (
    "console/alerts.py",
    "client/admin/groups.py",
    "client/admin/cluster.py",
    "console/collect.py",
)

LANGUAGES = sorted(STATIC.glob("words.*.json"))
_KEY = re.compile(r'\bt\("((?:[^"\\]|\\.)*)"')
_PLURAL = re.compile(r'\bplural\(.*?, "([a-z ]+)"')
_NOUN = re.compile(r'noun: "([a-z]+)"')
#: A literal that reads like a text: it begins with a capital, or has two words and a sign.
_TEXT = re.compile(r'(?<!\bt\()"([A-Z][a-z]+(?: [^"]+)?|[a-z]+ [a-z]+ [a-z][^"]*)"')
#: Names, and what is no text.
NAMES = {"Avro", "Protobuf", "MessagePack", "OrbitMQ", "Spark", "Hex", "English", "Text", "Topic"}
NAMES |= {"orbitmq topic create TOPIC"}


def scripts() -> dict[str, str]:
    return {path.relative_to(STATIC).as_posix(): path.read_text() for path in STATIC.rglob("*.js")}


def texts_of_the_page() -> set[str]:
    found: set[str] = set()
    for script in scripts().values():
        found |= {json.loads(f'"{key}"') for key in _KEY.findall(script)}
        found |= {f"{{}} {word}{end}" for word in _PLURAL.findall(script) for end in ("", "s")}
        found |= {f"Search {noun}s" for noun in _NOUN.findall(script)}
    return found


def test_there_is_another_language():
    assert [path.name for path in LANGUAGES] == ["words.zh.json"]
    assert len(texts_of_the_page()) > 500


@pytest.mark.parametrize("path", LANGUAGES, ids=lambda path: path.name)
def test_every_text_of_the_page_has_a_translation_and_the_other_way_round(path):
    table = json.loads(path.read_text())

    texts = texts_of_the_page()
    assert sorted(texts - table["page"].keys()) == []
    assert sorted(table["page"].keys() - texts) == []


@pytest.mark.parametrize("path", LANGUAGES, ids=lambda path: path.name)
def test_a_translation_has_the_values_of_its_text(path):
    table = json.loads(path.read_text())

    for key, text in [*table["page"].items(), *table["told"].items()]:
        places = re.findall(r"\{(\d*)\}", text)
        count = key.count("{}")
        numbered = [int(each) for each in places if each]
        assert len(numbered) in (0, len(places)), key
        assert all(each < count for each in numbered), key
        assert numbered or len(places) <= count, key
        assert text.strip(), key


def test_no_text_of_a_script_is_left_out():
    left = {
        (name, text)
        for name, script in scripts().items()
        for text in _TEXT.findall(
            re.sub(r"^import .*$|//.*$|/\*.*?\*/", "", script, flags=re.MULTILINE)
        )
        if text not in NAMES and not _is_code(text)
    }

    assert left == set()


def _is_code(text: str) -> bool:
    """Events, headers, classes and keys."""
    return (
        re.fullmatch(
            r"[A-Z][a-zA-Z]+(Error)?|(n|opt|name|mono|body|faint|muted|small|tag|split|"
            r"bad|warn|quiet|stack|tiles|six|plain|bare|row|wide|empty|nowrap|keep|"
            r"two|three|four|note|equal|dot|read-only|grow|link|opens| )+",
            text,
        )
        is not None
    )


def sentences(path: Path) -> Iterator[str]:
    """The texts in a module, with `{}` for values; no docstrings."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            skipped |= {id(first.value)} if isinstance(first, ast.Expr) else set()
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(each) for each in ast.walk(node) if isinstance(each, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield "".join(parts).replace("GROUP", "{}").replace("TOPIC", "{}")
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.value.replace("GROUP", "{}").replace("TOPIC", "{}")


def _is_sentence(text: str) -> bool:
    return text.count(" ") >= 3 and len(re.findall(r"[a-z]+", text)) >= 4


#: Words that differ with a number.
_VARIED = re.compile(r"\b(it was|they were|was|were)\b")
#: Sentences that are put together from others; the table has them whole.
WHOLE = {
    "the members of group {} do not share topic {} evenly: {}{}",
    "{} died in the last hour, and it is not known whether {} resent",
    "{} of what it handled lately failed{}: {}",
    "{}{} died in the last hour and {} not resent; {}",
    " ({} since it was started)",
    # These are no faults.
    "clocks are compared without topic %s: %s",
    "timedatectl set-ntp true",
    "room for topics and groups",
}


@pytest.mark.parametrize("path", LANGUAGES, ids=lambda path: path.name)
def test_every_fault_has_a_translation_and_the_other_way_round(path):
    told = json.loads(path.read_text())["told"]
    faults = {text for name in FAULTS for text in sentences(SOURCES / name)}
    parts = {text for name in PARTS for text in sentences(SOURCES / name)}

    long = {text for text in faults if _is_sentence(text)}
    assert sorted(long - told.keys() - WHOLE) == []
    said = "\n".join(_VARIED.sub("{}", text) for text in faults | parts)
    for key in told:
        if not _is_sentence(key):
            continue
        chunks = [each.strip(" (:)") for each in _VARIED.sub("{}", key).split("{}")]
        assert [each for each in chunks if each not in said] == [], key


@pytest.mark.parametrize("path", LANGUAGES, ids=lambda path: path.name)
@pytest.mark.parametrize("kinds", [Pace, PipelineState, FindingKind, TopicKind])
def test_every_state_has_a_translation(path, kinds):
    told = json.loads(path.read_text())["told"]

    assert [each.value for each in kinds if each.value not in told] == []


@pytest.mark.parametrize("path", LANGUAGES, ids=lambda path: path.name)
def test_every_kind_of_fault_has_a_translation(path):
    told = json.loads(path.read_text())["told"]
    source = (SOURCES / "console" / "faults.py").read_text()

    rules = re.findall(r'_Rule\(\s*Check\.\w+,\s*"([^"]+)"', source)
    bad = re.findall(r'_bad\(\s*Check\.\w+,\s*"([^"]+)"', source)
    named = re.findall(r'\bkind=f?"([^"{]+)"', source)
    assert len(rules) >= 5
    assert len(bad) >= 8
    assert [each for each in {*rules, *bad, *named} if each not in told and each.strip()] == []
    assert Check.DEAD_LETTERS.value in told
