"""The one base class of everything that OrbitMQ raises on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class OrbitError(Exception):
    """Something that the caller can act on.

    Subclasses differ by what the caller would do next, not by where they arise. The text is one
    sentence with the remedy when there is one; the facts are attributes as well.
    """

    #: Whether the same call may succeed later without any change by the caller.
    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Callable[..., OrbitError], tuple[object, ...]]:
        # Python would call the class with its text alone, which few subclasses can be made of.
        return _unpickle, (type(self), self.args, self.__dict__)


class SettingError(OrbitError):
    """A setting has a value that cannot work. The text names it and says what is allowed."""


def _unpickle(kind: type[OrbitError], args: tuple[Any, ...], facts: dict[str, Any]) -> OrbitError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error
