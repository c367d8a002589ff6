"""How many planted mistakes the tests find: `python -m tools.mutants --contexts FILE`.

A seeded sample of places in `src` is changed, one at a time, in a copy: a comparison is turned
around, a condition negated, a number raised. The tests that run the changed line are started until
the first one fails. FILE is the data of a coverage run with one context for each test:

    python -m pytest --cov=orbitmq --cov-context=test ...    (pytest-cov; not part of the lock)
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Tests that are tried on a changed line: the ones that run the fewest lines come first.
TESTS = 30
#: Seconds for the tests of one change; a change that makes them hang counts as found.
LIMIT = 240.0

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed expression: where it is, and what stands there instead."""

    path: Path
    line: int
    before: str
    after: str
    span: tuple[int, int]

    def __str__(self) -> str:
        where = self.path.relative_to(ROOT / "src")
        return f"{where}:{self.line}: {self.before} -> {self.after}"

    def text(self) -> bytes:
        whole = self.path.read_bytes()
        start, end = self.span
        return whole[:start] + f"({self.after})".encode() + whole[end:]


def mutants_of(path: Path) -> Iterator[Mutant]:
    text = path.read_bytes()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node, statement in _expressions(ast.parse(text), 1):
        after = _changed(node)
        if after is None or not isinstance(node, ast.expr) or node.end_lineno is None:
            continue
        end = starts[node.end_lineno - 1] + (node.end_col_offset or 0)
        span = (starts[node.lineno - 1] + node.col_offset, end)
        yield Mutant(path, statement, ast.unparse(node), after, span)


def _expressions(node: ast.AST, statement: int) -> Iterator[tuple[ast.AST, int]]:
    """Every node with the line where its statement begins: coverage counts by statements."""
    for child in ast.iter_child_nodes(node):
        line = child.lineno if isinstance(child, ast.stmt | ast.ExceptHandler) else statement
        yield child, line
        yield from _expressions(child, line)


def _changed(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            return f"{left} {COMPARISONS[type(op)]} {right}"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            return word.join(f"({ast.unparse(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ast.unparse(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left, right=right):
            if any(isinstance(side, ast.Constant | ast.JoinedStr) for side in (left, right)):
                return None  # most are texts
            sign = "-" if isinstance(op, ast.Add) else "+"
            return f"{ast.unparse(left)} {sign} ({ast.unparse(right)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"{ast.unparse(orelse)} if {ast.unparse(test)} else {ast.unparse(body)}"
        case _:
            return None


class Contexts:
    """Which tests run a line, and how much else they run."""

    def __init__(self, file: Path) -> None:
        self._data = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        self._names = dict(self._data.execute("SELECT id, context FROM context"))
        rows = self._data.execute("SELECT context_id, count(*) FROM arc GROUP BY context_id")
        self._sizes = {self._test(context): count for context, count in rows}
        self._files = {
            str(path).rpartition("/src/")[2]: number
            for number, path in self._data.execute("SELECT id, path FROM file")
        }

    def tests_of(self, path: Path, line: int) -> list[str]:
        number = self._files.get(str(path.relative_to(ROOT / "src")))
        rows = self._data.execute(
            "SELECT DISTINCT context_id FROM arc WHERE file_id = ? AND abs(tono) = ?",
            (number, line),
        )
        found = {self._test(context) for (context,) in rows} - {""}
        return sorted(found, key=lambda test: self._sizes[test])[:TESTS]

    def _test(self, context: int) -> str:
        return str(self._names[context]).partition("|")[0]


def found(mutant: Mutant, tests: Sequence[str], folder: Path) -> bool:
    """Whether one of the tests fails, in a copy of the sources that has the change."""
    sources = folder / "src"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__"))
    (sources / mutant.path.relative_to(ROOT / "src")).write_bytes(mutant.text())
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--timeout=60", *tests]
    environment = os.environ | {"PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    contexts = Contexts(asked.contexts)
    paths = sorted((ROOT / "src").rglob("*.py"))
    places = [mutant for path in paths for mutant in mutants_of(path)]
    sample = random.Random(asked.seed).sample(places, asked.count)  # noqa: S311 - repeatable
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, mutant in enumerate(sample, 1):
            begun = time.monotonic()
            tests = contexts.tests_of(mutant.path, mutant.line)
            is_found = bool(tests) and found(mutant, tests, Path(folder))
            killed += is_found
            verdict = "found" if is_found else "SURVIVED" if tests else "NOT RUN by a test"
            took = time.monotonic() - begun
            print(f"{number:3}/{asked.count} {verdict:17} {took:5.0f} s  {mutant}", flush=True)
    print(f"{killed} of {asked.count} changes were found by the tests, seed {asked.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
