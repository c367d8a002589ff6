"""Answers to sends, whichever way they are made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.writes import BatchPlace, SendAnswers
from orbitmq.message.record import pack_host
from orbitmq.wire.codes import RequestCode, Serialization
from orbitmq.wire.command import Command, command_pieces, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import SendMessageResponse

ANSWERS = SendAnswers("DefaultRegion", pack_host("127.0.0.1", 10911), trace_on=True)

int31 = st.integers(0, 2**31 - 1)
int63 = st.integers(0, 2**63 - 1)
unique_ids = st.text("0123456789ABCDEF", min_size=1) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1
)


@given(opaque=int31, at=int63, queue_id=int31, number=int63, unique_id=unique_ids)
def test_the_quick_way_the_template_and_the_encoder_say_the_same(
    opaque, at, queue_id, number, unique_id
):
    place = (at, queue_id, number, unique_id)

    quick = ANSWERS.success(opaque, place)
    told = []
    for serialization in Serialization:
        request = Command.request(
            RequestCode.SEND_MESSAGE_V2, opaque=opaque, serialization=serialization
        )
        told.append(b"".join(ANSWERS.stored(0, request, place)))

    assert told[Serialization.JSON] == quick
    for frame in FrameReader().feed(b"".join((quick, *told))):
        answer = decode_command(frame)
        assert (answer.code, answer.opaque, answer.is_response) == (0, opaque, True)
        assert answer.header(SendMessageResponse) == SendMessageResponse(
            msg_id=f"7F00000100002A9F{at:016X}",
            queue_id=queue_id,
            queue_offset=number,
            transaction_id=unique_id,
            region="DefaultRegion",
            trace_on=True,
        )


@given(
    opaque=int31,
    offsets=st.lists(int63, min_size=1),
    queue_id=int31,
    number=int63,
    unique_id=st.none() | unique_ids,
)
def test_the_answer_to_a_batch_names_all_its_messages_whichever_way_it_is_made(
    opaque, offsets, queue_id, number, unique_id
):
    place = BatchPlace(offsets, queue_id, number, unique_id)
    wanted = SendMessageResponse(
        msg_id=",".join(f"7F00000100002A9F{at:016X}" for at in offsets),
        queue_id=queue_id,
        queue_offset=number,
        transaction_id=unique_id,
        region="DefaultRegion",
        trace_on=True,
    )

    for serialization in Serialization:
        request = Command.request(
            RequestCode.SEND_BATCH_MESSAGE, opaque=opaque, serialization=serialization
        )
        told = b"".join(ANSWERS.stored(0, request, place))

        assert told == b"".join(command_pieces(request.answer(0, wanted)))
