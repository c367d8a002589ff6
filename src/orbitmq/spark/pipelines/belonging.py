"""Which run of a pipeline a checkpoint belongs to.

A checkpoint says how far a pipeline has come from one place to another. Given to a run between
other places it would say that all is done, and nothing would happen. So the places are kept beside
it. What may change between two runs of the same pipeline (a rate, a query) is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from orbitmq.spark.pipelines.errors import PipelineRefused

#: The options that name where rows come from and where they go.
PLACES: Final = ("topic", "path", "into")
_FILE: Final = "orbitmq-places.json"


def check_belongs(checkpoint: str, values: Mapping[str, object]) -> None:
    """Refuse a checkpoint of a run between other places; one on another machine is not read."""
    file = _file(checkpoint)
    if file is None or not file.exists():
        return
    kept = json.loads(file.read_text(encoding="utf-8"))
    wanted = _places(values)
    for name in PLACES:
        if kept.get(name) != wanted.get(name):
            raise PipelineRefused(
                f"the checkpoint {checkpoint} belongs to a run with {_shown(name, kept)}, and this "
                f"one has {_shown(name, wanted)}; give this one its own with --name or --checkpoint"
            )


def keep_places(checkpoint: str, values: Mapping[str, object]) -> None:
    """Note the places of a run that begins."""
    file = _file(checkpoint)
    if file is not None and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_places(values)) + "\n", encoding="utf-8")


def _file(checkpoint: str) -> Path | None:
    local = checkpoint.removeprefix("file://")
    return None if "://" in local else Path(local) / _FILE


def _places(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(values[name]) for name in PLACES if values.get(name) is not None}


def _shown(name: str, places: Mapping[str, str]) -> str:
    return f"{name}={places[name]}" if name in places else f"no {name}"
