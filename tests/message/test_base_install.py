"""A base install has neither numpy nor pyarrow nor the codecs, and can still use messages."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
for name in ("numpy", "pyarrow", "lz4", "zstandard", "isal", "lark"):
    sys.modules[name] = None
import orbitmq.message as message
record = message.StoredMessage.build(topic="T", stored_body=b"hi", properties={"TAGS": "A"})
(again,) = message.decode_messages(record.encode())
print(again.body.decode(), again.tags, message.tag_code(again.tags), len(message.__all__))
"""


def test_messages_are_read_and_written_without_any_extra():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stderr == ""
    assert done.stdout.split()[:3] == ["hi", "A", "65"]
