"""The fields of what `--json` prints are promised: none is renamed or removed."""

from __future__ import annotations

from pathlib import Path

from tools.cli_docs import commands, describe_record

PROMISED = Path(__file__).parent.parent / "data" / "cli-json-fields.txt"


def test_no_promised_field_is_renamed_or_removed():
    printed = {
        f"{command.name}: {field.path}"
        for command in commands()
        if command.prints is not None
        for field in describe_record(command.prints)
    }

    assert printed == set(PROMISED.read_text().splitlines())
