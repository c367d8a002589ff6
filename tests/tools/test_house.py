"""The structural figures of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import house


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_lines_of_code_leave_out_blanks_comments_and_docstrings(tmp_path):
    text = (
        '"""Head.\n\nMore.\n"""\n\n# a comment\nX = (\n    1,\n)\n'
        '\n\ndef f():\n    """Docs."""\n    return X  # why\n'
    )
    write(tmp_path, module=text)

    (module,) = house.modules_in(tmp_path)

    assert module.lines == 5
    assert module.head == ["Head.", "", "More."]


def test_a_fragment_has_one_importer_which_is_its_neighbour(tmp_path):
    write(
        tmp_path,
        **{
            "orbitmq.a.part": "X = 1\n",
            "orbitmq.a.whole": "from orbitmq.a.part import X\nfrom orbitmq.b import near\n",
            "orbitmq.b.near": "Y = 1\n",
            "orbitmq.b.shared": "Z = 1\n",
            "orbitmq.b.first": "from orbitmq.b.shared import Z\n",
            "orbitmq.b.second": "import orbitmq.b.shared\n",
        },
    )

    assert house.fragments(house.modules_in(tmp_path)) == ["orbitmq.a.part"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from orbitmq.b.other import _hidden", 1),
        ("from orbitmq.b.other import open_one, _hidden", 1),
        ("from orbitmq.a.neighbour import _hidden", 0),
        ("from orbitmq.b.other import open_one", 0),
        ("from typing import _Final", 0),
    ],
)
def test_private_names_stay_in_their_package(tmp_path, line, found):
    write(tmp_path, **{"orbitmq.a.module": f"{line}\n"})

    assert len(house.private_imports(house.modules_in(tmp_path))) == found


def test_an_exceeded_limit_is_named_and_fails(tmp_path, monkeypatch, capsys):
    write(tmp_path / "src", a="X = 1\n", b="Y = 1\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)

    assert house.main(["--check"]) == 0
    monkeypatch.setattr(house, "LIMITS", {**house.LIMITS, "modules": 1})
    assert house.main(["--check"]) == 1
    assert "too many modules: 2, limit 1" in capsys.readouterr().err
