"""What a name server keeps, and how it reads what people wrote."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.errors import SettingError
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import CONFIG_FILE, KV_FILE, FileUnusable, NameServerSettings
from orbitmq.wire.javajson import format_properties, parse_properties

plain = st.text(
    st.characters(
        codec="utf-8", exclude_characters="\\\r\n=:#! \t\f", exclude_categories=["C", "Z"]
    ),
    min_size=1,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scan_interval", 0.0), ("heartbeat_timeout", -1.0), ("wait_for_service", -1.0)],
)
def test_a_setting_that_cannot_work_is_named(name, value):
    with pytest.raises(SettingError, match=name):
        NameServerSettings(**{name: value})  # all floats


async def test_a_damaged_file_stops_the_start_with_its_name(tmp_path):
    for name, content in ((KV_FILE, b'{"configTable":'), (CONFIG_FILE, b"\xff\xfe")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(FileUnusable, match=name):
            await NameServer(NameServerSettings(home=tmp_path)).start()
        path.unlink()


def test_properties_are_read_as_java_reads_them():
    text = (
        "# a comment\n! another\n\n a = 1 \nb:2\nc 3\nd\n"
        "long=one,\\\n   two\nescaped\\=key=v\\u0061l\\tue\npath=c:\\\\x\r\nlast=end\\"
    )

    assert parse_properties(text) == {
        "a": "1 ",
        "b": "2",
        "c": "3",
        "d": "",
        "long": "one,two",
        "escaped=key": "val\tue",
        "path": "c:\\x",
        "last": "end",
    }


@settings(deadline=None)
@given(values=st.dictionaries(plain, plain))
def test_what_is_written_is_read_back(values):
    assert parse_properties(format_properties(values)) == values
