"""Memory for answers: no piece is overwritten while somebody has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.read import ReceiveBuffer


def test_pieces_lie_side_by_side_until_all_were_given_back():
    memory = ReceiveBuffer(100)
    first, second = memory.room(40), memory.room(30)
    first[:], second[:] = b"a" * 40, b"b" * 30

    memory.release([first])
    third = memory.room(30)
    third[:] = b"c" * 30
    assert bytes(second) == b"b" * 30

    memory.release([second, third])
    assert memory.is_unused
    again = memory.room(100)
    assert bytes(again[:40]) == b"a" * 40
    assert bytes(again[40:70]) == b"b" * 30


def test_what_does_not_fit_has_memory_of_its_own():
    memory = ReceiveBuffer(10)

    large = memory.room(11)
    memory.release([large, b"from elsewhere", memoryview(b"too")])

    assert len(large) == 11
    assert memory.is_unused


@given(
    size=st.integers(0, 50),
    steps=st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40),
    chance=st.randoms(use_true_random=False),
)
def test_pieces_keep_their_content(size, steps, chance):
    memory = ReceiveBuffer(size)
    held: list[tuple[memoryview, bytes]] = []

    for number, (length, gives_back) in enumerate(steps):
        piece, content = memory.room(length), bytes([number]) * length
        piece[:] = content
        held.append((piece, content))
        if gives_back:
            memory.release([held.pop(chance.randrange(len(held)))[0]])
        assert all(bytes(piece) == content for piece, content in held)
