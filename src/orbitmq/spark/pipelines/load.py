"""Pipelines from files: Python that defines one, or TOML that says how to run one."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from orbitmq.spark.internals import cloudpickle
from orbitmq.spark.pipelines.builtin import READY, ready
from orbitmq.spark.pipelines.definition import Definition, PipelineRefused

#: What a Python file calls its pipeline.
FUNCTION: Final = "pipeline"


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a TOML file."""

    #: A built-in pipeline, or a Python file beside this one.
    pipeline: str
    name: str | None = None
    master: str | None = None
    checkpoint: str | None = None
    once: bool = False
    trigger: str | float | None = None
    name_server: str | None = None
    console: str | None = None
    options: dict[str, Any] = {}
    #: Of Spark.
    settings: dict[str, str | int | float | bool] = {}


def load(word: str) -> tuple[Definition, Plan]:
    """The pipeline of an argument: a file, or the name of a built-in pipeline.

    Raises `PipelineRefused`.
    """
    path = Path(word).expanduser()
    if path.suffix == ".toml":
        return _of_toml(path)
    if path.suffix == ".py":
        return _of_python(path), Plan(pipeline=word)
    if word in READY:
        return ready(word), Plan(pipeline=word)
    raise PipelineRefused(
        f"{word!r} is neither a Python file (.py), nor a TOML file (.toml), nor a ready pipeline; "
        f"ready are: {', '.join(READY)}"
    )


def _of_toml(path: Path) -> tuple[Definition, Plan]:
    try:
        plan = msgspec.toml.decode(_read(path), type=Plan)
    except msgspec.MsgspecError as error:
        raise PipelineRefused(f"{path} does not say how to run a pipeline: {error}") from error
    except UnicodeDecodeError as error:
        raise PipelineRefused(f"{path} is not a text: {error}") from error
    if plan.pipeline.endswith(".py"):
        return _of_python(path.parent / plan.pipeline), plan
    if plan.pipeline not in READY:
        raise PipelineRefused(
            f"{path}: pipeline must be a Python file (.py) or one of {', '.join(READY)}; "
            f"got {plan.pipeline!r}"
        )
    return ready(plan.pipeline), plan


def _of_python(path: Path) -> Definition:
    source = _read(path)
    if path.stem in sys.stdlib_module_names:
        raise PipelineRefused(
            f"{path} has the name of a module of Python, which it would hide from Spark's workers; "
            "give it another name"
        )
    module = _imported(path, hashlib.sha256(source).hexdigest()[:8])
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise PipelineRefused(f"{path} defines no pipeline: write `def {FUNCTION}(run): ...` in it")
    definition = Definition.of(function, path.stem, path)
    about = definition.about or (module.__doc__ or "").strip()
    return replace(definition, about=about)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PipelineRefused(f"{path} cannot be read: {error.strerror or error}") from error


def _imported(path: Path, mark: str) -> ModuleType:
    """The file as a module whose functions are pickled by value, since workers cannot import it."""
    name = f"orbitmq_pipeline_{path.stem.replace('-', '_')}_{mark}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PipelineRefused(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # As `python FILE` has it: what lies beside the file can be imported.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # A file of the user may raise anything.
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        places = [each.lineno for each in frames if each.filename == str(path)]
        line = f", line {places[-1]}" if places else ""
        raise PipelineRefused(f"{path}{line}: {type(error).__name__}: {error}") from error
    with contextlib.suppress(ImportError):
        cloudpickle().register_pickle_by_value(module)
    return module
