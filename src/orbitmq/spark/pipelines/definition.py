"""A pipeline as a function: its options are its keyword-only parameters.

    def pipeline(run, *, topic: Annotated[str, "The topic to read."], limit: int = 100): ...

The type, the default and the text beside the type are the whole description of an option.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from orbitmq.errors import OrbitError
from orbitmq.parsing import Kind, NotAllowed, kind_of

#: Stands for the default of an option that has none.
REQUIRED: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a pipeline."""

    name: str
    about: str
    kind: Kind
    default: Any
    #: Whether it names topics that must exist.
    is_present: bool = False
    #: Whether its value is a group whose dead letters are read.
    is_group: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def default_text(self) -> str | None:
        """The default as text; None without one."""
        if self.is_required or self.default is None:
            return None
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default)


@dataclass(frozen=True, slots=True)
class Definition:
    """A pipeline that can be run."""

    name: str
    function: Callable[..., Any]
    about: str
    options: tuple[Option, ...]
    #: The file that defines it; None for a built-in one.
    file: Path | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, file: Path | None = None) -> Definition:
        """Raises `PipelineRefused` for a function that is no pipeline."""
        where = f"{file}: " if file else ""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise PipelineRefused(f"{where}{name} is not a function: {error}") from error
        places = [each for each in parameters if each.kind in _PLACES]
        if len(places) != 1 or any(each.kind in _STARRED for each in parameters):
            raise PipelineRefused(
                f"{where}a pipeline is a function with one parameter, the run, and options that "
                f"are given by name, as in `def pipeline(run, *, topic: str = 'orders')`; "
                f"{name} is called with {inspect.signature(function)}"
            )
        options = tuple(_option(each, function, where) for each in parameters if each not in places)
        about = inspect.getdoc(function) or ""
        return cls(name, function, about, options, file)

    def values(self, given: Mapping[str, object]) -> dict[str, Any]:
        """Options as values, from text or TOML. Raises `PipelineRefused`."""
        known = {option.name: option for option in self.options}
        for name in given:
            if name.replace("-", "_") not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; do you mean {close[0]}?" if close else f"; there are: {self._names()}"
                raise PipelineRefused(f"pipeline {self.name!r} has no option {name!r}{hint}")
        found: dict[str, Any] = {}
        for name, value in given.items():
            option = known[name.replace("-", "_")]
            try:
                found[option.name] = option.kind.read(value)
            except NotAllowed as error:
                raise PipelineRefused(
                    f"option {option.name} of pipeline {self.name!r} must be "
                    f"{error.allowed}; got {value!r}"
                ) from None
        missing = [
            each.name for each in self.options if each.is_required and each.name not in found
        ]
        if missing:
            raise PipelineRefused(
                f"pipeline {self.name!r} needs the option(s) {', '.join(missing)}; give them as "
                f"in --option {missing[0]}=..."
            )
        return found

    def topics(self, values: Mapping[str, Any]) -> list[str]:
        """The topics that a run with these values needs, as its options declare."""
        texts = [values.get(each.name, each.default) for each in self.options if each.is_present]
        return [name.strip() for text in texts if isinstance(text, str) for name in text.split(",")]

    def groups(self, values: Mapping[str, Any]) -> list[str]:
        """The groups whose dead letters a run with these values reads, as its options declare."""
        names = [values.get(each.name, each.default) for each in self.options if each.is_group]
        return [name for name in names if isinstance(name, str)]

    def _names(self) -> str:
        return ", ".join(option.name for option in self.options) or "none"


_PLACES: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STARRED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _option(parameter: inspect.Parameter, function: Callable[..., Any], where: str) -> Option:
    declared = _declared(parameter, function, where)
    about, is_present, is_group = "", False, False
    if typing.get_origin(declared) is typing.Annotated:
        declared, *notes = typing.get_args(declared)
        about = next((note for note in notes if isinstance(note, str)), "")
        is_present, is_group = PRESENT in notes, LETTERS in notes
    try:
        kind = kind_of(declared)
    except TypeError as error:
        raise PipelineRefused(f"{where}option {parameter.name}: {error}") from None
    return Option(parameter.name, about, kind, parameter.default, is_present, is_group)


def _declared(parameter: inspect.Parameter, function: Callable[..., Any], where: str) -> Any:
    """The type of one parameter; others may have types that only a type checker imports."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return str
    if not isinstance(annotation, str):
        return annotation
    names = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {}
    try:
        return eval(annotation, {**vars(typing), "Path": Path, **names})  # noqa: S307  # its own code
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise PipelineRefused(
            f"{where}the type of option {parameter.name}, {annotation!r}, is not known: {error}"
        ) from error


class PipelineRefused(OrbitError):
    """A file, an option or a result is not that of a pipeline; nothing was started."""


class PipelineBroken(OrbitError):
    """A pipeline failed and is not started again."""

    def __init__(self, name: str, problem: str, *, restarts: int) -> None:
        self.name = name
        self.problem = problem
        self.restarts = restarts
        again = f" after {restarts} restart(s)" if restarts else ""
        super().__init__(f"pipeline {name!r} failed{again}: {problem}")


# The options that pipelines which read a topic share.


#: Marks an option with topics that must exist before the start.
PRESENT: Final = object()
#: Marks an option with a group whose dead letters are read.
LETTERS: Final = object()
Topic: TypeAlias = Annotated[str, "The topic to read; several with commas between them.", PRESENT]
Group: TypeAlias = Annotated[
    str | None, "The group whose progress is reported; by default named after the pipeline."
]
Tags: TypeAlias = Annotated[str | None, "Only messages with one of these tags, as in a || b."]
Start: TypeAlias = Annotated[
    str, "Where the first run begins: earliest, latest, group, a time or an offset."
]
Most: TypeAlias = Annotated[int | None, "Messages that one batch takes at most."]


def wanted(start: str, tags: str | None, max_per_batch: int | None) -> dict[str, str]:
    """These options as options of the source, which checks them."""
    options = {}
    options["startingOffsets"] = start
    if tags is not None:
        options["subExpression"] = tags
    if max_per_batch is not None:
        options["maxOffsetsPerTrigger"] = str(max_per_batch)
    return options


def named_after(pipeline: str, topic: str, group: str | None) -> str:
    """The group of a pipeline, by default a valid name made of pipeline and topic."""
    return group or f"{pipeline}-{topic.replace(',', '-').replace('%', '_')}"
