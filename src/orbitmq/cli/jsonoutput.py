"""What `--json` prints: one object per line, whose fields are those of a documented class.

Times (`..._at`) are seconds since 1970, durations (`..._seconds`) seconds, sizes bytes. A field
without a value is `null`, not missing. Fields are added in later versions, not renamed or removed.
A body that is UTF-8 is in `body`, any other in `body_base64`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

#: Of a field that says something else than it is, and is kept beside its successor for whoever
#: reads it: no page has it.
OLD_NAME: Final[Mapping[str, bool]] = MappingProxyType({"is_old": True})


def line_of(record: Any) -> str:
    """A record as one line of JSON."""
    return msgspec.json.encode(record).decode()


def body_fields(body: bytes) -> tuple[str | None, str | None]:
    """The fields `body` and `body_base64`."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(body).decode()
