"""Writes docs/settings.md from the classes that hold the settings: `python -m tools.settings_docs`.

`--check` only says whether the page is current; a test does the same.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from orbitmq.cli.settings import SECTIONS, Setting, all_settings, allowed, comments_of, describe
from orbitmq.console.webhooks import IN_FILE, AlertSettings, FixedSilence, Webhook, kind_in_file
from orbitmq.parsing import as_json
from tools.madepages import keep_current

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

_HEAD = """\
# Settings

This page is made by `python -m tools.settings_docs` from the code; edit the comments beside the
settings there, not the page. `orbitmq config show --describe` says the same about an installed
version, with the values in force.

A setting can be given, from the weakest to the strongest, in a TOML file (`--config FILE` or
`ORBITMQ_CONFIG`), as an environment variable, with `--set PATH=VALUE`, or with the flag that stands
for it. The variable of a setting is its path in capitals, with `ORBITMQ_` before it and `_` for
every full stop: `broker.store.flush.policy` is `ORBITMQ_BROKER_STORE_FLUSH_POLICY`. In a file it is

```toml
[broker.store.flush]
policy = "sync"
```

Durations are seconds, sizes are bytes. A name in brackets, such as `flushDiskType`, is RocketMQ's.
"""

_ABOUT = {
    "broker": "A broker",
    "namesrv": "A name server",
    "up": "What `orbitmq up` starts",
    "log": "Logs",
    "run": "The process",
}
#: Defaults that depend on the machine.
_ON_THIS_MACHINE = {"broker.store.read.memory_distance": "40 % of the memory"}


def main(arguments: Sequence[str] | None = None) -> int:
    return keep_current(PAGE, page, "tools.settings_docs", __doc__, arguments)


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for section, about in _ABOUT.items():
        parts.append(f"\n## {about} (`{section}`)\n")
        own = [each for each in all_settings().values() if each.section == section]
        own.sort(key=_depth)
        for group, settings in groupby(own, _group):
            if group != section:
                parts.append(f"\n### `{group}`\n")
            parts.append("\n| setting | default | may be | what it is |\n|---|---|---|---|\n")
            parts += [_row(setting) for setting in settings]
    return "".join((*parts, *_alerts()))


_ALERTS = """
## Alerts of a console (`orbitmq console --alerts FILE`)

A TOML file of its own, which only the console reads, because the addresses in it are secrets.
[The console](console.md#alerts) has an example. Durations are seconds or texts such as `5m`.
"""
#: The tables of the file and the classes that hold them.
_TABLES: Mapping[str, type] = {
    "": AlertSettings,
    "[webhooks.NAME]": Webhook,
    "[[silences]]": FixedSilence,
}


def _alerts() -> Iterator[str]:
    yield _ALERTS
    for table, kind in _TABLES.items():
        if table:
            yield f"\n### `{table}`\n"
        yield "\n| setting | default | may be | what it is |\n|---|---|---|---|\n"
        comments, declared = comments_of(kind), get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in comments:
                may_be = kind_in_file(declared[field.name]).allowed
                needed = field.default is dataclasses.MISSING
                default = "" if needed or field.default is None else _code(field.default)
                name = f"`{IN_FILE.get(field.name, field.name)}`"
                cells = (name, default, may_be, comments[field.name])
                yield f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _code(value: Any) -> str:
    return f"`{json.dumps(as_json(value))}`"


def _group(setting: Setting) -> str:
    return setting.path.rpartition(".")[0]


def _depth(setting: Setting) -> tuple[int, str]:
    """Those of the section itself first, in their order; then group by group."""
    group = _group(setting)
    return (0, "") if group == setting.section else (1, group)


def _row(setting: Setting) -> str:
    described = describe(setting)
    name = setting.path.rpartition(".")[2]
    cells = (f"`{name}`", _default(setting), allowed(described), described.meaning)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _default(setting: Setting) -> str:
    if setting.path in _ON_THIS_MACHINE:
        return _ON_THIS_MACHINE[setting.path]
    value: Any = SECTIONS[setting.section]
    for step in setting.fields:
        if value is None:
            # The whole part is not there unless something of it is set.
            return ""
        value = getattr(value, step)
    return "" if value is None else _code(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
