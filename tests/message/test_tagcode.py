"""The code of tags in a consume queue."""

from __future__ import annotations

import pytest

from orbitmq.message.record import tag_code


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        ("A", 65),
        ("TagA", 2598919),
        ("hello world", 1794106052),
        ("订单", 1129459),
        ("a || b", -1484572639),
        ("polygenelubricants", -2147483648),
        (None, 0),
        ("", 0),
    ],
)
def test_codes_are_javas_hashes_with_their_sign(tags, code):
    assert tag_code(tags) == code
