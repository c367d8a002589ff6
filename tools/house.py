"""Structural figures of the code, and their limits: `python -m tools.house [--check]`.

The limits keep modules to one concept each and the code to a size that one person can know. A
limit may be raised in the commit that needs it, with the reason. It is lowered when code shrinks.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: The largest value that is allowed.
LIMITS: Mapping[str, int] = {
    "modules": 228,
    "modules with one importer, in their own package": 24,
    "modules named by a gerund": 2,
    "lines of code": 82_300,
    "lines of code in the client": 22_850,
    "lines of tests": 74_900,
    "module heads over 12 lines": 0,
    "imports of private names from another package": 0,
}

#: Names of the field that end like one.
NO_GERUNDS = frozenset({"testing", "remoting", "tracing"})
LONGEST_HEAD = 12

_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file: its dotted name, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def package(self) -> str:
        """The package whose member the module is."""
        return self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        """Its lines of code; counting them takes longer than reading the file."""
        return lines_of_code(self.text, self.tree)

    @property
    def head(self) -> list[str]:
        return (ast.get_docstring(self.tree) or "").splitlines()


@functools.cache
def modules_in(folder: Path) -> list[Module]:
    """Every module below a folder, by name."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = list(path.relative_to(folder).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        text = path.read_text()
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, text, ast.parse(text), is_package))
    return found


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(tree))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.body and isinstance(first := node.body[0], ast.Expr):
            value = first.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def importers_of(modules: Sequence[Module]) -> Mapping[str, set[str]]:
    """For each module, the modules that import it or a name of it."""
    names = {module.name for module in modules}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for target in _imported(module.tree):
            if target in names and target != module.name:
                importers[target].add(module.name)
    return importers


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_imports(modules: Sequence[Module]) -> list[str]:
    """Imports of a name with a leading underscore from another package."""
    found = []
    for module in modules:
        own = module.name if module.is_package else module.package
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "orbitmq"
            ):
                continue
            source = node.module or ""
            if source.rpartition(".")[0] == own or source == own:
                continue
            found += [
                f"{module.name}:{node.lineno} imports {alias.name} from {source}"
                for alias in node.names
                if alias.name.startswith("_") and not alias.name.startswith("__")
            ]
    return found


def package_imports(root: Path = ROOT) -> set[tuple[str, str]]:
    """Which package or top module below `orbitmq` imports which other one."""
    found = set()
    for module in modules_in(root / "src"):
        for target in _imported(module.tree):
            importer, imported = module.name.split("."), target.split(".")
            if importer[0] == imported[0] == "orbitmq" and len(importer) > 1 < len(imported):
                found.add((importer[1], imported[1]))
    return {(a, b) for a, b in found if a != b}


def fragments(modules: Sequence[Module]) -> list[str]:
    """Modules that one module alone imports, and which is a neighbour in the same package."""
    importers = importers_of(modules)
    found = []
    for module in modules:
        users = importers[module.name]
        if not module.is_package and len(users) == 1:
            (user,) = users
            if user.rpartition(".")[0] == module.package:
                found.append(module.name)
    return found


def measure(root: Path = ROOT) -> dict[str, int]:
    """All figures that have a limit, in the order of the limits."""
    source = modules_in(root / "src")
    files = [module for module in source if not module.is_package]
    lines = {module.name: module.lines for module in source}
    values = (
        len(files),
        len(fragments(source)),
        sum(_is_gerund(module.name) for module in files),
        sum(lines.values()),
        sum(count for name, count in lines.items() if name.startswith("orbitmq.client")),
        sum(module.lines for module in modules_in(root / "tests")),
        sum(len(module.head) > LONGEST_HEAD for module in source),
        len(private_imports(source)),
    )
    return dict(zip(LIMITS, values, strict=True))


def _is_gerund(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("ing") and last not in NO_GERUNDS


def packages(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Modules and lines of code of each package."""
    modules: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for module in modules_in(root / "src"):
        package = ".".join(module.name.split(".")[:2])
        modules[package] += not module.is_package
        lines[package] += module.lines
    return {package: (modules[package], lines[package]) for package in sorted(lines)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--check", action="store_true", help="print only exceeded limits")
    parser.add_argument("--fragments", action="store_true", help="list modules with one importer")
    options = parser.parse_args(arguments)
    if options.fragments:
        print("\n".join(fragments(modules_in(ROOT / "src"))))
        return 0
    figures = measure(ROOT)
    exceeded = [name for name, value in figures.items() if value > LIMITS[name]]
    if not options.check:
        print(f"{'':50} {'now':>8} {'limit':>8}")
        for name, value in figures.items():
            print(f"{name:50} {value:8,} {LIMITS[name]:8,}")
        print(f"\n{'package':50} {'modules':>8} {'lines':>8}")
        for package, (modules, lines) in packages(ROOT).items():
            print(f"{package:50} {modules:8,} {lines:8,}")
    for name in exceeded:
        print(f"too many {name}: {figures[name]:,}, limit {LIMITS[name]:,}", file=sys.stderr)
    if private := private_imports(modules_in(ROOT / "src")):
        print("\n".join(private), file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    raise SystemExit(main())
