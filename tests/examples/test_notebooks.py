"""The notebooks, run in a kernel as Jupyter would, from a clean start; no cell may fail."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
#: Of one cell; that of the first one starts Spark.
CELL_DEADLINE = 200


def run_notebook(path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The notebook with its outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own parts
        import nbformat
        from nbclient import NotebookClient

        monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setenv("PYTHONWARNINGS", "ignore")
        for name in [each for each in os.environ if each.startswith("ORBITMQ_")]:
            monkeypatch.delenv(name)
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, timeout=CELL_DEADLINE, startup_timeout=CELL_DEADLINE)
        client.execute(cwd=str(folder))
        return notebook


def printed(notebook: Any) -> str:
    """All that its cells wrote, in order."""
    return "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


@pytest.mark.feature("P7")
@pytest.mark.timeout(500)
def test_the_session_with_orders_ends_with_every_order_billed_once(monkeypatch, tmp_path):
    notebook = run_notebook(NOTEBOOKS / "orders.ipynb", monkeypatch, tmp_path)

    said = printed(notebook)
    assert "120 orders, 60 of them since" in said
    assert "80 with the filter at the broker, 80 with the filter in Spark" in said
    assert re.search(r"\| *gold\| *16\|", said)
    assert re.search(r"\| *0\| *114\|\n\| *1\| *3\|", said), "three were billed at the second try"
    assert "3 went back to be tried again, 3 were given up" in said
    assert said.count("the bank knows no account 'unknown'") >= 3
    assert re.search(r"\|3 *\|3 *\|0 *\|0 *\|", said), "three letters were sent again"
    assert "3 letters were sent before and are left alone" in said
    assert said.splitlines()[-1] == "True"


def test_notebooks_are_kept_without_outputs():
    import json

    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        kept = [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
        assert kept == [], path.name
