"""The lag of all groups out of one answer: the fast way reads what the general one does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.groups import decode_lags, lags_of
from orbitmq.wire.bodies import ConsumeStats, ConsumeStatsList, MessageQueue, QueueProgress
from orbitmq.wire.codes import BodyError
from orbitmq.wire.javajson import decode_body, encode_body

#: Names with quotes, blanks and backslashes cannot be, and must not be misread.
names = st.text(st.sampled_from('abc%_-" \\{}:1'), min_size=1, max_size=6)
offsets = st.integers(0, 2**62)
queues = st.builds(MessageQueue, broker_name=names, queue_id=st.integers(0, 9), topic=names)
places = st.builds(QueueProgress, broker_offset=offsets, consumer_offset=offsets)
stats = st.builds(
    ConsumeStats,
    consume_tps=st.floats(0, 1e6),
    offset_table=st.dictionaries(queues, places, max_size=4),
)
tables = st.builds(
    ConsumeStatsList,
    broker_addr=st.just("127.0.0.1:1"),
    consume_stats_list=st.lists(
        st.dictionaries(names, st.lists(stats, max_size=3).map(tuple), max_size=2), max_size=4
    ).map(tuple),
)


@given(tables)
def test_both_ways_read_the_same(table):
    body = encode_body(table)

    general = decode_body(ConsumeStatsList, body)

    assert decode_lags(body) == {
        group: lags_of(parts)
        for entry in general.consume_stats_list
        for group, parts in entry.items()
    }


def test_other_dialects_are_read_as_well():
    quoted = (
        b'{"consumeStatsList":[{"g":[{"offsetTable":{"{\\"brokerName\\":\\"b\\",\\"queueId\\":0,'
        b'\\"topic\\":\\"T\\"}":{"brokerOffset":5,"consumerOffset":2}}}]}]}'
    )
    spaced = (
        b'{"consumeStatsList":[{"g":[{"offsetTable":{{"topic":"T","brokerName":"b","queueId":0}:'
        b'{"brokerOffset":"5","consumerOffset":2}}}]}]}'
    )

    for body in (quoted, spaced):
        assert decode_lags(body)["g"]["T"].lag == 3
    assert decode_lags(b"") == {}
    with pytest.raises(BodyError):
        decode_lags(b"[nonsense")
