"""Pull requests from a template: the same bytes as those of the ordinary encoder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.connections import Credentials, RangeFilter
from orbitmq.client.ranges.read import _COUNT_MARK, _OFFSET_MARK, _OPAQUE_MARK, ANSWER_BYTES, Pulls
from orbitmq.client.routes import Queue
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, decode_command, encode_command, is_signed_by
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import PullMessageRequest

texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["%d %b %%", str(_OFFSET_MARK), f"a {_COUNT_MARK}", f"{_OPAQUE_MARK}"]),
)


def decoded(encoded: bytes) -> Command:
    (frame,) = FrameReader().feed(encoded)
    return decode_command(frame)


@given(
    group=texts,
    topic=texts,
    expression=texts,
    kind=st.sampled_from(["TAG", "SQL92"]),
    queue_id=st.integers(0, 1000),
    offset=st.integers(0, 2**63 - 1),
    count=st.integers(1, 2**31 - 1),
    opaque=st.integers(0, 2**31 - 1),
)
def test_a_pull_is_what_the_ordinary_encoder_makes(
    group, topic, expression, kind, queue_id, offset, count, opaque
):
    header = PullMessageRequest(
        consumer_group=group,
        topic=topic,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=4,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription=expression,
        expression_type=kind,
        max_msg_bytes=ANSWER_BYTES,
    )
    pulls = Pulls(group, RangeFilter(expression, kind), None)

    encoded = pulls.encoded(Queue(topic, "broker-a", queue_id), offset, count, opaque)

    expected = Command.request(RequestCode.PULL_MESSAGE, header, opaque=opaque)
    assert encoded == encode_command(expected)


def test_pulls_are_signed():
    credentials = Credentials(access_key="reader", secret_key="not one")  # noqa: S106  # not one
    pulls = Pulls("readers", RangeFilter(), credentials)

    first = decoded(pulls.encoded(Queue("orders", "broker-a", 0), 5, 32, 1))
    second = decoded(pulls.encoded(Queue("orders", "broker-a", 0), 37, 32, 2))

    assert first.header(PullMessageRequest).queue_offset == 5
    assert second.header(PullMessageRequest).queue_offset == 37
    assert is_signed_by(first, "not one")
    assert is_signed_by(second, "not one")
