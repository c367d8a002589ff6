"""`orbitmq console` where its extra is not installed."""

from __future__ import annotations

import os

from tests.support.command import run


def test_without_uvicorn_the_remedy_is_named_and_nothing_is_called_a_mistake(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('hidden', name='uvicorn')\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    ran = run("console", cwd=tmp_path, env={"PYTHONPATH": path})

    assert ran.returncode == 1
    assert ran.stderr == (
        "orbitmq: the console needs uvicorn, which is not installed; "
        "pip install 'orbitmq[console]'\n"
    )
