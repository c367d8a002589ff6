"""Arguments that are checked alike everywhere."""

from __future__ import annotations

from orbitmq.client.errors import BadRequest


def whole_number(name: str, value: object, least: int, most: int = 2**31 - 1) -> int:
    """A whole number within bounds. Raises `BadRequest`."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    bounds = f"from {least} on" if most >= 2**31 - 1 else f"from {least} to {most}"
    raise BadRequest(f"{name} must be a whole number {bounds}, got {value!r}")


def positive(name: str, value: object) -> float:
    """A number above 0. Raises `BadRequest`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise BadRequest(f"{name} must be a number above 0, got {value!r}")
