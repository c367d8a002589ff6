"""The one base class of everything that OrbitMQ raises on purpose."""

from __future__ import annotations

from typing import ClassVar


class OrbitError(Exception):
    """Something that the caller can act on.

    Subclasses differ by what the caller would do next, not by where they arise. The text is one
    sentence with the remedy when there is one; the facts are attributes as well.
    """

    #: Whether the same call may succeed later without any change by the caller.
    retriable: ClassVar[bool] = False
