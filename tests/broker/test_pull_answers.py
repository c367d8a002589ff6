"""Answers to pulls, in however many pieces they are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.handlers.pull import CODES, PullAnswers
from orbitmq.store.read import ReadResult, ReadStatus
from orbitmq.wire.codes import EncodeError, RequestCode, Serialization
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import PullMessageResponse

KIB = 1024
LOG = memoryview(bytes(range(256)) * 4096)

int31 = st.integers(0, 2**31 - 1)
int63 = st.integers(0, 2**63 - 1)
sizes = st.lists(st.sampled_from([100, 1 * KIB, 20 * KIB, 90 * KIB]), max_size=12)


def found(sizes: list[int]) -> ReadResult:
    """A read that found messages of these sizes, each apart from the others."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(LOG[at : at + size])
        at = (at + size + 7) % (len(LOG) - 100 * KIB)
    return ReadResult(ReadStatus.FOUND, 9, 0, 9, len(sizes), sum(sizes), pieces)


def request(opaque: int = 1, serialization: Serialization = Serialization.JSON) -> Command:
    return Command.request(RequestCode.PULL_MESSAGE, opaque=opaque, serialization=serialization)


@given(
    status=st.sampled_from(ReadStatus),
    sizes=sizes,
    opaque=int31,
    place=st.tuples(int63, int63, int63, int63, int31, int31),
    serialization=st.sampled_from(Serialization),
    by_heap=st.booleans(),
)
def test_an_answer_says_the_same_in_any_number_of_pieces(
    status, sizes, opaque, place, serialization, by_heap
):
    answers, result = PullAnswers(), found(sizes)
    answers.by_heap = by_heap

    pieces = answers.make(
        request(opaque, serialization), CODES[status], status.value, place, result
    )

    (frame,) = FrameReader().feed(b"".join(pieces))
    answer = decode_command(frame)
    assert (answer.code, answer.opaque, answer.remark) == (CODES[status], opaque, status.value)
    assert answer.is_response
    assert bytes(answer.body) == b"".join(result.pieces)
    suggested, following, lowest, end, topic_flag, group_flag = place
    assert answer.header(PullMessageResponse) == PullMessageResponse(
        suggest_which_broker_id=suggested,
        next_begin_offset=following,
        min_offset=lowest,
        max_offset=end,
        topic_sys_flag=topic_flag,
        group_sys_flag=group_flag,
    )


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ([], [0]),
        # Few pieces, or long ones, are handed on as they are, behind the head.
        ([KIB], [0, KIB]),
        ([KIB, KIB, KIB], [0, KIB, KIB, KIB]),
        ([20 * KIB] * 5, [0] + [20 * KIB] * 5),
        # Many short ones become one with the head, or one block each that is not too large.
        ([KIB] * 32, [32 * KIB]),
        ([2 * KIB] * 100, [0, 96 * KIB, 96 * KIB, 8 * KIB]),
    ],
)
def test_short_pieces_are_joined_and_long_ones_are_not_copied(sizes, made):
    result = found(sizes)

    pieces = PullAnswers().make(request(), 0, "FOUND", (0, 9, 0, 9, 0, 0), result)

    head = b"".join(pieces)[: -sum(sizes) or None]
    assert [len(pieces[0]) - len(head), *map(len, pieces[1:])] == made
    for piece in pieces:
        is_as_found = any(piece is each for each in result.pieces)
        assert is_as_found is isinstance(piece, memoryview)


def test_an_answer_that_no_frame_can_take_is_refused():
    result = replace(found([KIB]), size=1 << 30)

    with pytest.raises(EncodeError, match="a frame may have"):
        PullAnswers().make(request(), 0, "FOUND", (0, 9, 0, 9, 0, 0), result)
